"""Ranks of positives against loops: AP of each query and level, however the candidates that reach them are counted."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.ranking.labels import Role
from tests.lightning_retrieval.blocks import small_blocks, way_of_an_accelerator


def codes(labels, flips, dtype=torch.float32):
    """Rows of +-1: that of the label with some signs changed. All scores are exact multiples of 1/8; many are equal."""
    of_label = torch.randint(0, 2, (int(labels.max()) + 1, 16)) * 2 - 1
    rows = of_label[labels]
    for row in rows:
        row[torch.randperm(16)[:flips]] *= -1
    return rows.to(dtype)


def ap_by_loops(x, labels, roles, cameras):
    """{query: AP}, one candidate at a time; images of the query's finest label and camera are not in its list."""
    scores, found = (x @ x.T).tolist(), {}
    finest, rows = labels[:, 0].tolist(), range(len(x))
    for query in rows:
        if not roles[query] & 1:
            continue
        listed = [
            image
            for image in rows
            if roles[image] & 2
            and image != query
            and (finest[image] != finest[query] or cameras[image] != cameras[query])
        ]
        found[query] = []
        for level in range(labels.shape[1]):
            positives = [scores[query][i] for i in listed if labels[i, level] == labels[query, level]]
            terms = [sum(s >= p for s in positives) / sum(scores[query][i] >= p for i in listed) for p in positives]
            found[query].append(sum(terms) / len(terms) if terms else None)
    return found


@pytest.mark.parametrize(
    ("classes", "levels", "flips", "dtype"),
    [
        (40, 1, 2, torch.float32),  # positives come first: few scores reach them, and are counted
        (12, 2, 6, torch.float32),  # positives are everywhere: all scores are sorted
        (12, 2, 2, torch.float64),
        (1, 2, 6, torch.float32),  # all queries of a block have the same positives
    ],
)
@pytest.mark.parametrize("with_cameras", [False, True])
def test_against_loops(classes, levels, flips, dtype, with_cameras):
    """Queries that are in the gallery, and others; labels that the gallery lacks."""
    size = 160
    finest = torch.randint(0, classes, (size,))
    labels = finest[:, None] // 3 ** torch.arange(levels)
    roles = torch.randint(0, 4, (size,))
    roles[finest == 5] &= 1
    cameras = torch.randint(0, 3, (size,)) if with_cameras else torch.arange(size)
    x = codes(finest, flips, dtype)
    given = {"cameras": cameras} if with_cameras else {}
    expected = ap_by_loops(x, labels, roles.tolist(), cameras.tolist())
    for way in (nullcontext(), small_blocks(), way_of_an_accelerator()):
        metrics = RetrievalMetrics((1,))
        metrics.update(x, labels, roles=roles, ids=torch.arange(size), **given)
        with way:
            table = metrics.per_query()
        assert table["ids"].tolist() == list(expected)
        for level in range(levels):
            column = table[f"AP/level{level}" if level else "AP"].tolist()
            wanted = [torch.nan if of_query[level] is None else of_query[level] for of_query in expected.values()]
            assert column == pytest.approx(wanted, abs=1e-12, nan_ok=True)


def test_thousands_of_positives_of_a_query():
    labels = (torch.arange(5003) < 4500).long()
    x = codes(labels, 5)
    is_query = torch.arange(5003) < 2
    metrics = RetrievalMetrics((1,))
    metrics.update(x, labels, roles=torch.where(is_query, 1, 2))
    scores = (x[:2] @ x[2:].T).numpy()
    expected = [average_precision_score(labels[2:].numpy(), of_query) for of_query in scores]
    assert metrics.per_query()["AP"].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("others", [0, 200])  # all are sorted, and those that reach a positive are counted
def test_denormal_scores_are_in_order(others):
    """The query's scores are 0 and +-1e-40, which float32 holds with few digits; the others are below."""
    x = torch.tensor([[1.0, 0.0], [1e-40, 1], [0.0, 1], [0.0, 1], [-1e-40, 1], [2e-40, 1], *[[-1, 1]] * others])
    labels, roles = torch.tensor([1, 1, 1, 0, 1, 0, *[0] * others]), torch.tensor([1, *[2] * (5 + others)])
    metrics = RetrievalMetrics((1,))
    metrics.update(x, labels, roles=roles)
    # Ranks 2, 4 (an irrelevant image ties) and 5, of positives 1, 2 and 3.
    assert metrics.per_query()["AP"].item() == pytest.approx((1 / 2 + 2 / 4 + 3 / 5) / 3)


def test_values_that_data_sets_and_users_store():
    assert (int(Role.JUNK), int(Role.QUERY), int(Role.GALLERY), int(Role.BOTH)) == (0, 1, 2, 3)
    assert Role.QUERY | Role.GALLERY == Role.BOTH
    assert np.array([Role.BOTH, Role.JUNK], dtype=np.uint8).tolist() == [3, 0]
