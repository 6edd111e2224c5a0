"""ImageFolder: finding classes in folders, splitting them by a seed or by folders, and training on them."""

import multiprocessing
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from torchvision.transforms.functional import to_tensor

from lightning_retrieval.datamodules.image_folder import ImageFolder
from lightning_retrieval.datamodules.image_index import split_by_class
from lightning_retrieval.datamodules.pairs import Pairs
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, write_folders, write_images

NAMES = ["a 1", "b", "c", "łódź", "日本"]


def described(index):
    """(path, name of the class) of each image."""
    return list(zip(index.paths, (index.names[label] for label in index.labels), strict=True))


def test_the_class_of_each_image_is_its_folder(tmp_path):
    paths = write_folders(tmp_path, NAMES)
    splits = ImageFolder(tmp_path).splits
    assert list(splits) == ["train", "test"]
    both = described(splits["train"]) + described(splits["test"])
    assert sorted(both) == sorted((path, path.split("/")[0]) for path in paths)
    for index in splits.values():
        assert index.labels.tolist() == np.repeat(np.arange(len(index.names)), 3).tolist()
        assert list(index.names) == sorted(index.names)
        assert index.categories is None


def test_classes_are_split_by_the_seed(tmp_path):
    names = [f"class {i}" for i in range(12)]
    write_folders(tmp_path, names, images=1)

    def test_names(**settings):
        splits = ImageFolder(tmp_path, **settings).splits
        assert sorted([*splits["train"].names, *splits["test"].names]) == sorted(names)
        return list(splits["test"].names)

    assert len(test_names(test_fraction=0.25)) == 3
    assert test_names() == test_names(split_seed=0, seed=5)
    assert test_names() != test_names(split_seed=1)
    drawn = np.random.default_rng(1).permutation(12)[:6]
    assert set(test_names(split_seed=1)) == {sorted(names)[i] for i in drawn}
    # The order in which the folders are found does not matter.
    assert split_by_class("fraction", names, 0.5, 3) == split_by_class("fraction", names[::-1], 0.5, 3)


def test_categories_are_the_folders_above_the_classes(tmp_path):
    paths = write_folders(tmp_path, ["pets/1", "pets/2", "birds/1", "birds/2", "ants/7", "ants/8"], images=2)
    splits = ImageFolder(tmp_path, categories=True).splits
    both = described(splits["train"]) + described(splits["test"])
    assert sorted(both) == sorted((path, path.rsplit("/", 1)[0]) for path in paths)
    numbers = {"ants": 0, "birds": 1, "pets": 2}
    for index in splits.values():
        assert index.categories.tolist() == [numbers[path.split("/")[0]] for path in index.paths]


def test_train_and_test_folders_are_the_split(tmp_path):
    write_folders(tmp_path, ["train/a", "train/b", "test/c"])
    splits = ImageFolder(tmp_path, test_fraction=0.9).splits
    assert {name: list(index.names) for name, index in splits.items()} == {"train": ["a", "b"], "test": ["c"]}
    assert list(splits["test"].paths) == ["test/c/0.jpg", "test/c/1.jpg", "test/c/2.jpg"]


def test_a_val_folder_beside_them_is_the_validation_set(tmp_path):
    write_folders(tmp_path, ["train/a", "train/b", "test/c", "val/d"])
    data = ImageFolder(tmp_path, **QUICK)
    assert list(data.splits["val"].names) == ["d"]
    assert list(data.val_set.index.paths) == ["val/d/0.jpg", "val/d/1.jpg", "val/d/2.jpg"]
    assert list(data.test_set.index.names) == ["c"]


def test_suffixes_may_be_upper_case_and_hidden_files_are_skipped(tmp_path):
    wanted = ["a/1.JPG", "a/2.Jpeg", "a/3.png", "b/1.webp", "b/2.TIF", "b/3.bmp"]
    for path in [*wanted, "a/x.jpg"]:
        write_image(tmp_path / path)
    (tmp_path / "a" / "x.jpg").rename(tmp_path / "a" / "._1.JPG")
    write_text(tmp_path / ".DS_Store", "")
    write_image(tmp_path / ".thumbnails" / "1.jpg")
    splits = ImageFolder(tmp_path).splits
    assert sorted([*splits["train"].paths, *splits["test"].paths]) == wanted


def test_other_files_are_counted_by_their_suffix_and_images_by_where_they_lie(tmp_path):
    write_folders(tmp_path, ["a", "b"])
    write_text(tmp_path / "read me.txt", "")
    write_text(tmp_path / "a" / "notes.csv", "")
    write_image(tmp_path / "alone.jpg")
    write_image(tmp_path / "b" / "deep" / "1.jpg")
    data = ImageFolder(tmp_path)
    with pytest.warns(UserWarning, match="^ImageFolder: ") as caught:
        data.prepare_data()
    assert [str(warning.message).replace(str(tmp_path), "ROOT") for warning in caught] == [
        "ImageFolder: ignored files in ROOT that are no images: 2, such as read me.txt (.csv 1, .txt 1).",
        "ImageFolder: images in ROOT that are not read, because they lie higher than <class>/<image>: 1, such as "
        "alone.jpg.",
        "ImageFolder: images in ROOT that are not read, because they lie deeper than <class>/<image>: 1, such as "
        'b/deep/1.jpg; classes="deepest" makes a class of each folder that contains images, classes="top" of each '
        "folder in the root with all that is in it, and a number of each folder at this depth.",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(map(len, data.splits.values())) == 6


def test_empty_folders_are_ignored_with_one_warning(tmp_path):
    write_folders(tmp_path, ["a", "b"])
    (tmp_path / "c").mkdir()
    (tmp_path / "d").mkdir()
    with pytest.warns(UserWarning, match=r"ignored folders in .* that contain no image: 2, such as c\.") as caught:
        splits = ImageFolder(tmp_path).splits
    assert len(caught) == 1
    assert sorted([*splits["train"].names, *splits["test"].names]) == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "categories", "cure"),
    [
        ([""], False, r"its 3 images are in no class folder: move those of each class into one, or use ImageTable"),
        (["pets/a", "birds/b"], False, r'one folder deeper: set categories=True .*, or classes="deepest"'),
        (["pets/a/1/2", "birds/b/3"], False, r'its 6 images lie deeper, such as .*: classes="deepest" makes'),
        (["a", "b"], True, r"one folder higher: set categories=False"),
        ([], False, r"there is no image"),
    ],
)
def test_a_root_without_classes_raises_with_a_suggestion(tmp_path, names, categories, cure):
    for name in names:
        write_folders(tmp_path / name if name else tmp_path, ["."])
    with pytest.raises(ValueError, match=rf"ImageFolder: `root` must contain images as <.*which .* does not; .*{cure}"):
        ImageFolder(tmp_path, categories=categories).prepare_data()


@pytest.mark.refusal
@pytest.mark.parametrize("classes", [None, "deepest"])
@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["train/a/1.jpg", "val/a/2.jpg"], r"which has train and val; rename val to test .*, or pass root=.*/train\.$"),
        (["train/a/1.jpg", "Validation/b/2.jpg"], r"which has train and Validation; rename Validation to test"),
        (
            ["bounding_box_train/1.jpg", "query/2.jpg", "bounding_box_test/3.jpg"],
            r"folders query and bounding_box_test ",
        ),
        (
            ["database/1.jpg", "queries/2.jpg"],
            r"whose folders queries and database hold queries and a gallery; write a t",
        ),
        (["train/a/1.jpg", "test/query/2.jpg", "test/gallery/3.jpg"], r"/test, whose folders query and gallery hold "),
    ],
)
def test_folders_of_splits_and_roles_are_no_classes(tmp_path, names, sentence, classes):
    """As torchvision, Market-1501 and data sets of places have them. Read as classes, each class would be two."""
    write_images(tmp_path, names)
    with pytest.raises(ValueError, match=rf"^ImageFolder: `root` must contain .*{sentence}"):
        _ = ImageFolder(tmp_path, classes=classes).splits


@pytest.mark.refusal
def test_classes_of_train_and_test_that_are_the_same_are_split_below_train(tmp_path):
    names = [f"{split}/{person}/1.jpg" for split in ("train", "test") for person in ("0000", "0001")]
    write_images(tmp_path, names)
    sentence = r"^ImageFolder: classes .* got 2 in train and test, such as '0000'; pass root="
    with pytest.raises(ValueError, match=sentence) as caught:
        _ = ImageFolder(tmp_path).splits
    cure = Path(str(caught.value).partition("root=")[2].partition(",")[0])
    assert sorted(len(index) for index in ImageFolder(cure).splits.values()) == [1, 1]


@pytest.mark.refusal
def test_lists_and_archives_of_images_are_answered_by_a_cure(tmp_path):
    """As `datasets` and `img2dataset` write them."""
    write_images(tmp_path, ["hf/1.jpg", "hf/2.jpg"])
    (tmp_path / "hf" / "metadata.jsonl").write_text("{}")
    (tmp_path / "wds").mkdir()
    (tmp_path / "wds" / "00000.tar").write_bytes(b"")
    for name, sentence in (
        ("hf", r"metadata\.jsonl has the labels of its 2 images: use HuggingFaceImages, which reads it"),
        ("wds", r"there is no image, only other files: \.tar 1; unpack archives"),
    ):
        with pytest.raises(ValueError, match=rf"^ImageFolder: `root` .*{sentence}\.$"):
            _ = ImageFolder(tmp_path / name).splits


def test_a_depth_at_which_there_is_no_class_names_the_images_above(tmp_path):
    write_folders(tmp_path, [".", "a", "b/c"])
    with pytest.raises(ValueError, match=r"`root` must contain images as .*; its 9 images lie higher than <folder>/"):
        ImageFolder(tmp_path, classes=3).prepare_data()


def test_a_fraction_that_leaves_no_class_raises(tmp_path):
    for fraction in (0, 1):
        with pytest.raises(ValueError, match=rf"ImageFolder: `test_fraction` must be between 0 and 1, got {fraction}"):
            ImageFolder(tmp_path, test_fraction=fraction)
    write_folders(tmp_path, ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"`test_fraction` must leave at least one class .*, got 0.1 of 3 classes"):
        ImageFolder(tmp_path, test_fraction=0.1).prepare_data()


def test_a_new_image_invalidates_the_cache(tmp_path):
    root = tmp_path / "images"
    write_folders(root, ["train/a", "train/b", "test/c"])
    first = ImageFolder(root, cache_dir=tmp_path / "cache").splits
    again = ImageFolder(root, cache_dir=tmp_path / "cache").splits
    assert described(again["train"]) == described(first["train"])
    assert len(list((tmp_path / "cache").iterdir())) == 1
    write_image(root / "train" / "b" / "new.jpg")
    assert "train/b/new.jpg" in list(ImageFolder(root, cache_dir=tmp_path / "cache").splits["train"].paths)


NESTED = ["birds", "birds/owl", "birds/owl/snowy", "fish/deep/sea/blue"]
CLASSES = {
    "deepest": {"birds": 3, "birds/owl": 3, "birds/owl/snowy": 3, "fish/deep/sea/blue": 3},
    "top": {"birds": 9, "fish": 3},
    1: {"birds": 9, "fish": 3},
    2: {"birds/owl": 6, "fish/deep": 3},
    3: {"birds/owl/snowy": 3, "fish/deep/sea": 3},
}


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("is_split", [False, True])
def test_classes_are_the_folders_at_any_depth(tmp_path, classes, is_split):
    for name in NESTED:
        write_folders(tmp_path / "train" / name, ["."])
        if is_split:
            write_folders(tmp_path / "test" / f"other {name}", ["."])
    data = ImageFolder(tmp_path if is_split else tmp_path / "train", classes=classes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        splits = data.splits
    found = {}
    for path, name in [pair for index in splits.values() for pair in described(index)]:
        assert f"/{name}/" in f"/{path}"
        found[name] = found.get(name, 0) + 1
    wanted = dict(CLASSES[classes])
    if is_split:
        wanted |= {f"other {name}": count for name, count in CLASSES[classes].items()}
    assert found == wanted
    unread = 12 * (1 + is_split) - sum(wanted.values())
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == bool(unread)
    assert all("because they lie higher than " in message and f": {unread}, such" in message for message in messages)
    assert data.sources()[0] == data.root
    assert {path.name for path in data.sources()} >= {"owl", "snowy", "blue"}


def test_images_beside_the_folders_of_the_splits_are_counted(tmp_path):
    write_folders(tmp_path, ["train/a", "train/b", "test/c", "more/d/deep"])
    with pytest.warns(
        UserWarning, match=r"not read, because they lie beside the folders train, test: 3, such as more/d/"
    ):
        ImageFolder(tmp_path).prepare_data()


def test_links_to_folders_above_end_no_walk_and_a_folder_is_read_once(tmp_path):
    write_folders(tmp_path, ["a/inner", "b/inner"])
    for name, target in (("a/inner/up", "../.."), ("b/inner/across", "../../a"), ("a/self", ".")):
        (tmp_path / name).symlink_to(target, target_is_directory=True)
    splits = ImageFolder(tmp_path, classes="deepest").splits
    paths = sorted([*splits["train"].paths, *splits["test"].paths])
    assert paths == [f"{name}/inner/{number}.jpg" for name in "ab" for number in range(3)]
    with pytest.raises(ValueError, match=r"must contain images as <class>/<image>"):
        ImageFolder(tmp_path).prepare_data()


def test_pictures_that_pillow_does_not_decode_are_named_first(tmp_path):
    write_folders(tmp_path, ["a", "b"])
    for number in range(12):
        write_text(tmp_path / "a" / f"{number}.txt", "")
        write_text(tmp_path / "b" / f"{number}.kind{number}", "")
    for name in ("a/1.HEIC", "a/2.heic", "b/3.jxl", "b/README"):
        write_text(tmp_path / name, "")
    sentence = (
        r"no images: 28, such as .* \(\.heic 2, \.jxl 1, \.txt 12, no suffix 1, \.kind0 1, .*, and 8 more suffixes; "
    )
    with pytest.warns(UserWarning, match=sentence + "convert pictures that Pillow does not decode, to PNG or JPEG"):
        ImageFolder(tmp_path).prepare_data()


@pytest.mark.refusal
@pytest.mark.parametrize("classes", ["deep", 0, -1, 1.5, True, ["top"], 10**9])
def test_other_classes_raise(tmp_path, classes):
    with pytest.raises((ValueError, TypeError), match=r"^ImageFolder: `classes` must be .*, got "):
        ImageFolder(tmp_path, classes=classes)


@pytest.mark.refusal
def test_classes_in_the_folders_of_categories_are_not_in_the_root(tmp_path):
    for classes in ("top", 1, "deepest"):
        with pytest.raises(ValueError, match=r"^ImageFolder: `classes` must be a depth of 2 or more .*, got "):
            ImageFolder(tmp_path, categories=True, classes=classes)
    write_folders(tmp_path, ["pets/cat/1", "pets/dog/1", "birds/owl"])
    splits = ImageFolder(tmp_path, categories=True, classes=2).splits
    both = [pair for index in splits.values() for pair in zip(index.paths, index.categories.tolist())]
    assert {(path.split("/")[0], number) for path, number in both} == {("pets", 1), ("birds", 0)}


@pytest.mark.refusal
def test_a_root_that_is_one_folder_too_high_raises(tmp_path):
    write_folders(tmp_path / "pets", ["cat", "dog"])
    with pytest.raises(ValueError, match=rf"categories=True if .*, or pass root={tmp_path}/pets\.$"):
        ImageFolder(tmp_path).prepare_data()
    write_folders(tmp_path / "split" / "pets", ["train/cat", "test/dog"])
    with pytest.raises(ValueError, match=rf"; pass root={tmp_path}/split/pets\.$"):
        ImageFolder(tmp_path / "split").prepare_data()


@pytest.mark.posix
def test_a_class_folder_may_be_a_link_and_special_files_are_ignored_with_a_warning(tmp_path):
    paths = write_folders(tmp_path / "root", ["a", "b"], images=2)
    (tmp_path / "root" / "b").rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "elsewhere" / "fifo.png")
    with pytest.warns(UserWarning, match=r"^ImageFolder: ignored .* that are no images: 1, such as b/fifo\.png "):
        splits = ImageFolder(tmp_path / "root").splits
    assert sorted([*splits["train"].paths, *splits["test"].paths]) == paths


@pytest.mark.refusal
def test_a_class_folder_that_cannot_be_listed_raises(tmp_path, as_another_user):
    write_folders(tmp_path / "root", ["a", "b", "c"], images=2)
    (tmp_path / "root" / "b").chmod(0)
    with as_another_user(), pytest.raises(OSError, match=r"^ImageFolder: the folder root/b cannot be listed \(Perm"):
        ImageFolder("root").read()
    (tmp_path / "root" / "b").chmod(0o755)


def test_only_suffixes_that_pillow_decodes_are_images(tmp_path):
    """Pillow knows of HDF5, GRIB, BUFR, WMF and MPEG files, but decodes none of them."""
    never = ["h5", "hdf", "grib", "bufr", "wmf", "emf", "mpg", "mpeg"]
    paths = write_folders(tmp_path, ["a", "b"], images=2, suffix=".WEBP")
    for suffix in never:
        write_text(tmp_path / "a" / f"video.{suffix}", "no image")
    with pytest.warns(UserWarning, match=r"ImageFolder: ignored files in .* no images: 8, such as a/video.bufr"):
        splits = ImageFolder(tmp_path).splits
    assert sorted([*splits["train"].paths, *splits["test"].paths]) == paths


@pytest.mark.refusal
def test_workers_that_cannot_get_the_transform_are_one_sentence(tmp_path, monkeypatch):
    """Workers are started anew on macOS, on Windows and, from Python 3.14 on, on Linux."""
    write_folders(tmp_path, NAMES)

    def data(transform=lambda image: to_tensor(image), **settings):
        return ImageFolder(tmp_path, eval_transform=transform, **settings)

    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    sentence = (
        r"^ImageFolder: `transform` must be picklable, because .* by 'spawn', got .*<lambda>.*, or set num_workers=0"
    )
    with pytest.raises(TypeError, match=sentence):
        data(num_workers=1).test_dataloader()
    queries, candidates = data(), data(to_tensor)
    with pytest.raises(TypeError, match=sentence.replace("ImageFolder", "Pairs")):
        Pairs(queries, candidates, num_workers=1).test_dataloader()
    assert data(num_workers=0).test_dataloader().num_workers == 0
    assert data(to_tensor, num_workers=1).test_dataloader().num_workers == 1
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")
    assert data(num_workers=1).test_dataloader().num_workers == 1
