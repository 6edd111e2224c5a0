"""Scripts of the repository, run in this process."""

import logging
import runpy
import sys
from contextlib import contextmanager
from pathlib import Path

import sklearn  # noqa: F401 - sets variables of the environment when it is first imported: now, not within a test


@contextmanager
def modules_of(folder):
    """The scripts of a folder can be imported; all that they change is undone."""
    logger, path, before = logging.getLogger("pytorch_lightning"), list(sys.path), set(sys.modules)
    level = logger.level
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        logger.setLevel(level)
        for added in set(sys.modules) - before:
            file = getattr(sys.modules[added], "__file__", None) or ""
            if "/examples/" in file or "/benchmarks/" in file:
                del sys.modules[added]


def run_script(path, *arguments, monkeypatch):
    """Run a script as `python` does; returns its variables, or None if it ends itself."""
    path, code, variables = Path(path).resolve(), 0, None
    with modules_of(path.parent), monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        try:
            variables = runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
    assert not code, f"{path} ended with {code}"
    return variables
