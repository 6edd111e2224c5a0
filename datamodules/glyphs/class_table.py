"""The classes of the glyph images, as the table `glyph_classes.csv` has them, and how that table was made.

A class is a character, or several that look alike. The steps:

1. Take the letters, numbers, symbols and punctuation (Unicode categories L, N, S, P) that at least 6 of the fonts
   contain, without the fonts LastResort (which draws boxes) and cmex10, cmsy10, cmmi10 (which draw other symbols at
   ASCII code points).
2. Draw each character in each font that contains it; see `fonts.py`.
3. Characters whose drawings are equal, pixel for pixel, in at least four fifths of the fonts that contain both are one
   class, such as Latin, Greek and Cyrillic O. Classes with only one distinct drawing are dropped.
4. Half of the classes, chosen by a hash of the lowest code point, are for testing; a tenth of the other half is for
   validation.

The result ships with the package, so that classes and splits are the same with all versions of fonts and renderers.
`make_class_table()` repeats the steps.
"""

import csv
import hashlib
import io
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from lightning_retrieval.datamodules.files.data_report import Count
from lightning_retrieval.datamodules.glyphs.fonts import GlyphFonts

MIN_FONTS = 6
TABLE = Path(__file__).with_name("glyph_classes.csv")
TABLE_HEADER = ("code_points", "category", "split", "images")
TABLE_FONTS = """
    DejaVuSans DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSans-Oblique DejaVuSansDisplay DejaVuSansMono
    DejaVuSansMono-Bold DejaVuSansMono-BoldOblique DejaVuSansMono-Oblique DejaVuSerif DejaVuSerif-Bold
    DejaVuSerif-BoldItalic DejaVuSerif-Italic DejaVuSerifDisplay STIXGeneral STIXGeneralBol STIXGeneralBolIta
    STIXGeneralItalic STIXNonUni STIXNonUniBol STIXNonUniBolIta STIXNonUniIta STIXSizFiveSymReg STIXSizFourSymBol
    STIXSizFourSymReg STIXSizOneSymBol STIXSizOneSymReg STIXSizThreeSymBol STIXSizThreeSymReg STIXSizTwoSymBol
    STIXSizTwoSymReg cmb10 cmr10 cmss10 cmti10 cmtt10
"""  # the fonts that the table was made with

_Drawings = dict[int, dict[int, bytes]]  # code point: {font: pixels}, without blank drawings


@dataclass(frozen=True)
class GlyphClass:
    """A class of the Glyphs dataset: one line of the class table.

    Args:
        characters: the characters of the class, lowest code point first.
        category: Unicode script of the first character, such as `"LATIN"`.
        split: `"train"`, `"val"` or `"test"`.
        images: number of images when the table was made.
    """

    characters: str
    category: str
    split: str
    images: int


def table_bytes() -> bytes:
    """The content of the table's file."""
    return TABLE.read_bytes()


def read_class_table() -> list[GlyphClass]:
    """The classes, in the order of their labels."""
    lines = TABLE.read_text(encoding="ascii").splitlines()
    classes = []
    for row in csv.DictReader(lines[1:]):
        characters = ""
        for code_point in row["code_points"].split():
            characters += chr(int(code_point.removeprefix("U+"), 16))
        classes.append(GlyphClass(characters, row["category"], row["split"], int(row["images"])))
    return classes


def table_counts() -> dict[str, Count]:
    """Images and classes of each split when the table was made.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.class_table import table_counts
        >>> table_counts()["val"]
        (1571, 169)
    """
    counts = {"train": (0, 0), "val": (0, 0), "test": (0, 0)}
    for row in read_class_table():
        images, classes = counts[row.split]
        counts[row.split] = (images + row.images, classes + 1)
    return counts


def table_differences(font_names: Sequence[str]) -> tuple[list[str], str]:
    """Return the table's fonts that are not among these, and a sentence about both versions of the renderer."""
    made_with = TABLE.read_text(encoding="ascii").partition("\n")[0].removeprefix("# ")
    missing = [f"{name}.ttf" for name in TABLE_FONTS.split() if name not in font_names]
    return missing, f"drawn with {GlyphFonts().versions()}, the table's images with {made_with}"


def split_of(code_point: int) -> str:
    """The split of the class whose lowest code point is `code_point`; it depends on nothing else.

    Args:
        code_point: a Unicode code point, >= 0.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.class_table import split_of
        >>> [split_of(ord(character)) for character in "AOa"]
        ['test', 'train', 'val']
    """
    digest = hashlib.sha256(str(code_point).encode("ascii")).digest()
    # Two independent numbers in [0, 2**64): the first chooses the test classes, the second the validation classes.
    half, tenth = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
    if 2 * half < 2**64:
        return "test"
    if 10 * tenth < 2**64:
        return "val"
    return "train"


def make_class_table() -> str:
    """Make the table of classes and splits from the installed fonts; return the text of `glyph_classes.csv`.

    Each class has a line, in the order of the labels: its code points, category, split, and number of images. The first
    line has the versions that the table was made with.

    Raises:
        FileNotFoundError: if matplotlib's installation has no fonts.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.class_table import make_class_table
        >>> print(make_class_table().splitlines()[1])
        code_points,category,split,images

    Cost:
        Some seconds, and 100 MB of memory for all drawings.
    """
    fonts = GlyphFonts()
    drawings = _draw_all(fonts, _candidates(fonts))
    text = io.StringIO()
    text.write(f"# {fonts.versions()}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TABLE_HEADER)
    for code_points in _merge_lookalikes(drawings):
        distinct = set[bytes]()
        for code_point in code_points:
            distinct.update(drawings[code_point].values())
        if len(distinct) >= 2:
            # Code points rather than characters, many of which look alike or are changed by editors.
            names = " ".join(f"U+{code_point:04X}" for code_point in code_points)
            category = unicodedata.name(chr(code_points[0])).split()[0]
            writer.writerow([names, category, split_of(code_points[0]), len(distinct)])
    return text.getvalue()


def _candidates(fonts: GlyphFonts) -> list[int]:
    """The letters, numbers, symbols and punctuation that enough fonts contain."""
    num_fonts = Counter[int]()
    for code_points in fonts.code_points:
        num_fonts.update(code_points)
    candidates = []
    for code_point, count in num_fonts.items():
        if count >= MIN_FONTS and unicodedata.category(chr(code_point))[0] in "LNSP":
            candidates.append(code_point)
    return sorted(candidates)


def _draw_all(fonts: GlyphFonts, code_points: Sequence[int]) -> _Drawings:
    drawings: _Drawings = {}
    for code_point in code_points:
        drawings[code_point] = {}
        for font in range(len(fonts.names)):
            pixels = fonts.draw_visible(code_point, font)
            if pixels is not None:
                drawings[code_point][font] = pixels
    return drawings


def _merge_lookalikes(drawings: _Drawings) -> list[list[int]]:
    """The code points of each class, by their lowest code point."""
    group_of: dict[int, list[int]] = {}
    for code_point in drawings:
        group_of[code_point] = [code_point]
    for (first, second), num_equal in _num_equal_drawings(drawings).items():
        num_shared = len(drawings[first].keys() & drawings[second].keys())
        if 5 * num_equal >= 4 * num_shared and group_of[first] is not group_of[second]:
            merged = sorted(group_of[first] + group_of[second])
            group_of.update(dict.fromkeys(merged, merged))
    return [group for code_point, group in group_of.items() if code_point == group[0]]


def _num_equal_drawings(drawings: _Drawings) -> Counter[tuple[int, int]]:
    """The number of fonts in which two code points have equal drawings, for each pair with at least one."""
    code_points_of: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for code_point, of_font in drawings.items():
        for font, pixels in of_font.items():
            code_points_of[font, pixels].append(code_point)
    num_equal = Counter[tuple[int, int]]()
    for code_points in code_points_of.values():
        num_equal.update(combinations(code_points, 2))
    return num_equal
