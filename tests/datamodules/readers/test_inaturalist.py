"""iNaturalist with Smooth-AP's lists, and the levels of its taxonomy."""

import json

import pytest

from lightning_retrieval.datamodules import INaturalist
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import write_text
from tests.datamodules.trees_more import GROUPS, begin_with_byte_order_mark, write_inaturalist

LEVELS = ("species", "genus", "family", "order", "class", "phylum", "kingdom")


@pytest.mark.parametrize("lists", ["Inat_dataset_splits", ""])
def test_lists_are_read_with_classes_by_number(tmp_path, lists):
    paths = write_inaturalist(tmp_path, lists, images=False)
    begin_with_byte_order_mark(tmp_path / lists / "Inaturalist_train_set1.txt")
    data = INaturalist(tmp_path)
    train, test = columns(data, "train"), columns(data, "test")
    assert {"train": train["paths"], "test": test["paths"]} == paths
    assert (train["labels"], test["labels"]) == ([1, 1, 1, 0, 0, 0, 2, 2, 2], [0, 0, 0, 1, 1, 1])
    assert train["classes"] == ["10"] * 3 + ["9"] * 3 + ["100"] * 3
    groups = sorted(set(GROUPS.values()))
    for found in (train, test):
        assert [groups[i] for i in found["categories"]] == [path.split("/")[1] for path in found["paths"]]
        assert found["levels"] is None


def test_levels_are_the_taxonomy_finest_first(tmp_path):
    write_inaturalist(tmp_path, images=False)
    # Species 9 and 100 are two birds of one genus; the plant, 10, has a genus of the same name.
    of_class = {9: [0, 0, 0, 0, 0, 0, 0], 10: [1, 1, 1, 1, 1, 1, 1], 100: [2, 0, 0, 0, 0, 0, 0]}
    order = [10] * 3 + [9] * 3 + [100] * 3
    data = INaturalist(tmp_path, levels=LEVELS)
    assert columns(data, "train")["levels"] == [of_class[c] for c in order]
    assert [len(set(level)) for level in zip(*columns(data, "test")["levels"])] == [2, 2, 2, 2, 2, 2, 1]
    some = columns(INaturalist(tmp_path, levels=["species", "class"]), "train")
    assert some["levels"] == [[of_class[c][0], of_class[c][4]] for c in order]


def test_the_first_file_with_all_ranks_is_taken(tmp_path):
    write_inaturalist(tmp_path, images=False)
    wanted = columns(INaturalist(tmp_path, levels=LEVELS), "train")["levels"]
    complete = json.loads((tmp_path / "train2018.json").read_text())["categories"]
    hidden = [{"id": c, "name": str(c), "supercategory": "x"} for c in GROUPS]
    write_text(tmp_path / "categories.json", json.dumps(complete))
    write_text(tmp_path / "train2018.json", json.dumps({"categories": hidden}))
    assert columns(INaturalist(tmp_path, levels=LEVELS), "train")["levels"] == wanted


def test_a_number_that_supercategories_share_is_one_class_in_each(tmp_path):
    """Smooth-AP's code identifies a class by its supercategory and its number."""
    write_inaturalist(tmp_path, images=False)
    lists = tmp_path / "Inat_dataset_splits"
    folders = ["Plantae/10", "Aves/9", "Plantae/9", "Aves/9", "Aves/100", "Aves/9"]
    lines = [f"train_val2018/{folder}/{i}.jpg\n" for i, folder in enumerate(folders)]
    write_text(lists / "Inaturalist_train_set1.txt", "".join(lines))
    write_text(lists / "Inaturalist_test_set1.txt", "train_val2018/Insecta/9/a.jpg\ntrain_val2018/Aves/7/b.jpg\n")
    data = INaturalist(tmp_path)
    assert columns(data, "train")["labels"] == [2, 0, 1, 0, 3, 0]
    assert columns(data, "train")["classes"] == ["10", "Aves/9", "Plantae/9", "Aves/9", "100", "Aves/9"]
    assert columns(data, "test")["labels"] == [1, 0]
    assert columns(data, "test")["classes"] == ["Insecta/9", "7"]
