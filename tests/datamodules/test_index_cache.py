"""The cache of image indexes: what makes it invalid, and damaged files."""

import warnings

import numpy as np
import pytest

from lightning_retrieval.datamodules import (
    ImageIndex,
)
from lightning_retrieval.datamodules.image_index import read_cached

OTHER = ImageIndex(["z"], [3], roles=[1], instances=[5])
STRINGS = ["a/b.jpg", "é/ü ñ.PNG", "", "x" * 300, "日本/語.jpg"]


def test_a_cached_index_is_read_again_only_if_a_source_or_a_setting_changes(tmp_path):
    source, calls = tmp_path / "list.txt", []
    source.write_text("one")

    def read():
        calls.append(1)
        return {"train": ImageIndex(STRINGS, range(5), names=["é"] * 5), "test/other": OTHER}

    for _ in range(2):
        splits = read_cached(read, [source], {"a": 1}, tmp_path / "cache")
        assert list(splits) == ["train", "test/other"]
        assert list(splits["train"].paths) == STRINGS
        assert list(splits["train"].names) == ["é"] * 5
        assert (splits["test/other"].roles.tolist(), splits["test/other"].instances.tolist()) == ([1], [5])
        assert splits["train"].instances is None
    assert len(calls) == 1
    read_cached(read, [source], {"a": 2}, tmp_path / "cache")
    assert len(calls) == 2
    source.write_text("two, longer")
    read_cached(read, [source], {"a": 1}, tmp_path / "cache")
    assert len(calls) == 3
    assert not [file for file in (tmp_path / "cache").iterdir() if not file.name.startswith("index-")]


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], None])
def test_a_damaged_cache_is_replaced(tmp_path, damage):
    source, folder = tmp_path / "list.txt", tmp_path / "cache"
    source.write_text("one")

    def read():
        return {"train": ImageIndex(["a.png"], [7])}

    read_cached(read, [source], {}, folder)
    (file,) = folder.iterdir()
    if damage is None:
        np.savez(file, labels=np.zeros(3))  # arrays of something else
    else:
        file.write_bytes(damage(file.read_bytes()))
    sentence = rf"^ImageDataModule: the lists are read again because the cache file {file} is damaged \("
    with pytest.warns(UserWarning, match=sentence):
        assert list(read_cached(read, [source], {}, folder)["train"].paths) == ["a.png"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(read_cached(read, [source], {}, folder)["train"].paths) == ["a.png"]


@pytest.mark.refusal
def test_a_cache_folder_that_is_a_file_raises(tmp_path):
    (tmp_path / "cache").write_text("")
    for folder in (tmp_path / "cache", tmp_path / "cache" / "deeper"):
        with pytest.raises(ValueError, match=rf"^ImageDataModule: `cache_dir` must be a folder .*, got {folder} \("):
            read_cached(lambda: {"test": OTHER}, [tmp_path / "cache"], {}, folder)


@pytest.mark.parametrize("function", ["pathlib.Path.mkdir", "os.replace", "numpy.savez"])
def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, function):
    source, folder = tmp_path / "list.txt", tmp_path / "cache"
    source.write_text("one")

    def fails(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(function, fails)
    sentence = rf"^ImageDataModule: the index .* is not stored, .* got {folder} \(Permission denied\)\."
    for _ in range(2):
        with pytest.warns(UserWarning, match=sentence):
            assert list(read_cached(lambda: {"test": OTHER}, [source], {}, folder)["test"].paths) == ["z"]
    assert not folder.exists() or not list(folder.iterdir())


def test_images_that_were_moved_are_read_again(tmp_path):
    """One of three images that are looked for is enough, because images may be missing."""
    source, calls = tmp_path / "list.txt", []
    source.write_text("one")

    def read():
        calls.append(1)
        return {"train": ImageIndex(["a.png", "b.png", "c.png"], [1, 1, 1])}

    (tmp_path / "b.png").write_text("")
    for _ in range(2):
        read_cached(read, [source], {}, tmp_path / "cache", root=tmp_path)
    assert len(calls) == 1
    (tmp_path / "b.png").unlink()
    read_cached(read, [source], {}, tmp_path / "cache", root=tmp_path)
    assert len(calls) == 2
