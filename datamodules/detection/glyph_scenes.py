"""GlyphScenes: images with boxes around characters, drawn on demand, for detectors that train quickly."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import Dataset

from lightning_retrieval.arguments import NotNegativeInt, PositiveInt, Seed, Several, checked, integers, numbers
from lightning_retrieval.datamodules.base import check_no_unknown_arguments
from lightning_retrieval.datamodules.detection.boxes import DetectionDataModule, Item
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts
from lightning_retrieval.datamodules.image_check import DataReport

# The characters of the classes, in this order; all fonts below contain them, and no two characters look alike.
CHARACTERS = "AERSKMTX2458BGHNDFJLPQUWY3679bdefghkmnqrty"
DISTRACTORS = "?&#%@$!+=<>*"  # characters of no class, drawn as clutter


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
MAX_OVERLAP = 0.1  # largest overlap of the boxes of two objects, as a fraction of the smaller box
TRIES = 20  # number of positions that are tried for an object; if all overlap too much, the object is skipped
VISIBLE = 64  # the box of a character encloses all its pixels with this grey value or more
NOISE = 18.0  # standard deviation of the grey values
CONTRASTS = (25, 90)  # smallest and largest difference between the grey values of character and background


@dataclass(frozen=True)
class Scene:
    """A drawn scene."""

    pixels: UInt8[np.ndarray, "height width"]
    boxes: Float[np.ndarray, "object 4"]  # left, top, right, bottom in pixels
    labels: Int[np.ndarray, " object"]  # class numbers, counted from 1


@dataclass(frozen=True)
class SceneArtist:
    """Draws scenes. A scene depends only on these settings and the random generator.

    Args:
        image_size: height and width in pixels.
        num_classes: number of classes, which are the first characters of `CHARACTERS`.
        max_objects: maximum number of objects in a scene; the minimum is 1.
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
        """A font in one size; each pair of font and size is loaded only once."""
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
        """A random box of this size that overlaps each other box by at most `MAX_OVERLAP`; None if none was found."""
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
    """Area of the intersection of two boxes, as a fraction of the smaller box."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    smaller = min(_area(box), _area(other))
    return max(width, 0) * max(height, 0) / smaller


def _area(box: tuple[int, int, int, int]) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])


SPLITS = ("train", "val", "test")


class GlyphSceneSet(Dataset[Item]):
    """One split of the scenes. An item is a pair of an image and a target, a dict of `boxes`, `labels` and `image_id`.

    The image has shape (3, height, width) and values in [0, 1].

    Args:
        artist: draws the scenes.
        split: `"train"`, `"val"` or `"test"`; no scene is in two splits.
        size: number of scenes.
        scene_seed: a scene is a function of (scene_seed, split, index).
    """

    def __init__(
        self, artist: SceneArtist, split: Literal["train", "val", "test"], *, size: int, scene_seed: int
    ) -> None:
        self.split = checked(self, split=split)
        self.artist, self.size, self.scene_seed = artist, size, scene_seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.size:
            raise IndexError(f"GlyphSceneSet: has {self.size} scenes, got the index {index}.")
        generator = np.random.default_rng((self.scene_seed, SPLITS.index(self.split), int(index)))
        scene = self.artist.draw(generator)
        pixels: Tensor = torch.from_numpy(scene.pixels)
        image = (pixels.float() / 255).expand(3, -1, -1).contiguous()
        boxes, labels = torch.from_numpy(scene.boxes), torch.from_numpy(scene.labels)
        return image, {"boxes": boxes, "labels": labels, "image_id": torch.tensor(int(index))}


class GlyphScenes(DetectionDataModule):
    """Images of characters in ten of matplotlib's fonts and many sizes over clutter; nothing is downloaded.

    Scenes are drawn on demand, in a millisecond. A scene is a function of (scene_seed, split, index).

    Args:
        num_classes: number of characters, from 1 to 42.
        image_size: height and width in pixels, >= 64.
        max_objects: largest number of objects in a scene, >= 1; the smallest number is 1.
        frequency_exponent: class k is drawn with a probability proportional to 1 / k ** frequency_exponent, >= 0; 0
            gives all classes the same frequency.
        max_rotation: largest rotation of a character in degrees, >= 0.
        clutter: largest number of lines, arcs and characters of no class behind the objects, >= 0.
        train_size: number of training scenes, >= 2.
        eval_size: number of scenes in each of the validation and the test set, >= 1.
        scene_seed: an integer >= 0 that determines the scenes.
        batch_size: number of images in a global batch, >= 1, which is distributed over the processes.
        eval_batch_size: number of images at a time in evaluation, >= 1.
        num_workers: number of processes that draw scenes, >= 0.
        seed: seed that, together with the epoch, determines the batches. If None, the seed of `seed_everything` is
            used, or 0 if none was set.
        pin_memory: whether batches are copied to page-locked memory; if None, only if there is a GPU.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number has the wrong type.

    Example:
        >>> from lightning_retrieval.datamodules import GlyphScenes
        >>> data = GlyphScenes(num_classes=15, max_rotation=10.0)
        >>> image, target = data.test_set[3]
        >>> image.shape, "".join(data.class_names)
        (torch.Size([3, 112, 112]), 'AERSKMTX2458BGH')

    Relations:
        `Glyphs` has the same kind of images for retrieval. `PascalVOC` and `CocoDetection` read photographs.
    """

    def __init__(
        self,
        *,
        num_classes: Annotated[int, integers(1, len(CHARACTERS))] = 15,
        image_size: Annotated[int, integers(64)] = 112,
        max_objects: PositiveInt = 5,
        frequency_exponent: Annotated[float, numbers(0, 100)] = 0.9,
        max_rotation: Annotated[float, numbers(0, 180)] = 0.0,
        clutter: NotNegativeInt = 24,
        train_size: Several = 4000,
        eval_size: PositiveInt = 300,
        scene_seed: NotNegativeInt = 0,
        batch_size: int = 8,
        eval_batch_size: int = 20,
        num_workers: int = 0,
        seed: Seed | None = None,
        pin_memory: bool | None = None,
        **unknown: Any,
    ) -> None:
        check_no_unknown_arguments(type(self), unknown)
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            pin_memory=pin_memory,
        )
        self.num_classes = checked(self, num_classes=num_classes)
        self.image_size = checked(self, image_size=image_size)
        self.max_objects = checked(self, max_objects=max_objects)
        self.frequency_exponent = checked(self, frequency_exponent=frequency_exponent)
        self.max_rotation = checked(self, max_rotation=max_rotation)
        self.clutter = checked(self, clutter=clutter)
        self.train_size = checked(self, train_size=train_size)
        self.eval_size = checked(self, eval_size=eval_size)
        self.scene_seed = checked(self, scene_seed=scene_seed)

    @property
    def class_names(self) -> list[str]:
        """The characters of the classes 1, 2, ..."""
        return list(CHARACTERS[: self.num_classes])

    @cached_property
    def train_set(self) -> GlyphSceneSet:
        """The training scenes."""
        return GlyphSceneSet(self._artist, "train", size=self.train_size, scene_seed=self.scene_seed)

    @cached_property
    def val_set(self) -> GlyphSceneSet:
        """The scenes used to choose checkpoints."""
        return GlyphSceneSet(self._artist, "val", size=self.eval_size, scene_seed=self.scene_seed)

    @cached_property
    def test_set(self) -> GlyphSceneSet:
        """The scenes for which results are reported."""
        return GlyphSceneSet(self._artist, "test", size=self.eval_size, scene_seed=self.scene_seed)

    def check(self) -> DataReport:
        """Count the scenes and classes. There are no published counts to compare with."""
        report = DataReport()
        for name, size in (("train", self.train_size), ("val", self.eval_size), ("test", self.eval_size)):
            report.splits[name] = ((size, self.num_classes), ())
        return report

    @cached_property
    def _artist(self) -> SceneArtist:
        return SceneArtist(
            self.image_size,
            self.num_classes,
            self.max_objects,
            self.frequency_exponent,
            self.max_rotation,
            self.clutter,
        )
