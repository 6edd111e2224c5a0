"""Glyphs: its splits, its augmentation, and the check of its counts."""

import csv
import math
import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from torch.nn.functional import affine_grid, grid_sample

from lightning_retrieval.datamodules import GlyphDataset, Glyphs
from lightning_retrieval.datamodules.glyphs import characters
from lightning_retrieval.datamodules.glyphs.glyphs import (
    MAX_ROTATION,
    MAX_SCALING,
    MAX_SHEAR,
    MAX_SHIFT,
    random_affine,
)
from lightning_retrieval.datamodules.item_seeds import SeededIndex


def test_augmentation_is_a_function_of_seed_epoch_and_position():
    def first_batch(seed, epoch):
        loader = Glyphs(classes_per_batch=5, samples_per_class=3, seed=seed).train_dataloader()
        loader.set_epoch(epoch)
        return next(iter(loader))

    first = first_batch(3, 4)
    torch.manual_seed(2)
    again = first_batch(3, 4)
    assert all(torch.equal(first[name], again[name]) for name in ("images", "labels", "ids"))
    for other in (first_batch(3, 5), first_batch(4, 4)):
        assert not torch.equal(first["ids"], other["ids"])
    dataset = Glyphs(seed=3).train_set
    drawn = [dataset[SeededIndex(7, seed)]["images"] for seed in (1, 2, 1)]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_augmentation_changes_each_image_a_little_and_independently(drawn_glyphs):
    plain, augmented = GlyphDataset(drawn_glyphs, "train"), GlyphDataset(drawn_glyphs, "train", augment=True)
    indices = [SeededIndex(i, seed=100 + i) for i in range(0, 400, 10)]
    together = torch.stack([item["images"] for item in augmented.__getitems__(indices)])
    alone = torch.stack([augmented[index]["images"] for index in indices])
    still = torch.stack([plain[index]["images"] for index in indices])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    assert (together.min(), together.max()) >= (0, 0.5)
    assert together.max() <= 1
    assert ((together - still).abs().amax((1, 2, 3)) > 0.05).all()
    ink = together.sum((1, 2, 3)) / still.sum((1, 2, 3))
    assert 0.7 < ink.min() < ink.max() < 1.4  # the character stays inside the image


def test_each_image_is_moved_by_the_affine_map_of_its_random_numbers():
    images, random = torch.rand(5, 1, 24, 32), torch.rand(5, 6)
    maps = []
    for row in (2 * random.double() - 1).tolist():
        rotation, shear, scaling_x, scaling_y, shift_x, shift_y = row
        cos, sin = math.cos(MAX_ROTATION * rotation), math.sin(MAX_ROTATION * rotation)
        row_x = [cos * (1 + MAX_SCALING * scaling_x), MAX_SHEAR * shear - sin, 2 * MAX_SHIFT * shift_x]
        maps.append([row_x, [sin, cos * (1 + MAX_SCALING * scaling_y), 2 * MAX_SHIFT * shift_y]])
    grid = affine_grid(torch.tensor(maps), list(images.shape), align_corners=False)
    expected = grid_sample(images, grid, align_corners=False)
    torch.testing.assert_close(random_affine(images, random), expected, rtol=0, atol=1e-4)


def test_evaluation_sets_have_the_images_as_drawn_in_order(drawn_glyphs):
    data = Glyphs(eval_batch_size=300)
    for name, loader in {"val": data.val_dataloader(), "test": data.test_dataloader()}.items():
        chosen = drawn_glyphs.splits == name
        batch = next(iter(loader))
        assert torch.equal(batch["images"][:, 0], torch.from_numpy(drawn_glyphs.images[chosen][:300]).float() / 255)
        assert batch["labels"].tolist() == drawn_glyphs.labels[chosen][:300].tolist()
        assert batch["ids"].tolist() == list(range(300))
        assert len(loader.dataset) == chosen.sum()
        again = loader.dataset[SeededIndex(5, seed=9)]["images"]  # a seed has no effect here
        assert torch.equal(again, batch["images"][5])
    assert data.predict_dataloader().dataset is data.test_set


def test_three_channels_are_equal():
    data = Glyphs(classes_per_batch=3, samples_per_class=2, channels=3)
    batch = next(iter(data.train_dataloader()))
    assert batch["images"].shape == (6, 3, 32, 32)
    assert torch.equal(batch["images"][:, 0], batch["images"][:, 2])


def test_augmentation_can_be_turned_off(drawn_glyphs):
    dataset = Glyphs(augment=False).train_set
    image = torch.from_numpy(drawn_glyphs.images[drawn_glyphs.splits == "train"][3]).float() / 255
    assert torch.equal(dataset[SeededIndex(3, seed=1)]["images"][0], image)


def test_a_data_module_has_the_images_of_its_fonts_in_order(drawn_glyphs):
    fonts = ["DejaVuSerif", "DejaVuSans-Bold"]
    found = Glyphs(fonts=fonts, augment=False)
    for split, dataset in {"train": found.train_set, "val": found.val_set, "test": found.test_set}.items():
        wanted = []
        for image, label, font, of_image in zip(
            drawn_glyphs.images, drawn_glyphs.labels, drawn_glyphs.fonts, drawn_glyphs.splits
        ):
            if of_image == split and drawn_glyphs.font_names[font] in fonts:
                wanted.append((int(label), image))
        assert dataset.labels.tolist() == [label for label, _ in wanted]
        assert np.array_equal(dataset.images.numpy(), np.stack([image for _, image in wanted]))
    report = found.check()
    assert report.ok
    assert report.splits["test"][0][0] == len(found.test_set)


def test_a_check_compares_the_counts_with_the_tables(drawn_glyphs):
    report = Glyphs().check()
    for split, (found, (published,)) in report.splits.items():
        labels = drawn_glyphs.labels[drawn_glyphs.splits == split]
        assert found == (len(labels), len(set(labels.tolist())))
        with characters.TABLE.open(encoding="ascii") as table:
            rows = [row for row in csv.DictReader(list(table)[1:]) if row["split"] == split]
        assert published == (sum(int(row["images"]) for row in rows), len(rows))
    assert list(report.splits) == ["train", "val", "test"]


def test_a_check_names_missing_fonts(tmp_path, monkeypatch):
    """Only some of matplotlib's fonts are installed, as in distributions that package them separately."""
    few = "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "STIXGeneral"
    (tmp_path / "fonts/ttf").mkdir(parents=True)
    for name in few:
        shutil.copy(Path(matplotlib.get_data_path(), "fonts/ttf", f"{name}.ttf"), tmp_path / "fonts/ttf")
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.warns(UserWarning, match="classes have no images"):
        report = Glyphs(cache_dir=tmp_path).check()
    assert set(report.missing_files) == {f"{name}.ttf" for name in characters.TABLE_FONTS.split() if name not in few}
    assert not report.ok
