"""The settings of an object as plain data, for the logs of a run."""

import inspect
import os
from typing import Any

from lightning_retrieval.plain_data import class_path

LONGEST_LIST = 100  # a longer list or dict is logged by its length
DEEPEST_NESTING = 3  # what is nested deeper is logged by its class


def logged_settings(value: Any) -> dict[str, Any]:
    """Class and settings of an object as plain data, for a log; no object is rebuilt from it.

    Settings are the constructor arguments, of the class and of its bases, that the object keeps as attributes of the
    same names. A value that is not plain is logged by its class, a long list by its length.

    Args:
        value: any object. Its properties are not called, since they may compute anything.

    Example:
        >>> from lightning_retrieval.losses import SmoothAPLoss
        >>> from lightning_retrieval.training.logged_settings import logged_settings
        >>> settings = logged_settings(SmoothAPLoss(tau=0.1))
        >>> settings["class_path"], settings["tau"]
        ('lightning_retrieval.SmoothAPLoss', 0.1)
    """
    attributes = getattr(value, "__dict__", {})
    settings: dict[str, Any] = {"class_path": class_path(type(value))}
    for name in _constructor_arguments(type(value)):
        if attributes.get(name) is not None:
            settings[name] = _logged(attributes[name], DEEPEST_NESTING)
    return settings


def _constructor_arguments(cls: type) -> list[str]:
    """Names of the constructor arguments of a class and of its bases, each once."""
    names: dict[str, None] = {}
    for base in cls.__mro__[:-1]:
        if "__init__" in vars(base):
            names |= dict.fromkeys(inspect.signature(vars(base)["__init__"]).parameters)
    return list(names)


def _logged(value: Any, depth: int) -> Any:
    if value is None:
        return None
    for kind in (bool, int, float, str):  # subclasses such as NumPy's float64 become the plain type
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, (list, tuple, dict)) or depth == 0:
        return class_path(type(value))
    if len(value) > LONGEST_LIST:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        return {str(key): _logged(item, depth - 1) for key, item in value.items()}
    return [_logged(item, depth - 1) for item in value]
