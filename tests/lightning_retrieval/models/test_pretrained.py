"""Local files of weights, and the errors for weights that cannot be loaded."""

import pickle

import pytest
import torch

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.pretrained import are_skipped, is_local_file, read_weights, without_pretrained_weights


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
    assert read_weights("Owner", "~/weights")["a"].equal(torch.ones(2))


def test_weights_are_skipped_only_inside():
    with without_pretrained_weights():
        assert are_skipped()
    assert not are_skipped()


@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_files_of_torch(tmp_path, key):
    weights = {"a": torch.ones(2), "step": 3}
    torch.save({key: weights} if key else weights, tmp_path / "w.pth")
    found = read_weights("Owner", str(tmp_path / "w.pth"))
    assert list(found) == ["a"]
    assert found["a"].equal(weights["a"])


def test_files_of_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    assert read_weights("Owner", str(tmp_path / "w.safetensors"))["a"].equal(torch.ones(2))


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
