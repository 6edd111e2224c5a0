"""Weights of local files, and those of an embedder's own folder."""

import argparse
import re
import shutil
import socket
import stat
import time

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.pretrained import without_pretrained_weights


@pytest.fixture(scope="module")
def safetensors():
    return pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_file_in_the_home_folder(name, tmp_path, monkeypatch, safetensors):
    monkeypatch.setenv("HOME", str(tmp_path))
    state = get_model("squeezenet1_1").state_dict()
    if name == "w.pth":
        torch.save({**state, "step": 3}, tmp_path / name)
    else:
        safetensors.save_file(state, tmp_path / name)
    found = Embedder("squeezenet1_1", 8, weights=f"~/{name}").backbone.state_dict()
    assert all(value.equal(state[part]) for part, value in found.items())


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
    "averaged weights without counters of batches": lambda network, state: {
        "student": named(others(state), "module."),
        "teacher": {name: value for name, value in state.items() if "num_batches" not in name},
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
    "cnnimageretrieval-pytorch": lambda network, state: {
        "meta": {"architecture": "resnet18", "pooling": "gem"},
        "state_dict": {**named(in_sequence(network), "features."), "pool.p": torch.ones(1)},
    },
    "CosPlace": lambda network, state: {**named(in_sequence(network), "backbone."), "aggregation.1.p": torch.ones(1)},
    "ROADMAP": lambda network, state: {"net_state": named(state, "backbone."), "config": {"lr": 0.1}},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_of_other_programs(program, tmp_path):
    """Of two networks in a file, the one is read that the program itself evaluates."""
    backbone, make = "shufflenet_v2_x0_5", get_model
    if program in ("DINO", "CosPlace"):
        backbone, make = "timm/test_resnet", timm.create_model
    network = make(backbone.removeprefix("timm/"))
    state = {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}
    torch.save(PROGRAMS[program](network, state), tmp_path / "w.pth")
    module = Embedder(backbone, 8, weights=str(tmp_path / "w.pth")).backbone
    loaded = getattr(module, "model", module).state_dict()
    assert loaded.keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in loaded.items())


ORIGINAL_NAMES = {  # of ConvNeXt, by those of timm
    r"^stem\.": "downsample_layers.0.",
    r"stages\.(\d+)\.downsample\.(\d+)": r"downsample_layers.\1.\2",
    r"stages\.(\d+)\.blocks\.(\d+)": r"stages.\1.\2",
    "conv_dw": "dwconv",
    r"mlp\.fc": "pwconv",
    r"^head\.norm": "norm",
}


@pytest.mark.parametrize("prefix", ["", "module.", "module.backbone."])
def test_names_of_the_code_of_a_paper(prefix, tmp_path):
    state = timm.create_model("test_convnext", num_classes=0).state_dict()
    names = {}
    for name in state:
        names[name] = name
        for pattern, original in ORIGINAL_NAMES.items():
            names[name] = re.sub(pattern, original, names[name])
    torch.save({"model": {prefix + names[name]: value for name, value in state.items()}}, tmp_path / "w.pth")
    loaded = Embedder("timm/test_convnext", 8, weights=str(tmp_path / "w.pth")).backbone.model.state_dict()
    assert loaded.keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in loaded.items())


@pytest.mark.parametrize(
    ("backbone", "dtype"),
    [
        ("squeezenet1_1", torch.bfloat16),
        ("timm/test_resnet", torch.float16),
        ("shufflenet_v2_x0_5", torch.float64),
    ],
)
def test_parameters_are_float32_whatever_the_type_in_a_file_is(backbone, dtype, tmp_path):
    state = Embedder(backbone, 8).backbone.to(dtype).state_dict()
    torch.save(state, tmp_path / "w.pth")
    found = Embedder(backbone, 8, weights=str(tmp_path / "w.pth")).backbone.state_dict()
    assert {value.dtype for value in found.values()} <= {torch.float32, torch.int64}
    assert all(value.equal(state[name].to(value.dtype)) for name, value in found.items())


def test_prefixes_of_names_are_removed_with_what_is_not_of_the_backbone(tmp_path):
    state = get_model("squeezenet1_1").state_dict()
    torch.save({**named(state, "_orig_mod.model.backbone."), "loss.weight": torch.ones(2)}, tmp_path / "w.pth")
    embedder = Embedder("squeezenet1_1", 8, weights=str(tmp_path / "w.pth"))
    assert all(value.equal(state[name]) for name, value in embedder.backbone.state_dict().items())
    assert embedder.init_args()["weights"] is None


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("backbone", "arguments"),
    [
        ("timm/test_resnet", {"pretrained_cfg_overlay": {"file": "x.pth"}}),
        ("timm/test_resnet", {"pretrained_cfg": "a1_in1k"}),
        ("timm/test_resnet", {"checkpoint_path": "x.pth"}),
        ("timm/test_resnet", {"cache_dir": "x"}),
        ("hf/a/b", {"model_type": "vit", "auto_map": {"AutoModel": "a.B"}}),
        ("hf/a/b", {"model_type": "vit", "attn_implementation": "a/b"}),
        ("hf/a/b", {"model_type": "timm_wrapper", "architecture": "hf-hub:a/b"}),
        ("hf/a/b", {"model_type": "clip", "vision_config": {"x": ["https://a.b/c"]}}),
    ],
)
def test_the_arguments_in_a_file_fetch_nothing(backbone, arguments):
    with without_pretrained_weights(), pytest.raises(ValueError, match=r"^Embedder: "):
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


@pytest.mark.hostile
def test_the_round_trip_is_exact_and_downloads_nothing(saved):
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
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"config.json": usual, "model.safetensors": usual}
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


def test_damaged_weights_are_not_loaded(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes((saved[0] / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"^Embedder: .*model\.safetensors"):
        Embedder.from_pretrained(tmp_path / "m")


def test_the_model_of_another_program_is_not_replaced(tmp_path, safetensors):
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text('{"model_type": "bert"}')
    weights.write_bytes(b"weights of another program")
    with pytest.raises(ValueError, match=r"^Embedder: `folder`"):
        Embedder("glyph_net", 8).save_pretrained(tmp_path)
    assert (config.read_text(), weights.read_bytes()) == ('{"model_type": "bert"}', b"weights of another program")
    config.write_text('{"format": "lightning-retrieval emb')  # damaged: what is saved again replaces it
    Embedder("glyph_net", 8).save_pretrained(tmp_path)
    assert Embedder.from_pretrained(tmp_path).embedding_dim == 8


@pytest.mark.parametrize("mixed", ["config.json", "model.safetensors"])
def test_files_of_two_models_are_not_loaded_together(mixed, tmp_path, safetensors):
    for name, pooling in (("a", "avg"), ("b", "gem")):
        Embedder("glyph_net", 8, pooling=pooling, image_size=32).save_pretrained(tmp_path / name)
    (tmp_path / "a" / mixed).write_bytes((tmp_path / "b" / mixed).read_bytes())
    with pytest.raises(ValueError, match=r"^Embedder: .*must be of the model that"):
        Embedder.from_pretrained(tmp_path / "a")


@pytest.mark.parametrize("backbone", ["timm/vit_tiny_patch16_224", "hf/google/vit-base-patch16-224"])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(backbone, monkeypatch, tmp_path):
    """huggingface_hub would repeat each request for a file that is not in the cache, for 23 seconds."""

    def unknown_host(*arguments, **keywords):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} seconds"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"^Embedder: .* could not be loaded"):
        Embedder(backbone, 8, weights="DEFAULT")
