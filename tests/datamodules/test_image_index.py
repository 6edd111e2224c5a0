"""ImageIndex: its arrays, its checks, and its memory in the workers."""

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval.datamodules import (
    ImageIndex,
    ImageSet,
)
from lightning_retrieval.datamodules.image_index import class_numbers
from tests.datamodules.pictures import as_it_is


def test_an_index_can_be_sliced_and_converted_to_arrays():
    index = ImageIndex(
        ["a", "b", "c"],
        [4, 4, 2],
        categories=[1, 1, 0],
        roles=[1, 2, 3],
        boxes=[[0, 0, 2, 2]] * 3,
        instances=[9, 9, -7],
        cameras=[6, 6, 5],
        names=["x", "y"],
    )
    part = index[np.array([2, 0])]
    assert list(part.paths) == ["c", "a"]
    assert (part.labels.tolist(), part.categories.tolist(), part.roles.tolist()) == ([2, 4], [0, 1], [3, 1])
    assert (part.instances.tolist(), part.cameras.tolist()) == ([-7, 9], [5, 6])
    assert list(part.names) == ["x", "y"]
    again = ImageIndex.from_arrays(index.arrays())
    assert list(again.paths) == ["a", "b", "c"]
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
        ({"cameras": [1]}, ValueError, "`cameras` must have one entry for each of 2 paths, got 1"),
        ({"roles": [-1, 1]}, ValueError, "`roles` must be from 0 to 3, got -1"),
        ({"roles": [257, 1]}, ValueError, "`roles` must be from 0 to 3, got 257"),
        ({"roles": [1, 4]}, ValueError, r"`roles` must be from 0 to 3, got 4; take them from ROLES\."),
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


def test_classes_are_numbered_in_the_order_of_their_ids():
    labels, names = class_numbers([30, 7, 30, -2])
    assert labels.tolist() == [2, 1, 2, 0]
    assert names == ["-2", "7", "30"]
    assert class_numbers(["b", "a", "b"])[0].tolist() == [1, 0, 1]
