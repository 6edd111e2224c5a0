"""The table of all metrics that `RetrievalMetrics` computes.

To add a metric, write a function in `lightning_retrieval.metrics.definitions` and add one entry to `METRICS`. The
metric is then computed, logged, and returned for each query; nothing else has to change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.metrics import definitions, hierarchical
from lightning_retrieval.ranking.ranks import PositiveRanks


@dataclass(frozen=True)
class QueryMetric:
    """A metric with one value per query.

    Args:
        function: from the ranks of a block of queries, and maybe further arguments, to one value per query.
        per_query: name of the values in the results of `per_query`.
        mean: name of their mean in the results of `compute`; None if no mean is reported.
        arguments: names of further arguments of the function, which are settings of `RetrievalMetrics`.
        for_each_k: name of the setting of `RetrievalMetrics` that holds several k. The function is called for each of
            them with the argument `k`, which replaces `{k}` in both names. None if there is no k.
        hierarchical: the metric is computed only for labels of several levels, and positives share any level with the
            query. Otherwise positives share the finest label.
    """

    function: Callable[..., Float[Tensor, " query"]]
    per_query: str
    mean: str | None
    arguments: tuple[str, ...] = ()
    for_each_k: str | None = None
    hierarchical: bool = False

    def values(self, ranks: PositiveRanks) -> Float[Tensor, " query"]:
        """The values of a block of queries, NaN for a query without a positive."""
        if not self.hierarchical:
            ranks = ranks.finest
        return self.function(ranks).masked_fill(ranks.count == 0, torch.nan)

    def with_settings(self, settings: Mapping[str, Any]) -> list["QueryMetric"]:
        """The metric with all further arguments filled in, once for each k."""
        arguments = {name: settings[name] for name in self.arguments}
        if self.for_each_k is None:
            return [self._with_arguments(arguments)]
        return [self._with_arguments({**arguments, "k": k}) for k in settings[self.for_each_k]]

    def _with_arguments(self, arguments: dict[str, Any]) -> "QueryMetric":
        per_query, mean = self.per_query, self.mean
        if "k" in arguments:
            per_query = per_query.format(k=arguments["k"])
            mean = mean and mean.format(k=arguments["k"])
        function = partial(self.function, **arguments)
        return QueryMetric(function, per_query, mean, hierarchical=self.hierarchical)


# The function, the name of its values in `per_query`, and the name of their mean in `compute`.
METRICS = (
    QueryMetric(definitions.average_precision, "AP", "mAP"),
    QueryMetric(definitions.average_precision_at_r, "AP@R", "mAP@R"),
    QueryMetric(definitions.r_precision, "R-Precision", "R-Precision"),
    QueryMetric(definitions.reciprocal_rank, "RR", "MRR"),
    QueryMetric(definitions.ndcg, "NDCG", "NDCG"),
    QueryMetric(definitions.average_precision_at_k, "AP@{k}", "mAP@{k}", for_each_k="map_ks"),
    QueryMetric(definitions.first_hit, "first_hit", None),
    QueryMetric(hierarchical.h_ap, "H-AP", "H-AP", arguments=("alpha",), hierarchical=True),
    QueryMetric(hierarchical.average_set_intersection, "ASI", "ASI", hierarchical=True),
    QueryMetric(hierarchical.graded_ndcg, "NDCG-levels", "NDCG-levels", hierarchical=True),
    QueryMetric(definitions.recall_at_k, "R@{k}", "R@{k}", for_each_k="ks"),
)


def metrics_for(settings: Mapping[str, Any], levels: int) -> list[QueryMetric]:
    """All metrics for labels of this number of levels.

    Args:
        settings: those of `RetrievalMetrics`, by name.
        levels: number of label levels; hierarchical metrics need at least 2.
    """
    found: list[QueryMetric] = []
    for metric in METRICS:
        if levels > 1 or not metric.hierarchical:
            found += metric.with_settings(settings)
    return found
