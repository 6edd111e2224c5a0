"""Classes named by the shortest public path from which they can be imported, and looked up again by such a path."""

import importlib
import sys
from typing import Any


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
        ValueError: if it cannot be imported.
        TypeError: if it is not a class of that kind.
    """
    module, _, attribute = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{owner}: `{name}` names the class {path}, which cannot be imported ({error}).") from None
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise TypeError(f"{owner}: `{name}` names {path}, which is not a class of the kind needed here ({kind}).")
    return cls


def _exposes(package: str, cls: type) -> bool:
    """Whether a package has the class under its own name; the parents of a loaded module are loaded too."""
    module = sys.modules.get(package)
    return getattr(module, cls.__qualname__, None) is cls
