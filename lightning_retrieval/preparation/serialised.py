"""What a checkpoint records of the transform of its evaluation, as plain data; transforms of albumentations.

| transform | plain data |
| --- | --- |
| a `Preparation` | `{"preparation": its settings}` |
| any other code | `{"function": "package.function"}`, or `{"function": None}` if no name can import it |

Code is imported only if the caller names it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.plain_data import load_function
from lightning_retrieval.preparation.preparation import Preparation

Transform = Callable[[Any], Any]

_UNKNOWN = "a transform that cannot be imported by a name"


class AlbumentationsTransform:
    """A transform of albumentations as a function from a PIL image.

    The random generator of albumentations is seeded with the seed of torch's generator. `ImageSet` sets that seed for
    each training image.

    Args:
        transform: `albumentations.Compose` or another transform; it should end with
            `albumentations.pytorch.ToTensorV2`.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Image.Image) -> Any:
        self.transform.set_random_seed(torch.initial_seed() % 2**32)
        return self.transform(image=np.array(image))["image"]

    def __repr__(self) -> str:
        return repr(self.transform)


def of_pil_images(transform: Any) -> Any:
    """Wrap a transform of albumentations as a function of a PIL image; return any other transform unchanged."""
    if f"{type(transform).__module__}.".startswith("albumentations."):
        return AlbumentationsTransform(transform)
    return transform


def serialise_transform(transform: Transform) -> dict[str, Any]:
    """Record a transform as plain data for `rebuild_transform`.

    Args:
        transform: a function from a PIL image to a tensor.
    """
    if isinstance(transform, Preparation):
        return {"preparation": transform.as_dict()}
    name = getattr(transform, "__qualname__", None)
    module = getattr(transform, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        return {"function": None}
    return {"function": f"{module}.{name}"}


def recorded_preparation(serialised: Any) -> Preparation | None:
    """The preparation that plain data from a file describe; None if they name a function. Nothing is imported.

    Args:
        serialised: the result of `serialise_transform`, unless the file is damaged or forged.

    Raises:
        ValueError: if the data describe neither.
    """
    try:
        ((kind, value),) = serialised.items()
        if kind == "function" and isinstance(value, (str, type(None))):
            return None
        return Preparation(**serialised["preparation"])
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        rule = "the recorded `transform` must describe a preparation of images, or name a function"
        raise InvalidValue(rule, got=f"{short_repr(serialised)} ({first_line(error)})") from None


def rebuild_transform(serialised: dict[str, Any], requested: str | None = None) -> Transform:
    """The transform that a model was evaluated with.

    Args:
        serialised: the result of `serialise_transform`.
        requested: the name of the function or preparation that the caller requests, or None. The requested transform
            must equal the recorded one. Functions are imported only if they are requested.

    Raises:
        ValueError: if the transform is a function that was not requested, another transform was requested, or the plain
            data do not describe a transform.
    """
    preparation = recorded_preparation(serialised)
    if preparation is None:
        return _requested_function(serialised["function"], requested)
    if requested is not None and named_transform(requested) != preparation:
        rule = f"must be that of the model, which was evaluated with {shown_transform(serialised)}"
        raise InvalidValue(rule, argument="transform", got=repr(requested), cure="leave it out")
    return preparation


def _requested_function(recorded: str | None, requested: str | None) -> Transform:
    """Import the function that a model was evaluated with; raise unless the caller requested it."""
    shown = recorded or _UNKNOWN
    if requested is None:
        example = recorded or "package.function"
        rule = f"must be given, because the model was evaluated with {shown}, whose code a checkpoint does not hold"
        raise InvalidValue(rule, argument="transform", cure=f"give {example!r}, which is imported, if you trust it")
    is_same = requested == shown
    if recorded is None:
        is_same = requested not in Preparation.NAMES
    elif recorded.startswith("__main__."):  # the function was defined in a script
        is_same = requested.rpartition(".")[2] == recorded.rpartition(".")[2]
    if not is_same:
        rule = f"must be the one that the model was evaluated with, {shown}"
        raise InvalidValue(rule, argument="transform", got=repr(requested))
    function: Transform = load_function("transform", requested)
    return function


def named_transform(name: str) -> Transform:
    """The preparation or function that the caller has named.

    Args:
        name: one of `Preparation.NAMES`, or the dotted name `package.function`, which is imported.

    Raises:
        ValueError: if the name is neither.
    """
    if name in Preparation.NAMES:
        return Preparation.named(name)
    if "." not in name:
        names = ", ".join(map(repr, Preparation.NAMES))
        rule = f"must be one of {names}, or the name of a function such as 'package.function'"
        raise InvalidValue(rule, argument="transform", got=short_repr(name))
    function: Transform = load_function("transform", name)
    return function


def shown_transform(serialised: dict[str, Any]) -> str:
    """The text by which messages name a transform.

    Args:
        serialised: the transform as plain data.
    """
    if "function" in serialised:
        return serialised["function"] or _UNKNOWN
    preparation = Preparation(**serialised["preparation"])
    for name in Preparation.NAMES:
        if Preparation.named(name) == preparation:
            return repr(name)
    defaults = Preparation().as_dict()
    changed = [f"{name}={value}" for name, value in preparation.as_dict().items() if value != defaults.get(name)]
    return f"Preparation({', '.join(changed)})"
