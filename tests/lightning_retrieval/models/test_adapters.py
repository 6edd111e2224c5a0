"""Adapters of a backbone: what is trained, exact merging, the same network from its arguments.

Gradient checkpointing changes the memory, not the gradients.
"""

import copy

import pytest
import torch

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


@pytest.mark.parametrize("pattern", [r".*\.(attn|mlp)\.(qkv|proj|fc1)", ["qkv"]])
def test_a_file_may_have_a_simple_pattern_of_layers(pattern):
    pytest.importorskip("peft")
    given = Embedder(**VIT, lora={"r": 2, "target_modules": pattern, "rank_pattern": {r"blocks\.0\..*": 1}})
    with without_pretrained_weights():
        again = Embedder(**given.init_args())
    assert again.state_dict().keys() == given.state_dict().keys()
    assert [value.shape for value in again.state_dict().values()] == [x.shape for x in given.state_dict().values()]


@pytest.mark.hostile
@pytest.mark.parametrize(
    "lora",
    [
        {"corda_config": {"cache_file": "x"}},
        {"megatron_config": {}, "megatron_core": "os"},
    ],
    ids=str,
)
def test_the_adapters_of_a_file_import_nothing_and_read_no_file(lora):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"^Embedder: `lora"), without_pretrained_weights():
        Embedder(**VIT, lora={"r": 2, "target_modules": ["qkv"], **lora})


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
