"""Stanford Online Products: read as written, trained on; invalid lists raise."""

import pytest

from lightning_retrieval.datamodules.readers.online_products import StanfordOnlineProducts
from tests.datamodules.trees import write_online_products

STRUCTURES = {"as unpacked": ("", ""), "online_products": ("Info_Files/", "images/"), "mixed": ("Info_Files/", "")}


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


@pytest.mark.refusal
@pytest.mark.parametrize("number", ["²", "c11319", "9" * 45_000, "9" * 30])
def test_a_value_that_is_not_an_integer_raises_with_its_line(tmp_path, number):
    write_online_products(tmp_path)
    path = tmp_path / "Ebay_train.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], " ".join(["77", number, *lines[3].split()[2:]]), *lines[4:]]))
    with pytest.raises(ValueError, match=r"`class_id` must be integers in .*train.txt, got '.{1,45} in line 4\.$"):
        StanfordOnlineProducts(tmp_path).prepare_data()


def test_the_cache_follows_images_that_move_to_another_accepted_directory_structure(tmp_path):
    root, settings = tmp_path / "data", {"cache_dir": tmp_path / "cache"}
    write_online_products(root)
    StanfordOnlineProducts(root, **settings).prepare_data()
    (root / "images").mkdir()
    for folder in ("cabinet_final", "toaster_final"):
        (root / folder).rename(root / "images" / folder)
    data = StanfordOnlineProducts(root, **settings)
    assert all(path.startswith("images/") for index in data.splits.values() for path in index.paths)
    assert data.train_set[0]["images"].shape == (3, 224, 224)
