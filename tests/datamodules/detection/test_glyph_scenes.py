"""GlyphScenes: what is drawn, that it depends on (seed, split, index) alone, and invalid settings."""

import numpy as np
import pytest
import torch
from matplotlib.ft2font import FT2Font

from lightning_retrieval.datamodules import GlyphScenes
from lightning_retrieval.datamodules.detection import glyph_scenes
from lightning_retrieval.datamodules.detection.glyph_scenes import CHARACTERS, DISTRACTORS, FONTS, SceneArtist
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts


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
    assert len(first.train_set) == 4000
    with pytest.raises(IndexError, match="has 9 scenes, got the index 9"):
        again.train_set[9]


def test_a_run_does_not_depend_on_the_workers():
    batches = []
    for workers in (0, 2):
        data = GlyphScenes(train_size=12, batch_size=4, num_workers=workers, seed=3)
        batches.append([target["image_id"].item() for _, targets in data.train_dataloader() for target in targets])
    assert batches[0] == batches[1]
    assert sorted(batches[0]) == list(range(12))


def make_artist(**settings):
    defaults = {"image_size": 112, "num_classes": 15, "max_objects": 5, "frequency_exponent": 0.9}
    return SceneArtist(**{**defaults, "max_rotation": 0.0, "clutter": 0, **settings})


def test_fonts_contain_all_characters():
    files = dict(zip(GlyphFonts().names, GlyphFonts().files))
    assert len(FONTS) == 10
    assert len(set(CHARACTERS)) == len(CHARACTERS)
    assert not set(CHARACTERS) & set(DISTRACTORS)
    for name in FONTS:
        contained = FT2Font(str(files[name])).get_charmap()
        assert all(ord(character) in contained for character in CHARACTERS + DISTRACTORS), name


@pytest.mark.parametrize("max_rotation", [0.0, 30.0])
def test_boxes_are_tight_around_what_is_drawn(monkeypatch, max_rotation):
    monkeypatch.setattr(glyph_scenes, "NOISE", 0.0)
    artist = make_artist(max_objects=1, max_rotation=max_rotation)
    for seed in range(20):
        scene = artist.draw(np.random.default_rng(seed))
        background = np.bincount(scene.pixels.flatten()).argmax()
        rows, columns = np.nonzero(scene.pixels > background)
        (box,) = scene.boxes
        # Faint pixels at the edge of a character may be cut off, not more.
        drawn = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.array(drawn) - box).max() <= 1


def test_number_frequency_and_position_of_objects():
    artist = make_artist(clutter=8)
    scenes = [artist.draw(np.random.default_rng((7, seed))) for seed in range(200)]
    counts = [len(scene.labels) for scene in scenes]
    assert (min(counts), max(counts)) == (1, 5)
    labels = np.concatenate([scene.labels for scene in scenes])
    frequencies = np.bincount(labels, minlength=16)[1:] / len(labels)
    expected = 1 / np.arange(1, 16) ** 0.9
    assert np.abs(frequencies - expected / expected.sum()).max() < 0.06
    boxes = np.concatenate([scene.boxes for scene in scenes])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= 112).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_clutter_and_noise_are_drawn():
    plain = make_artist().draw(np.random.default_rng(0))
    crowded = make_artist(clutter=30, max_objects=1).draw(np.random.default_rng(0))
    assert plain.pixels.std() != crowded.pixels.std()
    assert len(np.unique(plain.pixels[:8, :8])) > 5


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "value"), [("num_classes", 43), ("image_size", 63), ("train_size", 1)])
def test_numbers_beyond_their_limits_raise(name, value):
    with pytest.raises(ValueError, match=f"^GlyphScenes: `{name}` must be .* got {value}"):
        GlyphScenes(**{name: value})
