"""Reports on data sets: counts, missing files and problems."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_retrieval import datamodules
from lightning_retrieval.datamodules import (
    DataReport,
    ImageTable,
    LandmarksClean,
)
from tests.datamodules.trees import (
    write_image,
    write_text,
)
from tests.datamodules.trees_more import write_landmarks

refusal = pytest.mark.refusal
LATIN = "é".encode("latin-1")


def write_table(root):
    write_text(root / "table.csv", "image,label,split\na.png,1,train\nb.png,2,test\n")


def test_a_report_is_ok_with_any_of_the_published_counts():
    published = [(1000, 7), (1200, 7)]
    report = DataReport({"train": ((1200, 7), published), "test": ((5, 2), ())})
    assert report.ok
    assert str(report).splitlines()[1] == "train   1,200        7     1,000 or 1,200        7"
    assert not DataReport({"train": ((1100, 7), published)}).ok
    assert not DataReport(problems=["a sentence"]).ok
    many = DataReport(missing_files=[f"{i}.jpg" for i in range(1012)])
    assert str(many).splitlines()[-2:] == ["missing: 9.jpg", "... and 1,002 more are missing"]


def test_a_check_reports_the_warnings_of_reading_once(tmp_path):
    written = write_landmarks(tmp_path)
    (tmp_path / written["val"][0][0]).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = LandmarksClean(tmp_path).check()
    assert [line[:5] for line in str(report).splitlines() if "skipped 1 images" in line] == ["probl"]


@pytest.mark.slow
def test_a_report_with_file_names_in_another_encoding_is_printed(tmp_path):
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


def test_images_are_searched_for_at_the_listed_paths(tmp_path):
    write_table(tmp_path)
    write_image(tmp_path / "a.png")
    report = ImageTable(tmp_path, "table.csv").check()
    assert report.missing_files == ["b.png"]


@pytest.mark.parametrize(
    "name", [name for name in datamodules.__all__ if getattr(datamodules, name).__dict__.get("published_counts")]
)
def test_the_documentation_has_the_published_counts(name):
    page = (Path(__file__).parents[2] / "docs" / "data-sets.md").read_text(encoding="utf-8")
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
