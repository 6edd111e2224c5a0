"""ImageSet: its items, its random numbers, and images that cannot be read."""

import dataclasses
import warnings

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.datamodules import ImageIndex, ImageSet, training_transform
from lightning_retrieval.datamodules.image_index import DISTRACTOR
from lightning_retrieval.datamodules.item_seeds import SeededIndex
from lightning_retrieval.datamodules.loader import collate_images
from lightning_retrieval.models import Preparation
from lightning_retrieval.search.commands.embedding import ReadableImages
from tests.datamodules.pictures import TINY, as_it_is, picture


def test_items_hold_the_annotations_of_the_index(tmp_path):
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
    assert "cameras" not in batch
    people = ImageSet(ImageIndex(["a.png"] * 2, [7, 7], cameras=[2, 1]), tmp_path, as_it_is)
    batch = ImageSet.collate([people[1], people[0]])
    assert (batch["cameras"].tolist(), batch["cameras"].dtype) == ([1, 2], torch.int64)
    (tmp_path / "b.png").write_text("not an image")
    tagged = ImageSet(ImageIndex(["a.png", "b.png"], [7, 7], tags=[[2, 5], [3, -1]]), tmp_path, as_it_is)
    assert ImageSet.collate([tagged[0], tagged[0]])["tags"].tolist() == [[2, 5], [2, 5]]
    assert tagged.tags.tolist() == [[2, 5], [3, -1]]
    tagged.on_error = "skip"
    with pytest.warns(UserWarning, match="skipped .*b.png"):
        assert ImageSet.collate([tagged[1]])["tags"].tolist() == [[3, -1]]  # a black image that is in no list


def test_a_transform_gets_pixels_only_if_it_takes_them(tmp_path):
    picture(tmp_path / "a.jpg", size=(60, 50))
    index = ImageIndex(["a.jpg"], [0], boxes=[[3, 0, 40, 50]])
    kinds = []

    def kind_of(image):
        kinds.append(type(image))
        return torch.zeros(1)

    class Halved(ImageSet):
        def read(self, position):
            return super().read(position).reduce(2)

    preparation = Preparation(24, resize=24)
    images, halved = ImageSet(index, tmp_path, preparation), Halved(index, tmp_path, preparation)
    by_pillow = images.read(0)
    assert by_pillow.size == (37, 50)
    assert isinstance(images.input_of_transform(0), torch.Tensor)
    assert torch.equal(images[0]["images"], preparation(by_pillow))
    assert torch.equal(halved[0]["images"], preparation(by_pillow.reduce(2)))
    ImageSet(index, tmp_path, kind_of)[0]
    kind_of.takes_pixels = True
    ImageSet(index, tmp_path, kind_of)[0]
    assert kinds == [Image.Image, torch.Tensor]


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
    images = ImageSet(ImageIndex(names, range(4)), tmp_path, as_it_is)
    for position, kind in ((1, ValueError), (2, ValueError), (3, FileNotFoundError)):
        with pytest.raises(kind, match=rf"^ImageSet: cannot read the image {tmp_path / names[position]} "):
            images[position]
    images = ImageSet(ImageIndex(names, range(4)), tmp_path, as_it_is, on_error="skip")
    with pytest.warns(UserWarning, match=r"^ImageSet: skipped .*cut\.png, .*; skipped so far in this set: 1"):
        assert images[1]["skipped"] == str(tmp_path / "cut.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert images[SeededIndex(1, seed=0)].keys() == {"skipped"}  # only one warning
    with pytest.warns(UserWarning, match="skipped so far in this set: 2"):
        batch = ImageSet.collate([images[0], images[1], images[3]])
    assert batch["ids"].tolist() == [0]
    assert images.skipped == ["cut.png", "missing.png"]
    with pytest.raises(ValueError, match=rf"none of the 2 images .* \({tmp_path}/cut\.png, {tmp_path}/missing\.png\)"):
        ImageSet.collate([images[SeededIndex(1, seed=0)], images[SeededIndex(3, seed=0)]])
    placeholder = ImageSet.collate([images[1], images[3]])  # in evaluation
    assert {name: part.shape[0] for name, part in placeholder.items()} == dict.fromkeys(
        ("images", "labels", "ids", "roles"), 1
    )
    assert (placeholder["ids"].item(), placeholder["roles"].item(), placeholder["images"].any().item()) == (1, 0, False)


@pytest.mark.filterwarnings("ignore:ImageSet. skipped:UserWarning")  # issued by the workers
def test_images_skipped_by_workers_are_counted_in_the_training_process(tmp_path):
    names = [f"{i}.png" for i in range(8)]
    for name in names:
        picture(tmp_path / name)
    for position in (1, 4, 6):
        (tmp_path / names[position]).write_text("not an image")
    images = ImageSet(ImageIndex(names, range(8)), tmp_path, as_it_is, on_error="skip")
    loader = DataLoader(images, 2, num_workers=2, collate_fn=ImageSet.collate)
    assert torch.cat([batch["ids"] for batch in loader]).tolist() == [0, 2, 3, 5, 7]
    assert images.skipped == ["1.png", "4.png", "6.png"]


def as_numbers(image):
    return list(image.size)


@pytest.mark.slow
@pytest.mark.refusal
def test_an_error_in_a_worker_names_its_owner(tmp_path):
    """A process that loads images sends the message of an error, and so the error has its owner there already."""
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png", size=(5, 5))
    index = ImageIndex(["a.png", "b.png"], [0, 0])
    loader = DataLoader(ImageSet(index, tmp_path, as_numbers), 2, num_workers=1, collate_fn=ImageSet.collate)
    with pytest.raises(TypeError, match=r"ImageSet: `transform` must return a tensor .*, got list"):
        next(iter(loader))
    images = ImageSet(index, tmp_path, as_it_is)
    for collate, owner in ((ImageSet.collate, "ImageSet"), (collate_images, "RetrievalDataLoader")):
        loader = DataLoader(images, 2, num_workers=1, collate_fn=collate)
        with pytest.raises(ValueError, match=f"{owner}: images of a batch must have the same size"):
            next(iter(loader))


def test_a_batch_of_images_of_several_sizes_raises(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png", size=(5, 5))
    images = ImageSet(ImageIndex(["a.png", "b.png"], [0, 0]), tmp_path, as_it_is)
    with pytest.raises(ValueError, match=r"same size, got \(4, 6, 3\) of id \d+, \(5, 5, 3\) of id \d+"):
        ImageSet.collate([images[0], images[1]])


def test_jpegs_are_decoded_at_a_reduced_scale_if_the_transform_lets_them_be(tmp_path):
    picture(tmp_path / "a.jpg", size=(160, 120))
    picture(tmp_path / "b.png", size=(160, 120))
    index = ImageIndex(["a.jpg", "b.png", "a.jpg"], [0, 0, 0], boxes=[[0, 0, 160, 120]] * 2 + [[0, 0, 40, 40]])
    sizes = []

    def sizes_of(image):
        sizes.append(tuple(image.shape) if isinstance(image, torch.Tensor) else image.size)
        return torch.zeros(1)

    sizes_of.least_size = (30, 40)
    images = ImageSet(index, tmp_path, sizes_of)
    for position in range(3):
        images[position]
    sizes_of.takes_pixels = True
    for position in range(3):
        images[position]
    assert sizes == [(40, 30), (160, 120), (40, 40), (3, 30, 40), (3, 120, 160), (3, 40, 40)]
    assert images.read(0).size == (160, 120)  # in full, for `check` and for subclasses


@pytest.mark.parametrize("settings", [{}, {"interpolation": "bicubic"}])
def test_a_reduced_scale_gives_what_pillow_decodes_at_it(tmp_path, settings):
    picture(tmp_path / "a.jpg", size=(160, 120))
    index, preparation = ImageIndex(["a.jpg"], [0]), Preparation(24, resize=30, **settings)
    with Image.open(tmp_path / "a.jpg") as image:
        image.draft("RGB", (40, 30))
        wanted = preparation(image.convert("RGB"))
    reduced = dataclasses.replace(preparation, reduced_scale=True)
    assert torch.equal(ImageSet(index, tmp_path, reduced)[0]["images"], wanted)
    assert torch.equal(ImageSet(index, tmp_path, reduced).in_uint8()[0]["images"], preparation.undo(wanted))
    assert not torch.equal(ImageSet(index, tmp_path, preparation)[0]["images"], wanted)


def test_transparent_pixels_show_the_background_in_training_too(tmp_path):
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(tmp_path / "a.png")
    preparation = Preparation(16, background="#ff8000")
    images = ImageSet(ImageIndex(["a.png"], [0]), tmp_path, training_transform("plain", preparation))
    assert preparation.undo(images[0]["images"])[:, 0, 0].tolist() == [255, 128, 0]


def read_with_few_open_files(rank, world_size, folder):
    """The errors of reading an image while no further file can be opened, though unreadable images are skipped."""
    import resource

    images = ImageSet(ImageIndex(["a.png"], [0]), folder, TINY, on_error="skip")
    images[0]  # loads what a first image loads
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    messages = []
    for read in (lambda: images[0], lambda: ReadableImages(images)[0]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
        try:
            read()
        except Exception as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    return messages


@pytest.mark.refusal
def test_too_many_open_files_is_no_property_of_an_image(tmp_path, run_alone):
    picture(tmp_path / "a.png")
    of_set, of_command = run_alone(read_with_few_open_files, tmp_path)
    assert "(ulimit -n), or lower `num_workers`" in of_set
    assert "repair or remove" not in of_set
    assert "Too many open files" in of_command
