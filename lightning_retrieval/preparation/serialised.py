"""Serialises image transforms as plain data, so that a checkpoint can record the transform of its evaluation.

| transform | plain data |
| --- | --- |
| a `Preparation` | `{"preparation": its settings}` |
| a transform of torchvision or timm | `{"class_path": ..., "init_args": ...}`, as in a config |
| a transform of albumentations | `{"albumentations": its own plain data}` |
| any other code | `{"function": "package.function"}`, or `{"function": None}` if no name can import it |

Classes are looked up in torchvision, timm and albumentations only. Other code is imported only if the caller names it.
"""

import enum
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lightning_retrieval import plain_data
from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.preparation.preparation import Preparation

Transform = Callable[[Any], Any]

FORMS = {"preparation": dict, "albumentations": dict, "class_path": str, "function": (str, type(None))}
UPDATE = "NO_ALBUMENTATIONS_UPDATE"  # environment variable
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)}
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

    def as_dict(self) -> dict[str, Any] | None:
        """The transform as plain data, None if it contains functions."""
        try:
            return {"albumentations": json.loads(json.dumps(self.transform.to_dict()))}  # JSON turns tuples into lists
        except (NotImplementedError, AttributeError, ValueError, TypeError):
            return None

    @classmethod
    def from_dict(cls, serialised: dict[str, Any]) -> "AlbumentationsTransform":
        """Rebuild a transform from plain data. Only classes of albumentations are created.

        Args:
            serialised: the result of `as_dict`.

        Raises:
            ModuleNotFoundError: if albumentations is not installed.
        """
        with (
            _without_update_check(),
            optional_import(
                "the model was evaluated with a transform of albumentations, which is not installed; install it: "
                "pip install 'lightning-retrieval[albumentations]'.",
            ),
        ):
            import albumentations  # type: ignore[import-untyped]
        return cls(albumentations.from_dict(serialised["albumentations"]))


def of_pil_images(transform: Any) -> Any:
    """Wrap a transform of albumentations as a function of a PIL image; return any other transform unchanged."""
    if f"{type(transform).__module__}.".startswith("albumentations."):
        return AlbumentationsTransform(transform)
    return transform


@contextmanager
def _without_update_check() -> Iterator[None]:
    """Context in which importing albumentations does not check for a newer version online."""
    given = os.environ.get(UPDATE)
    os.environ[UPDATE] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[UPDATE]


def serialise_transform(transform: Transform) -> dict[str, Any]:
    """Serialise a transform as plain data for `rebuild_transform`.

    Args:
        transform: a function from a PIL image to a tensor.
    """
    if isinstance(transform, Preparation):
        return {"preparation": transform.as_dict()}
    if isinstance(transform, AlbumentationsTransform):
        serialised = transform.as_dict()
    else:
        serialised = _serialise_step(transform)
    if serialised is None:
        return {"function": _name_of(transform)}
    return serialised


def _serialise_step(step: Any) -> dict[str, Any] | None:
    """The class and arguments of a transform of torchvision or timm; None if they are no plain data."""
    if not _is_known(type(step)):
        return None
    try:
        serialised = _class_and_arguments(step)
        is_complete = _class_and_arguments(_rebuild(serialised)) == serialised
    except (TypeError, ValueError, AttributeError):  # an argument is stored under another name, or is a function
        return None
    if is_complete:
        return serialised
    return None


def _is_known(cls: type) -> bool:
    return plain_data.is_below(cls.__module__, plain_data.TRANSFORM_PACKAGES)


def _class_and_arguments(step: Any) -> dict[str, Any]:
    arguments = {}
    for parameter in plain_data.constructor_parameters(type(step)):
        if not plain_data.is_variadic(parameter):
            arguments[parameter.name] = _plain(getattr(step, parameter.name))
    return {"class_path": plain_data.class_path(type(step)), "init_args": arguments}


def _plain(value: Any) -> Any:
    """A constructor argument as plain data."""
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if _is_known(type(value)):
        return _class_and_arguments(value)
    raise TypeError(f"not plain: {short_repr(value)}")


def _name_of(transform: Transform) -> str | None:
    """The dotted name of a function or a class; None if no name can import it."""
    name = getattr(transform, "__qualname__", None)
    module = getattr(transform, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        return None
    return f"{module}.{name}"


def rebuild_transform(serialised: dict[str, Any], requested: str | None = None) -> Transform:
    """Rebuild the transform that a model was evaluated with.

    Args:
        serialised: the result of `serialise_transform`.
        requested: the name of the function or preparation that the caller requests, or None. The requested transform
            must equal the serialised one. Functions are imported only if they are requested.

    Raises:
        ValueError: if the transform is a function that was not requested, another transform was requested, or the plain
            data do not describe a transform.
    """
    preparation = check_serialised_transform(serialised)
    if "function" in serialised:
        return _requested_function(serialised["function"], requested)
    if requested is not None and serialise_transform(named_transform(requested)) != serialised:
        rule = f"must be that of the model, which was evaluated with {shown_transform(serialised)}"
        raise InvalidValue(rule, argument="transform", got=repr(requested), cure="leave it out")
    if preparation is not None:
        return preparation
    try:
        if "albumentations" in serialised:
            return AlbumentationsTransform.from_dict(serialised)
        step: Transform = _rebuild(serialised)
    except (
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:  # raised by constructors or by albumentations
        raise _no_transform(serialised, error) from None
    return step


def check_serialised_transform(serialised: Any) -> Preparation | None:
    """Raise unless plain data from a file describe a transform and hold only permitted names; nothing is imported.

    Args:
        serialised: the result of `serialise_transform`, unless the file is damaged or forged.

    Returns:
        The preparation that the data describe; None if they describe another transform.

    Raises:
        ValueError: if the data describe no transform, or hold a name that is not permitted.
        TypeError: if a value is not plain data.
    """
    plain_data.check_plain_data("transform", serialised, plain_data.TRANSFORM_PACKAGES)
    found = [name for name in FORMS if isinstance(serialised, dict) and name in serialised]
    if len(found) != 1 or not isinstance(serialised[found[0]], FORMS[found[0]]):  # type: ignore[arg-type]
        raise _no_transform(serialised)
    if "preparation" not in serialised:
        return None
    try:
        return Preparation(**serialised["preparation"])
    except (TypeError, ValueError) as error:
        raise _no_transform(serialised, error) from None


def _no_transform(serialised: Any, error: Exception | None = None) -> InvalidValue:
    """The error for plain data that do not describe a transform."""
    reason = ""
    if error is not None:
        reason = f" ({first_line(error)})"
    return InvalidValue(
        "the recorded `transform` must describe a transform of images", got=f"{short_repr(serialised)}{reason}"
    )


def _rebuild(value: Any, name: str = "transform") -> Any:
    """Rebuild a transform, or its argument `name`, from plain data."""
    if isinstance(value, list):
        return [_rebuild(item, name) for item in value]
    if isinstance(value, str) and name == "interpolation":
        from torchvision.transforms import InterpolationMode

        return InterpolationMode(value)
    if isinstance(value, str):
        return _DTYPES.get(value, value)
    if not isinstance(value, dict):
        return value
    path, arguments = value.get("class_path"), value.get("init_args", {})
    if not isinstance(arguments, dict):
        raise InvalidValue("must have a dict of arguments", argument="transform", got=short_repr(arguments))
    cls = plain_data.find_class("transform", path, packages=plain_data.TRANSFORM_PACKAGES)
    is_callable = any("__call__" in vars(base) for base in cls.__mro__)
    if cls.__name__ == "Lambda" or not _is_known(cls) or not is_callable:
        rule = "must name transforms of torchvision or timm, but no Lambda"
        raise InvalidValue(rule, argument="transform", got=short_repr(path))
    return cls(**{argument: _rebuild(plain, argument) for argument, plain in arguments.items()})


def _requested_function(recorded: str | None, requested: str | None) -> Transform:
    """Import the function that a model was evaluated with; raise unless the caller requested it."""
    shown = recorded or _UNKNOWN
    if requested is None:
        example = recorded or "package.function"
        rule = f"must be given, because the model was evaluated with {shown}, whose code a checkpoint does not hold"
        raise InvalidValue(rule, argument="transform", cure=f"give {example!r}, which is imported, if you trust it")
    is_same = recorded is None or requested == recorded
    if (
        not is_same and recorded is not None and recorded.startswith("__main__.")
    ):  # the function was defined in a script
        is_same = requested.rpartition(".")[2] == recorded.rpartition(".")[2]
    if not is_same or requested in Preparation.NAMES:
        rule = f"must be the one that the model was evaluated with, {shown}"
        raise InvalidValue(rule, argument="transform", got=repr(requested))
    return _imported_function(requested)


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
    return _imported_function(name)


def _imported_function(name: str) -> Transform:
    """Import the function that the caller has named, but nothing of Python's standard library: it has no transforms."""
    if name.split(".")[0] in sys.stdlib_module_names:
        rule = "must name a function of yours from a PIL image to a tensor"
        raise InvalidValue(rule, argument="transform", got=f"{name!r}, which is part of Python")
    function: Transform = plain_data.load_function("transform", name)
    return function


def shown_transform(serialised: dict[str, Any]) -> str:
    """The text by which messages name a transform.

    Args:
        serialised: the transform as plain data.
    """
    if "function" in serialised:
        return serialised["function"] or _UNKNOWN
    if "preparation" not in serialised:
        return short_repr(serialised)
    preparation = Preparation(**serialised["preparation"])
    for name in Preparation.NAMES:
        if Preparation.named(name) == preparation:
            return repr(name)
    defaults = Preparation().as_dict()
    changed = [f"{name}={value}" for name, value in preparation.as_dict().items() if value != defaults.get(name)]
    return f"Preparation({', '.join(changed)})"
