"""The nearest rows of a gallery against a sort of all scores in plain Python; of equal scores the first are nearest."""

import pytest
import torch

from lightning_retrieval.ranking import expansion as nearest_rows_module
from lightning_retrieval.ranking import ranked_lists
from lightning_retrieval.ranking.expansion import highest_columns, nearest_rows
from lightning_retrieval.ranking.rows import unsharded
from tests.lightning_retrieval.metrics.helpers import quarters


def by_sorting(queries, gallery, k, self_index, self_score):
    """{query: [(score, column)]}, with exact scores."""
    found = []
    for query, itself in zip(queries.tolist(), self_index.tolist()):
        scores = [sum(a * b for a, b in zip(query, row)) for row in gallery.tolist()]
        if itself >= 0:
            scores[itself] = self_score
        columns = sorted(range(len(scores)), key=lambda column: (-scores[column], column))
        found.append([(scores[column], column) for column in columns[:k]])
    return found


def as_pairs(nearest):
    return [list(zip(*row)) for row in zip(nearest.scores.tolist(), nearest.positions.tolist())]


def problem(queries=70, gallery=900, dtype=torch.float32):
    """Unit rows whose scores are multiples of 1/4, so that nearly all of them tie with others."""
    q, g = quarters(queries, dtype) / 2, quarters(gallery, dtype) / 2
    self_index = torch.where(torch.rand(queries) < 0.5, torch.randint(0, gallery, (queries,)), -1)
    return q, g, self_index


@pytest.mark.parametrize(
    ("k", "columns", "rows", "self_score", "dtype"),
    [
        (1, 384, 64, 0.0, torch.float32),
        (20, 384, 256, -torch.inf, torch.float64),
        (500, 384, 64, -torch.inf, torch.float32),
        (20, 1536, 256, 0.0, torch.float64),
    ],
)
def test_against_a_sort_of_all_scores(monkeypatch, k, columns, rows, self_score, dtype):
    """In several tiles, in one, and with more neighbours than a tile has."""
    monkeypatch.setattr(ranked_lists, "_CPU_COLUMNS", columns)
    monkeypatch.setattr(nearest_rows_module, "_BLOCK_ROWS", rows)
    q, g, self_index = problem(dtype=dtype)
    found = nearest_rows(unsharded(q, 100), unsharded(g, 100), k, self_index=self_index, self_score=self_score)
    assert found.scores.dtype == dtype
    assert as_pairs(found) == by_sorting(q, g, k, self_index, self_score)


@pytest.mark.parametrize(("queries", "gallery"), [(0, 5), (3, 2), (1, 1)])
def test_small_sets(queries, gallery):
    q, g, _ = problem(queries, gallery)
    self_index = torch.full((queries,), -1)
    found = nearest_rows(unsharded(q, 64), unsharded(g, 64), gallery, self_index=self_index, self_score=0.0)
    assert as_pairs(found) == by_sorting(q, g, gallery, self_index, 0.0)
    assert found.positions.shape == (queries, gallery)


def test_a_query_has_the_same_scores_whatever_other_queries_there_are():
    q, g = torch.randn(300, 24), torch.randn(2000, 24)
    nobody = torch.full((300,), -1)
    whole = nearest_rows(unsharded(q, 256), unsharded(g, 256), 9, self_index=nobody, self_score=0.0)
    part = nearest_rows(unsharded(q[250:], 256), unsharded(g, 256), 9, self_index=nobody[250:], self_score=0.0)
    assert torch.equal(part.scores, whole.scores[250:])
    assert torch.equal(part.positions, whole.positions[250:])


def test_highest_columns_are_the_first_of_equal_ones():
    scores = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0, 9.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]
    )
    assert highest_columns(scores, 3).tolist() == [[1, 2, 4], [0, 1, 5], [0, 1, 2]]
    assert highest_columns(scores, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert highest_columns(scores[:, :2], 3).tolist() == [[0, 1]] * 3
    tied = torch.randint(0, 4, (50, 400)).float()
    expected = [sorted(sorted(range(400), key=lambda c: (-row[c], c))[:120]) for row in tied.tolist()]
    assert highest_columns(tied, 120).tolist() == expected
