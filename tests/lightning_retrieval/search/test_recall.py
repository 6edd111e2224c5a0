"""Measured recall agrees with an exact search by scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search import index as recall_module
from lightning_retrieval.search import rows as rows_module
from lightning_retrieval.search.index import measure_recall
from tests.lightning_retrieval.search.vectors import DIM, FACTORIES, ROWS, built, exact, vectors


@pytest.mark.parametrize("factory", FACTORIES[1:])
def test_recall_agrees_with_exact_search(factory, monkeypatch):
    monkeypatch.setattr(recall_module, "RECALL_QUERIES", ROWS)  # all rows, so that no sample has to be repeated here
    monkeypatch.setattr(rows_module, "BLOCK", 100)
    monkeypatch.setattr(recall_module, "PIECE", 70)
    index, gallery = built(factory), vectors()
    unit = gallery / gallery.norm(dim=1, keepdim=True)
    nearest = NearestNeighbors(n_neighbors=11, algorithm="brute").fit(unit).kneighbors(unit, return_distance=False)
    found = index.search(gallery, 11)[1].tolist()
    hits = 0
    for position in range(ROWS):
        true = {1000 - other for other in nearest[position] if other != position}
        hits += len(true & {other for other in found[position] if other != 1000 - position})
    assert index.recall == pytest.approx(hits / (10 * ROWS), abs=2e-3)  # near ties may differ in float32
    assert 0.1 < index.recall <= 1


def test_search_parameters_increase_recall():
    little, much = built("IVF16,Flat"), built("IVF16,Flat", parameters="nprobe=16")
    assert little.recall < 0.8
    assert much.recall == 1


def test_recall_counts_ten_results_if_a_query_does_not_find_itself():
    rows = vectors(100)
    positions = exact(rows, rows, 100)[1][:, 1:]  # without the query itself
    found = np.concatenate([positions[:, -1:], positions[:, :10]], 1)  # one that is far, then the ten nearest

    def search(queries, k):
        assert (len(queries), k) == (100, 11)
        return torch.zeros(found.shape), torch.from_numpy(found)

    assert measure_recall(search, rows, np.arange(100)) == pytest.approx(0.9)


def test_one_row_has_no_recall():
    index = RetrievalIndex(DIM, "HNSW8")
    index.add(vectors(1))
    assert index.recall is None
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]
