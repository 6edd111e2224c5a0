"""The glyph images are as the description says, and their cache is complete or not used."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_retrieval.datamodules.glyphs import characters, drawing
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images


def test_shapes_types_and_sizes(drawn_glyphs):
    count = len(drawn_glyphs.images)
    assert drawn_glyphs.images.shape == (count, 32, 32)
    assert drawn_glyphs.images.dtype == np.uint8
    assert drawn_glyphs.labels.shape == drawn_glyphs.fonts.shape == drawn_glyphs.splits.shape == (count,)
    assert drawn_glyphs.labels.dtype == drawn_glyphs.fonts.dtype == np.int64
    assert len(drawn_glyphs.characters) == len(drawn_glyphs.categories)
    assert 3_300 < len(drawn_glyphs.characters) < 3_500
    assert 32_000 < count < 34_000
    assert 0 <= drawn_glyphs.fonts.min() <= drawn_glyphs.fonts.max() < len(drawn_glyphs.font_names)
    assert drawn_glyphs.images.flags.writeable  # torch.from_numpy warns of arrays that are not


def test_images_are_ordered_by_class_and_font_name(drawn_glyphs):
    keys = [
        (label, drawn_glyphs.font_names[font])
        for label, font in zip(drawn_glyphs.labels.tolist(), drawn_glyphs.fonts.tolist(), strict=True)
    ]
    assert keys == sorted(keys)
    first_points = [ord(characters[0]) for characters in drawn_glyphs.characters]
    assert first_points == sorted(set(first_points))


def test_no_image_is_blank_and_no_class_has_an_image_twice(drawn_glyphs):
    seen = set()
    in_class = [0] * len(drawn_glyphs.characters)
    for image, label in zip(drawn_glyphs.images, drawn_glyphs.labels.tolist(), strict=True):
        assert image.any()
        key = (label, image.tobytes())
        assert key not in seen
        seen.add(key)
        in_class[label] += 1
    assert min(in_class) >= 2


def test_an_image_is_that_character_in_that_font(drawn_glyphs):
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

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
    code_points = GlyphFonts().code_points
    lone = next(point for point in range(0x1D80, 0x2400) if sum(point in of_font for of_font in code_points) == 1)
    lines = few_classes.read_text().splitlines()
    lines.insert(3, f"U+{lone:04X},NONE,test,6")  # one font, one image
    lines.insert(3, "U+F0000,NONE,train,6")  # for private use: no font holds it
    few_classes.write_text("\n".join(lines) + "\n")
    for _ in ("drawn", "from the cache"):
        with pytest.warns(UserWarning, match=r"^load_glyph_images: 2 of 42 classes have no images") as caught:
            more = load_glyph_images(tmp_path)
        assert len(caught) == 1
        assert more.characters[1:3] == ("\U000f0000", chr(lone))
        assert np.array_equal(more.images, few.images)
        assert np.array_equal(more.labels, np.where(few.labels >= 1, few.labels + 2, few.labels))
        assert np.array_equal(more.splits, few.splits)


def test_the_cache_name_depends_on_version_table_and_renderer(few_classes, tmp_path, monkeypatch):
    def files():
        load_glyph_images(tmp_path)
        return len(list(tmp_path.glob("*.npz")))

    assert [files(), files()] == [1, 1]
    few_classes.write_text("\n".join(few_classes.read_text().splitlines()[:-1]) + "\n")
    assert [files(), files()] == [2, 2]
    monkeypatch.setattr(drawing, "DRAWING_VERSION", -1)
    assert [files(), files()] == [3, 3]
    monkeypatch.setattr(characters.features, "version", lambda _: "0.0")
    assert [files(), files()] == [4, 4]


def equal(first, second):
    arrays = ("images", "labels", "fonts", "splits")
    same_arrays = all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays)
    others = ("characters", "categories", "font_names")
    return same_arrays and all(getattr(first, name) == getattr(second, name) for name in others)


def fail(*_):
    raise AssertionError("must not be called")


def test_the_cache_returns_what_was_drawn_without_drawing(few_classes, tmp_path, monkeypatch):
    drawn = load_glyph_images(tmp_path / "created" / "by it")
    monkeypatch.setattr(GlyphFonts, "draw", fail)
    assert equal(load_glyph_images(str(tmp_path / "created" / "by it")), drawn)
    (path,) = tmp_path.rglob("*.npz")
    assert list(path.parent.iterdir()) == [path]


def change_the_middle(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [change_the_middle, truncate, Path.unlink])
def test_a_damaged_cache_is_drawn_again(damage, small_cache, monkeypatch):
    whole = load_glyph_images(small_cache.parent)
    damage(small_cache)
    with monkeypatch.context() as patch:
        patch.setattr(GlyphFonts, "draw", fail)
        with pytest.raises(AssertionError, match="must not be called"):
            load_glyph_images(small_cache.parent)
    assert equal(load_glyph_images(small_cache.parent), whole)
    monkeypatch.setattr(GlyphFonts, "draw", fail)
    assert equal(load_glyph_images(small_cache.parent), whole)  # and it is in the cache again


def draw(rank, world_size, table, folder):
    characters.TABLE = table
    return int(load_glyph_images(folder).images.sum())


def test_two_processes_can_draw_at_the_same_time(few_classes, tmp_path, run_processes):
    sums = run_processes(draw, 2, few_classes, tmp_path, backend=None)
    assert len(list(tmp_path.iterdir())) == 1
    assert sums == [load_glyph_images(tmp_path).images.sum()] * 2


def test_a_cache_that_cannot_be_written_can_be_read(small_cache, monkeypatch):
    monkeypatch.setattr(drawing, "_in_folder", fail)  # root may write anywhere
    assert len(load_glyph_images(small_cache.parent).characters) == 40


def test_the_default_folder_is_the_users_cache(few_classes, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_glyph_images()
    assert len(list((tmp_path / "xdg" / "lightning-retrieval").glob("*.npz"))) == 1
    assert not (tmp_path / "home").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    load_glyph_images()
    assert len(list((tmp_path / "home" / ".cache" / "lightning-retrieval").glob("*.npz"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "darwin")
    load_glyph_images()
    assert len(list((tmp_path / "home" / "Library" / "Caches" / "lightning-retrieval").glob("*.npz"))) == 1
    load_glyph_images("~/mine")
    assert len(list((tmp_path / "home" / "mine").glob("*.npz"))) == 1


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("below", "kind", "words"),
    [("", FileExistsError, "File exists"), ("below", NotADirectoryError, "Not a directory")],
)
def test_a_folder_that_cannot_be_written_raises_before_drawing(below, kind, words, tmp_path, monkeypatch):
    monkeypatch.setattr(GlyphFonts, "draw", fail)
    (tmp_path / "file").write_text("a file")
    folder = tmp_path / "file" / below
    with pytest.raises(kind, match=rf"^load_glyph_images: `cache_dir` .*{re.escape(repr(str(folder)))} \({words}\)"):
        load_glyph_images(folder)


@pytest.mark.refusal
def test_a_full_disk_raises_and_leaves_no_files(few_classes, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawing.os, "replace", full)
    with pytest.raises(OSError, match=r"^load_glyph_images: `cache_dir` must be .* \(No space left on device\); pass"):
        load_glyph_images(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.refusal
def test_a_cache_dir_without_a_name_raises():
    with pytest.raises(ValueError, match=r"^load_glyph_images: `cache_dir` must name a folder, got ''\.$"):
        load_glyph_images("")
    with pytest.raises(FileNotFoundError, match=r"got '~nobody_of_that_name/x', but the user has no home folder"):
        load_glyph_images("~nobody_of_that_name/x")
