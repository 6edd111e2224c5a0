"""The one sentence for an optional package that is missing, or that is installed and cannot be imported."""

import re
import sys

import pytest

from lightning_retrieval.optional_packages import optional_import
from tests.source_tree import REPOSITORY

MESSAGE = "demo: yaml must be installed: pip install pyyaml."


def test_a_package_that_is_installed_is_imported():
    with optional_import(MESSAGE):
        import yaml
    assert yaml.safe_load("a: 1") == {"a": 1}


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError) as raised, optional_import(MESSAGE):
        import yaml  # noqa: F401
    assert str(raised.value) == MESSAGE
    assert raised.value.__suppress_context__


def test_the_reason_is_given_if_the_package_is_installed():
    with pytest.raises(ModuleNotFoundError) as raised, optional_import(MESSAGE):
        raise ImportError("libyaml.so: cannot open\n shared object file")
    assert str(raised.value) == f"{MESSAGE[:-1]} (libyaml.so: cannot open shared object file)."
    assert raised.value.__suppress_context__


def test_other_errors_are_not_changed():
    with pytest.raises(ValueError, match=r"^other$"), optional_import(MESSAGE):
        raise ValueError("other")


def test_the_names_of_extras_are_quoted():
    """Without quotes, zsh takes the brackets for a pattern of file names, and finds none."""
    folders = ("lightning_retrieval", "callbacks", "datamodules", "examples", "benchmarks", "docs")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".md")]
    assert len(paths) > 200
    unquoted = re.compile(r"pip install (?:-e )?[\w.-]+\[")
    found = [path for path in paths if unquoted.search(path.read_text(encoding="utf-8"))]
    assert found == []
