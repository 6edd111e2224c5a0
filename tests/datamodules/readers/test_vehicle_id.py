"""PKU VehicleID: read as written, both protocols, trained on; invalid lists raise."""

import pytest
import torch

from lightning_retrieval.datamodules import ImageSet
from lightning_retrieval.datamodules.readers.vehicle_id import VehicleID
from lightning_retrieval.metrics import RandomGalleryMetrics
from tests.datamodules.trees import write_image, write_vehicle_id
from tests.datamodules.trees_more import QUICK, SMALL, fit_and_validate

NUMBERS = {"train": [9, 10, 11, 20], "small": [30, 31], "medium": [30, 31, 32], "large": [5, 30, 31, 32]}
MODELS = {20: 0, 9: 1, 31: 1}  # models 7 and 101; the others have none, which is a category of its own
ALL, ATTRIBUTE = "attribute/img2vid.txt", "attribute/model_attr.txt"


@pytest.mark.parametrize("images", ["image", "images"])
def test_images_are_read_as_they_were_written(tmp_path, images):
    written = write_vehicle_id(tmp_path, images)
    splits = VehicleID(tmp_path).splits
    assert list(splits) == ["train", "small", "medium", "large"]
    for split, index in splits.items():
        assert list(index.paths) == [f"{images}/{name}.jpg" for name, _ in written[split]]
        assert index.labels.tolist() == [NUMBERS[split].index(vehicle) for _, vehicle in written[split]]
        assert list(index.names) == [str(vehicle) for vehicle in NUMBERS[split]]
        assert index.categories.tolist() == [MODELS.get(vehicle, 2) for _, vehicle in written[split]]
        assert index.roles is None


def test_models_are_optional(tmp_path):
    write_vehicle_id(tmp_path)
    (tmp_path / ATTRIBUTE).unlink()
    for cache in (None, tmp_path / "cache"):
        assert all(index.categories is None for index in VehicleID(tmp_path, cache_dir=cache).splits.values())


@pytest.mark.parametrize(
    ("sizes", "expected"), [("small", ["small"]), (["large", "small"], ["large", "small"]), (["medium"], ["medium"])]
)
def test_only_the_lists_of_the_sizes_are_read(tmp_path, sizes, expected):
    write_vehicle_id(tmp_path)
    for path in (tmp_path / "train_test_split").iterdir():
        size = {"800": "small", "1600": "medium", "2400": "large"}.get(path.stem.split("_")[-1])
        if size is not None and size not in expected:
            path.unlink()
    assert list(VehicleID(tmp_path, sizes=sizes).splits) == ["train", *expected]


def test_select_by_vid_takes_all_images_of_the_listed_vehicles(tmp_path):
    written = write_vehicle_id(tmp_path)
    listed, every = (VehicleID(tmp_path, select_by_vid=select).splits for select in (False, True))
    vehicles = dict(line.split() for line in (tmp_path / ALL).read_text().splitlines())
    for split, index in every.items():
        assert (len(listed[split]), len(index)) == (3 * len(NUMBERS[split]), 4 * len(NUMBERS[split]))
        found = [path[len("image/") : -len(".jpg")] for path in index.paths]
        assert found == [name for name, vehicle in vehicles.items() if int(vehicle) in NUMBERS[split]]
        assert [int(vehicles[name]) for name in found] == [NUMBERS[split][label] for label in index.labels]
        assert set(found) > {name for name, _ in written[split]}


def test_the_reid_protocol_has_random_galleries(tmp_path):
    """Ten of them from the seed, for the same images as the other protocol's."""
    write_vehicle_id(tmp_path)
    reid, retrieval = (VehicleID(tmp_path, protocol=protocol, seed=4) for protocol in ("reid", "retrieval"))
    assert list(reid.splits) == list(retrieval.splits)
    for size, images in reid.test_set.items():
        assert list(images.index.paths) == list(retrieval.test_set[size].index.paths)
        assert images.index.roles is None
        metrics = images.metrics((1, 5))
        assert isinstance(metrics, RandomGalleryMetrics)
        assert (metrics.ks, metrics.draws, metrics.seed) == ((1, 5), 10, 4)
        assert type(retrieval.test_set[size]) is ImageSet
    held = VehicleID(tmp_path, protocol="reid", val_fraction=0.5).val_set  # checkpoints are chosen by what is reported
    assert isinstance(held.metrics((1,)), RandomGalleryMetrics)


def test_fit_and_validate_with_random_galleries(tmp_path):
    """What is logged is the mean over ten galleries, of embeddings computed once."""
    for number, (name, _) in enumerate(write_vehicle_id(tmp_path)["large"]):
        write_image(tmp_path / f"image/{name}.jpg", seed=number)  # those of a vehicle are no longer alike
    data = VehicleID(tmp_path, sizes=["small", "large"], protocol="reid", **QUICK)
    metrics = fit_and_validate(data)
    assert {name for name in metrics if name.endswith("/R@1")} == {"val/small/R@1", "val/large/R@1"}
    # One right image in each gallery, of two vehicles: first or second.
    assert 0 < metrics["val/small/R@1"] < 1
    assert metrics["val/small/mAP"] == pytest.approx((1 + metrics["val/small/R@1"]) / 2)


@pytest.mark.refusal
def test_reid_needs_two_images_of_a_vehicle(tmp_path):
    write_vehicle_id(tmp_path)
    path = tmp_path / "train_test_split" / "test_list_800.txt"
    first = {line.split()[1]: line for line in path.read_text().splitlines() if line}
    path.write_text("\n".join(first.values()))
    assert len(VehicleID(tmp_path).splits["small"]) == 2
    with pytest.raises(ValueError, match=r"'reid' needs a vehicle with two images or more, got none in .*800\.txt"):
        VehicleID(tmp_path, protocol="reid").prepare_data()


def test_random_galleries_skip_what_cannot_be_read(tmp_path):
    """Also where a whole batch cannot be: the values are those of the other images."""
    written = write_vehicle_id(tmp_path)
    lost = [name for name, _ in written["small"]][:2]
    for name in lost:
        (tmp_path / "image" / f"{name}.jpg").write_text("no image")
    data = VehicleID(tmp_path, sizes="small", protocol="reid", on_error="skip", eval_batch_size=2, eval_transform=SMALL)
    metrics = data.test_set["small"].metrics((1,))
    expected = RandomGalleryMetrics((1,), draws=10, seed=data.seed)
    with pytest.warns(UserWarning, match="skipped so far"):
        batches = list(data.test_dataloader()["small"])
    assert [len(batch["ids"]) for batch in batches] == [1, 2, 2]
    generator = torch.Generator().manual_seed(0)
    for number, batch in enumerate(batches):
        rows = torch.randn(len(batch["ids"]), 5, generator=generator)
        roles = batch.get("roles", torch.full((len(rows),), 3))
        metrics.update(rows, batch["labels"], batch["ids"], roles)
        if number:
            expected.update(rows, batch["labels"], batch["ids"])
    assert metrics.compute() == expected.compute()
