"""Paths that a user gives: they mean the same everywhere, and what is missing gets its cure."""

from pathlib import Path
from unicodedata import normalize

import pytest

from lightning_retrieval.datamodules import CUB200, ImageFolder, ImageTable
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, write_folders

pytestmark = pytest.mark.refusal


def test_a_path_needs_no_home_folder_unless_it_begins_with_one(tmp_path, monkeypatch):
    """A user of a container may have none."""
    write_folders(tmp_path / "photos", ["a", "b"])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(ImageFolder("~/photos").train_set) == 3
    monkeypatch.delenv("HOME")
    assert len(ImageFolder(tmp_path / "photos").train_set) == 3
    with pytest.raises(FileNotFoundError, match=r"^ImageFolder: `root` .*~nobody-here"):
        ImageFolder("~nobody-here/photos")


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ("Photos/2024", "photos/2024"),  # another case
        (normalize("NFD", "photos/été"), "Unicode form"),
        ("photos/photos/2024", "leave out photos"),  # a folder too many
        ("photos/2025", ""),
    ],
)
def test_the_error_of_a_missing_folder_says_what_there_is(tmp_path, given, cure):
    write_folders(tmp_path / "photos/2024", ["a"])
    write_folders(tmp_path / normalize("NFC", "photos/été"), ["a"])
    with pytest.raises(FileNotFoundError, match="does not exist") as raised:
        ImageFolder(tmp_path / given).prepare_data()
    assert cure in str(raised.value)
    assert bool(cure) == (";" in str(raised.value))


def test_the_error_names_the_folder_above_if_it_has_the_files(tmp_path):
    write_text(tmp_path / "images.txt", "1 a.jpg\n")
    (tmp_path / "images").mkdir()
    with pytest.raises(FileNotFoundError, match="pass root=") as raised:
        CUB200(tmp_path / "images").prepare_data()
    assert str(raised.value).rstrip(".").endswith(f"images;pass root={tmp_path}".split(";")[1])


@pytest.mark.parametrize(
    ("listed", "cure"),
    [("a\\1", "/ in place of"), ("a/1.JPG", ".jpg"), ("a/1", ".jpg"), ("b/a/1.jpg", "leave out")],
)
def test_check_says_why_no_image_of_a_table_is_there(tmp_path, listed, cure):
    for number in (1, 2):
        write_image(tmp_path / f"a/{number}.jpg")
    suffix = ".jpg" if "\\" in listed else ""
    rows = [f"{listed.replace('1', number)}{suffix},{number}" for number in "12"]
    table = write_text(tmp_path / "table.csv", "\n".join(["image,label", *rows]))
    report = ImageTable(tmp_path, table, **QUICK).check()
    assert len(report.missing_files) == 2
    assert cure in report.problems[0]


def test_a_folder_and_a_table_may_be_links(tmp_path):
    write_folders(tmp_path / "real", ["a", "b"])
    table = write_text(tmp_path / "tables/table.csv", "image,label\na/0.jpg,1\nb/0.jpg,2\n")
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    assert len(ImageFolder(tmp_path / "link").train_set) == 3
    (tmp_path / "real/table.csv").symlink_to(table)
    assert len(ImageTable(tmp_path / "link", Path("table.csv")).train_set) == 1
