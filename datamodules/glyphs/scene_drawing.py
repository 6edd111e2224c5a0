"""How a scene of GlyphScenes is drawn: characters of several fonts and sizes over clutter, with their boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageDraw, ImageFont

from lightning_retrieval.datamodules.glyphs.fonts import GlyphFonts

# The characters of the classes, in this order; all fonts below contain them, and no two look alike.
CHARACTERS = "AERSKMTX2458BGHNDFJLPQUWY3679bdefghkmnqrty"
DISTRACTORS = "?&#%@$!+=<>*"  # characters of no class, which are clutter
FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmss10",
)
FONT_SIZES = (16, 38)  # smallest and largest, in pixels
MAX_OVERLAP = 0.1  # of the box of an object with that of another, as a fraction of the smaller
TRIES = 20  # positions that are tried for an object, which is skipped if all overlap with another
VISIBLE = 64  # grey value of a drawn character from which a pixel belongs to its box
NOISE = 18.0  # standard deviation of the grey values
CONTRASTS = (25, 90)  # smallest and largest difference of a character from the background


@dataclass(frozen=True)
class Scene:
    """A drawn scene."""

    pixels: UInt8[np.ndarray, "height width"]
    boxes: Float[np.ndarray, "object 4"]  # x1, y1, x2, y2 in pixels
    labels: Int[np.ndarray, " object"]  # from 1


@dataclass(frozen=True)
class SceneArtist:
    """Draws scenes, each a function of the random generator alone.

    Args:
        image_size: height and width in pixels.
        num_classes: number of characters, the first ones of `CHARACTERS`.
        max_objects: a scene has 1 to this many objects.
        frequency_exponent: class k is drawn with a probability proportional to 1 / k ** frequency_exponent.
        max_rotation: largest rotation of a character in degrees, to both sides.
        clutter: largest number of lines, arcs and characters of no class behind the objects.
    """

    image_size: int
    num_classes: int
    max_objects: int
    frequency_exponent: float
    max_rotation: float
    clutter: int

    def draw(self, generator: np.random.Generator) -> Scene:
        """Draw one scene."""
        size = self.image_size
        background = int(generator.integers(40, 110))
        image = Image.new("L", (size, size), background)
        for _ in range(generator.integers(0, self.clutter + 1)):
            self._draw_clutter(image, background, generator)
        boxes: list[tuple[int, int, int, int]] = []
        labels: list[int] = []
        for _ in range(generator.integers(1, self.max_objects + 1)):
            label = int(generator.choice(self.num_classes, p=self._probabilities))
            mask = self._draw_character(CHARACTERS[label], generator)
            box = self._free_box(mask.size, boxes, generator)
            if box is not None:
                image.paste(background + int(generator.integers(*CONTRASTS)), box, mask)
                boxes.append(box)
                labels.append(label + 1)
        noise = generator.normal(0, NOISE, (size, size))
        pixels = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
        return Scene(pixels, np.array(boxes, np.float32).reshape(-1, 4), np.array(labels, np.int64))

    @cached_property
    def _probabilities(self) -> Float[np.ndarray, " class"]:
        weights = 1 / np.arange(1, self.num_classes + 1) ** self.frequency_exponent
        probabilities: Float[np.ndarray, " class"] = weights / weights.sum()
        return probabilities

    @cached_property
    def _faces(self) -> dict[tuple[str, int], ImageFont.FreeTypeFont]:
        return {}

    @cached_property
    def _files(self) -> dict[str, str]:
        fonts = GlyphFonts()
        return {name: str(file) for name, file in zip(fonts.names, fonts.files)}

    def _face(self, name: str, size: int) -> ImageFont.FreeTypeFont:
        """A font in one size, which is loaded once."""
        if (name, size) not in self._faces:
            basic = ImageFont.Layout.BASIC
            self._faces[name, size] = ImageFont.truetype(self._files[name], size, layout_engine=basic)
        return self._faces[name, size]

    def _draw_character(self, character: str, generator: np.random.Generator) -> Image.Image:
        """A character in a random font, size and rotation, cut to its visible pixels."""
        name = FONTS[generator.integers(len(FONTS))]
        size = int(generator.integers(FONT_SIZES[0], FONT_SIZES[1] + 1))
        canvas = Image.new("L", (2 * size, 2 * size))
        ImageDraw.Draw(canvas).text((size, size), character, fill=255, font=self._face(name, size), anchor="mm")
        angle = generator.uniform(-self.max_rotation, self.max_rotation)
        if angle != 0:
            canvas = canvas.rotate(angle, Image.Resampling.BILINEAR)
        return canvas.crop(canvas.point(_is_visible).getbbox())

    def _free_box(
        self, extent: tuple[int, int], boxes: Sequence[tuple[int, int, int, int]], generator: np.random.Generator
    ) -> tuple[int, int, int, int] | None:
        """A random box of this width and height that hardly overlaps with the others; None if none was found."""
        width, height = extent
        for _ in range(TRIES):
            left = int(generator.integers(0, self.image_size - width + 1))
            top = int(generator.integers(0, self.image_size - height + 1))
            box = (left, top, left + width, top + height)
            if all(_overlap(box, other) <= MAX_OVERLAP for other in boxes):
                return box
        return None

    def _draw_clutter(self, image: Image.Image, background: int, generator: np.random.Generator) -> None:
        """Draw a line, an arc, or a character of no class."""
        left, top = generator.integers(-10, self.image_size - 10, 2).tolist()
        width, height = generator.integers(10, 60, 2).tolist()
        fill = background + int(generator.integers(*CONTRASTS))
        thickness = int(generator.integers(1, 4))
        box = (left, top, left + width, top + height)
        kind = generator.integers(3)
        if kind == 0:
            ImageDraw.Draw(image).line(box, fill, thickness)
        elif kind == 1:
            start = int(generator.integers(0, 360))
            ImageDraw.Draw(image).arc(box, start, start + int(generator.integers(45, 200)), fill, thickness)
        else:
            mask = self._draw_character(DISTRACTORS[generator.integers(len(DISTRACTORS))], generator)
            image.paste(fill, (left, top), mask)


def _is_visible(value: int) -> int:
    return 255 * (value >= VISIBLE)


def _overlap(box: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> float:
    """Area that two boxes share, as a fraction of the smaller one."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    smaller = min(_area(box), _area(other))
    return max(width, 0) * max(height, 0) / smaller


def _area(box: tuple[int, int, int, int]) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])
