"""Revisited Oxford and Paris: read as written, cropped and scaled, and evaluated with their lists."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RevisitedOxford, RevisitedParis
from tests.datamodules.readers.columns import columns
from tests.datamodules.small_revisited import (
    DISTRACTORS,
    GND,
    IMAGES,
    QUERIES,
    ground_truth,
    write_distractors,
    write_pickle,
    write_revisited,
)
from tests.datamodules.trees import truncate
from tests.lightning_retrieval.metrics.test_revisited import by_loops, official, with_ties
from tests.quiet_trainer import quiet_trainer

CITIES = {"roxford5k": RevisitedOxford, "rparis6k": RevisitedParis}


def evaluate(data):
    """The embedder, and what `trainer.test` logs."""
    torch.manual_seed(2)
    embedder = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(27, 4))
    trainer = quiet_trainer(callbacks=[RetrievalEvaluation((1, 3))])
    trainer.test(RetrievalModule(embedder, SmoothAPLoss(tau=0.1)), datamodule=data, verbose=False)
    return embedder, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("city", "images", "above"), [("roxford5k", "jpg", False), ("rparis6k", "images", True)])
def test_images_are_read_as_they_were_written(tmp_path, city, images, above):
    folder = write_revisited(tmp_path, city, images, f"gnd_{city}.pkl")
    data = CITIES[city](tmp_path if above else folder)
    assert list(data.splits) == ["test"]
    found, prefix = columns(data, "test"), f"{city}/" if above else ""
    assert found["paths"] == [f"{prefix}{images}/{name}.jpg" for name in IMAGES + QUERIES]
    assert found["roles"] == [2] * 8 + [1] * 3
    assert found["labels"] == [-1] * 8 + [0, 1, 2]
    assert {data.test_set.read(position).mode for position in range(11)} == {"RGB"}
    assert data.val_set is data.test_set
    assert len(data.test_dataloader()) == 11  # one image a batch
    lists = {kind: {8 + i: entry[kind] for i, entry in enumerate(GND)} for kind in ("easy", "hard", "junk")}
    metrics = data.test_set.metrics((1, 5))
    assert {"easy": metrics.easy, "hard": metrics.hard, "junk": metrics.junk} == lists
    assert metrics.ks == (1, 5)


@pytest.mark.parametrize(
    ("name", "pickled"),
    [("oxford5k", "gnd_roxford5k.pkl"), ("oxford5k", "gnd_mine.pkl"), ("roxford5k", "gnd_oxford5k.pkl")],
)
def test_the_ground_truth_is_found_under_other_names(tmp_path, name, pickled):
    write_revisited(tmp_path, name, pickled=pickled)
    assert len(RevisitedOxford(tmp_path).splits["test"]) == 11
    write_pickle(tmp_path / name / "gnd_roxford5k.pkl", ground_truth())
    write_pickle(tmp_path / name / "gnd_oxford5k.pkl", {"older": 1})
    assert len(RevisitedOxford(tmp_path / name).splits["test"]) == 11


@pytest.mark.parametrize(("where", "relative"), [("revisitop1m", True), ("elsewhere/deep/revisitop1m", False)])
def test_distractors_come_after_the_database(tmp_path, monkeypatch, where, relative):
    monkeypatch.chdir(tmp_path)
    folder, more = write_revisited(tmp_path / "data"), write_distractors(tmp_path / where)
    if relative:
        folder, more = folder.relative_to(tmp_path), more.relative_to(tmp_path)
    data = RevisitedOxford(folder, distractors=more)
    found = columns(data, "test")
    expected = [tmp_path / "data/roxford5k/jpg" / f"{name}.jpg" for name in IMAGES]
    expected += [tmp_path / where / "jpg" / name for name in DISTRACTORS]
    expected += [tmp_path / "data/roxford5k/jpg" / f"{name}.jpg" for name in QUERIES]
    assert [data.root / path for path in found["paths"]] == expected
    assert found["roles"] == [2] * 11 + [1] * 3
    assert found["labels"] == [-1] * 11 + [0, 1, 2]
    assert data.test_set.metrics((1,)).easy == {11: [0, 3], 12: [], 13: [4, 6]}
    assert data.test_set[10]["images"].shape == (3, 60, 30)


def test_the_report_has_the_published_counts(tmp_path):
    folder, more = write_revisited(tmp_path), write_distractors(tmp_path / "revisitop1m")
    (folder / "jpg" / f"{IMAGES[3]}.jpg").unlink()
    (more / "jpg" / DISTRACTORS[1]).unlink()
    report = RevisitedOxford(folder, distractors=more).check()
    assert report.splits == {
        "queries": ((3, 3), [(70, 70)]),
        "database": ((8, 0), [(4993, 0)]),
        "distractors": ((3, 0), [(1001001, 0)]),
    }
    assert report.missing_files == [f"roxford5k/jpg/{IMAGES[3]}.jpg", f"revisitop1m/jpg/{DISTRACTORS[1]}"]
    paris = RevisitedParis(write_revisited(tmp_path, "rparis6k", pickled="gnd_rparis6k.pkl")).check()
    assert paris.splits["database"] == ((8, 0), [(6322, 0)])
    assert "distractors" not in paris.splits


def thumbnail(path, box, longer):
    """The official code's: crop, then scale as the whole image would be so that its longer side is `longer`."""
    image = Image.open(path).convert("RGB")
    whole = max(image.size)
    if box is not None:
        image = image.crop(box)
    size = longer * max(image.size) / whole
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return image


@pytest.mark.parametrize(("size", "crop"), [(33, True), (33, False), (1024, True)])
def test_images_are_scaled_and_queries_cropped_first(tmp_path, size, crop):
    folder = write_revisited(tmp_path)
    images = RevisitedOxford(folder, image_size=size, crop_queries=crop).test_set
    for position, name in enumerate([*IMAGES, *QUERIES]):
        box = GND[position - 8]["bbx"] if crop and position >= 8 else None
        expected = thumbnail(folder / "jpg" / f"{name}.jpg", box, size)
        assert images.read(position).size == expected.size
        assert images.read(position).tobytes() == expected.tobytes()
        if position < 8:
            assert max(expected.size) == min(size, 48 + 2 * (position % 4))


def test_the_tensor_is_normalised_and_a_transform_of_ones_own_follows(tmp_path):
    folder = write_revisited(tmp_path)
    tensor = RevisitedOxford(folder, image_size=25).test_set[2]["images"]
    assert tensor.shape == (3, 19, 25)
    pixels = np.asarray(thumbnail(folder / "jpg" / f"{IMAGES[2]}.jpg", None, 25), np.float32) / 255
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(tensor.permute(1, 2, 0).numpy(), (pixels - mean) / std, atol=1e-6)
    sizes = []
    data = RevisitedOxford(
        folder, image_size=25, eval_transform=lambda image: sizes.append(image.size) or torch.ones(1)
    )
    assert data.test_set[2]["images"].tolist() == [1]
    assert sizes == [(25, 19)]


def scores_of_queries(data, embedder, positions, queries):
    """The similarities of the last of these images to the others."""
    with torch.no_grad():
        rows = torch.cat([embedder(data.test_set[position]["images"][None]) for position in positions])
    rows = nn.functional.normalize(rows.double())
    return (rows[-queries:] @ rows[:-queries].T).tolist()


@pytest.mark.parametrize("more", [False, True])
def test_the_trainer_tests_by_the_protocol(tmp_path, more):
    folder = write_revisited(tmp_path)
    distractors = write_distractors(tmp_path / "revisitop1m") if more else None
    data = RevisitedOxford(folder, distractors=distractors, image_size=32)
    embedder, logged = evaluate(data)
    scores = scores_of_queries(data, embedder, range(len(data.test_set)), 3)
    lists = [[entry[kind] for entry in GND] for kind in ("easy", "hard", "junk")]
    expected = {f"test/{name}": value for name, value in by_loops(official, scores, *lists, ks=(1, 3)).items()}
    assert logged == pytest.approx(expected, abs=1e-6)
    assert logged["test/skipped_queries/easy"] == logged["test/skipped_queries/hard"] == 1


def test_images_that_cannot_be_read_are_skipped(tmp_path):
    """A positive that cannot be read is never found, a query that cannot be read not evaluated."""
    folder = write_revisited(tmp_path)
    for name in (IMAGES[0], QUERIES[2]):
        truncate(folder / "jpg" / f"{name}.jpg")
    data = RevisitedOxford(folder, image_size=32, on_error="skip")
    with pytest.warns(UserWarning, match="skipped so far"):
        embedder, logged = evaluate(data)
    assert data.test_set.skipped == [f"jpg/{IMAGES[0]}.jpg", f"jpg/{QUERIES[2]}.jpg"]
    scores = scores_of_queries(data, embedder, range(1, 10), 2)
    lists = [
        [[image - 1 if image else 99 for image in entry[k]] for entry in GND[:2]] for k in ("easy", "hard", "junk")
    ]
    expected = {f"test/{name}": value for name, value in by_loops(with_ties, scores, *lists, ks=(1, 3)).items()}
    assert logged == pytest.approx(expected, abs=1e-6)


def test_a_crop_of_one_pixel_stays_one(tmp_path):
    gnd = [{**GND[0], "bbx": [3, 3, 4, 4]}, *GND[1:]]
    folder = write_revisited(tmp_path)
    write_pickle(folder / "gnd_roxford5k.pkl", ground_truth(gnd=gnd))
    assert tuple(RevisitedOxford(folder, image_size=20).test_set[len(IMAGES)]["images"].shape) == (3, 1, 1)


def test_the_box_of_a_rotated_query_is_in_pixels_of_its_file(tmp_path):
    """The official code crops before anything else, and the crop is then rotated."""
    folder = write_revisited(tmp_path)
    path = folder / "jpg" / f"{QUERIES[0]}.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees, clockwise
    with Image.open(path) as image:
        image.save(path, exif=exif, quality=100)
    with Image.open(path) as image:
        official_crop = image.crop(GND[0]["bbx"])
    found = RevisitedOxford(folder).test_set.read(8)
    assert np.array_equal(np.asarray(found), np.rot90(np.asarray(official_crop), -1))


AS_GIVEN = {
    "arrays": lambda values, dtype: np.array(values, dtype),
    "numbers": lambda values, dtype: [np.dtype(dtype).type(value) for value in values],
    "tuples": lambda values, dtype: tuple(values),
}


@pytest.mark.parametrize(("protocol", "kind"), [(0, "arrays"), (2, "numbers"), (5, "tuples")])
def test_a_ground_truth_of_numpy_and_plain_values_is_read(tmp_path, protocol, kind):
    given = AS_GIVEN[kind]
    gnd = [
        {"bbx": given(entry["bbx"], "f8"), **{name: given(entry[name], "i8") for name in ("easy", "hard", "junk")}}
        for entry in GND
    ]
    gnd[1]["easy"] = np.array([])  # of floats, as np.concatenate leaves it
    folder = write_revisited(tmp_path)
    wanted = RevisitedOxford(folder)
    wanted.prepare_data()
    write_pickle(folder / "gnd_roxford5k.pkl", ground_truth(gnd=gnd, imlist=given(IMAGES, "U40")), protocol)
    data = RevisitedOxford(folder)
    assert columns(data, "test") == columns(wanted, "test")
    found, expected = data.test_set.metrics((1,)), wanted.test_set.metrics((1,))
    assert (found.easy, found.hard, found.junk) == (expected.easy, expected.hard, expected.junk)
