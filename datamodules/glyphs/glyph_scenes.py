"""GlyphScenes: images with boxes around characters, drawn when they are needed, for detectors that train quickly."""

from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_retrieval.checks import check_choice, check_integer, check_not_negative
from lightning_retrieval.datamodules.arguments import refuse_unknown_arguments
from lightning_retrieval.datamodules.boxes.box_module import DetectionDataModule
from lightning_retrieval.datamodules.boxes.box_set import Item
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.glyphs.scene_drawing import CHARACTERS, SceneArtist

SPLITS = ("train", "val", "test")


class GlyphSceneSet(Dataset[Item]):
    """One split: pairs of an image (3, height, width) in [0, 1] and a target of `boxes`, `labels` and `image_id`.

    Args:
        artist: draws the scenes.
        split: `"train"`, `"val"` or `"test"`; each has scenes of its own.
        size: number of scenes.
        scene_seed: a scene is a function of (scene_seed, split, index).
    """

    def __init__(
        self, artist: SceneArtist, split: Literal["train", "val", "test"], *, size: int, scene_seed: int
    ) -> None:
        check_choice("GlyphSceneSet", "split", split, SPLITS)
        self.artist, self.split, self.size, self.scene_seed = artist, split, size, scene_seed

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
    """Scenes of characters in ten of matplotlib's fonts and in many sizes over clutter, without a download.

    Scenes are drawn when they are needed, in a millisecond. A scene is a function of (scene_seed, split, index).

    Args:
        num_classes: number of characters, from 1 to 42.
        image_size: height and width in pixels, >= 64.
        max_objects: a scene has 1 to this many objects, >= 1.
        frequency_exponent: class k is drawn with a probability proportional to 1 / k ** frequency_exponent, >= 0; 0
            gives all classes the same frequency.
        max_rotation: largest rotation of a character in degrees, >= 0.
        clutter: largest number of lines, arcs and characters of no class behind the objects, >= 0.
        train_size: number of training scenes, >= 2.
        eval_size: number of scenes for validation and for the test, each, >= 1.
        scene_seed: an integer >= 0, determines the scenes.
        batch_size: number of images in a global batch, >= 1, which the processes share.
        eval_batch_size: number of images at a time in evaluation, >= 1.
        num_workers: number of processes that draw scenes, >= 0.
        seed: determines the batches, together with the epoch; if None, the seed of `seed_everything`, else 0.
        pin_memory: whether batches are copied to page-locked memory; if None, only if there is a GPU.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if a number has another type.

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
        num_classes: int = 15,
        image_size: int = 112,
        max_objects: int = 5,
        frequency_exponent: float = 0.9,
        max_rotation: float = 0.0,
        clutter: int = 24,
        train_size: int = 4000,
        eval_size: int = 300,
        scene_seed: int = 0,
        batch_size: int = 8,
        eval_batch_size: int = 20,
        num_workers: int = 0,
        seed: int | None = None,
        pin_memory: bool | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown_arguments(type(self), unknown)
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            pin_memory=pin_memory,
        )
        owner = "GlyphScenes"
        self.num_classes = check_integer(owner, "num_classes", num_classes, least=1, most=len(CHARACTERS))
        self.image_size = check_integer(owner, "image_size", image_size, least=64)
        self.max_objects = check_integer(owner, "max_objects", max_objects, least=1)
        self.frequency_exponent = check_not_negative(owner, "frequency_exponent", frequency_exponent, most=100)
        self.max_rotation = check_not_negative(owner, "max_rotation", max_rotation, most=180)
        self.clutter = check_integer(owner, "clutter", clutter, least=0)
        self.train_size = check_integer(owner, "train_size", train_size, least=2)
        self.eval_size = check_integer(owner, "eval_size", eval_size, least=1)
        self.scene_seed = check_integer(owner, "scene_seed", scene_seed, least=0)

    @property
    def class_names(self) -> list[str]:
        """The characters."""
        return list(CHARACTERS[: self.num_classes])

    @cached_property
    def train_set(self) -> GlyphSceneSet:
        """The training scenes."""
        return GlyphSceneSet(self._artist, "train", size=self.train_size, scene_seed=self.scene_seed)

    @cached_property
    def val_set(self) -> GlyphSceneSet:
        """The scenes on which checkpoints are chosen."""
        return GlyphSceneSet(self._artist, "val", size=self.eval_size, scene_seed=self.scene_seed)

    @cached_property
    def test_set(self) -> GlyphSceneSet:
        """The scenes for which results are reported."""
        return GlyphSceneSet(self._artist, "test", size=self.eval_size, scene_seed=self.scene_seed)

    def check(self) -> DataReport:
        """Count the scenes and classes; there is nothing published to compare them with."""
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
