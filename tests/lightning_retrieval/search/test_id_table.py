"""Ids up to the largest integer."""

import pytest
import torch

from lightning_retrieval import RetrievalIndex
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
