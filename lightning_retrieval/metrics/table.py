"""The table of all metrics that `RetrievalMetrics` computes.

To add a metric, write a function in `lightning_retrieval.metrics.definitions` and add one entry to `metrics_table`. The
metric is then computed, logged, and returned for each query; nothing else has to change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.metrics import definitions, hierarchical
from lightning_retrieval.ranking.ranks import PositiveRanks


class QueryMetric(NamedTuple):
    """A metric with one value per query.

    Args:
        function: from the ranks of a block of queries to one value per query.
        per_query: name of the values in the results of `per_query`.
        mean: name of their mean in the results of `compute`; None if no mean is reported.
        hierarchical: whether positives share any label level with the query; otherwise they share the finest one.
    """

    function: Callable[[PositiveRanks], Float[Tensor, " query"]]
    per_query: str
    mean: str | None
    hierarchical: bool = False

    def values(self, ranks: PositiveRanks) -> Float[Tensor, " query"]:
        """The values of a block of queries, NaN for a query without a positive."""
        if not self.hierarchical:
            ranks = ranks.finest
        return self.function(ranks).masked_fill(ranks.count == 0, torch.nan)


def metrics_table(ks: Sequence[int], map_ks: Sequence[int], alpha: float, levels: int) -> list[QueryMetric]:
    """All metrics, in the order in which they are reported.

    Args:
        ks: the k of R@k.
        map_ks: the k of mAP@k.
        alpha: how much more a finer level counts in H-AP.
        levels: number of label levels; hierarchical metrics need at least 2.
    """
    table = [
        QueryMetric(definitions.average_precision, "AP", "mAP"),
        QueryMetric(definitions.average_precision_at_r, "AP@R", "mAP@R"),
        QueryMetric(definitions.r_precision, "R-Precision", "R-Precision"),
        QueryMetric(definitions.reciprocal_rank, "RR", "MRR"),
        QueryMetric(definitions.ndcg, "NDCG", "NDCG"),
        QueryMetric(definitions.first_hit, "first_hit", None),
    ]
    for k in map_ks:
        table.append(QueryMetric(partial(definitions.average_precision_at_k, k=k), f"AP@{k}", f"mAP@{k}"))
    if levels > 1:
        table += [
            QueryMetric(partial(hierarchical.h_ap, alpha=alpha), "H-AP", "H-AP", hierarchical=True),
            QueryMetric(hierarchical.average_set_intersection, "ASI", "ASI", hierarchical=True),
            QueryMetric(hierarchical.graded_ndcg, "NDCG-levels", "NDCG-levels", hierarchical=True),
        ]
    for k in ks:
        table.append(QueryMetric(partial(definitions.recall_at_k, k=k), f"R@{k}", f"R@{k}"))
    return table
