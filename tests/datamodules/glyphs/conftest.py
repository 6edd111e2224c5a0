"""Fixtures of the glyph images: all of them, and a table of a few classes, whose images are drawn at once."""

from pathlib import Path

import pytest

from lightning_retrieval.datamodules.glyphs import characters
from lightning_retrieval.datamodules.glyphs.drawing import GlyphImages, load_glyph_images


@pytest.fixture(scope="session")
def drawn_glyphs() -> GlyphImages:
    """All images."""
    return load_glyph_images()


@pytest.fixture
def few_classes(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 classes, so that drawing takes no time."""
    table = tmp_path_factory.mktemp("table") / "glyph_classes.csv"
    lines = characters.TABLE.read_text(encoding="ascii").splitlines(keepends=True)
    table.write_text("".join(lines[:42]))
    monkeypatch.setattr(characters, "TABLE", table)
    return table


@pytest.fixture
def small_cache(few_classes: Path, tmp_path: Path) -> Path:
    """A complete cache file of few classes, with its checksum next to it."""
    load_glyph_images(tmp_path)
    (path,) = tmp_path.glob("*.npz")
    return path
