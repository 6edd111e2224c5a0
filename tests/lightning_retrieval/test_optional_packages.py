"""The one sentence for an optional package that is missing, or that is installed and cannot be imported."""

import sys

import pytest

from lightning_retrieval.optional_packages import optional_import

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
