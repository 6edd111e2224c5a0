"""How images are prepared for a model: the transforms by name, and which one a model is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from lightning_retrieval.cli.transform_names import GLYPHS, TRANSFORMS
from lightning_retrieval.datamodules import reference_transform
from lightning_retrieval.datamodules.images.transforms import ReferenceName


def choose_transform(
    owner: str, checkpoint: Path, model: nn.Module, requested: str | None, recorded: str | None
) -> tuple[str, str]:
    """The name of the transform for a model, and where that name came from.

    Args:
        owner: prefix of error messages.
        checkpoint: file of the model, for error messages.
        model: the model, whose first convolution decides between colour and grey images.
        requested: the name that the user gave; it comes before all others.
        recorded: the name that the checkpoint holds.

    Returns:
        One of `TRANSFORMS`, and `"argument"`, `"checkpoint"` or `"default"`.

    Raises:
        ValueError: if the checkpoint records a transform without a name, or the model needs images with another number
            of channels than the transform gives.
    """
    channels = image_channels(model)
    if requested is not None:
        name, source = requested, "argument"
    elif recorded is not None:
        name, source = recorded, "checkpoint"
    else:
        name, source = _default_transform(channels), "default"
    if name not in TRANSFORMS:
        raise ValueError(
            f"{owner}: `transform` must be given, because the model of {checkpoint} was evaluated with a custom "
            f"transform, which a checkpoint does not hold; give the one of {', '.join(TRANSFORMS)} that is "
            "equivalent, or embed the images yourself and add them to a RetrievalIndex."
        )
    _check_channels(owner, checkpoint, name, channels)
    return name, source


def load_transform(name: str) -> Callable[[Any], Tensor]:
    """The transform of this name, from a PIL image to a tensor."""
    if name == GLYPHS:
        return _glyph_transform
    return reference_transform(cast(ReferenceName, name), train=False)


def image_channels(model: nn.Module) -> int:
    """Number of channels of the images that a model takes: that of its first convolution, 3 if it has none."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            return part.in_channels
    return 3


def _default_transform(channels: int) -> str:
    if channels == 1:
        return GLYPHS
    return "plain"


def _check_channels(owner: str, checkpoint: Path, name: str, channels: int) -> None:
    given = 3
    if name == GLYPHS:
        given = 1
    if given == channels:
        return
    if channels not in (1, 3):
        raise ValueError(
            f"{owner}: `checkpoint` must be that of a model of images with 1 or 3 channels, as image files have, got "
            f"{checkpoint}, whose model takes {channels} channels; embed the images yourself and add them to a "
            "RetrievalIndex."
        )
    raise ValueError(
        f"{owner}: `transform` must give images with the number of channels that the model of {checkpoint} takes, "
        f"{channels}, got {name!r}, which gives {given}; take {_default_transform(channels)!r}."
    )


def _glyph_transform(image: Any) -> Tensor:
    """A grey image as the `Glyphs` data module gives it: 32 x 32 pixels with values from 0 to 1."""
    grey = functional.to_image(image.convert("L").resize((32, 32)))
    glyph: Tensor = functional.to_dtype(grey, torch.float32, scale=True)
    return glyph
