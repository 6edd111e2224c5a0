"""Indexes of images, image sets and the data module over them: what is written to files comes out of the loaders."""

import os
import pickle
import warnings
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_retrieval import RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import (
    ImageDataModule,
    ImageIndex,
    ImageSet,
    reference_transform,
)
from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_unique, parse_integers, read_rows
from lightning_retrieval.datamodules.images.classes import class_numbers
from lightning_retrieval.datamodules.images.image_index import DISTRACTOR, ROLES
from lightning_retrieval.datamodules.images.index_cache import read_cached
from lightning_retrieval.datamodules.item_seeds import SeededIndex

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '(train|val|test)_dataloader' does not have many workers:UserWarning",
    "ignore:GPU available but not used:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]
STRINGS = ["a/b.jpg", "é/ü ñ.PNG", "", "x" * 300, "日本/語.jpg"]
ODD = ImageIndex(["z"], [3], roles=[1], instances=[5])
TINY = v2.Compose([v2.Resize((8, 8)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def as_it_is(image):
    return torch.from_numpy(np.asarray(image).copy())


# --- the index


def test_an_index_takes_arrays_and_rows():
    index = ImageIndex(
        ["a", "b", "c"],
        [4, 4, 2],
        categories=[1, 1, 0],
        roles=[1, 2, 3],
        boxes=[[0, 0, 2, 2]] * 3,
        instances=[9, 9, -7],
        names="xy",
    )
    part = index[np.array([2, 0])]
    assert list(part.paths) == ["c", "a"]
    assert (part.labels.tolist(), part.categories.tolist(), part.roles.tolist()) == ([2, 4], [0, 1], [3, 1])
    assert part.instances.tolist() == [-7, 9]
    assert list(part.names) == ["x", "y"]
    again = ImageIndex.from_arrays(index.arrays())
    assert list(again.paths) == ["a", "b", "c"]
    assert all(np.array_equal(value, index.arrays()[name]) for name, value in again.arrays().items())
    assert again.levels is None
    with pytest.raises(ValueError, match=r"^ImageIndex: `rows` must select at least one image, got none of 3\."):
        index[index.labels == 5]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([], []), "`paths` must hold at least one image"),
        ((["a"], [1, 2]), "`labels` must have one entry for each of 1 paths, got 2"),
        ((["../a"], [1]), r"`paths` must lie inside the root, got '\.\./a'"),
        ((["/a"], [1]), "must lie inside the root, got '/a'"),
        ((["a\\..\\..\\b"], [1]), "must lie inside the root"),
        ((["C:/a"], [1]), "must lie inside the root"),
        ((["./a"], [1]), "must be without './' and '//', got './a'"),
        ((["a/./b"], [1]), "must be without './' and '//'"),
        ((["a//b"], [1]), "must be without './' and '//'"),
        ((["a/b/."], [1]), "must be without './' and '//'"),
    ],
)
def test_bad_indexes_are_refused(arguments, sentence):
    with pytest.raises(ValueError, match=f"^ImageIndex: .*{sentence}"):
        ImageIndex(*arguments)


def test_boxes_without_pixels_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^ImageIndex: `boxes` must contain at least one pixel, got \[3, 0, 3, 5\] for b \(1 such boxes",
    ):
        ImageIndex(["a", "b"], [0, 0], boxes=[[0, 0, 1, 1], [3, 0, 3, 5]])


@pytest.mark.refusal
def test_instances_of_several_classes_are_refused():
    with pytest.raises(
        ValueError, match=r"^ImageIndex: `instances` must have one label each, got \[2, 3\] for instance 7 \(b and d\)"
    ):
        ImageIndex("abcd", [1, 2, 2, 3], instances=[4, 7, 7, 7])
    with pytest.raises(ValueError, match=r"^ImageIndex: `instances` must have one entry for each of 2 paths, got 3"):
        ImageIndex("ab", [1, 1], instances=[1, 2, 3])


def test_class_numbers_follow_the_sorted_ids():
    labels, names = class_numbers([30, 7, 30, -2])
    assert labels.tolist() == [2, 1, 2, 0]
    assert names == ["-2", "7", "30"]
    assert class_numbers(["b", "a", "b"])[0].tolist() == [1, 0, 1]


def test_a_cached_index_is_read_once_and_again_when_its_source_changes(tmp_path):
    source, calls = tmp_path / "list.txt", []
    source.write_text("one")

    def read():
        calls.append(1)
        return {"train": ImageIndex(STRINGS, range(5), names=["é"] * 5), "test/odd": ODD}

    for _ in range(2):
        splits = read_cached(read, [source], {"a": 1}, tmp_path / "cache")
        assert list(splits) == ["train", "test/odd"]
        assert list(splits["train"].paths) == STRINGS
        assert list(splits["train"].names) == ["é"] * 5
        assert (splits["test/odd"].roles.tolist(), splits["test/odd"].instances.tolist()) == ([1], [5])
        assert splits["train"].instances is None
    assert len(calls) == 1
    read_cached(read, [source], {"a": 2}, tmp_path / "cache")
    assert len(calls) == 2
    source.write_text("two, longer")
    read_cached(read, [source], {"a": 1}, tmp_path / "cache")
    assert len(calls) == 3
    assert not [file for file in (tmp_path / "cache").iterdir() if not file.name.startswith("index-")]


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: b"PK" + data[2:90], None])
def test_a_damaged_cache_is_read_again_and_overwritten(tmp_path, damage):
    source, folder = tmp_path / "list.txt", tmp_path / "cache"
    source.write_text("one")

    def read():
        return {"train": ImageIndex(["a.png"], [7])}

    read_cached(read, [source], {}, folder)
    (file,) = folder.iterdir()
    if damage is None:
        np.savez(file, labels=np.zeros(3))  # of something else
    else:
        file.write_bytes(damage(file.read_bytes()))
    sentence = rf"^ImageDataModule: the lists are read again because the cache file {file} is damaged \("
    with pytest.warns(UserWarning, match=sentence):
        assert list(read_cached(read, [source], {}, folder)["train"].paths) == ["a.png"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(read_cached(read, [source], {}, folder)["train"].paths) == ["a.png"]


@pytest.mark.refusal
def test_a_cache_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "cache").write_text("")
    for folder in (tmp_path / "cache", tmp_path / "cache" / "deeper"):
        with pytest.raises(ValueError, match=rf"^ImageDataModule: `cache_dir` must be a folder .*, got {folder} \("):
            read_cached(lambda: {"test": ODD}, [tmp_path / "cache"], {}, folder)


@pytest.mark.refusal
def test_boxes_beyond_32_bits_are_refused():
    with pytest.raises(
        ValueError, match=r"^ImageIndex: `boxes` must hold numbers of pixels below 2\*\*31, got \[0, 0, 1, 10995"
    ):
        ImageIndex(["a", "b"], [0, 0], boxes=[[0, 0, 1, 1], [0, 0, 1, 2**40]])


# --- files


def test_rows_are_read_as_they_stand(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("3\nid   path\n1   a/b.JPG\n\n2 \t ü.png  \n", encoding="utf-8-sig")
    assert list(read_rows("I", file, 2, header=["id", "path"], skip=1)) == [["1", "a/b.JPG"], ["2", "ü.png"]]
    with pytest.raises(ValueError, match=rf"^I: line 2 of {file} must be the header 'id way', got 'id   path'"):
        list(read_rows("I", file, 2, header=["id", "way"], skip=1))
    file.write_text("1 a\n2\n3 c d\n4 e\n")
    with pytest.raises(
        ValueError,
        match=rf"^I: each line of {file} must have 2 fields, got 2 with a different number of fields \(line 2, 3\)",
    ):
        list(read_rows("I", file, 2))
    file.write_text("1 a\n3 c d\n")
    assert len(list(read_rows("I", file, 2, more=True))) == 2
    with pytest.raises(ValueError, match=rf"^I: `id` must be integers in {file}, got '1x'"):
        parse_integers("I", file, "id", ["1", "1x"])
    with pytest.raises(ValueError, match=rf"^I: `id` must be different in each line of {file}, got 7 twice"):
        check_unique("I", file, "id", [7, 8, 7])


def test_a_root_one_folder_off_is_told_the_right_one(tmp_path):
    (tmp_path / "up" / "set" / "lists").mkdir(parents=True)
    file = tmp_path / "up" / "set" / "lists" / "train.txt"
    file.write_text("")
    assert find_file("I", tmp_path / "up" / "set", "train.txt", "lists/train.txt") == file
    for root in (tmp_path / "up", tmp_path / "up" / "set" / "lists"):
        with pytest.raises(
            FileNotFoundError, match=rf"^I: `root` must contain lists/train.txt, .* pass root={tmp_path}/up/set\."
        ):
            find_file("I", root, "lists/train.txt")
    with pytest.raises(FileNotFoundError, match="no folder near it contains one"):
        find_file("I", tmp_path, "test.txt")
    with pytest.raises(
        FileNotFoundError, match=r"must be a folder that contains a\.txt, got .*none, which does not exist"
    ):
        find_file("I", tmp_path / "none", "a.txt")


# --- images


def picture(path, mode="RGB", size=(6, 4)):
    """Its red is the column, its green the row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    grid[..., 0], grid[..., 1] = np.arange(size[0]) * 40, np.arange(size[1])[:, None] * 60
    image = Image.fromarray(grid).convert(mode)
    image.save(path)
    return grid


def test_images_are_rgb_upright_and_cropped(tmp_path):
    grid = picture(tmp_path / "a.png")
    picture(tmp_path / "grey.png", "L")
    picture(tmp_path / "cmyk.JPG", "CMYK")
    picture(tmp_path / "palette.png", "P")
    turned = Image.fromarray(grid)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    names = ["a.png", "grey.png", "cmyk.JPG", "palette.png", "turned.png"]
    images = ImageSet(ImageIndex(names, range(5)), tmp_path, as_it_is)
    assert [tuple(images[i]["images"].shape) for i in range(5)] == [(4, 6, 3)] * 4 + [(6, 4, 3)]
    assert np.array_equal(images[0]["images"], grid)
    assert np.array_equal(images[4]["images"], np.rot90(grid, -1))
    assert (images[1]["images"][..., 0] == images[1]["images"][..., 2]).all()
    boxes = ImageSet(
        ImageIndex(["a.png"] * 3, range(3), boxes=[[1, 2, 3, 4], [-5, -5, 2, 99], [9, 9, 12, 12]]), tmp_path, as_it_is
    )
    assert np.array_equal(boxes[0]["images"], grid[2:4, 1:3])
    assert np.array_equal(boxes[1]["images"], grid[:, :2])
    with pytest.raises(ValueError, match=r"a\.png \(its box \[9, 9, 12, 12\] lies outside of its 6 x 4\)"):
        boxes[2]


def save(path, values):
    Image.fromarray(values).save(path)
    return path.name


def mode_of(path):
    with Image.open(path) as image:
        return image.mode


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    """By 257, rounded: the largest number is white."""
    ramp = (np.arange(256, dtype=np.int64).reshape(16, 16) * 257).clip(max=65535)
    shades = ramp + np.arange(16) * 8  # up to half a step away
    shades[-1, -1] = 65535
    names = [
        save(tmp_path / "a.png", shades.astype(np.uint16)),
        save(tmp_path / "b.tif", shades.astype(">u2")),
        save(tmp_path / "c.tif", shades.astype(np.int32)),
    ]
    (tmp_path / "d.pgm").write_bytes(b"P5 16 16 65535\n" + shades.astype(">u2").tobytes())
    assert {mode_of(tmp_path / name) for name in names} == {"I;16", "I;16B", "I"}
    images = ImageSet(ImageIndex([*names, "d.pgm"], range(4)), tmp_path, as_it_is)
    wanted = np.array([[min(int(value / 257 + 0.5), 255) for value in row] for row in shades.tolist()])
    for place in range(4):
        found = images[place]["images"].numpy()
        assert found.shape == (16, 16, 3)
        assert all(np.array_equal(found[..., channel], wanted) for channel in range(3))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (np.full((4, 4), 0.5, np.float32), "it holds floating-point numbers, for which"),
        (np.full((4, 4), 65536, np.int32), "it holds 32-bit integers from 65536 to 65536, for which"),
        (np.full((4, 4), -1, np.int32), "it holds 32-bit integers from -1 to -1"),
        (np.full((4, 4), 200, np.int32), "it holds 32-bit integers from 200 to 200"),
    ],
)
def test_numbers_without_a_known_white_are_refused(tmp_path, values, sentence):
    images = ImageSet(ImageIndex([save(tmp_path / "a.tif", values)], [0]), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=rf"^ImageSet: cannot read the image {tmp_path}/a\.tif \({sentence}"):
        images[0]


def test_a_palette_with_transparency_keeps_its_colours_without_a_warning(tmp_path):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.save(tmp_path / "a.png", transparency=bytes([255, 128]))
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, as_it_is)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert images[0]["images"][0, 0].tolist() == [200, 100, 50]


@pytest.mark.parametrize("error", [RuntimeError("of a decoder"), NotImplementedError("of another")])
def test_any_error_of_a_decoder_names_the_path(tmp_path, monkeypatch, error):
    picture(tmp_path / "a.png")

    def fails(*_):
        raise error

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fails)
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=rf"^ImageSet: cannot read the image {tmp_path}/a\.png \(of a"):
        images[0]
    images.on_error = "skip"
    with pytest.warns(UserWarning, match="skipped so far: 1"):
        assert images[0]["roles"] == 0
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        images[0]


@pytest.mark.filterwarnings("ignore:ImageSet. skipped:UserWarning")
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("roles", [None, [1, 1, 1, 2, 2, 3, 2, 2]])
@pytest.mark.parametrize("instances", [None, [0, 1, 1, 1, 5, 5, 5, 7]])
def test_what_cannot_be_read_is_left_out_of_the_evaluation(tmp_path, batch, roles, instances):
    """Whatever the size of batches; also the frames of a video of which others can be read."""
    labels = [0, 1, 1, 1, 0, 0, 0, 1]
    names = [f"{place}.png" for place in range(8)]
    for place, name in enumerate(names):
        picture(tmp_path / name, size=(4 + place, 9 - place))
    for place in (2, 3, 6):
        (tmp_path / names[place]).write_text("not an image")
    index = ImageIndex(names, labels, roles=roles, instances=instances)
    images = ImageSet(index, tmp_path, TINY, on_error="skip")
    found, wanted = RetrievalMetrics((1, 2)), RetrievalMetrics((1, 2))

    def add(metrics, part):
        roles = part.get("roles", torch.full_like(part["labels"], 3))
        rows = part["images"].flatten(1) + 0.1
        metrics.update(rows, part["labels"], part["ids"], roles & 1 > 0, roles & 2 > 0, part.get("instances"))

    for part in DataLoader(images, batch, collate_fn=ImageSet.collate):
        add(found, part)
    add(wanted, ImageSet.collate([images[place] for place in (0, 1, 4, 5, 7)]))
    assert found.compute() == wanted.compute()
    assert images.skipped == ["2.png", "3.png", "6.png"]


def test_items_say_what_they_are(tmp_path):
    picture(tmp_path / "a.png")
    images = ImageSet(
        ImageIndex(["a.png"] * 2, [7, DISTRACTOR], roles=[3, 2], levels=[[7, 1], [8, 1]]), tmp_path, as_it_is
    )
    item = images[1]
    assert (item["labels"].tolist(), item["ids"].item(), item["roles"].item()) == ([8, 1], 1, 2)
    assert "instances" not in item
    assert images.labels.tolist() == [7, DISTRACTOR]
    batch = ImageSet.collate([images[0], images[1]])
    assert batch["images"].shape == (2, 4, 6, 3)
    assert batch["ids"].tolist() == [0, 1]
    with pytest.raises(IndexError):
        images[2]
    videos = ImageSet(ImageIndex(["a.png"] * 2, [7, 7], instances=[30, -1]), tmp_path, as_it_is)
    batch = ImageSet.collate([videos[1], videos[0]])
    assert batch["instances"].tolist() == [-1, 30]
    assert batch["instances"].dtype == torch.int64
    assert "roles" not in batch


def test_augmentation_follows_from_the_seed_of_the_index(tmp_path):
    picture(tmp_path / "a.png", size=(60, 50))
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, reference_transform("smooth_ap", train=True))
    before = torch.get_rng_state()
    one, same, other = (images[SeededIndex(0, seed=seed)]["images"] for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(images[0]["images"], images[0]["images"])  # without a seed, from the global state


def test_what_cannot_be_read_is_refused_or_skipped_and_counted(tmp_path):
    picture(tmp_path / "good.png")
    picture(tmp_path / "cut.png", size=(200, 200))
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:300])
    (tmp_path / "text.jpg").write_text("not an image")
    names = ["good.png", "cut.png", "text.jpg", "missing.png"]
    images = ImageSet(ImageIndex(names, range(4)), tmp_path, as_it_is)
    for place, kind in ((1, ValueError), (2, ValueError), (3, FileNotFoundError)):
        with pytest.raises(
            kind, match=rf"^ImageSet: cannot read the image {tmp_path / names[place]} .*on_error='skip'"
        ):
            images[place]
    images = ImageSet(ImageIndex(names, range(4)), tmp_path, as_it_is, on_error="skip")
    with pytest.warns(UserWarning, match=r"^ImageSet: skipped .*cut\.png, .*; skipped so far: 1"):
        assert images[1]["skipped"] == str(tmp_path / "cut.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert images[SeededIndex(1, seed=0)].keys() == {"skipped"}  # said once
    with pytest.warns(UserWarning, match="skipped so far: 2"):
        batch = ImageSet.collate([images[0], images[1], images[3]])
    assert batch["ids"].tolist() == [0]
    assert images.skipped == ["cut.png", "missing.png"]
    with pytest.raises(
        ValueError,
        match=rf"none of the 2 images of a batch could be read \({tmp_path}/cut\.png, {tmp_path}/missing\.png\)",
    ):
        ImageSet.collate([images[SeededIndex(1, seed=0)], images[SeededIndex(3, seed=0)]])
    stand_in = ImageSet.collate([images[1], images[3]])  # in evaluation
    assert {name: part.shape[0] for name, part in stand_in.items()} == dict.fromkeys(
        ("images", "labels", "ids", "roles"), 1
    )
    assert (stand_in["ids"].item(), stand_in["roles"].item(), stand_in["images"].any().item()) == (1, 0, False)


@pytest.mark.filterwarnings("ignore:ImageSet. skipped:UserWarning")  # said by the workers
def test_what_workers_skip_is_counted_in_the_training_process(tmp_path):
    names = [f"{i}.png" for i in range(8)]
    for name in names:
        picture(tmp_path / name)
    for place in (1, 4, 6):
        (tmp_path / names[place]).write_text("not an image")
    images = ImageSet(ImageIndex(names, range(8)), tmp_path, as_it_is, on_error="skip")
    loader = DataLoader(images, 2, num_workers=2, collate_fn=ImageSet.collate)
    assert torch.cat([batch["ids"] for batch in loader]).tolist() == [0, 2, 3, 5, 7]
    assert images.skipped == ["1.png", "4.png", "6.png"]


class Touching(Dataset):
    """Goes through all paths and labels; the item is the memory that this takes of the process's own, in MB."""

    def __init__(self, paths, labels):
        self.paths, self.labels = paths, labels

    def __len__(self):
        return 1

    def __getitem__(self, index):
        before = private_memory()
        for place in range(0, len(self.paths), 10):  # some of each page of memory
            _ = self.paths[place], self.labels[place]
        return private_memory() - before


def private_memory() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1e3


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("as_arrays", [True, False])
def test_workers_do_not_copy_the_index(as_arrays):
    """About 16 MB in 200,000 paths; strings in a list are copied, since reading one changes its reference count."""
    strings = [f"{number:080}.jpg" for number in range(200_000)]
    index = ImageIndex(strings, np.arange(200_000) // 4)
    images = ImageSet(index, "root", as_it_is)
    dataset = Touching(index.paths, images.labels) if as_arrays else Touching(strings, images.labels.tolist())
    loader = DataLoader(dataset, None, num_workers=1, multiprocessing_context="fork")
    (grown,) = loader
    assert grown < 5 if as_arrays else grown > 16
    if as_arrays:
        arrays = sum(array.nbytes for array in index.arrays().values())
        assert len(pickle.dumps(index)) < 1.01 * arrays + 1000  # what is sent where workers are started anew


def test_images_of_several_sizes_do_not_make_a_batch(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png", size=(5, 5))
    images = ImageSet(ImageIndex(["a.png", "b.png"], [0, 0]), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=r"must have one size, got \[\(4, 6, 3\), \(5, 5, 3\)\]; .* eval_batch_size=1"):
        ImageSet.collate([images[0], images[1]])


@pytest.mark.parametrize(
    ("name", "train", "shape"),
    [
        *((name, train, (3, 224, 224)) for name in ("plain", "smooth_ap", "roadmap") for train in (True, False)),
        ("ap_gem", True, (3, 800, 800)),
        ("ap_gem", False, (3, 300, 400)),
    ],
)
def test_reference_transforms_end_in_normalised_tensors(name, train, shape):
    grey = Image.new("RGB", (400, 300), (124, 116, 104))  # the mean
    tensor = reference_transform(name, train=train)(grey)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == torch.float32
    if name != "ap_gem" or not train:  # whose colours are changed
        assert tensor.abs().max() < 0.02


def test_roadmap_squeezes_where_the_others_crop():
    wide = Image.new("RGB", (512, 256))
    wide.paste((255, 255, 255), (0, 0, 100, 256))  # the left fifth
    left = {
        name: reference_transform(name, train=False)(wide)[0, 112, 0] > 0 for name in ("plain", "smooth_ap", "roadmap")
    }
    assert left == {"plain": False, "smooth_ap": False, "roadmap": True}


def test_an_unknown_transform_is_refused():
    with pytest.raises(ValueError, match=r"^reference_transform: `name` must be one of 'plain', .*, got 'x'"):
        reference_transform("x", train=True)


# --- the data module


class Pictures(ImageDataModule):
    """Classes 0 to 5 in training, 6 to 8 in evaluation, four images each."""

    published_counts = MappingProxyType({"train": [(24, 6)], "test": [(13, 3), (13, 4)]})

    def __init__(self, root, parts=("train", "test"), **settings):
        small = {"train_transform": TINY, "eval_transform": TINY, "classes_per_batch": 2, "samples_per_class": 4}
        super().__init__(root, **{**small, **settings})
        self.parts = parts

    def read(self):
        classes = {"train": range(6), "val": range(20, 22), "test": range(6, 9), "hard": range(9, 12)}
        return {part: self.of(classes[part]) for part in self.parts}

    def of(self, classes):
        paths = [f"{label}/{number}.png" for label in classes for number in range(4)]
        labels, names = class_numbers([int(path.split("/")[0]) for path in paths])
        return ImageIndex(paths, labels, categories=labels // 2, names=names)

    def sources(self):
        return [self.root / "list.txt"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    (root / "list.txt").write_text("")
    for label in [*range(12), 20, 21]:
        for number in range(4):
            picture(root / f"{label}/{number}.png", size=(10 + label, 12))
    return root


def fit(data, steps=2):
    torch.manual_seed(0)
    module = RetrievalModule(nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), SmoothAPLoss())
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[RetrievalEvaluation(ks=(1,))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=data)
    trained = dict(trainer.callback_metrics)
    trainer.validate(module, datamodule=data, verbose=False)
    return {**trained, **trainer.callback_metrics}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", ["pk", "category", "all_classes"])
def test_a_module_trains_and_validates(tree, workers, sampler):
    settings = {"classes_per_batch": 6, "samples_per_class": 2} if sampler == "all_classes" else {}
    found = fit(Pictures(tree, num_workers=workers, sampler=sampler, **settings))
    assert 0 < found["val/mAP"] <= 1
    assert found["val/skipped_queries"] == 0


def test_several_sets_are_logged_by_name(tree):
    found = fit(Pictures(tree, parts=("train", "test", "hard")))
    assert {"val/test/mAP", "val/hard/mAP", "val/hard/R@1"} <= set(found)
    alone = fit(Pictures(tree, parts=("train", "hard")))
    assert alone["val/hard/mAP"] == found["val/hard/mAP"]


def test_which_images_checkpoints_are_chosen_by(tree):
    assert Pictures(tree).val_set is Pictures(tree).test_set or len(Pictures(tree).val_set) == 12
    assert len(Pictures(tree, parts=("train", "val", "test")).val_set) == 8
    only_val = Pictures(tree, parts=("train", "val"))
    assert list(only_val.test_set.index.paths) == list(only_val.val_set.index.paths)
    held = Pictures(tree, val_fraction=0.34, seed=1)
    assert (len(held.train_set), len(held.val_set), len(held.test_set)) == (16, 8, 12)
    assert not set(held.train_set.index.paths) & set(held.val_set.index.paths)
    assert held.val_set.transform is held.eval_transform
    assert list(Pictures(tree, val_fraction=0.34, seed=1).val_set.index.paths) == list(held.val_set.index.paths)
    with pytest.raises(ValueError, match=r"`val_fraction` must leave classes on both sides, got 0.05 of 6 classes"):
        _ = Pictures(tree, val_fraction=0.05).train_set
    with pytest.raises(ValueError, match="Pictures: has no split 'train', only 'test'"):
        _ = Pictures(tree, parts=("test",)).train_set


def test_classes_of_training_are_refused_in_evaluation(tree):
    class Mixed(Pictures):
        def read(self):
            return {"train": self.of(range(4)), "test": self.of(range(3, 6))}

    with pytest.raises(
        ValueError, match=r"^Mixed: classes must be in training or .* got 1 in train and test, such as '3'"
    ):
        Mixed(tree).prepare_data()
    Mixed.shared_classes = True
    with pytest.raises(ValueError, match=r"^Mixed: images must be in .* got 4 in train and test, such as 3/0\.png"):
        Mixed(tree).prepare_data()

    class Shared(Mixed):
        def read(self):
            index = self.of(range(4))
            return {"train": index[::2], "test": index[1::2]}

    Shared(tree).prepare_data()


def test_the_index_is_kept_in_the_cache(tree, tmp_path):
    first = Pictures(tree, cache_dir=tmp_path).splits
    (file,) = tmp_path.iterdir()
    os.utime(file, (1, 1))
    again = Pictures(tree, cache_dir=tmp_path).splits
    assert file.stat().st_mtime == 1
    assert list(again["test"].paths) == list(first["test"].paths)
    assert len(Pictures(tree, parts=("train", "test", "hard"), cache_dir=tmp_path).splits) == 3  # other settings


def test_check_shows_the_papers_counts_and_what_is_missing(tree):
    report = Pictures(tree, parts=("train", "test", "hard")).check()
    assert not report.ok  # 12 test images, not 13
    published = Pictures.published_counts
    assert report.splits == {
        "train": ((24, 6), published["train"]),
        "test": ((12, 3), published["test"]),
        "hard": ((12, 3), ()),
    }
    assert str(report).splitlines()[2:] == [
        "test       12        3                 13   3 or 4",
        "hard       12        3",
    ]
    assert Pictures(tree, parts=("train",)).check().ok

    class Gone(Pictures):
        def of(self, classes):
            return ImageIndex(["0/0.png", "0/0.png", "gone/é.png"], [0, 0, 1])

    report = Gone(tree, parts=("train",)).check()
    assert report.missing_files == ["gone/é.png"]
    assert report.problems == ["1 paths are listed twice in train"]
    assert "missing: gone/é.png" in str(report)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"val_fraction": 1.0}, "`val_fraction` must be at least 0 and below 1, got 1.0"),
        ({"on_error": "ignore"}, "`on_error` must be one of 'raise', 'skip', got 'ignore'"),
        (
            {"sampler": "random"},
            "`sampler` must be one of 'pk', 'category', 'all_classes', or a GlobalBatchSampler, got 'random'",
        ),
    ],
)
def test_settings_are_checked(tree, settings, sentence):
    with pytest.raises(ValueError, match=f"^Pictures: {sentence}"):
        Pictures(tree, **settings)


def test_roles_decide_who_is_ranked_for_whom(tree):
    """Queries, gallery and distractors in one set, against the metrics given the same masks."""

    class Roles(Pictures):
        def read(self):
            index = self.of(range(6, 9))
            index.roles = np.array([ROLES[r] for r in ("query", "gallery", "both", "distractor")] * 3, dtype=np.uint8)
            index.labels[3::4] = DISTRACTOR
            return {"train": self.of(range(6)), "test": index}

    data = Roles(tree, eval_batch_size=5)
    found = fit(data)
    torch.manual_seed(0)
    module = RetrievalModule(nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), SmoothAPLoss())
    pl.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    ).fit(module, datamodule=data)  # fmt: skip
    batch = ImageSet.collate([data.test_set[i] for i in range(12)])
    metrics = RetrievalMetrics(ks=(1,))
    query = torch.tensor([True, False, True, False] * 3)
    module.eval()
    with torch.no_grad():
        metrics.update(
            module(batch["images"]),
            batch["labels"],
            batch["ids"],
            query,
            ~query | torch.tensor([False, False, True, False] * 3),
        )
    assert found["val/mAP"].item() == pytest.approx(metrics.compute()["mAP"].item(), abs=1e-6)
