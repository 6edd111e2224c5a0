"""Draws one row of pictures for each query: the query and the images that the model ranks first."""

import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import default_collate

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.curves import EvaluationFigure
from lightning_retrieval.callbacks.evaluation import is_ranked_by_label
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.metrics import EmbeddingMetric, RetrievalMetrics
from lightning_retrieval.metrics.ranked_lists import RankedLists
from lightning_retrieval.models import Preparation
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.ranking.ranks import ieee_products
from lightning_retrieval.training.sides import unpack

_GREEN, _RED, _GREY, _WHITE, _DARK = (34, 160, 70), (208, 48, 48), (120, 120, 120), (255, 255, 255), (60, 60, 60)
_TILE, _BORDER, _GAP, _TITLE = 72, 4, 6, 18  # lengths in pixels
_SIDE = _TILE + 2 * _BORDER
_TEXT_COLUMNS, _TEXT_LINES = 13, 6  # letters in a line and lines of a text that is drawn as a tile
_BLOCK_GALLERY = 1 << 14  # number of gallery images that are scored at a time

Order = Literal["spread", "hardest", "quantiles"]
Colour = tuple[int, int, int]


class RankedImage(NamedTuple):
    """An image in a query's ranked list."""

    id: int
    relevant: bool


class GalleryRow(NamedTuple):
    """A query, the text above it, and the first images of its ranked list."""

    query: int
    caption: str
    images: Sequence[RankedImage]


def load_image(pl_module: pl.LightningModule, dataset: Any, index: int) -> Image.Image:
    """Load an image of a data set in the form that the model receives, and convert it to an RGB image.

    Args:
        pl_module: the module that is evaluated.
        dataset: the data set.
        index: the id of the image. For data with two sides, `2 * index` is a query and `2 * index + 1` a candidate.

    Raises:
        ValueError: if the id of the image is not its index, or it cannot be drawn.
    """
    if getattr(dataset, "two_sided", False):
        index, side = divmod(index, len(SIDES))
        dataset = dataset.sides[SIDES[side]].dataset
    if hasattr(dataset, "texts"):
        return text_tile(dataset.texts[index])
    unpack_batch = getattr(pl_module, "unpack_batch", unpack)
    images, _, ids = unpack_batch(default_collate([dataset[index]]))
    if ids is not None and ids.tolist() != [index]:
        rule = "ids must index the evaluated data set"
        raise InvalidValue(rule, got=f"id {index} for an image that has the id {ids.tolist()[0]}")
    if images.ndim != 4 or images.shape[1] == 2:
        rule = "images must have shape (channels, height, width) with 1 or at least 3 channels"
        raise InvalidValue(rule, got=tuple(images.shape[1:]))
    return as_image(images[0].cpu(), getattr(dataset, "transform", None))


def text_tile(text: str) -> Image.Image:
    """Draw a text in the size of a tile; the rest of a long text is cut off."""
    image = Image.new("RGB", (_TILE, _TILE), _WHITE)
    lines = textwrap.wrap(text, _TEXT_COLUMNS)[:_TEXT_LINES]
    ImageDraw.Draw(image).multiline_text((2, 1), "\n".join(lines), _DARK, font_size=10, spacing=1)
    return image


def as_image(tensor: Shaped[Tensor, "channel height width"], transform: Any = None) -> Image.Image:
    """Convert a tensor to an RGB image, with its true colours if they are known.

    Tensors of uint8 and values from 0 to 1 are taken as colours. If the transform of the data set ends with a
    normalisation, the normalisation is undone. Other values are stretched to the full range, by the same factor for all
    channels.

    Args:
        tensor: the input of the model.
        transform: the transform of the data set.
    """
    levels = _levels(tensor, transform)
    rgb = levels[:3]
    if len(levels) == 1:
        rgb = levels.expand(3, -1, -1)
    return Image.fromarray(rgb.permute(1, 2, 0).numpy())


def _levels(tensor: Tensor, transform: Any) -> Tensor:
    """Return the image in uint8."""
    if tensor.dtype == torch.uint8:
        return tensor
    normalization = _normalization(transform, len(tensor))
    if normalization is not None:
        return normalization.undo(tensor)
    values = tensor.float()
    low, high = values.min(), values.max()
    if low < 0 or high > 1:
        values = (values - low) / (high - low).clamp(min=1e-12)
    return (values * 255).byte()


def _normalization(transform: Any, channels: int) -> Preparation | None:
    """Return a `Preparation` that can undo the normalisation of a transform; None if there is none.

    The result is the transform itself if it is a `Preparation`, else it is created from a last step `Normalize`.
    """
    transform = getattr(transform, "current", transform)  # `current` is the present transform of a data module
    if isinstance(transform, Preparation) and transform.channels == channels:
        return transform
    steps = getattr(transform, "transforms", None)
    last = transform
    if steps:
        last = steps[-1]
    if type(last).__name__ != "Normalize" or channels not in (1, 3):
        return None
    mean, std = torch.as_tensor(last.mean).tolist(), torch.as_tensor(last.std).tolist()
    return Preparation(channels=channels, mean=mean, std=std)


def draw_gallery(rows: Sequence[GalleryRow], load: Callable[[int], Image.Image], k: int) -> Image.Image:
    """Draw the rows one below the other, with the ranks above the columns.

    Args:
        rows: the rows to draw.
        load: function that returns the image with a given id.
        k: number of columns after the column of the queries.
    """
    width = (k + 1) * (_SIDE + _GAP) + 3 * _GAP
    height = len(rows) * (_SIDE + _TITLE) + _TITLE + _GAP
    canvas = Image.new("RGB", (width, height), _WHITE)
    pen = ImageDraw.Draw(canvas)
    _write(pen, 0, _TITLE // 2 + 2, "query")
    for rank in range(1, k + 1):
        _write(pen, rank, _TITLE // 2 + 2, str(rank))
    for number, row in enumerate(rows):
        top = 2 * _TITLE + number * (_SIDE + _TITLE)
        _write(pen, 0, top - _TITLE // 2, row.caption)
        _draw_tile(canvas, 0, top, load(row.query), _GREY)
        for rank, image in enumerate(row.images, 1):
            colour = _RED
            if image.relevant:
                colour = _GREEN
            _draw_tile(canvas, rank, top, load(image.id), colour)
    return canvas


def _left(column: int) -> int:
    left = _GAP + column * (_SIDE + _GAP)
    if column > 0:
        left += 2 * _GAP  # wider gap between the query and its list
    return left


def _write(pen: ImageDraw.ImageDraw, column: int, y: int, text: str) -> None:
    pen.text((_left(column) + _SIDE // 2, y), text, _DARK, anchor="mm", font_size=12)


def _draw_tile(canvas: Image.Image, column: int, top: int, image: Image.Image, colour: Colour) -> None:
    left = _left(column)
    ImageDraw.Draw(canvas).rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), colour)
    resampling = Image.Resampling.LANCZOS
    if image.width <= _TILE:
        resampling = Image.Resampling.NEAREST  # small images keep sharp pixels
    canvas.paste(image.resize((_TILE, _TILE), resampling), (left + _BORDER, top + _BORDER))


def query_ap(
    metrics: EmbeddingMetric, query_ids: Int[Tensor, " query"]
) -> tuple[Int[Tensor, " query"], Float[Tensor, " query"] | None]:
    """Return the ids of the queries in ascending order, and the AP of each query, or None if AP is not known."""
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


def nearest_images(ranked: RankedLists, chosen: Int[Tensor, " chosen"], k: int) -> list[tuple[int, list[RankedImage]]]:
    """Return the id and the first k ranked images of each chosen query. The ranking is that of the metrics."""
    ids, lists = ranked.gallery_ids, ranked.lists.finest
    if len(chosen) == 0 or len(ids) == 0:
        return [(query, []) for query in chosen.tolist()]
    ascending, order = ranked.query_ids.sort()
    queries = order[torch.searchsorted(ascending, chosen)]
    rows = ranked.queries.select(queries)
    scores = torch.empty(len(queries), 0, dtype=rows.dtype, device=ids.device)
    columns = torch.empty(len(queries), 0, dtype=torch.int64, device=ids.device)
    for begin in range(0, len(ids), _BLOCK_GALLERY):
        positions = torch.arange(begin, min(begin + _BLOCK_GALLERY, len(ids)), device=ids.device)
        gallery = ranked.gallery.range(begin, begin + len(positions))
        with ieee_products():
            of_block = (rows.to(gallery.device) @ gallery.T).to(ids.device)  # (chosen, block)
        of_block.masked_fill_(~lists.masks(queries, positions)[1], -torch.inf)
        scores = torch.cat([scores, of_block], 1)
        columns = torch.cat([columns, positions.expand_as(of_block)], 1)
        scores, best = scores.topk(min(k, scores.shape[1]), dim=1)
        columns = columns.gather(1, best)
    results = []
    for row, query in enumerate(queries.split(1)):
        found = columns[row][scores[row] > -torch.inf]
        relevant, _ = lists.masks(query, found)
        images = map(RankedImage, ids[found].tolist(), relevant[0].tolist())
        results.append((int(chosen[row]), list(images)))
    return results


def ap_caption(ap: float) -> str:
    """Format the AP of a query."""
    if math.isnan(ap):
        return "no AP"
    return f"AP = {ap:.3f}"


class RetrievalGallery(EvaluationFigure):
    """Draws some queries, each followed by its nearest images, framed green if relevant and red if not.

    The figures look like Fig. 3 of Smooth-AP (ECCV 2020) and Fig. 4 of RaMBO (CVPR 2020). The AP of each query is
    written above it. The PNG files are in `retrieval/` of the run's log folder. Every logger that accepts images
    (TensorBoard, Weights & Biases) gets them too.

    Images are drawn in their true colours, if these are known: values from 0 to 1 are taken as colours, and a
    normalisation is undone if the transform of the data set is a `Preparation` or ends with a step `Normalize`. Other
    values are stretched to the full range.

    Args:
        queries: number of queries, >= 1.
        k: number of nearest images of each query, >= 1.
        every_n_epochs: number of epochs between two galleries of the validation sets, >= 1. Test sets are always drawn.
        order: which queries to draw. `"spread"`: queries spread evenly over the evaluation set, the same each time;
            `"hardest"`: the queries with the lowest AP, in ascending order of AP; `"quantiles"`: queries at evenly
            spaced quantiles of AP, in ascending order of AP. A query without a relevant candidate has no AP; only
            `"spread"` draws such queries.

    Raises:
        ValueError: if a number is below 1, `order` is unknown, or the Trainer has no `RetrievalEvaluation`.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
        >>> callbacks = [RetrievalEvaluation(), RetrievalGallery(queries=4, every_n_epochs=5, order="hardest")]

    Cost:
        The drawn images are read again from the data set; images are not kept in memory. The processes gather the
        gallery once more, block by block.

    Relations:
        The lists are the same as for the metrics, including post-processing. An instance is represented by its first
        image, and junk images are not drawn. Of data with two sides, the candidates of each query are drawn; texts of a
        `TextTable` are drawn as text. If the images of a set cannot be drawn (the ids do not index the set, or the set
        holds vectors), a warning is issued instead. For sets with another metric than `RetrievalMetrics`, AP is not
        known, and queries are chosen by `"spread"`.
    """

    ranked_by_label_only = False

    def __init__(
        self, queries: PositiveInt = 8, k: PositiveInt = 10, *, every_n_epochs: PositiveInt = 1, order: Order = "spread"
    ) -> None:
        super().__init__(every_n_epochs)
        self.queries = checked(self, queries=queries)
        self.k = checked(self, k=k)
        self.order = checked(self, order=order)

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
        ranked = metrics.ranked_lists()
        ids, ap = query_ap(metrics, ranked.query_ids)
        chosen = choose_queries(ids, ap, self.queries, self.order).to(ranked.query_ids.device)
        images_of_queries = nearest_images(ranked, chosen, self.k)
        if not trainer.is_global_zero or not images_of_queries:
            return None
        captions = {}
        if ap is not None:
            captions = {query: ap_caption(value) for query, value in zip(ids.tolist(), ap.tolist())}
        gallery = [GalleryRow(query, captions.get(query, ""), images) for query, images in images_of_queries]
        try:
            return draw_gallery(gallery, partial(load_image, pl_module, dataset), self.k)
        except (LookupError, ValueError, TypeError, RuntimeError) as error:  # a drawing must not stop a run
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"RetrievalGallery: {prefix} is not drawn ({reason})", stacklevel=2)
            return None
