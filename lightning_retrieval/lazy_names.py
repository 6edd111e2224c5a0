"""Public names of a package that are imported when they are first used."""

import sys
from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from typing import Any


def lazy_names(package: str, subpackages: Collection[str] = ()) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package.

    Its public names, also those in `__all__`, are the names that it imports for type checkers: the imports below
    `if TYPE_CHECKING:`, which are read from its source when a name is first used.

    Args:
        package: name of the package.
        subpackages: names of subpackages that are attributes of the package.

    Example:
        >>> get, names = lazy_names("lightning_retrieval.callbacks")
        >>> get("APMonitor"), names()[:2]
        (<class 'lightning_retrieval.callbacks.ap_monitor.APMonitor'>, ['APMonitor', 'CheckpointOnInterrupt'])
    """

    @cache
    def modules() -> dict[str, str]:
        return _imported_for_type_checkers(package)

    def get(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name == "__all__":
            return sorted(modules())
        if name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules()[name]), name)

    def names() -> list[str]:
        return sorted({*modules(), *subpackages})

    return get, names


def _imported_for_type_checkers(package: str) -> dict[str, str]:
    """The names that a package imports below `if TYPE_CHECKING:`, each with the module that has it."""
    import ast  # only here, so that commands without torch start immediately

    loader: Any = sys.modules[package].__loader__
    modules = {}
    for statement in ast.parse(loader.get_source(package)).body:
        if not isinstance(statement, ast.If):  # it can only be that of `TYPE_CHECKING`
            continue
        for imported in ast.walk(statement):
            if isinstance(imported, ast.ImportFrom):
                for alias in imported.names:
                    modules[alias.name] = str(imported.module)
    return modules
