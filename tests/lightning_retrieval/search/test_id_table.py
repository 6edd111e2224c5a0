"""Ids up to the largest integer, and ids and paths that are not copied."""

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.packed_strings import PackedStrings
from lightning_retrieval.search.id_table import IdTable
from tests.lightning_retrieval.search.vectors import DIM, vectors


def test_the_largest_ids():
    index = RetrievalIndex(DIM)
    index.add(vectors(1), torch.tensor([2**63 - 3]))
    index.add(vectors(2))
    assert index.ids.tolist() == [2**63 - 3, 2**63 - 2, 2**63 - 1]
    with pytest.raises(ValueError, match=rf"`ids` must be given, .* after the largest id, {2**63 - 1}\.$"):
        index.add(vectors(1))
    index.add(vectors(0))
    index.add(vectors(1), torch.tensor([0]))
    assert index.ids[:2].tolist() == [0, 2**63 - 3]


def test_the_first_rows_are_copied_only_to_sort_them():
    ids, paths = np.array([3, 5, 9]), PackedStrings(["a", "", "é"])
    table = IdTable.empty()
    table.add(ids, paths)
    assert table.ids is ids
    assert table.paths is paths
    table.add(np.array([12, 10]), ["b", "c"])
    table.add(np.array([4]), None)
    table.add(np.array([20, 30]), None)
    assert table.ids.tolist() == [3, 4, 5, 9, 10, 12, 20, 30]
    assert list(table.paths) == ["a", "", "", "é", "c", "b", "", ""]
    assert (ids.tolist(), list(paths)) == ([3, 5, 9], ["a", "", "é"])
