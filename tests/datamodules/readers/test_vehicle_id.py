"""PKU VehicleID: images are read as they were written, and both protocols are evaluated."""

import pytest
import torch

from lightning_retrieval.datamodules import VehicleID
from lightning_retrieval.metrics import RandomGalleryMetrics
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import write_image, write_vehicle_id
from tests.datamodules.trees_more import QUICK, SMALL, fit_and_validate

NUMBERS = {"train": [9, 10, 11, 20], "small": [30, 31], "medium": [30, 31, 32], "large": [5, 30, 31, 32]}
MODELS = {20: 0, 9: 1, 31: 1}  # models 7 and 101; the others have none, which is a category of its own


@pytest.mark.parametrize("images", ["image", "images"])
def test_images_are_read_as_they_were_written(tmp_path, images):
    written = write_vehicle_id(tmp_path, images)
    data = VehicleID(tmp_path)
    assert list(data.splits) == list(NUMBERS)
    for split, numbers in NUMBERS.items():
        found = columns(data, split)
        assert found["paths"] == [f"{images}/{name}.jpg" for name, _ in written[split]]
        assert found["labels"] == [numbers.index(vehicle) for _, vehicle in written[split]]
        assert found["classes"] == [str(vehicle) for _, vehicle in written[split]]
        assert found["categories"] == [MODELS.get(vehicle, 2) for _, vehicle in written[split]]
        assert found["roles"] is None


def test_models_are_optional(tmp_path):
    write_vehicle_id(tmp_path)
    (tmp_path / "attribute/model_attr.txt").unlink()
    assert columns(VehicleID(tmp_path), "train")["categories"] is None


@pytest.mark.parametrize(("sizes", "expected"), [("small", ["small"]), (["large", "small"], ["large", "small"])])
def test_only_the_lists_of_the_sizes_are_read(tmp_path, sizes, expected):
    write_vehicle_id(tmp_path)
    (tmp_path / "train_test_split/test_list_1600.txt").unlink()
    assert list(VehicleID(tmp_path, sizes=sizes).splits) == ["train", *expected]


def test_select_by_vid_takes_all_images_of_the_listed_vehicles(tmp_path):
    written = write_vehicle_id(tmp_path)
    every = VehicleID(tmp_path, select_by_vid=True)
    vehicles = dict(line.split() for line in (tmp_path / "attribute/img2vid.txt").read_text().splitlines())
    for split, numbers in NUMBERS.items():
        found = columns(every, split)
        names = [path.removeprefix("image/").removesuffix(".jpg") for path in found["paths"]]
        assert names == [name for name, vehicle in vehicles.items() if int(vehicle) in numbers]
        assert found["classes"] == [vehicles[name] for name in names]
        assert set(names) > {name for name, _ in written[split]}


def test_the_reid_protocol_has_random_galleries(tmp_path):
    """Ten of them from the seed, for the same images as the other protocol's."""
    write_vehicle_id(tmp_path)
    reid, retrieval = (VehicleID(tmp_path, protocol=protocol, seed=4) for protocol in ("reid", "retrieval"))
    for size, images in reid.test_set.items():
        assert columns(reid, size) == columns(retrieval, size)
        metrics = images.metrics((1, 5))
        assert isinstance(metrics, RandomGalleryMetrics)
        assert (metrics.ks, metrics.draws, metrics.seed) == ((1, 5), 10, 4)
        assert not hasattr(retrieval.test_set[size], "metrics")
    held = VehicleID(tmp_path, protocol="reid", val_fraction=0.5).val_set  # checkpoints are chosen by what is reported
    assert isinstance(held.metrics((1,)), RandomGalleryMetrics)


def test_fit_and_validate_with_random_galleries(tmp_path):
    """What is logged is the mean over ten galleries, of embeddings computed once."""
    for number, (name, _) in enumerate(write_vehicle_id(tmp_path)["large"]):
        write_image(tmp_path / f"image/{name}.jpg", seed=number)  # those of a vehicle are no longer alike
    data = VehicleID(tmp_path, sizes=["small", "large"], protocol="reid", **QUICK)
    metrics = fit_and_validate(data)
    assert {name for name in metrics if name.endswith("/R@1")} == {"val/R@1", "val/small/R@1", "val/large/R@1"}
    # One right image in each gallery, of two vehicles: first or second.
    assert 0 < metrics["val/small/R@1"] < 1
    assert metrics["val/small/mAP"] == pytest.approx((1 + metrics["val/small/R@1"]) / 2)


def test_random_galleries_skip_what_cannot_be_read(tmp_path):
    """Also where a whole batch cannot be read: the values are those of the other images."""
    written = write_vehicle_id(tmp_path)
    for name, _ in written["small"][:2]:
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
