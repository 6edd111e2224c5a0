"""Rebuilds objects from their descriptions.

A description is first checked as a whole (`check_plain_data`, which imports nothing). Then each class in it is looked
up and compared with the type annotation of its argument. Only then is anything built.

A file cannot choose a function to be called, with two exceptions: `timm.create_model` and torchvision's model builders
are called, but always without pretrained weights.
"""

import collections.abc
import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin

from torch import nn

from lightning_retrieval.checks import short_repr
from lightning_retrieval.compiled import without_wrappers
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data.describe import class_path, constructor_parameters, is_variadic
from lightning_retrieval.plain_data.formats import FORMAT, moved_arguments, upgraded
from lightning_retrieval.plain_data.rules import (
    Kinds,
    check_integers_of_file,
    check_plain_data,
    find_class,
    imported_object,
)

T = TypeVar("T")

_WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")  # arguments of torchvision's builders


def rebuild(name: str, value: Any, kind: type[T]) -> T:
    """An instance of `kind`: the value itself, or an object rebuilt from its description.

    Args:
        name: the argument that the value is for.
        value: an object or its description.
        kind: the required class.

    Raises:
        TypeError: if the value is neither an instance of `kind` nor the description of an instance.
        ValueError: if a file may not name the class or a setting, or if the description is incomplete, so that the
            object itself must be passed.
    """
    if _is_description(value):
        check_plain_data(name, value)
        value = _description(name, value, _Place((kind,))).build()
    value = without_wrappers(value)
    if not isinstance(value, kind):
        raise InvalidType(f"must be a {kind.__module__}.{kind.__name__}", argument=name, got=type(value).__name__)
    return value


def rebuild_factory(name: str, value: Any, kinds: Kinds) -> Any:
    """A callable that creates one of `kinds`: the value itself, or a `functools.partial` of its description.

    Args:
        name: the argument that the value is for.
        value: a callable or its description.
        kinds: classes that the callable may create.
    """
    if _is_description(value):
        check_plain_data(name, value)
        return _description(name, value, _Place(products=kinds)).build()
    if not callable(value):
        rule = "must be callable, such as functools.partial(torch.optim.SGD, lr=0.1)"
        raise InvalidType(rule, argument=name, got=short_repr(value))
    return value


@dataclass(frozen=True)
class CheckedSettings:
    """The arguments of a module, both as plain data and as `_Description`s; nothing is built yet."""

    plain: dict[str, Any]
    checked: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """The arguments, with their objects built anew."""
        return {name: _built(value) for name, value in self.checked.items()}


@dataclass(frozen=True)
class _Place:
    """What an argument accepts: objects of `kinds`, callables that create `products`, strings if `takes_strings`."""

    kinds: Kinds = ()
    products: Kinds = ()
    takes_strings: bool = False


_ANY = _Place((nn.Module,), takes_strings=True)  # for an argument without annotation


@dataclass(frozen=True)
class _Description:
    """A class, or a builder of networks, with arguments that may hold descriptions; nothing is built yet."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    is_factory: bool = False

    def build(self) -> Any:
        """Build the object; for a factory, a partial of the class with its arguments."""
        arguments = {name: _built(value) for name, value in self.arguments.items()}
        if self.is_factory:
            return functools.partial(self.make, **arguments)
        return self.make(**arguments)


def _built(value: Any) -> Any:
    if isinstance(value, _Description):
        return value.build()
    if isinstance(value, dict):
        return {key: _built(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_built(item) for item in value]
    return value


def _is_description(value: Any) -> bool:
    return isinstance(value, dict) and "class_path" in value


def checked_settings(
    cls: type[Any], settings: Mapping[str, Any], *, of_format: int = FORMAT, given: Collection[str] = ()
) -> CheckedSettings:
    """Check the settings of a module in a file as a whole, before anything is built.

    Args:
        cls: class of the module.
        settings: plain data; entries that the constructor does not accept are skipped.
        of_format: the number of the file's format, see `formats`.
        given: names of the arguments that replace those of the file, which are skipped.

    Raises:
        ValueError: if the file names a class or setting that a file may not name, or an object must be passed
            again.
        TypeError: if the file names a class of the wrong kind for an argument.
    """
    places = _places(cls)
    skipped = set(given)
    if of_format < FORMAT:
        for old, moved in moved_arguments(places).items():
            if moved.argument in given:
                skipped.add(old)
    used = {name: value for name, value in settings.items() if name not in skipped}
    check_plain_data("hyperparameters", used)
    if of_format < FORMAT:
        used = upgraded(used, places)
    if not _accepts_any(cls):
        used = {name: value for name, value in used.items() if name in places}
    return CheckedSettings(used, _arguments(used, places))


def _arguments(given: Mapping[str, Any], places: Mapping[str, _Place]) -> dict[str, Any]:
    """The arguments of a constructor, with descriptions replaced by `_Description`s."""
    return {name: _value(name, value, places.get(name, _ANY)) for name, value in given.items()}


def _description(name: str, value: dict[str, Any], place: _Place) -> _Description:
    """The `_Description` for an argument; raise if the argument does not accept the described object."""
    path, arguments = value["class_path"], _described_arguments(name, value)
    if arguments is None or "<" in path:
        rule = f"was a {path} whose constructor arguments are not plain values, so the checkpoint cannot rebuild it"
        raise InvalidValue(rule, argument=name, cure=f"pass it again: load_from_checkpoint(path, {name}=...)")
    if issubclass(nn.Module, place.kinds):
        network = _network(name, path, arguments)
        if network is not None:
            check_integers_of_file(name, arguments)
            return network
    cls = find_class(name, path, place.kinds + place.products)
    is_factory = not issubclass(cls, place.kinds)
    check_arguments(name, cls, arguments, may_lack=is_factory)
    return _Description(cls, _arguments(arguments, _places(cls)), is_factory)


def _value(name: str, value: Any, place: _Place) -> Any:
    if _is_description(value):
        return _description(name, value, place)
    if isinstance(value, dict):
        return {key: _value(str(key), item, place) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(name, item, place) for item in value]
    if isinstance(value, str) and place.products and not place.takes_strings:
        raise InvalidValue(
            "must be passed again, as in load_from_checkpoint(path, lr_scheduler=...), because it is a "
            "function, and a file may not choose what is called",
            argument=name,
            got=short_repr(value),
        )
    return value


def _described_arguments(name: str, value: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments in a description; None if `describe` could not describe the arguments."""
    arguments, further = value.get("init_args", {}), value.get("dict_kwargs") or {}
    is_valid = isinstance(arguments, (dict, type(None))) and isinstance(further, dict)
    if not is_valid or not isinstance(value["class_path"], str):
        rule = "must have a string as class_path and a dict of arguments as init_args"
        raise InvalidType(rule, argument=name, got=short_repr(value))
    if arguments is None:
        return None
    return {**arguments, **further}


def _network(name: str, path: str, arguments: dict[str, Any]) -> _Description | None:
    """The network of a timm or torchvision builder, with random weights; None if the path is not such a builder."""
    if path.startswith("torchvision.models."):
        return _network_of_torchvision(path, arguments)
    if path != "timm.create_model":
        return None
    needed = f"timm must be installed for `{name}`: pip install 'lightning-retrieval[timm]'."
    with optional_import(needed):
        import timm
    model = arguments.get("model_name")
    if not (isinstance(model, str) and timm.is_model(model)):
        raise InvalidValue("must name a model that timm lists", argument=name, got=short_repr(model))
    given = {key: value for key, value in arguments.items() if value is not None}
    return _Description(timm.create_model, {**given, "pretrained": False})


def accepted_arguments(cls: type[Any]) -> Collection[str]:
    """Names of the arguments that a constructor accepts, also of those that it passes on by `**kwargs`."""
    return _places(cls).keys()


def check_arguments(name: str, cls: type[Any], given: Collection[str], *, may_lack: bool = False) -> None:
    """Raise unless a constructor accepts all arguments of these names, and needs no others.

    Args:
        name: the argument that an object of the class is for.
        cls: the class.
        given: names of the arguments.
        may_lack: whether further arguments are passed later.

    Raises:
        TypeError: if an argument is missing or unknown.
    """
    try:
        parameters = [parameter for parameter in constructor_parameters(cls) if not is_variadic(parameter)]
    except ValueError:  # the constructor has no signature
        return
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in given]
    unknown: list[str] = []
    if not _accepts_any(cls):
        unknown = sorted({*given} - {one.name for one in parameters}, key=str)
    if may_lack:
        missing = []
    for problem, names in (("lacks", missing), ("also has", unknown)):
        if names:
            rule = f"must have the arguments of {class_path(cls)}, but its description {problem} {names[0]!r}"
            raise InvalidType(rule, argument=name, cure="pass the object itself, or take another file")


def _network_of_torchvision(path: str, arguments: dict[str, Any]) -> _Description | None:
    from torchvision import models

    found = imported_object(path)
    if found not in [models.get_model_builder(model) for model in models.list_models()]:
        return None
    given = {key: value for key, value in arguments.items() if key not in _WEIGHTS}
    accepted = inspect.signature(found).parameters
    return _Description(found, {**given, **{key: None for key in _WEIGHTS if key in accepted}})


def _places(cls: Any) -> dict[str, _Place]:
    """The values that each argument of a class accepts, by annotation; `**kwargs` pass on to the base classes.

    An argument without annotation also accepts the values of the base class's argument of the same name, to which it is
    usually passed.
    """
    places: dict[str, _Place] = {}
    passes_on = True
    for base in [base for base in cls.__mro__ if "__init__" in vars(base)]:
        for name, annotation in _annotations(base).items():
            found = _place(annotation)
            if places.get(name) == _ANY:
                places[name] = _Place(_ANY.kinds + found.kinds, found.products, takes_strings=True)
            elif passes_on:
                places.setdefault(name, found)
        passes_on = passes_on and _accepts_any(base)
    return places


def _annotations(cls: type[Any]) -> dict[str, Any]:
    """The annotation of each constructor argument; `Any` if the annotation is missing or cannot be evaluated."""
    names = {**vars(typing), **getattr(inspect.unwrap(cls.__init__), "__globals__", {})}
    annotations = {}
    for parameter in constructor_parameters(cls):
        if is_variadic(parameter):
            continue
        annotations[parameter.name] = Any
        if parameter.annotation is not inspect.Parameter.empty:
            holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            with contextlib.suppress(Exception):  # a string with names that are imported only for type checkers
                annotations |= typing.get_type_hints(holder, names)
    return annotations


def _accepts_any(cls: type[Any]) -> bool:
    kinds = [parameter.kind for parameter in constructor_parameters(cls)]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _place(annotation: Any) -> _Place:
    """The values that an annotation accepts, including those within unions, lists and dicts."""
    kinds: list[type[Any]] = []
    products: list[type[Any]] = []
    takes_strings = False
    pending = [annotation]
    while pending:
        current = pending.pop()
        origin, arguments = get_origin(current), get_args(current)
        if current in (Any, object) or isinstance(current, TypeVar):
            kinds.append(nn.Module)
            takes_strings = True
        elif origin is type:
            products += _classes(arguments)
        elif origin is collections.abc.Callable or current in (Callable, typing.Callable):
            products += _classes(arguments[-1:] or (nn.Module,))
        elif origin is typing.Literal or current is str:
            takes_strings = True
        elif arguments:
            pending += arguments
        else:
            kinds += _classes((current,))
    return _Place(tuple(kinds), tuple(products), takes_strings)


def _classes(annotations: Iterable[Any]) -> list[type[Any]]:
    """The classes in annotations, which may be unions, except protocols; `nn.Module` for `Any` and `object`."""
    found: list[type[Any]] = []
    for annotation in annotations:
        if get_origin(annotation) in (Union, types.UnionType):
            found += _classes(get_args(annotation))
        elif annotation in (Any, object):
            found.append(nn.Module)
        elif isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False):
            found.append(annotation)
    return found
