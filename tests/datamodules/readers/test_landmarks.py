"""LandmarksClean: lists of URLs and of paths, missing files and shared file names, trained on."""

import pytest

from lightning_retrieval.datamodules.readers.landmarks import LandmarksClean
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, fit_and_validate, write_images, write_landmarks

refusal = pytest.mark.refusal


def described(index):
    return [(path, int(index.names[label])) for path, label in zip(index.paths, index.labels, strict=True)]


@pytest.mark.parametrize(("images", "folder"), [("images", "annotations"), ("jpg/all", "")])
def test_urls_are_looked_for_by_their_last_part(tmp_path, images, folder):
    written = write_landmarks(tmp_path, images, folder)
    splits = LandmarksClean(tmp_path, images=images).splits
    assert described(splits["train"]) == written["train"]
    assert described(splits["test"]) == written["val"]
    # Both splits have the same landmarks, and so the same numbers of landmarks.
    assert list(splits["train"].names) == list(splits["test"].names) == ["3", "20", "100"]
    assert splits["train"].labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert splits["test"].labels.tolist() == [2, 2, 0, 0]


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
    data = LandmarksClean(tmp_path, cache_dir=tmp_path / "cache")
    expected = [(f"images/{name}", landmark) for landmark, name in enumerate(MIRRORED.values())]
    assert described(data.splits["train"]) == [*expected, ("images/flat.jpg", 99)]
    assert data.train_set.read(4).size == (48, 40)
    (tmp_path / "images/a.org/y/same.jpg").unlink()
    with pytest.warns(UserWarning, match=r"skipped 1 images .* such as that of http://a\.org/y/same\.jpg"):
        assert len(LandmarksClean(tmp_path, cache_dir=tmp_path / "cache").splits["train"]) == 7


@pytest.mark.parametrize("url", ["http://[/a.jpg", "http://x.org/../../a.jpg", f"http://x.org/{'a' * 300}.jpg"])
def test_urls_that_name_no_file_are_missing(tmp_path, url):
    write_text(tmp_path / "annotation_clean_train.txt", f"{url} 1\nhttp://x.org/b.jpg 1\n")
    write_images(tmp_path, ["images/b.jpg", "away.jpg"])
    with pytest.warns(UserWarning, match="skipped 1 images"):
        assert list(LandmarksClean(tmp_path).splits["train"].paths) == ["images/b.jpg"]


def test_escaped_names_are_found_as_they_are_and_unescaped(tmp_path):
    urls = ["http://x.org/caf%C3%A9.jpg", "http://x.org/a%20b.JPG"]
    write_text(tmp_path / "annotation_clean_train.txt", "".join(f"{url} 1\n" for url in urls))
    write_images(tmp_path, ["images/café.jpg", "images/a%20b.JPG"])
    assert list(LandmarksClean(tmp_path).splits["train"].paths) == ["images/café.jpg", "images/a%20b.JPG"]


def test_a_rewritten_list_holds_paths(tmp_path):
    paths = ["jpg/3/ä.JPG", "jpg/3/b.jpg", "jpg/20/b.jpg"]
    text = "".join(f"{path} {path.split('/')[1]} more\n" for path in paths)
    write_text(tmp_path / "annotations" / "annotation_clean_train.txt", "./" + text + "jpg/20/c.jpg 20\n")
    write_images(tmp_path, paths)
    settings = {"cache_dir": tmp_path / "cache"}
    with pytest.warns(UserWarning, match=r"skipped 1 images that are not in .*\(1 of 4 of train\), .* of jpg/20/c.jpg"):
        splits = LandmarksClean(tmp_path, **settings).splits
    assert list(splits) == ["train"]
    assert described(splits["train"]) == [(path, int(path.split("/")[1])) for path in paths]
    write_images(tmp_path, ["jpg/20/c.jpg"])  # which comes later
    assert len(LandmarksClean(tmp_path, **settings).splits["train"]) == 4


def test_missing_files_are_skipped_with_one_warning(tmp_path):
    written = write_landmarks(tmp_path)
    for path in (written["train"][1][0], written["train"][5][0], written["val"][2][0]):
        (tmp_path / path).unlink()
    with pytest.warns(UserWarning, match=r"skipped 3 images .*\(2 of 9 of train, 1 of 4 of test\), .*farm1") as caught:
        splits = LandmarksClean(tmp_path).splits
    assert len(caught) == 1
    assert described(splits["train"]) == [row for i, row in enumerate(written["train"]) if i not in (1, 5)]
    assert described(splits["test"]) == [row for i, row in enumerate(written["val"]) if i != 2]


def test_file_names_of_several_urls_are_warned_of(tmp_path):
    lines = ["a/same.jpg 1", "b/same.jpg 1", "c/unclear.jpg 1", "d/unclear.jpg 2", "e/fine.jpg 2", "f/gone.jpg 2"]
    write_text(tmp_path / "annotation_clean_train.txt", "".join(f"http://x.org/{line}\n" for line in lines))
    write_text(tmp_path / "annotation_clean_val.txt", "http://x.org/g/same.jpg 1\nhttp://x.org/h/val.jpg 2\n")
    write_images(tmp_path / "images", ["same.jpg", "unclear.jpg", "fine.jpg", "val.jpg"])
    with pytest.warns(UserWarning) as caught:  # noqa: PT030
        splits = LandmarksClean(tmp_path).splits
    missing, shared = (str(warning.message) for warning in caught)
    assert "skipped 1 images" in missing
    assert "2 file names belong to several lines, such as http://x.org/a/same.jpg and http://x.org/b/same.jpg" in shared
    assert "skipped 4 lines, including all of 1 names with several landmarks" in shared
    assert "Store the images as <host>/<path>, as `wget -x` does" in shared
    assert described(splits["train"]) == [("images/same.jpg", 1), ("images/fine.jpg", 2)]
    assert described(splits["test"]) == [("images/val.jpg", 2)]


def test_trains_on_the_training_list_alone_without_evaluation(tmp_path):
    write_landmarks(tmp_path)
    (tmp_path / "annotations" / "annotation_clean_val.txt").unlink()
    assert "val/mAP" not in fit_and_validate(LandmarksClean(tmp_path, **QUICK), validate=False)


@refusal
def test_a_folder_without_any_of_the_images_raises(tmp_path):
    write_landmarks(tmp_path, images="elsewhere")
    (tmp_path / "images").mkdir()
    with pytest.warns(UserWarning, match="skipped 13 images"), pytest.raises(ValueError, match="images with none of 9"):
        LandmarksClean(tmp_path).prepare_data()
