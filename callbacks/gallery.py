"""Images of queries and of what the model ranks first for them."""

import math
import warnings
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from lightning_retrieval.callbacks.evaluation_access import is_ranked_by_label
from lightning_retrieval.callbacks.figures import EvaluationFigure
from lightning_retrieval.callbacks.gallery_image import GalleryRow, Hit, draw_gallery, load_image
from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.metrics import EmbeddingMetric, RetrievalMetrics
from lightning_retrieval.metrics.query_gallery import QueryGallery
from lightning_retrieval.ranking.precision import ieee_products

_BLOCK_GALLERY = 1 << 14  # images of the gallery that are scored at a time
_ORDERS = ("spread", "hardest", "quantiles")
Order = Literal["spread", "hardest", "quantiles"]


def query_ap(
    metrics: EmbeddingMetric, query_ids: Int[Tensor, " query"]
) -> tuple[Int[Tensor, " query"], Float[Tensor, " query"] | None]:
    """Return the ids of the queries in ascending order, and the AP of each in the list that is drawn, if known."""
    if isinstance(metrics, RetrievalMetrics) and is_ranked_by_label(metrics):
        table = metrics.per_query()
        return table["ids"], table["AP"]
    return query_ids.sort().values, None


def choose_queries(
    ids: Int[Tensor, " query"], ap: Float[Tensor, " query"] | None, number: int, order: Order
) -> Int[Tensor, " chosen"]:
    """Return the ids of the queries to draw."""
    if order != "spread" and ap is not None:
        with_ap = int((~ap.isnan()).sum())
        ids = ids[ap.argsort(stable=True)][:with_ap]  # NaN is sorted to the end
    number = min(number, len(ids))
    if order == "hardest" and ap is not None:
        return ids[:number]
    positions = torch.arange(number, device=ids.device) * (len(ids) - 1) // max(number - 1, 1)
    return ids[positions]


def nearest_images(
    metrics: EmbeddingMetric, lists: QueryGallery, chosen: Int[Tensor, " chosen"], k: int
) -> list[tuple[int, list[Hit]]]:
    """Return the id of each chosen query and the first k images of its list, ranked as for the metrics."""
    ids = lists.gallery_ids
    if len(chosen) == 0 or len(ids) == 0:
        return [(query, []) for query in chosen.tolist()]
    ascending, order = lists.query_ids.sort()
    queries = order[torch.searchsorted(ascending, chosen)]
    rows = lists.query_rows.select(queries)
    scores = torch.empty(len(queries), 0, dtype=rows.dtype, device=ids.device)
    columns = torch.empty(len(queries), 0, dtype=torch.int64, device=ids.device)
    for begin in range(0, len(ids), _BLOCK_GALLERY):
        part = slice(begin, min(begin + _BLOCK_GALLERY, len(ids)))
        gallery = lists.gallery_rows.range(part.start, part.stop)
        with ieee_products():
            of_part = (rows.to(gallery.device) @ gallery.T).to(ids.device)  # (chosen, part)
        of_part.masked_fill_(~metrics.is_candidate(lists, queries, part), -torch.inf)
        scores = torch.cat([scores, of_part], 1)
        columns = torch.cat([columns, torch.arange(part.start, part.stop, device=ids.device).expand_as(of_part)], 1)
        scores, best = scores.topk(min(k, scores.shape[1]), dim=1)
        columns = columns.gather(1, best)
    results = []
    for row, query in enumerate(queries.tolist()):
        found = columns[row][scores[row] > -torch.inf]
        label = lists.query_labels[query : query + 1]
        relevant = metrics.is_relevant(chosen[row : row + 1], label, ids[found], lists.gallery_labels[found])
        hits = zip(ids[found].tolist(), relevant[0].tolist())
        results.append((int(chosen[row]), [Hit(*hit) for hit in hits]))
    return results


def ap_caption(ap: float) -> str:
    """Format the AP of a query."""
    if math.isnan(ap):
        return "no AP"
    return f"AP = {ap:.3f}"


class RetrievalGallery(EvaluationFigure):
    """Draws some queries, each followed by its nearest images, in green if they are relevant and in red if not.

    As in Fig. 3 of Smooth-AP (ECCV 2020) and Fig. 4 of RaMBO (CVPR 2020). The AP of each query is written above it. The
    PNG files are in `retrieval/` of the run's log folder. Every logger that accepts images (TensorBoard, Weights &
    Biases) gets them too.

    Images have their true colours: what normalised them is undone if the transform of the data set says it (a
    `Preparation`, or a last step `Normalize`), and values from 0 to 1 are colours. Other values are stretched to the
    full range.

    Args:
        queries: number of queries, >= 1.
        k: number of nearest images of each query, >= 1.
        every_n_epochs: number of epochs between two galleries of the validation sets, >= 1. Test sets are always drawn.
        order: which queries are drawn: `"spread"` evenly over the evaluation set, the same each time; the `"hardest"`,
            with the lowest AP first; or at evenly spaced `"quantiles"` of AP, from the lowest to the highest. Queries
            without a relevant candidate have no AP; only `"spread"` draws them.

    Raises:
        ValueError: if a number is below 1, if `order` is none of the three, or if the Trainer has no
            `RetrievalEvaluation`.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
        >>> callbacks = [RetrievalEvaluation(), RetrievalGallery(queries=4, every_n_epochs=5, order="hardest")]

    Cost:
        The images that are drawn are read again from the data set; images are not kept in memory. The processes gather
        the gallery once more, piece by piece.

    Relations:
        The lists are those from which the metrics are computed, after post-processing. An instance is represented by
        its first image, and junk images are not drawn. A set whose images cannot be drawn (its ids do not index it, or
        it holds vectors) gets a warning instead. Sets with another metric than `RetrievalMetrics` have no AP of the
        list that is drawn; their queries are chosen by `"spread"`.
    """

    ranked_by_label_only = False

    def __init__(self, queries: int = 8, k: int = 10, *, every_n_epochs: int = 1, order: Order = "spread") -> None:
        super().__init__(every_n_epochs)
        self.queries = check_integer("RetrievalGallery", "queries", queries, least=1)
        self.k = check_integer("RetrievalGallery", "k", k, least=1)
        self.order = check_choice("RetrievalGallery", "order", order, _ORDERS)

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: EmbeddingMetric, dataset: Any, prefix: str
    ) -> Image.Image | None:
        if metrics.embeddings and not metrics.ids:
            warnings.warn(
                "RetrievalGallery: an evaluation set is not drawn, because its batches have no ids and come in random "
                "order, so its images cannot be found again; give the batches ids or set shuffle=False.",
                stacklevel=2,
            )
            return None
        rows, _ = metrics.gather()
        lists = metrics.query_gallery(rows)
        ids, ap = query_ap(metrics, lists.query_ids)
        chosen = choose_queries(ids, ap, self.queries, self.order).to(lists.query_ids.device)
        hits_of_queries = nearest_images(metrics, lists, chosen, self.k)
        if not trainer.is_global_zero or not hits_of_queries:
            return None
        captions = {}
        if ap is not None:
            captions = {query: ap_caption(value) for query, value in zip(ids.tolist(), ap.tolist())}
        gallery = [GalleryRow(query, captions.get(query, ""), hits) for query, hits in hits_of_queries]
        try:
            return draw_gallery(gallery, partial(load_image, pl_module, dataset), self.k)
        except (ValueError, TypeError, RuntimeError) as error:  # a run must not fail because of an image
            warnings.warn(f"{error} {prefix} is not drawn.", stacklevel=2)
            return None
