"""Checkpoints of adapters are small, and give the same model again."""

import copy
import functools
import socket
import time

import pytest
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.models import AdaptedEmbedder
from tests.lightning_retrieval.models.hugging_face_folders import SMALL
from tests.lightning_retrieval.search.commands.glyph_commands import save_checkpoint
from tests.lightning_retrieval.training.small_training import Log, fit, trainer

timm = pytest.importorskip("timm")
pytest.importorskip("peft")
VIT = {"depth": 2, "embed_dim": 48, "num_heads": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A local file of weights, which stands for those of a hub."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "vit.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=32, **VIT).state_dict(), path)
    return str(path)


def images(steps=2):
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, 3, 32, 32, generator=generator), torch.tensor([0, 0, 1, 1, 2, 2])) for _ in range(steps)]


def make_module(weights, chunk_size=None):
    torch.manual_seed(1)
    embedder = Embedder(
        "timm/vit_tiny_patch16_224",
        8,
        weights=weights,
        image_size=32,
        backbone_args=VIT,
        lora={"r": 4, "lora_alpha": 16},
    )
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    return RetrievalModule(embedder, SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=optimizer, seed=0)


def saved(module, folder):
    run = fit(module, images())
    run.save_checkpoint(folder / "m.ckpt")
    return folder / "m.ckpt"


def assert_same_state(module, expected, atol=0.0):
    found = module.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


@pytest.fixture(scope="module")
def adapters(weights, tmp_path_factory):
    """A module with adapters that has been trained, and its checkpoint."""
    module = make_module(weights)
    return module, saved(module, tmp_path_factory.mktemp("adapters"))


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
def test_a_checkpoint_holds_no_frozen_weights_and_gives_the_same_model_again(adapters):
    module, path = adapters
    names = torch.load(path, weights_only=True)["state_dict"]
    of_backbone = {name for name in names if name.startswith("embedder.backbone")}
    assert of_backbone == {name for name in module.state_dict() if "lora_" in name}
    again = RetrievalModule.load_from_checkpoint(path, weights_only=True)
    assert_same_state(again, module)
    assert any(value.abs().max() > 0 for name, value in again.state_dict().items() if "lora_B" in name)


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
def test_a_checkpoint_holds_the_frozen_adapters_below_a_new_head(adapters, tmp_path):
    embedder = copy.deepcopy(adapters[0].embedder)
    module = RetrievalModule(AdaptedEmbedder(embedder, from_dim=8, embedding_dim=4), SmoothAPLoss())
    path = save_checkpoint(tmp_path / "m.ckpt", module)
    names = torch.load(path, weights_only=True)["state_dict"]
    of_backbone = {name for name in names if name.startswith("embedder.embedder.backbone")}
    assert of_backbone == {name for name in module.state_dict() if "lora_" in name}
    assert_same_state(RetrievalModule.load_from_checkpoint(path, weights_only=True), module)


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
def test_without_named_weights_the_frozen_ones_are_in_the_checkpoint(tmp_path):
    module = make_module(None)
    assert_same_state(RetrievalModule.load_from_checkpoint(saved(module, tmp_path), weights_only=True), module)


@pytest.mark.parametrize("callbacks", [(), (EMAWeightAveraging,)], ids=["plain", "averaged"])
def test_a_resumed_run_is_the_same(weights, tmp_path, callbacks):
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    whole = make_module(weights)
    made = [callback() for callback in callbacks]
    fit(whole, images(), max_epochs=3, callbacks=[*made, checkpoints], enable_checkpointing=True)
    resumed, path = make_module(weights), tmp_path / "epoch=0.ckpt"
    run = trainer(max_epochs=3, callbacks=[callback() for callback in callbacks])
    run.fit(resumed, torch.utils.data.DataLoader(images(), batch_size=None), ckpt_path=path, weights_only=True)
    assert_same_state(resumed, whole, atol=1e-5)


def test_chunked_equals_whole(weights):
    runs = []
    for chunk_size in (3, None):
        module, log = make_module(weights, chunk_size=chunk_size), Log()
        fit(module, images(), callbacks=[log])
        runs.append((log.losses, module))
    (losses, module), (expected_losses, expected) = runs
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert_same_state(module, expected, atol=1e-5)


def test_the_size_of_the_checkpoint_of_vit_tiny(tmp_path):
    """The model is 22 MB: at most 1/20 of it without the optimizer's state, which grows with the head."""
    path = tmp_path / "vit.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=32).state_dict(), path)
    embedder = Embedder("timm/vit_tiny_patch16_224", 128, weights=str(path), image_size=32, lora=8)
    model = sum(value.numel() * value.element_size() for value in embedder.state_dict().values())
    run = fit(RetrievalModule(embedder, SmoothAPLoss()), images(1))
    run.save_checkpoint(tmp_path / "resume.ckpt")
    run.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert (tmp_path / "model.ckpt").stat().st_size <= model / 20
    assert (tmp_path / "resume.ckpt").stat().st_size <= model / 10


@pytest.mark.refusal
def test_adapters_are_loaded_with_the_weights_that_they_adapt_only(adapters, weights, tmp_path):
    _, path = adapters
    state = torch.load(weights, weights_only=True)
    torch.save({name: 2 * value for name, value in state.items()}, tmp_path / "other.pth")
    for embedder in (make_module(str(tmp_path / "other.pth")).embedder, Embedder("glyph_net", 8)):
        with pytest.raises(ValueError, match=r"^RetrievalModule: the checkpoint"):
            RetrievalModule.load_from_checkpoint(path, weights_only=True, embedder=embedder)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """No socket can be opened, no cache has weights, and nobody waits to try again; the list of what was tried."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    tried = []

    def refused(*args, **kwargs):
        tried.append(args)
        raise OSError("no network")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refused)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "empty"))
    return tried


def other_weights_of_timm(*args, **kwargs):
    return timm.create_model("vit_tiny_patch16_224", img_size=32, **VIT).state_dict()


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
@pytest.mark.parametrize(
    ("backbone", "arguments", "lora"),
    [
        ("timm/vit_tiny_patch16_224", {**VIT, "pretrained": True}, 2),
        ("squeezenet1_1", {}, None),
        ("hf/google/some-model", {"model_type": "vit", **SMALL}, None),
    ],
)
def test_a_checkpoint_of_pretrained_weights_is_loaded_without_a_network(
    backbone, arguments, lora, weights, tmp_path, monkeypatch, no_network
):
    with monkeypatch.context() as patched:
        patched.setattr(timm.models._builder, "load_state_dict_from_hf", other_weights_of_timm)
        embedder = Embedder(backbone, 8, image_size=32, backbone_args=arguments, lora=lora)
    embedder.weights = "DEFAULT"  # as after a training that began with these
    if lora is not None:  # whose frozen weights are in the checkpoint
        embedder.weights = None
    path = save_checkpoint(tmp_path / "m.ckpt", RetrievalModule(embedder, SmoothAPLoss()))
    again = RetrievalModule.load_from_checkpoint(path, weights_only=True)
    assert_same_state(again.embedder, embedder)
    assert no_network == []


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
@pytest.mark.parametrize("named", ["file", "DEFAULT"])
def test_adapters_get_the_weights_of_a_file_or_a_tag_again(named, adapters, weights, tmp_path, monkeypatch, no_network):
    def of_the_hub(*args, **kwargs):
        return torch.load(weights, weights_only=True)

    _, path = adapters
    if named == "DEFAULT":
        content = torch.load(path, weights_only=True)
        content["hyper_parameters"]["embedder"]["init_args"]["weights"] = named
        path = tmp_path / "tag.ckpt"
        torch.save(content, path)
        with pytest.raises(ValueError, match="'DEFAULT'"):
            RetrievalModule.load_from_checkpoint(path, weights_only=True)
        assert no_network
        monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", of_the_hub)
    again = RetrievalModule.load_from_checkpoint(path, weights_only=True).embedder.backbone.model
    assert again.blocks[0].mlp.fc1.weight.equal(of_the_hub()["blocks.0.mlp.fc1.weight"])
