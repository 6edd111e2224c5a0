"""ImageIndex and ImageSet: items, their annotations and their memory, and images that cannot be read."""

import dataclasses
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.datamodules import ImageIndex, ImageSet, PKSampler, RetrievalDataLoader, training_transform
from lightning_retrieval.models import Preparation
from tests.datamodules.pictures import TINY, as_it_is, picture

# --- the index


def test_an_index_can_be_sliced():
    index = ImageIndex(
        ["a", "b", "c"],
        [4, 4, 2],
        categories=[1, 1, 0],
        levels=[[4, 0], [4, 0], [2, 0]],
        roles=[1, 1, 3],
        boxes=[[0, 0, 2, 2], [0, 0, 2, 2], [0, 0, 3, 3]],
        instances=[9, 9, -7],
        cameras=[6, 6, 5],
        tags=[[0, 1], [1, -1], [-1, -1]],
        names=["u", "v", "w", "x", "y"],
        tag_names=["red", "blue"],
    )
    part = index[np.array([2, 0])]
    assert list(part.paths) == ["c", "a"]
    assert (part.labels.tolist(), part.categories.tolist(), part.roles.tolist()) == ([2, 4], [0, 1], [3, 1])
    assert (part.instances.tolist(), part.cameras.tolist()) == ([-7, 9], [5, 6])
    assert (part.levels.tolist(), part.boxes[0].tolist()) == ([[2, 0], [4, 0]], [0, 0, 3, 3])
    assert part.tags.tolist() == [[-1, -1], [0, 1]]
    assert (list(part.names), list(part.tag_names)) == (["u", "v", "w", "x", "y"], ["red", "blue"])


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
def test_workers_do_not_copy_the_list_of_images():
    """The 200,000 paths take about 16 MB. Strings in a list are copied: reading one changes its reference count."""
    strings = [f"{number:080}.jpg" for number in range(200_000)]
    images = ImageSet(ImageIndex(strings, np.arange(200_000) // 4), "root", as_it_is)
    paths = images.index.paths
    # A page that no other process has read counts as private.
    assert sum(map(len, paths)) + images.labels.sum() > 0
    (grown,) = DataLoader(Touching(paths, images.labels), None, num_workers=1, multiprocessing_context="fork")
    assert grown < 5
    (grown,) = DataLoader(Touching(strings, strings), None, num_workers=1, multiprocessing_context="fork")
    assert grown > 16
    assert len(pickle.dumps(images)) < 21e6  # what is sent to workers that are spawned


# --- items


def test_items_hold_the_annotations_of_the_index(tmp_path):
    picture(tmp_path / "a.png")

    def batch_of(labels, **annotations):
        images = ImageSet(ImageIndex(["a.png"] * 2, labels, **annotations), tmp_path, as_it_is)
        assert images.labels.tolist() == labels
        return ImageSet.collate([images[1], images[0]])

    batch = batch_of([7, -1], roles=[3, 2], levels=[[7, 1], [8, 1]])
    assert batch["images"].shape == (2, 4, 6, 3)
    assert (batch["labels"].tolist(), batch["ids"].tolist(), batch["roles"].tolist()) == (
        [[8, 1], [7, 1]],
        [1, 0],
        [2, 3],
    )
    assert batch.keys() == {"images", "labels", "ids", "roles"}
    batch = batch_of([7, 7], instances=[30, -1])
    assert (batch["labels"].tolist(), batch["instances"].tolist()) == ([7, 7], [-1, 30])
    assert batch["instances"].dtype == torch.int64
    assert batch.keys() == {"images", "labels", "ids", "instances"}
    assert batch_of([7, 7], cameras=[2, 1])["cameras"].tolist() == [1, 2]
    assert batch_of([7, 7], tags=[[2, 5], [3, -1]])["tags"].tolist() == [[3, -1], [2, 5]]


def test_a_preparation_gives_the_same_from_a_decoded_file_and_from_an_image(tmp_path):
    """Also in a subclass with another way to read images."""
    picture(tmp_path / "a.jpg", size=(60, 50))
    index = ImageIndex(["a.jpg"], [0], boxes=[[3, 0, 40, 50]])

    class Halved(ImageSet):
        def read(self, position):
            return super().read(position).reduce(2)

    preparation = Preparation(24, resize=24)
    images, halved = ImageSet(index, tmp_path, preparation), Halved(index, tmp_path, preparation)
    by_pillow = images.read(0)
    assert by_pillow.size == (37, 50)
    assert torch.equal(images[0]["images"], preparation(by_pillow))
    assert torch.equal(halved[0]["images"], preparation(by_pillow.reduce(2)))


@pytest.mark.parametrize("settings", [{}, {"interpolation": "bicubic"}])
def test_a_jpeg_at_a_reduced_scale_is_what_pillow_decodes_at_it(tmp_path, settings):
    """Other formats, and parts of an image, are decoded in full."""
    picture(tmp_path / "a.jpg", size=(160, 120))
    picture(tmp_path / "a.png", size=(160, 120))
    preparation = Preparation(24, resize=30, **settings)
    with Image.open(tmp_path / "a.jpg") as image:
        image.draft("RGB", (40, 30))
        wanted = preparation(image.convert("RGB"))
    boxes = [[0, 0, 160, 120], [0, 0, 160, 120], [0, 0, 40, 40]]
    index = ImageIndex(["a.jpg", "a.png", "a.jpg"], [0, 0, 0], boxes=boxes)
    full = ImageSet(index, tmp_path, preparation)
    reduced = ImageSet(index, tmp_path, dataclasses.replace(preparation, reduced_scale=True))
    assert torch.equal(reduced[0]["images"], wanted)
    assert not torch.equal(full[0]["images"], wanted)
    assert reduced.read(0).size == (160, 120)
    for position in (1, 2):
        assert torch.equal(reduced[position]["images"], full[position]["images"])
    assert torch.equal(reduced.in_uint8()[0]["images"], preparation.undo(wanted))


def test_transparent_pixels_show_the_background_in_training_too(tmp_path):
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(tmp_path / "a.png")
    preparation = Preparation(16, background="#ff8000")
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, training_transform("plain", preparation))
    assert preparation.undo(images[0]["images"])[:, 0, 0].tolist() == [255, 128, 0]


# --- images that cannot be read


@pytest.mark.filterwarnings("ignore:ImageSet. skipped:UserWarning")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("roles", [None, [1, 1, 1, 1, 3, 3, 3, 2]])  # one role for each instance
@pytest.mark.parametrize(
    ("instances", "cameras"),
    [(None, None), ([0, 1, 1, 1, 5, 5, 5, 7], None), ([0, 1, 1, 1, 5, 5, 5, 7], [0, 1, 1, 1, 1, 1, 1, 1])],
)
def test_unreadable_images_do_not_count_in_the_evaluation(tmp_path, batch, roles, instances, cameras):
    """Whatever the size of batches; also the frames of a video of which others can be read."""
    labels = [0, 1, 1, 1, 0, 0, 0, 1]
    names = [f"{position}.png" for position in range(8)]
    for position, name in enumerate(names):
        picture(tmp_path / name, size=(4 + position, 9 - position))
    for position in (2, 3, 6):
        (tmp_path / names[position]).write_text("not an image")
    index = ImageIndex(names, labels, roles=roles, instances=instances, cameras=cameras)
    images = ImageSet(index, tmp_path, TINY, on_error="skip")
    found, wanted = RetrievalMetrics((1, 2)), RetrievalMetrics((1, 2))

    def add(metrics, part):
        roles = part.get("roles", torch.full_like(part["labels"], 3))
        rows = part["images"].flatten(1) + 0.1
        optional = {name: part.get(name) for name in ("instances", "cameras")}
        metrics.update(rows, part["labels"], part["ids"], roles, **optional)

    for part in DataLoader(images, batch, collate_fn=ImageSet.collate):
        add(found, part)
    add(wanted, ImageSet.collate([images[position] for position in (0, 1, 4, 5, 7)]))
    assert found.compute() == wanted.compute()
    assert images.skipped == ["2.png", "3.png", "6.png"]


def test_unreadable_images_raise_or_are_skipped_and_counted(tmp_path):
    picture(tmp_path / "good.png")
    picture(tmp_path / "cut.png", size=(200, 200))
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:300])
    (tmp_path / "text.jpg").write_text("not an image")
    names = ["good.png", "cut.png", "text.jpg", "missing.png"]
    index = ImageIndex(names, range(4), tags=[[2, 5], [3, -1], [-1, -1], [0, -1]])
    images = ImageSet(index, tmp_path, as_it_is)
    for position, kind in ((1, ValueError), (2, ValueError), (3, FileNotFoundError)):
        with pytest.raises(kind, match=rf"^ImageSet: .*{tmp_path / names[position]} "):
            images[position]
    images = ImageSet(index, tmp_path, as_it_is, on_error="skip")
    with pytest.warns(UserWarning, match=r"^ImageSet: skipped .*cut\.png, .*: 1"):
        assert images[1]["skipped"] == str(tmp_path / "cut.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images[1]  # only one warning
    with pytest.warns(UserWarning, match="skipped so far in this set: 2"):
        batch = ImageSet.collate([images[0], images[1], images[3]])
    assert batch["ids"].tolist() == [0]
    assert images.skipped == ["cut.png", "missing.png"]
    placeholder = ImageSet.collate([images[1], images[3]])  # a black image that is in no list
    assert {name: len(part) for name, part in placeholder.items()} == dict.fromkeys((*batch, "roles"), 1)
    assert (placeholder["ids"].item(), placeholder["roles"].item(), placeholder["images"].any().item()) == (1, 0, False)
    assert placeholder["tags"].tolist() == [[3, -1]]


@pytest.mark.filterwarnings("ignore:ImageSet. skipped:UserWarning")  # issued by the workers
def test_images_skipped_by_workers_are_counted_in_the_training_process(tmp_path):
    """A training batch in which no image can be read ends the run."""
    names = [f"{i}.png" for i in range(8)]
    for name in names:
        picture(tmp_path / name)
    for position in (1, 4, 6):
        (tmp_path / names[position]).write_text("not an image")
    images = ImageSet(ImageIndex(names, range(8)), tmp_path, as_it_is, on_error="skip")
    loader = DataLoader(images, 2, num_workers=2, collate_fn=ImageSet.collate)
    assert torch.cat([batch["ids"] for batch in loader]).tolist() == [0, 2, 3, 5, 7]
    assert images.skipped == ["1.png", "4.png", "6.png"]
    unreadable = ImageSet(ImageIndex(["1.png", "4.png"], [0, 0]), tmp_path, as_it_is, on_error="skip")
    sampler = PKSampler([0, 0], classes_per_batch=1, samples_per_class=2)
    with pytest.raises(ValueError, match=r"1\.png"):
        next(iter(RetrievalDataLoader(unreadable, sampler, collate_fn=ImageSet.collate)))


def read_with_few_open_files(rank, world_size, folder):
    """The error of reading an image while no further file can be opened, though unreadable images are skipped."""
    import resource

    images = ImageSet(ImageIndex(["a.png"], [0]), folder, TINY, on_error="skip")
    images[0]  # loads what a first image loads
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    try:
        return str(images[0])
    except ValueError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


@pytest.mark.refusal
def test_too_many_open_files_is_no_property_of_an_image(tmp_path, run_alone):
    picture(tmp_path / "a.png")
    assert "Too many open files" in run_alone(read_with_few_open_files, tmp_path)
