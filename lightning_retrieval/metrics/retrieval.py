"""`RetrievalMetrics`: all metrics over a full evaluation set; `RandomGalleryMetrics`: over randomly drawn galleries.

To add a metric, write a function in `lightning_retrieval.metrics.definitions` and add one entry to `metrics_table`, or
to `EXTRA_METRICS` if it should be computed only on request.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.arguments import NotNegativeInt, Positive, checked, integers
from lightning_retrieval.checks import check_counts, check_matrix, check_strings, short_repr
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.metrics import definitions
from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.metrics.definitions import Divisor
from lightning_retrieval.metrics.gathering import Images, merge_duplicates
from lightning_retrieval.metrics.intervals import bootstrap_intervals
from lightning_retrieval.metrics.ranked_lists import RankedLists
from lightning_retrieval.metrics.skipped import skipped_queries
from lightning_retrieval.progress import Progress
from lightning_retrieval.ranking.labels import Role, check_dims, check_dims_fit, has_role
from lightning_retrieval.ranking.ranks import PositiveRanks
from lightning_retrieval.ranking.relevance import Relevance, SameLabel
from lightning_retrieval.ranking.rows import float64_device

REVERSE = "reverse/"  # prefix of the metrics that rank the queries for each gallery image


class QueryMetric(NamedTuple):
    """A metric with one value per query.

    Args:
        function: maps the ranks of a block of queries to one value per query.
        per_query: name of the values in the results of `per_query`.
        mean: name of the mean in the results of `compute`; None if no mean is reported.
        level: the label level, 0 for the finest, at which candidates must share the query's label to be positive; None
            if sharing any level suffices.
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


# The metrics that are computed on request, by name without @k: the function, and the name of the values per query.
EXTRA_METRICS: dict[str, tuple[Callable[..., Float[Tensor, " query"]], str]] = {
    "mINP": (definitions.inverse_negative_penalty, "INP"),
    "precision": (definitions.precision_at_k, "precision"),
    "recall": (definitions.recall_of_positives_at_k, "recall"),
    "MRR": (definitions.reciprocal_rank_at_k, "RR"),
    "NDCG": (definitions.ndcg_at_k, "NDCG"),
}


def extra_metric(name: str) -> QueryMetric:
    """The metric of this name, such as `"mINP"` or `"NDCG@10"`.

    Args:
        name: name of the metric in the results of `compute`.

    Raises:
        ValueError: if there is no such metric.
    """
    kind, _, k = name.partition("@")
    is_at_k = re.fullmatch(r"[1-9][0-9]{0,17}", k) is not None
    needs_k = kind != "mINP"
    if kind not in EXTRA_METRICS or needs_k != is_at_k or name == "mINP@":
        raise InvalidValue(
            "must be from 'mINP', 'precision@k', 'recall@k', 'MRR@k' and 'NDCG@k' with a number as k, such as "
            "'NDCG@10'",
            argument="extra_metrics",
            got=short_repr(name),
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
        alpha: exponent of the relevance in H-AP.
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
            QueryMetric(partial(definitions.h_ap, alpha=alpha), "H-AP", "H-AP", level=None),
            QueryMetric(definitions.average_set_intersection, "ASI", "ASI", level=None),
            QueryMetric(definitions.graded_ndcg, "NDCG-levels", "NDCG-levels", level=None),
        ]
    for level in range(1, levels):
        name = f"AP/level{level}"
        table.append(QueryMetric(definitions.average_precision, name, f"m{name}", level=level))
    for k in ks:
        table.append(QueryMetric(partial(definitions.recall_at_k, k=k), f"R@{k}", f"R@{k}"))
    return table


def query_values(ranked: RankedLists, metrics: Sequence[QueryMetric]) -> dict[str, Tensor]:
    """The values of each query, in the order of the queries' ids.

    With several processes, this is a collective operation, and each process gets the values of all queries.

    Args:
        ranked: queries and gallery.
        metrics: the metrics to compute.

    Returns:
        Tensors of shape (query,) by name: `"ids"` and `"labels"`, int64, and the values of each metric, float64. There
            are no labels if a rule of relevance has no classes. All are on the CPU if the device of the ids does not
            support float64.
    """
    shape = (len(metrics), len(ranked.query_ids))
    device = float64_device(ranked.query_ids.device)
    table = torch.zeros(shape, dtype=torch.float64, device=device)
    by_id = ranked.query_ids.argsort()
    columns = {"ids": ranked.query_ids[by_id].to(device)}
    if ranked.lists.rule.has_classes:
        columns["labels"] = ranked.lists.columns[by_id, 0].to(device)
    for metric, row in zip(metrics, table):
        columns[metric.per_query] = row
    if ranked.is_empty:
        table.fill_(torch.nan)
        return columns
    position = by_id.argsort().to(device)
    hidden = ranked.shard.index > 0
    with Progress("Ranking", total=len(ranked.queries.local), units="queries", hidden=hidden) as progress:
        for ranks in ranked.positive_ranks():
            for metric in metrics:
                columns[metric.per_query][position[ranks.queries]] = metric.values(ranks)
            progress.update(len(ranks.queries))
    ranked.shard.add_up(table)  # for each query, all other processes have zeros, so the sum is exact
    return columns


class RetrievalMetrics(EmbeddingMetric):
    """mAP, mAP@R, R-Precision, MRR, NDCG, R@k and more of a set of embeddings, equal for any number of processes.

    Update with the embeddings of each batch, and compute once at the end. Each row is a query, a gallery image, or
    both; if all rows are both, each row is ranked against all others. `lightning_retrieval.metrics.definitions` defines
    the metrics.

    Args:
        ks: the k of R@k, each >= 1.
        map_ks: the k of mAP@k, each >= 1; empty for no mAP@k.
        map_divisor: the divisor of mAP@k: `"min(k, R)"`, R the number of positives of the query; `"hits"`, the number
            of positives with a rank of at most k; or `"R"`.
        extra_metrics: names of further metrics: `"mINP"`, and `"precision@k"`, `"recall@k"`, `"MRR@k"` and
            `"NDCG@k"` for any k, such as `"NDCG@10"`.
        alpha: exponent of the relevance in H-AP, > 0; for labels of several levels. Larger values give finer levels
            more weight.
        dims: numbers of dimensions, in ascending order. All metrics are also computed from only these first dimensions
            of each embedding; for models trained with `NestedLoss`.
        reverse: whether to also rank the queries for each gallery image, as for texts and images that search each
            other. The names of these metrics begin with `"reverse/"`, such as `"reverse/mAP"`.
        settings: settings of `EmbeddingMetric` (`query_expansion`, `database_augmentation`, `embeddings_on_cpu`,
            `relevance`) and of `torchmetrics.Metric`. With `relevance`, relevance has one level, so there is no H-AP.

    Raises:
        ValueError: if `ks` is empty or holds a number below 1, `map_divisor` or a name of `extra_metrics` is unknown,
            `dims` does not ascend or is larger than the embeddings, shapes do not match, an embedding is not finite, an
            id has two labels, label levels do not nest, or there are several processes and no ids.
        TypeError: if a k is not an integer, embeddings are not floating point, or labels are not integers.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RetrievalMetrics
        >>> metrics = RetrievalMetrics(ks=(1, 2))
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.7, 0.3], [0.0, 1.0]])
        >>> metrics.update(embeddings, torch.tensor([5, 5, 2, 2]), ids=torch.arange(4))
        >>> results = metrics.compute()
        >>> {name: round(value.item(), 2) for name, value in results.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'mAP': 0.83, 'mAP@R': 0.75, 'R-Precision': 0.75, 'MRR': 0.83, 'NDCG': 0.88, 'R@1': 0.75, 'R@2': 0.75,
         'skipped_queries': 0.0}
        >>> metrics.per_query()["AP"]
        tensor([1.0000, 1.0000, 0.3333, 1.0000], dtype=torch.float64)

        Wrappers of torchmetrics that need a single value, such as `MetricTracker` and `MinMaxMetric`, take one of the
        metrics. (`BootStrapper` draws rows repeatedly, so that a query finds copies of itself: `intervals` does not.)

        >>> from torchmetrics.wrappers import MetricTracker
        >>> tracker = MetricTracker(RetrievalMetrics(ks=(1,))["mAP"], maximize=True)
        >>> tracker.increment()
        >>> tracker.update(embeddings, torch.tensor([5, 5, 2, 2]), ids=torch.arange(4))
        >>> round(tracker.best_metric(), 2)
        0.83

    Cost:
        The embeddings are kept until `reset`. `compute` holds one block of scores at a time, never all of them, and
        takes little longer than the product of queries and gallery. Queries and gallery are distributed over the W
        processes: each holds 1 / W of both, gathers the gallery twice, block by block, and ranks its queries. If
        queries have very many positives, it gathers the gallery more often.
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 10, 100),
        map_ks: Sequence[int] = (),
        *,
        map_divisor: Divisor = "min(k, R)",
        extra_metrics: Sequence[str] = (),
        alpha: Positive = 1.0,
        dims: Sequence[int] = (),
        reverse: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.reverse = reverse
        with owned_by(type(self).__name__):
            self.dims = check_dims(dims, may_be_empty=True)
            self.ks = check_counts("ks", ks)
            self.map_ks = check_counts("map_ks", map_ks, may_be_empty=True)
            self.map_divisor = checked(self, map_divisor=map_divisor)
            check_strings("extra_metrics", extra_metrics)
            self.extra_metrics = tuple(dict.fromkeys(extra_metrics))
            self._extra = [extra_metric(name) for name in self.extra_metrics]
        self.alpha = checked(self, alpha=alpha)
        self.ranked_images = 0  # number of images in the longest list of the last `compute`
        self.ranked_queries = 0  # number of queries in the longest list of the other direction
        self._means_of_values: dict[str, str] = {}  # the name of the mean of each value in the last `compute`
        self._rule: Relevance = SameLabel()  # that of the lists of the last `compute`
        self.has_one_label = False  # whether all images of the last `compute` had the same label

    @owned
    def compute(self) -> dict[str, Tensor]:
        """Compute all metrics.

        Returns:
            Float64 scalars in [0, 1] by name: `"mAP"`, `"mAP@R"`, `"R-Precision"`, `"MRR"`, `"NDCG"`, `"mAP@k"` and
                `"R@k"` for each k, and `extra_metrics`. `"skipped_queries"` is the number of queries without any
                relevant candidate; `why_skipped` says why. Labels of several levels add `"H-AP"`, `"ASI"` and
                `"NDCG-levels"`, means over the queries with a candidate that shares any label, and `"mAP/level1"` and
                so on, the mAP if images that share the label of this level are relevant. Each of `dims` adds the same
                metrics of the first dimensions, named `"mAP/16d"` and so on. With `reverse`, all of these follow again
                as `"reverse/mAP"` and so on. If all queries are skipped, values are NaN and a warning is issued.
        """
        collected = self._gather_collected()
        results, values = self._of_direction(collected)
        self._cached_values, self._updates_of_values = {"": values}, self.update_count
        if self.reverse:
            longest = self.ranked_images
            of_reverse, self._cached_values[REVERSE] = self._of_direction(_with_swapped_roles(collected))
            self.ranked_images, self.ranked_queries = longest, self.ranked_images
            results |= {f"{REVERSE}{name}": value for name, value in of_reverse.items()}
        return results

    def _of_direction(self, collected: Images) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The metrics of the gallery's ranking for each query, and the values of each query."""
        rows = merge_duplicates(collected)
        table = self._table(rows)
        values = self._query_values(rows, table)
        of_all_dims = self._means(table, values)
        results = dict(of_all_dims)
        for dim in self.dims:
            means = of_all_dims
            if dim < collected.embeddings.batches[0].shape[1]:
                shortened = merge_duplicates(collected.shortened(dim), compare=False)
                means = self._means(table, self._query_values(shortened, table))
            results |= {f"{name}/{dim}d": mean for name, mean in means.items()}
        is_first_label = rows.labels[:, 0] == rows.labels[0, 0]
        self.has_one_label = self.relevance is None and bool(is_first_label.all())
        is_skipped = values["AP"].isnan()
        if bool(is_skipped.all()):
            self._warn_of_no_positive(len(is_skipped), rows, collected)
        results["skipped_queries"] = is_skipped.sum().double()
        return results, values

    def per_query(self, reverse: bool = False) -> dict[str, Tensor]:
        """The values of each query, in the order of the queries' ids, for the analysis of failures.

        Args:
            reverse: whether to return the values of each gallery image, for which the queries are ranked.

        Returns:
            Tensors of shape (query,) by name. `"ids"` and `"labels"` are int64; there are no labels if `relevance` is
                a rule without classes. The metrics are float64:
                `"AP"`, `"AP@R"`, `"R-Precision"`, `"RR"`, `"NDCG"`, `"AP@k"` for each k of `map_ks`, `"first_hit"` (the
                rank of the first positive), `"R@k"` for each k of `ks`, `extra_metrics` (`"INP"` for mINP, `"RR@k"` for
                MRR@k) and, with labels of several levels, `"H-AP"`, `"ASI"`, `"NDCG-levels"`, `"AP/level1"`, ... Values
                are NaN if the query has no relevant candidate; `why_skipped` says why. All processes must call this
                method, unless they have already called `compute`, and all get the values of all queries. `dims` has no
                effect here.
        """
        if reverse and not self.reverse:
            rule = "needs metrics made with reverse=True"
            raise InvalidValue(rule, type(self).__name__, "reverse", got="reverse=False")
        if not self._cached_values or self._updates_of_values != self.update_count:
            self.compute()
        values = self._cached_values[REVERSE if reverse else ""]
        return {name: of_queries.clone() for name, of_queries in values.items()}

    def why_skipped(self, reverse: bool = False) -> dict[int, str]:
        """Why each query without a relevant candidate has none, by its id. In `per_query`, its values are NaN.

        All processes must call this method, and all get the reasons of all queries.

        Args:
            reverse: whether to return the reasons of gallery images, for which the queries are ranked.

        Returns:
            The end of a sentence for each id, such as `"no other image of its label is in the gallery"`. A rule by
                which relevant images need not share labels is named, and what it reads is not explained.

        Example:
            >>> import torch
            >>> from lightning_retrieval.metrics import RetrievalMetrics
            >>> metrics = RetrievalMetrics(ks=(1,))
            >>> labels, roles = torch.tensor([5, 5, 2, 7, 7]), torch.tensor([3, 3, 3, 1, 1])  # 1: only queries
            >>> metrics.update(torch.eye(5), labels, torch.arange(5), roles)
            >>> metrics.why_skipped()  # doctest: +NORMALIZE_WHITESPACE
            {2: 'there is no other image of its label',
             3: 'no other image of its label is in the gallery',
             4: 'no other image of its label is in the gallery'}
        """
        values = self.per_query(reverse)
        collected = self._gather_collected()
        if reverse:
            collected = _with_swapped_roles(collected)
        images = self._as_ranked(merge_duplicates(collected, compare=False))
        ids = values["ids"][values["AP"].isnan()].unique()
        return skipped_queries(ids, images, collected, self._rule).by_id()

    def values_of_means(self) -> dict[str, Tensor]:
        """The values of each query by the name of their mean in the results of `compute`, to join them with other sets.

        They are NaN if the query has no relevant candidate. `dims` has none. All processes must call this method,
        unless they have already called `compute`.
        """
        tables = {"": self.per_query()}
        if self.reverse:
            tables[REVERSE] = self.per_query(reverse=True)
        values: dict[str, Tensor] = {}
        for prefix, table in tables.items():
            values |= {prefix + mean: table[name] for name, mean in self._means_of_values.items() if name in table}
        return values

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % interval of each mean over queries, by its name in the results of `compute`.

        It is found by bootstrap over classes, or over queries if `relevance` is a rule without classes, with a fixed
        seed. It is NaN if only one class has a value. `dims` has no intervals. All processes must call this method,
        unless they have already called `compute`, and all get the same intervals.
        """
        tables = {"": self.per_query()}
        if self.reverse:
            tables[REVERSE] = self.per_query(reverse=True)
        intervals = {}
        for prefix, table in tables.items():
            names = [name for name in self._means_of_values if name in table]
            ends = bootstrap_intervals(torch.stack([table[name] for name in names]), table.get("labels", table["ids"]))
            for name, (low, high) in zip(names, ends.tolist()):
                intervals[prefix + self._means_of_values[name]] = (low, high)
        return intervals

    def extra_repr(self) -> str:
        at_k = f"ks={self.ks}, map_ks={self.map_ks}, map_divisor={self.map_divisor!r}"
        settings = f"{at_k}, extra_metrics={self.extra_metrics}, alpha={self.alpha}, dims={self.dims}"
        if self.reverse:
            settings += ", reverse=True"
        if self.relevance is None:
            return settings
        return f"{settings}, relevance={self.relevance}"

    def _append(self, embeddings: Tensor, labels: Tensor, given: Mapping[str, Tensor]) -> None:
        check_matrix("embeddings", embeddings)
        check_dims_fit(self.dims, embeddings)
        super()._append(embeddings, labels, given)

    def _means(self, table: Sequence[QueryMetric], values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over the queries that have a value, by name. All metrics of a level have values for the same."""
        means = {}
        with_value: dict[int | None, Tensor] = {}  # by level: the host waits for each of these sizes
        for metric in table:
            of_queries = values[metric.per_query]
            if metric.level not in with_value:
                with_value[metric.level] = (~of_queries.isnan()).nonzero()[:, 0]
            if metric.mean is not None:
                self._means_of_values[metric.per_query] = metric.mean
                means[metric.mean] = of_queries[with_value[metric.level]].mean()
        return means

    def _table(self, rows: Images) -> list[QueryMetric]:
        """The metrics of these rows, which have as many levels as their labels."""
        levels = rows.labels.shape[1]
        if self.relevance is not None:
            levels = 1
        return metrics_table(self.ks, self.map_ks, self.map_divisor, self._extra, alpha=self.alpha, levels=levels)

    def _query_values(self, rows: Images, table: Sequence[QueryMetric]) -> dict[str, Tensor]:
        """The results of `per_query` for these rows and metrics."""
        ranked = self.ranked_lists(rows)
        self._rule = ranked.lists.rule
        if not ranked.is_empty:
            every_query_in_gallery = bool((ranked.self_index >= 0).all())
            self.ranked_images = len(ranked.gallery_ids) - int(every_query_in_gallery)
        return query_values(ranked, table)

    def _warn_of_no_positive(self, queries: int, rows: Images, collected: Images) -> None:
        """Warn that no query has a positive, and why."""
        images = self._as_ranked(rows)
        is_query, is_gallery = (has_role(images.columns["roles"], role) for role in (Role.QUERY, Role.GALLERY))
        if not bool(is_query.any()):
            cause = "no image has the role of a query"
        elif not bool(is_gallery.any()):
            cause = "the gallery is empty"
        else:
            cause = skipped_queries(images.ids[is_query], images, collected, self._rule).summary()
        warnings.warn(
            f"{type(self).__name__}: none of the {queries} queries has a relevant candidate, so the metrics are NaN; "
            f"{cause}.",
            stacklevel=3,
        )

    def _as_ranked(self, rows: Images) -> Images:
        """The images with the roles in which they are ranked."""
        return rows


def _with_swapped_roles(collected: Images) -> Images:
    """The same rows, in which queries are the gallery and the gallery are queries."""
    roles = collected.columns["roles"]
    is_query, is_gallery = has_role(roles, Role.QUERY), has_role(roles, Role.GALLERY)
    swapped = is_query * int(Role.GALLERY) + is_gallery * int(Role.QUERY)
    return collected.with_roles(swapped)


def draw_one_of_each(labels: Int[Tensor, " row"], generator: torch.Generator) -> Bool[Tensor, " row"]:
    """True for one random row of each label."""
    unique, inverse = torch.unique(labels, return_inverse=True)
    random_order = torch.randperm(len(labels), generator=generator).to(labels.device)
    first = torch.full_like(unique, len(labels)).scatter_reduce(0, inverse, random_order, "amin")
    return random_order == first[inverse]


class RandomGalleryMetrics(RetrievalMetrics):
    """`RetrievalMetrics` whose gallery is one random image of each label and whose queries are all other images.

    The gallery is drawn several times, and the values are means over the draws. The draws depend only on `seed` and on
    the ids and labels. Images without a role, such as unreadable images, are skipped; otherwise roles are ignored. A
    rule of relevance must have classes, of each of which one image is drawn.

    Args:
        ks: the k of R@k, each >= 1.
        draws: number of galleries, from 1 to 1,000,000.
        seed: seed of the draws, >= 0.
        settings: settings of `RetrievalMetrics` (`map_ks`, `map_divisor`, `extra_metrics`, `alpha`), of
            `EmbeddingMetric` (`query_expansion`, `database_augmentation`, `embeddings_on_cpu`, `relevance`) and of
            `torchmetrics.Metric`.

    Raises:
        ValueError: if `draws` is below 1 or `seed` below 0, or `relevance` has no classes; otherwise as for
            `RetrievalMetrics`.
        TypeError: if `draws` or `seed` is not an integer; otherwise as for `RetrievalMetrics`.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RandomGalleryMetrics
        >>> metrics = RandomGalleryMetrics(ks=(1,), draws=10)
        >>> metrics.update(torch.eye(6)[[0, 0, 0, 1, 1, 1]], torch.tensor([5, 5, 5, 2, 2, 2]), ids=torch.arange(6))
        >>> metrics.compute()["R@1"]
        tensor(1., dtype=torch.float64)

    Relations:
        `per_query` returns one row for each draw and query.

    Source:
        Liu, Tian, Wang, Pang and Huang, CVPR 2016: the test protocol of VehicleID.
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 5),
        *,
        draws: Annotated[int, integers(1, 1000000)] = 10,
        seed: NotNegativeInt = 0,
        **settings: Any,
    ) -> None:
        super().__init__(ks, **settings)
        self.draws = checked(self, draws=draws)
        self.seed = checked(self, seed=seed)
        if self.reverse:
            rule = "must be False, because galleries are drawn at random"
            raise InvalidValue(rule, type(self).__name__, "reverse", got="True", cure="use RetrievalMetrics")
        if self.relevance is not None and not self.relevance.has_classes:
            rule = "must be a rule with classes, of each of which one image is drawn"
            raise InvalidValue(rule, type(self).__name__, "relevance", got=self.relevance, cure="use RetrievalMetrics")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, draws={self.draws}, seed={self.seed}"

    def _as_ranked(self, rows: Images) -> Images:
        has_any_role = has_role(rows.columns["roles"], Role.BOTH)
        return rows.with_roles(has_any_role * int(Role.BOTH))  # each image is drawn into a gallery, or is a query

    def _query_values(self, rows: Images, table: Sequence[QueryMetric]) -> dict[str, Tensor]:
        """The results of `per_query`, concatenated over the draws."""
        rows = rows.select(has_role(rows.columns["roles"], Role.BOTH))  # images with any role
        generator = torch.Generator().manual_seed(self.seed)
        draws = []
        for _ in range(self.draws):
            in_gallery = draw_one_of_each(rows.labels[:, 0], generator)
            roles = torch.where(in_gallery, int(Role.GALLERY), int(Role.QUERY))
            draws.append(super()._query_values(rows.with_roles(roles), table))
        values = {}
        for name in draws[0]:
            values[name] = torch.cat([draw[name] for draw in draws])
        return values
