"""Checks of a data set before training: the report, its counts, all images read in many threads, and warnings."""

import io
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_retrieval import datamodules
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import (
    DataReport,
    ImageFolder,
    ImageIndex,
    ImageSet,
    ImageTable,
    LandmarksClean,
    image_check,
)
from lightning_retrieval.datamodules.image_check import check_contents
from tests.datamodules.pictures import as_it_is
from tests.datamodules.trees import write_image
from tests.datamodules.trees_more import write_landmarks
from tests.processes import start_processes


def noise(path, seed, size=(8, 8)):
    """Write an image of random pixels, which no other seed has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes with three images each in `train`, and in `test`."""
    for number in range(12):
        split, label = ("train", "test")[number % 2], "ab"[number // 2 % 2]
        noise(tmp_path / split / f"{split} {label}" / f"{number}.png", number)
    return tmp_path


def test_images_without_problems(folder):
    report = ImageFolder(folder).check()
    assert report.ok
    assert (report.problems, report.notes) == ([], ["all images have 8 x 8 pixels"])
    assert {name: found for name, (found, _) in report.splits.items()} == {"train": (6, 2), "test": (6, 2)}
    noise(folder / "test/test a/large.png", 12, size=(40, 10))
    noise(folder / "test/test a/small.png", 13, size=(3, 6))
    assert ImageFolder(folder, resize="fit").check().notes == [
        "the shorter side of the images has 3 to 10 pixels, median 8; "
        "the longer side of the images has 6 to 40 pixels, median 8"
    ]


def test_images_that_a_centre_crop_cuts(folder):
    sizes = [(80, 40), (40, 80), (40, 31), (40, 30), (41, 30)]  # the last but one loses exactly a quarter
    for number, size in enumerate(sizes):
        noise(folder / f"test/test a/long {number}.png", 20 + number, size=size)
    sentence = "a centre crop of 224 x 224 pixels cuts more than a quarter of 3 of 17 images, because of their shape; "
    sentence += 'resize="fit" pads images instead of cropping them'
    report = ImageFolder(folder).check()
    assert report.ok
    assert sentence in report.notes
    wide = [note for note in ImageFolder(folder, image_size=(8, 16), resize=16).check().notes if "crop" in note]
    assert [note[:80] for note in wide] == [
        "a centre crop of 16 x 8 pixels cuts more than a quarter of 16 of 17 images, beca"
    ]
    for settings in (
        {"resize": "fit"},
        {"image_size": (30, 30)},
        {"resize": (256, 256)},
        {"transform": "ap_gem"},
        {"eval_transform": as_it_is},
    ):
        assert not [note for note in ImageFolder(folder, **settings).check().notes if "crop" in note], settings


def test_files_that_cannot_be_decoded(folder):
    whole = (folder / "train/train a/0.png").read_bytes()
    for number in range(12):
        (folder / f"train/train a/damaged {number:02}.png").write_bytes(whole[:60])
    (folder / "test/test b/text.jpg").write_text("not an image")
    report = ImageFolder(folder).check()
    assert not report.ok
    assert report.missing_files == []
    assert report.unreadable_files[0].startswith("train/train a/damaged 00.png (")
    assert report.unreadable_files[-1] == "test/test b/text.jpg (cannot identify image file)"
    lines = [line for line in str(report).splitlines() if "unreadable" in line]
    assert len(lines) == 11
    assert lines[-1] == "... and 3 more are unreadable"


def test_images_that_are_in_training_and_in_evaluation(folder):
    """Also if the format of the copy is another one."""
    for number in range(7):
        noise(folder / f"train/train a/copied {number}.png", 100 + number)
        Image.open(folder / f"train/train a/copied {number}.png").save(folder / f"test/test b/copy {number}.bmp")
    report = ImageFolder(folder).check()
    assert not report.ok
    assert report.problems[0] == (
        "train/train a/copied 0.png and test/test b/copy 0.bmp are the same image, in training and in evaluation"
    )
    assert report.problems[5:] == ["2 more pairs are the same image, in training and in evaluation"]


def test_images_that_a_split_has_twice(folder):
    noise(folder / "train/train b/again.png", 0)  # also in class a
    noise(folder / "test/test a/again.png", 1)
    report = ImageFolder(folder).check()
    assert report.problems == [
        "train/train a/0.png and train/train b/again.png are the same image with different labels"
    ]
    assert report.notes[0] == "test/test a/1.png and test/test a/again.png are the same image"


def test_sizes_are_compared_as_well(folder):
    """An image of 2 x 8 pixels has the bytes of one of 8 x 2."""
    for path, size in (("train/train a/flat.png", (8, 2)), ("test/test a/high.png", (2, 8))):
        Image.new("RGB", size, (9, 9, 9)).save(folder / path)
    assert ImageFolder(folder).check().problems == []


def test_classes_with_one_image(folder):
    noise(folder / "train/lonely/1.png", 50)
    noise(folder / "test/alone/1.png", 51)
    report = ImageFolder(folder).check()
    assert report.ok
    assert report.notes[:2] == [
        "classes of train with one image: 1, such as 'lonely', which is skipped in training batches of P classes with "
        "K images",
        "classes of test with one image: 1, such as 'alone', which has no positive in evaluation",
    ]


def test_a_table_with_boxes_and_missing_files(tmp_path):
    """Parts of an image are images of their own; a box outside of its image is named."""
    noise(tmp_path / "a.png", 0, size=(20, 10))
    noise(tmp_path / "b.png", 1, size=(20, 10))
    rows = ["image,label,split,box", "a.png,1,train,0 0 10 10", "a.png,1,train,10 0 20 10", "gone.png,1,train,0 0 9 9"]
    rows += ["b.png,2,test,0 0 10 10", "b.png,2,test,30 0 40 10"]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    report = ImageTable(tmp_path, "table.csv").check()
    assert report.missing_files == ["gone.png"]
    assert report.unreadable_files == ["b.png (its box [30, 0, 40, 10] is outside of its 20 x 10 pixels)"]
    assert (report.problems, report.notes) == ([], ["all images have 10 x 10 pixels"])


@pytest.mark.parametrize(
    ("files", "listed", "reason"),
    [
        (["images/a.jpg", "images/b.jpg"], ["a.jpg", "b.jpg"], "pass root={root}/images"),
        (["a.jpg", "b.jpg"], ["a", "b"], "the file is b.jpg, so add the suffix to the paths"),
        (["x/a.jpg", "x/b.jpg"], ["x\\a.jpg", "x\\b.jpg"], "write / in place of \\ in the paths"),
        (["0/1/2/0123.jpg"], ["0123", "4567"], "the paths of files end with a suffix such as .jpg"),
        (["a.jpg"], ["a.jpg", "b.jpg"], None),
    ],
)
def test_why_no_listed_image_exists(tmp_path, files, listed, reason):
    for file in files:
        noise(tmp_path / file, len(file))
    (tmp_path / "list.csv").write_text("image,label\n" + "".join(f"{path},{n}\n" for n, path in enumerate(listed)))
    report = ImageTable(tmp_path, "list.csv").check()
    expected = [f"no image is in {tmp_path}: {reason.format(root=tmp_path)}"] if reason else []
    assert (report.problems, bool(report.missing_files)) == (expected, True)


def test_the_command_takes_names_of_columns_as_the_other_commands_do(tmp_path, capsys):
    for number, name in enumerate(("a", "b")):
        noise(tmp_path / f"{name}.png", number)
    (tmp_path / "train.tsv").write_text("Image\tId\na.png\tw_1\nb.png\tnew_whale\n")
    args = ["check", "--data=ImageTable", f"--root={tmp_path}", "--table=train.tsv", "--delimiter=tab"]
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    cure = "name columns that have other names with `--columns`, such as 'path' for 'image' by image=path."
    assert cure in capsys.readouterr().err
    for names in ("image=Image,label=Id", '{"image": "Image", "label": "Id"}'):
        main([*args, f"--columns={names}"])
        assert "train       1        1" in capsys.readouterr().out


def test_distractors_are_no_class(tmp_path):
    for number in range(5):
        noise(tmp_path / f"{number}.png", number)
    rows = ["image,label,split,role", "0.png,a,train,", "1.png,a,train,", "2.png,b,test,", "3.png,b,test,"]
    (tmp_path / "table.csv").write_text("\n".join([*rows, "4.png,,test,distractor"]))
    assert ImageTable(tmp_path, "table.csv").check().notes == ["all images have 8 x 8 pixels"]


def test_tags_are_counted_and_images_without_labels_have_no_classes(tmp_path):
    for number in range(5):
        noise(tmp_path / f"{number}.png", number % 4)  # the last image is a copy of the first
    rows = ["image,tags,split", "0.png,red;red; old,train", "1.png,red,train", "2.png,,test", "3.png,,test"]
    (tmp_path / "table.csv").write_text("\n".join([*rows, "4.png,red,train"]))
    report = ImageTable(tmp_path, "table.csv").check()
    assert {name: counts for name, (counts, _) in report.splits.items()} == {"train": (3, 0), "test": (2, 0)}
    assert report.problems == []
    assert report.notes == [
        "train has 2 tags, at most 3 images with one tag ('red')",
        "1 tags of train have one image, such as 'old', which is not drawn by TagSampler",
        "test has 0 tags",
        "2 images of test have no tag, so they have no positive under SharedTags",
        "0.png and 4.png are the same image",
        "all images have 8 x 8 pixels",
    ]


@pytest.mark.parametrize("load_truncated", [False, True])
def test_threads_do_not_change_the_report(folder, load_truncated, monkeypatch):
    """Truncated images are decoded in all threads, or in none: Pillow's setting is one of the process."""
    encoded = io.BytesIO()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 256, (90, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(encoded, "jpeg")
        content = encoded.getvalue()
        (folder / f"train/train a/{number:03}.jpg").write_bytes(content[: -len(content) // 4])
        encoded.seek(0)
        encoded.truncate()
    threads = set()
    inspect_image = image_check.inspect_image

    def read_and_wait(*given):
        threads.add(threading.get_ident())
        time.sleep(0.001)  # else one thread may be done before the others have begun
        return inspect_image(*given)

    monkeypatch.setattr(image_check, "inspect_image", read_and_wait)
    reports = []
    for cores in (1, 4):
        monkeypatch.setattr(image_check, "_cores", lambda cores=cores: cores)
        reports.append(ImageFolder(folder, load_truncated=load_truncated).check())
    assert reports[0] == reports[1]
    assert len(reports[0].unreadable_files) == (0 if load_truncated else 40)
    assert len(threads) > 2
    assert threading.get_ident() not in threads


def test_an_interrupt_ends_the_threads(folder, monkeypatch):
    def interrupted(images, position):
        if position == 0:
            raise KeyboardInterrupt
        return image_check.ImageFinding()

    images = ImageSet(ImageIndex(["a.png"] * 10_000, [0] * 10_000), folder, as_it_is)
    monkeypatch.setattr(image_check, "inspect_image", interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        check_contents(DataReport(), {"train": images})
    assert threading.active_count() == before


# --- the report


def test_a_report_is_ok_with_any_of_the_published_counts():
    published = [(1000, 7), (1200, 7)]
    report = DataReport({"train": ((1200, 7), published), "test": ((5, 2), ())})
    assert report.ok
    assert str(report).splitlines()[1] == "train   1,200        7     1,000 or 1,200        7"
    assert not DataReport({"train": ((1100, 7), published)}).ok
    assert not DataReport(problems=["a sentence"]).ok
    many = DataReport(missing_files=[f"{i}.jpg" for i in range(1012)])
    assert str(many).splitlines()[-2:] == ["missing: 9.jpg", "... and 1,002 more are missing"]


def check_of_a_latin_tree(rank, world_size, root):
    """Print the report as `lightning-retrieval check` does, to an output that takes valid UTF-8 only."""
    sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    with pytest.raises(SystemExit) as ended:
        main(["check", "--data", "ImageFolder", "--root", root])
    sys.stdout.flush()
    return ended.value.code


def test_a_report_with_file_names_in_another_encoding_is_printed(tmp_path):
    name = b"a/caf\xe9.jpg".decode(errors="surrogateescape")
    for path in ("a/1.jpg", name, "b/1.jpg"):
        write_image(tmp_path / "root" / path)
    (tmp_path / "root/c").mkdir()
    (tmp_path / "root/c" / name.replace("a/", "").replace(".jpg", ".txt")).write_text("")
    (process,) = start_processes(check_of_a_latin_tree, 1, str(tmp_path / "root"), folder=tmp_path)
    assert process.wait(60) == 0, process.output()
    assert process.result() == 1
    assert "caf\\udce9.txt" in process.output()


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


# --- warnings of reading


def test_warnings_of_reading_are_repeated_from_the_cache_and_in_the_report(tmp_path):
    written = write_landmarks(tmp_path / "data")
    (tmp_path / "data" / written["train"][0][0]).unlink()
    messages = []
    for _ in range(2):
        data = LandmarksClean(tmp_path / "data", cache_dir=tmp_path / "cache")
        with pytest.warns(UserWarning, match="skipped 1 images that are not in") as caught:
            data.prepare_data()
        messages.append([str(warning.message) for warning in caught])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = data.check()
        assert report.problems == messages[-1]
        assert not report.ok
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert messages[0] == messages[1]
