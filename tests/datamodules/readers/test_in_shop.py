"""In-Shop Clothes Retrieval: read as written, trained on, evaluated with queries and gallery; invalid lists raise."""

import pytest

from lightning_retrieval.datamodules.image_index import ROLES
from lightning_retrieval.datamodules.readers.in_shop import InShop
from tests.datamodules.trees import replace, write_in_shop
from tests.datamodules.trees_more import QUICK, fit_and_validate

STRUCTURES = {"as unpacked": ("Eval/", "Img/"), "flat": ("", ""), "Anno": ("Anno/", "Img/"), "Eval": ("Eval/", "")}
PARTITION = "Eval/list_eval_partition.txt"


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("extra", [{}, {"boxes": True}, {"high_res": True}], ids=str)
def test_images_are_read_as_they_were_written(tmp_path, structure, extra):
    lists, images = STRUCTURES[structure]
    written = write_in_shop(tmp_path, lists, images)
    splits = InShop(tmp_path, **extra).splits
    assert list(splits) == ["train", "test"]
    for split, index in splits.items():
        rows = [row for row in written if (row[2] == "train") == (split == "train")]
        names, items, statuses, boxes = zip(*rows)
        folder = "img_highres" if extra.get("high_res") else "img"
        assert list(index.paths) == [f"{images}{folder}{name[3:]}" for name in names]
        assert [index.names[label] for label in index.labels] == list(items)
        assert index.labels.tolist() == [sorted(set(items)).index(item) for item in items]
        assert index.categories.tolist() == [{"MEN": 0, "WOMEN": 1}[name.split("/")[1]] for name in names]
        assert index.boxes is None if "boxes" not in extra else index.boxes.tolist() == [list(box) for box in boxes]
        roles = None if index.roles is None else index.roles.tolist()
        assert roles == (None if split == "train" else [ROLES[status] for status in statuses])


def test_images_are_those_of_the_folder_and_cropped_to_their_box(tmp_path):
    written = write_in_shop(tmp_path)
    left, top, right, bottom = next(box for _, _, status, box in written if status == "train")
    assert InShop(tmp_path).train_set.read(0).size == (32, 32)
    assert InShop(tmp_path, high_res=True).train_set.read(0).size == (64, 80)
    assert InShop(tmp_path, boxes=True).train_set.read(0).size == (right - left, bottom - top)
    assert {InShop(tmp_path).test_set.read(position).mode for position in range(9)} == {"RGB"}


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
    loader = InShop(tmp_path, **QUICK).test_dataloader()
    roles = [role for batch in loader for role in batch["roles"].tolist()]
    assert roles == [ROLES["query"], ROLES["gallery"], ROLES["gallery"]] * 3
    for _ in range(2):
        replace(tmp_path / PARTITION, "id_00000001     gallery", "id_00000001     query")
    assert fit_and_validate(InShop(tmp_path, **QUICK))["val/skipped_queries"] == 3


def test_the_cache_distinguishes_boxes_and_resolutions(tmp_path):
    write_in_shop(tmp_path / "data")
    settings = [{}, {"boxes": True}, {"high_res": True}] * 2
    splits = [InShop(tmp_path / "data", cache_dir=tmp_path / "cache", **extra).splits["test"] for extra in settings]
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert [split.boxes is not None for split in splits] == [False, True, False] * 2
    assert [split.paths[0].startswith("img_highres/") for split in splits] == [False, False, True] * 2
    assert splits[4].roles.tolist() == splits[1].roles.tolist()


@pytest.mark.parametrize(
    ("split", "statuses"),
    [("train", ["train", "query", "gallery"]), ("query", ["query", "gallery"]), ("gallery", ["gallery"])],
)
def test_an_empty_split_raises(tmp_path, split, statuses):
    write_in_shop(tmp_path)
    lines = (tmp_path / PARTITION).read_text().splitlines()
    kept = [line for line in lines[2:] if line and line.split()[2] not in statuses]
    (tmp_path / PARTITION).write_text("\n".join([str(len(kept)), lines[1], *kept]))
    with pytest.raises(ValueError, match=f"the split '{split}' must have at least one image, got none in .*partition"):
        InShop(tmp_path).prepare_data()


def test_boxes_and_high_res_together_raise(tmp_path):
    with pytest.raises(ValueError, match=r"^InShop: `boxes` and `high_res` must not both be True"):
        InShop(tmp_path, boxes=True, high_res=True)
