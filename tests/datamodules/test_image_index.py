"""ImageIndex: its arrays, its checks, and its memory in the workers."""

import itertools
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval.datamodules import ImageIndex, ImageSet
from lightning_retrieval.datamodules.image_index import read_cached
from tests.datamodules.pictures import as_it_is


def test_an_index_can_be_sliced_and_converted_to_arrays():
    index = ImageIndex(
        ["a", "b", "c"],
        [4, 4, 2],
        categories=[1, 1, 0],
        roles=[1, 1, 3],
        boxes=[[0, 0, 2, 2]] * 3,
        instances=[9, 9, -7],
        cameras=[6, 6, 5],
        tags=[[0, 1], [1, -1], [-1, -1]],
        names=["x", "y"],
        tag_names=["red", "blue"],
    )
    part = index[np.array([2, 0])]
    assert list(part.paths) == ["c", "a"]
    assert (part.labels.tolist(), part.categories.tolist(), part.roles.tolist()) == ([2, 4], [0, 1], [3, 1])
    assert (part.instances.tolist(), part.cameras.tolist()) == ([-7, 9], [5, 6])
    assert part.tags.tolist() == [[-1, -1], [0, 1]]
    assert (list(part.names), list(part.tag_names)) == (["x", "y"], ["red", "blue"])
    again = ImageIndex.from_arrays(index.arrays())
    assert (list(again.paths), list(again.tag_names)) == (["a", "b", "c"], ["red", "blue"])
    assert all(np.array_equal(value, index.arrays()[name]) for name, value in again.arrays().items())
    assert again.levels is None
    with pytest.raises(ValueError, match=r"^ImageIndex: `rows` must select at least one image, got none of 3\."):
        index[index.labels == 5]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"paths": "ab"}, TypeError, r"`paths` must be a sequence of strings, got one str\."),
        ({"paths": ["a", None]}, TypeError, r"`paths` must hold strings only, got None \(NoneType\)\."),
        ({"labels": [0.5, 1.0]}, TypeError, r"`labels` must be integers of 64 bits, got float64\."),
        ({"labels": [1, 10**30]}, TypeError, "`labels` must be integers of 64 bits, got object"),
        ({"paths": [], "labels": []}, ValueError, "`paths` must hold at least one image"),
        ({"paths": ["../a", "b"]}, ValueError, r"`paths` must lie inside the root, got '\.\./a'"),
        ({"paths": ["a", "a//b"]}, ValueError, "`paths` must be without './' and '//'"),
        ({"boxes": [[0, 0, 1, 1], [3, 0, 3, 5]]}, ValueError, r"`boxes` must .*, got \[3, 0, 3, 5\] for b \(1 such"),
        ({"boxes": [[0, 0, 1, 1], [0, 0, 1, 2**40]]}, ValueError, r"`boxes` must .*, got \[0, 0, 1, 10995"),
        ({"instances": [7, 7]}, ValueError, r"`instances` must .*, got \[0, 1\] for instance 7 \(a and b\)"),
        (
            {"labels": [1, 1], "instances": [4, 4], "cameras": [5, 6]},
            ValueError,
            r"`instances` must have one camera each, got \[5, 6\] for instance 4 \(a and b\)",
        ),
        (
            {"labels": [1, 1], "instances": [4, 4], "roles": [1, 2]},
            ValueError,
            r"`instances` must have one role each, got \[1, 2\] for instance 4 \(a and b\)",
        ),
        ({"cameras": [1]}, ValueError, "`cameras` must have one entry for each of 2 paths, got 1"),
        ({"roles": [-1, 1]}, ValueError, "`roles` must be from 0 to 3, got -1"),
        ({"roles": [257, 1]}, ValueError, "`roles` must be from 0 to 3, got 257"),
        ({"roles": [1, 4]}, ValueError, r"`roles` must be from 0 to 3, got 4; take them from ROLES\."),
        ({"tags": [1, 2]}, ValueError, r"`tags` must be \(images, tags\), got shape \(2,\)\."),
        ({"tags": [[1], [-2]]}, ValueError, r"`tags` must be numbers >= 0, or -1 for no tag, got -2\."),
        ({"tags": [["red"], ["blue"]]}, TypeError, "`tags` must be integers of 64 bits, got <U4"),
        ({"tags": [[1]]}, ValueError, "`tags` must have one entry for each of 2 paths, got 1"),
        (
            {"tags": [[1], [7]], "tag_names": ["red", "blue"]},
            ValueError,
            r"`tag_names` must have a name for each tag, got 2 for tag 7\.",
        ),
        ({"levels": [[5, 1], [5, 2]]}, ValueError, r"`levels` must nest, .* got \[5, 1\] for a and \[5, 2\] for b\."),
        ({"levels": [0, 1]}, ValueError, r"`levels` must be \(images, levels\), got shape \(2,\)\."),
        ({"paths": ["a", "a"]}, ValueError, r"`labels` must be the same .*, got \[0, 1\] for a\."),
        ({"paths": ["a", "a"], "boxes": [[0, 0, 2, 2]] * 2}, ValueError, r"`labels` must be the same .*, got \[0, 1\]"),
    ],
)
def test_contradictions_raise(arguments, error, sentence):
    with pytest.raises(error, match=f"^ImageIndex: {sentence}"):
        ImageIndex(**{"paths": ["a", "b"], "labels": [0, 1], **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"boxes": [[0, 0, 2, 2], [0, 0, 2, 3]]},
        {"labels": [1, 1]},
        {"labels": [1, -1]},
        {"instances": [4, 5]},  # as in IJB-C, where a few faces have two names
    ],
)
def test_an_image_may_be_listed_twice_without_a_contradiction(arguments):
    assert len(ImageIndex(**{"paths": ["a", "a"], "labels": [0, 1], **arguments})) == 2


class Touching(Dataset):
    """Reads all paths and labels; its only item is the private memory that this adds to the process, in MB."""

    def __init__(self, paths, labels):
        self.paths, self.labels = paths, labels

    def __len__(self):
        return 1

    def __getitem__(self, index):
        before = private_memory()
        for position in range(0, len(self.paths), 10):  # reads from each page of memory
            _ = self.paths[position], self.labels[position]
        return private_memory() - before


def private_memory() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1e3


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
def test_workers_do_not_copy_the_index():
    """The 200,000 paths take about 16 MB. Strings in a list are copied: reading one changes its reference count."""
    strings = [f"{number:080}.jpg" for number in range(200_000)]
    index = ImageIndex(strings, np.arange(200_000) // 4)
    # A page that no other process has read counts as private.
    assert sum(map(len, index.paths)) + index.labels.sum() > 0
    labels = ImageSet(index, "root", as_it_is).labels
    (grown,) = DataLoader(Touching(index.paths, labels), None, num_workers=1, multiprocessing_context="fork")
    assert grown < 5
    (grown,) = DataLoader(Touching(strings, labels.tolist()), None, num_workers=1, multiprocessing_context="fork")
    assert grown > 16
    arrays = sum(array.nbytes for array in index.arrays().values())
    assert len(pickle.dumps(index)) < 1.01 * arrays + 1000  # what is sent to workers that are spawned


def leaves_or_is_not_normalized(path):
    """The rule of paths, part by part."""
    parts = path.split("/")
    is_absolute = path.startswith(("/", "\\")) or (path[:1].isalpha() and path[1:2] == ":" and path[2:3] in ("/", "\\"))
    goes_up = ".." in path.replace("\\", "/").split("/")
    is_normalized = "" not in parts[1:] and "." not in parts[:-1] and "." not in parts[1:]
    return is_absolute or goes_up or not is_normalized


def test_all_short_paths_raise_or_not_as_the_rule_says():
    """Also beside paths that are regular, since a list is first looked at as a whole."""
    for length in range(4):
        for characters in itertools.product("ab./\\:", repeat=length):
            path = "".join(characters)
            for paths in ([path], ["b/c.jpg", path, "d.jpg"]):
                if leaves_or_is_not_normalized(path):
                    with pytest.raises(ValueError, match="`paths` must"):
                        ImageIndex(paths, range(len(paths)))
                else:
                    assert list(ImageIndex(paths, range(len(paths))).paths) == paths


# --- the cache of indexes


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
    sentence = rf"^ImageDataModule: the lists are read again because the cache file {file} cannot be read \("
    with pytest.warns(UserWarning, match=sentence):
        assert list(read_cached(read, [source], {}, folder)["train"].paths) == ["a.png"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(read_cached(read, [source], {}, folder)["train"].paths) == ["a.png"]


@pytest.mark.refusal
def test_a_cache_folder_that_is_a_file_raises(tmp_path):
    (tmp_path / "cache").write_text("")
    for folder in (tmp_path / "cache", tmp_path / "cache" / "deeper"):
        with pytest.raises(ValueError, match=rf"^`cache_dir` must be a folder .*, got {folder} \("):
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
