"""Scripts of the repository, imported as modules."""

import importlib
import logging
import sys
from contextlib import contextmanager


@contextmanager
def imported(folder, name):
    """A script of a folder, with the modules beside it; all that it changes is undone."""
    logger, path, before = logging.getLogger("pytorch_lightning"), list(sys.path), set(sys.modules)
    level = logger.level
    sys.path.insert(0, str(folder))
    yield importlib.import_module(name)
    sys.path[:] = path
    logger.setLevel(level)
    for added in set(sys.modules) - before:
        file = getattr(sys.modules[added], "__file__", None) or ""
        if "/examples/" in file or "/benchmarks/" in file:
            del sys.modules[added]
