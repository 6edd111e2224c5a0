"""Local files of weights, and the errors for weights that cannot be loaded."""

import pickle

import pytest
import torch
from torchvision.models import get_model

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.pretrained import (
    are_skipped,
    is_local_file,
    is_rebuilding,
    read_weights,
    with_pretrained_weights,
    without_pretrained_weights,
)


def test_what_is_a_local_file(tmp_path):
    (tmp_path / "weights").write_bytes(b"")
    assert is_local_file(str(tmp_path / "weights"))
    assert is_local_file("nowhere/model.safetensors")
    assert not is_local_file("lvd142m")
    assert not is_local_file(None)


def test_the_home_folder_of_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    torch.save({"a": torch.ones(2)}, tmp_path / "weights")
    assert is_local_file("~/weights")
    assert read_weights("~/weights")["a"].equal(torch.ones(2))


def test_weights_are_skipped_only_inside():
    with without_pretrained_weights():
        assert are_skipped()
        with with_pretrained_weights():
            assert (are_skipped(), is_rebuilding()) == (False, True)
    assert (are_skipped(), is_rebuilding()) == (False, False)


@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_files_of_torch(tmp_path, key):
    weights = {"a": torch.ones(2), "step": 3}
    torch.save({key: weights} if key else weights, tmp_path / "w.pth")
    found = read_weights(str(tmp_path / "w.pth"))
    assert list(found) == ["a"]
    assert found["a"].equal(weights["a"])


def test_files_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    assert read_weights(str(tmp_path / "w.safetensors"))["a"].equal(torch.ones(2))


@pytest.mark.refusal
def test_invalid_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`weights` must be a file of weights, got .*none.pth, which does not"):
        Embedder("resnet18", weights=str(tmp_path / "none.pth"))
    (tmp_path / "code.pth").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"`weights` must be a file of safetensors or of torch.save with tensors only"):
        Embedder("resnet18", weights=str(tmp_path / "code.pth"))
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"`weights` must be a file of tensors by name, got .*list.pth"):
        Embedder("resnet18", weights=str(tmp_path / "list.pth"))
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(
        ValueError, match=r"`weights` must be a file with the weights of this backbone, got .*other.pth"
    ):
        Embedder("resnet18", weights=str(tmp_path / "other.pth"))


@pytest.mark.refusal
@pytest.mark.parametrize("backbone", ["resnet18", "timm/resnet18"])
def test_invalid_file_whose_tensors_are_in_an_unknown_entry(tmp_path, backbone):
    """timm takes no tensors as the wish for those of its hub."""
    torch.save({"teacher": get_model("resnet18").state_dict(), "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"^Embedder: `weights` .*w.pth, which has none, but the entries epoch, tea"):
        Embedder(backbone, 8, weights=str(tmp_path / "w.pth"))


@pytest.mark.parametrize("prefix", ["module.", "model.", "backbone.", "_orig_mod.model.backbone."])
def test_prefixes_of_names_are_removed_with_what_is_not_of_the_backbone(tmp_path, prefix):
    state = get_model("squeezenet1_1").state_dict()
    torch.save(
        {**{f"{prefix}{name}": value for name, value in state.items()}, "loss.weight": torch.ones(2)},
        tmp_path / "w.pth",
    )
    loaded = Embedder("squeezenet1_1", 8, weights=str(tmp_path / "w.pth")).backbone.state_dict()
    assert all(value.equal(state[name]) for name, value in loaded.items())


@pytest.mark.refusal
@pytest.mark.parametrize("missing", ["layer4.1.bn2.running_var", "layer4.1.conv2.weight", "bn1.bias"])
def test_invalid_file_without_one_tensor(tmp_path, missing):
    state = get_model("resnet18").state_dict()
    del state[missing], state["bn1.num_batches_tracked"]  # the second one is only counted
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(
        ValueError, match=rf"`weights` must be .*part.pth, loaded 99 of 100 tensors; it has no {missing}"
    ):
        Embedder("resnet18", weights=str(tmp_path / "part.pth"))


@pytest.mark.refusal
def test_invalid_file_of_a_deeper_network(tmp_path):
    torch.save(get_model("resnet34").state_dict(), tmp_path / "deep.pth")
    with pytest.raises(
        ValueError, match=r"`weights` must be .* of this backbone, got .*deep.pth, which has 80 tensors"
    ):
        Embedder("resnet18", weights=str(tmp_path / "deep.pth"))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("backbone", "arguments", "named"),
    [
        ("timm/resnet18", {"pretrained_cfg_overlay": {"file": "x.pth"}}, "pretrained_cfg_overlay"),
        ("timm/resnet18", {"pretrained_cfg": "a1_in1k"}, "pretrained_cfg"),
        ("timm/resnet18", {"checkpoint_path": "x.pth"}, "checkpoint_path"),
        ("timm/resnet18", {"cache_dir": "x"}, "cache_dir"),
        ("hf/a/b", {"model_type": "vit", "auto_map": {"AutoModel": "a.B"}}, "auto_map"),
        ("hf/a/b", {"model_type": "vit", "attn_implementation": "a/b"}, "attn_implementation"),
        ("hf/a/b", {"model_type": "timm_wrapper", "architecture": "hf-hub:a/b"}, "hf-hub:a/b"),
        ("hf/a/b", {"model_type": "clip", "vision_config": {"x": ["https://a.b/c"]}}, "https://a.b/c"),
    ],
)
def test_invalid_arguments_of_a_file_that_would_fetch_something(backbone, arguments, named):
    with without_pretrained_weights(), pytest.raises(ValueError, match=rf"^Embedder: .*{named}"):
        Embedder(backbone, 8, backbone_args=arguments)
