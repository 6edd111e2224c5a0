"""mAP and mP@k of Revisited Oxford and Paris: which images are right for a query is said by lists.

Conventions (the official code's). Each query has images that are easy, hard and junk. Three setups make of these

    setup     positives     removed from the query's list
    easy      easy          hard, junk
    medium    easy, hard    junk
    hard      hard          easy, junk

all else is wrong. With n positives, r the rank of one and p the number of positives that score at least as high,

    AP      sum of ((p - 1) / (r - 1) + p / r) / 2 over the positives, / n      (trapezoids; the first is 1 where r = 1)
    mP@k    number of positives with r <= k', / k', where k' is the least of k and the last positive's rank

Ties count against the model: r is the number of images left in the list that score at least as high. Positives that the
gallery lacks are never found, yet n counts them. Queries without positives in a setup are left out of its means and
counted.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from lightning_retrieval.checks import check_integer
from lightning_retrieval.metrics.base import EmbeddingMetric, Ranking
from lightning_retrieval.ranking.ranks import count_at_least

EASY, HARD, JUNK, NONE = range(4)  # what an image is for a query
SETUPS = {"easy": (EASY,), "medium": (EASY, HARD), "hard": (HARD,)}  # positives; the rest of the lists is removed
# Blocks of a fixed size, the tails padded, give an image the same score whoever computes it, and equal embeddings equal
# scores (see `lightning_retrieval.ranking.ranks`).
_ROWS = 128
_BLOCK = 384 * 16


class RevisitedMetrics(EmbeddingMetric):
    """mAP and mP@k in the setups easy, medium and hard of Revisited Oxford and Paris.

    Labels count nothing here: right, junk and wrong is what the lists say. Give `is_query` and `is_gallery` at update.

    Args:
        easy: for each query's id the ids of the images that are easy to find.
        hard: the same for those that are hard to find.
        junk: the same for those that are neither right nor wrong.
        ks: the k of mP@k, each >= 1.
        settings: those of `EmbeddingMetric`: `query_expansion`, `database_augmentation`, `embeddings_on_cpu`, and of
            `torchmetrics.Metric`.

    Raises:
        ValueError: if the three do not have the same queries, an image is twice in a query's lists, `ks` is empty or
            holds a number below 1; at `compute`, if a query has no lists; else as `EmbeddingMetric`.
        TypeError: if `easy`, `hard` or `junk` is no mapping to integers, or a k is no integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RevisitedMetrics
        >>> metrics = RevisitedMetrics(easy={4: [0]}, hard={4: [2]}, junk={4: [1]}, ks=(1,))
        >>> embeddings = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [1.0, 0.0]])
        >>> is_query = torch.arange(5) == 4
        >>> metrics.update(embeddings, torch.zeros(5).long(), torch.arange(5), is_query, ~is_query)
        >>> results = metrics.compute()
        >>> {name: round(value.item(), 3) for name, value in results.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'mAP': 0.792, 'mAP/easy': 1.0, 'mP@1/easy': 1.0, 'skipped_queries/easy': 0.0, 'mAP/medium': 0.792,
         'mP@1/medium': 1.0, 'skipped_queries/medium': 0.0, 'mAP/hard': 0.25, 'mP@1/hard': 0.0,
         'skipped_queries/hard': 0.0}

    Cost:
        The embeddings are kept until `reset`. `compute` goes through the gallery in blocks, which processes share out,
        and twice through those with listed images. It holds one block of scores at a time, however many there are.

    Relations:
        The evaluation set of `RevisitedOxford` and `RevisitedParis` is evaluated by this.

    Source:
        Radenović, Iscen, Tolias, Avrithis and Chum, "Revisiting Oxford and Paris: large-scale image retrieval
        benchmarking", CVPR 2018, section 3.3, and `compute_map` of its official code.
    """

    def __init__(
        self,
        easy: Mapping[int, Sequence[int]],
        hard: Mapping[int, Sequence[int]],
        junk: Mapping[int, Sequence[int]],
        ks: Sequence[int] = (1, 5, 10),
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        who = type(self).__name__
        if isinstance(ks, int) or len(ks) == 0:
            raise ValueError(f"{who}: `ks` must hold at least one k, such as (1, 10), got {ks!r}.")
        self.ks = tuple(check_integer(who, "ks", k, least=1) for k in ks)
        for name, lists in (("easy", easy), ("hard", hard), ("junk", junk)):
            _check_lists(who, name, lists)
            if lists.keys() != easy.keys():
                odd = min(lists.keys() ^ easy.keys())
                raise ValueError(f"{who}: `{name}` must have the queries of `easy`, got a difference at query {odd}.")
        self.easy, self.hard, self.junk = easy, hard, junk
        for query in easy:
            listed = self._listed(query)
            if len(set(listed)) < len(listed):
                twice = next(image for image in listed if listed.count(image) > 1)
                raise ValueError(
                    f"{who}: `easy`, `hard` and `junk` must hold an image once for a query, and not the query, got "
                    f"image {twice} twice for query {query}."
                )

    def compute(self) -> dict[str, Tensor]:
        """All metrics at once.

        Returns:
            `"mAP"`, which is that of the setup medium, and for each setup `"mAP/easy"`, `"mP@k/easy"` for each k, all
            float64 scalars in [0, 1], and `"skipped_queries/easy"`, the number of queries without positives. NaN, with
            a warning, where all queries of a setup are skipped.
        """
        with self._in_order():
            table = self._per_query()
        results = {"mAP": table["medium"][:, 0].nanmean()}
        for setup, values in table.items():
            names = [f"mAP/{setup}", *(f"mP@{k}/{setup}" for k in self.ks)]
            results.update(zip(names, values.nanmean(0).unbind()))
            results[f"skipped_queries/{setup}"] = values[:, 0].isnan().sum().double()
        empty = [setup for setup, values in table.items() if bool(values.isnan().all())]
        if empty:
            warnings.warn(
                f"{type(self).__name__}: no query has positives in the setup {' and '.join(empty)}, so its metrics "
                "are NaN.",
                stacklevel=2,
            )
        return results

    def relevant(
        self,
        query_ids: Int[Tensor, " query"],
        query_labels: Int[Tensor, "query ..."],
        ids: Int[Tensor, " row"],
        labels: Int[Tensor, "row ..."],
    ) -> Bool[Tensor, "query row"]:
        """Whether each row is right for each query, easy or hard, whatever the labels."""
        found = torch.zeros(len(query_ids), len(ids), dtype=torch.bool, device=ids.device)
        for row, query in enumerate(query_ids.tolist()):
            right = [*self.easy.get(query, ()), *self.hard.get(query, ())]
            found[row] = torch.isin(ids, torch.tensor(right, dtype=torch.int64, device=ids.device))
        return found

    def listed(self, query_ids: Int[Tensor, " query"], ids: Int[Tensor, " row"]) -> Bool[Tensor, "query row"]:
        """Whether each row counts for each query: junk does not, nor does the query itself."""
        found = super().listed(query_ids, ids)
        for row, query in enumerate(query_ids.tolist()):
            junk = torch.tensor(list(self.junk.get(query, ())), dtype=torch.int64, device=ids.device)
            found[row] &= ~torch.isin(ids, junk)
        return found

    def extra_repr(self) -> str:
        return f"ks={self.ks}"

    def _listed(self, query: int) -> list[int]:
        """Easy, hard and junk images; the query itself, which is not in its own list, stands with the junk."""
        return [*self.easy[query], *self.hard[query], *self.junk[query], query]

    def _per_query(self) -> dict[str, Float[Tensor, "query value"]]:
        """AP and P@k of each query in each setup, NaN where it has no positive."""
        rows = self._rows()
        ranking = self._ranking(rows)
        query_ids, gallery_ids = rows.ids[ranking.query_rows].tolist(), rows.ids[ranking.gallery_rows]
        without = [query for query in query_ids if query not in self.easy]
        if without:
            raise ValueError(
                f"{type(self).__name__}: `easy`, `hard` and `junk` must have all queries, got {len(without)} of "
                f"{len(query_ids)} without, such as query {without[0]}."
            )
        if len(query_ids) == 0 or len(gallery_ids) == 0:
            none = torch.full(
                (len(query_ids), 1 + len(self.ks)), torch.nan, dtype=torch.float64, device=rows.ids.device
            )
            return dict.fromkeys(SETUPS, none)
        kinds, places = self._lists(query_ids, gallery_ids)
        scores, counts = self._count(ranking, kinds, places)
        values = {}
        for setup, positive in SETUPS.items():
            is_positive = torch.isin(kinds, torch.tensor(positive, device=kinds.device))
            removed = ~is_positive & (kinds < NONE)
            rank = counts - _at_least(scores, removed)
            sizes = [sum(len((self.easy, self.hard)[kind][query]) for kind in positive) for query in query_ids]
            total = torch.tensor(sizes, device=kinds.device)
            values[setup] = setup_values(rank, _at_least(scores, is_positive), is_positive, total, self.ks)
        return values

    def _lists(
        self, query_ids: list[int], gallery_ids: Int[Tensor, " gallery"]
    ) -> tuple[Int[Tensor, "query listed"], Int[Tensor, "query listed"]]:
        """What the listed images are, and their places in the gallery; `NONE` and 0 where it lacks them."""
        kinds, places = [], []
        ascending, order = gallery_ids.sort()
        for query in query_ids:
            sizes = torch.tensor([len(self.easy[query]), len(self.hard[query]), len(self.junk[query]) + 1])
            kinds.append(torch.tensor([EASY, HARD, JUNK]).repeat_interleave(sizes).to(gallery_ids.device))
            ids = torch.tensor(self._listed(query), device=gallery_ids.device)
            places.append(order[torch.searchsorted(ascending, ids).clamp(max=len(ascending) - 1)])
            kinds[-1][gallery_ids[places[-1]] != ids] = NONE
        return pad_sequence(kinds, True, NONE), pad_sequence(places, True, 0)

    def _count(
        self, ranking: Ranking, kinds: Int[Tensor, "query listed"], places: Int[Tensor, "query listed"]
    ) -> tuple[Float[Tensor, "query listed"], Int[Tensor, "query listed"]]:
        """The score of each listed image and, of positives, how many images of the gallery score at least as high."""
        scores = torch.zeros(kinds.shape, dtype=ranking.gallery.dtype, device=kinds.device)
        counts = torch.zeros_like(kinds)
        for rows, begin, block in self._blocks(ranking, kinds.device, (places // _BLOCK).unique().tolist()):
            column = places[rows] - begin
            inside = (column >= 0) & (column < _BLOCK)
            scores[rows] += torch.where(inside, block.gather(1, column.clamp(0, _BLOCK - 1)), 0.0)
        self._add_up(scores)
        bounds, order = scores.masked_fill(kinds >= JUNK, torch.inf).sort(1)
        for rows, _, block in self._blocks(ranking, kinds.device, range(-(-len(ranking.gallery) // _BLOCK))):
            counts[rows] += count_at_least(block, bounds[rows])
        self._add_up(counts)
        return scores, torch.zeros_like(counts).scatter_(1, order, counts)

    def _blocks(
        self, ranking: Ranking, device: torch.device, wanted: Iterable[int]
    ) -> Iterator[tuple[slice, int, Tensor]]:
        """This process' share of these blocks of scores: its queries, its first image, and (query, image) scores."""
        part, parts = self._share()
        queries = ranking.queries.to(device).split(_ROWS)
        padded = [pad(rows, (0, 0, 0, _ROWS - len(rows))) for rows in queries]
        for begin in (number * _BLOCK for number in wanted if number % parts == part):
            gallery = ranking.gallery[begin : begin + _BLOCK].to(device)
            size = len(gallery)
            if size < _BLOCK:
                gallery = pad(gallery, (0, 0, 0, _BLOCK - size))
            for place, rows in enumerate(padded):
                block = (rows @ gallery.T)[: len(queries[place])]
                block[:, size:] = -torch.inf
                yield slice(place * _ROWS, (place + 1) * _ROWS), begin, block

    def _add_up(self, shares: Tensor) -> None:
        """Bring together what the processes found: counts, and scores that all but one of them have as 0."""
        if self._is_synced:
            dist.all_reduce(shares, group=self.process_group)


def setup_values(
    rank: Int[Tensor, "query listed"],
    among: Int[Tensor, "query listed"],
    is_positive: Bool[Tensor, "query listed"],
    total: Int[Tensor, " query"],
    ks: Sequence[int],
) -> Float[Tensor, "query value"]:
    """AP by trapezoids and P@k for each k, NaN where there is no positive.

    Args:
        rank: of each positive, junk removed, from 1; any number elsewhere.
        among: how many positives score at least as high.
        is_positive: which columns are positives.
        total: the number of positives, also of those that the gallery lacks.
        ks: the k of P@k.
    """
    before = torch.where(rank > 1, (among - 1) / (rank - 1).clamp(min=1).double(), 1.0)
    precision = (before + among / rank.clamp(min=1).double()) / 2
    values = [torch.where(is_positive, precision, 0.0).sum(1) / total]
    last = rank.masked_fill(~is_positive, 0).amax(1)
    for k in ks:
        lowered = last.clamp(max=k)
        hits = (is_positive & (rank <= lowered[:, None])).sum(1)
        values.append(hits / lowered.clamp(min=1).double())
    return torch.stack(values, 1).masked_fill((total == 0)[:, None], torch.nan)


def _at_least(scores: Float[Tensor, "query listed"], chosen: Bool[Tensor, "query listed"]) -> Tensor:
    """For each score, how many of the chosen ones of its row are at least as high."""
    ascending = scores.masked_fill(~chosen, -torch.inf).sort(1).values
    return scores.shape[1] - torch.searchsorted(ascending, scores)


def _check_lists(who: str, name: str, lists: Any) -> None:
    if not isinstance(lists, Mapping):
        raise TypeError(f"{who}: `{name}` must map each query's id to ids of images, got {type(lists).__name__}.")
    for query, images in lists.items():
        if not isinstance(images, Sequence) or not all(isinstance(number, int) for number in (query, *images)):
            raise TypeError(f"{who}: `{name}` must map integers to lists of integers, got {images!r} for {query!r}.")
