import math

import pytest
import torch

from lightning_retrieval.ranking.rows import normalize


def test_rows_are_divided_by_their_length():
    rows = [[3.0, 4.0], [-5.0, 12.0], [0.25, 0.0]]
    expected = [[value / math.hypot(*row) for value in row] for row in rows]
    torch.testing.assert_close(normalize(torch.tensor(rows)), torch.tensor(expected))


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_widened(given, result):
    x = torch.randn(8, 5).to(given)
    unit = normalize(x)
    assert unit.dtype == result
    # As exact as the wide type: the half-precision rows were not normalised in half precision.
    lengths = unit.double().norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=4 * torch.finfo(result).eps, atol=0.0)


def test_autocast_does_not_narrow():
    x = torch.randn(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = normalize(x)
    assert torch.equal(inside, normalize(x))


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e38])
def test_squares_that_overflow_or_vanish(scale):
    x = torch.tensor([[1.0, -2.0, 2.0]])
    torch.testing.assert_close(normalize(x * scale), torch.tensor([[1.0, -2.0, 2.0]]) / 3)


def test_zero_row_stays_zero_with_a_finite_gradient():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    unit = normalize(x)
    unit.sum().backward()
    assert unit[0].tolist() == [0.0, 0.0]
    assert torch.isfinite(x.grad).all()


def test_gradient_is_that_of_the_formula():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(normalize, x)
    weights = torch.randn(4, 6, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((normalize(x) * weights).sum(), x)
    # (w - (w.u) u) / |x|, nothing along the row itself
    length, unit = x.detach().norm(dim=1, keepdim=True), x.detach() / x.detach().norm(dim=1, keepdim=True)
    torch.testing.assert_close(gradient, (weights - (weights * unit).sum(1, keepdim=True) * unit) / length)


def test_no_rows():
    assert normalize(torch.zeros(0, 3)).shape == (0, 3)
