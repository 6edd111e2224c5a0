"""INaturalist: Smooth-AP's lists, the taxonomy as levels, trained on; invalid lists raise."""

import json

import numpy as np
import pytest

from lightning_retrieval.datamodules.readers.inaturalist import LEVELS, INaturalist
from tests.datamodules.trees import write_text
from tests.datamodules.trees_more import GROUPS, begin_with_byte_order_mark, write_inaturalist

refusal = pytest.mark.refusal


@pytest.mark.parametrize("lists", ["Inat_dataset_splits", ""])
def test_lists_are_read_with_classes_by_number(tmp_path, lists):
    paths = write_inaturalist(tmp_path, lists, images=False)
    begin_with_byte_order_mark(tmp_path / lists / "Inaturalist_train_set1.txt")
    splits = INaturalist(tmp_path).splits
    assert {split: list(index.paths) for split, index in splits.items()} == paths
    assert list(splits["train"].names) == ["9", "10", "100"]
    assert splits["train"].labels.tolist() == [1, 1, 1, 0, 0, 0, 2, 2, 2]
    assert (list(splits["test"].names), splits["test"].labels.tolist()) == (["7", "8"], [0, 0, 0, 1, 1, 1])
    groups = sorted(set(GROUPS.values()))
    for index in splits.values():
        assert [groups[i] for i in index.categories] == [path.split("/")[1] for path in index.paths]
        assert index.levels is None


def test_levels_are_the_taxonomy_finest_first(tmp_path):
    write_inaturalist(tmp_path, images=False)
    splits = INaturalist(tmp_path, levels=LEVELS).splits
    # Species 9 and 100 are two birds of one genus; the plant, 10, has a genus of the same name.
    of_class = {9: [0, 0, 0, 0, 0, 0, 0], 10: [1, 1, 1, 1, 1, 1, 1], 100: [2, 0, 0, 0, 0, 0, 0]}
    assert splits["train"].levels.tolist() == [of_class[c] for c in (10, 9, 100) for _ in range(3)]
    assert [len(np.unique(column)) for column in splits["test"].levels.T] == [2, 2, 2, 2, 2, 2, 1]
    some = INaturalist(tmp_path, levels=["species", "class"]).splits["train"]
    assert some.levels.tolist() == [[of_class[c][0], of_class[c][4]] for c in (10, 9, 100) for _ in range(3)]
    assert np.array_equal(some.levels[:, 0], some.labels)


def test_the_first_file_with_all_ranks_is_taken(tmp_path):
    write_inaturalist(tmp_path, images=False)
    wanted = INaturalist(tmp_path, levels=LEVELS).splits["train"].levels
    complete = (tmp_path / "train2018.json").read_text()
    write_text(tmp_path / "categories.json", json.dumps(json.loads(complete)["categories"]))
    hidden = [{"id": c, "name": str(c), "supercategory": "x"} for c in GROUPS]
    write_text(tmp_path / "train2018.json", json.dumps({"categories": hidden}))
    assert np.array_equal(INaturalist(tmp_path, levels=LEVELS).splits["train"].levels, wanted)
    (tmp_path / "categories.json").rename(tmp_path / "train2018.json")
    write_text(tmp_path / "val2018.json", json.dumps({"categories": hidden}))
    assert np.array_equal(INaturalist(tmp_path, levels=LEVELS).splits["train"].levels, wanted)


def test_the_cache_sees_another_taxonomy(tmp_path):
    write_inaturalist(tmp_path, images=False)
    settings = {"levels": ["species", "genus"], "cache_dir": tmp_path / "cache"}
    assert INaturalist(tmp_path, **settings).splits["train"].levels.max(0).tolist() == [2, 1]
    text = (tmp_path / "train2018.json").read_text()
    write_text(tmp_path / "train2018.json", text.replace("Prunellidae", "Another", 1))  # of one of the two birds
    assert INaturalist(tmp_path, **settings).splits["train"].levels.max(0).tolist() == [2, 2]


@refusal
@pytest.mark.parametrize("levels", [["genus"], ["genus", "species"], ["species", "species"]])
def test_invalid_levels_raise(tmp_path, levels):
    with pytest.raises(ValueError, match=r"`levels` must be species and any of genus, .*in this order, got \["):
        INaturalist(tmp_path, levels=levels)


@refusal
def test_a_missing_taxonomy_raises(tmp_path):
    write_inaturalist(tmp_path, images=False)
    taxonomy = json.loads((tmp_path / "train2018.json").read_text())
    path = tmp_path / "train2018.json"

    def check_raises(content, message):
        write_text(path, json.dumps(content))
        with pytest.raises(ValueError, match=message):
            INaturalist(tmp_path, levels=LEVELS).prepare_data()

    few = [category for category in taxonomy["categories"] if category["id"] not in (9, 100)]
    check_raises({"categories": few}, r"`levels` need the taxonomy of each category, got none for 2 of 3, such as 9\.")
    hidden = [{name: value for name, value in category.items() if name != "genus"} for category in few]
    check_raises({"categories": hidden}, r"`levels` need categories with genus, .*, got .*train2018.json without genus")
    check_raises({"images": []}, r"train2018.json must be JSON with a list of categories, .*KeyError\('categories'\)")
    check_raises({"categories": []}, r"train2018.json without any category")


def test_a_number_that_supercategories_share_is_one_class_in_each(tmp_path):
    """Smooth-AP's code identifies a class by its supercategory and its number."""
    write_inaturalist(tmp_path, images=False)
    lists = tmp_path / "Inat_dataset_splits"
    folders = ["Plantae/10", "Aves/9", "Plantae/9", "Aves/9", "Aves/100", "Aves/9"]
    lines = [f"train_val2018/{folder}/{i}.jpg\n" for i, folder in enumerate(folders)]
    write_text(lists / "Inaturalist_train_set1.txt", "".join(lines))
    write_text(lists / "Inaturalist_test_set1.txt", "train_val2018/Insecta/9/a.jpg\ntrain_val2018/Aves/7/b.jpg\n")
    splits = INaturalist(tmp_path).splits
    assert list(splits["train"].names) == ["Aves/9", "Plantae/9", "10", "100"]
    assert splits["train"].labels.tolist() == [2, 0, 1, 0, 3, 0]
    assert list(splits["test"].names) == ["7", "Insecta/9"]
    assert splits["test"].labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"^INaturalist: `levels` need each category id in one super.*, got 9 in sev"):
        INaturalist(tmp_path, levels=["species", "genus"]).prepare_data()
