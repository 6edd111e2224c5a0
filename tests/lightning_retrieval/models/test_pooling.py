"""Pooling: GeM against loops, its limits and gradients; average and maximum."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_retrieval.models import GeM, GlobalAvgPool, GlobalMaxPool, gem


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
    for learnable in (True, False):
        pool = GeM(2.5, eps=0.5, learnable=learnable)
        torch.testing.assert_close(pool(features), gem(features, 2.5, 0.5))


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


@pytest.mark.parametrize("pool", [GeM(p=2.5, eps=1e-4), GeM(learnable=False), GlobalAvgPool(), GlobalMaxPool()])
def test_copies_are_equal(pool):
    features = torch.randn(2, 3, 4, 4)
    for twin in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert twin(features).equal(pool(features))
        assert repr(twin) == repr(pool)


def test_repr_shows_settings():
    assert repr(GeM(p=2.5, eps=1e-4, learnable=False)) == "GeM(p=2.5, eps=0.0001, learnable=False)"
    assert repr(GeM().to("meta")) == "GeM(p=?, eps=1e-06, learnable=True)"


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"p": 0.0}, ValueError, r"GeM: `p` must be a finite number > 0, got 0\.0\."),
        ({"p": math.inf}, ValueError, "GeM: `p` must be a finite number > 0, got inf"),
        ({"p": "3"}, TypeError, "GeM: `p` must be a number > 0, got '3'"),
        ({"eps": -1e-6}, ValueError, "GeM: `eps` must be a finite number > 0, got -1e-06"),
    ],
)
def test_invalid_settings_of_gem(settings, error, message):
    with pytest.raises(error, match=message):
        GeM(**settings)
