"""Counts by a step function against the step function of every pair, and their gradient against differences."""

import functools

import pytest
import torch

from lightning_retrieval.losses.roadmap import count_upper
from lightning_retrieval.losses.smooth_ap import count_above, sigmoid_step

UPPER = functools.partial(count_upper, tau=0.1, rho=3.0, delta=0.3, offset=1.2, start=0.5)


def lists():
    """Scores of three lists, of which some items are not counted, and two, none and three positives."""
    scores = torch.randn(3, 9, dtype=torch.float64)
    scores[[0, 1, 2], [4, 5, 6]] = -torch.inf
    return scores, torch.tensor([0, 0, 2, 2, 2]), torch.randn(5, dtype=torch.float64)


@pytest.mark.parametrize("step", [sigmoid_step, UPPER], ids=["sigmoid", "upper"])
def test_gradient_of_a_count(step):
    scores, query, s_i = lists()
    counted = scores.isfinite()

    def count(values, s_i):
        return count_above(torch.where(counted, values, -torch.inf), query, s_i, step)

    values = scores.masked_fill(~counted, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(count, (values, s_i.requires_grad_()))
    count(values, s_i).sum().backward()
    assert not values.grad[1].any()
    assert not values.grad[~counted].any()


def test_a_count_of_sigmoids():
    scores, query, s_i = lists()
    expected = [torch.sigmoid(scores[q] - s).sum() for q, s in zip(query, s_i)]
    torch.testing.assert_close(count_above(scores, query, s_i, sigmoid_step), torch.stack(expected))
