"""Files are found below the root; the error suggests another root."""

import re

import pytest

from lightning_retrieval.datamodules import (
    StanfordOnlineProducts,
)
from lightning_retrieval.datamodules.table_file import find_file
from tests.datamodules.trees import (
    write_online_products,
)

refusal = pytest.mark.refusal
LATIN = "é".encode("latin-1")


@refusal
def test_the_error_for_a_missing_root_suggests_the_folder_next_to_it(tmp_path, monkeypatch):
    write_online_products(tmp_path / "products")
    right = re.escape(f"; pass root={tmp_path / 'products'}.")
    for root, what in (
        (tmp_path / "produkts", "does not exist"),
        (tmp_path / "produkts" / "deeper", "does not exist"),
        (tmp_path / "products" / "Ebay_test.txt", "is a file"),
    ):
        with pytest.raises(
            FileNotFoundError, match=rf"must be a folder that contains .*, got {root}, which {what}{right}"
        ):
            StanfordOnlineProducts(root).prepare_data()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(StanfordOnlineProducts("~/products", cache_dir="~/cache").splits["test"]) > 1
    assert (tmp_path / "cache").is_dir()


def test_the_error_for_a_root_that_is_one_folder_off_suggests_the_right_one(tmp_path):
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
