"""Gradient checkpointing changes the memory, not the gradients."""

import pytest
import torch

from lightning_retrieval.models import Embedder
from tests.lightning_retrieval.models.hugging_face_folders import SMALL

TIMM = {"backbone": "timm/vit_tiny_patch16_224", "backbone_args": {"depth": 2, "embed_dim": 24, "num_heads": 2}}
HUGGING_FACE = {"backbone": "hf/any", "backbone_args": {"model_type": "dinov2", **SMALL}}


def gradients_and_kept_numbers(settings, checkpointing):
    """The gradients of one image's loss, and how many numbers the forward pass keeps for the backward pass."""
    torch.manual_seed(0)
    embedder = Embedder(**settings, embedding_dim=8, image_size=32, gradient_checkpointing=checkpointing)
    kept = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = embedder(torch.randn(3, 3, 32, 32))[:, 0].sum()
    value.backward()
    return {name: parameter.grad for name, parameter in embedder.named_parameters()}, sum(kept)


@pytest.mark.parametrize(("package", "settings"), [("timm", TIMM), ("transformers", HUGGING_FACE)])
def test_same_gradients_with_less_memory(package, settings):
    pytest.importorskip(package)
    plain, all_numbers = gradients_and_kept_numbers(settings, checkpointing=False)
    found, numbers = gradients_and_kept_numbers(settings, checkpointing=True)
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, msg=name)
    assert numbers < 0.7 * all_numbers


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "`gradient_checkpointing` must be False for resnet18, which has no such option, got True"),
        ("timm/resnet18", "runs the batch norms of timm/resnet18 twice .*; set freeze_batch_norm=True"),
    ],
)
def test_invalid_backbones(name, message):
    if name.startswith("timm"):
        pytest.importorskip("timm")
    with pytest.raises(ValueError, match=message):
        Embedder(name, gradient_checkpointing=True)
