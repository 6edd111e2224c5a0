"""The glyph images: they are as the description says, and a loaded cache is equal to what was drawn."""

from pathlib import Path

import numpy as np
import pytest

from lightning_retrieval.datamodules.glyphs import characters as fonts
from lightning_retrieval.datamodules.glyphs import drawing
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts
from lightning_retrieval.datamodules.glyphs.drawing import GlyphImages, load_glyph_images


def test_shapes_types_and_sizes(drawn_glyphs: GlyphImages) -> None:
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


def test_images_are_ordered_by_class_and_font_name(drawn_glyphs: GlyphImages) -> None:
    keys = [
        (label, drawn_glyphs.font_names[font])
        for label, font in zip(drawn_glyphs.labels.tolist(), drawn_glyphs.fonts.tolist(), strict=True)
    ]
    assert keys == sorted(keys)
    first_points = [ord(characters[0]) for characters in drawn_glyphs.characters]
    assert first_points == sorted(set(first_points))


def test_no_image_is_blank_and_no_class_has_an_image_twice(drawn_glyphs: GlyphImages) -> None:
    seen = set()
    in_class = [0] * len(drawn_glyphs.characters)
    for image, label in zip(drawn_glyphs.images, drawn_glyphs.labels.tolist(), strict=True):
        assert image.any()
        key = (label, image.tobytes())
        assert key not in seen
        seen.add(key)
        in_class[label] += 1
    assert min(in_class) >= 2


def test_ink_is_bright_on_dark(drawn_glyphs: GlyphImages) -> None:
    assert np.median(drawn_glyphs.images) == 0
    assert (drawn_glyphs.images.max(axis=(1, 2)) == 255).mean() > 0.8


def test_position_and_size_are_kept(drawn_glyphs: GlyphImages) -> None:
    font = drawn_glyphs.font_names.index("DejaVuSans")

    def rows(character: str) -> np.ndarray:
        (label,) = [index for index, characters in enumerate(drawn_glyphs.characters) if character in characters]
        image = drawn_glyphs.images[(drawn_glyphs.labels == label) & (drawn_glyphs.fonts == font)][0]
        return np.flatnonzero(image.any(axis=1))

    assert rows(",").min() > rows("'").max()  # below, not the same shape at another position
    assert len(rows("o")) < len(rows("O"))
    assert abs(rows("O").max() - rows("H").max()) <= 1  # both are on the baseline
    assert rows("g").max() > rows("o").max()


def test_an_image_is_that_character_in_that_font(drawn_glyphs: GlyphImages) -> None:
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


def test_a_class_that_the_fonts_cannot_draw_has_no_images_and_warns(few_classes: Path, tmp_path: Path) -> None:
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


def test_the_cache_name_depends_on_version_table_and_renderer(
    few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> int:
        load_glyph_images(tmp_path)
        return len(list(tmp_path.glob("*.npz")))

    assert [files(), files()] == [1, 1]
    few_classes.write_text("\n".join(few_classes.read_text().splitlines()[:-1]) + "\n")
    assert [files(), files()] == [2, 2]
    monkeypatch.setattr(drawing, "DRAWING_VERSION", -1)
    assert [files(), files()] == [3, 3]
    monkeypatch.setattr(fonts.features, "version", lambda _: "0.0")
    assert [files(), files()] == [4, 4]
