"""Recall of an approximate index: the fraction of the nearest rows by exact search that the index finds as well."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.ranking.precision import ieee_products
from lightning_retrieval.search.rows import PIECE, Rows, normalized_rows, sample_rows

RECALL_AT = 10
RECALL_QUERIES = 256


def measure_recall(
    search: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    embeddings: Rows,
    ids: NDArray[np.int64],
) -> float | None:
    """Recall@10 of an index on a sample of its rows as queries; None if there is a single row.

    A row is not its own neighbour, whether the index finds it or not.

    Args:
        search: of the index; it takes queries and k, and returns similarities and ids.
        embeddings: all rows of the index.
        ids: of these rows.

    Cost:
        An exact search for 256 queries, block by block.
    """
    k = min(RECALL_AT, len(embeddings) - 1)
    if k == 0:
        return None
    sample = sample_rows(len(embeddings), RECALL_QUERIES)
    queries = torch.from_numpy(normalized_rows(embeddings[sample]))
    query_ids = torch.from_numpy(ids)[sample]
    expected = _exact_neighbours(queries, query_ids, embeddings, ids, k)
    _, found = search(queries, k + 1)
    hits = 0
    for found_ids, expected_ids, query_id in zip(found.tolist(), expected.tolist(), query_ids.tolist()):
        others = [other for other in found_ids if other != query_id]
        hits += len(set(others[:k]) & set(expected_ids))
    return hits / expected.numel()


def _exact_neighbours(
    queries: Float[Tensor, "query dim"],
    query_ids: Int[Tensor, " query"],
    embeddings: Rows,
    ids: NDArray[np.int64],
    k: int,
) -> Int[Tensor, "query k"]:
    """Ids of the k rows nearest to each query, without the query itself."""
    best_scores = torch.full((len(queries), k), -torch.inf)
    best_ids = torch.full((len(queries), k), -1)
    for begin in range(0, len(embeddings), PIECE):
        piece = torch.from_numpy(normalized_rows(embeddings[begin : begin + PIECE]))
        piece_ids = torch.from_numpy(ids[begin : begin + len(piece)]).expand(len(queries), -1)  # (query, piece)
        with ieee_products():
            scores = queries @ piece.T
        scores = scores.masked_fill(piece_ids == query_ids[:, None], -torch.inf)
        best_scores, order = torch.cat([best_scores, scores], 1).topk(k)
        best_ids = torch.cat([best_ids, piece_ids], 1).gather(1, order)
    return best_ids
