"""CUB-200-2011: read as written, trained on; invalid lists raise."""

import pytest

from lightning_retrieval.datamodules.readers.cub import CUB200
from tests.datamodules.short_run import replace
from tests.datamodules.trees import write_cub

ALBATROSS = "001.Black_footed_Albatross/Black_footed_Albatross"


@pytest.mark.parametrize("boxes", [False, True])
def test_images_are_read_as_they_were_written(tmp_path, boxes):
    written = write_cub(tmp_path)
    splits = CUB200(tmp_path, boxes=boxes).splits
    assert list(splits) == ["train", "test"]
    for split, index in splits.items():
        rows = [row for row in written if (row[2] <= 100) == (split == "train")]
        assert list(index.paths) == [f"images/{name}" for _, name, _, _ in rows]
        assert all((tmp_path / path).is_file() for path in index.paths)
        assert [int(index.names[label]) for label in index.labels] == [number for _, _, number, _ in rows]
        numbers = {"train": [1, 2, 20, 100], "test": [101, 102, 200]}[split]
        assert index.labels.tolist() == [numbers.index(number) for _, _, number, _ in rows]
        if boxes:  # x 3.5, 4.5, 5.5, y 2, width 20.25, height 30
            assert index.boxes.tolist() == [[3, 2, 24, 32], [4, 2, 25, 32], [5, 2, 26, 32]] * len(numbers)
        else:
            assert index.boxes is None
        assert index.categories is index.roles is None


def test_images_come_as_rgb_cropped_to_their_box(tmp_path):
    write_cub(tmp_path)
    whole, birds = CUB200(tmp_path).train_set, CUB200(tmp_path, boxes=True).train_set
    assert {(whole.read(position).mode, whole.read(position).size) for position in range(12)} == {("RGB", (60, 50))}
    assert {(birds.read(position).mode, birds.read(position).size) for position in range(12)} == {("RGB", (21, 30))}


PATHS, CLASSES, BOXES = "images.txt", "image_class_labels.txt", "bounding_boxes.txt"
INVALID = {
    "missing height": (BOXES, "2.0 20.25 30.0", "2.0 20.25", r"boxes.txt must have 5 fields, .* \(line 2\)"),
    "id that is not a number": (PATHS, "2 001", "b 001", "`image_id` must be integers in .*images.txt, got 'b'"),
    "class without image": (CLASSES, "20 200", "99 1\n20 200", "got 1 in .*labels.txt that are not in .*such as 99"),
    "class zero": (CLASSES, "20 200", "20 0", "from 1 to 200, got '0' for image 20"),
    "infinite box": (BOXES, "20 4.5 2.0", "20 4.5 inf", "four finite numbers, got '4.5 inf 20.25 30.0' in line 3 of"),
    "image without class": (CLASSES, "20 200\n", "", "got 1 in .*images.txt that are not in .*labels.txt, such as 20"),
    "image without box": (BOXES, "20 4.5 2.0 20.25 30.0\n", "", "got 1 in .*images.txt that are not in .*such as 20"),
    "class beyond": (CLASSES, "20 200", "20 201", "from 1 to 200, got '201' for image 20 in line 3 of .*labels.txt"),
    "box that is not a number": (
        BOXES,
        "20 4.5",
        "20 left",
        "four finite numbers, got 'left 2.0 20.25 30.0' in line 3 of",
    ),
    "class of another digit": (CLASSES, "20 200", "20 ²", "must be an integer from 1 to 200, got '²' for image 20"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_lists_raise(tmp_path, case):
    name, old, new, message = INVALID[case]
    write_cub(tmp_path)
    replace(tmp_path / name, old, new)
    data = CUB200(tmp_path, boxes=name == BOXES)
    with pytest.raises(ValueError, match=message):
        data.prepare_data()


@pytest.mark.parametrize(("split", "removed"), [("train", range(12)), ("test", range(12, 21))])
def test_an_empty_split_raises(tmp_path, split, removed):
    written = write_cub(tmp_path)
    rows = [row for position, row in enumerate(written) if position not in removed]
    (tmp_path / PATHS).write_text("".join(f"{image} {name}\n" for image, name, _, _ in rows))
    (tmp_path / CLASSES).write_text("".join(f"{image} {number}\n" for image, _, number, _ in rows))
    with pytest.raises(ValueError, match=f"the split '{split}' must have at least one image, got none in .*labels.txt"):
        CUB200(tmp_path).prepare_data()


@pytest.mark.parametrize("name", ["images", "bounding_boxes.txt"])
def test_missing_files_raise(tmp_path, name):
    write_cub(tmp_path / "birds")
    (tmp_path / "birds" / name).rename(tmp_path / "birds/away")
    with pytest.raises(
        FileNotFoundError, match=f"must contain {name}, got .*birds, which does not; no folder near it contains one"
    ):
        CUB200(tmp_path / "birds", boxes=True).prepare_data()
