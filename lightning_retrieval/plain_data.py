"""Classes named by the shortest public path from which they can be imported, and looked up again by such a path.

Importing a module runs its code, and a checkpoint may name any module. So a path is looked up only in modules that are
imported already, and in `TRUSTED_PACKAGES`.
"""

import importlib
import importlib.util
import sys
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_retrieval.checks import check_callable

TRUSTED_PACKAGES = ("lightning_retrieval", "pytorch_metric_learning", "timm", "torch", "torchvision")


def class_path(cls: type) -> str:
    """The shortest dotted path from which a class can be imported, the one that LightningCLI writes into a config.

    Packages re-export what is public, so the parents of the class's module are asked first: the path of a public class
    does not depend on the file that defines it.

    Args:
        cls: any class; one that is defined within a function has no path, and gets a name that cannot be imported.

    Example:
        >>> import torch
        >>> from lightning_retrieval.training.class_paths import class_path
        >>> class_path(torch.optim.AdamW), class_path(torch.nn.Linear)
        ('torch.optim.AdamW', 'torch.nn.Linear')
    """
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        if _exposes(package, cls):
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def load_class(owner: str, name: str, path: str, kind: Any) -> Any:
    """The class of a path.

    Args:
        owner: prefix of error messages.
        name: the argument that the path belongs to.
        path: dotted path of a class.
        kind: the class must be a subclass of this class, or of one of a tuple of classes.

    Raises:
        ValueError: if its module is neither imported nor in one of `TRUSTED_PACKAGES`, or does not have the class.
        TypeError: if it is not a class of that kind.
    """
    check_class_path(owner, name, path)
    module, _, attribute = path.rpartition(".")
    try:
        cls = _imported_object(path)
        if cls is None:
            cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{owner}: `{name}` names the class {path}, which cannot be imported ({error}).") from None
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise TypeError(f"{owner}: `{name}` names {path}, which is not a class of the kind needed here ({kind}).")
    return cls


def load_function(owner: str, name: str, path: str) -> Any:
    """What the user named by a dotted path: a function, or another object that can be called. Its module is imported.

    Args:
        owner: prefix of error messages.
        name: the argument that names it.
        path: dotted path.

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


def check_class_path(owner: str, name: str, path: str) -> None:
    """Raise if looking up a path would import a module that the user has not imported; nothing is imported.

    A string without dots, or one whose first part is no module, such as the name of weights, is no path.

    Args:
        owner: prefix of error messages.
        name: the argument that the path belongs to.
        path: dotted path of a class.

    Raises:
        ValueError: if the module is neither imported nor in one of `TRUSTED_PACKAGES`.
    """
    module = path.rpartition(".")[0]
    is_importable = sys.modules.get(module) is not None or module.split(".")[0] in TRUSTED_PACKAGES
    if _is_module_path(path) and not is_importable and _imported_object(path) is None:
        raise ValueError(
            f"{owner}: `{name}` names {path}, whose module is not imported, and loading a checkpoint imports only "
            f"{', '.join(TRUSTED_PACKAGES)}; import {module} first if you trust it (in the commands `index` and "
            f"`search`: --import_module {module})."
        )


def check_config_paths(owner: str, name: str, config: Any) -> None:
    """Raise if a config of jsonargparse names something in a module that may not be imported; nothing is imported.

    All strings count, not only those at `class_path`: jsonargparse also accepts a path in place of an object, and
    parses strings as YAML.

    Args:
        owner: prefix of error messages.
        name: the argument that the config is for.
        config: plain data.

    Raises:
        ValueError: with the innermost argument that names such a module.
    """
    if isinstance(config, dict):
        for key, value in config.items():
            inner = str(key)
            if key in ("class_path", "init_args", "dict_kwargs"):
                inner = name
            check_config_paths(owner, inner, value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            check_config_paths(owner, name, value)
    elif isinstance(config, str):
        check_class_path(owner, name, config)
        parsed = _parsed(config)
        if parsed != config:
            check_config_paths(owner, name, parsed)


def import_named_module(owner: str, name: str, module: str) -> None:
    """Import a module that the user has named, so that class paths may lead to it.

    Args:
        owner: prefix of error messages.
        name: the argument that names the module.
        module: dotted name.

    Raises:
        ValueError: if it cannot be imported.
    """
    try:
        importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{owner}: `{name}` must name a module that can be imported, got {module} ({error})."
        ) from None


def _imported_object(path: str) -> Any:
    """What a path leads to in the modules that are imported already; None if it leads nowhere."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is not None:
            for part in parts[length:]:
                found = getattr(found, part, None)
            return found
    return None


def _is_module_path(text: str) -> bool:
    """Whether a string is a dotted path that begins with a module, imported or not."""
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return False
    return parts[0] in sys.modules or importlib.util.find_spec(parts[0]) is not None


def _parsed(text: str) -> Any:
    """A string as jsonargparse understands it: as YAML, and unchanged if it is none."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text


def _exposes(package: str, cls: type) -> bool:
    """Whether a package has the class under its own name; the parents of a loaded module are loaded too."""
    module = sys.modules.get(package)
    return getattr(module, cls.__qualname__, None) is cls
