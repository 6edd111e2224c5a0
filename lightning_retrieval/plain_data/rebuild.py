"""Rebuilds objects from their descriptions.

A file can choose no function to be called, with two exceptions: `timm.create_model` and torchvision's model builders
are called, but always without pretrained weights.
"""

import functools
import inspect
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from lightning_retrieval.arguments import constructor_parameters
from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.compiled import without_wrappers
from lightning_retrieval.invalid import Invalid, InvalidType, InvalidValue
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data.describe import FACTORIES, is_variadic
from lightning_retrieval.plain_data.rules import (
    BUILDER_OF_TIMM,
    Kinds,
    check_plain_data,
    find_class,
    is_below,
    is_incomplete,
    path_of_part,
)

T = TypeVar("T")

KWARGS = "_kwargs"  # hyperparameter: the names of the arguments that the caller gave to the `**kwargs` of a constructor
_WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")  # arguments of the builders


def rebuild(name: str, value: Any, kind: type[T]) -> T:
    """An instance of `kind`: the value itself, or an object rebuilt from its description.

    Args:
        name: the argument that the value is for.
        value: an object or its description.
        kind: the required class.

    Raises:
        TypeError: if the value is neither an instance of `kind` nor the description of an instance.
        ValueError: if a file may not name the class or a setting, if the description is incomplete, so that the object
            itself must be passed, or if a constructor raises an error.
    """
    value = without_wrappers(_rebuilt(name, value))
    if not isinstance(value, kind):
        raise InvalidType(f"must be a {kind.__module__}.{kind.__name__}", argument=name, got=type(value).__name__)
    return value


def rebuild_factory(name: str, value: Any, kinds: Kinds) -> Any:
    """A callable that creates one of `kinds`: the value itself, or a `functools.partial` of its description.

    Args:
        name: the argument that the value is for.
        value: a callable or its description.
        kinds: classes that the callable may create: optimizers or schedulers.

    Raises:
        TypeError: if the value is neither a callable nor the description of one of `kinds`.
        ValueError: as for `rebuild`.
    """
    made = _rebuilt(name, value)
    is_right = callable(made)
    if made is not value:
        is_right = issubclass(getattr(made, "func", object), kinds)
    if not is_right:
        rule = "must be callable, such as functools.partial(torch.optim.SGD, lr=0.1), or describe a class of this kind"
        raise InvalidType(rule, argument=name, got=short_repr(value))
    return made


def arguments_of_file(cls: type[Any], saved: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """The constructor's arguments among the hyperparameters in a file, as plain data in which all names are permitted.

    Args:
        cls: class whose constructor is called.
        saved: hyperparameters. Those that the constructor does not accept are skipped. For `**kwargs`, it gets those
            that the caller gave, or all of them if that is not recorded.
        given: names of the arguments that replace those of the file, which are skipped.

    Raises:
        ValueError: if the file names a class or a setting that a file may not name.
        TypeError: if a value is not plain data.
    """
    parameters = constructor_parameters(cls)
    accepted = {parameter.name for parameter in parameters if not is_variadic(parameter)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        accepted |= set(saved.get(KWARGS, saved))
    used = {name: value for name, value in saved.items() if name in accepted and name not in given}
    check_plain_data("", used)
    return used


def built(path: str, value: Any) -> Any:
    """A value of a file that `check_plain_data` has accepted, with objects in place of descriptions.

    Args:
        path: where the value is in the file, for error messages.
        value: plain data.

    Raises:
        ValueError: if a description is incomplete, or a constructor raises an error.
        TypeError: if a description names no class.
    """
    if isinstance(value, (list, tuple)):
        return [built(f"{path}[{position}]", item) for position, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: built(path_of_part(path, key), item) for key, item in value.items()}
    if is_incomplete(value):
        rule = f"was a {value['class_path']} whose constructor arguments are not plain values"
        argument = path.partition(".")[0].partition("[")[0]
        cure = f"pass the object again: load_from_checkpoint(path, {argument}=...)"
        raise InvalidValue(rule, argument=path, cure=cure)
    arguments = built(path, {**value.get("init_args", {}), **(value.get("dict_kwargs") or {})})
    make = _builder(path, value["class_path"])
    if make is not None:
        return _made(path, make, _without_weights(make, arguments))
    cls = find_class(path, value["class_path"])
    if issubclass(cls, FACTORIES):
        return functools.partial(cls, **arguments)
    return _made(path, cls, arguments)


def _rebuilt(name: str, value: Any) -> Any:
    """The object or factory of a description; any other value does not change."""
    if not (isinstance(value, dict) and "class_path" in value):
        return value
    check_plain_data(name, value)
    return built(name, value)


def _made(path: str, make: Any, arguments: dict[str, Any]) -> Any:
    """Call a constructor or a builder of networks. Its error says which part of the file it is about."""
    try:
        return make(**arguments)
    except Exception as error:  # constructors raise errors of many types
        kind = type(error) if isinstance(error, Invalid) else InvalidValue
        rule = f"cannot be built as {make.__module__}.{make.__qualname__}: {first_line(error)}"
        raise kind(rule, argument=path) from error


def _builder(path: str, name: str) -> Any:
    """The function with this name if it builds networks of timm or torchvision, else None."""
    if name == BUILDER_OF_TIMM:
        with optional_import(f"timm must be installed for `{path}`: pip install 'lightning-retrieval[timm]'."):
            import timm
        return timm.create_model
    module, _, attribute = name.rpartition(".")
    if not is_below(module, ("torchvision.models",)):
        return None
    from torchvision import models

    found = getattr(sys.modules.get(module), attribute, None)
    if found in [models.get_model_builder(model) for model in models.list_models()]:
        return found
    return None


def _without_weights(build: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a builder, without those that would download weights."""
    given = {name: value for name, value in arguments.items() if name not in _WEIGHTS}
    if "weights_backbone" in inspect.signature(build).parameters:  # its default would be downloaded
        given["weights_backbone"] = None
    return given
