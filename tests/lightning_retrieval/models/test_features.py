"""The shape of the features of a backbone, found without arithmetic; and their pooling.

GeM is compared with loops, its limits and gradients; the average and the maximum with torch.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision import models

from lightning_retrieval.models import Embedder, GeM, GlobalAvgPool, GlobalMaxPool, gem
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
    message = r"^Embedder: `backbone` Backbone could not be run on .* shape \(1, 3, 224, 224\) .*; give `feature_dim`"
    with pytest.raises(ValueError, match=message):
        Embedder(backbone)
    assert backbone.training
    assert backbone.norm.training


def test_running_out_of_memory_is_not_taken_for_a_wrong_size():
    class Full(nn.Module):
        def forward(self, images):
            raise RuntimeError("CUDA out of memory")

    embedder = Embedder("glyph_net", 8)
    embedder.backbone = Full()
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):
        embedder(torch.rand(1, 1, 32, 32))


def gem_by_loops(features, p, eps):
    """Equation 3, one activation at a time, in Python floats."""
    out = []
    for image in features.tolist():
        out.append([])
        for channel in image:
            values = [max(x, eps) for row in channel for x in row]
            out[-1].append((sum(x**p for x in values) / len(values)) ** (1 / p))
    return torch.tensor(out, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    p=st.floats(0.5, 8.0),
    eps=st.sampled_from([1e-6, 1e-2]),
    size=st.tuples(*[st.integers(1, 4)] * 4),
)
def test_gem_against_loops(seed, p, eps, size):
    features = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(gem(features, p, eps), gem_by_loops(features, p, eps))


def test_gem_module_equals_the_function():
    features = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(GeM(2.5, eps=0.5)(features), gem(features, 2.5, 0.5))
    assert repr(GeM().to("meta")) == "GeM(p=?, eps=1e-06, learnable=True)"


def test_gem_by_hand():
    features = torch.tensor([1.0, 2.0, 3.0, -4.0]).reshape(1, 1, 2, 2)
    assert gem(features, 3.0).item() == pytest.approx((36 / 4) ** (1 / 3))


def test_gem_limits():
    features = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(gem(features, 1.0), features.clamp(min=1e-6).mean((2, 3)))
    torch.testing.assert_close(gem(features, 1e6), features.amax((2, 3)), rtol=1e-4, atol=0)


def test_gem_gradients():
    features = torch.rand(2, 3, 2, 2, dtype=torch.float64) + 0.1
    p = torch.tensor([2.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gem, (features.requires_grad_(), p))
    assert torch.autograd.gradgradcheck(lambda x: gem(x, 3.0), features)


@pytest.mark.parametrize("scale", [0.0, 1e-5, 1e20])
def test_gem_neither_overflows_nor_vanishes(scale):
    """x^p is outside the range of float32 here; a channel of zeros has finite gradients too."""
    pool = GeM(p=30.0)
    features = (scale * torch.rand(1, 2, 3, 3)).requires_grad_()
    pooled = pool(features)
    log = features.detach().double().clamp(min=1e-6).flatten(2).log()
    expected = ((torch.logsumexp(30.0 * log, 2) - math.log(9)) / 30.0).exp().float()
    torch.testing.assert_close(pooled, expected)
    pooled.sum().backward()
    assert features.grad.isfinite().all()
    assert pool.p.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gem_in_half_precision_computes_in_float32(dtype):
    torch.manual_seed(0)  # with other seeds, float32 may round one of the many means differently
    features = (200 * torch.rand(2, 32, 7, 7)).to(dtype)  # 200^3 is beyond float16
    exact = gem(features.double(), 3.0)
    with torch.autocast("cpu", dtype=dtype):
        under_autocast = GeM()(features)
    for pooled in (under_autocast, GeM()(features), GeM().to(dtype)(features)):
        assert pooled.dtype == dtype
        assert pooled.equal(exact.to(dtype))


def test_gem_p_is_a_parameter_only_if_learnable():
    assert [name for name, _ in GeM().named_parameters()] == ["p"]
    assert list(GeM(learnable=False).parameters()) == []
    fixed = GeM(p=5.0, learnable=False)
    fixed.load_state_dict(GeM(p=2.0).state_dict())  # the same keys
    assert fixed.p.item() == 2.0


def test_average_and_maximum_equal_torch():
    features = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(GlobalAvgPool()(features), nn.AdaptiveAvgPool2d(1)(features).flatten(1))
    assert GlobalMaxPool()(features).equal(nn.AdaptiveMaxPool2d(1)(features).flatten(1))
