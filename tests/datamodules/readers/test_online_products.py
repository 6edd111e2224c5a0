"""Stanford Online Products: read as written, trained on; invalid lists raise."""

import re

import pytest

from lightning_retrieval.datamodules.readers.online_products import StanfordOnlineProducts
from tests.datamodules.short_run import SETTINGS, replace
from tests.datamodules.trees import write_online_products

STRUCTURES = {"as unpacked": ("", ""), "online_products": ("Info_Files/", "images/"), "mixed": ("Info_Files/", "")}
HEADER = "image_id class_id super_class_id path"


@pytest.mark.parametrize("structure", STRUCTURES)
def test_images_are_read_as_they_were_written(tmp_path, structure):
    lists, images = STRUCTURES[structure]
    written = write_online_products(tmp_path, lists, images)
    splits = StanfordOnlineProducts(tmp_path).splits
    assert list(splits) == ["train", "test"]
    for split, index in splits.items():
        paths, classes, categories, _ = zip(*written[split])
        assert list(index.paths) == list(paths)
        assert [int(index.names[label]) for label in index.labels] == list(classes)
        assert index.labels.tolist() == [sorted(set(classes)).index(number) for number in classes]
        assert index.categories.tolist() == [{2: 0, 12: 1}[category] for category in categories]
        assert index.roles is index.boxes is None
        assert all((tmp_path / path).is_file() for path in index.paths)


INVALID = {
    "other header": ("train", HEADER, "image_id class_id path", "line 1 of .*Ebay_train.txt must be the header"),
    "class in two categories": (
        "train",
        "2 8 12 ",
        "2 8 7 ",
        r"each class_id must have one super_class_id, got 8 with 12 and with 7 in line 3 of .*Ebay_train.txt\.",
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_lists_raise(tmp_path, case):
    split, old, new, message = INVALID[case]
    write_online_products(tmp_path)
    replace(tmp_path / f"Ebay_{split}.txt", old, new)
    data = StanfordOnlineProducts(tmp_path)
    with pytest.raises(ValueError, match=message):
        data.prepare_data()


def test_an_empty_split_raises(tmp_path):
    write_online_products(tmp_path)
    (tmp_path / "Ebay_test.txt").write_text(f"{HEADER}\n\n")
    with pytest.raises(ValueError, match=r"the split 'test' must have at least one image, got none in .*test"):
        StanfordOnlineProducts(tmp_path).prepare_data()


def test_missing_folders_and_files_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"got .*nowhere, which does not exist"):
        StanfordOnlineProducts(tmp_path / "nowhere").prepare_data()
    written = write_online_products(tmp_path)
    (tmp_path / "toaster_final").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="must contain toaster_final or images/toaster_final, got"):
        StanfordOnlineProducts(tmp_path).prepare_data()
    (tmp_path / "gone").rename(tmp_path / "toaster_final")
    (tmp_path / written["train"][0][0]).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / written["train"][0][0]))):
        StanfordOnlineProducts(tmp_path, **SETTINGS).train_set[0]


@pytest.mark.refusal
def test_a_training_image_in_the_test_list_raises(tmp_path):
    """Under another class."""
    written = write_online_products(tmp_path)
    path = tmp_path / "Ebay_test.txt"
    path.write_text(path.read_text() + f"999 22000 1 {written['train'][0][0]}\n")
    message = f"^StanfordOnlineProducts: images .* got 1 in train and test, such as {written['train'][0][0]}"
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        with pytest.raises(ValueError, match=message):
            StanfordOnlineProducts(tmp_path, cache_dir=cache).prepare_data()


@pytest.mark.refusal
@pytest.mark.parametrize("number", ["²", "c11319", "9" * 45_000, "9" * 30])
def test_a_value_that_is_not_an_integer_raises_with_its_line(tmp_path, number):
    write_online_products(tmp_path)
    path = tmp_path / "Ebay_train.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], " ".join(["77", number, *lines[3].split()[2:]]), *lines[4:]]))
    with pytest.raises(ValueError, match=r"`class_id` must be integers in .*train.txt, got '.{1,45} in line 4\.$"):
        StanfordOnlineProducts(tmp_path).prepare_data()


@pytest.mark.parametrize("back", [False, True])
def test_the_cache_follows_images_that_move_to_another_accepted_directory_structure(tmp_path, back):
    root, settings = tmp_path / "data", {"cache_dir": tmp_path / "cache"}
    write_online_products(root)
    StanfordOnlineProducts(root, **settings).prepare_data()
    (root / "images").mkdir()
    for folder in ("cabinet_final", "toaster_final"):
        (root / folder).rename(root / "images" / folder)
    data = StanfordOnlineProducts(root, **settings)
    assert all(path.startswith("images/") for index in data.splits.values() for path in index.paths)
    assert data.train_set[0]["images"].shape == (3, 224, 224)
    if back:
        for folder in ("cabinet_final", "toaster_final"):
            (root / "images" / folder).rename(root / folder)
        assert StanfordOnlineProducts(root, **settings).check().missing_files == []
