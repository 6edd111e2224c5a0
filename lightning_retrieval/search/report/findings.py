"""Finds what a model gets wrong in an evaluation set, from the embeddings that a metric holds.

The lists are those of the metric, and all scores are computed block by block. Let an image have label a, and let n(c)
be the number of other images of class c in its list:

    share of class c      fraction of its min(10, n(c)) nearest images that have label c
    probably mislabelled  the share of one other class is at least 0.5, and the share of a is at most 0.1
    confused              an image of another class is among the min(10, n(a)) nearest
    near-duplicates       two images of different classes or splits whose distance 1 - score is at most a tenth of the
                          median distance from an image to the nearest image of another class

With several processes, the functions that take a metric are collective operations, and every process gets all results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores
from lightning_retrieval.metrics.curves import FINE_BINS, occupied_bins, pair_counts
from lightning_retrieval.metrics.ranked_lists import RankedLists
from lightning_retrieval.metrics.thresholds import NearestScores

NEAREST = 10  # number of nearest images of each query
BINS = 80  # largest number of bins of the histogram
NO_CLASS = -1  # the label of distractors, and of the places after the end of a list
_LEAST_OTHER_SHARE, _LARGEST_OWN_SHARE = 0.5, 0.1
_LEAST_CLASS = 3  # the share of a class of fewer images is that of this many
_NEAR = 0.1  # largest distance of near-duplicates, as a fraction of the usual distance to another class
_ROUNDING = 1e-6  # largest distance of equal embeddings
_EXAMPLES = 3  # number of examples of a pair of classes


@dataclass(frozen=True)
class Neighbours:
    """The nearest images of each query, in the order of the queries' ids.

    Args:
        ids: id of each query.
        labels: label of each query.
        others: number of other images with the query's label in its list.
        near: ids of the nearest images.
        near_labels: their labels.
        near_sizes: number of images with the same label in the gallery.
        scores: their cosine similarities, -inf after the end of a list.
    """

    ids: Int[Tensor, " query"]
    labels: Int[Tensor, " query"]
    others: Int[Tensor, " query"]
    near: Int[Tensor, "query k"]
    near_labels: Int[Tensor, "query k"]
    near_sizes: Int[Tensor, "query k"]
    scores: Float[Tensor, "query k"]

    @property
    def is_other(self) -> Bool[Tensor, "query k"]:
        """Whether each of the nearest images has another class than the query, and has a class."""
        return (self.near_labels != self.labels[:, None]) & (self.near_labels != NO_CLASS)

    def within(self, sizes: Int[Tensor, "..."]) -> Bool[Tensor, "... k"]:
        """Whether each place is among the first `sizes`."""
        return torch.arange(self.near.shape[1]) < sizes[..., None]


@dataclass(frozen=True)
class ClassResult:
    """The mean AP of the queries of a class, and their ids, the lowest AP first."""

    label: int
    ap: float
    queries: list[int]


@dataclass(frozen=True)
class ConfusedClasses:
    """Two classes: how many of the nearest images of one have the other label, as a fraction, and examples."""

    first: int
    second: int
    count: int
    share: float
    examples: list[tuple[int, int]]


@dataclass(frozen=True)
class Suspect:
    """An image that probably has the wrong label: the other class, both shares, and the nearest images."""

    id: int
    label: int
    other: int
    other_share: float
    own_share: float
    near: list[int]


@dataclass(frozen=True)
class Duplicates:
    """Two images of different classes or splits that look the same to the model."""

    first: int
    second: int
    score: float


@dataclass(frozen=True)
class Findings:
    """Everything that a report shows.

    Args:
        means: the metrics by name, and their 95 % intervals.
        queries: the AP of each query and the values of other metrics, by name; NaN without a positive.
        without_positive: why each query without a positive has none, by its id.
        neighbours: the nearest images of each query.
        images: number of images in the gallery.
        label_of: the label of each image by its id.
        classes: the classes, the lowest AP first.
        confused: the pairs of classes with the most confusions first.
        suspects: the images that are probably mislabelled, the most certain first.
        duplicates: pairs of near-duplicates, the most similar first.
        counts: histogram of the scores of positive and of negative pairs.
        edges: edges of the bins.
        nearest: the scores from which a threshold is chosen.
        false_match_rate: the wanted rate.
    """

    means: Mapping[str, tuple[float, float, float]]
    queries: Mapping[str, Tensor]
    without_positive: Mapping[int, str]
    neighbours: Neighbours
    images: int
    label_of: Mapping[int, int]
    classes: Sequence[ClassResult]
    confused: Sequence[ConfusedClasses]
    suspects: Sequence[Suspect]
    duplicates: Sequence[Duplicates]
    counts: Int[Tensor, "2 bins"]
    edges: Float[Tensor, " edge"]
    nearest: NearestScores
    false_match_rate: float

    @property
    def threshold(self) -> float | None:
        """The similarity with the wanted false-match rate; None if no query has a negative."""
        if len(self.nearest.negatives) == 0:
            return None
        return self.nearest.threshold(self.false_match_rate)

    @property
    def worst_queries(self) -> Int[Tensor, " query"]:
        """Positions of the queries that have a positive, the lowest AP first."""
        ap = self.queries["AP"]
        return ap.argsort(stable=True)[: int((~ap.isnan()).sum())]


def find_errors(
    metrics: RetrievalMetrics,
    false_match_rate: float,
    *,
    of_all_splits: RetrievalMetrics | None = None,
    splits: Int[Tensor, " id"] | None = None,
) -> Findings:
    """Find everything that a report shows. A collective operation of the metric's processes.

    Args:
        metrics: the metric that holds the embeddings of the evaluated images. Relevant images share labels.
        false_match_rate: fraction of the queries for which the threshold may show an image of another class.
        of_all_splits: a metric with the images of all splits, in which wrong labels and duplicates are searched; None
            if there are no other splits.
        splits: number of the split of each image by its id; None if there are no other splits.
    """
    means, intervals = metrics.compute(), metrics.intervals()
    queries = {name: values.cpu() for name, values in metrics.per_query().items()}
    neighbours, ranked = find_neighbours(metrics)
    searched, labels = neighbours, _labels_by_id(ranked)
    if of_all_splits is not None:
        searched, of_all = find_neighbours(of_all_splits)
        labels |= _labels_by_id(of_all)
    nearest = nearest_scores(metrics)
    counts, edges = occupied_bins(pair_counts(metrics, FINE_BINS).cpu(), BINS)
    return Findings(
        means={name: (float(means[name]), *ends) for name, ends in intervals.items()},
        queries=queries,
        without_positive=metrics.why_skipped(),
        neighbours=neighbours,
        images=len(ranked.gallery_ids),
        label_of=labels,
        classes=class_results(queries),
        confused=confused_classes(neighbours),
        suspects=probably_mislabelled(searched),
        duplicates=near_duplicates(searched, largest_distance(nearest), splits),
        counts=counts,
        edges=edges,
        nearest=nearest,
        false_match_rate=false_match_rate,
    )


def find_neighbours(metrics: RetrievalMetrics, k: int = NEAREST) -> tuple[Neighbours, RankedLists]:
    """The `k` nearest images of each query, and the ranked lists. A collective operation."""
    ranked = metrics.ranked_lists()
    k = min(k, len(ranked.gallery_ids))
    shape, device = (len(ranked.query_ids), k), ranked.query_ids.device
    scores = torch.zeros(shape, dtype=ranked.gallery.local.dtype, device=device)
    positions = torch.zeros(shape, dtype=torch.int64, device=device)
    others = torch.zeros_like(ranked.query_ids)
    labels, gallery_labels = ranked.lists.finest.columns[:, 0], ranked.lists.finest.ref_columns[:, 0]
    for _, block in ranked.queries.blocks():
        scores[block] = -torch.inf
    for queries, gallery, found, _, candidate in ranked.score_blocks():
        highest, column = found.masked_fill(~candidate, -torch.inf).topk(min(k, found.shape[1]), dim=1)
        of_both = torch.cat([positions[queries], gallery.start + column], 1)
        scores[queries], order = torch.cat([scores[queries], highest], 1).topk(k, dim=1)
        positions[queries] = of_both.gather(1, order)
        others[queries] += (candidate & (labels[queries, None] == gallery_labels[gallery])).sum(1)
    for values in (scores, positions, others):
        ranked.shard.add_up(values)  # for each query, all other processes have zeros, so the sum is exact
    by_id = ranked.query_ids.argsort()
    return _neighbours(ranked, by_id, scores[by_id], positions[by_id], others[by_id]), ranked


def _neighbours(ranked: RankedLists, by_id: Tensor, scores: Tensor, positions: Tensor, others: Tensor) -> Neighbours:
    """The neighbours, on the CPU, of queries in the order of `by_id`."""
    labels, gallery_labels = ranked.lists.finest.columns[by_id, 0], ranked.lists.finest.ref_columns[:, 0]
    inverse, counts = gallery_labels.unique(return_inverse=True, return_counts=True)[1:]
    size_of_image = counts[inverse]
    near_labels = gallery_labels[positions].masked_fill(scores == -torch.inf, NO_CLASS)
    return Neighbours(
        ids=ranked.query_ids[by_id].cpu(),
        labels=labels.cpu(),
        others=others.cpu(),
        near=ranked.gallery_ids[positions].cpu(),
        near_labels=near_labels.cpu(),
        near_sizes=size_of_image[positions].cpu(),
        scores=scores.float().cpu(),
    )


def _labels_by_id(ranked: RankedLists) -> dict[int, int]:
    """The label of each image by its id."""
    finest = ranked.lists.finest
    labels = dict(zip(ranked.gallery_ids.tolist(), finest.ref_columns[:, 0].tolist()))
    return labels | dict(zip(ranked.query_ids.tolist(), finest.columns[:, 0].tolist()))


def class_results(queries: Mapping[str, Tensor]) -> list[ClassResult]:
    """The AP of each class with a query that has a positive, the lowest first."""
    chosen = (~queries["AP"].isnan()).nonzero()[:, 0]
    chosen = chosen[queries["AP"][chosen].argsort(stable=True)]
    chosen = chosen[queries["labels"][chosen].argsort(stable=True)]
    unique, sizes = queries["labels"][chosen].unique_consecutive(return_counts=True)
    results = []
    for label, of_class in zip(unique.tolist(), chosen.split(sizes.tolist())):
        ap = float(queries["AP"][of_class].mean())
        results.append(ClassResult(label, ap, queries["ids"][of_class].tolist()))
    return sorted(results, key=lambda result: result.ap)


def confused_classes(found: Neighbours) -> list[ConfusedClasses]:
    """The pairs of classes of which images of one are among the nearest of the other, the most frequent first."""
    considered = found.within(found.others)
    row, column = (considered & found.is_other).nonzero(as_tuple=True)
    if len(row) == 0:
        return []
    by_score = found.scores[row, column].argsort(descending=True, stable=True)
    row, column = row[by_score], column[by_score]
    pairs = torch.stack([found.labels[row], found.near_labels[row, column]], 1).sort(dim=1).values
    unique, inverse, counts = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    members = inverse.argsort(stable=True).split(counts.tolist())
    labels, of_label = found.labels.unique(return_inverse=True)
    places = torch.zeros(len(labels), dtype=torch.int64).index_add_(0, of_label, considered.sum(1))
    places_of = dict(zip(labels.tolist(), places.tolist()))
    results = []
    for (first, second), count, of_pair in zip(unique.tolist(), counts.tolist(), members):
        ids = torch.stack([found.ids[row[of_pair]], found.near[row[of_pair], column[of_pair]]], 1)
        share = count / (places_of.get(first, 0) + places_of.get(second, 0))
        results.append(ConfusedClasses(first, second, count, share, _examples(ids)))
    return sorted(results, key=lambda pair: (-pair.count, -pair.share))


def _examples(pairs: Int[Tensor, "pair 2"]) -> list[tuple[int, int]]:
    """The first pairs of images, without those whose images have already been chosen in the other order."""
    chosen: dict[frozenset[int], tuple[int, int]] = {}
    for query, near in pairs[: 2 * _EXAMPLES].tolist():
        chosen.setdefault(frozenset((query, near)), (query, near))
    return list(chosen.values())[:_EXAMPLES]


def probably_mislabelled(found: Neighbours) -> list[Suspect]:
    """The images whose nearest images are of one other class, and not of their own, the most certain first."""
    k = found.near.shape[1]
    if k == 0:
        return []
    own_sizes = found.others.clamp(1, k)
    is_own = found.near_labels == found.labels[:, None]
    own = (is_own & found.within(own_sizes)).sum(1) / own_sizes
    sizes = found.near_sizes.clamp(_LEAST_CLASS, max(k, _LEAST_CLASS))
    is_same = found.near_labels[:, :, None] == found.near_labels[:, None]  # (query, class of, place)
    shares = (is_same & found.within(sizes)).sum(2) / sizes
    other, column = shares.masked_fill(~found.is_other, 0).max(1)
    chosen = ((other >= _LEAST_OTHER_SHARE) & (own <= _LARGEST_OWN_SHARE)).nonzero()[:, 0]
    chosen = chosen[found.scores[chosen, 0].argsort(descending=True, stable=True)]
    chosen = chosen[(other - own)[chosen].argsort(descending=True, stable=True)]
    results = []
    for row in chosen.tolist():
        label = int(found.near_labels[row, column[row]])
        near = found.near[row][found.near_labels[row] == label].tolist()
        results.append(
            Suspect(int(found.ids[row]), int(found.labels[row]), label, float(other[row]), float(own[row]), near)
        )
    return results


def largest_distance(nearest: NearestScores) -> float:
    """The largest distance of near-duplicates."""
    usual = 1.0
    if len(nearest.negatives) > 0:
        usual = 1 - float(nearest.negatives.median())
    return max(_NEAR * usual, _ROUNDING)


def near_duplicates(found: Neighbours, distance: float, splits: Int[Tensor, " id"] | None = None) -> list[Duplicates]:
    """The pairs of images of different classes or splits within this distance, the most similar first."""
    is_apart = found.near_labels != found.labels[:, None]
    if splits is not None:
        is_apart |= splits[found.near] != splits[found.ids][:, None]
    row, column = (is_apart & (found.scores >= 1 - distance)).nonzero(as_tuple=True)
    pairs = torch.stack([found.ids[row], found.near[row, column]], 1).sort(dim=1).values
    scores: dict[tuple[int, int], float] = {}
    for (first, second), score in zip(pairs.tolist(), found.scores[row, column].tolist()):
        scores[first, second] = score
    results = [Duplicates(first, second, score) for (first, second), score in scores.items()]
    return sorted(results, key=lambda pair: (-pair.score, pair.first, pair.second))
