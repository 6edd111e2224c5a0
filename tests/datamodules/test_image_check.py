"""Checks of a data set before training: its counts, and what is wrong with its images and labels."""

import io
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import DataReport, ImageFolder, ImageIndex, ImageSet, ImageTable, LandmarksClean
from tests.datamodules.pictures import as_it_is
from tests.datamodules.trees import truncate, write_image
from tests.datamodules.trees_more import write_landmarks


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


def table_of(tmp_path, *rows):
    (tmp_path / "table.csv").write_text("\n".join(rows))
    return ImageTable(tmp_path, "table.csv")


def notes_with(word, report):
    return [note for note in report.notes if word in note]


def test_images_without_problems(folder):
    report = ImageFolder(folder).check()
    assert report.ok
    assert report.problems == report.missing_files == report.unreadable_files == []
    assert {name: found for name, (found, _) in report.splits.items()} == {"train": (6, 2), "test": (6, 2)}
    assert len(notes_with("8 x 8 pixels", report)) == len(report.notes) == 1
    noise(folder / "test/test a/large.png", 12, size=(40, 10))
    noise(folder / "test/test a/small.png", 13, size=(3, 6))
    (sizes,) = ImageFolder(folder, resize="fit").check().notes
    assert "3 to 10 pixels, median 8" in sizes
    assert "6 to 40 pixels, median 8" in sizes


def test_images_that_a_centre_crop_cuts(folder):
    sizes = [(80, 40), (40, 80), (40, 31), (40, 30), (41, 30)]  # the last but one loses exactly a quarter
    for number, size in enumerate(sizes):
        noise(folder / f"test/test a/long {number}.png", 20 + number, size=size)
    report = ImageFolder(folder).check()
    assert report.ok
    assert len(notes_with("3 of 17 images", report)) == 1
    assert len(notes_with("16 of 17 images", ImageFolder(folder, image_size=(8, 16), resize=16).check())) == 1
    for settings in (
        {"resize": "fit"},
        {"image_size": (30, 30)},
        {"resize": (256, 256)},
        {"transform": "ap_gem"},
        {"eval_transform": as_it_is},
    ):
        assert notes_with("crop", ImageFolder(folder, **settings).check()) == [], settings


@pytest.mark.parametrize("load_truncated", [False, True])
def test_files_that_cannot_be_decoded(folder, load_truncated):
    for number in range(40):  # read in several threads
        noise(folder / f"train/train a/damaged {number:02}.jpg", number, (90, 90))
        truncate(folder / f"train/train a/damaged {number:02}.jpg", 0.75)
    (folder / "test/test b/text.jpg").write_text("not an image")
    report = ImageFolder(folder, load_truncated=load_truncated).check()
    damaged = [f"train/train a/damaged {number:02}.jpg" for number in range(0 if load_truncated else 40)]
    assert [file.split(" (")[0] for file in report.unreadable_files] == [*damaged, "test/test b/text.jpg"]
    assert report.missing_files == []
    assert not report.ok


def test_images_that_are_in_training_and_in_evaluation(folder):
    """Also if the format of the copy is another one."""
    for number in range(7):
        noise(folder / f"train/train a/copied {number}.png", 100 + number)
        Image.open(folder / f"train/train a/copied {number}.png").save(folder / f"test/test b/copy {number}.bmp")
    report = ImageFolder(folder).check()
    assert not report.ok
    assert report.problems[0].startswith("train/train a/copied 0.png and test/test b/copy 0.bmp are the same image")
    assert len(report.problems) == 6
    assert report.problems[5].startswith("2 more pairs")


def test_images_that_a_split_has_twice(folder):
    noise(folder / "train/train b/again.png", 0)  # also in class a
    noise(folder / "test/test a/again.png", 1)
    for path, size in (("train/train a/flat.png", (8, 2)), ("test/test a/high.png", (2, 8))):
        Image.new("RGB", size, (9, 9, 9)).save(folder / path)  # the same bytes in another size
    report = ImageFolder(folder).check()
    (problem,) = report.problems
    assert problem.startswith("train/train a/0.png and train/train b/again.png are the same image")
    assert report.notes[0].startswith("test/test a/1.png and test/test a/again.png are the same image")


def test_classes_with_one_image(folder):
    noise(folder / "train/lonely/1.png", 50)
    noise(folder / "test/alone/1.png", 51)
    report = ImageFolder(folder).check()
    assert report.ok
    for split, name in (("train", "lonely"), ("test", "alone")):
        assert len(notes_with(f"classes of {split} with one image: 1, such as '{name}'", report)) == 1


def test_a_table_with_boxes_and_missing_files(tmp_path):
    """Parts of an image are images of their own; a box outside of its image is named."""
    noise(tmp_path / "a.png", 0, size=(20, 10))
    noise(tmp_path / "b.png", 1, size=(20, 10))
    rows = ["image,label,split,box", "a.png,1,train,0 0 10 10", "a.png,1,train,10 0 20 10", "gone.png,1,train,0 0 9 9"]
    report = table_of(tmp_path, *rows, "b.png,2,test,0 0 10 10", "b.png,2,test,30 0 40 10").check()
    assert report.missing_files == ["gone.png"]
    (outside,) = report.unreadable_files
    assert outside.startswith("b.png (its box [30, 0, 40, 10]")
    assert report.problems == []
    assert len(notes_with("10 x 10 pixels", report)) == len(report.notes) == 1


def test_distractors_are_no_class(tmp_path):
    for number in range(5):
        noise(tmp_path / f"{number}.png", number)
    rows = ["image,label,split,role", "0.png,a,train,", "1.png,a,train,", "2.png,b,test,", "3.png,b,test,"]
    report = table_of(tmp_path, *rows, "4.png,,test,distractor").check()
    assert report.splits["test"][0] == (3, 1)
    assert notes_with("one image", report) == []


def test_tags_are_counted_and_images_without_labels_have_no_classes(tmp_path):
    for number in range(5):
        noise(tmp_path / f"{number}.png", number % 4)  # the last image is a copy of the first
    rows = ["image,tags,split", "0.png,red;red; old,train", "1.png,red,train", "2.png,,test", "3.png,,test"]
    report = table_of(tmp_path, *rows, "4.png,red,train").check()
    assert {name: counts for name, (counts, _) in report.splits.items()} == {"train": (3, 0), "test": (2, 0)}
    assert report.problems == []
    parts = ["train has 2 tags, at most 3", "'old'", "test has 0 tags", "2 images of test", "0.png and 4.png", "8 x 8"]
    for note, part in zip(report.notes, parts, strict=True):
        assert part in note


def test_a_report_is_ok_with_any_of_the_published_counts():
    published = [(1000, 7), (1200, 7)]
    report = DataReport({"train": ((1200, 7), published), "test": ((5, 2), ())})
    assert report.ok
    assert str(report).splitlines()[1].split() == ["train", "1,200", "7", "1,000", "or", "1,200", "7"]
    assert not DataReport({"train": ((1100, 7), published)}).ok
    assert not DataReport(problems=["a sentence"]).ok
    many = DataReport(missing_files=[f"{i}.jpg" for i in range(1012)])
    assert len(str(many).splitlines()) == 12  # ten of them are shown


def test_what_reading_warns_of_is_a_problem_of_the_report(tmp_path):
    written = write_landmarks(tmp_path)
    (tmp_path / written["train"][0][0]).unlink()
    data = LandmarksClean(tmp_path)
    with pytest.warns(UserWarning, match="skipped 1 images that are not in") as caught:
        data.prepare_data()
    report = data.check()
    assert report.problems == [str(warning.message) for warning in caught]
    assert not report.ok


class Interrupted(ImageSet):
    """Images that are read in a moment, but for the first, at which the user interrupts."""

    def read(self, position):
        if position == 0:
            raise KeyboardInterrupt
        return Image.new("RGB", (2, 2))


class InterruptedFolder(ImageFolder):
    def read(self):
        return {"train": ImageIndex(["a.png"] * 50_000, [0] * 50_000)}

    def image_set(self, index, transform):
        return Interrupted(index, self.root, transform)


def test_an_interrupt_ends_the_check(folder):
    noise(folder / "a.png", 0)
    with pytest.raises(KeyboardInterrupt):
        InterruptedFolder(folder).check()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    assert left == []


# --- the command


def test_the_command_checks_a_table_whose_columns_have_other_names(tmp_path, capsys):
    for number, name in enumerate(("a", "b")):
        noise(tmp_path / f"{name}.png", number)
    (tmp_path / "train.tsv").write_text("Image\tId\na.png\tw_1\nb.png\tnew_whale\n")
    args = ["check", "--data=ImageTable", f"--root={tmp_path}", "--table=train.tsv", "--delimiter=tab"]
    for names in ("image=Image,label=Id", '{"image": "Image", "label": "Id"}'):
        main([*args, f"--columns={names}"])
        assert "train       1        1" in capsys.readouterr().out


def test_a_report_with_file_names_in_another_encoding_is_printed(tmp_path, monkeypatch):
    """To an output that takes valid UTF-8 only."""
    name = b"caf\xe9".decode(errors="surrogateescape")
    for path in ("a/1.jpg", f"a/{name}.jpg", "b/1.jpg"):
        write_image(tmp_path / path)
    (tmp_path / f"a/{name}.txt").write_text("")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", errors="strict"))
    with pytest.raises(SystemExit) as ended:
        main(["check", "--data=ImageFolder", f"--root={tmp_path}"])
    sys.stdout.flush()
    assert ended.value.code == 1
    assert b"caf\\udce9.txt" in printed.getvalue()
