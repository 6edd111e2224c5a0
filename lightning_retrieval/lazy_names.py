"""Public names of a package that are imported when they are first used."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

LIBRARY = __name__.rpartition(".")[0]


def lazy_names(
    package: str, modules: Mapping[str, str], subpackages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Args:
        package: name of the package.
        modules: each public name, and the module of this library that defines it, relative to the library.
        subpackages: names of subpackages that are attributes of the package.

    Example:
        >>> get, names = lazy_names("lightning_retrieval.losses", {"SmoothAPLoss": "losses.smooth_ap"})
        >>> get("SmoothAPLoss"), names()
        (<class 'lightning_retrieval.losses.smooth_ap.SmoothAPLoss'>, ['SmoothAPLoss'])
    """

    def get(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{LIBRARY}.{modules[name]}"), name)

    def names() -> list[str]:
        return sorted({*modules, *subpackages})

    return get, names
