"""Fixtures of the glyph images: all of them, and a table of a few classes, whose images are drawn at once."""

import pytest

from lightning_retrieval.datamodules.glyphs import characters
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images


@pytest.fixture(scope="session")
def drawn_glyphs():
    """All images."""
    return load_glyph_images()


@pytest.fixture
def few_classes(monkeypatch, tmp_path_factory):
    """A table of 40 classes, which no argument names, to draw in no time.

    Promises 4 and 6: to see where a cache is and that it is complete takes many drawings, each of some seconds.
    """
    table = tmp_path_factory.mktemp("table") / "glyph_classes.csv"
    lines = characters.TABLE.read_text(encoding="ascii").splitlines(keepends=True)
    table.write_text("".join(lines[:42]))
    monkeypatch.setattr(characters, "TABLE", table)
    return table
