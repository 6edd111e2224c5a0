"""mAP and mP@k of Revisited Oxford and Paris, where lists define the relevant images of each query.

Conventions (as in the official code). Each query has easy, hard and junk images. Three setups use them as follows:

    setup     positives     removed from the query's list
    easy      easy          hard, junk
    medium    easy, hard    junk
    hard      hard          easy, junk

All other images are wrong. With n positives, r the rank of one of them and p the number of positives that score at
least as high,

    AP      sum of ((p - 1) / (r - 1) + p / r) / 2 over the positives, / n, by the trapezoid rule
            ((p - 1) / (r - 1) counts as 1 where r = 1)
    mP@k    number of positives with r <= k', / k', where k' is the smaller of k and the last positive's rank

Ties count against the model: r is the number of images in the list, without removed ones, that score at least as high.
Positives that are missing in the gallery are never found, but are counted in n. A query without positives in a setup is
skipped in the means of this setup, and the number of skipped queries is reported.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_counts
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.metrics.gathering import Images
from lightning_retrieval.metrics.ranked_lists import RankedLists
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.ranks import PositiveRanks
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import float64_device

ImagesOfQueries = Mapping[int, Sequence[int]]  # ids of images by the id of a query

# The lists whose images are positives in each setup. The images of the other lists are removed from the query's list.
SETUPS = {"easy": ("easy",), "medium": ("easy", "hard"), "hard": ("hard",)}


class SetupRule(Relevance):
    """The rule of a setup, which reads the ids: some lists hold the relevant images, others those that are removed.

    Args:
        relevant: lists of the relevant images of each query.
        removed: lists of the images that are no candidates.
    """

    reads = ("ids",)
    has_classes = False

    def __init__(self, relevant: Sequence[ImagesOfQueries], removed: Sequence[ImagesOfQueries]) -> None:
        self.relevant, self.removed = relevant, removed

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        ids = references[:, 0].contiguous()
        by_id = ids.argsort()
        relevant = torch.zeros(len(queries), len(ids), dtype=torch.bool, device=ids.device)
        candidate = torch.ones_like(relevant)
        for row, query in enumerate(queries[:, 0].tolist()):
            relevant[row, _positions(ids, by_id, self.relevant, query)] = True
            candidate[row, _positions(ids, by_id, self.removed, query)] = False
        return relevant, candidate

    def at_most(self, queries: Tensor, references: Tensor) -> Tensor:
        listed = []
        for query in queries[:, 0].tolist():
            sizes = [len(images.get(query, ())) for images in (*self.relevant, *self.removed)]
            listed.append(sum(sizes))
        return torch.tensor(listed, dtype=torch.int64, device=queries.device)


def _positions(
    ids: Int[Tensor, " image"], by_id: Int[Tensor, " image"], lists: Iterable[ImagesOfQueries], query: int
) -> Int[Tensor, " listed"]:
    """The positions of the images of these lists of a query, without those that are missing.

    Args:
        ids: ids of all images.
        by_id: the order of the ids.
        lists: the lists of all queries.
        query: the id of the query.
    """
    listed = torch.tensor(
        [image for images in lists for image in images.get(query, ())], dtype=torch.int64, device=ids.device
    )
    first = torch.searchsorted(ids, listed, sorter=by_id)
    last = torch.searchsorted(ids, listed, sorter=by_id, right=True)
    return by_id[first[last > first]]


def trapezoid_ap(ranks: PositiveRanks, total: Int[Tensor, " query"]) -> Float[Tensor, " query"]:
    """AP of each query by the trapezoid rule.

    Args:
        ranks: ranks of the positives that are in the gallery.
        total: number of positives of each query, including positives that are missing in the gallery.
    """
    precision_before = (ranks.rank_among_positives - 1) / (ranks.rank - 1).clamp(min=1).double()
    precision_before = torch.where(ranks.rank > 1, precision_before, 1.0)
    trapezoid = (precision_before + ranks.precision) / 2
    return torch.where(ranks.is_positive, trapezoid, 0.0).sum(1) / total


def precision_up_to_last(ranks: PositiveRanks, k: int) -> Float[Tensor, " query"]:
    """P@k of each query, of which k is at most the rank of its last positive."""
    last_rank = ranks.rank.masked_fill(~ranks.is_positive, 0).amax(1)
    smaller_k = last_rank.clamp(max=k)
    hits = (ranks.is_positive & (ranks.rank <= smaller_k[:, None])).sum(1)
    return hits / smaller_k.clamp(min=1).double()


class RevisitedMetrics(EmbeddingMetric):
    """mAP and mP@k in the setups easy, medium and hard of Revisited Oxford and Paris.

    The lists alone define which images are relevant or junk; labels, cameras and `relevance` are ignored. `update`
    needs `roles` to tell queries from gallery images.

    Args:
        easy: maps the id of each query to the ids of its easy positives.
        hard: maps the id of each query to the ids of its hard positives.
        junk: maps the id of each query to the ids of images that are neither relevant nor wrong.
        ks: the k of mP@k, each >= 1.
        settings: settings of `EmbeddingMetric` (`query_expansion`, `database_augmentation`, `embeddings_on_cpu`) and of
            `torchmetrics.Metric`.

    Raises:
        ValueError: if the three mappings do not have the same queries, an image occurs twice in a query's lists, or
            `ks` is empty or holds a number below 1; in `compute`, if a query has no lists; otherwise as
            for `EmbeddingMetric`.
        TypeError: if a k is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RevisitedMetrics
        >>> metrics = RevisitedMetrics(easy={4: [0]}, hard={4: [2]}, junk={4: [1]}, ks=(1,))
        >>> embeddings = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [1.0, 0.0]])
        >>> roles = torch.tensor([2, 2, 2, 2, 1])  # the last image is the query, the others are the gallery
        >>> metrics.update(embeddings, torch.zeros(5).long(), torch.arange(5), roles)
        >>> results = metrics.compute()
        >>> {name: round(value.item(), 3) for name, value in results.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'mAP': 0.792, 'mAP/easy': 1.0, 'mP@1/easy': 1.0, 'skipped_queries/easy': 0.0, 'mAP/medium': 0.792,
         'mP@1/medium': 1.0, 'skipped_queries/medium': 0.0, 'mAP/hard': 0.25, 'mP@1/hard': 0.0,
         'skipped_queries/hard': 0.0}

    Cost:
        The embeddings are kept until `reset`. `compute` ranks the gallery for each query three times, once in each
        setup, and holds one block of scores at a time.

    Relations:
        The evaluation sets of `RevisitedOxford` and `RevisitedParis` use this metric.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, "Revisiting Oxford and Paris: large-scale image retrieval
        benchmarking", CVPR 2018, section 3.3, and `compute_map` of its official code.
    """

    def __init__(
        self,
        easy: ImagesOfQueries,
        hard: ImagesOfQueries,
        junk: ImagesOfQueries,
        *,
        ks: Sequence[int] = (1, 5, 10),
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        with owned_by(type(self).__name__):
            self.ks = check_counts("ks", ks)
            self.easy, self.hard, self.junk = easy, hard, junk
            self._files = {"easy": easy, "hard": hard, "junk": junk}
            _check_files(self._files)

    @owned
    def compute(self) -> dict[str, Tensor]:
        """Compute all metrics.

        Returns:
            Float64 scalars in [0, 1] by name: `"mAP"`, the mAP of the medium setup, and for each setup, such as easy,
                `"mAP/easy"` and, for each k, `"mP@k/easy"`. `"skipped_queries/easy"` is the number of queries without
                positives. If all queries of a setup are skipped, its metrics are NaN and a warning is issued.
        """
        values_of_setup = self._query_values()
        results: dict[str, Tensor] = {}
        empty_setups = []
        for setup, values in values_of_setup.items():
            means = torch.stack(list(values.values()), 1).nanmean(0)
            for name, mean in zip(values, means):
                results[f"{name}/{setup}"] = mean
            is_skipped = values["mAP"].isnan()
            results[f"skipped_queries/{setup}"] = is_skipped.sum().double()
            if bool(is_skipped.all()):
                empty_setups.append(setup)
        if empty_setups:
            warnings.warn(
                f"{type(self).__name__}: no query has positives in the setup {' and '.join(empty_setups)}, so its "
                "metrics are NaN.",
                stacklevel=2,
            )
        return {"mAP": results["mAP/medium"], **results}

    def ranked_lists(self, images: Images | None = None) -> RankedLists:
        """The ranked lists of the setup medium, instead of those of labels."""
        if images is None:
            images = self.gather()
        columns = {"roles": images.columns["roles"]}
        by_id = replace(images, labels=images.ids[:, None], columns=columns, relevance=self._rule_of("medium"))
        return super().ranked_lists(by_id)

    def extra_repr(self) -> str:
        return f"ks={self.ks}"

    def _rule_of(self, setup: str) -> SetupRule:
        """The rule of a setup."""
        relevant = [self._files[name] for name in SETUPS[setup]]
        removed = [lists for name, lists in self._files.items() if name not in SETUPS[setup]]
        return SetupRule(relevant, removed)

    def _query_values(self) -> dict[str, dict[str, Float[Tensor, " query"]]]:
        """For each setup, the values of each query; NaN for a query without positives, or if the gallery is empty."""
        ranked = self.ranked_lists()
        lists, ids = ranked.lists, ranked.query_ids.tolist()
        _check_queries(ids, self.easy)
        device = float64_device(ranked.query_ids.device)
        values = {}
        for setup in SETUPS:
            rule = self._rule_of(setup)
            totals = [sum(len(of_queries[query]) for of_queries in rule.relevant) for query in ids]
            total = torch.tensor(totals, dtype=torch.int64, device=device)
            table = torch.zeros(1 + len(self.ks), len(ids), dtype=torch.float64, device=device)
            lists_of_setup = Lists(lists.queries, lists.references, rule, self_index=ranked.self_index)
            for ranks in replace(ranked, lists=lists_of_setup).positive_ranks():
                table[0, ranks.queries] = trapezoid_ap(ranks, total[ranks.queries])
                for row, k in enumerate(self.ks, 1):
                    table[row, ranks.queries] = precision_up_to_last(ranks, k)
            ranked.shard.add_up(table)  # for each query, all other processes have zeros, so the sum is exact
            table.masked_fill_((total == 0) | ranked.is_empty, torch.nan)
            values[setup] = dict(zip(["mAP", *(f"mP@{k}" for k in self.ks)], table))
        return values


def _check_files(files: Mapping[str, ImagesOfQueries]) -> None:
    """Raise an error unless the mappings have the same queries, and no query lists an image twice, or itself."""
    for name, lists in files.items():
        different = lists.keys() ^ files["easy"].keys()
        if different:
            rule = "must have the same queries as `easy`"
            raise InvalidValue(rule, argument=name, got=f"a difference at query {min(different)}")
    for query in files["easy"]:
        images = [query]
        for lists in files.values():
            images.extend(lists[query])
        repeated = [image for image in images if images.count(image) > 1]
        if repeated:
            rule = "`easy`, `hard` and `junk` must list an image only once for a query, and not the query itself"
            raise InvalidValue(rule, got=f"image {repeated[0]} twice for query {query}")


def _check_queries(queries: Sequence[int], easy: ImagesOfQueries) -> None:
    """Raise an error unless all queries have lists."""
    missing = [query for query in queries if query not in easy]
    if missing:
        rule = "`easy`, `hard` and `junk` must have lists for all queries"
        got = f"none for {len(missing)} of {len(queries)} queries, such as query {missing[0]}"
        raise InvalidValue(rule, got=got, cure="`roles` says which images are queries")
