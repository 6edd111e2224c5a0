"""Chooses the preparation for a model after training: that of its evaluation, if its checkpoint records it."""

import sys
from collections.abc import Mapping
from typing import Any

from PIL import Image

from lightning_retrieval.checks import first_line
from lightning_retrieval.distributed import rank
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.preparation.of_model import ModuleSide
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import (
    Transform,
    named_transform,
    rebuild_transform,
    serialise_transform,
    shown_transform,
)

PROBED_SIZE = (224, 224)  # height and width of the black image on which a function is tested
SOURCES = {
    "argument": "",
    "checkpoint": ", as the checkpoint says",
    "backbone": ", as chosen with the backbone",
    "model": ", as its embedder wants (not known to be that of its evaluation)",
    "default": ", the default (not known to be that of its evaluation)",
}
GUESSES = {"model": "which its embedder wants", "default": "the default"}  # by sources that may be wrong
CURES = {1: "take 'glyphs'", 3: "take 'plain'"}  # by the number of channels of the model's images
DEFAULT_NAMES = {1: "glyphs"}  # name of the preparation by number of channels; "plain" for other numbers


def choose_transform(
    model: str, side: ModuleSide, requested: str | None, recorded: dict[str, Any] | None, channels: int
) -> tuple[Transform, dict[str, Any], str]:
    """Choose the transform for a model, and say where the choice came from.

    Args:
        model: name of the model, for error messages.
        side: the network. It decides if both `requested` and `recorded` are None.
        requested: the name that the user gave: one of `Preparation.NAMES`, or the dotted name of a function; or None.
        recorded: the transform of the model's evaluation, as plain data, or None. `requested` must agree with it.
        channels: number of channels of the model's images, which decides if nothing else does.

    Returns:
        The transform, the transform as plain data, and the source of the choice: `"argument"`, `"checkpoint"`,
            `"model"` or `"default"`.

    Raises:
        ValueError: if the model was evaluated with a function that the user did not name, or with another transform
            than the user named; if the model needs images with another number of channels; or if the named function
            does not map images to tensors.
    """
    wanted = side.wanted
    transform: Transform
    if recorded is not None:
        transform, source = rebuild_transform(recorded, requested), "checkpoint"
    elif requested is not None:
        transform, source = named_transform(requested), "argument"
    elif wanted is not None:
        transform, source = wanted, "model"
    else:
        transform, source = Preparation.named(DEFAULT_NAMES.get(channels, "plain")), "default"
    if isinstance(transform, Preparation):
        _check_channels(model, transform, channels)
    elif requested is not None:
        _check_function(requested, transform)
    serialised = serialise_transform(transform)
    if "function" in serialised and requested is not None:
        serialised = {"function": requested}
    return transform, serialised, source


def shown_choice(about: dict[str, Any]) -> str:
    """The text that a command prints about the transform of an index.

    Args:
        about: the attribute `about` of an `ImageEmbedder`, with the keys `preparation` and `preparation_from`.
    """
    return f"{shown_transform(about['preparation'])}{SOURCES[about['preparation_from']]}"


def print_guess(about: Mapping[str, Any], *, made: str = "") -> None:
    """Print a warning, in the first process, if the preparation of a model's images is a guess.

    Args:
        about: as for `shown_choice`, with the key `checkpoint`.
        made: what an earlier command has made with this preparation, such as an index, or "".
    """
    guess = GUESSES.get(about.get("preparation_from", ""))
    if guess is None or rank() > 0:
        return
    cure = "pass"
    if made:
        cure = f"make the {made} again with"
    names = ", ".join(Preparation.NAMES)
    print(
        f"warning: {about['checkpoint']} does not say how its images were prepared in evaluation, as with a "
        f"data module of your own; they are prepared with {shown_transform(about['preparation'])}, {guess}. If that is "
        f"another size, crop, mean or std, the embeddings are wrong: {cure} --transform with the dotted name of the "
        f"function that prepared them, or one of {names}.",
        file=sys.stderr,
    )


def _check_function(name: str, function: Transform) -> None:
    """Raise unless a function accepts an image; its tensors are checked where they become a batch."""
    try:
        function(Image.new("RGB", PROBED_SIZE))
    except Exception as error:  # an error of the user's code, or of a class that is named in place of an object
        got = f"{name!r}, which raises {type(error).__name__} for a black image ({first_line(error)})"
        raise InvalidValue("must name a function of a PIL image", argument="transform", got=got) from error


def _check_channels(model: str, preparation: Preparation, channels: int) -> None:
    if preparation.channels == channels:
        return
    shown = shown_transform(serialise_transform(preparation))
    rule = f"must give images with the number of channels that {model} takes, {channels}"
    got = f"{shown}, which gives {preparation.channels}"
    raise InvalidValue(rule, argument="transform", got=got, cure=CURES.get(channels, ""))
