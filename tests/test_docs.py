"""The documentation does what it says: every example is run, every link leads somewhere."""

import configparser
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())


def modules():
    """All modules by import name. The packages come from setup.cfg: callbacks/ and datamodules/ stand elsewhere."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    names = setup["options"]["packages"].split()
    for package in list(names):
        names += [
            f"{package}.{module.name}" for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
        ]
    return sorted(set(names))


def test_all_modules_are_found():
    files = [
        path
        for room in ("lightning_retrieval", "callbacks", "datamodules")
        for path in (REPOSITORY / room).rglob("*.py")
    ]
    assert len(modules()) == len(files)


@pytest.mark.parametrize("name", modules())
def test_examples_of_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0, "see the output above"


def python_blocks(text):
    """(line, source) of each ```python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start()) + 2, block[1]) for block in found]


@pages
# Lightning's advice, and what its own code meets in a newer torch.
@pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page, one after the other, in one namespace and an empty folder; training stops early."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    namespace = {"__name__": "__main__"}
    for line, source in python_blocks(page.read_text(encoding="utf-8")):
        # Empty lines in front, so that an error names the line of the page.
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), namespace)


def links(text):
    """Targets of links and images outside of code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


def broken(page, text):
    paths = (target.split("#")[0] for target in links(text) if not re.match(r"[a-z]+:", target))
    return [path for path in paths if path and not (page.parent / path).exists()]


@pages
def test_relative_links_lead_somewhere(page):
    assert not broken(page, page.read_text(encoding="utf-8"))


def test_broken_links_and_blocks_are_seen():
    text = "[a](README.md) ![b](no.png) `[c](code)`\n```python\nx = 1\n```\n"
    text += '<img src="gone.svg"> [d](https://e.org) [e](#f)'
    assert broken(REPOSITORY / "x.md", text) == ["no.png", "gone.svg"]
    assert python_blocks(text) == [(3, "x = 1\n")]
