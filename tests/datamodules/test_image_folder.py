"""ImageFolder: finding classes in folders, and splitting them by a seed or by folders."""

import warnings

import numpy as np
import pytest

from lightning_retrieval.datamodules import ImageFolder, ImageTable
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, write_folders


def described(splits):
    """(path, name of the class) of each image of all splits, sorted."""
    found = []
    for index in splits.values():
        found += zip(index.paths, (index.names[label] for label in index.labels), strict=True)
    return sorted(found)


def paths_of(splits):
    return [path for path, _ in described(splits)]


def messages_of(data):
    """The splits, and the warnings with which they were read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        splits = data.splits
    return splits, [str(warning.message) for warning in caught]


def test_the_class_of_each_image_is_its_folder(tmp_path, monkeypatch):
    paths = write_folders(tmp_path / "photos", ["a 1", "b", "c", "łódź", "日本"])
    monkeypatch.setenv("HOME", str(tmp_path))
    splits = ImageFolder("~/photos").splits
    assert list(splits) == ["train", "test"]
    assert described(splits) == sorted((path, path.split("/")[0]) for path in paths)
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
    drawn = np.random.default_rng(1).permutation(12)[:6]
    assert set(test_names(split_seed=1)) == {sorted(names)[i] for i in drawn} != set(test_names())


def test_categories_are_the_folders_above_the_classes(tmp_path):
    paths = write_folders(tmp_path, ["pets/1", "pets/2", "birds/1", "birds/2", "ants/7", "ants/8"], images=2)
    splits = ImageFolder(tmp_path, categories=True).splits
    assert described(splits) == sorted((path, path.rsplit("/", 1)[0]) for path in paths)
    numbers = {"ants": 0, "birds": 1, "pets": 2}
    for index in splits.values():
        assert index.categories.tolist() == [numbers[path.split("/")[0]] for path in index.paths]


def test_folders_train_and_test_are_the_split_and_val_the_validation_set(tmp_path):
    write_folders(tmp_path, ["train/a", "train/b", "test/c"])
    data = ImageFolder(tmp_path, test_fraction=0.9, **QUICK)
    assert {name: list(index.names) for name, index in data.splits.items()} == {"train": ["a", "b"], "test": ["c"]}
    assert list(data.val_set.index.paths) == ["test/c/0.jpg", "test/c/1.jpg", "test/c/2.jpg"]
    write_folders(tmp_path, ["val/d"])
    data = ImageFolder(tmp_path, **QUICK)
    assert list(data.val_set.index.paths) == ["val/d/0.jpg", "val/d/1.jpg", "val/d/2.jpg"]
    assert list(data.test_set.index.names) == ["c"]


def test_images_are_known_by_suffixes_that_pillow_decodes_and_hidden_files_are_skipped(tmp_path):
    """Pillow also knows the suffixes of HDF5 and MPEG files, but decodes none of them."""
    wanted = ["a/1.JPG", "a/2.Jpeg", "a/3.png", "b/1.webp", "b/2.TIF", "b/3.bmp"]
    for path in [*wanted, "a/x.jpg"]:
        write_image(tmp_path / path)
    (tmp_path / "a" / "x.jpg").rename(tmp_path / "a" / "._1.JPG")
    write_text(tmp_path / ".DS_Store", "")
    write_image(tmp_path / ".thumbnails" / "1.jpg")
    for suffix in ("h5", "mpg"):
        write_text(tmp_path / "a" / f"video.{suffix}", "no image")
    splits, messages = messages_of(ImageFolder(tmp_path))
    assert paths_of(splits) == wanted
    assert len(messages) == 1
    assert "no images: 2, such as a/video.h5" in messages[0]


def test_each_kind_of_file_and_folder_that_is_not_read_is_one_warning(tmp_path):
    write_folders(tmp_path, ["a", "b", "c/deep"])
    write_text(tmp_path / "read me.txt", "")
    write_text(tmp_path / "a" / "notes.csv", "")
    write_image(tmp_path / "alone.jpg")
    (tmp_path / "empty").mkdir()
    splits, messages = messages_of(ImageFolder(tmp_path))
    assert len(described(splits)) == 6
    counted = ("2, such as read me.txt", "1, such as alone.jpg", "3, such as c/deep/0.jpg", "1, such as empty")
    for message, count in zip(messages, counted, strict=True):
        assert count in message
    write_folders(tmp_path / "split", ["train/a", "test/b", "more/c"])
    (beside,) = messages_of(ImageFolder(tmp_path / "split"))[1]
    assert "3, such as more/c/0.jpg" in beside


NAMES_OF_SPLITS = [
    {"train": "training", "val": "validation"},
    {"train": "Train", "test": "TEST", "val": "Valid"},
    {"test": "eval", "val": "dev"},
    {"train": "train", "test": "test", "eval": "eval"},  # beside `test`, a set of its own
]


@pytest.mark.parametrize("names", NAMES_OF_SPLITS)
def test_splits_may_have_any_of_their_usual_names(tmp_path, names):
    paths = write_folders(tmp_path, [f"{folder}/{split} {i}" for split, folder in names.items() for i in "ab"])
    splits = ImageFolder(tmp_path).splits
    assert splits.keys() == names.keys()
    for split, index in splits.items():
        assert sorted(index.paths) == [path for path in paths if path.startswith(f"{names[split]}/")]
        assert list(index.names) == [f"{split} a", f"{split} b"]
    rows = [f"{path},{path.split('/')[1]},{path.split('/')[0]}" for path in paths]
    write_text(tmp_path / "table.csv", "\n".join(["image,label,split", *rows]))
    if "train" in names:
        assert {name: sorted(index.paths) for name, index in ImageTable(tmp_path, "table.csv").splits.items()} == {
            name: sorted(index.paths) for name, index in splits.items()
        }


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
    splits, messages = messages_of(ImageFolder(tmp_path if is_split else tmp_path / "train", classes=classes))
    found = {}
    for path, name in described(splits):
        assert f"/{name}/" in f"/{path}"
        found[name] = found.get(name, 0) + 1
    wanted = dict(CLASSES[classes])
    if is_split:
        wanted |= {f"other {name}": count for name, count in CLASSES[classes].items()}
    assert found == wanted
    unread = 12 * (1 + is_split) - sum(wanted.values())
    assert len(messages) == bool(unread)
    assert all(f": {unread}, such" in message for message in messages)


def test_classes_in_folders_of_categories_may_be_deeper(tmp_path):
    write_folders(tmp_path, ["pets/cat/1", "pets/dog/1", "birds/owl"])
    splits = ImageFolder(tmp_path, categories=True, classes=2).splits
    both = [pair for index in splits.values() for pair in zip(index.paths, index.categories.tolist())]
    assert {(path.split("/")[0], number) for path, number in both} == {("pets", 1), ("birds", 0)}


@pytest.mark.posix
def test_a_class_folder_may_be_a_link_and_links_to_folders_above_end_no_walk(tmp_path):
    paths = write_folders(tmp_path / "root", ["a/inner", "b/inner"], images=2)
    (tmp_path / "root" / "b").rename(tmp_path / "elsewhere")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "elsewhere")
    for name, target in (("a/inner/up", "../.."), ("b/inner/across", "../../root/a"), ("a/self", ".")):
        (tmp_path / "root" / name).symlink_to(target, target_is_directory=True)
    splits, messages = messages_of(ImageFolder(tmp_path / "root", classes="deepest"))
    assert paths_of(splits) == paths
    assert messages == []


@pytest.mark.refusal
def test_a_class_folder_that_cannot_be_listed_is_not_left_out(tmp_path, as_another_user):
    write_folders(tmp_path / "root", ["a", "b", "c"], images=2)
    (tmp_path / "root" / "b").chmod(0)
    with as_another_user(), pytest.raises(OSError, match="root/b"):
        ImageFolder("root").read()
    (tmp_path / "root" / "b").chmod(0o755)
