"""The rules for which classes and settings a file may name. All code that reads files uses these rules.

- A class is accepted if its module is in `PACKAGES`, or belongs to the user (`_is_of_user`), and if it is a subclass of
  the type of the argument. The class is looked up only after its path has been accepted.
- A file cannot choose a function to be called. The only exceptions are `timm.create_model` and torchvision's model
  builders, which are called without pretrained weights. `load_function` is only for names given by the user.
- Settings that make another library run code or load files are invalid (`FORBIDDEN`, addresses, names of kernels).
"""

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.plain_data.describe import class_path

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
_PUBLIC_PARENTS = ("timm.data", "torch.nn")  # parent packages from which some of these classes are usually imported

# Settings with which another library would run code, or read a file or an address that the description chooses.
FORBIDDEN = ("auto_map", "cache_dir", "checkpoint_path", "megatron_config", "pretrained_cfg", "trust_remote_code")
PASS_AGAIN = "pass the object again, as in load_from_checkpoint(path, embedder=...)"
_ADDRESSES = ("://", "hf-hub:", "hf_hub:", "local-dir:")  # parts of names that another library would look up elsewhere
_IGNORED = str.maketrans("", "", "\t\r\n")  # characters that `urllib` removes from an address
_MOST_DEPTH, _MOST_VALUES = 100, 1_000_000  # limits for plain data
MOST_INTEGER = 1 << 22  # largest size or number of layers that a file may give to the builder of a network
# Never the user's, whichever of them the environment has, and wherever they are installed.
_LIBRARIES = (
    "lightning",
    "lightning_cloud",
    "lightning_fabric",
    "lightning_sdk",
    "lightning_utilities",
    "litlogger",
    "litmodels",
    "pytorch_lightning",
)
INSTALLED = frozenset(("dist-packages", "site-packages"))  # names of the folders to which package managers install
_MAIN = ("__main__", "__mp_main__")  # the user's script, in its process and in spawned processes

named_by_user: set[str] = set()  # modules named by the user, not by a file


def check_plain_data(name: str, value: Any, packages: tuple[str, ...] = PACKAGES) -> None:
    """Raise unless a value from a file is plain data in which all names are permitted; imports nothing.

    Args:
        name: the argument that the value is for.
        value: numbers, strings, None, lists and dicts.
        packages: modules whose classes a file may name, in addition to the user's modules.

    Raises:
        ValueError: if a class path belongs to a module that a file may not name, a setting would make another library
            run code, read a file or open an address, or lists and dicts are nested too deeply.
        TypeError: if the value contains anything but plain data.
    """
    pending, seen = [(name, value, 0)], 0
    while pending:
        inner, item, depth = pending.pop()
        seen += 1
        if depth > _MOST_DEPTH or seen > _MOST_VALUES:  # nested shared lists may expand exponentially
            raise InvalidValue("must be plain data", argument=name, got="lists or dicts that are nested too deeply")
        pending += [(key, part, depth + 1) for key, part in _checked_parts(inner, item, packages)]


def check_integers_of_file(name: str, value: Any) -> None:
    """Raise if a file asks for a size or a number of layers that no network has.

    Args:
        name: the argument that the value belongs to.
        value: plain data.

    Raises:
        ValueError: if an integer is larger than 2^22.
    """
    for inner, item in named_values(name, value):
        if isinstance(item, int) and abs(item) > MOST_INTEGER:
            rule = f"must have integers up to {MOST_INTEGER:,} in a file"
            got = f"{short_repr(item)} for {inner}"
            raise InvalidValue(rule, argument=name, got=got, cure="build the network in Python, and pass it")


def named_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All values in nested plain data, also the dicts and lists, with their names.

    Args:
        name: name of the data.
        value: plain data. The values in a list have the name of the list.
    """
    pending = [(name, value)]
    while pending:
        inner, item = pending.pop()
        yield inner, item
        if isinstance(item, Mapping):
            pending += item.items()
        elif isinstance(item, (list, tuple)):
            pending += zip(itertools.repeat(inner), item)


def find_class(name: str, path: Any, kinds: Kinds = (object,), packages: tuple[str, ...] = PACKAGES) -> type[Any]:
    """Look up the class with a path from a file.

    Args:
        name: the argument that the path belongs to.
        path: dotted path of a class.
        kinds: the class must be a subclass of one of these.
        packages: as for `check_plain_data`.

    Raises:
        ValueError: if a file may not name the class, or the class does not exist.
        TypeError: if the path does not name a class of one of the kinds.
    """
    _check_path(name, path, packages)
    try:
        cls = _look_up(path, packages)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValue(f"names the class {path}, which cannot be imported ({error})", argument=name) from None
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        shown = " or ".join(map(class_path, kinds))
        raise InvalidType(f"names {path}, which is not a class of the kind needed here ({shown})", argument=name)
    if not _may_name(cls.__module__, packages):
        raise _not_allowed(name, f"{cls.__module__}.{cls.__qualname__}", packages)
    return cls


def names_kernels(name: str, value: Any) -> bool:
    """Whether a setting of transformers (possibly one per submodule) names kernels on a hub."""
    return "_implementation" in name and value is not None and not str(value).isidentifier()


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


def _checked_parts(name: str, value: Any, packages: tuple[str, ...]) -> list[tuple[str, Any]]:
    """The elements of a value, with names; raises if the value itself, or a name, may not be in a file."""
    if isinstance(value, (list, tuple)):
        return [(name, item) for item in value]
    if isinstance(value, Mapping):
        if isinstance(value.get("class_path"), str) and value.get("init_args", {}) is not None:
            _check_path(name, value["class_path"], packages)
        names = dict.fromkeys(("class_path", "init_args", "dict_kwargs"), name)
        parts = [(names.get(str(key), str(key)), item) for key, item in value.items()]
        for inner, item in parts:
            _check_setting(inner, item)
        return parts
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise InvalidType("must be plain data", argument=name, got=f"{short_repr(value)} ({type(value).__name__})")
    if isinstance(value, str) and any(prefix in value.lower().translate(_IGNORED) for prefix in _ADDRESSES):
        rule = "must not be an address, since a file may not choose what is downloaded"
        raise InvalidValue(rule, argument=name, got=short_repr(value), cure=PASS_AGAIN)
    return []


def _check_setting(name: str, value: Any) -> None:
    if value and (name.startswith(FORBIDDEN) or names_kernels(name, value)):
        rule = "must not be set in a file, since it makes another library run code or read other files"
        raise InvalidValue(rule, argument=name, got=short_repr(value), cure=PASS_AGAIN)


def _check_path(name: str, path: Any, packages: tuple[str, ...]) -> None:
    """Raise unless a file may name a path, judged by its text; nothing is imported."""
    if not isinstance(path, str):
        raise InvalidType("must have a string as class_path", argument=name, got=short_repr(path))
    module = path.rpartition(".")[0]
    is_path = path == "timm.create_model" or module in _PUBLIC_PARENTS or _may_name(module, packages)
    if "<" not in path and not is_path:
        raise _not_allowed(name, path, packages)


def _not_allowed(name: str, path: str, packages: tuple[str, ...]) -> InvalidValue:
    cure = f"pass the object again: load_from_checkpoint(path, {name}=...)"
    module = path.rpartition(".")[0]
    if _is_installed(module) and not _is_required(module):
        cure = f"name the package if it is yours (in the commands: --import_module {module}), or {cure}"
    elif module and not _is_required(module):
        cure = f"import {module} first if it is yours (in the commands: --import_module {module}), or {cure}"
    return InvalidValue(
        f"names {path}, and a file may name classes only of {', '.join(packages)}, and of modules of yours that are "
        "imported",
        argument=name,
        cure=f"if you trust it, {cure}",
    )


def _may_name(module: str, packages: tuple[str, ...]) -> bool:
    return is_below(module, packages) or _is_of_user(module)


def is_below(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these packages, or inside one of them."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def _is_of_user(module: str) -> bool:
    """Whether a module is the user's.

    A module is the user's if it is the script, if the user has named it, or if it is imported and belongs neither to
    Python nor to a library. A library is what this one requires, and what is installed in site-packages: libraries
    import each other, and have classes that read files, download or run code when they are constructed.
    """
    if module in _MAIN or is_below(module, named_by_user):
        return True
    is_imported = module.partition(".")[0] in sys.modules
    return is_imported and not _is_required(module) and not _is_installed(module)


def _is_required(module: str) -> bool:
    """Whether a module is one of Python or of a required library."""
    top_level = module.partition(".")[0]
    return top_level in sys.stdlib_module_names or top_level in _LIBRARIES or top_level in _required_modules()


def _is_installed(module: str) -> bool:
    """Whether an imported module lies where package managers install; one in development does not."""
    places: list[Any] = []
    for name in {module, module.partition(".")[0]} & sys.modules.keys():
        found = sys.modules[name]
        places += [getattr(found, "__file__", None), *getattr(found, "__path__", ())]
    return any(not INSTALLED.isdisjoint(Path(place).parts) for place in places if place)


def add_named_packages(value: Any) -> None:
    """Count the packages of the classes that the user, not a file, has named as the user's, even if they are installed.

    Args:
        value: descriptions of objects that the user has given, such as the model of a config.
    """
    if isinstance(value, (list, tuple)):
        for item in value:
            add_named_packages(item)
    if not isinstance(value, Mapping):
        return
    for name, item in value.items():
        if name == "class_path" and isinstance(item, str) and not _is_required(item):
            named_by_user.add(item.partition(".")[0])
        add_named_packages(item)


@functools.cache
def _required_modules() -> frozenset[str]:
    """The top-level modules of this library, its requirements with all extras, and their requirements.

    If the requirements of this library are unknown, the result is the top-level modules of all packages.
    """
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
    """The object at a path; modules are imported only if they are in one of the packages."""
    found = imported_object(path, packages)
    module, _, attribute = path.rpartition(".")
    if found is not None:
        return found
    if "__main__" in path or not (module in _PUBLIC_PARENTS or is_below(module, packages)):
        raise ImportError(f"{module} has no {attribute}")
    return getattr(importlib.import_module(module), attribute)


def imported_object(path: str, packages: tuple[str, ...] = PACKAGES) -> Any:
    """The object at a path in modules that are already imported; None if there is no such object.

    The result is also None if the path passes through a module that a file may not name, because the attributes of such
    a module may be other modules.
    """
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
