"""The shape of the features of a backbone, found without arithmetic."""

import copy

import pytest
import torch
from torch import nn
from torchvision import models

from lightning_retrieval.models import Embedder
from lightning_retrieval.models.features import height_and_width, patch_map
from tests.lightning_retrieval.models.user_backbones import Backbone, as_list, feature_map, vectors


def test_features_of_a_vit_are_found_with_its_image_size():
    vit = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    vit.heads = nn.Identity()
    embedder = Embedder(vit, 4)
    assert embedder.feature_dim == 8
    assert embedder(torch.rand(2, 3, 32, 32)).shape == (2, 4)


class Noisy(Backbone):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), training=True)


def test_finding_the_feature_shape_changes_nothing():
    backbone = Noisy(feature_map, channels=1)
    backbone.conv.eval()  # a part that its user keeps in eval mode
    before = copy.deepcopy(backbone.state_dict())
    generator = torch.get_rng_state()
    assert Embedder(backbone, 5, feature_dim=6).feature_dim == 6
    after_head_alone = torch.get_rng_state()
    torch.set_rng_state(generator)
    assert Embedder(backbone, 5).feature_dim == 6
    assert torch.get_rng_state().equal(after_head_alone)
    assert (backbone.training, backbone.conv.training, backbone.norm.training) == (True, False, True)
    for key, value in backbone.state_dict().items():
        assert value.device.type == "cpu"
        assert value.equal(before[key])


def test_features_are_found_with_one_image_for_a_batch_norm_of_vectors():
    """In training mode, it raises on a single row."""
    assert Embedder(nn.Sequential(Backbone(vectors), nn.BatchNorm1d(6)), 5).feature_dim == 6


def test_the_mode_is_restored_after_a_failure():
    backbone = Backbone(as_list)
    with pytest.raises(ValueError, match=r"could not be run on an image \(a meta tensor\) of shape"):
        Embedder(backbone)
    assert backbone.training
    assert backbone.norm.training


def test_patch_map_leaves_out_the_first_tokens():
    tokens = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    found = patch_map(tokens, 2)
    assert found.shape == (2, 3, 3, 1)
    assert found[1, :, 0, 0].tolist() == tokens[1, 2].tolist()


def test_height_and_width():
    assert [height_and_width(size) for size in (None, 5, (3, 4))] == [(224, 224), (5, 5), (3, 4)]


def test_running_out_of_memory_is_not_taken_for_a_wrong_size():
    class Full(nn.Module):
        def forward(self, images):
            raise RuntimeError("CUDA out of memory")

    embedder = Embedder("resnet18", 8)
    embedder.backbone = Full()
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
        embedder(torch.rand(1, 3, 32, 32))
