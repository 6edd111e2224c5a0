"""Counts of the scores that reach positives against loops, by both roads on which they are counted."""

import math

import pytest
import torch

from lightning_retrieval.ranking import ranks

# Largest fraction of scores that are counted one by one; above it, all are sorted.
PATHS = {"counted": 1.0, "sorted": -1.0, "default": ranks._MAX_COUNTED_FRACTION}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("width", "spread"), [(1, 1000), (40, 2)])
def test_count_at_least(spread, width, path, dtype, monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_COUNTED_FRACTION", PATHS[path])
    scores = torch.randint(-spread, spread + 1, (7, 300)).to(dtype) / spread
    scores[2] *= 1e-40 if dtype == torch.float32 else 1e-310  # denormal numbers are in order too
    scores[3][scores[3] == 0] = -0.0
    scores[:, 250:] = -math.inf  # not in the list
    positives = scores[:, torch.randperm(250)[:width]].sort(1).values
    positives[3][positives[3] == 0] = 0.0  # ties with -0.0
    real = torch.tensor([0, 1, width, width, max(1, width // 2), width, width])
    positives = positives.masked_fill(torch.arange(width) >= real[:, None], math.inf).sort(1).values
    counts = ranks.count_at_least(scores.clone(), positives)
    for row in range(7):
        expected = [sum(s >= p for s in scores[row].tolist()) for p in positives[row, : real[row]].tolist()]
        assert counts[row, : real[row]].tolist() == expected


@pytest.mark.parametrize(
    ("width", "worst", "dtype", "keys"),
    [
        (1, 0.99, torch.float32, torch.int64),  # a good model: few candidates reach the worst positive
        (40, 0.99, torch.float32, torch.int64),
        (16, 0.0, torch.float32, torch.float32),  # a bad one: all are sorted
        (1, 0.99, torch.float64, torch.float64),  # float64 is never squeezed into integers
    ],
)
def test_which_road_is_taken(width, worst, dtype, keys, monkeypatch):
    scores = torch.rand(5, 2000, dtype=dtype)
    positives = torch.full((5, width), 0.999, dtype=dtype)
    positives[:, 0] = worst
    taken = []

    def searchsorted(bounds, values, **kwargs):
        taken.append(values.dtype)
        return true_search(bounds, values, **kwargs)

    true_search = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", searchsorted)
    counts = ranks.count_at_least(scores.clone(), positives)
    assert taken == [keys]
    assert torch.equal(counts, (scores[:, None] >= positives[..., None]).sum(2))
