"""Lists in other encodings, reports of what is found, and warnings that are heard again."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_retrieval import datamodules
from lightning_retrieval.datamodules import (
    CUB200,
    DataReport,
    ImageTable,
    INaturalist,
    InShop,
    LandmarksClean,
    StanfordOnlineProducts,
    VehicleID,
    VGGFace2,
)
from lightning_retrieval.datamodules.files.lists import check_unique, read_lines, read_rows
from lightning_retrieval.datamodules.files.record_warnings import record_warnings
from tests.datamodules.trees import (
    write_cub,
    write_image,
    write_in_shop,
    write_online_products,
    write_text,
    write_vehicle_id,
)
from tests.datamodules.trees_more import write_inaturalist, write_landmarks, write_vgg_face2

refusal = pytest.mark.refusal
LATIN = "é".encode("latin-1")


def test_lines_are_those_of_the_file_whatever_ends_them(tmp_path):
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
def test_a_list_in_another_encoding_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "list.txt"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"^I: {path} must be text in UTF-8, {message}"):
        list(read_rows("I", path, 2))


def table(root):
    write_text(root / "table.csv", "image,label,split\na.png,1,train\nb.png,2,test\n")


OF_CLASSES = {  # data set: how its tree is written, a list of it, settings
    CUB200: (write_cub, "images.txt", {}),
    ImageTable: (table, "table.csv", {"table": "table.csv"}),
    INaturalist: (write_inaturalist, "Inat_dataset_splits/Inaturalist_test_set1.txt", {}),
    InShop: (write_in_shop, "Eval/list_bbox_inshop.txt", {"boxes": True}),
    LandmarksClean: (write_landmarks, "annotations/annotation_clean_train.txt", {}),
    StanfordOnlineProducts: (write_online_products, "Ebay_test.txt", {}),
    VGGFace2: (write_vgg_face2, "meta/train_list.txt", {}),
    VehicleID: (write_vehicle_id, "train_test_split/train_list.txt", {}),
}


@refusal
@pytest.mark.parametrize("kind", OF_CLASSES)
def test_every_data_set_names_a_list_in_another_encoding(tmp_path, kind):
    write, name, settings = OF_CLASSES[kind]
    write(tmp_path)
    lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
    (tmp_path / name).write_bytes(b"".join([*lines[:2], LATIN + lines[2], *lines[3:]]))
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: .*{name} must be text in UTF-8, .* in line 3;"):
        kind(tmp_path, **settings).prepare_data()


@refusal
@pytest.mark.parametrize("kind", [INaturalist, StanfordOnlineProducts, VGGFace2, CUB200])
def test_an_image_that_is_listed_twice_is_refused(tmp_path, kind):
    """It would be ranked against itself."""
    write, name, settings = OF_CLASSES[kind]
    write(tmp_path)
    lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
    twice = " ".join([*lines[2].split()[:-1], lines[1].split()[-1]])  # its own number, the other's path
    write_text(tmp_path / name, "\n".join([*lines[:2], twice, *lines[3:]]))
    with pytest.raises(ValueError, match=rf"^{kind.__name__}: `\w+` must be different in each line .*, got .* twice"):
        kind(tmp_path, **settings).prepare_data()


def test_values_of_one_hash_are_no_duplicates(tmp_path):
    assert hash(-1) == hash(-2)
    check_unique("I", tmp_path, "id", [-1, -2, "-1"])
    with pytest.raises(ValueError, match=r"`id` must be different in each line of .*, got -2 twice"):
        check_unique("I", tmp_path, "id", [-1, -2, -2])


def test_a_report_is_right_with_any_of_the_published_counts():
    published = [(1000, 7), (1200, 7)]
    report = DataReport({"train": ((1200, 7), published), "test": ((5, 2), ())})
    assert report.ok
    assert str(report).splitlines()[1] == "train   1,200        7     1,000 or 1,200        7"
    assert not DataReport({"train": ((1100, 7), published)}).ok
    assert not DataReport(problems=["a sentence"]).ok
    many = DataReport(missing_files=[f"{i}.jpg" for i in range(1012)])
    assert str(many).splitlines()[-2:] == ["missing: 9.jpg", "... and 1,002 more are missing"]


def test_warnings_are_kept_and_heard(tmp_path):
    def read():
        warnings.warn("as said", stacklevel=1)
        return 7

    with pytest.warns(UserWarning, match="as said"):
        assert record_warnings(read) == (7, ["as said"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert record_warnings(lambda: 7) == (7, [])
        with pytest.raises(UserWarning, match="as said"):
            record_warnings(read)


def test_what_reading_warned_of_is_said_again_from_the_cache_and_stands_in_the_report(tmp_path):
    written = write_landmarks(tmp_path / "data")
    (tmp_path / "data" / written["train"][0][0]).unlink()
    said = []
    for _ in range(2):
        data = LandmarksClean(tmp_path / "data", cache_dir=tmp_path / "cache")
        with pytest.warns(UserWarning, match="skipped 1 images that are not in") as caught:
            data.prepare_data()
        said.append([str(warning.message) for warning in caught])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = data.check()
        assert report.problems == said[-1]
        assert not report.ok
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert said[0] == said[1]


def test_a_check_before_anything_else_shows_what_reading_warns_of_once(tmp_path):
    written = write_landmarks(tmp_path)
    (tmp_path / written["val"][0][0]).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = LandmarksClean(tmp_path).check()
    assert [line[:5] for line in str(report).splitlines() if "skipped 1 images" in line] == ["probl"]


@refusal
def test_a_root_that_is_not_there_is_told_the_one_beside_it(tmp_path, monkeypatch):
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


@refusal
def test_a_folder_in_place_of_a_list_is_named(tmp_path):
    (tmp_path / "list.txt").mkdir()
    with pytest.raises(ValueError, match=rf"^I: {tmp_path}/list.txt must be a text file, got a folder"):
        list(read_rows("I", tmp_path / "list.txt", 2))


def test_a_report_of_names_in_another_encoding_is_printed(tmp_path):
    name = b"a/caf\xe9.jpg".decode(errors="surrogateescape")
    for path in ("a/1.jpg", name, "b/1.jpg"):
        write_image(tmp_path / path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name.replace("a/", "").replace(".jpg", ".txt")).write_text("")
    command = [
        sys.executable,
        "-m",
        "lightning_retrieval.cli",
        "check",
        "--data",
        "ImageFolder",
        "--root",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert (done.returncode, b"UnicodeEncodeError" in done.stderr) == (1, False)
    assert b"caf\\udce9.txt" in done.stdout


def test_images_are_looked_for_where_the_lists_say(tmp_path):
    table(tmp_path)
    write_image(tmp_path / "a.png")
    report = ImageTable(tmp_path, "table.csv").check()
    assert report.missing_files == ["b.png"]


@pytest.mark.parametrize(
    "name", [name for name in datamodules.__all__ if getattr(datamodules, name).__dict__.get("published_counts")]
)
def test_the_documentation_has_the_published_counts(name):
    page = (Path(__file__).parents[3] / "docs" / "data-sets.md").read_text(encoding="utf-8")
    _, _, section = page.partition(f"### {name}\n")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    text = row + section.partition("\n### ")[0]
    counts = [
        f"{number:,}"
        for each in getattr(datamodules, name).published_counts.values()
        for count in each
        for number in count
    ]
    assert [number for number in counts if number != "0" and number not in text] == []
