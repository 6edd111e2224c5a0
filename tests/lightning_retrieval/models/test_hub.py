"""An embedder comes back exactly from its files, without a network; errors of files and of the hub are sentences."""

import json
import stat

import pytest
import torch
from torch import nn

from lightning_retrieval import Embedder
from lightning_retrieval.models import pretrained

pytest.importorskip("safetensors")


def new_embedder():
    torch.manual_seed(0)
    settings = {"pooling": "avg", "layer_norm": True, "freeze_batch_norm": True, "image_size": 64}
    return Embedder("squeezenet1_1", 12, **settings).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "new" / "folder"
    embedder = new_embedder()
    embedder.weights = "IMAGENET1K_V1"  # as after a training that began with these
    embedder.save_pretrained(folder)
    return folder, embedder


def test_the_round_trip_is_exact_and_downloads_nothing(saved, monkeypatch):
    def download(*args, **keywords):
        raise AssertionError("the weights are in the folder")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    folder, embedder = saved
    loaded = Embedder.from_pretrained(folder)
    assert not loaded.training
    assert loaded.init_args() == embedder.init_args()
    assert loaded.preparation == embedder.preparation
    assert loaded.preparation.image_size == 64
    state, expected = loaded.state_dict(), embedder.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images), embedder(images))


def test_files_can_be_read_by_others_and_replaced(saved, tmp_path):
    folder, _ = saved
    (tmp_path / "plain").write_text("a file like any other")
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "config.json": usual,
        "model.safetensors": usual,
    }
    for seed in (0, 1):
        torch.manual_seed(seed)
        other = Embedder("glyph_net", 8)
        other.save_pretrained(tmp_path / "m")
    assert torch.equal(Embedder.from_pretrained(str(tmp_path / "m")).head.linear.weight, other.head.linear.weight)


def test_a_model_of_the_hub_is_read_from_its_cache_and_pushed(saved, monkeypatch):
    library = pytest.importorskip("huggingface_hub")
    folder, embedder = saved
    pushed = {}

    def upload(repo_id, folder_path, commit_message):
        pushed.update(repo_id=repo_id, files=sorted(path.name for path in folder_path.iterdir()))
        return "https://hub/commit"

    asked = []

    def download(name, file, revision):
        asked.append((name, file, revision))
        return str(folder / file)

    monkeypatch.setattr(library, "create_repo", lambda repo_id, private, exist_ok: pushed.update(private=private))
    monkeypatch.setattr(library, "upload_folder", upload)
    monkeypatch.setattr(library, "hf_hub_download", download)
    assert embedder.push_to_hub("me/birds") == "https://hub/commit"
    files = ["config.json", "model.safetensors"]
    assert pushed == {"repo_id": "me/birds", "files": files, "private": False}
    embedder.push_to_hub("me/birds", private=True)
    assert pushed["private"] is True
    loaded = Embedder.from_pretrained("me/birds", revision="v1")
    assert torch.equal(loaded.head.linear.weight, embedder.head.linear.weight)
    assert asked == [("me/birds", "config.json", "v1"), ("me/birds", "model.safetensors", "v1")]


def test_saving_leaves_the_adapters_of_the_embedder_as_they_are(tmp_path):
    pytest.importorskip("timm")
    pytest.importorskip("peft")
    small = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    embedder = Embedder("timm/vit_tiny_patch16_224", 8, lora=2, image_size=32, backbone_args=small)
    names = list(embedder.state_dict())
    embedder.save_pretrained(tmp_path)
    assert embedder.lora is not None
    assert list(embedder.state_dict()) == names
    assert Embedder.from_pretrained(tmp_path).lora is None


def test_tensors_that_share_memory_are_written(tmp_path):
    module = nn.Module()
    module.register_buffer("values", torch.arange(6.0).reshape(2, 3))
    module.register_buffer("transposed", module.values.T)
    pretrained.save_model("Embedder", tmp_path, {}, module)
    module.values = torch.zeros(2, 3)
    module.transposed = torch.zeros(3, 2)
    pretrained.load_weights("Embedder", tmp_path / "model.safetensors", module)
    assert module.values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert module.transposed.equal(module.values.T)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"config\.json must hold arguments that this release .* got others \(.* argument: 'backbone'\)"),
        ({"backbone": "glyph_net", "newer": 1}, r"must hold arguments that .* unexpected keyword argument 'newer'\)"),
        ([1], r"config\.json must be the config of an Embedder \(version 1\), .* got something else"),
        (None, r"config\.json must be the config of an Embedder \(version 1\), .* got something else"),
    ],
)
def test_invalid_arguments_in_a_config(arguments, message, tmp_path):
    config = {"format": pretrained.FORMAT, "version": pretrained.VERSION, "init_args": arguments}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        Embedder.from_pretrained(tmp_path)


@pytest.mark.refusal
def test_invalid_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(ValueError, match=r"^Embedder: `folder` must be a folder, got .*, which is a file or is in"):
            Embedder("glyph_net", 8).save_pretrained(folder)


@pytest.mark.refusal
def test_mistakes_raise_one_sentence(saved, tmp_path, monkeypatch):
    folder, _ = saved
    with pytest.raises(ValueError, match=r"^Embedder: `backbone` must be a name, so that .* got a module \(Flatten\)"):
        Embedder(nn.Flatten(), 4, feature_dim=12, pooling="avg").save_pretrained(tmp_path / "m")
    (tmp_path / "config.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(
        FileNotFoundError, match=r"^Embedder: .* must hold config.json and model.safetensors, but model"
    ):
        Embedder.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"^Embedder: .*config\.json must be the config of an Embedder \(version 1\)"):
        Embedder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(
        ValueError, match=r"^Embedder: .*model\.safetensors must hold the weights of its config's model"
    ):
        Embedder.from_pretrained(tmp_path)

    class Unreachable:
        def __getattr__(self, name):
            raise OSError("no network\nat all")

    monkeypatch.setattr(pretrained, "load_hub", lambda owner: Unreachable())
    with pytest.raises(
        FileNotFoundError, match=r"^Embedder: `name` must be a folder .* got 'me/x' \(no network\); with"
    ):
        Embedder.from_pretrained("me/x")
    with pytest.raises(
        ConnectionError, match=r"^Embedder: the hub must be reachable .* 'me/x', got an error \(no networ"
    ):
        new_embedder().push_to_hub("me/x")
