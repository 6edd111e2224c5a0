"""The glyph classes and their splits are as described."""

import hashlib
import unicodedata

import pytest


def test_fonts_that_draw_other_symbols_are_excluded(drawn_glyphs):
    names = drawn_glyphs.font_names
    assert list(names) == sorted(set(names))
    assert {"DejaVuSans", "STIXGeneral", "cmr10"} <= set(names)
    assert not [name for name in names if name in {"cmex10", "cmmi10", "cmsy10"} or "LastResort" in name]


def test_letters_that_look_the_same_are_one_class_and_others_are_not(drawn_glyphs):
    label = {character: index for index, characters in enumerate(drawn_glyphs.characters) for character in characters}
    assert len(label) == sum(map(len, drawn_glyphs.characters))  # no character is in two classes
    assert drawn_glyphs.characters[label["O"]] == "O\u039f\u041e"  # Latin, Greek and Cyrillic
    assert len({label[character] for character in "lI1|oO0,'`"}) == 10


def test_categories_are_scripts(drawn_glyphs):
    for characters, category in zip(drawn_glyphs.characters, drawn_glyphs.categories, strict=True):
        assert unicodedata.name(characters[0]).split()[0] == category
    assert {"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "BRAILLE"} <= set(drawn_glyphs.categories)


def test_splits_are_a_function_of_the_code_point_in_the_promised_fractions(drawn_glyphs):
    """Written out again, so that a change is seen: the splits must never change."""
    classes = {"train": set(), "val": set(), "test": set()}
    for label, split in set(zip(drawn_glyphs.labels.tolist(), drawn_glyphs.splits.tolist(), strict=True)):
        code_point = min(map(ord, drawn_glyphs.characters[label]))
        digits = hashlib.sha256(b"%d" % code_point).hexdigest()
        tenth = int(digits[16:32], 16) / 16**16
        assert split == ("test" if digits[0] < "8" else "val" if tenth < 0.1 else "train")
        classes[split].add(label)
    assert set().union(*classes.values()) == set(range(len(drawn_glyphs.characters)))
    # Three standard deviations of a fair draw.
    assert len(classes["test"]) == pytest.approx(0.5 * 3435, abs=90)
    assert len(classes["val"]) == pytest.approx(0.05 * 3435, abs=39)
