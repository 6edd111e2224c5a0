"""Image transforms as plain data, so that a checkpoint can say what evaluation does to an image.

| transform | plain data |
| --- | --- |
| a `Preparation` | `{"preparation": its settings}` |
| of torchvision or timm | `{"class_path": ..., "init_args": ...}`, as in a config |
| of albumentations | `{"albumentations": its own plain data}` |
| any other code | `{"function": "package.function"}`, or None if it cannot be imported by a name |

Classes are looked up in torchvision, timm and albumentations only. Other code is imported only if the caller names it.
"""

import enum
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.plain_data import (
    TRANSFORM_PACKAGES,
    check_plain_data,
    class_path,
    find_class,
    is_below,
    load_function,
)
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.training_transforms import AlbumentationsTransform

Transform = Callable[[Any], Any]


_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)}


_UNKNOWN = "a transform that cannot be imported by a name"


def describe_transform(transform: Transform) -> dict[str, Any]:
    """Plain data from which `rebuild_transform` makes the transform again.

    Args:
        transform: a function from a PIL image to a tensor.
    """
    if isinstance(transform, Preparation):
        return {"preparation": transform.as_dict()}
    if isinstance(transform, AlbumentationsTransform):
        described = transform.as_dict()
    else:
        described = _describe_step(transform)
    if described is not None:
        return described
    return {"function": _name_of(transform)}


def rebuild_transform(owner: str, described: dict[str, Any], requested: str | None = None) -> Transform:
    """The transform that a model was evaluated with.

    Args:
        owner: prefix of error messages.
        described: what `describe_transform` returned.
        requested: the dotted name of the function, or the name of the preparation, that the caller asked for: it must
            be the one that is described. A function is imported only if it was asked for.

    Raises:
        ValueError: if the transform is code that the caller has not asked for, the caller asked for another one, or the
            plain data describe none.
    """
    check_described_transform(owner, described)
    if "function" in described:
        return _requested_function(owner, described["function"], requested)
    if requested is not None and describe_transform(named_transform(owner, requested)) != described:
        raise ValueError(
            f"{owner}: `transform` must be that of the model, which was evaluated with {shown_transform(described)}, "
            f"got {requested!r}; leave it out."
        )
    if "preparation" in described:
        return Preparation(**described["preparation"])
    try:
        if "albumentations" in described:
            return AlbumentationsTransform.from_dict(owner, described)
        step: Transform = _rebuild_step(owner, described)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:  # of constructors and of albumentations
        raise _no_transform(owner, described, error) from None
    return step


def check_described_transform(owner: str, described: Any) -> None:
    """Raise unless plain data of a file describe a transform, with names that a file may name; nothing is imported.

    Args:
        owner: prefix of error messages.
        described: what `describe_transform` returned, if the file is not damaged or forged.

    Raises:
        ValueError: if they do not.
        TypeError: if they are not plain data.
    """
    check_plain_data(owner, "transform", described, TRANSFORM_PACKAGES)
    forms = {"preparation": dict, "albumentations": dict, "class_path": str, "function": (str, type(None))}
    found = [name for name in forms if isinstance(described, dict) and name in described]
    if len(found) != 1 or not isinstance(described[found[0]], forms[found[0]]):  # type: ignore[arg-type]
        raise _no_transform(owner, described)
    if "preparation" in described:
        try:
            Preparation(**described["preparation"])
        except (TypeError, ValueError) as error:
            raise _no_transform(owner, described, error) from None


def _no_transform(owner: str, described: Any, error: Exception | None = None) -> ValueError:
    """The error for plain data that describe no transform."""
    reason = ""
    if error is not None:
        reason = f" ({first_line(error)})"
    return ValueError(
        f"{owner}: the recorded `transform` must describe a transform of images, got {short_repr(described)}{reason}."
    )


def preparation_of(module: Any) -> Preparation | None:
    """The `Preparation` that a module was evaluated with, else that of its embedder; None if there is none.

    Args:
        module: with the attribute `preparation`, as a `RetrievalModule` has it, or with an embedder.
    """
    recorded = getattr(module, "preparation", None)
    if recorded is not None:
        if "preparation" in recorded:
            return Preparation(**recorded["preparation"])
        return None
    wanted = getattr(getattr(module, "embedder", None), "preparation", None)
    if isinstance(wanted, Preparation):
        return wanted
    return None


def named_transform(owner: str, name: str) -> Transform:
    """The preparation, or the function `package.function`, of a name that the caller gave.

    Args:
        owner: prefix of error messages.
        name: one of `Preparation.NAMES` or a dotted name, whose module is imported.

    Raises:
        ValueError: if it is neither.
    """
    if name in Preparation.NAMES:
        return Preparation.named(name)
    if "." not in name:
        names = ", ".join(map(repr, Preparation.NAMES))
        raise ValueError(
            f"{owner}: `transform` must be one of {names}, or the name of a function such as 'package.function', got "
            f"{short_repr(name)}."
        )
    function: Transform = load_function(owner, "transform", name)
    return function


def shown_transform(described: dict[str, Any]) -> str:
    """What messages show of a described transform."""
    if "function" in described:
        return described["function"] or _UNKNOWN
    if "preparation" not in described:
        return short_repr(described)
    preparation = Preparation(**described["preparation"])
    for name in Preparation.NAMES:
        if Preparation.named(name) == preparation:
            return repr(name)
    changed = []
    for name, value in preparation.as_dict().items():
        if value != Preparation().as_dict()[name]:
            changed.append(f"{name}={value}")
    return f"Preparation({', '.join(changed)})"


def _requested_function(owner: str, recorded: str | None, requested: str | None) -> Transform:
    """The function that a model was evaluated with, if the caller asked for it."""
    shown = recorded or _UNKNOWN
    if requested is None:
        example = recorded or "package.function"
        raise ValueError(
            f"{owner}: `transform` must be given, because the model was evaluated with {shown}, whose code a "
            f"checkpoint does not hold; give {example!r}, which is imported, if you trust it."
        )
    is_same = recorded is None or requested == recorded
    if not is_same and recorded is not None and recorded.startswith("__main__."):  # of a script
        is_same = requested.rpartition(".")[2] == recorded.rpartition(".")[2]
    if not is_same or requested in Preparation.NAMES:
        raise ValueError(
            f"{owner}: `transform` must be the one that the model was evaluated with, {shown}, got {requested!r}."
        )
    function: Transform = load_function(owner, "transform", requested)
    return function


def _name_of(transform: Transform) -> str | None:
    """The dotted name of a function or a class, None if it has none that can be imported."""
    name = getattr(transform, "__qualname__", None)
    module = getattr(transform, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        return None
    return f"{module}.{name}"


def _describe_step(step: Any) -> dict[str, Any] | None:
    """The class and the arguments of a transform of torchvision or timm; None if they are not plain."""
    if not _is_known(type(step)):
        return None
    try:
        described = _class_and_arguments(step)
        rebuilt = _rebuild_step("describe_transform", described)
        is_complete = _class_and_arguments(rebuilt) == described
    except (TypeError, ValueError, AttributeError):  # an argument is kept under another name, or is a function
        return None
    if is_complete:
        return described
    return None


def _is_known(cls: type) -> bool:
    return is_below(cls.__module__, TRANSFORM_PACKAGES)


def _class_and_arguments(step: Any) -> dict[str, Any]:
    arguments = {}
    for parameter in list(inspect.signature(type(step).__init__).parameters.values())[1:]:
        if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            arguments[parameter.name] = _plain(getattr(step, parameter.name))
    return {"class_path": class_path(type(step)), "init_args": arguments}


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


def _rebuild_step(owner: str, described: dict[str, Any]) -> Any:
    path, arguments = described.get("class_path"), described.get("init_args", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"{owner}: `transform` must have a dict of arguments, got {short_repr(arguments)}.")
    cls = find_class(owner, "transform", path, packages=TRANSFORM_PACKAGES)
    if cls.__name__ == "Lambda" or not _is_transform(cls):
        raise ValueError(
            f"{owner}: `transform` must name transforms of torchvision or timm, but no Lambda, got {short_repr(path)}."
        )
    return cls(**{name: _argument(owner, name, value) for name, value in arguments.items()})


def _is_transform(cls: type) -> bool:
    """Whether the objects of a class of torchvision or timm can be called."""
    return _is_known(cls) and any("__call__" in vars(base) for base in cls.__mro__)


def _argument(owner: str, name: str, value: Any) -> Any:
    """A constructor argument from its plain data."""
    if isinstance(value, dict):
        return _rebuild_step(owner, value)
    if name == "interpolation" and isinstance(value, str):
        from torchvision.transforms import InterpolationMode

        return InterpolationMode(value)
    if isinstance(value, list):
        return [_argument(owner, name, item) for item in value]
    if isinstance(value, str):
        return _DTYPES.get(value, value)
    return value
