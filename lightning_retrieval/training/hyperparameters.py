"""Objects as plain data - class path and constructor arguments - so that a checkpoint can hold them.

The form is that of LightningCLI's config files: `{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}`.
`plain_data.rebuild` makes the objects again.
"""

import functools
import inspect
from typing import Any

from torch import nn

from lightning_retrieval.plain_data import class_path
from lightning_retrieval.training.full_sharding import undivided_class


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


def without_sources(described: Any) -> Any:
    """Descriptions without the file and the folder from which `timm.create_model` has loaded weights.

    The weights are in the checkpoint, and no file may name others (`plain_data.REFUSED`).

    Args:
        described: plain data.
    """
    if isinstance(described, list):
        return [without_sources(item) for item in described]
    if not isinstance(described, dict):
        return described
    kept = {key: without_sources(item) for key, item in described.items()}
    if kept.get("class_path") == "timm.create_model" and isinstance(kept.get("init_args"), dict):
        for name in ("cache_dir", "checkpoint_path"):
            kept["init_args"].pop(name, None)
    return kept


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
    """Whether a constructor argument can be made from its description."""
    if isinstance(argument, (list, tuple)):
        return all(_can_be_rebuilt(item, other) for item, other in zip(argument, described))
    if isinstance(argument, dict):
        return all(_can_be_rebuilt(item, other) for item, other in zip(argument.values(), described.values()))
    if isinstance(argument, nn.Module):
        return described["init_args"] is not None
    return not isinstance(described, dict)
