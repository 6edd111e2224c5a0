"""Adapters of a backbone: what is trained, exact merging, the same network from its arguments.

Gradient checkpointing changes the memory, not the gradients.
"""

import copy
import re
import sys

import pytest
import torch
from torch import nn

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.pretrained import without_pretrained_weights
from tests.lightning_retrieval.models.hugging_face_folders import SMALL

pytest.importorskip("timm")
VIT = {
    "backbone": "timm/vit_tiny_patch16_224",
    "embedding_dim": 8,
    "image_size": 32,
    "backbone_args": {"depth": 2, "embed_dim": 24, "num_heads": 2},
}
HUGGING_FACE = {**VIT, "backbone": "hf/any", "backbone_args": {"model_type": "dinov2", **SMALL}}


def with_trained_adapters(**settings):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    embedder = Embedder(**VIT, **settings)
    with torch.no_grad():
        for name, parameter in embedder.named_parameters():
            if "lora_B" in name:  # 0 at the start
                parameter.normal_(std=0.1)
    return embedder


def test_only_adapters_and_head_are_trained():
    pytest.importorskip("peft")
    embedder = Embedder(**VIT, lora=2)
    trained = {name for name, parameter in embedder.named_parameters() if parameter.requires_grad}
    attention = {f"backbone.model.blocks.{block}.attn.{layer}" for block in (0, 1) for layer in ("qkv", "proj")}
    adapters = {f"{layer}.lora_{part}.default.weight" for layer in attention for part in "AB"}
    assert trained == adapters | {"head.linear.weight", "head.linear.bias"}
    assert embedder.lora == {"r": 2, "lora_alpha": 2}


def test_the_embeddings_are_those_of_the_formula():
    """W x + (alpha / r) B A x for each adapted layer, written out."""
    embedder = with_trained_adapters(lora={"r": 2, "lora_alpha": 6}).eval()
    plain = Embedder(**VIT).eval()
    weights = {}
    for name, value in embedder.state_dict().items():
        if "lora_" not in name:
            weights[name.replace(".base_layer", "")] = value
    for name, value in embedder.state_dict().items():
        if "lora_A" in name:
            B = embedder.state_dict()[name.replace("lora_A", "lora_B")]
            weights[name.split(".lora_A")[0] + ".weight"] = (
                weights[name.split(".lora_A")[0] + ".weight"] + 3 * B @ value
            )
    plain.load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(embedder(images), plain(images))


def test_merging_gives_a_plain_backbone_with_the_same_embeddings():
    embedder = with_trained_adapters(lora=2).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = embedder(images)
    merged = copy.deepcopy(embedder).merge_lora()
    torch.testing.assert_close(merged(images), expected, rtol=0, atol=1e-6)
    assert set(merged.state_dict()) == set(Embedder(**VIT).state_dict())
    assert merged.lora is None
    assert all(parameter.requires_grad for parameter in merged.parameters())
    twin = Embedder(**merged.init_args()).eval()
    twin.load_state_dict(merged.state_dict())
    assert twin(images).equal(merged(images))


def test_the_description_builds_the_same_adapters():
    embedder = with_trained_adapters(lora={"r": 2, "target_modules": ["fc1"]}).eval()
    twin = Embedder(**embedder.init_args()).eval()
    twin.load_state_dict(embedder.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert twin(images).equal(embedder(images))


CONVOLUTION = {"backbone": nn.Conv2d(3, 4, 3)}
TWICE = {"backbone": "timm/resnet18", "gradient_checkpointing": True}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**VIT, "lora": {"r": 0}}, r"`lora\['r'\]` must be an integer >= 1, got 0"),
        ({**VIT, "lora": {"rank": 3}}, "`lora` .* of peft.LoraConfig, got {'rank': 3}"),
        ({**VIT, "lora": {"megatron_config": {}, "megatron_core": "os"}}, "`lora` must not have megatron_config, got"),
        ({**VIT, "lora": {"target_modules": ["q"]}}, r"`lora` .* of peft.LoraConfig, got .*\(.*not found"),
        ({**CONVOLUTION, "lora": 2}, "`lora` must name its `target_modules`, since Conv2d has no linear layers"),
        ({"backbone": "resnet18", "gradient_checkpointing": True}, "`gradient_checkpointing` .*resnet18.*, got True"),
        (TWICE, "`gradient_checkpointing` .*batch norms of timm/resnet18 twice .*; set freeze_batch_norm=True"),
    ],
)
def test_invalid_settings(settings, message):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=f"^Embedder: {message}"):
        Embedder(**settings)


LAYERS = r".*\.(attn|mlp)\.(qkv|proj|fc1)"


@pytest.mark.hostile
@pytest.mark.parametrize("pattern", [LAYERS, r"(?:.*\.)?blocks\.\d+\.attn\.(qkv|proj)", r".*[a-f]tt[^x]\.qkv", ["qkv"]])
def test_a_file_may_have_a_simple_pattern_of_layers(pattern):
    pytest.importorskip("peft")
    given = Embedder(**VIT, lora={"r": 2, "target_modules": pattern, "rank_pattern": {r"blocks\.0\..*": 1}})
    with without_pretrained_weights():
        again = Embedder(**given.init_args())
    assert again.state_dict().keys() == given.state_dict().keys()
    assert [value.shape for value in again.state_dict().values()] == [x.shape for x in given.state_dict().values()]


def errors_of_file(rank, world_size, adapters):
    """The errors of building embedders with the adapters in a file, in at most 16 GB."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    errors = []
    for lora in adapters:
        with pytest.raises((ValueError, TypeError)) as raised, without_pretrained_weights():
            Embedder(**VIT, lora={"r": 2, "target_modules": ["qkv"], **lora})
        errors.append(str(raised.value))
    return errors


ENDLESS = ["(.*)*x", "(.+)+x", ".*.*.*.*.*.*.*.*x", "(..|..)" * 18 + "x", "a?" * 40 + "a" * 40, "(a|b|ab)*c"]
ENDLESS += [r"(.*)\1x", "(?=(.*)*x)", "(.{1,40}){1,40}x", "((.?)?)?" * 9]


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.slow
def test_a_file_has_no_pattern_of_endless_work(run_alone):
    pytest.importorskip("peft")
    adapters = [{"target_modules": pattern} for pattern in ENDLESS]
    adapters += [{"exclude_modules": pattern} for pattern in ENDLESS]
    adapters += [{"layers_pattern": pattern, "layers_to_transform": [0]} for pattern in ENDLESS]
    adapters += [{"rank_pattern": {pattern: 1}} for pattern in ENDLESS]
    adapters += [{"modules_to_save": [pattern]} for pattern in ENDLESS]
    for lora, found in zip(adapters, run_alone(errors_of_file, adapters, timeout=60), strict=True):
        assert found.startswith("Embedder: `lora` of a file must have patterns that are matched quickly"), lora


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.slow
def test_invalid_adapters_of_a_file(run_alone):
    """Ranks out of their range, and arguments with which peft would read files or repeat layers."""
    pytest.importorskip("peft")
    rank, alpha = r"`lora\['rank_pattern'\]\['qkv'\]`", r"`lora\['alpha_pattern'\]\['qkv'\]`"
    rule = "`lora` of a file must have arguments among r, .*, got"
    messages = (
        ({"rank_pattern": {"qkv": 10**9}}, f"{rank} must be an integer from 1 to 4096, got 1000000000"),
        ({"alpha_pattern": {"qkv": "a"}}, f"{alpha} must be a number, got 'a'"),
        ({"rank_pattern": 3}, r"`lora\['rank_pattern'\]` must be a"),
        ({"layer_replication": [[0, 10**9]]}, f"{rule} layer_replication="),
        ({"init_lora_weights": "pissa_niter_1000000000"}, f"{rule} init_lora_weights='pissa_niter_"),
        ({"corda_config": {"cache_file": "x"}}, f"{rule} corda_config="),
    )
    errors = run_alone(errors_of_file, [lora for lora, _ in messages], timeout=60)
    for found, (_, message) in zip(errors, messages, strict=True):
        assert re.match(f"Embedder: {message}", found), found


@pytest.mark.refusal
def test_adapters_without_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"^Embedder: peft .* `lora`: pip .*'lightning-retrieval\[lora\]'"):
        Embedder(**VIT, lora=2)


def gradients_and_kept_numbers(settings, checkpointing):
    """The gradients of one image's loss, and how many numbers the forward pass keeps for the backward pass."""
    torch.manual_seed(0)
    embedder = Embedder(**settings, gradient_checkpointing=checkpointing)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = embedder(torch.randn(3, 3, 32, 32))[:, 0].sum()
    value.backward()
    return {name: parameter.grad for name, parameter in embedder.named_parameters()}, sum(kept)


@pytest.mark.parametrize(("package", "settings"), [("timm", VIT), ("transformers", HUGGING_FACE)])
def test_same_gradients_with_less_memory(package, settings):
    pytest.importorskip(package)
    plain, all_numbers = gradients_and_kept_numbers(settings, checkpointing=False)
    found, numbers = gradients_and_kept_numbers(settings, checkpointing=True)
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, msg=name)
    assert numbers < 0.7 * all_numbers
