"""Backbones of transformers: what they return is what the model of a folder computes."""

import json

import pytest
import torch

from lightning_retrieval.models import Embedder, TextEmbedder
from lightning_retrieval.models.pretrained import without_pretrained_weights
from tests.lightning_retrieval.models.hugging_face_folders import CONFIGS, SMALL, write_folder, write_text_folder

transformers = pytest.importorskip("transformers")
POOLED = ("dinov2", "dinov2_with_registers", "clip_vision_model", "siglip_vision_model", "resnet")
PREFIX = {"vit": 1, "deit": 2, "dinov2_with_registers": 5, "clip_vision_model": 1, "siglip_vision_model": 0}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a small model, which is written once, and the model."""
    written = {}

    def write(kind):
        if kind not in written:
            folder = tmp_path_factory.mktemp(kind)
            written[kind] = folder, write_folder(folder, kind)
        return written[kind]

    return write


def of_folder(folder, **settings):
    return Embedder(f"hf/{folder}", 8, weights="DEFAULT", **settings).eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_own_pooling_is_the_pooler_s_or_the_class_token_or_the_average(kind, folder_of):
    folder, model = folder_of(kind)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        output = model(images)
        found = of_folder(folder, pooling="own").pooled_features(images)
    expected = output.last_hidden_state[:, 0]  # ViT's pooler is not trained in pretraining
    if kind in POOLED:
        expected = output.pooler_output.flatten(1)
    if kind == "swin":
        expected = output.last_hidden_state.mean(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", PREFIX)
def test_patch_tokens_and_class_token(kind, folder_of):
    folder, model = folder_of(kind)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        tokens = model(images).last_hidden_state
        found = of_folder(folder, pooling="avg").pooled_features(images)
        torch.testing.assert_close(found, tokens[:, PREFIX[kind] :].mean(1))
        assert tokens[:, PREFIX[kind] :].shape[1] == 16
        if PREFIX[kind]:
            found = of_folder(folder, pooling="class_token").pooled_features(images)
            torch.testing.assert_close(found, tokens[:, 0])


def test_feature_maps_are_pooled(folder_of):
    folder, model = folder_of("resnet")
    embedder = of_folder(folder)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features = model(images).last_hidden_state
        torch.testing.assert_close(embedder.pooled_features(images), embedder.pool(features))
    assert embedder.pooling == "gem"


@pytest.mark.parametrize("kind", ["dinov2", "swin", "clip_vision_model"])
def test_other_sizes_than_that_for_which_the_backbone_was_built(kind, folder_of):
    assert of_folder(folder_of(kind)[0], image_size=48)(torch.randn(2, 3, 48, 64)).shape == (2, 8)


def test_without_weights_the_network_is_random_and_in_training_mode(folder_of):
    folder, model = folder_of("dinov2")
    torch.manual_seed(1)  # not that of the folder
    embedder = Embedder(f"hf/{folder}", 8)
    assert all(module.training for module in embedder.modules())
    weight = embedder.backbone.model.encoder.layer[0].mlp.fc1.weight
    assert not weight.equal(model.encoder.layer[0].mlp.fc1.weight)
    assert all(module.training for module in of_folder(folder).train().modules())


def test_the_description_needs_no_folder(tmp_path):
    write_folder(tmp_path, "dinov2_with_registers")
    embedder = of_folder(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    twin = Embedder(**{**embedder.init_args(), "weights": None}).eval()
    twin.load_state_dict(embedder.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert twin(images).equal(embedder(images))
    assert twin.init_args() == {**embedder.init_args(), "weights": None}
    assert "id2label" not in embedder.backbone_args


def test_the_image_part_of_a_model_of_images_and_text():
    config = {"model_type": "clip", "vision_config": SMALL}
    embedder = Embedder("hf/any/name", 8, backbone_args=config)
    assert type(embedder.backbone.model).__name__ == "CLIPVisionModel"
    assert embedder.backbone_args["model_type"] == "clip_vision_model"


def test_a_folder_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "images")
    write_text_folder(tmp_path / "texts", "bert")
    assert type(of_folder("~/images").backbone.model).__name__ == "Dinov2Model"
    assert TextEmbedder("hf/~/texts", 8, weights="DEFAULT").tokenizer(["red shoes"]).shape == (1, 4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_file_that_transformers_has_written(kind, folder_of):
    """The names in it need not be those of the network."""
    folder, model = folder_of(kind)
    loaded = Embedder(f"hf/{folder}", 8, weights=str(folder / "model.safetensors")).backbone.model.state_dict()
    state = model.state_dict()
    assert all(value.equal(state[name]) for name, value in loaded.items())


@pytest.mark.parametrize("weights", ["DEFAULT", "model.safetensors"])
def test_weights_of_other_shapes_than_the_config(weights, tmp_path):
    write_folder(tmp_path, "vit")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 8}))
    with pytest.raises(ValueError, match=r"^Embedder: "):
        Embedder(f"hf/{tmp_path}", 8, weights=weights.replace("model", f"{tmp_path}/model"))


def test_a_local_file_of_weights(tmp_path):
    kind = "vit"
    model = write_folder(tmp_path, kind)
    weights = {f"{kind}.{name}": value for name, value in model.state_dict().items() if "pooler" not in name}
    torch.save({**weights, "classifier.weight": torch.ones(3)}, tmp_path / "own.pth")
    embedder = Embedder(f"hf/{tmp_path}", 8, weights=str(tmp_path / "own.pth"), pooling="class_token").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(embedder.pooled_features(images), model(images).last_hidden_state[:, 0])


def saved_in(folder, kind, dtype):
    """The folder of a small model whose weights are saved in a type; the values that float32 must have."""
    model = write_folder(folder, kind).to(dtype)
    model.save_pretrained(folder)
    return {name: value.float() for name, value in model.state_dict().items() if value.is_floating_point()}


def types_of(network):
    values = [*network.parameters(), *network.buffers()]
    return {value.dtype for value in values if value.is_floating_point()}


@pytest.mark.parametrize(
    ("kind", "settings", "dtype"),
    [
        ("dinov2", {"weights": "DEFAULT"}, torch.bfloat16),
        ("dinov2", {"weights": "DEFAULT", "lora": 2}, torch.bfloat16),
        ("clip_vision_model", {}, torch.float16),
        ("resnet", {"weights": "DEFAULT"}, torch.float64),
    ],
)
def test_parameters_are_float32_whatever_the_type_of_the_saved_weights_is(kind, settings, dtype, tmp_path):
    values = saved_in(tmp_path, kind, dtype)
    embedder = Embedder(f"hf/{tmp_path}", 8, **settings).eval()
    assert types_of(embedder) == {torch.float32}
    assert embedder(torch.rand(2, 3, 32, 32)).dtype == torch.float32
    found = embedder.backbone.model.state_dict()
    if settings == {"weights": "DEFAULT"}:
        assert all(found[name].equal(values[name]) for name in found if name in values)
    with without_pretrained_weights():
        assert types_of(Embedder(**Embedder(f"hf/{tmp_path}", 8).init_args())) == {torch.float32}


@pytest.mark.parametrize(
    ("name", "dtype", "weights"),
    [
        ("dtype", "float64", None),
        ("dtype", "auto", "DEFAULT"),
        ("torch_dtype", "float16", "DEFAULT"),
    ],
)
def test_the_type_that_the_user_asks_for(name, dtype, weights, tmp_path):
    """It is that of the backbone; embeddings of images of float32 stay float32. A checkpoint rebuilds the same type."""
    saved_in(tmp_path, "dinov2", torch.bfloat16)
    embedder = Embedder(f"hf/{tmp_path}", 8, weights=weights, backbone_args={name: dtype})
    wanted = getattr(torch, dtype.replace("auto", "bfloat16"))
    assert types_of(embedder.backbone) == {wanted}
    assert embedder(torch.rand(2, 3, 32, 32)).dtype == torch.float32
    with without_pretrained_weights():
        assert types_of(Embedder(**embedder.init_args()).backbone) == {wanted}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder as of a hub, whose config names Python code that writes a file, and a user who says yes to all."""
    folder, marker = tmp_path / "repository", tmp_path / "marker"
    folder.mkdir()
    names = {"AutoConfig": "own_code.Config", "AutoModel": "own_code.Net"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (folder / "own_code.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, marker


@pytest.mark.hostile
@pytest.mark.parametrize(("weights", "arguments"), [(None, {}), ("DEFAULT", {}), (None, {"trust_remote_code": False})])
def test_the_code_of_a_repository_is_not_run(repository, weights, arguments):
    with pytest.raises(ValueError, match=r"^Embedder: `backbone`"):
        Embedder(f"hf/{repository[0]}", 8, weights=weights, backbone_args=arguments)
    assert not repository[1].exists()


@pytest.mark.hostile
def test_nobody_trusts_the_code_of_a_repository(repository, tmp_path):
    settings = {"backbone": f"hf/{repository[0]}", "backbone_args": {"trust_remote_code": True}}
    with pytest.raises(ValueError, match=r"^Embedder: `backbone`"):
        Embedder(**settings)
    Embedder("glyph_net", 8).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    config["init_args"] |= settings
    (tmp_path / "saved/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        Embedder.from_pretrained(tmp_path / "saved")
    assert not repository[1].exists()


def test_a_model_of_transformers_whose_repository_also_has_code(repository):
    """The code of transformers is used, and the config that is kept names no other."""
    write_folder(repository[0])
    config = json.loads((repository[0] / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own_code.Config", "AutoModel": "own_code.Net"}
    (repository[0] / "config.json").write_text(json.dumps(config))
    embedder = of_folder(repository[0])
    assert type(embedder.backbone.model).__name__ == "Dinov2Model"
    assert not repository[1].exists()
    assert "auto_map" not in embedder.backbone_args
    with without_pretrained_weights():
        Embedder(**embedder.init_args())


@pytest.mark.hostile
def test_kernels_of_a_repository_are_not_run(tmp_path):
    write_folder(tmp_path, "vit")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": "evil/kernels"}))
    with pytest.raises(ValueError, match="evil/kernels"):
        of_folder(tmp_path)
    with pytest.raises(ValueError, match="evil/kernels"), without_pretrained_weights():
        Embedder(f"hf/{tmp_path}", 8, weights="DEFAULT")


@pytest.mark.hostile
@pytest.mark.parametrize(
    "config", [{"model_type": "rwkv"}, {"model_type": "vit", "backbone_config": {"model_type": "yoso"}}]
)
def test_models_for_which_transformers_fetches_native_code_are_refused(config, tmp_path):
    """It fetches it where there is a GPU, without being asked."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model_type"):
        of_folder(tmp_path)
    with pytest.raises(ValueError, match="model_type"), without_pretrained_weights():
        Embedder("hf/a/b", 8, backbone_args=config)


def test_a_name_without_a_config_is_looked_up_on_disk_while_a_file_is_loaded(folder_of):
    with without_pretrained_weights():
        embedder = Embedder(f"hf/{folder_of('dinov2')[0]}", 8, weights="DEFAULT")
        with pytest.raises(ValueError, match="'a/b'"):
            Embedder("hf/a/b", 8)
    assert embedder.preparation.mean == (0.4, 0.5, 0.6)


OTHER = "attacker/x"
# Entries of a config that name another model, at any depth, with the backbone that reads them.
NAMING = [
    {"model_type": "dpt", "backbone": OTHER},
    {"model_type": "upernet", "backbone": OTHER, "backbone_kwargs": {"out_indices": [1]}},
    {"model_type": "rt_detr", "backbone": f"timm/{OTHER}"},
    {"model_type": "dpt", "backbone_config": {"model_type": "timm_backbone", "backbone": f"hf-hub:{OTHER}"}},
    {"model_type": "clip", "vision_config": {"model_type": "clip_vision_model", "parts": [{"backbone": OTHER}]}},
    {"model_type": "timm_wrapper", "architecture": f"hf-hub:{OTHER}"},
    {"model_type": "timm_wrapper", "architecture": "resnet18", "model_args": {"checkpoint_path": OTHER}},
    {"model_type": "timm_wrapper", "architecture": "resnet18", "model_args": {"pretrained_cfg": {"hf_hub_id": OTHER}}},
    {"model_type": "vit", **SMALL, "quantization_config": {"quant_method": "mxfp4"}},
    {"model_type": "vit", **SMALL, "base_model_name_or_path": OTHER},
]


@pytest.mark.hostile
@pytest.mark.parametrize("config", NAMING, ids=lambda config: config["model_type"])
@pytest.mark.parametrize("weights", [None, "DEFAULT"])
def test_a_config_does_not_choose_what_is_read_or_downloaded(config, weights, tmp_path):
    """Neither the config in a folder nor one in a checkpoint; the fixture of hostile tests fails on any look-up."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^Embedder: "):
        Embedder(f"hf/{tmp_path}", 8, weights=weights)
    with pytest.raises(ValueError, match=r"^TextEmbedder: "):
        TextEmbedder(f"hf/{tmp_path}", 8, weights=weights)
    arguments = {name: value for name, value in config.items() if name != "model_type"}
    for kept in (config, arguments):  # a whole config, and one that completes that of a folder
        with pytest.raises(ValueError, match=r"^Embedder: "), without_pretrained_weights():
            Embedder(f"hf/{tmp_path}", 8, weights=weights, backbone_args=kept)


@pytest.mark.hostile
def test_the_adapters_of_a_folder_do_not_choose_the_model_below_them(tmp_path):
    pytest.importorskip("peft")
    write_folder(tmp_path, "vit")
    adapters = {"peft_type": "LORA", "base_model_name_or_path": OTHER, "target_modules": "(a+)+b", "r": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters))
    with pytest.raises(ValueError, match="adapter_config"):
        of_folder(tmp_path)


@pytest.mark.hostile
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_index_of_a_folder_does_not_choose_files_elsewhere(tmp_path, suffix, is_absolute):
    folder, private = tmp_path / "folder", tmp_path / f"private.{suffix}"
    model = write_folder(folder, "vit")
    (folder / "model.safetensors").rename(private)
    index = "model.safetensors.index.json"
    if suffix == "bin":
        torch.save(model.state_dict(), private)
        index = "pytorch_model.bin.index.json"
    name = f"../{private.name}"
    if is_absolute:
        name = str(private)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), name)}))
    with pytest.raises(ValueError, match=r"^Embedder: `backbone`"):
        of_folder(folder)


@pytest.mark.hostile
def test_a_checkpoint_of_adapters_downloads_no_model_that_it_names():
    pytest.importorskip("peft")
    for arguments in ({}, {"model_type": "vit", **SMALL}):
        with pytest.raises(ValueError, match="a file may not choose"), without_pretrained_weights():
            Embedder(f"hf/{OTHER}", 8, weights="DEFAULT", backbone_args=arguments, lora=2)


def test_the_adapters_of_a_checkpoint_get_the_weights_of_a_folder(folder_of):
    pytest.importorskip("peft")
    folder, model = folder_of("vit")
    with without_pretrained_weights():
        embedder = of_folder(folder, lora=2)
    found, expected = embedder.backbone.model.embeddings, model.embeddings
    assert found.patch_embeddings.projection.weight.equal(expected.patch_embeddings.projection.weight)
