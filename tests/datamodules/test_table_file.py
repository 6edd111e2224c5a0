"""Lists of data sets: found below the root, in UTF-8, split into fields, without duplicates."""

import re

import pytest

from lightning_retrieval.datamodules import (
    CUB200,
    ImageTable,
    INaturalist,
    InShop,
    LandmarksClean,
    StanfordOnlineProducts,
    VehicleID,
    VGGFace2,
)
from lightning_retrieval.datamodules.table_file import (
    check_unique,
    find_file,
    parse_integers,
    read_lines,
    read_rows,
)
from tests.datamodules.trees import (
    write_cub,
    write_in_shop,
    write_online_products,
    write_text,
    write_vehicle_id,
)
from tests.datamodules.trees_more import write_inaturalist, write_landmarks, write_vgg_face2

refusal = pytest.mark.refusal
LATIN = "é".encode("latin-1")


def test_lines_are_read_whatever_ends_them(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbf1 \xc3\xbc\r\n2 a\x0bb\n\n3 c")
    assert list(read_lines("I", path)) == ["1 ü\r\n", "2 a\x0bb\n", "\n", "3 c"]
    assert list(read_rows("I", path, 2, more=True)) == [["1", "ü"], ["2", "a", "b"], ["3", "c"]]


@refusal
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1 a.jpg\n2 caf" + LATIN + b".jpg\n", "got the byte 0xe9 in line 2; save it as UTF-8"),
        ("1 a.jpg\n".encode("utf-16"), "got the byte 0xff in line 1"),
    ],
)
def test_a_list_in_another_encoding_raises_with_its_line(tmp_path, text, message):
    path = tmp_path / "list.txt"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"^I: {path} must be text in UTF-8, {message}"):
        list(read_rows("I", path, 2))


def write_table(root):
    write_text(root / "table.csv", "image,label,split\na.png,1,train\nb.png,2,test\n")


DATA_SETS = {  # data set: how its files are written, one of its lists, settings
    CUB200: (write_cub, "images.txt", {}),
    ImageTable: (write_table, "table.csv", {"table": "table.csv"}),
    INaturalist: (write_inaturalist, "Inat_dataset_splits/Inaturalist_test_set1.txt", {}),
    InShop: (write_in_shop, "Eval/list_bbox_inshop.txt", {"boxes": True}),
    LandmarksClean: (write_landmarks, "annotations/annotation_clean_train.txt", {}),
    StanfordOnlineProducts: (write_online_products, "Ebay_test.txt", {}),
    VGGFace2: (write_vgg_face2, "meta/train_list.txt", {}),
    VehicleID: (write_vehicle_id, "train_test_split/train_list.txt", {}),
}


@refusal
@pytest.mark.parametrize("kind", DATA_SETS)
def test_every_data_set_names_a_list_in_another_encoding(tmp_path, kind):
    write, name, settings = DATA_SETS[kind]
    write(tmp_path)
    lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
    (tmp_path / name).write_bytes(b"".join([*lines[:2], LATIN + lines[2], *lines[3:]]))
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: .*{name} must be text in UTF-8, .* in line 3;"):
        kind(tmp_path, **settings).prepare_data()


def test_different_values_with_the_same_hash_are_unique(tmp_path):
    assert hash(-1) == hash(-2)
    check_unique("I", tmp_path, "id", [-1, -2, "-1"])
    file = write_text(tmp_path / "list.txt", "-1\n\n-2\n-2\n")
    with pytest.raises(ValueError, match=r"`id` must be different in each line of .*, got -2 twice, in lines 3 and 4"):
        check_unique("I", file, "id", [-1, -2, -2])


@refusal
def test_a_folder_instead_of_a_list_raises(tmp_path):
    (tmp_path / "list.txt").mkdir()
    with pytest.raises(ValueError, match=rf"^I: {tmp_path}/list.txt must be a text file, got a folder"):
        list(read_rows("I", tmp_path / "list.txt", 2))


def test_rows_are_split_into_fields_and_checked(tmp_path):
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
    file.write_text("id\n7\n8\n7\n")
    with pytest.raises(
        ValueError, match=rf"^I: `id` must be different in each line of {file}, got 7 twice, in lines 2"
    ):
        check_unique("I", file, "id", [7, 8, 7], skip=1)


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
