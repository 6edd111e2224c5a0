"""The classes of the glyph images, which the table `glyph_classes.csv` lists, and the fonts that draw them.

A class is a character, or several characters that look alike. The table was made once, in these steps:

1. Take the letters, numbers, symbols and punctuation (Unicode categories L, N, S, P) that at least 6 of the fonts
   contain. The fonts LastResort (which draws boxes) and cmex10, cmsy10, cmmi10 (which draw other symbols at ASCII code
   points) are excluded.
2. Draw each character in each font that contains it; see `GlyphFonts`.
3. Two characters are in one class if their drawings are equal, pixel for pixel, in at least four fifths of the fonts
   that contain both. So Latin, Greek and Cyrillic O are one class. Classes with only one distinct drawing are dropped.
4. Half of the classes, chosen by a hash of the lowest code point, are for testing; a tenth of the other half is for
   validation. `tests/datamodules/glyphs/test_characters.py` has the hash.

The table ships with the package, so that classes and splits do not depend on versions of fonts and renderers.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np
import PIL
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont, features

from lightning_retrieval.datamodules.image_check import Count
from lightning_retrieval.invalid import MissingFile
from lightning_retrieval.optional_packages import optional_import

IMAGE_SIZE = 32  # pixels
FONT_SIZE = 22  # pixels
BASELINE = (IMAGE_SIZE // 2, 23)  # middle of the character's advance on the baseline, in pixels from the top left
EXCLUDED_FONTS = frozenset({"LastResortHE-Regular", "cmex10", "cmmi10", "cmsy10"})


class GlyphFonts:
    """The fonts that matplotlib ships, in the order of their names, without the excluded fonts.

    A font file is opened only when its characters are listed or drawn.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        FileNotFoundError: if matplotlib's installation has no fonts.
    """

    def __init__(self) -> None:
        with optional_import("The glyph images are drawn from matplotlib's fonts: pip install matplotlib."):
            import matplotlib
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        files = [path for path in folder.glob("*.ttf") if path.stem not in EXCLUDED_FONTS]
        if not files:
            rule = f"matplotlib {matplotlib.__version__} must have its fonts in {str(folder)!r}"
            cure = "install matplotlib from PyPI: pip install --force-reinstall matplotlib"
            raise MissingFile(rule, "load_glyph_images", got="no .ttf file there", cure=cure)
        self.files = sorted(files, key=attrgetter("stem"))
        self.names = tuple(path.stem for path in self.files)
        self.matplotlib_version = matplotlib.__version__

    @cached_property
    def code_points(self) -> list[set[int]]:
        """The code points that each font contains."""
        from matplotlib.ft2font import FT2Font

        found = []
        for file in self.files:
            found.append(set(FT2Font(str(file)).get_charmap()))
        return found

    def draw(self, code_point: int, font: int) -> UInt8[np.ndarray, "32 32"]:
        """Draw a character in the font at this position."""
        image = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE))
        ImageDraw.Draw(image).text(BASELINE, chr(code_point), fill=255, font=self._faces[font], anchor="ms")
        return np.asarray(image)

    def draw_visible(self, code_point: int, font: int) -> bytes | None:
        """The pixels of a character; None if the font does not contain it or draws nothing."""
        if code_point not in self.code_points[font]:
            return None
        pixels = self.draw(code_point, font)
        if not pixels.any():
            return None
        return pixels.tobytes()

    def versions(self) -> str:
        """The versions of the packages with which the images are drawn, for the table of classes and for messages."""
        freetype = features.version("freetype2")
        return f"matplotlib {self.matplotlib_version}, Pillow {PIL.__version__}, FreeType {freetype}"

    @cached_property
    def _faces(self) -> list[ImageFont.FreeTypeFont]:
        # The other layout engine draws some characters differently, and needs libraqm, which not every Pillow has.
        basic = ImageFont.Layout.BASIC
        faces = []
        for file in self.files:
            faces.append(ImageFont.truetype(str(file), FONT_SIZE, layout_engine=basic))
        return faces


TABLE = Path(__file__).with_name("glyph_classes.csv")
TABLE_FONTS = """
    DejaVuSans DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSans-Oblique DejaVuSansDisplay DejaVuSansMono
    DejaVuSansMono-Bold DejaVuSansMono-BoldOblique DejaVuSansMono-Oblique DejaVuSerif DejaVuSerif-Bold
    DejaVuSerif-BoldItalic DejaVuSerif-Italic DejaVuSerifDisplay STIXGeneral STIXGeneralBol STIXGeneralBolIta
    STIXGeneralItalic STIXNonUni STIXNonUniBol STIXNonUniBolIta STIXNonUniIta STIXSizFiveSymReg STIXSizFourSymBol
    STIXSizFourSymReg STIXSizOneSymBol STIXSizOneSymReg STIXSizThreeSymBol STIXSizThreeSymReg STIXSizTwoSymBol
    STIXSizTwoSymReg cmb10 cmr10 cmss10 cmti10 cmtt10
"""  # the fonts that the table was made with


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
    """The numbers of images and classes in each split when the table was made.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.characters import table_counts
        >>> table_counts()["val"]
        (1571, 169)
    """
    counts = {"train": (0, 0), "val": (0, 0), "test": (0, 0)}
    for row in read_class_table():
        images, classes = counts[row.split]
        counts[row.split] = (images + row.images, classes + 1)
    return counts


def table_differences(font_names: Sequence[str]) -> tuple[list[str], str]:
    """Return the table's fonts that `font_names` lacks, and a sentence with the installed and the table's versions."""
    made_with = TABLE.read_text(encoding="ascii").partition("\n")[0].removeprefix("# ")
    missing = [f"{name}.ttf" for name in TABLE_FONTS.split() if name not in font_names]
    return missing, f"drawn with {GlyphFonts().versions()}, the table's images with {made_with}"
