"""Glyphs: the embedded data set, characters drawn from the fonts that matplotlib ships."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import Dataset

from lightning_retrieval.checks import check_choice
from lightning_retrieval.datamodules.base import RetrievalDataModule
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.glyphs.glyph_images import (
    GlyphImages,
    load_glyph_images,
    table_counts,
    table_differences,
)
from lightning_retrieval.datamodules.item_seeds import item_generator

# Largest change of an augmented glyph: turn and slant in radians, stretch and shift as shares of the image.
_TURN, _SLANT, _STRETCH, _SHIFT = 0.12, 0.15, 0.12, 0.05


class GlyphDataset(Dataset[dict[str, Any]]):
    """One split of the glyphs; items are dicts of `images` (channels, 32, 32) in [0, 1], `labels`, `ids`.

    Args:
        glyphs: all images.
        split: `"train"`, `"val"` or `"test"`.
        augment: turn, slant, stretch and shift each image a little, as its index's seed says.
        channels: 1, or 3 equal ones for networks that expect colour.

    Raises:
        ValueError: if `split` or `channels` is another.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.glyph_images import load_glyph_images
        >>> data = GlyphDataset(load_glyph_images(), "test")
        >>> item = data[0]
        >>> item["images"].shape, data.characters[item["labels"]], data.categories[item["labels"]]
        (torch.Size([1, 32, 32]), '$', 'DOLLAR')

    Relations:
        The id of an item is its index in this dataset. `characters[label]` and `categories[label]` name a class.
    """

    def __init__(
        self,
        glyphs: GlyphImages,
        split: Literal["train", "val", "test"],
        *,
        augment: bool = False,
        channels: Literal[1, 3] = 1,
    ) -> None:
        check_choice("GlyphDataset", "split", split, ("train", "val", "test"))
        self.channels = check_choice("GlyphDataset", "channels", channels, (1, 3))
        self.augment = augment
        chosen = glyphs.splits == split
        self.images = torch.from_numpy(glyphs.images[chosen])
        self.labels: Int[Tensor, " item"] = torch.from_numpy(glyphs.labels[chosen])
        self.characters = glyphs.characters
        self.categories = glyphs.categories

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """A whole batch at once, which the loader asks for: the images are transformed together."""
        ids = torch.tensor(indices)
        images = self.images[ids, None].float() / 255
        if self.augment:
            images = _augment(images, torch.stack([torch.rand(6, generator=item_generator(i)) for i in indices]))
        images = images.expand(-1, self.channels, -1, -1)
        return [{"images": x, "labels": y, "ids": i} for x, y, i in zip(images, self.labels[ids], ids)]


class Glyphs(RetrievalDataModule):
    """Characters in the fonts of matplotlib: about 33,000 images of about 3,400 classes, nothing to download.

    Training, validation and test have different characters. Every test image is a query, ranked against all others.
    The images are drawn once (some seconds) and kept in the user's cache folder.

    Args:
        classes_per_batch: P, the classes of a global batch.
        samples_per_class: K, the images of each, >= 2.
        eval_batch_size: images embedded at a time in evaluation, >= 1.
        num_workers: processes that load images, >= 0.
        seed: what the batches and the augmentation follow from; that of `seed_everything` where None.
        augment: turn, slant, stretch and shift the training images a little.
        channels: 1, or 3 equal ones for networks that expect colour.
        cache_dir: where the drawn images are kept; the user's cache folder where None.

    Raises:
        ValueError: if a number is out of its range.
        OSError: if the cache folder cannot be written.

    Example:
        >>> data = Glyphs(classes_per_batch=8, samples_per_class=4)
        >>> data.prepare_data()
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch["images"].shape, batch["labels"].unique().numel()
        (torch.Size([32, 1, 32, 32]), 8)
    """

    def __init__(
        self,
        classes_per_batch: int = 96,
        samples_per_class: int = 4,
        eval_batch_size: int = 512,
        num_workers: int = 0,
        seed: int | None = None,
        augment: bool = True,
        channels: Literal[1, 3] = 1,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            classes_per_batch=classes_per_batch,
            samples_per_class=samples_per_class,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.augment = augment
        self.channels = check_choice("Glyphs", "channels", channels, (1, 3))
        self.cache_dir = cache_dir

    def prepare_data(self) -> None:
        """Draw the images where the cache does not hold them."""
        load_glyph_images(self.cache_dir)

    @cached_property
    def train_set(self) -> GlyphDataset:
        return GlyphDataset(self._glyphs, "train", augment=self.augment, channels=self.channels)

    @cached_property
    def val_set(self) -> GlyphDataset:
        return GlyphDataset(self._glyphs, "val", channels=self.channels)

    @cached_property
    def test_set(self) -> GlyphDataset:
        return GlyphDataset(self._glyphs, "test", channels=self.channels)

    def check(self) -> DataReport:
        """Draw the images where the cache does not hold them; counts beside those that the classes' table has.

        Other versions of fonts and renderer draw other images, which the counts show; a font may be missing.
        """
        counted = super().check().splits
        report = DataReport({name: (found, [table_counts()[name]]) for name, (found, _) in counted.items()})
        missing, versions = table_differences(self._glyphs.font_names)
        return report if report.ok and not missing else DataReport(report.splits, missing, [versions])

    @cached_property
    def _glyphs(self) -> GlyphImages:
        return load_glyph_images(self.cache_dir)


def _augment(
    images: Float[Tensor, "batch 1 height width"], random: Float[Tensor, "batch 6"]
) -> Float[Tensor, "batch 1 height width"]:
    """An affine map of each image, from six numbers in [0, 1) for each."""
    turn, slant, stretch_x, stretch_y, shift_x, shift_y = (2 * random - 1).unbind(1)
    cos, sin = (_TURN * turn).cos(), (_TURN * turn).sin()
    # The map goes from the new image's coordinates, in [-1, 1], to the old one's.
    x = torch.stack([cos * (1 + _STRETCH * stretch_x), _SLANT * slant - sin, 2 * _SHIFT * shift_x], 1)
    y = torch.stack([sin, cos * (1 + _STRETCH * stretch_y), 2 * _SHIFT * shift_y], 1)
    grid = affine_grid(torch.stack([x, y], 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)
