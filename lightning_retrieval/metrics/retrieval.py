"""Retrieval metrics, all from the ranks of the positives (`lightning_retrieval.ranking.ranks`).

Conventions. With r_1 <= r_2 <= ... the ranks of a query's R positives and p_i the number of positives that score at
least as high as positive i (so p_i = i without ties):

    AP           mean over i of p_i / r_i                      (all positives, divided by R)
    AP@R         sum over i with r_i <= R of p_i / r_i, / R    (Musgrave et al., ECCV 2020)
    AP@k         sum over i with r_i <= k of p_i / r_i, / min(k, R)
    R-Precision  number of i with r_i <= R, / R
    RR           1 / h,   R@k  [h <= k],   with h = 1 + (candidates not relevant that score at least as high as the best
                 positive), the rank of the first hit
    NDCG         sum over i of 1 / log2(1 + place_i), / its largest value (Järvelin and Kekäläinen, 2002), with
                 place_i = i + (candidates not relevant that score at least as high)

Ties count against the model, as in scikit-learn. The query itself is not in its list. Queries without a positive have
no value: they are left out of every mean and counted.

With L label levels an image is relevant if it shares the finest label, and as to its level, the number l of levels that
it shares with the query (HAPPIER, ECCV 2022):

    H-AP         sum over i of H-rank_i / r_i, / sum over i of rel_i, with rel = (l / L)^alpha / (images of exactly that
                 level) and H-rank_i = sum over j scoring at least as high, i itself one of them, of min(rel_i, rel_j)
    ASI          mean over n up to the number N of images with l > 0 of SI(n), the share of the first n that also is, by
                 its level, among the first n of an ideal list
    NDCG-levels  NDCG with gain 2^l - 1, over the images with l > 0
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_retrieval.checks import check_integer, check_positive
from lightning_retrieval.metrics.base import EmbeddingMetric, Ranking, Rows
from lightning_retrieval.ranking.ranks import PositiveRanks, positive_ranks

_MEANS = {"AP": "mAP", "AP@R": "mAP@R", "R-Precision": "R-Precision", "RR": "MRR", "NDCG": "NDCG"}
_OF_LEVELS = ("H-AP", "ASI", "NDCG-levels")
_FIRST_HIT = "first_hit"


class RetrievalMetrics(EmbeddingMetric):
    """mAP, mAP@R, R-Precision, MRR, NDCG, R@k and more of a set of embeddings, the same for any number of processes.

    Update with the embeddings of each batch, compute once at the end. Each row is a query, part of the gallery, or both
    (then it is ranked against all others but itself).

    Args:
        ks: the k of R@k, each >= 1.
        map_ks: the k of mAP@k, each >= 1; none where empty.
        alpha: how much more a finer level counts in H-AP, > 0; for labels of several levels.
        settings: those of `EmbeddingMetric`: `query_expansion`, `database_augmentation`, `embeddings_on_cpu`, and of
            `torchmetrics.Metric`.

    Raises:
        ValueError: if `ks` is empty or holds a number below 1, if shapes do not fit, an embedding is not finite, one id
            comes with two labels, label levels do not nest, or rows come without ids where there are several processes.
        TypeError: if a k is not an integer, embeddings are not floating point or labels not integers.

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

    Cost:
        The embeddings are kept until `reset`. `compute` holds one block of scores, never all of them, and takes little
        more time than their product; processes share the queries out among them.
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 10, 100),
        map_ks: Sequence[int] = (),
        alpha: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        who = type(self).__name__
        if not isinstance(ks, Sequence) or len(ks) == 0:
            raise ValueError(f"{who}: `ks` must hold at least one k, such as (1, 10), got {ks!r}.")
        if not isinstance(map_ks, Sequence):
            raise ValueError(f"{who}: `map_ks` must hold the k of mAP@k, such as (100,), got {map_ks!r}.")
        self.ks = tuple(check_integer(who, "ks", k, least=1) for k in ks)
        self.map_ks = tuple(check_integer(who, "map_ks", k, least=1) for k in map_ks)
        self.alpha = check_positive(who, "alpha", alpha)
        self.ranked_images = 0  # images in the longest list of the last `compute`

    def compute(self) -> dict[str, Tensor]:
        """All metrics at once.

        Returns:
            `"mAP"`, `"mAP@R"`, `"R-Precision"`, `"MRR"`, `"NDCG"`, `"mAP@k"` and `"R@k"` for each k, each a float64
            scalar in [0, 1], and `"skipped_queries"`, the number of queries without any relevant candidate. With label
            levels also `"H-AP"`, `"ASI"` and `"NDCG-levels"`, over the queries with a candidate of any level. NaN, with
            a warning, where all queries are skipped.
        """
        with self._in_order():
            self._table = self._per_query()
        table, results = self._table, {}
        for name, values in table.items():
            if name in _MEANS or name.startswith("AP@") or name in _OF_LEVELS:
                results[_MEANS.get(name, name if name in _OF_LEVELS else f"m{name}")] = values[~values.isnan()].mean()
        counted = table[_FIRST_HIT][~table["AP"].isnan()]
        for k in self.ks:
            results[f"R@{k}"] = (counted <= k).double().mean()
        skipped = len(table["AP"]) - len(counted)
        if len(counted) == 0:
            cure = "give at least two images of a label" if self.ranked_images else "there is none to be ranked"
            warnings.warn(
                f"{type(self).__name__}: none of the {skipped} queries has a relevant candidate, so the metrics are "
                f"NaN; {cure}.",
                stacklevel=2,
            )
        results["skipped_queries"] = torch.tensor(float(skipped), dtype=torch.float64, device=self.device)
        return results

    def per_query(self) -> dict[str, Tensor]:
        """The values of each query, in the order of their ids, so that failures can be looked at.

        Returns:
            `"ids"` and `"labels"` (query,) int64, and float64 values (query,): `"AP"`, `"AP@R"`, `"R-Precision"`,
            `"RR"`, `"NDCG"`, `"AP@k"` for each k of `map_ks`, `"first_hit"` (the rank of the first positive) and with
            label levels `"H-AP"`, `"ASI"`, `"NDCG-levels"`; NaN where the query has no relevant candidate. All
            processes get all queries and must all ask, unless they have computed already.
        """
        if self._table is None:
            self.compute()
        return dict(self._table or {})

    def extra_repr(self) -> str:
        return f"ks={self.ks}, map_ks={self.map_ks}, alpha={self.alpha}"

    def _per_query(self) -> dict[str, Tensor]:
        rows = self._rows()
        return self._values(rows, self._ranking(rows))

    def _values(self, rows: Rows, ranking: Ranking) -> dict[str, Tensor]:
        """The table of `per_query` of these queries and this gallery."""
        ids, labels = rows.ids[ranking.query_rows], rows.labels[ranking.query_rows]
        levels = labels.shape[1]
        names = [*_MEANS, *(f"AP@{k}" for k in self.map_ks), _FIRST_HIT, *(_OF_LEVELS if levels > 1 else ())]
        values = torch.zeros(len(ids), len(names), dtype=torch.float64, device=ids.device)
        part, parts = self._share()
        if len(ranking.queries) == 0 or len(ranking.gallery) == 0:
            return {"ids": ids, "labels": labels[:, 0], **dict(zip(names, values.fill_(torch.nan).unbind(1)))}
        gallery_labels = rows.labels[ranking.gallery_rows]
        self.ranked_images = len(gallery_labels) - int((ranking.own >= 0).all())
        blocks = positive_ranks(
            ranking.queries, labels, ranking.gallery, gallery_labels, ranking.own, part=part, parts=parts
        )
        # For a person who looks on, at what takes long: not where the output goes to a file.
        shown = {"desc": "Ranking", "unit": "query", "delay": 2, "leave": False, "disable": None if part == 0 else True}
        with tqdm(total=-(-len(ranking.queries) // parts), **shown) as progress:
            for ranks in blocks:
                found = _query_values(ranks, levels, self.map_ks)
                if levels > 1:
                    found += _level_values(ranks, levels, self.alpha)
                values[ranks.queries] = torch.stack(found, 1)
                progress.update(len(found[0]))
        if parts > 1:
            dist.all_reduce(values, group=self.process_group)  # each row is another rank's zero: the sum is exact
        by_id = ids.argsort()
        return {"ids": ids[by_id], "labels": labels[by_id, 0], **dict(zip(names, values[by_id].unbind(1)))}


def _query_values(ranks: PositiveRanks, levels: int, map_ks: Sequence[int]) -> list[Float[Tensor, " query"]]:
    """What looks at the finest level only, in the order of the table."""
    real = ranks.level == levels
    count = real.sum(1)
    rank = ranks.rank.clamp(min=1)
    at_least = _at_least(real.long(), ranks)
    precision = torch.where(real, at_least.double() / rank, 0.0)
    within = real & (rank <= count[:, None])
    first_hit = 1 + torch.where(real, rank - at_least, rank.max()).amin(1).double()
    total = count.double()
    place = rank - at_least + real.flip(1).cumsum(1).flip(1)
    gain = _discounted(real.double(), place)
    values = [precision.sum(1) / total, (precision * within).sum(1) / total, within.sum(1) / total, 1 / first_hit]
    best = torch.arange(1, real.shape[1] + 1, device=rank.device)
    values.append(gain / _discounted((best <= count[:, None]).double().flip(1), best.flip(0)))
    values += [(precision * (rank <= k)).sum(1) / total.clamp(max=k) for k in map_ks]
    return [value.masked_fill(count == 0, torch.nan) for value in [*values, first_hit]]


def _level_values(ranks: PositiveRanks, levels: int, alpha: float) -> list[Float[Tensor, " query"]]:
    """H-AP, ASI and NDCG-levels."""
    real = ranks.level > 0
    rank, count = ranks.rank.clamp(min=1), real.sum(1)
    of_level = [ranks.level == level for level in range(1, levels + 1)]  # each (query, pos), coarsest first
    sizes = torch.stack([own.sum(1) for own in of_level], 1)
    share = (torch.arange(1, levels + 1, device=rank.device).double() / levels) ** alpha
    rel = share / sizes.clamp(min=1)  # (query, level)
    rels = torch.where(real, rel.gather(1, (ranks.level - 1).clamp(min=0)), 0.0)
    h_rank = torch.zeros_like(rels)
    for level, own in enumerate(of_level):
        h_rank += own * _at_least(torch.minimum(rels, rel[:, level, None]), ranks)
    h_ap = torch.where(real, h_rank / rank, 0.0).sum(1) / rels.sum(1)

    # Places in the list, of ties first what is not relevant and last what shares most.
    place = rank - ranks.rank_among_positives + real.flip(1).cumsum(1).flip(1)
    n = torch.arange(1, real.shape[1] + 1, device=rank.device)
    listed = n <= count[:, None]
    met = torch.zeros(real.shape, dtype=torch.int64, device=rank.device)
    before = torch.zeros_like(count)  # images of finer levels, which an ideal list has first
    for level in reversed(range(levels)):
        own = of_level[level] & (place <= len(n))
        found = torch.zeros_like(met).scatter_add_(1, place.clamp(max=len(n)) - 1, own.long()).cumsum(1)
        ideal = torch.minimum((n - before[:, None]).clamp(min=0), sizes[:, level, None])
        met += torch.minimum(found, ideal)
        before = before + sizes[:, level]
    asi = torch.where(listed, met.double() / n, 0.0).sum(1) / count

    gains = torch.where(real, 2.0**ranks.level - 1, 0.0)
    ndcg = _discounted(gains, place) / _discounted(gains.sort(1).values, n.flip(0))
    return [value.masked_fill(count == 0, torch.nan) for value in (h_ap, asi, ndcg)]


def _at_least(weights: Tensor, ranks: PositiveRanks) -> Tensor:
    """For each positive the sum of the weights (query, pos) of the positives that score at least as high."""
    first = (ranks.level > 0).sum(1, keepdim=True) - ranks.rank_among_positives  # of those that tie with it
    return weights.flip(1).cumsum(1).flip(1).gather(1, first.clamp(0, weights.shape[1] - 1))


def _discounted(gains: Float[Tensor, "query pos"], place: Int[Tensor, "..."]) -> Float[Tensor, " query"]:
    """The sum of gain / log2(1 + place), the best place first: equal terms then have equal sums."""
    return (gains / torch.log2(1.0 + place.clamp(min=1).double())).flip(1).cumsum(1)[:, -1]
