"""The fonts of the glyph images: which characters they contain, and how a character is drawn."""

from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np
import PIL
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont, features

from lightning_retrieval.optional_packages import optional_import

IMAGE_SIZE = 32  # pixels
FONT_SIZE = 22  # pixels
BASELINE = (IMAGE_SIZE // 2, 23)  # where the middle of a character's advance is, in pixels from the top left corner
EXCLUDED_FONTS = frozenset({"LastResortHE-Regular", "cmex10", "cmmi10", "cmsy10"})


class GlyphFonts:
    """The fonts that matplotlib ships, in the order of their names, without the excluded ones.

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
            raise FileNotFoundError(
                f"load_glyph_images: matplotlib {matplotlib.__version__} must have its fonts in {str(folder)!r}, got "
                "no .ttf file there; install matplotlib from PyPI: pip install --force-reinstall matplotlib."
            )
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
        """The versions of what determines the images, for the table of classes and for messages."""
        freetype = features.version("freetype2")
        return f"matplotlib {self.matplotlib_version}, Pillow {PIL.__version__}, FreeType {freetype}"

    @cached_property
    def _faces(self) -> list[ImageFont.FreeTypeFont]:
        # The other layout engine needs libraqm, which not every Pillow has, and shapes some characters differently.
        basic = ImageFont.Layout.BASIC
        faces = []
        for file in self.files:
            faces.append(ImageFont.truetype(str(file), FONT_SIZE, layout_engine=basic))
        return faces
