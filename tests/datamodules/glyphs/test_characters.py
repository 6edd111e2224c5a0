"""The fonts and the table of glyph classes: it is what the fonts give, and its classes and splits are as described."""

import hashlib
import re
import unicodedata

import numpy as np
import pytest

from lightning_retrieval.datamodules.glyphs import characters as class_table
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts, make_class_table, split_of
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images


def test_fonts_that_draw_other_symbols_are_excluded(drawn_glyphs):
    assert list(drawn_glyphs.font_names) == sorted(set(drawn_glyphs.font_names))
    assert {"DejaVuSans", "STIXGeneral", "cmr10"} <= set(drawn_glyphs.font_names)
    assert not [
        name for name in drawn_glyphs.font_names if name in {"cmex10", "cmmi10", "cmsy10"} or "LastResort" in name
    ]


@pytest.mark.refusal
def test_matplotlib_without_fonts_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(f"its fonts in {str(tmp_path / 'fonts' / 'ttf')!r}, got no")):
        load_glyph_images(tmp_path)


def test_letters_that_look_the_same_are_one_class_and_others_are_not(drawn_glyphs):
    label = {character: index for index, characters in enumerate(drawn_glyphs.characters) for character in characters}
    assert len(label) == sum(map(len, drawn_glyphs.characters))  # no character is in two classes
    assert drawn_glyphs.characters[label["O"]] == "O\u039f\u041e"  # Latin, Greek and Cyrillic
    assert len({label[character] for character in "lI1|oO0,'`"}) == 10


def test_characters_are_letters_numbers_symbols_and_punctuation(drawn_glyphs):
    assert {
        unicodedata.category(character)[0] for characters in drawn_glyphs.characters for character in characters
    } == set("LNSP")
    for characters, category in zip(drawn_glyphs.characters, drawn_glyphs.categories, strict=True):
        assert unicodedata.name(characters[0]).split()[0] == category
    assert {"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "BRAILLE"} <= set(drawn_glyphs.categories)


def test_splits_have_whole_classes_in_the_promised_fractions(drawn_glyphs):
    classes = {
        split: set(drawn_glyphs.labels[drawn_glyphs.splits == split].tolist()) for split in ("train", "val", "test")
    }
    assert sum(map(len, classes.values())) == len(drawn_glyphs.characters)
    assert set().union(*classes.values()) == set(range(len(drawn_glyphs.characters)))
    # Three standard deviations of a fair draw.
    assert len(classes["test"]) == pytest.approx(0.5 * 3435, abs=90)
    assert len(classes["val"]) == pytest.approx(0.05 * 3435, abs=39)


def test_split_is_a_function_of_the_code_point_alone(drawn_glyphs):
    # Written out again, so that a change of `split_of` is seen: the splits must never change.
    for label, split in set(zip(drawn_glyphs.labels.tolist(), drawn_glyphs.splits.tolist(), strict=True)):
        code_point = min(map(ord, drawn_glyphs.characters[label]))
        digits = hashlib.sha256(b"%d" % code_point).hexdigest()
        tenth = int(digits[16:32], 16) / 16**16
        expected = "test" if digits[0] < "8" else "val" if tenth < 0.1 else "train"
        assert split == split_of(code_point) == expected


def test_the_shipped_table_is_what_the_fonts_give(drawn_glyphs):
    shipped = class_table.TABLE.read_text(encoding="ascii")
    made_with = shipped.splitlines()[0].removeprefix("# ")
    installed = GlyphFonts().versions()
    if made_with != installed:
        pytest.skip(f"the table was made with {made_with}; installed are {installed}")
    assert make_class_table() == shipped
    assert [int(line.split(",")[3]) for line in shipped.splitlines()[2:]] == np.bincount(drawn_glyphs.labels).tolist()


def test_merging_counts_the_fonts_that_contain_both():
    a, b, c = b"a", b"b", b"c"
    drawings = {
        1: dict.fromkeys(range(10), a),
        2: dict.fromkeys(range(5, 9), a) | {9: b},  # agrees in 4 of 5 shared fonts
        3: dict.fromkeys(range(7), a) | dict.fromkeys((7, 8), c),  # 7 of 9 with 1: too few; 2 of 4 with 2
        4: {9: b, 20: c},  # 1 of 1 with 2, none with 1: joined through 2
        5: {},
    }
    assert class_table._merge_lookalikes(drawings) == [[1, 2, 4], [3], [5]]
