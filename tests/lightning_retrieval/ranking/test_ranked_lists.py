"""Ranks of positives against loops: where positives are, and how the candidates that reach them are counted."""

import math

import numpy as np
import pytest
import torch

from lightning_retrieval.ranking import entries, ranked_lists, ranks
from lightning_retrieval.ranking.entries import entries_of
from lightning_retrieval.ranking.labels import Role
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.ranked_lists import positive_ranks
from lightning_retrieval.ranking.relevance import OtherCamera
from lightning_retrieval.ranking.rows import Rows, unsharded
from tests.lightning_retrieval.metrics.helpers import quarters

# Largest fraction of scores that are counted one by one; above it, all are sorted.
PATHS = {"counted": 1.0, "sorted": -1.0, "default": ranks._MAX_COUNTED_FRACTION}


def ranked(queries, gallery, lists):
    """{query: [(rank, rank among positives, shared levels) of each positive]}, as the blocks have them."""
    found, result = entries_of(lists), {}
    unit = found.block_rows
    for block in positive_ranks(unsharded(queries, unit), unsharded(gallery, unit), found):
        for query, *columns in zip(block.queries, block.rank, block.rank_among_positives, block.level):
            real = columns[-1] > 0
            assert real.tolist() == sorted(real.tolist(), reverse=True)  # padding comes last
            assert int(query) not in result
            result[int(query)] = list(zip(*(column[real].tolist() for column in columns)))
    return result


def by_loops(queries, gallery, query_labels, gallery_labels, self_index, query_cameras, gallery_cameras):
    """The same, one candidate at a time: the worst positive first, of those that tie the one of the most levels."""
    result = {}
    for query, row in enumerate(queries.tolist()):
        scores = [int(4 * sum(a * b for a, b in zip(row, other))) for other in gallery.tolist()]
        shared = (query_labels[query] == gallery_labels).sum(1).tolist()
        is_same = (query_labels[query, 0] == gallery_labels[:, 0]) & (query_cameras[query] == gallery_cameras)
        listed = [g for g in range(len(gallery)) if g != self_index[query] and not is_same[g]]
        positives = [g for g in listed if shared[g] > 0]
        found = []
        for i in positives:
            rank = sum(scores[g] >= scores[i] for g in listed)
            found.append((rank, sum(scores[g] >= scores[i] for g in positives), shared[i]))
        result[query] = sorted(found, key=lambda each: (-each[0], -each[2]))
    return result


@pytest.mark.parametrize("with_cameras", [False, True])
@pytest.mark.parametrize(
    ("path", "classes", "levels", "dtype"),
    [
        ("counted", 12, 2, torch.float32),
        ("sorted", 2, 1, torch.float32),
        ("default", 30, 1, torch.float32),
        ("default", 12, 2, torch.float64),
        ("default", 1, 2, torch.float32),  # all queries of a block have the same positives
    ],
)
def test_against_loops(path, classes, levels, dtype, with_cameras, monkeypatch):
    """Images of the query's label and camera are not in its list."""
    monkeypatch.setattr(ranks, "_MAX_COUNTED_FRACTION", PATHS[path])
    monkeypatch.setattr(entries, "_MAX_BLOCK_POSITIVES", 1)  # blocks of 64 queries: one and a part of one
    monkeypatch.setattr(ranked_lists, "_CPU_POSITIVES", 500)  # the ranks of a few queries at a time
    own = torch.where(torch.rand(70) < 0.5, torch.randint(0, 90, (70,)), -1)
    gallery, queries = quarters(90, dtype) / 2, quarters(70, dtype) / 2
    gallery_labels = torch.randint(0, classes, (90,)).sort().values
    highest = 0 if classes == 1 else classes  # the gallery has no image of label `classes`
    query_labels = torch.where(own >= 0, gallery_labels[own], torch.randint(0, highest + 1, (70,)))
    coarser = 3 ** torch.arange(levels)
    labels = query_labels[:, None] // coarser, gallery_labels[:, None] // coarser, own
    of_gallery = torch.randint(0, 3, (90,)) - 1
    of_queries = torch.where(own >= 0, of_gallery[own], torch.randint(0, 3, (70,)) - 1)
    rows, rule = [Rows(labels[0]), Rows(labels[1])], None
    if with_cameras:
        rule = OtherCamera()
        rows = [
            Rows(torch.cat([of_rows, cameras[:, None]], 1))
            for of_rows, cameras in zip(labels, (of_queries, of_gallery))
        ]
    else:
        of_queries += 10  # no image has their camera
    expected = by_loops(queries, gallery, *labels, of_queries, of_gallery)
    lists = Lists(*rows, rule, self_index=own)
    assert ranked(queries, gallery, lists) == expected
    assert any(extent.is_shared for extent in entries_of(lists).extents()) == (classes == 1)
    without_positive = [query for query, positives in expected.items() if not positives]
    assert without_positive or classes == 1


@pytest.mark.parametrize("path", [*PATHS, "accelerator", "searched by NumPy"])
@pytest.mark.parametrize(
    ("width", "spread", "dtype"), [(1, 1000, torch.float32), (40, 2, torch.float32), (40, 2, torch.float64)]
)
def test_count_at_least(spread, width, path, dtype, monkeypatch):
    monkeypatch.setattr(ranks, "_MAX_COUNTED_FRACTION", PATHS.get(path, -1.0))
    monkeypatch.setattr(ranks, "_LEAST_VALUES_OF_NUMPY", 1 if path == "searched by NumPy" else 1000)
    monkeypatch.setattr(ranks, "is_accelerator", lambda device: path == "accelerator")
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


def test_values_that_data_sets_and_users_store():
    assert (int(Role.JUNK), int(Role.QUERY), int(Role.GALLERY), int(Role.BOTH)) == (0, 1, 2, 3)
    assert Role.QUERY | Role.GALLERY == Role.BOTH
    assert np.array([Role.BOTH, Role.JUNK], dtype=np.uint8).tolist() == [3, 0]
