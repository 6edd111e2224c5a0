"""The table of all metrics that `RetrievalMetrics` computes.

To add a metric, write a function in `lightning_retrieval.metrics.definitions` and add one entry to `metrics_table`, or
to `EXTRA_METRICS` if it is computed only where it is named. The metric is then computed, logged, and returned for each
query; nothing else has to change.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.checks import short_repr
from lightning_retrieval.metrics import definitions, hierarchical
from lightning_retrieval.metrics.definitions import Divisor
from lightning_retrieval.ranking.ranks import PositiveRanks


class QueryMetric(NamedTuple):
    """A metric with one value per query.

    Args:
        function: from the ranks of a block of queries to one value per query.
        per_query: name of the values in the results of `per_query`.
        mean: name of their mean in the results of `compute`; None if no mean is reported.
        level: candidates that share the label of this level are positive, 0 is the finest; None if candidates that
            share the label of any level are positive.
    """

    function: Callable[[PositiveRanks], Float[Tensor, " query"]]
    per_query: str
    mean: str | None
    level: int | None = 0

    def values(self, ranks: PositiveRanks) -> Float[Tensor, " query"]:
        """The values of a block of queries, NaN for a query without a positive."""
        if self.level is not None:
            ranks = ranks.at_level(self.level)
        return self.function(ranks).masked_fill(ranks.count == 0, torch.nan)


# The metrics that are computed if they are named, without @k: the function, and the name of the values of the queries.
EXTRA_METRICS: dict[str, tuple[Callable[..., Float[Tensor, " query"]], str]] = {
    "mINP": (definitions.inverse_negative_penalty, "INP"),
    "precision": (definitions.precision_at_k, "precision"),
    "recall": (definitions.recall_of_positives_at_k, "recall"),
    "MRR": (definitions.reciprocal_rank_at_k, "RR"),
    "NDCG": (definitions.ndcg_at_k, "NDCG"),
}


def extra_metric(owner: str, name: str) -> QueryMetric:
    """The metric of this name, such as `"mINP"` or `"NDCG@10"`.

    Args:
        owner: prefix of error messages.
        name: as in the results of `compute`.

    Raises:
        ValueError: if there is no such metric.
    """
    kind, _, k = name.partition("@")
    is_at_k = re.fullmatch(r"[1-9][0-9]{0,17}", k) is not None
    needs_k = kind != "mINP"
    if kind not in EXTRA_METRICS or needs_k != is_at_k or name == "mINP@":
        raise ValueError(
            f"{owner}: `extra_metrics` must be from 'mINP', 'precision@k', 'recall@k', 'MRR@k' and 'NDCG@k' with "
            f"a number as k, such as 'NDCG@10', got {short_repr(name)}."
        )
    function, per_query = EXTRA_METRICS[kind]
    if not needs_k:
        return QueryMetric(function, per_query, name)
    return QueryMetric(partial(function, k=int(k)), f"{per_query}@{k}", name)


def metrics_table(
    ks: Sequence[int],
    map_ks: Sequence[int],
    map_divisor: Divisor,
    extra: Sequence[QueryMetric],
    *,
    alpha: float,
    levels: int,
) -> list[QueryMetric]:
    """All metrics, in the order in which they are reported.

    Args:
        ks: the k of R@k.
        map_ks: the k of mAP@k.
        map_divisor: the divisor of mAP@k.
        extra: further metrics.
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
        ap_at_k = partial(definitions.average_precision_at_k, k=k, divisor=map_divisor)
        table.append(QueryMetric(ap_at_k, f"AP@{k}", f"mAP@{k}"))
    table += extra
    if levels > 1:
        table += [
            QueryMetric(partial(hierarchical.h_ap, alpha=alpha), "H-AP", "H-AP", level=None),
            QueryMetric(hierarchical.average_set_intersection, "ASI", "ASI", level=None),
            QueryMetric(hierarchical.graded_ndcg, "NDCG-levels", "NDCG-levels", level=None),
        ]
    for level in range(1, levels):
        name = f"AP/level{level}"
        table.append(QueryMetric(definitions.average_precision, name, f"m{name}", level=level))
    for k in ks:
        table.append(QueryMetric(partial(definitions.recall_at_k, k=k), f"R@{k}", f"R@{k}"))
    return table
