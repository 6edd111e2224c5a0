"""Pictures of queries and what the model ranks first for them."""

import warnings
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import default_collate

from lightning_retrieval.callbacks.pictures import EvaluationPicture
from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.metrics import EmbeddingMetric, RandomGalleryMetrics, RetrievalMetrics
from lightning_retrieval.metrics.store import Ranking, Rows

_RIGHT, _WRONG, _QUERY, _PAPER, _INK = (34, 160, 70), (208, 48, 48), (120, 120, 120), (255, 255, 255), (60, 60, 60)
_TILE, _BORDER, _GAP, _TITLE = 72, 4, 6, 18
_ORDERS = ("spread", "hardest", "quantiles")
Order = Literal["spread", "hardest", "quantiles"]
Hits = list[tuple[int, bool]]  # id, right or wrong


class RetrievalGallery(EvaluationPicture):
    """Writes a PNG with some queries, each followed by its nearest images, green where right and red where wrong.

    As Fig. 3 of Smooth-AP (ECCV 2020) and Fig. 4 of RaMBO (CVPR 2020). Above each query stands its AP. The pictures lie
    in `retrieval/` of the run's log folder, and go to every logger that takes images (TensorBoard, Weights & Biases).

    Args:
        queries: rows of the picture, >= 1.
        k: nearest images of each, >= 1.
        every_n_epochs: validation pictures are written after every so many epochs, >= 1; test pictures always.
        order: which queries: `"spread"` evenly over the evaluation set, the same every time; the `"hardest"`, lowest AP
            first; or at evenly spaced `"quantiles"` of AP, from the lowest to the highest. Queries without a relevant
            candidate have no AP, and are drawn by `"spread"` alone.

    Raises:
        ValueError: if a number is below 1, `order` is none of the three, or there is no `RetrievalEvaluation` among the
            callbacks.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
        >>> callbacks = [RetrievalEvaluation(), RetrievalGallery(queries=4, every_n_epochs=5, order="hardest")]

    Cost:
        The images drawn are read again from the dataset; no others are kept. Processes gather the embeddings once more.

    Relations:
        The lists are those that the metrics are of, after post-processing; an instance is shown by its first image, and
        what a protocol takes for junk is not shown. A set whose images cannot be drawn (ids that do not index it,
        vectors) gets a warning instead of a picture. Sets measured by other metrics than `RetrievalMetrics` know no AP
        of the list that is shown: their queries are spread.
    """

    by_label = False

    def __init__(self, queries: int = 8, k: int = 10, every_n_epochs: int = 1, order: Order = "spread") -> None:
        super().__init__(every_n_epochs)
        self.queries = check_integer("RetrievalGallery", "queries", queries, least=1)
        self.k = check_integer("RetrievalGallery", "k", k, least=1)
        self.order = check_choice("RetrievalGallery", "order", order, _ORDERS)

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: EmbeddingMetric, dataset: Any, name: str
    ) -> Image.Image | None:
        if metrics.embeddings and not metrics.ids:
            warnings.warn(
                "RetrievalGallery: no picture is drawn of an evaluation set whose batches have no ids and come in "
                "random order, since its images cannot be found again; give the batches ids or shuffle=False.",
                stacklevel=2,
            )
            return None
        held, ranking, _ = metrics.ranked()
        ids, ap = _ap_of_each(metrics, held.ids[ranking.query_rows])
        rows = _nearest(metrics, held, ranking, _chosen(ids, ap, self.queries, self.order), self.k)
        if not (trainer.is_global_zero and rows):
            return None
        captions = {} if ap is None else {i: _caption(value) for i, value in zip(ids.tolist(), ap.tolist())}
        try:
            return _draw(rows, captions, lambda ids: _images(pl_module, dataset, ids), self.k)
        except (ValueError, TypeError, RuntimeError) as error:  # a picture is not worth a run
            warnings.warn(f"{error} No picture is drawn of {name}.", stacklevel=2)
            return None


def _ap_of_each(
    metrics: EmbeddingMetric, queries: Int[Tensor, " query"]
) -> tuple[Int[Tensor, " query"], Float[Tensor, " query"] | None]:
    """The queries' ids, ascending, and AP of each in the list that is drawn, where it is known."""
    if not isinstance(metrics, RetrievalMetrics) or isinstance(metrics, RandomGalleryMetrics):
        return queries.sort().values, None
    table = metrics.per_query()
    return table["ids"], table["AP"]


def _chosen(ids: Int[Tensor, " query"], ap: Float[Tensor, " query"] | None, queries: int, order: Order) -> Tensor:
    """The ids of the queries to draw."""
    if order != "spread" and ap is not None:
        ids = ids[ap.argsort(stable=True)][: int((~ap.isnan()).sum())]  # NaN is sorted to the end
    queries = min(queries, len(ids))
    if order == "hardest" and ap is not None:
        return ids[:queries]
    return ids[torch.arange(queries, device=ids.device) * (len(ids) - 1) // max(queries - 1, 1)]


def _nearest(
    metrics: EmbeddingMetric, rows: Rows, ranking: Ranking, chosen: Int[Tensor, " query"], k: int
) -> list[tuple[int, Hits]]:
    """For each chosen query its id and the first of its list, as it is ranked for the metrics."""
    query_ids, ids = rows.ids[ranking.query_rows], rows.ids[ranking.gallery_rows]
    if len(chosen) == 0 or len(ids) == 0:
        return [(query, []) for query in chosen.tolist()]
    ascending, order = query_ids.sort()
    queries = order[torch.searchsorted(ascending, chosen)]
    place = ranking.gallery.device  # elsewhere than the ids where embeddings are kept on the CPU
    scores = (ranking.queries[queries.to(place)] @ ranking.gallery.T).to(ids.device)  # (query, gallery)
    scores.masked_fill_(~metrics.listed(chosen, ids), -torch.inf)
    labels = rows.labels[ranking.gallery_rows]
    right = metrics.relevant(chosen, rows.labels[ranking.query_rows][queries], ids, labels)
    best = scores.topk(min(k, len(ids)), dim=1)
    results = []
    for row, query in enumerate(chosen.tolist()):
        columns = best.indices[row][best.values[row] > -torch.inf]
        results.append((query, list(zip(ids[columns].tolist(), right[row, columns].tolist()))))
    return results


def _images(pl_module: pl.LightningModule, dataset: Any, ids: list[int]) -> list[Image.Image]:
    """The images of these dataset indices as the model sees them, each stretched to the full range of grey values."""
    try:
        items = [dataset[i] for i in ids]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"RetrievalGallery: ids must index the evaluated dataset, got {ids[:5]} for one of {_length(dataset)} "
            f"items ({type(error).__name__}: {error})."
        ) from None
    batch = default_collate(items)
    unpack: Any = getattr(pl_module, "unpack_batch", lambda batch: batch)
    tensors, _, *own = unpack(batch)
    if own and own[0] is not None and own[0].tolist() != ids:
        raise ValueError(
            f"RetrievalGallery: ids must index the evaluated dataset, got id {ids[0]} for an image whose own id is "
            f"{own[0].tolist()[0]}."
        )
    if tensors.ndim != 4 or tensors.shape[1] == 2:
        raise ValueError(
            f"RetrievalGallery: images must have shape (channels, height, width) with 1 or at least 3 channels, got "
            f"{tuple(tensors.shape[1:])}."
        )
    images = []
    for tensor in tensors.float().cpu():
        low, high = tensor.min(), tensor.max()
        grey = ((tensor - low) / (high - low).clamp(min=1e-12) * 255).byte()
        array = grey.expand(3, -1, -1).permute(1, 2, 0) if len(grey) == 1 else grey[:3].permute(1, 2, 0)
        images.append(Image.fromarray(array.numpy(), "RGB"))
    return images


def _caption(ap: float) -> str:
    return "no AP" if ap != ap else f"AP = {ap:.3f}"


def _draw(rows: list[tuple[int, Hits]], captions: dict[int, str], images: Any, k: int) -> Image.Image:
    """A row for each query, below a line with its caption; ranks in the first line."""
    side = _TILE + 2 * _BORDER
    picture = Image.new(
        "RGB", ((k + 1) * (side + _GAP) + 3 * _GAP, len(rows) * (side + _TITLE) + _TITLE + _GAP), _PAPER
    )
    draw = ImageDraw.Draw(picture)
    for column in range(k + 1):
        left = _GAP + column * (side + _GAP) + (2 * _GAP if column else 0)
        draw.text(
            (left + side // 2, _TITLE // 2 + 2),
            "query" if column == 0 else str(column),
            _INK,
            anchor="mm",
            font_size=12,
        )
        for row, (query, hits) in enumerate(rows):
            if column > len(hits):
                continue
            top = 2 * _TITLE + row * (side + _TITLE)
            if column == 0:
                item, colour = query, _QUERY
                draw.text(
                    (left + side // 2, top - _TITLE // 2), captions.get(query, ""), _INK, anchor="mm", font_size=12
                )
            else:
                item, right = hits[column - 1]
                colour = _RIGHT if right else _WRONG
            draw.rectangle((left, top, left + side - 1, top + side - 1), colour)
            image = images([item])[0]
            small = image.width <= _TILE
            tile = image.resize((_TILE, _TILE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)
            picture.paste(tile, (left + _BORDER, top + _BORDER))
    return picture


def _length(dataset: Any) -> str:
    return str(len(dataset)) if hasattr(dataset, "__len__") else "an unknown number of"
