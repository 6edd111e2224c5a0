"""Lets all tests run with the package `lightning`: `LIGHTNING_RETRIEVAL_BACKEND=lightning python -m pytest`.

The tests import `pytorch_lightning`. With this setting, its modules are those of `lightning.pytorch`, and those of
`lightning_fabric` are those of `lightning.fabric`.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys

OTHER_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class OtherNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of `pytorch_lightning` and `lightning_fabric` from the package `lightning`."""

    def __init__(self):
        self.specs = {}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in OTHER_NAMES:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec):
        root, dot, rest = spec.name.partition(".")
        module = importlib.import_module(OTHER_NAMES[root] + dot + rest)
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.specs[module.__spec__.name]  # its own, which the import system has replaced


# Without the setting, a library that imports `lightning` would make modules warn that both packages are imported.
if os.environ.setdefault("LIGHTNING_RETRIEVAL_BACKEND", "pytorch_lightning") == "lightning":
    sys.meta_path.insert(0, OtherNames())
