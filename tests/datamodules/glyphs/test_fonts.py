"""The fonts of the glyph images: which are used, and the error without any."""

import re
from pathlib import Path

import pytest

from lightning_retrieval.datamodules.glyphs.drawing import GlyphImages, load_glyph_images


def test_fonts_that_draw_other_symbols_are_excluded(drawn_glyphs: GlyphImages) -> None:
    assert list(drawn_glyphs.font_names) == sorted(set(drawn_glyphs.font_names))
    assert {"DejaVuSans", "STIXGeneral", "cmr10"} <= set(drawn_glyphs.font_names)
    assert not [
        name for name in drawn_glyphs.font_names if name in {"cmex10", "cmmi10", "cmsy10"} or "LastResort" in name
    ]


@pytest.mark.refusal
def test_matplotlib_without_fonts_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(f"its fonts in {str(tmp_path / 'fonts' / 'ttf')!r}, got no")):
        load_glyph_images(tmp_path)
