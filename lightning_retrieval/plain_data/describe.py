"""Describes objects as plain data, from which `rebuild` restores them, and their settings for the logs of a run."""

import functools
import inspect
import sys
from pathlib import PurePath
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_retrieval.arguments import constructor_parameters
from lightning_retrieval.compiled import without_wrappers

LONGEST_LIST = 100  # for a longer list or dict, only the length is logged
DEEPEST_NESTING = 3  # for deeper values, only the class is logged
FACTORIES = (Optimizer, LRScheduler, ReduceLROnPlateau)  # classes that get their other arguments later
_SCALARS = (bool, int, float, str)


def class_path(cls: type) -> str:
    """The shortest dotted path from which a class can be imported, as LightningCLI writes it into a config.

    Packages re-export public classes, so the parents of the class's module are searched first. The path of a public
    class therefore does not depend on the file that defines it.

    Args:
        cls: any class. A class that is defined within a function has no path, and gets a name that cannot be imported.

    Example:
        >>> import torch
        >>> from lightning_retrieval.plain_data import class_path
        >>> class_path(torch.optim.AdamW), class_path(torch.nn.Linear)
        ('torch.optim.AdamW', 'torch.nn.Linear')
    """
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), cls.__qualname__, None) is cls:  # parents of a loaded module are loaded
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def unsharded_class(value: Any) -> type[Any]:
    """The original class of an object: `fully_shard` gives a module a subclass that cannot be imported."""
    cls = type(value)
    if hasattr(cls, "set_requires_gradient_sync"):
        cls = cls.__bases__[-1]
    return cls


def is_variadic(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is `*args` or `**kwargs`."""
    return parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def describe(value: Any) -> Any:
    """Describe a value as plain data for `rebuild` or `rebuild_factory`.

    Plain values do not change. An object is described by its class and its constructor arguments: those returned by its
    method `init_args()` if it has one, else its attributes with the names of the arguments. If an argument cannot be
    found or is not plain, `init_args` is None: the object must then be passed to `load_from_checkpoint` again.

    Args:
        value: plain data, a module or another object; or a class of optimizers or schedulers, or a `functools.partial`
            of one.

    Example:
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> from lightning_retrieval.plain_data import describe
        >>> describe(SmoothAPLoss(tau=0.1))["init_args"]["tau"]
        0.1
    """
    value = without_wrappers(value)
    if value is None or isinstance(value, _SCALARS):
        return _scalar(value)
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, type):
        value = functools.partial(value)
    if isinstance(value, functools.partial) and isinstance(value.func, type):
        arguments = None
        if issubclass(value.func, FACTORIES) and not value.args:
            arguments = _described_arguments(value.keywords)
        return {"class_path": class_path(value.func), "init_args": arguments}
    return {"class_path": class_path(unsharded_class(value)), "init_args": _init_args(value)}


def without_sources(described: Any) -> Any:
    """Remove, from descriptions, the file and the folder from which `timm.create_model` has loaded weights.

    The weights are in the checkpoint, and a file may not name other weights (`rules.FORBIDDEN`).

    Args:
        described: plain data.
    """
    if isinstance(described, list):
        return [without_sources(item) for item in described]
    if not isinstance(described, dict):
        return described
    kept = {key: without_sources(item) for key, item in described.items()}
    if kept.get("class_path") == "timm.create_model":
        for name in ("cache_dir", "checkpoint_path"):
            kept["init_args"].pop(name, None)
    return kept


def logged_settings(value: Any) -> dict[str, Any]:
    """Class and settings of an object as plain data for a log, not for rebuilding the object.

    Settings are the constructor arguments, of the class and its bases, that the object has as attributes with the same
    names. For a value that is not plain, only the class is logged; for a long list, only the length.

    Args:
        value: any object. Its properties are not read, since they may run any code.

    Example:
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> from lightning_retrieval.plain_data import logged_settings
        >>> settings = logged_settings(SmoothAPLoss(tau=0.1))
        >>> settings["class_path"], settings["tau"]
        ('lightning_retrieval.SmoothAPLoss', 0.1)
    """
    value = without_wrappers(value)
    attributes = getattr(value, "__dict__", {})
    settings: dict[str, Any] = {"class_path": class_path(type(value))}
    for base in type(value).__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        for parameter in constructor_parameters(base):
            name = parameter.name
            if name not in settings and attributes.get(name) is not None:
                settings[name] = _logged(attributes[name], DEEPEST_NESTING)
    return settings


def _scalar(value: Any) -> Any:
    """Convert a number or string of a subclass, such as NumPy's float64, to Python's type; None for anything else."""
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)
    return None


def _init_args(value: Any) -> dict[str, Any] | None:
    """The constructor arguments of an object; None if they cannot be found or are not plain."""
    if "." in unsharded_class(value).__qualname__:  # a class within a class or a function cannot be imported by a path
        return None
    if callable(getattr(value, "init_args", None)):
        given: dict[str, Any] | None = value.init_args()
        return given
    try:
        parameters = constructor_parameters(type(value))
    except ValueError:
        return None
    arguments = {}
    for parameter in parameters:
        if is_variadic(parameter) or not hasattr(value, parameter.name):
            return None
        arguments[parameter.name] = getattr(value, parameter.name)
    return _described_arguments(arguments)


def _described_arguments(arguments: dict[str, Any]) -> dict[str, Any] | None:
    described = {name: describe(argument) for name, argument in arguments.items()}
    if _is_complete(described):
        return described
    return None


def _is_complete(described: Any) -> bool:
    """Whether a description holds the arguments of all objects in it."""
    if isinstance(described, list):
        return all(map(_is_complete, described))
    if not isinstance(described, dict):
        return True
    if "class_path" in described and described.get("init_args") is None:
        return False
    return all(map(_is_complete, described.values()))


def _logged(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, _SCALARS):
        return _scalar(value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if not isinstance(value, (list, tuple, dict)) or depth == 0:
        return class_path(type(value))
    if len(value) > LONGEST_LIST:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return {str(key): _logged(item, depth - 1) for key, item in value.items()}
    return [_logged(item, depth - 1) for item in value]
