"""In-Shop Clothes Retrieval: images are read as they were written, and queries are ranked against the gallery."""

import pytest

from lightning_retrieval.datamodules import InShop
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import replace, write_in_shop
from tests.datamodules.trees_more import QUICK, fit_and_validate

STRUCTURES = {"as unpacked": ("Eval/", "Img/"), "flat": ("", ""), "Anno": ("Anno/", "Img/"), "Eval": ("Eval/", "")}
CASES = [(structure, {}) for structure in STRUCTURES] + [("flat", {"boxes": True}), ("as unpacked", {"high_res": True})]
ROLES = {"query": 1, "gallery": 2}


@pytest.mark.parametrize(("structure", "settings"), CASES, ids=str)
def test_images_are_read_as_they_were_written(tmp_path, structure, settings):
    lists, images = STRUCTURES[structure]
    written = write_in_shop(tmp_path, lists, images)
    data = InShop(tmp_path, **settings)
    folder = "img_highres" if settings.get("high_res") else "img"
    assert list(data.splits) == ["train", "test"]
    for split in data.splits:
        rows = [row for row in written if (row[2] == "train") == (split == "train")]
        names, items, statuses, boxes = zip(*rows)
        found = columns(data, split)
        assert found["paths"] == [f"{images}{folder}{name[3:]}" for name in names]
        assert found["classes"] == list(items)
        assert found["labels"] == [sorted(set(items)).index(item) for item in items]
        assert found["categories"] == [{"MEN": 0, "WOMEN": 1}[name.split("/")[1]] for name in names]
        assert found["boxes"] == ([list(box) for box in boxes] if "boxes" in settings else None)
        assert found["roles"] == (None if split == "train" else [ROLES[status] for status in statuses])


def test_images_are_those_of_the_folder_and_cropped_to_their_box(tmp_path):
    written = write_in_shop(tmp_path)
    left, top, right, bottom = next(box for _, _, status, box in written if status == "train")
    assert InShop(tmp_path).train_set.read(0).size == (32, 32)
    assert InShop(tmp_path, high_res=True).train_set.read(0).size == (64, 80)
    assert InShop(tmp_path, boxes=True).train_set.read(0).size == (right - left, bottom - top)


def test_the_report_has_the_papers_counts(tmp_path):
    write_in_shop(tmp_path)
    report = InShop(tmp_path).check()
    assert report.splits == {
        "train": ((12, 4), [(25882, 3997)]),
        "test": ((9, 3), [(26830, 3985)]),
        "query": ((3, 3), [(14218, 3985)]),
        "gallery": ((6, 3), [(12612, 3985)]),
    }
    assert not report.missing_files


def test_only_queries_have_a_gallery_and_only_the_gallery_is_ranked(tmp_path):
    """An item all of whose images are queries has nothing right in the gallery."""
    write_in_shop(tmp_path)
    for _ in range(2):
        replace(tmp_path / "Eval/list_eval_partition.txt", "id_00000001     gallery", "id_00000001     query")
    assert fit_and_validate(InShop(tmp_path, **QUICK))["val/skipped_queries"] == 3
