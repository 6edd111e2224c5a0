"""Objects from plain data. This module alone decides which classes a file may name.

An object is described as in the config files of LightningCLI, by its class path and its constructor arguments:
`{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}`. Such descriptions come from checkpoints, hubs, indexes
and folders of embeddings. They are data: a file may not choose what is imported or called. So a description is first
read as a whole (`check_plain_data`, which imports nothing), then each class in it is looked up and compared with the
place where it is wanted, and only then is anything built.

- A class is accepted if the module that defines it is in `PACKAGES`, or belongs to the user (`_is_of_user`), and if it
  is a subclass of the type of the argument.
- No function is called because a file names it. `timm.create_model` and torchvision's builders of models are translated
  into networks without pretrained weights.
- Settings that make another library run code or load files are refused (`REFUSED`, URLs, names of hubs).
"""

import collections.abc
import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin

from torch import nn

from lightning_retrieval.checks import check_callable, short_repr
from lightning_retrieval.optional_packages import optional_import

T = TypeVar("T")
Kinds = tuple[type[Any], ...]

# A file may name classes that these modules, or modules below them, define.
PACKAGES = (
    "lightning_retrieval",
    "pytorch_metric_learning.distances",
    "pytorch_metric_learning.losses",
    "pytorch_metric_learning.reducers",
    "pytorch_metric_learning.regularizers",
    "timm.layers",
    "timm.models",
    "torch.nn.modules",
    "torch.optim",
    "torchvision.models",
    "torchvision.ops",
)
TRANSFORM_PACKAGES = ("timm.data.transforms", "torchvision.transforms")
_PUBLIC_PARENTS = ("timm.data", "torch.nn")  # packages from which some of these classes are usually imported

# Settings with which another library would run code, or read a file or an address that the description chooses.
REFUSED = ("auto_map", "cache_dir", "checkpoint_path", "megatron_config", "pretrained_cfg", "trust_remote_code")
_ADDRESSES = ("://", "hf-hub:", "hf_hub:", "local-dir:")  # in names that are looked up elsewhere
_WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone")  # arguments of torchvision's builders
_MOST_DEPTH, _MOST_VALUES = 100, 1_000_000  # of plain data
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_MAIN = ("__main__", "__mp_main__")  # the script of the user, in its process and in those that it has spawned

named_by_user: set[str] = set()  # modules that the user, not a file, has named


def class_path(cls: type) -> str:
    """The shortest dotted path from which a class can be imported, the one that LightningCLI writes into a config.

    Packages re-export what is public, so the parents of the class's module are asked first: the path of a public class
    does not depend on the file that defines it.

    Args:
        cls: any class; one that is defined within a function has no path, and gets a name that cannot be imported.

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


def rebuild(owner: str, name: str, value: Any, kind: type[T]) -> T:
    """An instance of `kind`: the value itself, or the object of its description.

    Args:
        owner: prefix of error messages.
        name: the argument that the value is for.
        value: an object or its description.
        kind: class that the object must have.

    Raises:
        TypeError: if it is neither, or describes a class that is not a `kind`.
        ValueError: if a file may not name its class, or the object could not be described, so that it has to be given.
    """
    if _is_description(value):
        check_plain_data(owner, name, value)
        value = _checked_description(owner, name, value, _Place((kind,))).build()
    if not isinstance(value, kind):
        raise TypeError(f"{owner}: `{name}` must be a {kind.__module__}.{kind.__name__}, got {type(value).__name__}.")
    return value


def rebuild_optional(owner: str, name: str, value: Any, kind: type[T]) -> T | None:
    """As `rebuild`, and None for None."""
    if value is None:
        return None
    return rebuild(owner, name, value, kind)


def rebuild_factory(owner: str, name: str, value: Any, kind: type[Any] | Kinds) -> Any:
    """A callable that makes a `kind`: the value itself, or a `functools.partial` of its description.

    Args:
        owner: prefix of error messages.
        name: the argument that the value is for.
        value: a callable or its description.
        kind: class, or classes, of what the callable makes.
    """
    if _is_description(value):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        check_plain_data(owner, name, value)
        return _checked_description(owner, name, value, _Place(products=kinds)).build()
    if not callable(value):
        raise TypeError(
            f"{owner}: `{name}` must be callable, such as functools.partial(torch.optim.SGD, lr=0.1), got "
            f"{short_repr(value)}."
        )
    return value


@dataclass(frozen=True)
class CheckedSettings:
    """The class of a module and its arguments, as the file has them and as `_Description`s; nothing is built yet."""

    cls: type[Any]
    plain: dict[str, Any]
    checked: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """The arguments with the objects in them, newly built."""
        return {name: _built(value) for name, value in self.checked.items()}


def check_settings(owner: str, cls: type[Any], settings: Mapping[str, Any]) -> CheckedSettings:
    """Check the settings of a module in a file as a whole, before anything is built.

    Args:
        owner: prefix of error messages.
        cls: the module must be of this class; the entry `_class_path`, which LightningCLI writes, names a subclass.
        settings: plain data; what the constructor does not accept is left out of the result.

    Raises:
        ValueError: if the file names what it may not name, or an object that has to be passed again.
        TypeError: if it names a class of another kind than the argument has.
    """
    check_plain_data(owner, "hyperparameters", settings)
    given = dict(settings)
    path = given.pop("_class_path", None)
    if path is not None:
        cls = find_class(owner, "_class_path", path, (cls,))
    places = _places(cls)
    if not _accepts_any(cls):
        given = {name: value for name, value in given.items() if name in places}
    checked = {name: _checked(owner, name, value, places.get(name, _ANY)) for name, value in given.items()}
    return CheckedSettings(cls, given, checked)


def check_plain_data(owner: str, name: str, value: Any, packages: tuple[str, ...] = PACKAGES) -> None:
    """Raise unless a value of a file is plain data that names nothing which a file may not name; imports nothing.

    Args:
        owner: prefix of error messages.
        name: the argument that the value is for.
        value: numbers, strings, None, lists and dicts.
        packages: modules whose classes a file may name; those of the user count in any case.

    Raises:
        ValueError: if a class path leads to a module that a file may not name, or a setting would make another library
            run code, read a file or open an address.
        TypeError: if something else is in it.
    """
    pending, seen = [(name, value, 0)], 0
    while pending:
        inner, item, depth = pending.pop()
        seen += 1
        if depth > _MOST_DEPTH or seen > _MOST_VALUES:  # a list may hold another one twice, which holds another ...
            raise ValueError(f"{owner}: `{name}` must be plain data, got lists or dicts that are nested too deeply.")
        pending += [(key, part, depth + 1) for key, part in _checked_parts(owner, inner, item, packages)]


def find_class(
    owner: str, name: str, path: Any, kinds: Kinds = (object,), packages: tuple[str, ...] = PACKAGES
) -> type[Any]:
    """The class of a path that a file holds.

    Args:
        owner: prefix of error messages.
        name: the argument that the path belongs to.
        path: dotted path of a class.
        kinds: the class must be a subclass of one of these.
        packages: as for `check_plain_data`.

    Raises:
        ValueError: if a file may not name it, or it does not exist.
        TypeError: if it is not a class of one of the kinds.
    """
    _check_path(owner, name, path, packages)
    try:
        cls = _look_up(path, packages)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{owner}: `{name}` names the class {path}, which cannot be imported ({error}).") from None
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        shown = " or ".join(map(class_path, kinds))
        raise TypeError(f"{owner}: `{name}` names {path}, which is not a class of the kind needed here ({shown}).")
    if not _may_name(cls.__module__, packages):
        raise _not_allowed(owner, name, f"{cls.__module__}.{cls.__qualname__}", packages)
    return cls


def names_kernels(name: str, value: Any) -> bool:
    """Whether a setting of transformers, maybe for each part of a network, names kernels on a hub."""
    return "_implementation" in name and value is not None and not str(value).isidentifier()


def load_function(owner: str, name: str, path: str) -> Any:
    """What the user, not a file, named by a dotted path: a function, or another object that can be called.

    Args:
        owner: prefix of error messages.
        name: the argument that names it.
        path: dotted path, whose module is imported.

    Raises:
        ValueError: if its module cannot be imported, or does not have it.
        TypeError: if it cannot be called.
    """
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{owner}: `{name}` must name a function that can be imported, got {path} ({error}); `python -m "
            "lightning_retrieval.cli` finds the modules of the working directory."
        ) from None
    return check_callable(owner, name, found)


def import_named_module(owner: str, name: str, module: str) -> None:
    """Import a module that the user, not a file, has named by an argument, so that files may name its classes.

    Raises:
        ValueError: if it cannot be imported.
    """
    try:
        importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{owner}: `{name}` must name a module that can be imported, got {module} ({error})."
        ) from None
    named_by_user.add(module)


# Objects of descriptions


@dataclass(frozen=True)
class _Place:
    """What an argument accepts: objects of `kinds`, callables that make one of `products`, strings as they are."""

    kinds: Kinds = ()
    products: Kinds = ()
    takes_strings: bool = False


_ANY = _Place((nn.Module,), takes_strings=True)  # of an argument without annotation


@dataclass(frozen=True)
class _Description:
    """A class, or a builder of networks, and its arguments, which may hold descriptions; nothing is built yet."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    is_factory: bool = False

    def build(self) -> Any:
        """The object; of a factory, the class with its arguments."""
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


def _checked(owner: str, name: str, value: Any, place: _Place) -> Any:
    """A value with a `_Description` in place of each description; raise if the place does not accept one of them."""
    if _is_description(value):
        return _checked_description(owner, name, value, place)
    if isinstance(value, dict):
        return {key: _checked(owner, str(key), item, place) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_checked(owner, name, item, place) for item in value]
    if isinstance(value, str) and place.products and not place.takes_strings:
        raise ValueError(
            f"{owner}: `{name}` must be passed again, as in load_from_checkpoint(path, lr_scheduler=...), because it "
            f"is a function, and a file does not choose what is called, got {short_repr(value)}."
        )
    return value


def _checked_description(owner: str, name: str, value: dict[str, Any], place: _Place) -> _Description:
    path, arguments = value["class_path"], _arguments(owner, name, value)
    if arguments is None or "<" in path:
        raise _pass_again(owner, name, path)
    if issubclass(nn.Module, place.kinds):
        network = _network(owner, name, path, arguments)
        if network is not None:
            return network
    cls = find_class(owner, name, path, place.kinds + place.products)
    places = _places(cls)
    checked = {key: _checked(owner, key, item, places.get(key, _ANY)) for key, item in arguments.items()}
    return _Description(cls, checked, is_factory=not issubclass(cls, place.kinds))


def _arguments(owner: str, name: str, value: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a description; None if they could not be described."""
    arguments, further = value.get("init_args", {}), value.get("dict_kwargs") or {}
    is_valid = isinstance(arguments, (dict, type(None))) and isinstance(further, dict)
    if not is_valid or not isinstance(value["class_path"], str):
        raise TypeError(
            f"{owner}: `{name}` must have a string as class_path and a dict of arguments as init_args, got "
            f"{short_repr(value)}."
        )
    if arguments is None:
        return None
    return {**arguments, **further}


def _network(owner: str, name: str, path: str, arguments: dict[str, Any]) -> _Description | None:
    """What a builder of timm or torchvision makes, with random weights; None if the path leads to none."""
    if path == "timm.create_model":
        return _network_of_timm(owner, name, arguments)
    if path.startswith("torchvision.models."):
        return _network_of_torchvision(path, arguments)
    return None


def _network_of_timm(owner: str, name: str, arguments: dict[str, Any]) -> _Description:
    with optional_import(f"{owner}: timm must be installed for `{name}`: pip install 'lightning-retrieval[timm]'."):
        import timm
    model = arguments.get("model_name")
    if not (isinstance(model, str) and timm.is_model(model)):
        raise ValueError(f"{owner}: `{name}` must name a model that timm lists, got {short_repr(model)}.")
    given = {key: value for key, value in arguments.items() if value is not None}
    return _Description(timm.create_model, {**given, "pretrained": False})


def _network_of_torchvision(path: str, arguments: dict[str, Any]) -> _Description | None:
    from torchvision import models

    found = _imported_object(path, PACKAGES)
    if found not in [models.get_model_builder(model) for model in models.list_models()]:
        return None
    given = {key: value for key, value in arguments.items() if key not in _WEIGHTS}
    accepted = inspect.signature(found).parameters
    return _Description(found, {**given, **{key: None for key in _WEIGHTS if key in accepted}})


def _places(cls: Any) -> dict[str, _Place]:
    """What the arguments of a class accept, by its annotations; `**kwargs` are those of its base classes.

    One without annotation also accepts what its name does in a base class, to which it is usually passed on.
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
    """The annotation of each argument of a constructor, `Any` where there is none or it cannot be evaluated."""
    constructor: Any = cls.__init__
    names = {**vars(typing), **getattr(inspect.unwrap(constructor), "__globals__", {})}
    annotations = {}
    for parameter in list(inspect.signature(constructor).parameters.values())[1:]:
        if parameter.kind in _VARIADIC:
            continue
        annotations[parameter.name] = Any
        if parameter.annotation is not inspect.Parameter.empty:
            holder = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            with contextlib.suppress(Exception):  # of a string whose names the module imports for type checkers only
                annotations |= typing.get_type_hints(holder, names)
    return annotations


def _accepts_any(cls: type[Any]) -> bool:
    constructor: Any = cls.__init__
    kinds = [parameter.kind for parameter in inspect.signature(constructor).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _place(annotation: Any) -> _Place:
    """What an annotation accepts, wherever in a union, a list or a dict it says so."""
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
    """The classes of annotations, which may be unions, without those of plain values."""
    found: list[type[Any]] = []
    for annotation in annotations:
        if get_origin(annotation) in (Union, types.UnionType):
            found += _classes(get_args(annotation))
        elif annotation in (Any, object):
            found.append(nn.Module)
        elif isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False):
            found.append(annotation)
    return found


def _pass_again(owner: str, name: str, shown: str) -> ValueError:
    return ValueError(
        f"{owner}: `{name}` was a {shown} whose constructor arguments are not plain values, so the checkpoint "
        f"cannot rebuild it; pass it again: load_from_checkpoint(path, {name}=...)."
    )


# What a file may name


def _checked_parts(owner: str, name: str, value: Any, packages: tuple[str, ...]) -> list[tuple[str, Any]]:
    """What is in a value, with names; raise if the value itself, or its names, may not be in a file."""
    if isinstance(value, (list, tuple)):
        return [(name, item) for item in value]
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str) and value.get("init_args", {}) is not None:
            _check_path(owner, name, value["class_path"], packages)
        own = dict.fromkeys(("class_path", "init_args", "dict_kwargs"), name)
        parts = [(own.get(str(key), str(key)), item) for key, item in value.items()]
        for inner, item in parts:
            _check_setting(owner, inner, item)
        return parts
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise TypeError(f"{owner}: `{name}` must be plain data, got {short_repr(value)} ({type(value).__name__}).")
    if isinstance(value, str) and any(prefix in value.lower() for prefix in _ADDRESSES):
        raise ValueError(
            f"{owner}: `{name}` must name no address, since a file does not choose what is downloaded, got "
            f"{short_repr(value)}; pass the object again, as in load_from_checkpoint(path, embedder=...)."
        )
    return []


def _check_setting(owner: str, name: str, value: Any) -> None:
    if value and (name.startswith(REFUSED) or names_kernels(name, value)):
        raise ValueError(
            f"{owner}: `{name}` must not be set in a file, since it makes another library run code or read other "
            f"files, got {short_repr(value)}; pass the object again, as in load_from_checkpoint(path, embedder=...)."
        )


def _check_path(owner: str, name: str, path: Any, packages: tuple[str, ...]) -> None:
    """Raise unless a file may name a path, as it is written; nothing is imported."""
    if not isinstance(path, str):
        raise TypeError(f"{owner}: `{name}` must have a string as class_path, got {short_repr(path)}.")
    module = path.rpartition(".")[0]
    is_path = path == "timm.create_model" or module in _PUBLIC_PARENTS or _may_name(module, packages)
    if "<" not in path and not is_path:
        raise _not_allowed(owner, name, path, packages)


def _not_allowed(owner: str, name: str, path: str, packages: tuple[str, ...]) -> ValueError:
    cure = f"pass the object again: load_from_checkpoint(path, {name}=...)"
    module = path.rpartition(".")[0]
    if module and not is_below(module, (*sys.stdlib_module_names, *_required_modules())):
        cure = f"import {module} first if it is yours (in the commands: --import_module {module}), or {cure}"
    return ValueError(
        f"{owner}: `{name}` names {path}, and a file may name classes only of {', '.join(packages)}, and of modules of "
        f"yours that are imported; if you trust it, {cure}."
    )


def _may_name(module: str, packages: tuple[str, ...]) -> bool:
    return is_below(module, packages) or _is_of_user(module)


def is_below(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these packages, or in one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _is_of_user(module: str) -> bool:
    """Whether a module is one that the user has named or imported: no part of Python or of a library that we need."""
    if module in _MAIN or is_below(module, named_by_user):
        return True
    top_level = module.partition(".")[0]
    is_library = top_level in sys.stdlib_module_names or top_level in _required_modules()
    return top_level in sys.modules and not is_library


@functools.cache
def _required_modules() -> frozenset[str]:
    """The top-level modules of this library, its requirements with all extras and theirs; of all if none is known."""
    owners = importlib.metadata.packages_distributions()
    pending = ["lightning-retrieval"]
    found: set[str] = set()
    while pending:
        distribution = _normalized(pending.pop())
        if distribution in found:
            continue
        requirements: list[str] = []
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            requirements = importlib.metadata.requires(distribution) or []
        is_ours = not found
        if is_ours and not requirements:
            return frozenset(owners)
        found.add(distribution)
        for requirement in requirements:
            if is_ours or "extra ==" not in requirement:
                pending.append(requirement)
    return frozenset(name for name, names in owners.items() if found.intersection(map(_normalized, names)))


def _normalized(requirement: str) -> str:
    """The name of a distribution as package indexes compare it (PEP 503)."""
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else "").lower()


def _look_up(path: str, packages: tuple[str, ...]) -> Any:
    """What a path leads to; modules are imported only if they are in one of the packages."""
    found = _imported_object(path, packages)
    module, _, attribute = path.rpartition(".")
    if found is not None:
        return found
    if "__main__" in path or not (module in _PUBLIC_PARENTS or is_below(module, packages)):
        raise ImportError(f"{module} has no {attribute}")
    return getattr(importlib.import_module(module), attribute)


def _imported_object(path: str, packages: tuple[str, ...]) -> Any:
    """What a path leads to in imported modules; not through one that a file may not name, which can import others."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for part in parts[length:]:
                found = getattr(found, part, None)
                if isinstance(found, types.ModuleType) and not _may_name(found.__name__, packages):
                    return None
            return found
    return None
