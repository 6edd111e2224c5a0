"""The glyph images are as the description says, and their cache is complete or not used."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont, features

from lightning_retrieval.datamodules.glyphs import characters
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images


def test_images_are_ordered_by_class_and_font_name(drawn_glyphs):
    count = len(drawn_glyphs.images)
    assert drawn_glyphs.images.shape == (count, 32, 32)
    assert drawn_glyphs.images.dtype == np.uint8
    assert 3_300 < len(drawn_glyphs.characters) < 3_500
    assert 32_000 < count < 34_000
    fonts = [drawn_glyphs.font_names[font] for font in drawn_glyphs.fonts]
    keys = list(zip(drawn_glyphs.labels.tolist(), fonts, strict=True))
    assert keys == sorted(keys)
    first_points = [ord(characters[0]) for characters in drawn_glyphs.characters]
    assert first_points == sorted(set(first_points))


def test_no_image_is_blank_and_no_class_has_an_image_twice(drawn_glyphs):
    assert drawn_glyphs.images.any((1, 2)).all()
    labels = drawn_glyphs.labels.tolist()
    different = {(label, image.tobytes()) for image, label in zip(drawn_glyphs.images, labels, strict=True)}
    assert len(different) == len(labels)
    assert np.bincount(labels).min() >= 2


def test_an_image_is_that_character_in_that_font(drawn_glyphs):
    for index in range(0, len(drawn_glyphs.images), 997):
        file = Path(get_data_path(), "fonts", "ttf", drawn_glyphs.font_names[drawn_glyphs.fonts[index]] + ".ttf")
        font = ImageFont.truetype(str(file), 22, layout_engine=ImageFont.Layout.BASIC)
        drawn = []
        for character in drawn_glyphs.characters[drawn_glyphs.labels[index]]:
            image = Image.new("L", (32, 32), 0)
            ImageDraw.Draw(image).text((16, 23), character, fill=255, font=font, anchor="ms")
            drawn.append(np.asarray(image))
        assert any(np.array_equal(drawn_glyphs.images[index], image) for image in drawn)


def test_a_class_that_the_fonts_cannot_draw_has_no_images_and_warns(few_classes, tmp_path):
    few = load_glyph_images(tmp_path)
    lines = few_classes.read_text().splitlines()
    lines.insert(3, "U+F0000,NONE,train,6")  # for private use: no font holds it
    few_classes.write_text("\n".join(lines) + "\n")
    for _ in ("drawn", "from the cache"):
        with pytest.warns(UserWarning, match="1 of 41 classes have no images"):
            more = load_glyph_images(tmp_path)
        assert more.characters[1] == "\U000f0000"
        assert np.array_equal(more.images, few.images)
        assert np.array_equal(more.labels, np.where(few.labels >= 1, few.labels + 1, few.labels))
        assert np.array_equal(more.splits, few.splits)


def test_images_of_another_renderer_are_drawn_again(few_classes, tmp_path, monkeypatch):
    for version, files in (("0.0", 1), ("0.0", 1), ("0.1", 2)):
        monkeypatch.setattr(features, "version", lambda _, version=version: version)
        load_glyph_images(tmp_path)
        assert len(list(tmp_path.glob("*.npz"))) == files


def assert_equal(first, second):
    for name in ("images", "labels", "fonts", "splits"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    for name in ("characters", "categories", "font_names"):
        assert getattr(first, name) == getattr(second, name)


def test_the_cache_returns_what_was_drawn(few_classes, tmp_path):
    folder = tmp_path / "created" / "by it"
    drawn = load_glyph_images(folder)
    (path,) = folder.iterdir()
    written = path.stat().st_mtime_ns
    assert_equal(load_glyph_images(str(folder)), drawn)
    assert [path] == list(folder.iterdir())
    assert path.stat().st_mtime_ns == written


def change_the_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [change_the_middle, truncate])
def test_a_damaged_cache_is_drawn_again(damage, few_classes, tmp_path):
    whole = load_glyph_images(tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    damage(path)
    assert_equal(load_glyph_images(tmp_path), whole)
    assert path.read_bytes() == content


def draw(rank, world_size, table, folder):
    characters.TABLE = table  # that of `few_classes`, in a process of its own
    return int(load_glyph_images(folder).images.sum())


def test_two_processes_can_draw_at_the_same_time(few_classes, tmp_path, run_processes):
    sums = run_processes(draw, 2, few_classes, tmp_path, backend=None)
    assert len(list(tmp_path.iterdir())) == 1
    assert sums == [load_glyph_images(tmp_path).images.sum()] * 2


@pytest.mark.posix
def test_a_cache_that_cannot_be_written_can_be_read(few_classes, tmp_path, monkeypatch, as_another_user):
    """Promise 4. The other user reads the short table of classes, too, which no argument names."""
    load_glyph_images(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o555)
    monkeypatch.setattr(characters, "TABLE", few_classes.rename(tmp_path / "table.csv").relative_to(tmp_path))
    with as_another_user():
        assert len(load_glyph_images("cache").characters) == 40


@pytest.mark.parametrize(
    ("platform", "cache_home", "cache_dir", "expected"),
    [
        ("linux", "{folder}/xdg", None, "xdg/lightning-retrieval"),
        ("linux", "relative", None, "home/.cache/lightning-retrieval"),  # to be ignored, says its specification
        ("darwin", "", None, "home/Library/Caches/lightning-retrieval"),
        ("linux", "", "~/mine", "home/mine"),
    ],
)
def test_the_default_folder_is_the_users_cache(
    few_classes, tmp_path, monkeypatch, platform, cache_home, cache_dir, expected
):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home.format(folder=tmp_path))
    load_glyph_images(cache_dir)
    (found,) = tmp_path.rglob("*.npz")
    assert found.parent == tmp_path / expected


@pytest.mark.refusal
def test_a_full_disk_raises_and_leaves_no_files(few_classes, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="cache_dir"):
        load_glyph_images(tmp_path)
    assert not list(tmp_path.iterdir())
