"""The cache of the glyph images: complete or not used, and in the right folder."""

import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_retrieval.datamodules.glyphs import characters, drawing
from lightning_retrieval.datamodules.glyphs.characters import GlyphFonts
from lightning_retrieval.datamodules.glyphs.drawing import GlyphImages, load_glyph_images
from tests.processes import start_processes


def equal(first: GlyphImages, second: GlyphImages) -> bool:
    arrays = ("images", "labels", "fonts", "splits")
    same_arrays = all(np.array_equal(getattr(first, name), getattr(second, name)) for name in arrays)
    others = ("characters", "categories", "font_names")
    return same_arrays and all(getattr(first, name) == getattr(second, name) for name in others)


def fail(*_: object) -> None:
    raise AssertionError("must not be called")


def test_the_cache_returns_what_was_drawn_without_drawing(
    few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = load_glyph_images(tmp_path / "created" / "by it")
    monkeypatch.setattr(GlyphFonts, "draw", fail)
    assert equal(load_glyph_images(str(tmp_path / "created" / "by it")), drawn)
    (path,) = tmp_path.rglob("*.npz")
    names = {file.name for file in path.parent.iterdir()}
    assert names == {path.name, path.name + ".sha256"}
    checksum = path.with_name(path.name + ".sha256").read_text()
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest() + "\n"


def change_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def remove_the_checksum(path: Path) -> None:
    path.with_name(path.name + ".sha256").unlink()


def change_the_checksum(path: Path) -> None:
    path.with_name(path.name + ".sha256").write_bytes(b"\xff\x00")


@pytest.mark.parametrize("damage", [change_the_middle, truncate, remove_the_checksum, change_the_checksum, Path.unlink])
def test_a_damaged_cache_is_drawn_again(
    damage: Callable[[Path], None], small_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_glyph_images(small_cache.parent)
    damage(small_cache)
    with monkeypatch.context() as patch:
        patch.setattr(GlyphFonts, "draw", fail)
        with pytest.raises(AssertionError, match="must not be called"):
            load_glyph_images(small_cache.parent)
    assert equal(load_glyph_images(small_cache.parent), whole)
    monkeypatch.setattr(GlyphFonts, "draw", fail)
    assert equal(load_glyph_images(small_cache.parent), whole)  # and it is in the cache again


def draw(rank: int, world_size: int, table: Path, folder: Path, killed: bool) -> int:
    """Draw the classes of a table; `killed` ends the process before a file is renamed."""
    characters.TABLE = table
    if killed:
        drawing.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    return int(load_glyph_images(folder).images.sum())


def test_two_processes_can_draw_at_the_same_time(few_classes: Path, tmp_path: Path, run_processes: Callable) -> None:
    sums = run_processes(draw, 2, few_classes, tmp_path, False, backend=None)
    assert len(list(tmp_path.iterdir())) == 2
    assert sums == [load_glyph_images(tmp_path).images.sum()] * 2


def test_a_process_killed_before_the_file_is_renamed_does_no_harm(few_classes: Path, tmp_path: Path) -> None:
    (process,) = start_processes(draw, 1, few_classes, tmp_path / "cache", True, folder=tmp_path)
    assert process.wait(60) == -signal.SIGKILL
    (left,) = (tmp_path / "cache").iterdir()
    assert left.suffix == ".tmp"
    assert left.stat().st_size > 10_000
    assert equal(load_glyph_images(tmp_path / "cache"), load_glyph_images(tmp_path / "other"))


def test_a_cache_that_cannot_be_written_can_be_read(small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_write", fail)  # root may write anywhere
    assert len(load_glyph_images(small_cache.parent).characters) == 40


def test_the_default_folder_is_the_users_cache(
    few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_folder_that_cannot_be_written_raises_before_drawing(
    below: str, kind: type[OSError], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GlyphFonts, "draw", fail)
    (tmp_path / "file").write_text("a file")
    folder = tmp_path / "file" / below
    expected = (
        "load_glyph_images: `cache_dir` must be a folder that can be created and written, got "
        f"{str(folder)!r} ({words}); pass another folder."
    )
    with pytest.raises(kind, match=f"^{re.escape(expected)}$"):
        load_glyph_images(folder)


@pytest.mark.refusal
def test_a_full_disk_raises_and_leaves_no_files(
    few_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawing.os, "replace", full)
    with pytest.raises(OSError, match=r"^load_glyph_images: `cache_dir` must be .* \(No space left on device\); pass"):
        load_glyph_images(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.refusal
def test_a_cache_dir_of_a_wrong_type_raises() -> None:
    with pytest.raises(
        TypeError, match=r"^load_glyph_images: `cache_dir` must be a string, a path or None, got int\.$"
    ):
        load_glyph_images(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^load_glyph_images: `cache_dir` must name a folder, got ''\.$"):
        load_glyph_images("")
    with pytest.raises(FileNotFoundError, match=r"got '~nobody_of_that_name/x', but the user has no home folder"):
        load_glyph_images("~nobody_of_that_name/x")
