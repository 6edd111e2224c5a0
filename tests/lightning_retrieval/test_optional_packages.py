"""A missing package is named in one sentence, also if it is one that the wanted package needs itself."""

import importlib

import pytest

from lightning_retrieval.invalid import MissingPackage
from lightning_retrieval.optional_packages import optional_import


def test_what_an_installed_package_lacks_is_named(tmp_path, monkeypatch):
    (tmp_path / "mappyng.py").write_text("import projecktions\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match="'projecktions'"), optional_import("Maps need mappyng.", "draw"):
        importlib.import_module("mappyng")
