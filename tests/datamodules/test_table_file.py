"""Lists of data sets: found below the root, in UTF-8, split into fields, without duplicates."""

import os
import re

import pytest

from lightning_retrieval.datamodules import StanfordOnlineProducts
from lightning_retrieval.datamodules.table_file import ListFile, find_file, read_table
from tests.datamodules.trees import write_online_products, write_text

refusal = pytest.mark.refusal
LATIN = "é".encode("latin-1")


def test_lines_are_read_whatever_ends_them(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"\xef\xbb\xbf1 \xc3\xbc\r\n2 a\x0bb\n\n3 c")
    assert list(ListFile(path).lines()) == ["1 ü\r\n", "2 a\x0bb\n", "\n", "3 c"]
    assert list(ListFile(path).rows(2, more=True)) == [["1", "ü"], ["2", "a", "b"], ["3", "c"]]


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
    with pytest.raises(ValueError, match=rf"^{path} must be text in UTF-8, {message}"):
        list(ListFile(path).rows(2))


def test_different_values_with_the_same_hash_are_unique(tmp_path):
    assert hash(-1) == hash(-2)
    ListFile(tmp_path).check_unique("id", [-1, -2, "-1"])
    file = write_text(tmp_path / "list.txt", "-1\n\n-2\n-2\n")
    with pytest.raises(ValueError, match=r"`id` must be different in each line of .*, got -2 twice, in lines 3 and 4"):
        ListFile(file).check_unique("id", [-1, -2, -2])


@refusal
def test_a_folder_or_a_fifo_instead_of_a_list_raises(tmp_path):
    (tmp_path / "list.txt").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/fifo must be a regular file, got a FIFO, a socket or a dev"):
        list(ListFile(tmp_path / "fifo").lines())
    for name in ("fifo.csv", "fifo.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/{name} must be a regular file, got a FIFO"):
            read_table(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/list.txt must be a text file, got a folder"):
        list(ListFile(tmp_path / "list.txt").rows(2))


def test_rows_are_split_into_fields_and_checked(tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("3\nid   path\n1   a/b.JPG\n\n2 \t ü.png  \n", encoding="utf-8-sig")
    assert list(ListFile(file).rows(2, header=["id", "path"], skip=1)) == [["1", "a/b.JPG"], ["2", "ü.png"]]
    with pytest.raises(ValueError, match=rf"^line 2 of {file} must be the header 'id way', got 'id   path'"):
        list(ListFile(file).rows(2, header=["id", "way"], skip=1))
    file.write_text("1 a\n2\n3 c d\n4 e\n")
    with pytest.raises(ValueError, match=rf"^each line of {file} must have 2 fields, got 2 .* \(line 2, 3\)"):
        list(ListFile(file).rows(2))
    file.write_text("1 a\n3 c d\n")
    assert len(list(ListFile(file).rows(2, more=True))) == 2
    with pytest.raises(ValueError, match=rf"^`id` must be integers in {file}, got '1x'"):
        ListFile(file).integers("id", ["1", "1x"])
    file.write_text("id\n7\n8\n7\n")
    with pytest.raises(ValueError, match=rf"^`id` must .* each line of {file}, got 7 twice, in lines 2"):
        ListFile(file).check_unique("id", [7, 8, 7], skip=1)


@refusal
def test_the_error_for_a_missing_root_suggests_the_folder_next_to_it(tmp_path, monkeypatch):
    write_online_products(tmp_path / "products")
    right = re.escape(f"; pass root={tmp_path / 'products'}.")
    for root, what in (
        (tmp_path / "produkts", "does not exist"),
        (tmp_path / "produkts" / "deeper", "does not exist"),
        (tmp_path / "products" / "Ebay_test.txt", "is a file"),
    ):
        with pytest.raises(FileNotFoundError, match=rf"must be a folder .*, got {root}, which {what}{right}"):
            StanfordOnlineProducts(root).prepare_data()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(StanfordOnlineProducts("~/products", cache_dir="~/cache").splits["test"]) > 1
    assert (tmp_path / "cache").is_dir()


def test_the_error_for_a_root_that_is_one_folder_off_suggests_the_right_one(tmp_path):
    (tmp_path / "up" / "set" / "lists").mkdir(parents=True)
    file = tmp_path / "up" / "set" / "lists" / "train.txt"
    file.write_text("")
    assert find_file(tmp_path / "up" / "set", "train.txt", "lists/train.txt") == file
    for root in (tmp_path / "up", tmp_path / "up" / "set" / "lists"):
        with pytest.raises(FileNotFoundError, match=rf"^`root` .*lists/train.txt, .* pass root={tmp_path}/up/set\."):
            find_file(root, "lists/train.txt")
    with pytest.raises(FileNotFoundError, match="no folder near it contains one"):
        find_file(tmp_path, "test.txt")
