"""The data module, the dataset and the augmentation of Glyphs, the built-in data set."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import grid_sample
from torch.utils.data import Dataset

from lightning_retrieval.arguments import Seed, checked
from lightning_retrieval.checks import check_strings
from lightning_retrieval.datamodules.base import RetrievalDataModule, check_no_unknown_arguments
from lightning_retrieval.datamodules.glyphs.characters import table_counts, table_differences
from lightning_retrieval.datamodules.glyphs.drawing import GlyphImages, load_glyph_images
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.item_seeds import item_generator
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.paths import check_path
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import serialise_transform

# Maximum augmentation: rotation and shear in radians, scaling and shift as fractions of the image.
MAX_ROTATION, MAX_SHEAR, MAX_SCALING, MAX_SHIFT = 0.12, 0.15, 0.12, 0.05


class GlyphDataset(Dataset[dict[str, Any]]):
    """One split of the glyphs; items are dicts of `images` (channels, 32, 32) in [0, 1], `labels` and `ids`.

    Args:
        glyphs: all images.
        split: `"train"`, `"val"` or `"test"`.
        augment: whether each image is slightly rotated, sheared, scaled and shifted, by random numbers from the seed of
            its index.
        channels: number of channels: 1, or 3 equal channels for networks that expect colour images.

    Raises:
        ValueError: if `split` or `channels` has another value.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
        >>> data = GlyphDataset(load_glyph_images(), "test")
        >>> item = data[0]
        >>> item["images"].shape, data.characters[item["labels"]], data.categories[item["labels"]]
        (torch.Size([1, 32, 32]), '$', 'DOLLAR')

    Relations:
        The id of an item is its index in this dataset. `characters[label]` and `categories[label]` describe a class.
    """

    def __init__(
        self,
        glyphs: GlyphImages,
        split: Literal["train", "val", "test"],
        *,
        augment: bool = False,
        channels: Literal[1, 3] = 1,
    ) -> None:
        checked(self, split=split)
        self.channels = checked(self, channels=channels)
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
        """The items of a batch, whose images are transformed together. Data loaders call this method."""
        ids = torch.tensor(indices)
        images = self.images[ids, None].float() / 255
        if self.augment:
            images = random_affine(images, torch.stack([torch.rand(6, generator=item_generator(i)) for i in indices]))
        images = images.expand(-1, self.channels, -1, -1)
        return [{"images": x, "labels": y, "ids": i} for x, y, i in zip(images, self.labels[ids], ids)]


class Glyphs(RetrievalDataModule):
    """Characters in the fonts of matplotlib: about 33,000 images of about 3,400 classes, without a download.

    Training, validation and test set have different characters. In the test, each image is a query, and all other test
    images are its gallery. The images are drawn once (some seconds) and cached in the user's cache folder.

    Args:
        classes_per_batch: P, number of classes in a global batch.
        samples_per_class: K, number of images of each of these classes, >= 2.
        eval_batch_size: number of images that are embedded at a time in evaluation, >= 1.
        num_workers: number of processes that load images, >= 0.
        seed: seed of the batches and the augmentation. If None, the seed of `seed_everything` is used, or 0 if none was
            set.
        augment: whether the training images are slightly rotated, sheared, scaled and shifted.
        channels: number of channels: 1, or 3 equal channels for networks that expect colour images.
        fonts: names of matplotlib's fonts whose images are used, such as DejaVuSans; None means all fonts. Fonts with
            the same drawing of a character share an image, which belongs to the first of them.
        cache_dir: folder in which the drawn images are cached; if None, the user's cache folder.

    Raises:
        ValueError: if a number is out of its range, or `fonts` is empty; when the images are loaded, if a font is not
            installed.
        TypeError: if a number is not an integer, or `fonts` is a single string.
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
        *,
        classes_per_batch: int = 96,
        samples_per_class: int = 4,
        eval_batch_size: int = 512,
        num_workers: int = 0,
        seed: Seed | None = None,
        augment: bool = True,
        channels: Literal[1, 3] = 1,
        fonts: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
        **unknown: Any,
    ) -> None:
        check_no_unknown_arguments(type(self), unknown)
        super().__init__(
            classes_per_batch=classes_per_batch,
            samples_per_class=samples_per_class,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.augment = augment
        self.channels = checked(self, channels=channels)
        self.fonts: tuple[str, ...] | None = None
        if fonts is not None:
            check_strings("fonts", fonts, owner="Glyphs")
            self.fonts = tuple(fonts)
            if not self.fonts:
                rule = "must hold at least one name"
                raise InvalidValue(rule, "Glyphs", "fonts", got="[]", cure="None means all fonts")
        if cache_dir is not None:
            check_path("cache_dir", cache_dir, owner="Glyphs")
        self.cache_dir = cache_dir

    def prepare_data(self) -> None:
        """Draw the images if they are not in the cache."""
        load_glyph_images(self.cache_dir)

    @property
    def preparation(self) -> Preparation:
        """The preparation that converts image files to images like those of this data set."""
        grey = Preparation.named("glyphs")
        if self.channels == 1:
            return grey
        return dataclasses.replace(grey, channels=3, mean=(0.0,) * 3, std=(1.0,) * 3)

    @property
    def serialised_preparation(self) -> dict[str, Any]:
        """The preparation as plain data, for checkpoints."""
        return serialise_transform(self.preparation)

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
        """Compare the counts of images and classes with the table of classes, and look for missing fonts.

        The images are drawn if they are not in the cache. Counts may differ with other versions of fonts and renderer.
        With `fonts`, the counts are not compared.
        """
        if self.fonts is not None:
            return super().check()
        report = DataReport()
        counts_of_table = table_counts()
        for split, (counts, _) in super().check().splits.items():
            report.splits[split] = (counts, [counts_of_table[split]])
        missing_fonts, versions = table_differences(self._glyphs.font_names)
        if missing_fonts or not report.ok:
            report.missing_files = missing_fonts
            report.problems = [versions]
        return report

    @cached_property
    def _glyphs(self) -> GlyphImages:
        glyphs = load_glyph_images(self.cache_dir)
        if self.fonts is None:
            return glyphs
        return glyphs.of_fonts(self.fonts)


def random_affine(
    images: Float[Tensor, "batch channel height width"], random: Float[Tensor, "batch 6"]
) -> Float[Tensor, "batch channel height width"]:
    """Transform each image by an affine map given by six random numbers in [0, 1); pixels from outside are 0."""
    rotation, shear, scaling_x, scaling_y, shift_x, shift_y = (2 * random - 1).unbind(1)
    cos, sin = (MAX_ROTATION * rotation).cos(), (MAX_ROTATION * rotation).sin()
    # The affine map takes coordinates of the new image, in [-1, 1], to coordinates of the old image.
    row_x = torch.stack([cos * (1 + MAX_SCALING * scaling_x), MAX_SHEAR * shear - sin, 2 * MAX_SHIFT * shift_x], 1)
    row_y = torch.stack([sin, cos * (1 + MAX_SCALING * scaling_y), 2 * MAX_SHIFT * shift_y], 1)
    maps = torch.stack([row_x, row_y], 1)  # (batch, 2, 3)
    return grid_sample(images, _affine_grid(maps, *images.shape[-2:]), align_corners=False)


def _affine_grid(maps: Float[Tensor, "batch 2 3"], height: int, width: int) -> Float[Tensor, "batch height width 2"]:
    """The same as `torch.nn.functional.affine_grid` with `align_corners=False`, whose many small products are slow."""
    x = maps[:, :, 0, None] * _pixel_centres(width, maps)
    y = maps[:, :, 1, None] * _pixel_centres(height, maps)
    grid = x[:, :, None, :] + y[:, :, :, None] + maps[:, :, 2, None, None]  # (batch, 2, height, width)
    return grid.permute(0, 2, 3, 1)


def _pixel_centres(size: int, like: Tensor) -> Float[Tensor, " size"]:
    return torch.linspace(-1, 1, size, dtype=like.dtype, device=like.device) * (size - 1) / size
