"""How scenes are drawn: boxes around the visible pixels, frequencies, fonts that contain all characters."""

import numpy as np
import pytest
from matplotlib.ft2font import FT2Font

from lightning_retrieval.datamodules.detection import glyph_scenes
from lightning_retrieval.datamodules.detection.glyph_scenes import (
    CHARACTERS,
    DISTRACTORS,
    FONTS,
    SceneArtist,
)
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts


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
    scenes = [artist.draw(np.random.default_rng((7, seed))) for seed in range(400)]
    counts = [len(scene.labels) for scene in scenes]
    assert (min(counts), max(counts)) == (1, 5)
    labels = np.concatenate([scene.labels for scene in scenes])
    frequencies = np.bincount(labels, minlength=16)[1:] / len(labels)
    expected = 1 / np.arange(1, 16) ** 0.9
    assert np.abs(frequencies - expected / expected.sum()).max() < 0.04
    boxes = np.concatenate([scene.boxes for scene in scenes])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= 112).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_clutter_and_noise_are_drawn():
    plain = make_artist().draw(np.random.default_rng(0))
    crowded = make_artist(clutter=30, max_objects=1).draw(np.random.default_rng(0))
    assert plain.pixels.std() != crowded.pixels.std()
    assert len(np.unique(plain.pixels[:8, :8])) > 5
