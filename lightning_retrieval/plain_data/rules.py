"""The rules for which classes and settings a file may name. All code that reads files uses these rules.

- A file names classes that are defined in `PACKAGES`. Any of them may be built with any arguments: in
  `without_pretrained_weights`, their constructors read and write no file, open no connection, and call no function by
  its name. A further package must be checked for that. The rest of this library does not qualify: its other classes
  write to folders, connect to servers and start runs.
- A file also names classes of the user. Any class counts if the user has named its module, or has called
  `load_from_checkpoint` of a class in the same package. From other modules that are imported and not installed, a class
  counts if it is derived from one of `PACKAGES`.
- A class is looked up, and a module of `PACKAGES` imported, only after the path has been accepted.
- Settings that make another library run code or load files are invalid (`FORBIDDEN`, addresses, names of kernels).
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue

Kinds = tuple[type[Any], ...]

PACKAGES = (
    "lightning_retrieval.datamodules",
    "lightning_retrieval.detection",
    "lightning_retrieval.losses",
    "lightning_retrieval.models",
    "lightning_retrieval.preparation",
    "lightning_retrieval.ranking",
    "lightning_retrieval.training",
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
_PARENTS = ("lightning_retrieval", "torch.nn")  # from which classes of these packages are imported, too
BUILDER_OF_TIMM = "timm.create_model"

# Settings with which another library would run code, or read a file or an address that the description chooses.
FORBIDDEN = ("auto_map", "cache_dir", "checkpoint_path", "megatron_config", "pretrained_cfg", "trust_remote_code")
_ADDRESSES = ("://", "hf-hub:", "hf_hub:", "local-dir:")  # parts of names that another library would look up elsewhere
_IGNORED = str.maketrans("", "", "\t\r\n")  # characters that `urllib` removes from an address
# Never the user's, wherever they are installed: they have networks and metrics that read files, download or run code.
_LIBRARIES = (
    *("lightning", "lightning_fabric", "lightning_retrieval", "peft", "pytorch_lightning", "pytorch_metric_learning"),
    *("timm", "torch", "torchmetrics", "torchvision", "transformers"),
)
INSTALLED = frozenset(("dist-packages", "site-packages"))  # names of the folders to which package managers install
_MAIN = ("__main__", "__mp_main__")  # the user's script, in its process and in spawned processes

# The cure for a part of a file, whether it is a checkpoint, a config or a folder.
IN_PYTHON = "if you trust it, build the object in Python and pass it"

named_by_user: set[str] = set()  # modules named by the user, not by a file


def check_plain_data(path: str, value: Any) -> None:
    """Raise unless a value from a file is plain data in which all names are permitted; imports nothing.

    Args:
        path: where the value is in the file, such as `embedder.backbone`; "" for the whole.
        value: numbers, strings, None, lists and dicts.

    Raises:
        ValueError: if a class path belongs to a module that a file may not name, or a setting would make another
            library run code, read a file or open an address.
        TypeError: if the value contains anything but plain data.
    """
    if isinstance(value, Mapping):
        if "class_path" in value and not is_incomplete(value):
            _check_path(path, value["class_path"])
        for key, item in value.items():
            _check_setting(path, str(key), item)
            check_plain_data(path_of_part(path, key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_plain_data(path, item)
    elif isinstance(value, str):
        if any(prefix in value.lower().translate(_IGNORED) for prefix in _ADDRESSES):
            rule = "must not be an address, since a file may not choose what is downloaded"
            raise InvalidValue(rule, argument=path, got=short_repr(value), cure=IN_PYTHON)
    elif not isinstance(value, (int, float, NoneType)):
        raise InvalidType("must be plain data", argument=path, got=f"{short_repr(value)} ({type(value).__name__})")


def path_of_part(path: str, key: object) -> str:
    """The path of a part, such as `embedder.backbone`; the arguments of a class have the path of the class."""
    if key in ("class_path", "init_args", "dict_kwargs"):
        return path
    return f"{path}.{key}".removeprefix(".")


def is_incomplete(description: Mapping[str, Any]) -> bool:
    """Whether `describe` could not describe the arguments of an object, or a class that is defined in a function."""
    return description.get("init_args", {}) is None or "<" in str(description["class_path"])


def find_class(path: str, name: Any, kinds: Kinds = (object,)) -> type[Any]:
    """Look up a class that a file names.

    Args:
        path: where the name is in the file.
        name: dotted path of a class.
        kinds: the class must be a subclass of one of these.

    Raises:
        ValueError: if a file may not name the class.
        TypeError: if there is no such class, or it is of none of the kinds.
    """
    _check_path(path, name)
    module, _, attribute = name.rpartition(".")
    if module in _PARENTS or is_below(module, PACKAGES):
        with suppress(ImportError):
            importlib.import_module(module)
    found = getattr(sys.modules.get(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, kinds)):
        raise InvalidType(f"names {name}, which is no class of the kind needed here", argument=path)
    if not _may_build(found):
        raise _not_allowed(path, f"{found.__module__}.{found.__qualname__}")
    return found


def _check_path(path: str, name: Any) -> None:
    """Raise unless a file may name a class, judged by the text; nothing is imported."""
    if not isinstance(name, str):
        raise InvalidType("must have a string as class_path", argument=path, got=short_repr(name))
    module = name.rpartition(".")[0]
    is_known = name == BUILDER_OF_TIMM or module in _PARENTS or is_below(module, PACKAGES)
    if not is_known and not _is_named(module) and not _is_of_user(module):
        raise _not_allowed(path, name)


def _check_setting(path: str, name: str, value: Any) -> None:
    if (name.startswith(FORBIDDEN) or names_kernels(name, value)) and value:
        rule = "must not be set in a file, since it makes another library run code or read other files"
        raise InvalidValue(rule, argument=path_of_part(path, name), got=short_repr(value), cure=IN_PYTHON)


def names_kernels(name: str, value: Any) -> bool:
    """Whether a setting of transformers (possibly one per submodule) names kernels on a hub."""
    return "_implementation" in name and value is not None and not str(value).isidentifier()


def _not_allowed(path: str, name: str) -> InvalidValue:
    return InvalidValue(
        f"names {name}, and a file may name classes only of {', '.join(PACKAGES)}, and of modules of yours that are "
        "imported",
        argument=path,
        cure=f"if you trust it, import or name its module (in the commands: --import_module "
        f"{name.rpartition('.')[0]}), or build the object in Python and pass it",
    )


def is_below(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these packages, or inside one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _may_build(cls: type[Any]) -> bool:
    """Whether a file may build objects of a class, by the module that defines it."""
    if is_below(cls.__module__, PACKAGES) or _is_named(cls.__module__):
        return True
    is_derived = any(is_below(base.__module__, PACKAGES) for base in cls.__mro__)
    return is_derived and _is_of_user(cls.__module__)


def _is_named(module: str) -> bool:
    """Whether the user has named a module, or a package that it is in."""
    return is_below(module, named_by_user)


def _is_of_user(module: str) -> bool:
    """Whether a module is the user's script, or is imported and not installed."""
    if module in _MAIN:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or _is_of_library(module):
        return False
    folders = Path(file).parents
    return not any(folder.name in INSTALLED or any(folder.glob("*.dist-info")) for folder in folders)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in (*sys.stdlib_module_names, *_LIBRARIES)


def add_named_packages(value: Any) -> None:
    """Count the packages of the classes that the user, not a file, has named as the user's, even if they are installed.

    Args:
        value: descriptions of objects that the user has given, such as the model of a config.
    """
    for name, item in named_values("", value):
        if name == "class_path" and isinstance(item, str) and not _is_of_library(item):
            named_by_user.add(item.partition(".")[0])


def named_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All values in nested plain data, also the dicts and lists, with their names.

    Args:
        name: name of the data.
        value: plain data. The values in a list have the name of the list.
    """
    yield name, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_values(str(key), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from named_values(name, item)


def load_function(name: str, path: str) -> Any:
    """Import a function, or another callable, by a dotted path that the user, not a file, has given.

    Args:
        name: the argument with the path.
        path: dotted path, whose module is imported.

    Raises:
        ValueError: if the module cannot be imported, or does not have the function.
    """
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        rule = "must name a function that can be imported"
        cure = "`python -m lightning_retrieval.cli` finds the modules of the working directory"
        raise InvalidValue(rule, argument=name, got=f"{path} ({error})", cure=cure) from None
    return found


def import_named_module(name: str, module: str) -> None:
    """Import a module that the user, not a file, has named by an argument, so that files may name its classes.

    Raises:
        ValueError: if the module cannot be imported.
    """
    try:
        importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise InvalidValue(
            "must name a module that can be imported", argument=name, got=f"{module} ({error})"
        ) from None
    named_by_user.add(module)
