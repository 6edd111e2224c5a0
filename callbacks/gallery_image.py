"""The image of `RetrievalGallery`: one row of tiles for each query."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from jaxtyping import Shaped
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import default_collate

from lightning_retrieval.models import Preparation
from lightning_retrieval.training.batches import unpack

_GREEN, _RED, _GREY, _WHITE, _DARK = (34, 160, 70), (208, 48, 48), (120, 120, 120), (255, 255, 255), (60, 60, 60)
_TILE, _BORDER, _GAP, _TITLE = 72, 4, 6, 18  # pixels
_SIDE = _TILE + 2 * _BORDER

Colour = tuple[int, int, int]


class Hit(NamedTuple):
    """An image in a query's ranked list."""

    id: int
    relevant: bool


class GalleryRow(NamedTuple):
    """A query, the text above it, and the first images of its ranked list."""

    query: int
    caption: str
    hits: Sequence[Hit]


def load_image(pl_module: pl.LightningModule, dataset: Any, index: int) -> Image.Image:
    """Load one image of a data set as the model sees it.

    Raises:
        ValueError: if there is no such image, if it has another id, or if it cannot be drawn.
    """
    try:
        item = dataset[index]
    except (IndexError, KeyError, TypeError) as error:
        size = "an unknown number of"
        if hasattr(dataset, "__len__"):
            size = str(len(dataset))
        raise ValueError(
            f"RetrievalGallery: ids must index the evaluated data set, got {index} for one of {size} items "
            f"({type(error).__name__}: {error})."
        ) from None
    unpack_batch = getattr(pl_module, "unpack_batch", partial(unpack, type(pl_module).__name__))
    images, _, ids = unpack_batch(default_collate([item]))
    if ids is not None and ids.tolist() != [index]:
        raise ValueError(
            f"RetrievalGallery: ids must index the evaluated data set, got id {index} for an image that has the id "
            f"{ids.tolist()[0]}."
        )
    if images.ndim != 4 or images.shape[1] == 2:
        raise ValueError(
            f"RetrievalGallery: images must have shape (channels, height, width) with 1 or at least 3 channels, got "
            f"{tuple(images.shape[1:])}."
        )
    return as_image(images[0].cpu(), getattr(dataset, "transform", None))


def as_image(tensor: Shaped[Tensor, "channel height width"], transform: Any = None) -> Image.Image:
    """Convert a tensor to an RGB image with its true colours, as far as they are known.

    Values from 0 to 1 and uint8 are colours. If the transform of the data set ends in a normalisation, this is undone.
    Other values are stretched to the full range, all channels alike.

    Args:
        tensor: the image as the model sees it.
        transform: that of the data set.
    """
    levels = _levels(tensor, transform)
    rgb = levels[:3]
    if len(levels) == 1:
        rgb = levels.expand(3, -1, -1)
    return Image.fromarray(rgb.permute(1, 2, 0).numpy())


def _levels(tensor: Tensor, transform: Any) -> Tensor:
    """The image as uint8."""
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
    """What undoes the normalisation of a transform: itself, or one with the numbers of its last step."""
    transform = getattr(transform, "current", transform)  # of a data module, which may exchange it
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
        rows: to draw.
        load: returns the image with an id.
        k: number of columns after the query's.
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
        for rank, hit in enumerate(row.hits, 1):
            colour = _RED
            if hit.relevant:
                colour = _GREEN
            _draw_tile(canvas, rank, top, load(hit.id), colour)
    return canvas


def _left(column: int) -> int:
    left = _GAP + column * (_SIDE + _GAP)
    if column > 0:
        left += 2 * _GAP  # between the query and its list
    return left


def _write(pen: ImageDraw.ImageDraw, column: int, y: int, text: str) -> None:
    pen.text((_left(column) + _SIDE // 2, y), text, _DARK, anchor="mm", font_size=12)


def _draw_tile(canvas: Image.Image, column: int, top: int, image: Image.Image, colour: Colour) -> None:
    left = _left(column)
    ImageDraw.Draw(canvas).rectangle((left, top, left + _SIDE - 1, top + _SIDE - 1), colour)
    resampling = Image.Resampling.LANCZOS
    if image.width <= _TILE:
        resampling = Image.Resampling.NEAREST  # shows the pixels of small images
    canvas.paste(image.resize((_TILE, _TILE), resampling), (left + _BORDER, top + _BORDER))
