"""GlyphScenes: what is drawn, and that it depends on (seed, split, index) alone."""

import numpy as np
import pytest
import torch

from lightning_retrieval.datamodules import GlyphScenes
from lightning_retrieval.datamodules.detection import glyph_scenes


def test_items_are_what_detectors_take():
    data = GlyphScenes(train_size=20, batch_size=4, seed=1)
    images, targets = next(iter(data.train_dataloader()))
    assert len(images) == len(targets) == 4
    for image, target in zip(images, targets):
        assert image.shape == (3, 112, 112)
        assert image.dtype == torch.float32
        assert 0 <= image.min() < image.max() <= 1
        assert target["boxes"].shape == (len(target["labels"]), 4)
        assert target["labels"].dtype == torch.int64
    assert len(data.class_names) == 15
    assert data.check().splits["train"] == ((20, 15), ())


def test_a_scene_is_a_function_of_seed_split_and_index():
    first, again, other = GlyphScenes(), GlyphScenes(seed=4, train_size=9), GlyphScenes(scene_seed=1)
    image, target = first.train_set[5]
    same, same_target = again.train_set[5]
    assert torch.equal(image, same)
    assert all(torch.equal(target[key], same_target[key]) for key in target)
    for different in (first.train_set[6], first.val_set[5], first.test_set[5], other.train_set[5]):
        assert not torch.equal(image, different[0])
    assert (len(first.train_set), len(again.train_set)) == (4000, 9)


def test_a_run_does_not_depend_on_the_workers():
    batches = []
    for workers in (0, 2):
        data = GlyphScenes(train_size=12, batch_size=4, num_workers=workers, seed=3)
        batches.append([target["image_id"].item() for _, targets in data.train_dataloader() for target in targets])
    assert batches[0] == batches[1]
    assert sorted(batches[0]) == list(range(12))


@pytest.mark.parametrize("max_rotation", [0.0, 30.0])
def test_boxes_are_tight_around_what_is_drawn(monkeypatch, max_rotation):
    """Promise 1, the numbers that detectors learn: only without noise are the edges of a character seen."""
    monkeypatch.setattr(glyph_scenes, "NOISE", 0.0)
    data = GlyphScenes(max_objects=1, max_rotation=max_rotation, clutter=0)
    for index in range(20):
        image, target = data.train_set[index]
        pixels = (255 * image[0]).round().int().numpy()
        background = np.bincount(pixels.flatten()).argmax()
        rows, columns = np.nonzero(pixels > background)
        # Faint pixels at the edge of a character may be cut off, not more.
        drawn = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.array(drawn) - target["boxes"][0].numpy()).max() <= 1


def test_number_frequency_and_position_of_objects():
    data = GlyphScenes(clutter=8)
    targets = [data.train_set[index][1] for index in range(200)]
    counts = [len(target["labels"]) for target in targets]
    assert (min(counts), max(counts)) == (1, 5)
    labels = torch.cat([target["labels"] for target in targets]).numpy()
    frequencies = np.bincount(labels, minlength=16)[1:] / len(labels)
    expected = 1 / np.arange(1, 16) ** 0.9
    assert np.abs(frequencies - expected / expected.sum()).max() < 0.06
    boxes = torch.cat([target["boxes"] for target in targets])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= 112).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_clutter_and_noise_are_drawn():
    plain, _ = GlyphScenes(clutter=0).train_set[0]
    crowded, _ = GlyphScenes(clutter=30).train_set[0]
    assert not torch.equal(plain, crowded)
    assert len(plain[0, :8, :8].unique()) > 5
