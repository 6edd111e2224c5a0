"""The glyph images: the recipe's promises, checked on the images themselves, and a cache that is whole or not used."""

import hashlib
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_retrieval.datamodules.glyphs import glyph_images
from lightning_retrieval.datamodules.glyphs.glyph_images import (
    GlyphImages,
    load_glyph_images,
    make_class_table,
    split_of,
)

LOAD = (
    "import sys; from lightning_retrieval.datamodules.glyphs.glyph_images import load_glyph_images; "
    "print(load_glyph_images(sys.argv[1]).images.sum())"
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "made" / "by load_glyph_images"


@pytest.fixture(scope="session")
def glyphs(cache: Path) -> GlyphImages:
    """The freshly drawn ones: nothing was in the cache."""
    return load_glyph_images(cache)


@pytest.fixture
def few_classes(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 40 classes, so that drawing takes no time."""
    table = tmp_path_factory.mktemp("table") / "glyph_classes.csv"
    table.write_text("".join(glyph_images.TABLE.read_text(encoding="ascii").splitlines(keepends=True)[:42]))
    monkeypatch.setattr(glyph_images, "TABLE", table)
    return table


@pytest.fixture
def small(few_classes: Path, tmp_path: Path) -> Path:
    """A whole cache file of few classes, its checksum beside it."""
    load_glyph_images(tmp_path)
    (path,) = tmp_path.glob("*.npz")
    return path


def equal(first: GlyphImages, second: GlyphImages) -> bool:
    arrays = ("images", "labels", "fonts", "splits")
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays) and all(
        getattr(first, name) == getattr(second, name) for name in ("characters", "categories", "font_names")
    )


def refuse(*_: object) -> None:
    raise AssertionError("not to be called")


# --- the images ------------------------------------------------------------------------------------------------------


def test_shapes_types_and_sizes(glyphs: GlyphImages) -> None:
    count = len(glyphs.images)
    assert glyphs.images.shape == (count, 32, 32)
    assert glyphs.images.dtype == np.uint8
    assert glyphs.labels.shape == glyphs.fonts.shape == glyphs.splits.shape == (count,)
    assert glyphs.labels.dtype == glyphs.fonts.dtype == np.int64
    assert len(glyphs.characters) == len(glyphs.categories)
    assert 3_300 < len(glyphs.characters) < 3_500
    assert 32_000 < count < 34_000
    assert 0 <= glyphs.fonts.min() <= glyphs.fonts.max() < len(glyphs.font_names)
    assert glyphs.images.flags.writeable  # torch.from_numpy warns of arrays that are not


def test_images_are_ordered_by_class_and_font_name(glyphs: GlyphImages) -> None:
    keys = [
        (label, glyphs.font_names[font])
        for label, font in zip(glyphs.labels.tolist(), glyphs.fonts.tolist(), strict=True)
    ]
    assert keys == sorted(keys)
    first_points = [ord(characters[0]) for characters in glyphs.characters]
    assert first_points == sorted(set(first_points))


def test_no_image_is_blank_and_none_comes_twice_in_a_class(glyphs: GlyphImages) -> None:
    seen = set()
    in_class = [0] * len(glyphs.characters)
    for image, label in zip(glyphs.images, glyphs.labels.tolist(), strict=True):
        assert image.any()
        key = (label, image.tobytes())
        assert key not in seen
        seen.add(key)
        in_class[label] += 1
    assert min(in_class) >= 2


def test_ink_is_bright_on_dark(glyphs: GlyphImages) -> None:
    assert np.median(glyphs.images) == 0
    assert (glyphs.images.max(axis=(1, 2)) == 255).mean() > 0.8


def test_position_and_size_are_kept(glyphs: GlyphImages) -> None:
    font = glyphs.font_names.index("DejaVuSans")

    def rows(character: str) -> np.ndarray:
        (label,) = [index for index, characters in enumerate(glyphs.characters) if character in characters]
        image = glyphs.images[(glyphs.labels == label) & (glyphs.fonts == font)][0]
        return np.flatnonzero(image.any(axis=1))

    assert rows(",").min() > rows("'").max()  # below, not the same thing in another place
    assert len(rows("o")) < len(rows("O"))
    assert abs(rows("O").max() - rows("H").max()) <= 1  # both stand on the baseline
    assert rows("g").max() > rows("o").max()


def test_an_image_is_that_character_in_that_font(glyphs: GlyphImages) -> None:
    from matplotlib import get_data_path
    from PIL import Image, ImageDraw, ImageFont

    for index in range(0, len(glyphs.images), 997):
        file = Path(get_data_path(), "fonts", "ttf", glyphs.font_names[glyphs.fonts[index]] + ".ttf")
        font = ImageFont.truetype(str(file), 22, layout_engine=ImageFont.Layout.BASIC)
        drawn = []
        for character in glyphs.characters[glyphs.labels[index]]:
            image = Image.new("L", (32, 32), 0)
            ImageDraw.Draw(image).text((16, 23), character, fill=255, font=font, anchor="ms")
            drawn.append(np.asarray(image))
        assert any(np.array_equal(glyphs.images[index], image) for image in drawn)


# --- classes and splits ----------------------------------------------------------------------------------------------


def test_letters_that_look_the_same_are_one_class_and_others_are_not(glyphs: GlyphImages) -> None:
    label = {character: index for index, characters in enumerate(glyphs.characters) for character in characters}
    assert len(label) == sum(map(len, glyphs.characters))  # no character is in two classes
    assert glyphs.characters[label["O"]] == "O\u039f\u041e"  # Latin, Greek and Cyrillic
    assert len({label[character] for character in "lI1|oO0,'`"}) == 10


def test_characters_are_letters_numbers_symbols_and_punctuation(glyphs: GlyphImages) -> None:
    assert {unicodedata.category(character)[0] for characters in glyphs.characters for character in characters} == set(
        "LNSP"
    )
    for characters, category in zip(glyphs.characters, glyphs.categories, strict=True):
        assert unicodedata.name(characters[0]).split()[0] == category
    assert {"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "BRAILLE"} <= set(glyphs.categories)


def test_fonts_that_draw_other_symbols_are_left_out(glyphs: GlyphImages) -> None:
    assert list(glyphs.font_names) == sorted(set(glyphs.font_names))
    assert {"DejaVuSans", "STIXGeneral", "cmr10"} <= set(glyphs.font_names)
    assert not [name for name in glyphs.font_names if name in {"cmex10", "cmmi10", "cmsy10"} or "LastResort" in name]


def test_splits_hold_whole_classes_in_the_promised_shares(glyphs: GlyphImages) -> None:
    classes = {split: set(glyphs.labels[glyphs.splits == split].tolist()) for split in ("train", "val", "test")}
    assert sum(map(len, classes.values())) == len(glyphs.characters)
    assert set().union(*classes.values()) == set(range(len(glyphs.characters)))
    # Three standard deviations of a fair draw.
    assert len(classes["test"]) == pytest.approx(0.5 * 3435, abs=90)
    assert len(classes["val"]) == pytest.approx(0.05 * 3435, abs=39)


def test_split_is_a_function_of_the_code_point_alone(glyphs: GlyphImages) -> None:
    # Written out again, so that a change of `split_of` is seen: the splits are fixed for ever.
    for label, split in set(zip(glyphs.labels.tolist(), glyphs.splits.tolist(), strict=True)):
        code_point = min(map(ord, glyphs.characters[label]))
        digits = hashlib.sha256(b"%d" % code_point).hexdigest()
        tenth = int(digits[16:32], 16) / 16**16
        expected = "test" if digits[0] < "8" else "val" if tenth < 0.1 else "train"
        assert split == split_of(code_point) == expected


def test_shipped_table_is_what_the_fonts_give() -> None:
    shipped = glyph_images.TABLE.read_text(encoding="ascii")
    made_with = shipped.splitlines()[0].removeprefix("# ")
    installed = glyph_images._Fonts().versions()
    if made_with != installed:
        pytest.skip(f"the table was made with {made_with}; installed are {installed}")
    assert make_class_table() == shipped


def test_table_counts_the_images(glyphs: GlyphImages) -> None:
    lines = glyph_images.TABLE.read_text(encoding="ascii").splitlines()
    made_with = lines[0].removeprefix("# ")
    installed = glyph_images._Fonts().versions()
    if made_with != installed:
        pytest.skip(f"the table was made with {made_with}; installed are {installed}")
    assert [int(line.split(",")[3]) for line in lines[2:]] == np.bincount(glyphs.labels).tolist()


def test_merging_counts_the_fonts_that_both_hold() -> None:
    a, b, c = b"a", b"b", b"c"
    drawings = {
        1: dict.fromkeys(range(10), a),
        2: dict.fromkeys(range(5, 9), a) | {9: b},  # agrees in 4 of 5 shared fonts
        3: dict.fromkeys(range(7), a) | dict.fromkeys((7, 8), c),  # 7 of 9 with 1: too few; 2 of 4 with 2
        4: {9: b, 20: c},  # 1 of 1 with 2, none with 1: joined through 2
        5: {},
    }
    assert glyph_images._merge(drawings) == [[1, 2, 4], [3], [5]]


def test_class_that_the_fonts_cannot_draw_is_left_out_with_a_warning(few_classes: Path, tmp_path: Path) -> None:
    few = load_glyph_images(tmp_path)
    charmaps = glyph_images._Fonts().charmaps
    lone = next(point for point in range(0x1D80, 0x2400) if sum(point in charmap for charmap in charmaps) == 1)
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


# --- the cache -------------------------------------------------------------------------------------------------------


def test_cache_gives_what_was_drawn_and_nothing_is_drawn(
    cache: Path, glyphs: GlyphImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glyph_images._Fonts, "draw", refuse)
    assert equal(load_glyph_images(str(cache)), glyphs)
    (path,) = cache.glob("*.npz")
    names = {file.name for file in cache.iterdir()}
    assert names == {path.name, path.name + ".sha256"}
    assert (cache / (path.name + ".sha256")).read_text() == hashlib.sha256(path.read_bytes()).hexdigest() + "\n"


def spoil_the_middle(path: Path) -> None:
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def remove_the_checksum(path: Path) -> None:
    path.with_name(path.name + ".sha256").unlink()


def spoil_the_checksum(path: Path) -> None:
    path.with_name(path.name + ".sha256").write_bytes(b"\xff\x00")


@pytest.mark.parametrize("damage", [spoil_the_middle, truncate, remove_the_checksum, spoil_the_checksum, Path.unlink])
def test_damaged_cache_is_drawn_again(
    damage: Callable[[Path], None], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_glyph_images(small.parent)
    damage(small)
    with monkeypatch.context() as patch:
        patch.setattr(glyph_images._Fonts, "draw", refuse)
        with pytest.raises(AssertionError, match="not to be called"):
            load_glyph_images(small.parent)
    assert equal(load_glyph_images(small.parent), whole)
    monkeypatch.setattr(glyph_images._Fonts, "draw", refuse)
    assert equal(load_glyph_images(small.parent), whole)  # and it is in the cache again


def test_cache_is_keyed_by_recipe_table_and_renderer(
    few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> int:
        load_glyph_images(tmp_path)
        return len(list(tmp_path.glob("*.npz")))

    assert [files(), files()] == [1, 1]
    few_classes.write_text("\n".join(few_classes.read_text().splitlines()[:-1]) + "\n")
    assert [files(), files()] == [2, 2]
    monkeypatch.setattr(glyph_images, "RECIPE", -1)
    assert [files(), files()] == [3, 3]
    monkeypatch.setattr(glyph_images.features, "version", lambda _: "0.0")
    assert [files(), files()] == [4, 4]


def test_two_processes_drawing_at_once_both_end_well(glyphs: GlyphImages, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", LOAD, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=100)
        assert (process.returncode, err) == (0, "")
        assert int(out) == glyphs.images.sum()
    assert len(list(tmp_path.iterdir())) == 2
    assert equal(load_glyph_images(tmp_path), glyphs)


def test_a_kill_before_the_file_takes_its_place_is_harmless(glyphs: GlyphImages, tmp_path: Path) -> None:
    killed = (
        "import os, signal; from lightning_retrieval.datamodules.glyphs import glyph_images; "
        "glyph_images.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
    )
    command = [sys.executable, "-c", killed + LOAD, str(tmp_path)]
    assert subprocess.run(command, timeout=100, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    assert left.stat().st_size > 1_000_000
    assert equal(load_glyph_images(tmp_path), glyphs)


def test_cache_that_cannot_be_written_is_still_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glyph_images, "_replace", refuse)  # root may write anywhere
    assert len(load_glyph_images(small.parent).characters) == 40


# --- the folder ------------------------------------------------------------------------------------------------------


def test_default_folder_is_the_users_cache(few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_folder_that_cannot_be_written_is_refused_before_the_work(
    below: str, kind: type[OSError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glyph_images._Fonts, "draw", refuse)
    (tmp_path / "file").write_text("a file")
    folder = tmp_path / "file" / below
    expected = (
        f"load_glyph_images: `cache_dir` must be a folder that can be made and written, got {str(folder)!r} ({words}); "
        "pass another folder."
    )
    with pytest.raises(kind, match=f"^{re.escape(expected)}$"):
        load_glyph_images(folder)


@pytest.mark.refusal
def test_full_disk_is_told_and_leaves_nothing(
    few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(glyph_images.os, "replace", full)
    with pytest.raises(OSError, match=r"^load_glyph_images: `cache_dir` must be .* \(No space left on device\); pass"):
        load_glyph_images(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.refusal
def test_cache_dir_of_a_wrong_kind_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^load_glyph_images: `cache_dir` must be a string, a path or None, got int\.$"
    ):
        load_glyph_images(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^load_glyph_images: `cache_dir` must name a folder, got ''\.$"):
        load_glyph_images("")
    with pytest.raises(FileNotFoundError, match=r"got '~nobody_of_that_name/x' where the user has no home folder"):
        load_glyph_images("~nobody_of_that_name/x")


@pytest.mark.refusal
def test_matplotlib_without_fonts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.get_data_path", lambda: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(f"its fonts in {str(tmp_path / 'fonts' / 'ttf')!r}, got no")):
        load_glyph_images(tmp_path)
