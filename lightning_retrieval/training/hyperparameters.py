"""Objects as plain data - class path and constructor arguments - so that a checkpoint can rebuild them safely.

The form is that of LightningCLI's config files: `{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}`. Loading
one imports the class and calls its constructor with plain values, only if it is a subclass of what is expected; nothing
is unpickled.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from lightning_retrieval.checks import short_repr
from lightning_retrieval.training.class_paths import check_config_paths, class_path, load_class
from lightning_retrieval.training.full_sharding import undivided_class

T = TypeVar("T")
INSTANTIATORS = ("pytorch_lightning.cli.instantiate_module", "lightning.pytorch.cli.instantiate_module")


def describe(value: Any) -> Any:
    """Plain data from which `rebuild` or `rebuild_factory` makes the value again.

    Plain values stay as they are. An object becomes its class and its constructor arguments: those that its method
    `init_args()` returns if it has one, else its attributes of the arguments' names. If an argument cannot be found or
    is not plain, `init_args` is None: the object has to be passed to `load_from_checkpoint` again.

    Args:
        value: plain data, a module, another object, a class, or `functools.partial` of a class.

    Example:
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> from lightning_retrieval.training.hyperparameters import describe
        >>> describe(SmoothAPLoss(tau=0.1))["init_args"]["tau"]
        0.1
    """
    if value is None:
        return None
    for kind in (bool, int, float, str):  # subclasses such as NumPy's float64 become the plain type
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    return _describe_object(value)


def rebuild(owner: str, name: str, value: Any, kind: type[T]) -> T:
    """An instance of `kind`: the value itself, or the object of its description.

    Args:
        owner: prefix of error messages.
        name: the argument that the value is for.
        value: an object or its description.
        kind: class that the object must have.

    Raises:
        TypeError: if it is neither, or describes a class that is not a `kind`.
        ValueError: if the object could not be described, so that it has to be given.
    """
    if _is_description(value):
        cls, described = _load(owner, name, value, kind)
        value = cls(**_rebuild_arguments(owner, described))
    if not isinstance(value, kind):
        raise TypeError(f"{owner}: `{name}` must be a {kind.__module__}.{kind.__name__}, got {type(value).__name__}.")
    return value


def rebuild_optional(owner: str, name: str, value: Any, kind: type[T]) -> T | None:
    """As `rebuild`, and None for None.

    Args:
        owner: prefix of error messages.
        name: the argument that the value is for.
        value: an object, its description, or None.
        kind: class that the object must have.
    """
    if value is None:
        return None
    return rebuild(owner, name, value, kind)


def rebuild_factory(owner: str, name: str, value: Any, kind: type[Any] | tuple[type[Any], ...]) -> Any:
    """A callable that makes a `kind`: the value itself, or a `functools.partial` of its description.

    Args:
        owner: prefix of error messages.
        name: the argument that the value is for.
        value: a callable or its description.
        kind: class, or classes, of what the callable makes.
    """
    if _is_description(value):
        cls, arguments = _load(owner, name, value, kind)
        return functools.partial(cls, **arguments)
    if not callable(value):
        raise TypeError(
            f"{owner}: `{name}` must be callable, such as functools.partial(torch.optim.SGD, lr=0.1), got "
            f"{short_repr(value)}."
        )
    return value


def check_command_line_hyperparameters(owner: str, saved: Mapping[str, Any]) -> None:
    """Raise if a checkpoint of LightningCLI would import modules that the user has not imported; nothing is imported.

    jsonargparse rebuilds the module of such a checkpoint from a config, and imports what the config names.

    Args:
        owner: prefix of error messages.
        saved: the hyperparameters of the checkpoint, without those that the caller replaces.

    Raises:
        ValueError: with the argument and the module.
    """
    settings = dict(saved)
    instantiator = settings.pop("_instantiator", None)
    if instantiator not in (None, *INSTANTIATORS):
        raise ValueError(
            f"{owner}: a checkpoint must name {INSTANTIATORS[0]} as `_instantiator` or nothing, got {instantiator!r}."
        )
    check_config_paths(owner, "_class_path", settings.pop("_class_path", None))
    for name, value in settings.items():
        check_config_paths(owner, name, value)


def _describe_object(value: Any) -> dict[str, Any]:
    if isinstance(value, type):
        return {"class_path": class_path(value), "init_args": {}}
    if isinstance(value, functools.partial) and isinstance(value.func, type):
        arguments = None
        if not value.args:
            arguments = _describe_arguments(value.keywords)
        return {"class_path": class_path(value.func), "init_args": arguments}
    return {"class_path": class_path(undivided_class(value)), "init_args": _init_args(value)}


def _init_args(value: Any) -> dict[str, Any] | None:
    """The constructor arguments of an object; None if they cannot be found or are not plain."""
    if callable(getattr(value, "init_args", None)):
        given: dict[str, Any] | None = value.init_args()
        return given
    try:
        signature = inspect.signature(type(value).__init__)
    except ValueError:  # some types written in C have no signature
        return None
    arguments = {}
    for parameter in list(signature.parameters.values())[1:]:
        is_variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if is_variadic or not hasattr(value, parameter.name):
            return None
        arguments[parameter.name] = getattr(value, parameter.name)
    return _describe_arguments(arguments)


def _describe_arguments(arguments: dict[str, Any]) -> dict[str, Any] | None:
    described = {name: describe(argument) for name, argument in arguments.items()}
    for name, argument in arguments.items():
        if not _can_be_rebuilt(argument, described[name]):
            return None
    return described


def _can_be_rebuilt(argument: Any, described: Any) -> bool:
    """Whether `_rebuild_argument` makes a constructor argument from its description."""
    if isinstance(argument, (list, tuple)):
        return all(_can_be_rebuilt(item, other) for item, other in zip(argument, described))
    if isinstance(argument, dict):
        return all(_can_be_rebuilt(item, other) for item, other in zip(argument.values(), described.values()))
    if isinstance(argument, nn.Module):
        return described["init_args"] is not None
    return not isinstance(described, dict)


def _is_description(value: Any) -> bool:
    return isinstance(value, dict) and "class_path" in value


def _load(owner: str, name: str, value: dict[str, Any], kind: Any) -> tuple[Any, dict[str, Any]]:
    """The class of a description, and its arguments as they are described."""
    path, arguments = value["class_path"], value.get("init_args", {})
    if not isinstance(path, str) or not isinstance(arguments, (dict, type(None))):
        raise TypeError(
            f"{owner}: `{name}` must have a string as class_path and a dict of arguments as init_args, got "
            f"{short_repr(value)}."
        )
    if arguments is None or "<" in path:
        raise ValueError(
            f"{owner}: `{name}` was a {path} whose constructor arguments are not plain values, so the checkpoint "
            f"cannot rebuild it; pass it again: load_from_checkpoint(path, {name}=...)."
        )
    return load_class(owner, name, path, kind), arguments


def _rebuild_arguments(owner: str, described: dict[str, Any]) -> dict[str, Any]:
    return {name: _rebuild_argument(owner, name, value) for name, value in described.items()}


def _rebuild_argument(owner: str, name: str, described: Any) -> Any:
    """A constructor argument: plain data, in which modules are given by their descriptions."""
    if _is_description(described):
        return rebuild(owner, name, described, nn.Module)
    if isinstance(described, dict):
        return {key: _rebuild_argument(owner, name, value) for key, value in described.items()}
    if isinstance(described, list):
        return [_rebuild_argument(owner, name, value) for value in described]
    return described
