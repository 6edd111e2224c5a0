"""Weights: of local files, skipped while a file is loaded, and those of an embedder's own folder."""

import argparse
import json
import pickle
import socket
import stat
import time

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model

from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.models import Embedder, pretrained
from lightning_retrieval.models.pretrained import (
    are_skipped,
    is_rebuilding,
    read_weights,
    with_pretrained_weights,
    without_pretrained_weights,
)


@pytest.fixture(scope="module")
def safetensors():
    return pytest.importorskip("safetensors.torch")


def test_weights_are_skipped_only_inside():
    with without_pretrained_weights():
        assert are_skipped()
        with with_pretrained_weights():
            assert (are_skipped(), is_rebuilding()) == (False, True)
    assert (are_skipped(), is_rebuilding()) == (False, False)


@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_files_of_torch(tmp_path, key, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = {"a": torch.ones(2), "step": 3}
    torch.save({key: weights} if key else weights, tmp_path / "weights")
    assert is_local_file("~/weights")
    found = read_weights("~/weights")
    assert list(found) == ["a"]
    assert found["a"].equal(weights["a"])


def test_files_of_safetensors(tmp_path, safetensors):
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    assert read_weights(str(tmp_path / "w.safetensors"))["a"].equal(torch.ones(2))


@pytest.mark.refusal
def test_invalid_files(tmp_path):
    deeper = {**get_model("squeezenet1_1").state_dict(), "features.13.weight": torch.ones(2)}
    part = get_model("shufflenet_v2_x0_5").state_dict()
    del part["conv1.1.running_var"], part["conv1.1.num_batches_tracked"]  # the second one is only counted
    unknown = {"teacher": {"a": 2}, "epoch": 3}
    no_weights = r"`weights` .*w\.pth"
    no_entry = r"`weights` .*w\.pth, which has none, but the entries epoch, tea"
    for backbone, content, message in (
        ("squeezenet1_1", [1], no_weights),
        ("squeezenet1_1", {"a": torch.ones(2)}, no_weights),
        ("squeezenet1_1", unknown, no_entry),
        ("timm/test_resnet", unknown, no_entry),  # timm takes no tensors as the wish for those of its hub
        ("squeezenet1_1", deeper, r"`weights` .*w\.pth, which has 1 more tensors"),
        ("shufflenet_v2_x0_5", part, r"`weights` .*w\.pth, loaded .*; it has no conv1\.1\.running_var"),
    ):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(ValueError, match=f"^Embedder: {message}"):
            Embedder(backbone, 8, weights=str(tmp_path / "w.pth"))
    (tmp_path / "w.pth").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=f"^Embedder: {no_weights}"):
        Embedder("squeezenet1_1", weights=str(tmp_path / "w.pth"))
    with pytest.raises(FileNotFoundError, match=r"^Embedder: `weights` must be .*none.pth, which does not exist"):
        Embedder("squeezenet1_1", weights=str(tmp_path / "none.pth"))
    (tmp_path / "folder.pth").mkdir()
    with pytest.raises(FileNotFoundError, match=r"^Embedder: `weights` must be .*folder.pth, which is a folder\.$"):
        Embedder("squeezenet1_1", weights=str(tmp_path / "folder.pth"))


def named(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


def others(state):
    """A network of the same names with other values."""
    return {name: value + 1 for name, value in state.items()}


def in_sequence(network):
    """The weights without the head."""
    return nn.Sequential(*list(network.children())[:-1]).state_dict()


# The structure of files of other programs, with their heads, optimizers and settings.
PROGRAMS = {
    "MoCo": lambda network, state: {
        "arch": "resnet18",
        "optimizer": {"state": {}, "param_groups": []},
        "state_dict": {
            **named(state, "module.encoder_q."),
            **named(others(state), "module.encoder_k."),
            "module.encoder_q.fc.0.weight": torch.ones(2, 2),
            "module.queue": torch.ones(2, 2),
        },
    },
    "MoCo v3": lambda network, state: {
        "state_dict": {
            **named(others(state), "module.momentum_encoder."),
            **named(state, "module.base_encoder."),
            "module.predictor.0.weight": torch.ones(2),
        }
    },
    "DINO": lambda network, state: {
        "student": named(others(state), "module.backbone."),
        "teacher": {**named(state, "backbone."), "head.mlp.0.weight": torch.ones(2)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
        "args": argparse.Namespace(arch="resnet18"),
    },
    "fast-reid": lambda network, state: {
        "model": {**named(state, "backbone."), "heads.weight": torch.ones(2), "pixel_mean": torch.ones(1)},
        "iteration": 9,
    },
    "deep-person-reid": lambda network, state: {
        "state_dict": {**state, "classifier.weight": torch.ones(2)},
        "rank1": np.float64(0.88),
        "epoch": 60,
    },
    "reid-strong-baseline": lambda network, state: {**named(state, "base."), "bottleneck.weight": torch.ones(2)},
    "cnnimageretrieval-pytorch": lambda network, state: {
        "meta": {"architecture": "resnet18", "pooling": "gem"},
        "state_dict": {**named(in_sequence(network), "features."), "pool.p": torch.ones(1)},
    },
    "CosPlace": lambda network, state: {**named(in_sequence(network), "backbone."), "aggregation.1.p": torch.ones(1)},
    "ROADMAP": lambda network, state: {"net_state": named(state, "backbone."), "config": {"lr": 0.1}},
}


@pytest.mark.parametrize(
    ("backbone", "make"), [("shufflenet_v2_x0_5", get_model), ("timm/test_resnet", timm.create_model)]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_files_of_other_programs(backbone, make, program, tmp_path):
    """Of two networks in a file, the one is read that the program itself evaluates."""
    network = make(backbone.removeprefix("timm/"))
    state = {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}
    torch.save(PROGRAMS[program](network, state), tmp_path / "w.pth")
    module = Embedder(backbone, 8, weights=str(tmp_path / "w.pth")).backbone
    loaded = getattr(module, "model", module).state_dict()
    assert loaded.keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in loaded.items())


@pytest.mark.refusal
@pytest.mark.parametrize("backbone", ["squeezenet1_1", "timm/test_resnet"])
def test_a_file_of_two_networks_of_which_none_is_known_as_the_evaluated_one(backbone, tmp_path):
    state = Embedder(backbone, 8).backbone.state_dict()
    state = {name.removeprefix("model."): value for name, value in state.items()}
    torch.save({"a": named(state, "net."), "b": named(others(state), "net.")}, tmp_path / "w.pth")
    got = r"w\.pth, which has those of 2, whose names begin with a\.net\., b\.net\.; write the state_dict of one to"
    with pytest.raises(ValueError, match=rf"^Embedder: `weights` must be .* of one network, got .*{got}"):
        Embedder(backbone, 8, weights=str(tmp_path / "w.pth"))


@pytest.mark.refusal
def test_the_names_in_a_file_of_another_network_are_shown(tmp_path):
    torch.save({"stem.a": torch.ones(2), "stem.b": torch.ones(2)}, tmp_path / "w.pth")
    for backbone in ("squeezenet1_1", "timm/test_resnet"):
        with pytest.raises(ValueError, match=r"loaded 0 of \d+ tensors; it has no .*, but stem\.a, stem\.b\.$"):
            Embedder(backbone, 8, weights=str(tmp_path / "w.pth"))


@pytest.mark.hostile
@pytest.mark.refusal
def test_an_object_in_a_file_is_named_in_one_sentence(tmp_path, users_folder):
    """The message of torch has escape sequences, and advises to trust the file."""
    torch.save(get_model("squeezenet1_1"), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it holds torchvision\.\S+\.SqueezeNet, which .*; write the state") as caught:
        Embedder("squeezenet1_1", 8, weights=str(tmp_path / "w.pth"))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("backbone", ["squeezenet1_1", "timm/test_resnet"])
def test_complex_weights_are_refused(backbone, tmp_path):
    state = Embedder(backbone, 8).backbone.state_dict()
    name = next(iter(state))
    torch.save({**state, name: state[name].to(torch.complex64)}, tmp_path / "w.pth")
    rule = r"`weights` must be a file whose tensors are of real numbers, got .*w\.pth with torch\.complex64"
    with pytest.raises(ValueError, match=rf"^Embedder: {rule} \({name}\)\.$"):
        Embedder(backbone, 8, weights=str(tmp_path / "w.pth"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backbone", ["squeezenet1_1", "timm/test_resnet", "shufflenet_v2_x0_5"])
def test_parameters_are_float32_whatever_the_type_in_a_file_is(backbone, dtype, tmp_path):
    state = Embedder(backbone, 8).backbone.to(dtype).state_dict()
    torch.save(state, tmp_path / "w.pth")
    found = Embedder(backbone, 8, weights=str(tmp_path / "w.pth")).backbone.state_dict()
    assert {value.dtype for value in found.values()} <= {torch.float32, torch.int64}
    assert all(value.equal(state[name].to(value.dtype)) for name, value in found.items())


@pytest.mark.refusal
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("backbone", ["squeezenet1_1", "timm/test_resnet"])
def test_a_file_of_quantised_weights(backbone, dtype, tmp_path):
    """Without their scales, such numbers would be loaded as wrong weights."""
    state = Embedder(backbone, 8).backbone.state_dict()
    torch.save({name: value.to(dtype) for name, value in state.items()}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=rf"^Embedder: `weights` .* not quantised, got .*w\.pth with {dtype}"):
        Embedder(backbone, 8, weights=str(tmp_path / "w.pth"))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.model.backbone."])
def test_prefixes_of_names_are_removed_with_what_is_not_of_the_backbone(tmp_path, prefix):
    state = get_model("squeezenet1_1").state_dict()
    named = {f"{prefix}{name}": value for name, value in state.items()}
    torch.save({**named, "loss.weight": torch.ones(2)}, tmp_path / "w.pth")
    embedder = Embedder("squeezenet1_1", 8, weights=str(tmp_path / "w.pth"))
    assert all(value.equal(state[name]) for name, value in embedder.backbone.state_dict().items())
    assert embedder.init_args()["weights"] is None


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("backbone", "arguments", "named"),
    [
        ("timm/test_resnet", {"pretrained_cfg_overlay": {"file": "x.pth"}}, "pretrained_cfg_overlay"),
        ("timm/test_resnet", {"pretrained_cfg": "a1_in1k"}, "pretrained_cfg"),
        ("timm/test_resnet", {"checkpoint_path": "x.pth"}, "checkpoint_path"),
        ("timm/test_resnet", {"cache_dir": "x"}, "cache_dir"),
        ("hf/a/b", {"model_type": "vit", "auto_map": {"AutoModel": "a.B"}}, "auto_map"),
        ("hf/a/b", {"model_type": "vit", "attn_implementation": "a/b"}, "attn_implementation"),
        ("hf/a/b", {"model_type": "timm_wrapper", "architecture": "hf-hub:a/b"}, "hf-hub:a/b"),
        ("hf/a/b", {"model_type": "clip", "vision_config": {"x": ["https://a.b/c"]}}, "https://a.b/c"),
    ],
)
def test_invalid_arguments_of_a_file_that_would_fetch_something(backbone, arguments, named):
    with without_pretrained_weights(), pytest.raises(ValueError, match=rf"^Embedder: .*{named}"):
        Embedder(backbone, 8, backbone_args=arguments)


def new_embedder():
    torch.manual_seed(0)
    settings = {"pooling": "avg", "layer_norm": True, "freeze_batch_norm": True, "image_size": 64}
    return Embedder("squeezenet1_1", 12, **settings).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, safetensors):
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


def test_saving_leaves_the_adapters_of_the_embedder_as_they_are(tmp_path, safetensors):
    pytest.importorskip("peft")
    small = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    embedder = Embedder("timm/vit_tiny_patch16_224", 8, lora=2, image_size=32, backbone_args=small)
    names = list(embedder.state_dict())
    embedder.save_pretrained(tmp_path)
    assert embedder.lora is not None
    assert list(embedder.state_dict()) == names
    assert Embedder.from_pretrained(tmp_path).lora is None


def test_tensors_that_share_memory_are_written(tmp_path, safetensors):
    embedder = Embedder("glyph_net", 8)
    norm = embedder.backbone.layers[1]
    norm.running_mean = norm.running_var  # safetensors rejects tensors of one storage
    embedder.save_pretrained(tmp_path)
    loaded = Embedder.from_pretrained(tmp_path).backbone.layers[1]
    assert torch.equal(loaded.running_mean, norm.running_var)
    assert torch.equal(loaded.running_var, norm.running_var)


@pytest.mark.refusal
def test_invalid_folders(saved, tmp_path):
    valid = json.loads((saved[0] / "config.json").read_text())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^Embedder: `backbone` must be a name, so that .* got a module \(Flatten\)"):
        Embedder(nn.Flatten(), 4, feature_dim=12, pooling="avg").save_pretrained(tmp_path / "m")
    for folder in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(ValueError, match=r"^Embedder: `folder` must be a folder, got .*, which is a file or is in"):
            Embedder("glyph_net", 8).save_pretrained(folder)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"^Embedder: .* must hold config.json and model.safetensors, but mod"):
        Embedder.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved[0] / "model.safetensors").read_bytes()[:-8])
    for config, message in (
        ({"format": "other"}, r"config\.json must be the config of an Embedder \(version 1\)"),
        ({**valid, "init_args": [1]}, r"config\.json must be the config of an Embedder"),
        ({**valid, "init_args": {}}, r"config\.json must hold arguments that .* argument: 'backbone'"),
        ({**valid, "init_args": {"backbone": "glyph_net", "newer": 1}}, r"config\.json must .* argument 'newer'"),
        (valid, r"model\.safetensors must hold the weights of its config's model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"^Embedder: .*{message}"):
            Embedder.from_pretrained(tmp_path)


@pytest.mark.refusal
def test_a_config_that_was_changed_by_hand_is_answered_by_a_cure(tmp_path, safetensors):
    Embedder("glyph_net", 8, image_size=32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["init_args"]["pooling"] = "max"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"If you have changed config\.json yourself, .*load_state_dict"):
        Embedder.from_pretrained(tmp_path)
    changed = Embedder(**config["init_args"])
    changed.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), strict=False)
    changed.save_pretrained(tmp_path)
    assert Embedder.from_pretrained(tmp_path).init_args()["pooling"] == "max"


@pytest.mark.refusal
def test_the_model_of_another_program_is_not_replaced(tmp_path, safetensors):
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text('{"model_type": "bert"}')
    weights.write_bytes(b"weights of another program")
    with pytest.raises(ValueError, match=r"^Embedder: `folder` must be .*, whose config\.json is of another program"):
        Embedder("glyph_net", 8).save_pretrained(tmp_path)
    assert (config.read_text(), weights.read_bytes()) == ('{"model_type": "bert"}', b"weights of another program")
    config.write_text('{"format": "lightning-retrieval emb')  # damaged: what is saved again replaces it
    Embedder("glyph_net", 8).save_pretrained(tmp_path)
    assert Embedder.from_pretrained(tmp_path).embedding_dim == 8


@pytest.mark.refusal
@pytest.mark.parametrize("mixed", ["config.json", "model.safetensors"])
def test_files_of_two_models_are_not_loaded_together(mixed, tmp_path, safetensors):
    for name, pooling in (("a", "avg"), ("b", "gem")):
        Embedder("glyph_net", 8, pooling=pooling, image_size=32).save_pretrained(tmp_path / name)
    (tmp_path / "a" / mixed).write_bytes((tmp_path / "b" / mixed).read_bytes())
    with pytest.raises(ValueError, match=r"^Embedder: .*model\.safetensors must be of the model that .*config\.json"):
        Embedder.from_pretrained(tmp_path / "a")


def test_weights_that_do_not_record_their_config_are_loaded(tmp_path, safetensors):
    """As earlier releases and other programs write them."""
    import safetensors.torch

    embedder = Embedder("glyph_net", 8)
    embedder.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"further": 1, **config}))
    Embedder.from_pretrained(tmp_path)
    config["init_args"]["image_size"] = 48
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    assert Embedder.from_pretrained(tmp_path).preparation.image_size == 48


@pytest.mark.refusal
def test_a_hub_that_cannot_be_reached(saved, monkeypatch):
    class Unreachable:
        def __getattr__(self, name):
            raise OSError("no network\nat all")

    monkeypatch.setattr(pretrained, "load_hub", Unreachable)
    with pytest.raises(FileNotFoundError, match=r"^Embedder: `name` must be a folder .* got 'me/x' \(no network\); w"):
        Embedder.from_pretrained("me/x")
    with pytest.raises(ConnectionError, match=r"^Embedder: the hub must be reachable .* 'me/x', got an error \(no ne"):
        saved[1].push_to_hub("me/x")


@pytest.mark.refusal
@pytest.mark.parametrize("backbone", ["timm/vit_tiny_patch16_224", "hf/google/vit-base-patch16-224"])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(backbone, monkeypatch, tmp_path):
    """huggingface_hub would repeat each request for a file that is not in the cache, for 23 seconds."""

    def unknown_host(*arguments, **keywords):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} seconds"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"which could not be loaded .*; offline, give the path of a local file"):
        Embedder(backbone, 8, weights="DEFAULT")
