"""Revisited Oxford and Paris: read as written, cropped and scaled, and evaluated with their lists."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RevisitedOxford, RevisitedParis
from lightning_retrieval.datamodules.readers.plain_pickle import load_plain_pickle
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

refusal = pytest.mark.refusal
CITIES = {"roxford5k": RevisitedOxford, "rparis6k": RevisitedParis}


def evaluate(data):
    """The embedder, and what `trainer.test` logs."""
    torch.manual_seed(2)
    embedder = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(27, 4))
    trainer = quiet_trainer(callbacks=[RetrievalEvaluation((1, 3))])
    trainer.test(RetrievalModule(embedder, SmoothAPLoss(tau=0.1)), datamodule=data, verbose=False)
    return embedder, {name: float(value) for name, value in trainer.callback_metrics.items()}


# Reading.


@pytest.mark.parametrize("city", CITIES)
@pytest.mark.parametrize(("images", "above"), [("jpg", False), ("images", True)])
def test_images_are_read_as_they_were_written(tmp_path, city, images, above):
    folder = write_revisited(tmp_path, city, images, f"gnd_{city}.pkl")
    data = CITIES[city](tmp_path if above else folder)
    assert list(data.splits) == ["test"]
    index, prefix = data.splits["test"], f"{city}/" if above else ""
    assert list(index.paths) == [f"{prefix}{images}/{name}.jpg" for name in IMAGES + QUERIES]
    assert index.roles.tolist() == [2] * 8 + [1] * 3
    assert index.labels.tolist() == [-1] * 8 + [0, 1, 2]
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


@pytest.mark.parametrize("where", ["revisitop1m", "elsewhere/deep/revisitop1m"])
@pytest.mark.parametrize("relative", [False, True])
def test_distractors_come_after_the_database(tmp_path, monkeypatch, where, relative):
    monkeypatch.chdir(tmp_path)
    folder, more = write_revisited(tmp_path / "data"), write_distractors(tmp_path / where)
    if relative:
        folder, more = folder.relative_to(tmp_path), more.relative_to(tmp_path)
    data = RevisitedOxford(folder, distractors=more)
    index = data.splits["test"]
    expected = [tmp_path / "data/roxford5k/jpg" / f"{name}.jpg" for name in IMAGES]
    expected += [tmp_path / where / "jpg" / name for name in DISTRACTORS]
    expected += [tmp_path / "data/roxford5k/jpg" / f"{name}.jpg" for name in QUERIES]
    assert [data.root / path for path in index.paths] == expected
    assert index.roles.tolist() == [2] * 11 + [1] * 3
    assert index.labels.tolist() == [-1] * 11 + [0, 1, 2]
    assert data.test_set.metrics((1,)).easy == {11: [0, 3], 12: [], 13: [4, 6]}
    assert data.test_set[10]["images"].shape == (3, 60, 30)


def test_the_cache_has_the_list_but_not_the_ground_truth(tmp_path):
    folder, more = write_revisited(tmp_path), write_distractors(tmp_path / "revisitop1m")
    settings = {"distractors": more, "cache_dir": tmp_path / "cache"}
    first = RevisitedOxford(folder, **settings)
    again = RevisitedOxford(folder, **settings)
    assert list(first.splits["test"].paths) == list(again.splits["test"].paths)
    assert again.test_set.metrics((1,)).easy == first.test_set.metrics((1,)).easy == {11: [0, 3], 12: [], 13: [4, 6]}
    assert RevisitedOxford(folder, crop_queries=False, **settings).splits["test"].boxes is None
    assert len(list((tmp_path / "cache").iterdir())) == 2


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
    assert "1,001,001" in str(report)
    paris = RevisitedParis(write_revisited(tmp_path, "rparis6k", pickled="gnd_rparis6k.pkl")).check()
    assert paris.splits["database"] == ((8, 0), [(6322, 0)])
    assert "distractors" not in paris.splits


# Cropping and scaling.


def thumbnail(path, box, longer):
    """The official code's: crop, then scale as the whole image would be so that its longer side is `longer`."""
    image = Image.open(path).convert("RGB")
    whole = max(image.size)
    if box is not None:
        image = image.crop(box)
    size = longer * max(image.size) / whole
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return image


@pytest.mark.parametrize("size", [33, 1024])
@pytest.mark.parametrize("crop", [True, False])
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


# Evaluating.


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


def test_a_truncated_image_raises_or_is_skipped(tmp_path):
    """A positive that cannot be read is never found, a query that cannot be read not evaluated."""
    folder = write_revisited(tmp_path)
    for name in (IMAGES[0], QUERIES[2]):
        truncate(folder / "jpg" / f"{name}.jpg")
    with pytest.raises(ValueError, match=re.escape(f"cannot read the image {folder / 'jpg' / IMAGES[0]}.jpg")):
        evaluate(RevisitedOxford(folder, image_size=32))
    data = RevisitedOxford(folder, image_size=32, on_error="skip")
    with pytest.warns(UserWarning, match="ImageSet: skipped .*; skipped so far in this set: [12]"):
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


@refusal
def test_missing_files_raise_with_a_suggestion(tmp_path):
    folder = write_revisited(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"pass root={folder}")):
        RevisitedOxford(folder / "jpg").prepare_data()
    (folder / "jpg").rename(folder / "jpegs")
    with pytest.raises(FileNotFoundError, match="RevisitedOxford: `root` must contain jpg or images, got"):
        RevisitedOxford(folder).prepare_data()


@refusal
def test_several_ground_truths_raise(tmp_path):
    folder = write_revisited(tmp_path, pickled="gnd_a.pkl")
    write_pickle(folder / "gnd_b.pkl", ground_truth())
    with pytest.raises(ValueError, match=r"^RevisitedOxford: .*must contain .* got gnd_a.pkl, gnd_b"):
        RevisitedOxford(folder).prepare_data()


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


# --- the ground truth, of plain values and arrays


KINDS = {
    "arrays": lambda values, dtype: np.array(values, dtype),
    "numbers": lambda values, dtype: [np.dtype(dtype).type(value) for value in values],
    "tuples": lambda values, dtype: tuple(values),
}


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_plain_values_are_read(tmp_path, protocol, kind):
    as_kind = KINDS[kind]
    gnd = [
        {"bbx": as_kind(entry["bbx"], "f8"), **{k: as_kind(entry[k], "i8") for k in ("easy", "hard", "junk")}}
        for entry in GND
    ]
    gnd[1]["easy"] = np.array([])  # of floats, as np.concatenate leaves it
    value = ground_truth(gnd=gnd, imlist=as_kind(IMAGES, "U40"), extra=[{1, 2}, frozenset([b"x"]), None, True, 1.5])
    path = write_pickle(tmp_path / "gnd_roxford5k.pkl", value, protocol)
    truth = RevisitedOxford(tmp_path).ground_truth
    assert (truth.images, truth.queries) == (IMAGES, QUERIES)
    assert truth.boxes == [list(entry["bbx"]) for entry in GND]
    assert truth.lists == {k: [entry[k] for entry in GND] for k in ("easy", "hard", "junk")}
    assert {type(position) for of_query in truth.lists["easy"] for position in of_query} == {int}
    assert load_plain_pickle(path)["extra"] == [{1, 2}, frozenset([b"x"]), None, True, 1.5]


GONE = object()


def entry(query, **changes):
    """The ground truth with another entry of one query."""
    gnd = [dict(each) for each in GND]
    gnd[query] |= changes
    return ground_truth(gnd=[{key: value for key, value in each.items() if value is not GONE} for each in gnd])


OF = rf"query 1 \({QUERIES[1]}\) in .*gnd_roxford5k.pkl"
INVALID_VALUES = {
    "no dict": ([1], "must be a dict with imlist, qimlist and gnd, got list"),
    "no gnd": ({"imlist": [], "qimlist": []}, r"imlist, qimlist and gnd, got one with \['imlist', 'qimlist'\]"),
    "no names": (ground_truth(imlist=[]), r"`imlist` must be a list of names in .*, got \[\]"),
    "names that are none": (ground_truth(qimlist=[1, 2, 3]), r"`qimlist` must be a list of names .*, got \[1, 2, 3\]"),
    "one name": (ground_truth(qimlist="abc"), "`qimlist` must be a list of names .*, got abc"),
    "fewer entries": (ground_truth(gnd=GND[:2]), "`gnd` must have one entry for each of 3 queries in .*, got 2"),
    "no entries": (ground_truth(gnd=None), "`gnd` must have one entry for each of 3 queries in .*, got NoneType"),
    "old protocol": (entry(1, ok=[1], easy=GONE, hard=GONE), "must be of the revisited protocol, .* with `ok`"),
    "no junk": (entry(1, junk=GONE), rf"must have bbx, easy, hard and junk of {OF}, got \['bbx', 'easy', 'hard'\]"),
    "entry that is none": (ground_truth(gnd=[GND[0], 5, GND[2]]), rf"bbx, easy, hard and junk of {OF}, got \[\]"),
    "three corners": (entry(1, bbx=[1, 2, 3]), rf"`bbx` must be 4 finite numbers of pixels for {OF}, got \[1, 2, 3\]"),
    "far away": (entry(1, bbx=[1, 2, 3, 1e300]), r"`bbx` must be 4 finite numbers .*, got \[1, 2, 3, 1e\+300\]"),
    "index too large": (entry(1, hard=[8]), f"`hard` of {OF} must be positions in imlist, from 0 to 7, got 8"),
    "index below 0": (entry(1, junk=[-1]), f"`junk` of {OF} must be positions in imlist, from 0 to 7, got -1"),
    "fraction": (entry(1, easy=[1.5]), rf"`easy` of {OF} must be a list of integers, got \[1.5\]"),
    "bools": (entry(1, easy=np.zeros(8, bool)), f"`easy` of {OF} must be a list of integers, got"),
    "number": (entry(1, easy=3), f"`easy` of {OF} must be a list of integers, got 3"),
    "image in two lists": (entry(1, easy=[2]), rf"must list an image only once for {OF}, got 2 \({IMAGES[2]}\) twice"),
}


@refusal
@pytest.mark.parametrize("case", INVALID_VALUES)
def test_invalid_values_raise(tmp_path, case):
    value, message = INVALID_VALUES[case]
    folder = write_revisited(tmp_path)
    write_pickle(folder / "gnd_roxford5k.pkl", value)
    with pytest.raises(ValueError, match=message):
        RevisitedOxford(folder).prepare_data()
