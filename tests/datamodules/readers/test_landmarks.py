"""LandmarksClean: lists of URLs and of paths, files that are missing, and names that several URLs share."""

import pytest

from lightning_retrieval.datamodules import LandmarksClean
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, fit_and_validate, write_images, write_landmarks


def described(data, split="train"):
    found = columns(data, split)
    return list(zip(found["paths"], map(int, found["classes"]), strict=True))


@pytest.mark.parametrize(("images", "folder"), [("images", "annotations"), ("jpg/all", "")])
def test_urls_are_looked_for_by_their_last_part(tmp_path, images, folder):
    written = write_landmarks(tmp_path, images, folder)
    data = LandmarksClean(tmp_path, images=images)
    assert described(data, "train") == written["train"]
    assert described(data, "test") == written["val"]
    # Both splits have the same landmarks, and so the same labels.
    assert columns(data, "train")["labels"] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert columns(data, "test")["labels"] == [2, 2, 0, 0]


MIRRORED = {  # URL: the file that `wget -x` creates
    "http://a.org/x/same.jpg": "a.org/x/same.jpg",
    "http://b.org/x/same.jpg": "b.org/x/same.jpg",
    "http://a.org/y/same.jpg": "a.org/y/same.jpg",
    "https://user:word@C.org:8080//z/caf%C3%A9.JPG#top": "c.org:8080/z/café.JPG",
    "http://d.org/show?image=7": "d.org/show?image=7",
    "http://d.org/pictures/": "d.org/pictures/index.html",
    "http://d.org": "d.org/index.html",
}


def test_mirrored_urls_are_kept_apart(tmp_path):
    lines = [f"{url} {landmark}\n" for landmark, url in enumerate(MIRRORED)]
    write_text(tmp_path / "annotation_clean_train.txt", "".join(lines) + "http://e.org/flat.jpg 99\n")
    for seed, name in enumerate(MIRRORED.values()):
        image = write_image(tmp_path / "images" / f"{seed}.jpg", seed=seed)
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        image.rename(tmp_path / "images" / name)
    write_images(tmp_path / "images", ["flat.jpg"])
    data = LandmarksClean(tmp_path)
    expected = [(f"images/{name}", landmark) for landmark, name in enumerate(MIRRORED.values())]
    assert described(data) == [*expected, ("images/flat.jpg", 99)]
    assert data.train_set.read(4).size == (48, 40)


@pytest.mark.parametrize("url", ["http://[/a.jpg", "http://x.org/../../away.jpg", f"http://x.org/{'a' * 300}.jpg"])
def test_urls_that_name_no_file_are_missing(tmp_path, url):
    write_text(tmp_path / "annotation_clean_train.txt", f"{url} 1\nhttp://x.org/b.jpg 1\n")
    write_images(tmp_path, ["images/b.jpg", "away.jpg"])
    with pytest.warns(UserWarning, match="skipped 1 images"):
        assert described(LandmarksClean(tmp_path)) == [("images/b.jpg", 1)]


def test_escaped_names_are_found_as_they_are_and_unescaped(tmp_path):
    urls = ["http://x.org/caf%C3%A9.jpg", "http://x.org/a%20b.JPG"]
    write_text(tmp_path / "annotation_clean_train.txt", "".join(f"{url} 1\n" for url in urls))
    write_images(tmp_path, ["images/café.jpg", "images/a%20b.JPG"])
    assert described(LandmarksClean(tmp_path)) == [("images/café.jpg", 1), ("images/a%20b.JPG", 1)]


def test_a_rewritten_list_holds_paths(tmp_path):
    paths = ["jpg/3/ä.JPG", "jpg/3/b.jpg", "jpg/20/b.jpg"]
    text = "".join(f"{path} {path.split('/')[1]} more\n" for path in paths)
    write_text(tmp_path / "annotations" / "annotation_clean_train.txt", "./" + text)
    write_images(tmp_path, paths)
    data = LandmarksClean(tmp_path)
    assert list(data.splits) == ["train"]
    assert described(data) == [(path, int(path.split("/")[1])) for path in paths]


def test_missing_files_are_skipped_with_one_warning(tmp_path):
    written = write_landmarks(tmp_path)
    for path in (written["train"][1][0], written["train"][5][0], written["val"][2][0]):
        (tmp_path / path).unlink()
    data = LandmarksClean(tmp_path)
    with pytest.warns(UserWarning, match="skipped 3 images") as caught:
        data.prepare_data()
    assert len(caught) == 1
    assert described(data) == [row for i, row in enumerate(written["train"]) if i not in (1, 5)]
    assert described(data, "test") == [row for i, row in enumerate(written["val"]) if i != 2]


def test_file_names_of_several_urls_are_warned_of(tmp_path):
    """A name with one landmark stands for its first line; which landmark another name shows is not known."""
    lines = ["a/same.jpg 1", "b/same.jpg 1", "c/unclear.jpg 1", "d/unclear.jpg 2", "e/fine.jpg 2"]
    write_text(tmp_path / "annotation_clean_train.txt", "".join(f"http://x.org/{line}\n" for line in lines))
    write_text(tmp_path / "annotation_clean_val.txt", "http://x.org/g/same.jpg 1\nhttp://x.org/h/val.jpg 2\n")
    write_images(tmp_path / "images", ["same.jpg", "unclear.jpg", "fine.jpg", "val.jpg"])
    data = LandmarksClean(tmp_path)
    with pytest.warns(UserWarning, match="2 file names belong to several lines.*skipped 4 lines"):
        data.prepare_data()
    assert described(data) == [("images/same.jpg", 1), ("images/fine.jpg", 2)]
    assert described(data, "test") == [("images/val.jpg", 2)]


def test_trains_on_the_training_list_alone_without_evaluation(tmp_path):
    write_landmarks(tmp_path)
    (tmp_path / "annotations" / "annotation_clean_val.txt").unlink()
    assert "val/mAP" not in fit_and_validate(LandmarksClean(tmp_path, **QUICK), validate=False)
