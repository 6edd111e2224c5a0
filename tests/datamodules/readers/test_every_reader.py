"""The constructors of all readers: `**settings` are named in the docstring, and only `root` is positional."""

import inspect
import re

import pytest

from lightning_retrieval import datamodules
from lightning_retrieval.datamodules import ImageDataModule, RetrievalDataModule

READERS = {
    name: getattr(datamodules, name)
    for name in datamodules.__all__
    if ".readers." in getattr(datamodules, name).__module__
}


def named_parameters(kind):
    """The parameters of a constructor, without `self` and `**settings`."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]


def settings_in_the_docstring(kind):
    """{class: names} of the sentence about `settings`."""
    entry = re.search(r"^ +settings: (.*?)\n\n", kind.__doc__, re.DOTALL | re.MULTILINE).group(1)
    groups = re.findall(r"`(\w+)` \((.*?)\)", entry, re.DOTALL)
    return {owner: re.findall(r"`(\w+)`", names) for owner, names in groups}


def test_there_are_ten_readers():
    assert len(READERS) == 10


@pytest.mark.parametrize("name", READERS)
def test_the_docstring_names_all_settings(name):
    own = named_parameters(READERS[name])
    expected = {
        base.__name__: [parameter for parameter in named_parameters(base) if parameter not in own]
        for base in (ImageDataModule, RetrievalDataModule)
    }
    assert settings_in_the_docstring(READERS[name]) == expected


@pytest.mark.parametrize("name", READERS)
def test_only_the_root_is_positional(name):
    parameters = inspect.signature(READERS[name]).parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == ["root"]
