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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from lightning_retrieval.checks import check_integer, short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned, owned_by
from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.metrics.gathering import Images
from lightning_retrieval.metrics.query_gallery import RankingInput
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.ranks import count_at_least, ieee_products
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import Rows, ShardedRows, float64_device


class Kind(IntEnum):
    """The kind of an image for a query. Images in no list are wrong results."""

    EASY = 0
    HARD = 1
    JUNK = 2
    NOT_LISTED = 3


# The kinds that are positives in each setup. All other listed images are removed from the query's list.
SETUPS = {"easy": (Kind.EASY,), "medium": (Kind.EASY, Kind.HARD), "hard": (Kind.HARD,)}


class ListedImages(NamedTuple):
    """The listed images of each query; rows are padded with `Kind.NOT_LISTED`.

    Attributes:
        kind: kind of each image; `Kind.NOT_LISTED` for images that are missing in the gallery.
        column: index of each image in the gallery; arbitrary where `kind` is `Kind.NOT_LISTED`.
    """

    kind: Int[Tensor, "query listed"]
    column: Int[Tensor, "query listed"]


class QueryLists(NamedTuple):
    """The easy, hard and junk images of each query: three mappings from a query's id to a list of image ids."""

    easy: Mapping[int, Sequence[int]]
    hard: Mapping[int, Sequence[int]]
    junk: Mapping[int, Sequence[int]]

    def check(self) -> None:
        """Raise an error unless the three mappings have the same queries, and no query lists an image twice."""
        for name, lists in self._asdict().items():
            _check_mapping(name, lists)
            different = lists.keys() ^ self.easy.keys()
            if different:
                rule = "must have the same queries as `easy`"
                raise InvalidValue(rule, argument=name, got=f"a difference at query {min(different)}")
        for query in self.easy:
            images = self.images(query)
            repeated = [image for image in images if images.count(image) > 1]
            if repeated:
                rule = "`easy`, `hard` and `junk` must list an image only once for a query, and not the query itself"
                raise InvalidValue(rule, got=f"image {repeated[0]} twice for query {query}")

    def check_queries(self, queries: Sequence[int]) -> None:
        """Raise an error unless all queries have lists."""
        missing = [query for query in queries if query not in self.easy]
        if missing:
            rule = "`easy`, `hard` and `junk` must have lists for all queries"
            got = f"none for {len(missing)} of {len(queries)} queries, such as query {missing[0]}"
            raise InvalidValue(rule, got=got, cure="`roles` says which images are queries")

    def images(self, query: int) -> list[int]:
        """The ids of the easy, hard and junk images, then of the query, which counts as junk in its own list."""
        return [*self.easy[query], *self.hard[query], *self.junk[query], query]

    def kinds(self, query: int) -> Int[Tensor, " listed"]:
        """The kind of each of `images`."""
        counts = torch.tensor([len(self.easy[query]), len(self.hard[query]), len(self.junk[query]) + 1])
        return torch.tensor([int(Kind.EASY), int(Kind.HARD), int(Kind.JUNK)]).repeat_interleave(counts)

    def positives(self, query: int, kinds: Sequence[Kind]) -> int:
        """The number of images of these kinds (easy or hard), including images that are missing in the gallery."""
        lists = {Kind.EASY: self.easy, Kind.HARD: self.hard}
        return sum(len(lists[kind][query]) for kind in kinds)

    def find(self, queries: Sequence[int], gallery_ids: Int[Tensor, " gallery"]) -> ListedImages:
        """Find the listed images of these queries in a gallery."""
        sorted_ids, order = gallery_ids.sort()
        kinds, columns = [], []
        for query in queries:
            ids = torch.tensor(self.images(query), device=gallery_ids.device)
            column = order[torch.searchsorted(sorted_ids, ids).clamp(max=len(sorted_ids) - 1)]
            in_gallery = gallery_ids[column] == ids
            kind = self.kinds(query).to(gallery_ids.device)
            kinds.append(kind.masked_fill(~in_gallery, int(Kind.NOT_LISTED)))
            columns.append(column)
        return ListedImages(
            pad_sequence(kinds, batch_first=True, padding_value=int(Kind.NOT_LISTED)),
            pad_sequence(columns, batch_first=True),
        )


def _check_mapping(name: str, lists: Any) -> None:
    if not isinstance(lists, Mapping):
        raise InvalidType("must map each query's id to ids of images", argument=name, got=type(lists).__name__)
    for query, images in lists.items():
        if not isinstance(images, Sequence) or not all(isinstance(number, int) for number in (query, *images)):
            rule = "must map integers to lists of integers"
            raise InvalidType(rule, argument=name, got=f"{short_repr(images)} for {short_repr(query)}")


# Blocks have a fixed size and are padded, so that scores do not depend on the number of processes, and equal
# embeddings have equal scores (see `lightning_retrieval.ranking.positive_ranks`).
_BLOCK_ROWS = 128
_BLOCK_COLUMNS = 384 * 16


def setup_values(
    rank: Int[Tensor, "query listed"],
    rank_among_positives: Int[Tensor, "query listed"],
    is_positive: Bool[Tensor, "query listed"],
    total: Int[Tensor, " query"],
    ks: Sequence[int],
) -> dict[str, Float[Tensor, " query"]]:
    """AP by the trapezoid rule, named `"mAP"`, and P@k, named `"mP@k"`, of each query in one setup.

    The values of a query without positives are NaN.

    Args:
        rank: rank of each positive, from 1, without the images that are removed in this setup; arbitrary elsewhere.
        rank_among_positives: for each positive, the number of positives that score at least as high.
        is_positive: which columns are positives.
        total: number of positives of each query, including positives that are missing in the gallery.
        ks: the k of P@k.
    """
    precision_before = (rank_among_positives - 1) / (rank - 1).clamp(min=1).double()
    precision_before = torch.where(rank > 1, precision_before, 1.0)
    precision = rank_among_positives / rank.clamp(min=1).double()
    trapezoid = torch.where(is_positive, (precision_before + precision) / 2, 0.0)
    values = {"mAP": trapezoid.sum(1) / total}
    last_rank = rank.masked_fill(~is_positive, 0).amax(1)
    for k in ks:
        smaller_k = last_rank.clamp(max=k)
        hits = (is_positive & (rank <= smaller_k[:, None])).sum(1)
        values[f"mP@{k}"] = hits / smaller_k.clamp(min=1).double()
    for column in values.values():
        column.masked_fill_(total == 0, torch.nan)
    return values


class _ByFiles(Relevance):
    """Relevant are the images that a file calls easy or hard for the query; junk is in no list. Reads the ids."""

    reads = ("ids",)
    has_classes = False

    def __init__(
        self, easy: Mapping[int, Sequence[int]], hard: Mapping[int, Sequence[int]], junk: Mapping[int, Sequence[int]]
    ) -> None:
        self.easy, self.hard, self.junk = easy, hard, junk

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        ids = references[:, 0]
        relevant = torch.zeros(len(queries), len(ids), dtype=torch.bool, device=ids.device)
        candidate = torch.ones_like(relevant)
        for row, query in enumerate(queries[:, 0].tolist()):
            positives = [*self.easy.get(query, ()), *self.hard.get(query, ())]
            junk = list(self.junk.get(query, ()))
            relevant[row] = torch.isin(ids, torch.tensor(positives, dtype=torch.int64, device=ids.device))
            candidate[row] = ~torch.isin(ids, torch.tensor(junk, dtype=torch.int64, device=ids.device))
        return relevant, candidate


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
        TypeError: if `easy`, `hard` or `junk` is not a mapping to integers, or a k is not an integer.

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
        The embeddings are kept until `reset`. Every process holds all queries and some blocks of the gallery. `compute`
        scores each block once, and blocks with listed images a second time. It holds one block of scores at a time.

    Relations:
        The evaluation sets of `RevisitedOxford` and `RevisitedParis` use this metric.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, "Revisiting Oxford and Paris: large-scale image retrieval
        benchmarking", CVPR 2018, section 3.3, and `compute_map` of its official code.
    """

    def __init__(
        self,
        easy: Mapping[int, Sequence[int]],
        hard: Mapping[int, Sequence[int]],
        junk: Mapping[int, Sequence[int]],
        *,
        ks: Sequence[int] = (1, 5, 10),
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        with owned_by(type(self).__name__):
            if not isinstance(ks, Sequence) or len(ks) == 0:
                raise InvalidValue("must hold at least one k, such as (1, 10)", argument="ks", got=short_repr(ks))
            self.ks = tuple(check_integer("ks", k, least=1) for k in ks)
            self.easy, self.hard, self.junk = easy, hard, junk
            self._lists = QueryLists(easy, hard, junk)
            self._lists.check()

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

    def ranking_input(self, images: Images, *, unit: int | None = None) -> RankingInput:
        """Queries and gallery, with the lists of the files instead of those of labels."""
        ranked = super().ranking_input(images, unit=unit)
        queries, gallery = (Rows(ids[:, None], ids) for ids in (ranked.query_ids, ranked.gallery_ids))
        rule = _ByFiles(self.easy, self.hard, self.junk)
        return replace(ranked, lists=Lists(queries, gallery, rule, self_index=ranked.self_index))

    def extra_repr(self) -> str:
        return f"ks={self.ks}"

    def _query_values(self) -> dict[str, dict[str, Float[Tensor, " query"]]]:
        """For each setup, the values of each query."""
        rows, _ = self.gather()
        ranked = self.ranking_input(rows, unit=_BLOCK_COLUMNS)
        query_ids = ranked.query_ids.tolist()
        self._lists.check_queries(query_ids)
        device = float64_device(rows.ids.device)
        if ranked.is_empty:
            names = ["mAP", *(f"mP@{k}" for k in self.ks)]
            no_values = torch.full((len(query_ids),), torch.nan, dtype=torch.float64, device=device)
            return dict.fromkeys(SETUPS, dict.fromkeys(names, no_values))
        listed = self._lists.find(query_ids, ranked.gallery_ids)
        scores, counts = self._scores_and_counts(ranked, listed)
        values = {}
        for setup, kinds in SETUPS.items():
            is_positive = torch.isin(listed.kind, torch.tensor(kinds, device=scores.device))
            is_removed = ~is_positive & (listed.kind != Kind.NOT_LISTED)
            rank = counts - _count_chosen(scores, is_removed)
            total = [self._lists.positives(query, kinds) for query in query_ids]
            values[setup] = setup_values(
                rank.to(device),
                _count_chosen(scores, is_positive).to(device),
                is_positive.to(device),
                torch.tensor(total, device=device),
                self.ks,
            )
        return values

    def _scores_and_counts(
        self, ranked: RankingInput, listed: ListedImages
    ) -> tuple[Float[Tensor, "query listed"], Int[Tensor, "query listed"]]:
        """The score of each listed image and, for positives, the number of images that score at least as high."""
        queries, shard = ranked.queries.to(listed.kind.device), ranked.gallery_rows.shard
        scores = torch.zeros(listed.kind.shape, dtype=queries.dtype, device=queries.device)
        counts = torch.zeros_like(listed.kind)
        blocks_with_listed = set((listed.column // _BLOCK_COLUMNS).unique().tolist())
        for rows, begin, block in _score_blocks(queries, ranked.gallery_rows, blocks_with_listed):
            column = listed.column[rows] - begin
            inside = (column >= 0) & (column < _BLOCK_COLUMNS)
            scores[rows] += torch.where(inside, block.gather(1, column.clamp(0, _BLOCK_COLUMNS - 1)), 0.0)
        shard.add_up(scores)  # for each image, all other shards have 0, so the sum is exact
        is_positive = listed.kind < Kind.JUNK
        bounds, order = scores.masked_fill(~is_positive, torch.inf).sort(1)
        for rows, _, block in _score_blocks(queries, ranked.gallery_rows):
            counts[rows] += count_at_least(block, bounds[rows])
        shard.add_up(counts)
        return scores, torch.zeros_like(counts).scatter_(1, order, counts)


def _score_blocks(
    queries: Float[Tensor, "query dim"], gallery: ShardedRows, chosen: set[int] | None = None
) -> Iterator[tuple[slice, int, Float[Tensor, "query gallery"]]]:
    """The scores of all queries with the gallery blocks that this process holds.

    Yields the range of the queries, the index of the first gallery image, and the scores, -inf at padding.

    Args:
        queries: unit rows, on the device of the scores.
        gallery: unit rows, in blocks of `_BLOCK_COLUMNS` images.
        chosen: numbers of the blocks; None for all.
    """
    blocks_of_queries = queries.split(_BLOCK_ROWS)
    padded_queries = [pad(rows, (0, 0, 0, _BLOCK_ROWS - len(rows))) for rows in blocks_of_queries]
    for images, positions in gallery.blocks():
        if chosen is not None and positions.start // _BLOCK_COLUMNS not in chosen:
            continue
        size = len(images)
        block = pad(images.to(queries.device), (0, 0, 0, _BLOCK_COLUMNS - size))
        for index, rows in enumerate(padded_queries):
            with ieee_products():
                scores = (rows @ block.T)[: len(blocks_of_queries[index])]
            scores[:, size:] = -torch.inf
            yield slice(index * _BLOCK_ROWS, (index + 1) * _BLOCK_ROWS), positions.start, scores


def _count_chosen(
    scores: Float[Tensor, "query listed"], is_chosen: Bool[Tensor, "query listed"]
) -> Int[Tensor, "query listed"]:
    """For each score, the number of chosen scores of its row that are at least as high."""
    ascending = scores.masked_fill(~is_chosen, -torch.inf).sort(1).values
    return scores.shape[1] - torch.searchsorted(ascending, scores)
