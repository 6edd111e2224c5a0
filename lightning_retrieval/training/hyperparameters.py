"""Objects as plain data - class path and constructor arguments - so that a checkpoint can rebuild them safely.

The form is that of LightningCLI's configuration files: `{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}`.
Loading one imports the class and calls its constructor with plain values, only where it is a subclass of what is
expected; nothing is unpickled.
"""

import functools
import importlib
import inspect
import os
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")

_LONGEST = 100  # items of a list that a log is given


def describe(value: Any) -> Any:
    """Plain data from which `rebuild` or `rebuild_factory` make the value again.

    Plain values stand for themselves. An object is described by its class and its constructor's arguments: from its
    `init_args()` where it has that method, else from attributes of the arguments' names. Where an argument cannot be
    found or is not plain, `init_args` is None: the object has to be given again by hand.

    Example:
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> describe(SmoothAPLoss(tau=0.1))["init_args"]["tau"]
        0.1
    """
    if value is None:
        return None
    for kind in (bool, int, float, str):  # and subclasses, such as NumPy's float64, as the plain type
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, functools.partial) and isinstance(value.func, type):
        arguments = None if value.args else _plain_arguments(value.keywords)
        return {"class_path": _path(value.func), "init_args": arguments}
    if isinstance(value, type):
        return {"class_path": _path(value), "init_args": {}}
    return {"class_path": _path(type(value)), "init_args": _init_args(value)}


def settings(value: Any) -> dict[str, Any]:
    """Class and settings of an object as plain data, for a log; nothing is made of it again.

    Settings are the constructor's arguments, of the class and of its bases, that the object keeps under their names. Of
    what is no plain value the class is told, of long lists the length.

    Example:
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> settings(SmoothAPLoss(tau=0.1))["class_path"], settings(SmoothAPLoss(tau=0.1))["tau"]
        ('lightning_retrieval.losses.smooth_ap.SmoothAPLoss', 0.1)
    """
    cls, kept = type(value), getattr(value, "__dict__", {})  # not properties, which may do anything
    makers = [vars(base)["__init__"] for base in cls.__mro__[:-1] if "__init__" in vars(base)]
    names = dict.fromkeys(name for maker in makers for name in inspect.signature(maker).parameters)
    told = {name: _told(kept[name]) for name in names if kept.get(name) is not None}
    return {"class_path": _path(cls), **told}


def _told(value: Any, deep: int = 3) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return describe(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple, dict)) and deep:
        if len(value) > _LONGEST:
            return f"{type(value).__name__} of {len(value)}"
        if isinstance(value, dict):
            return {str(key): _told(item, deep - 1) for key, item in value.items()}
        return [_told(item, deep - 1) for item in value]
    return _path(type(value))


def rebuild(who: str, name: str, value: Any, kind: type[T]) -> T:
    """An instance of `kind`: the value itself, or made from its description.

    Raises:
        TypeError: if it is neither, or describes a class that is not a `kind`.
        ValueError: if its class could not be described, so that it has to be given.
    """
    if isinstance(value, dict) and "class_path" in value:
        cls, arguments = _load(who, name, value, kind)
        value = cls(**{key: _rebuild_modules(who, key, argument) for key, argument in arguments.items()})
    if not isinstance(value, kind):
        raise TypeError(f"{who}: `{name}` must be a {kind.__module__}.{kind.__name__}, got {type(value).__name__}.")
    return value


def rebuild_factory(who: str, name: str, value: Any, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """A callable that makes a `kind`: the value itself, or a `functools.partial` made from its description."""
    if isinstance(value, dict) and "class_path" in value:
        cls, arguments = _load(who, name, value, kind)
        return functools.partial(cls, **arguments)
    if not callable(value):
        raise TypeError(
            f"{who}: `{name}` must be callable, such as functools.partial(torch.optim.SGD, lr=0.1), got {value!r}."
        )
    return value


def _load(who: str, name: str, value: dict[str, Any], kind: Any) -> tuple[Any, dict[str, Any]]:
    path, arguments = value["class_path"], value.get("init_args", {})
    if not isinstance(path, str) or not isinstance(arguments, (dict, type(None))):
        raise TypeError(
            f"{who}: `{name}` must have a string as class_path and a dict of arguments as init_args, got {value!r}."
        )
    module, _, attribute = path.rpartition(".")
    if arguments is None or "<" in path:
        raise ValueError(
            f"{who}: `{name}` was a {path} whose constructor arguments are not plain values, so the checkpoint cannot "
            f"rebuild it; give it: load_from_checkpoint(path, {name}=...)."
        )
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{who}: `{name}` names the class {path}, which cannot be imported ({error}).") from None
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise TypeError(f"{who}: `{name}` names {path}, which is not a class of the kind needed here ({kind}).")
    return cls, arguments


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain_arguments(arguments: dict[str, Any]) -> dict[str, Any] | None:
    described = {name: describe(argument) for name, argument in arguments.items()}
    return described if all(_can_be_rebuilt(value, described[name]) for name, value in arguments.items()) else None


def _can_be_rebuilt(value: Any, described: Any) -> bool:
    """Whether `_rebuild_modules` makes an argument of a constructor again from its description."""
    if isinstance(value, (list, tuple)):
        return all(map(_can_be_rebuilt, value, described))
    if isinstance(value, dict):
        return all(map(_can_be_rebuilt, value.values(), described.values()))
    if isinstance(value, nn.Module):
        return described["init_args"] is not None
    return not isinstance(described, dict)


def _rebuild_modules(who: str, name: str, described: Any) -> Any:
    """An argument of a constructor: plain data, in which modules may stand as descriptions."""
    if isinstance(described, dict):
        if "class_path" in described:
            return rebuild(who, name, described, nn.Module)
        return {key: _rebuild_modules(who, name, value) for key, value in described.items()}
    if isinstance(described, list):
        return [_rebuild_modules(who, name, value) for value in described]
    return described


def _init_args(value: Any) -> dict[str, Any] | None:
    if callable(getattr(value, "init_args", None)):
        arguments: dict[str, Any] | None = value.init_args()
        return arguments
    try:
        parameters = list(inspect.signature(type(value)).parameters.values())
    except ValueError:  # types written in C, such as sets and tensors, may not tell
        return None
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if any(p.kind in variadic or not hasattr(value, p.name) for p in parameters):
        return None
    return _plain_arguments({p.name: getattr(value, p.name) for p in parameters})
