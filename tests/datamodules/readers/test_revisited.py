"""Revisited Oxford and Paris: read as written, refused where odd, cropped and scaled, evaluated by their lists."""

import io
import os
import pickle
import re
import subprocess
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RevisitedOxford, RevisitedParis
from lightning_retrieval.datamodules.files.plain_pickle import load_plain_pickle
from tests.datamodules.short_run import QUIET
from tests.datamodules.trees import truncate, write_image, write_text
from tests.lightning_retrieval.metrics.test_revisited import by_loops, official, with_ties

pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]
refusal = pytest.mark.refusal
CITIES = {"roxford5k": RevisitedOxford, "rparis6k": RevisitedParis}
IMAGES = [f"all_souls_{i:06}" for i in range(7)] + ["château_000001"]
QUERIES = ["all_souls_000013", "radcliffe_camera_000519", "tour_eiffel_000003"]
MORE = ["0/03bc.jpg", "0/a b.png", "ff/c_é.jpg"]
GND = [
    {"bbx": [10.4, 5.6, 40.5, 30.0], "easy": [0, 3], "hard": [5], "junk": [1]},
    {"bbx": (0, 0, 48, 40), "easy": [], "hard": [2, 7], "junk": []},
    {"bbx": [1, 2, 11, 32], "easy": [4, 6], "hard": [], "junk": [0, 1, 2]},
]


def ground_truth(**changes):
    return {"imlist": list(IMAGES), "qimlist": list(QUERIES), "gnd": [dict(entry) for entry in GND], **changes}


def write_pickle(path, value, protocol=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def write_revisited(root, name="roxford5k", images="jpg", pickled="gnd_roxford5k.pkl"):
    """The city's folder; the first image is grey, the second one for print."""
    write_pickle(root / name / pickled, ground_truth())
    for seed, image in enumerate([*IMAGES, *QUERIES]):
        mode = {0: "L", 1: "CMYK"}.get(seed, "RGB")
        write_image(root / name / images / f"{image}.jpg", mode, (48 + 2 * (seed % 4), 40), seed)
    return root / name


def write_distractors(root):
    write_text(root / "revisitop1m.txt", "".join(f"{name}\r\n" for name in MORE) + "\n")
    for seed, name in enumerate(MORE):
        write_image(root / "jpg" / name, size=(30, 60), seed=100 + seed)
    return root


def evaluate(data, embedder=None, **settings):
    """What `trainer.test` logs."""
    torch.manual_seed(2)
    embedder = embedder or nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(27, 4))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[RetrievalEvaluation((1, 3))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(RetrievalModule(embedder, SmoothAPLoss(tau=0.1)), datamodule=data, verbose=False)
    return embedder, {name: float(value) for name, value in trainer.callback_metrics.items()}


# Reading.


@pytest.mark.parametrize("city", CITIES)
@pytest.mark.parametrize("images", ["jpg", "images"])
@pytest.mark.parametrize("above", [False, True])
def test_images_are_read_as_they_were_written(tmp_path, city, images, above):
    folder = write_revisited(tmp_path, city, images, f"gnd_{city}.pkl")
    data = CITIES[city](tmp_path if above else folder)
    assert list(data.splits) == ["test"]
    index, prefix = data.splits["test"], f"{city}/" if above else ""
    assert list(index.paths) == [f"{prefix}{images}/{name}.jpg" for name in IMAGES + QUERIES]
    assert index.roles.tolist() == [2] * 8 + [1] * 3
    assert index.labels.tolist() == [-1] * 8 + [0, 1, 2]
    assert {data.test_set.read(place).mode for place in range(11)} == {"RGB"}
    assert data.val_set is data.test_set
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
    expected += [tmp_path / where / "jpg" / name for name in MORE]
    expected += [tmp_path / "data/roxford5k/jpg" / f"{name}.jpg" for name in QUERIES]
    assert [data.root / path for path in index.paths] == expected
    assert index.roles.tolist() == [2] * 11 + [1] * 3
    assert index.labels.tolist() == [-1] * 11 + [0, 1, 2]
    assert data.test_set.metrics((1,)).easy == {11: [0, 3], 12: [], 13: [4, 6]}
    assert data.test_set[10]["images"].shape == (3, 60, 30)


def test_the_cache_holds_the_list_and_not_the_ground_truth(tmp_path):
    folder, more = write_revisited(tmp_path), write_distractors(tmp_path / "revisitop1m")
    settings = {"distractors": more, "cache_dir": tmp_path / "cache"}
    first = RevisitedOxford(folder, **settings)
    again = RevisitedOxford(folder, **settings)
    assert list(first.splits["test"].paths) == list(again.splits["test"].paths)
    assert again.test_set.metrics((1,)).easy == first.test_set.metrics((1,)).easy == {11: [0, 3], 12: [], 13: [4, 6]}
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert RevisitedOxford(folder, crop_queries=False, **settings).splits["test"].boxes is None
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_report_has_the_published_counts(tmp_path):
    folder, more = write_revisited(tmp_path), write_distractors(tmp_path / "revisitop1m")
    (folder / "jpg" / f"{IMAGES[3]}.jpg").unlink()
    (more / "jpg" / MORE[1]).unlink()
    report = RevisitedOxford(folder, distractors=more).check()
    assert report.splits == {
        "queries": ((3, 3), [(70, 70)]),
        "database": ((8, 0), [(4993, 0)]),
        "distractors": ((3, 0), [(1001001, 0)]),
    }
    assert report.missing_files == [f"roxford5k/jpg/{IMAGES[3]}.jpg", f"revisitop1m/jpg/{MORE[1]}"]
    assert "1,001,001" in str(report)
    paris = RevisitedParis(write_revisited(tmp_path, "rparis6k", pickled="gnd_rparis6k.pkl")).check()
    assert paris.splits["database"] == ((8, 0), [(6322, 0)])
    assert "distractors" not in paris.splits


def test_there_is_nothing_to_train_on(tmp_path):
    data = RevisitedOxford(write_revisited(tmp_path))
    with pytest.raises(ValueError, match="RevisitedOxford: has no split 'train', only 'test'"):
        data.train_dataloader()
    assert len(data.val_dataloader()) == len(data.test_dataloader()) == 11  # one image a batch


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


@pytest.mark.parametrize("size", [20, 33, 51, 1024])
@pytest.mark.parametrize("crop", [True, False])
def test_images_are_scaled_and_queries_cropped_first(tmp_path, size, crop):
    folder = write_revisited(tmp_path)
    images = RevisitedOxford(folder, image_size=size, crop_queries=crop).test_set
    for place, name in enumerate([*IMAGES, *QUERIES]):
        box = GND[place - 8]["bbx"] if crop and place >= 8 else None
        expected = thumbnail(folder / "jpg" / f"{name}.jpg", box, size)
        assert images.read(place).size == expected.size
        assert images.read(place).tobytes() == expected.tobytes()
        if place < 8:
            assert max(expected.size) == min(size, 48 + 2 * (place % 4))


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


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("more", [False, True])
def test_the_trainer_tests_by_the_protocol(tmp_path, num_workers, more):
    folder = write_revisited(tmp_path)
    distractors = write_distractors(tmp_path / "revisitop1m") if more else None
    data = RevisitedOxford(folder, distractors=distractors, image_size=32, num_workers=num_workers)
    embedder, logged = evaluate(data)
    with torch.no_grad():
        rows = torch.cat([embedder(data.test_set[place]["images"][None]) for place in range(len(data.test_set))])
    rows = nn.functional.normalize(rows.double())
    scores = (rows[-3:] @ rows[:-3].T).tolist()
    lists = [[entry[kind] for entry in GND] for kind in ("easy", "hard", "junk")]
    expected = {f"test/{name}": value for name, value in by_loops(official, scores, *lists, ks=(1, 3)).items()}
    assert logged == pytest.approx(expected, abs=1e-6)
    assert logged["test/skipped_queries/easy"] == logged["test/skipped_queries/hard"] == 1


def test_a_truncated_image_is_refused_or_skipped(tmp_path):
    """A positive that cannot be read is never found, a query that cannot be read not evaluated."""
    folder = write_revisited(tmp_path)
    for name in (IMAGES[0], QUERIES[2]):
        truncate(folder / "jpg" / f"{name}.jpg")
    with pytest.raises(ValueError, match=re.escape(f"cannot read the image {folder / 'jpg' / IMAGES[0]}.jpg")):
        evaluate(RevisitedOxford(folder, image_size=32))
    data = RevisitedOxford(folder, image_size=32, on_error="skip")
    with pytest.warns(UserWarning, match="ImageSet: skipped .*; skipped so far: [12]"):
        embedder, logged = evaluate(data)
    assert data.test_set.skipped == [f"jpg/{IMAGES[0]}.jpg", f"jpg/{QUERIES[2]}.jpg"]
    with torch.no_grad():
        rows = torch.cat([embedder(data.test_set[place]["images"][None]) for place in range(1, 10)])
    rows = nn.functional.normalize(rows.double())
    scores = (rows[-2:] @ rows[:-2].T).tolist()
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
def test_an_empty_list_of_distractors_and_an_image_twice_are_refused(tmp_path):
    folder, more = write_revisited(tmp_path), write_distractors(tmp_path / "revisitop1m")
    for text, message in (
        ("\n", "the split 'distractors' must have at least one image, got none in .*revisitop1m.txt"),
        ("a.jpg\nb.jpg\na.jpg\n", "`image` must be different in each line of .*revisitop1m.txt, got 'a.jpg' twice"),
    ):
        write_text(more / "revisitop1m.txt", text)
        with pytest.raises(ValueError, match=message):
            RevisitedOxford(folder, distractors=more).prepare_data()


# What a pickle may hold.

ARRAYS = {
    "arrays": lambda values, dtype: np.array(values, dtype),
    "numbers": lambda values, dtype: [np.dtype(dtype).type(value) for value in values],
    "tuples": lambda values, dtype: tuple(values),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", ARRAYS)
def test_numpy_and_plain_values_are_read(tmp_path, protocol, kind):
    as_kind = ARRAYS[kind]
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
    assert {type(place) for of_query in truth.lists["easy"] for place in of_query} == {int}
    assert load_plain_pickle("X", path)["extra"] == [{1, 2}, frozenset([b"x"]), None, True, 1.5]


@pytest.mark.parametrize("name", [b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"])
@pytest.mark.parametrize("value", [np.arange(3), np.float64(2.5)], ids=["array", "number"])
def test_numpys_older_and_newer_names_are_known(tmp_path, name, value):
    data, changed = re.subn(rb"cnumpy\._?core\.multiarray\n", name, pickle.dumps(value, 2))
    assert changed == 1
    (tmp_path / "value.pkl").write_bytes(data)
    assert np.array_equal(load_plain_pickle("X", tmp_path / "value.pkl"), value)


def test_the_dtype_that_numpy_shares_is_left_alone(tmp_path):
    """An array of the other byte order sets the state of its dtype."""
    value = np.arange(3, dtype=">i8")
    assert np.array_equal(load_plain_pickle("X", write_pickle(tmp_path / "value.pkl", value, 2)), value)
    assert np.dtype("i8").isnative


class Asks:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


ATTACKS = {
    "os.system": lambda target: Asks(os.system, f"touch {target}"),
    "builtins.eval": lambda target: Asks(eval, f"open({str(target)!r}, 'w')"),
    "builtins.exec": lambda target: Asks(exec, f"open({str(target)!r}, 'w')"),
    "builtins.getattr": lambda target: Asks(getattr, 1, "real"),
    "builtins.__import__": lambda target: Asks(__import__, "antigravity"),
    "io.open": lambda target: Asks(io.open, str(target), "w"),
    "subprocess.check_output": lambda target: Asks(subprocess.check_output, ["touch", str(target)]),
    "functools.partial": lambda target: partial(open, str(target), "w"),
    "pickle.loads": lambda target: Asks(pickle.loads, b"N."),
    "torch.load": lambda target: Asks(torch.load, str(target)),
    "numpy.load": lambda target: Asks(np.load, str(target), None, True),
    "collections.OrderedDict": lambda target: OrderedDict(a=1),
    "an array of object": lambda target: np.array([print, None], dtype=object),
}


@refusal
@pytest.mark.parametrize(
    "function",
    [
        "numpy.core.numeric\n_frombuffer",
        "numpy.core.multiarray\nscalar",
        "numpy.core.multiarray\n_reconstruct",
        "numpy\ndtype",
        "_codecs\nencode",
        "builtins\nset",
        "builtins\nbytes",
    ],
)
def test_what_may_be_called_may_not_be_changed(tmp_path, function):
    state = pickle.dumps((None, {"__defaults__": None, "__kwdefaults__": None}), 0)[:-1]
    (tmp_path / "x.pkl").write_bytes(f"c{function}\n".encode() + state + b"b.")
    with pytest.raises(ValueError, match=r"x.pkl must hold plain values .*, got the state of a function, which could"):
        load_plain_pickle("X", tmp_path / "x.pkl")


class Typed:
    """Pickles as a NumPy type with this state, or as an array of it."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return np.dtype, ("f8", False, True), self.state


@refusal
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "state",
    [
        (3, "<", None, None, None, -1, -1, 63),
        (3, "<", None, None, None, 16, -1, 0),
        (3, "|", (np.dtype("i1"), (8,)), None, None, -1, -1, 0),
        (3, "|", None, ("a",), {"a": (np.dtype("i1"), 0)}, 8, 1, 16),
        (4, "<", None, None, None, -1, -1, 0, {}),
    ],
)
def test_types_that_are_not_plain_are_refused(tmp_path, state, protocol):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps([Typed(state)], protocol))
    with pytest.raises(ValueError, match=r"x.pkl must hold plain values .*, got a type of numbers of the state \("):
        load_plain_pickle("X", tmp_path / "x.pkl")
    assert np.dtype("f8").flags == 0


@pytest.mark.parametrize("protocol", range(6))
def test_bytes_and_bytearrays_are_read_in_all_protocols(tmp_path, protocol):
    values = [bytearray(b"a\xff"), bytearray(), b"", b"\xff\x00"]
    assert load_plain_pickle("X", write_pickle(tmp_path / "x.pkl", values, protocol)) == values


@refusal
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_of_a_number_ask_for_no_memory(tmp_path, kind):
    with pytest.raises(ValueError, match=r"x.pkl must be a pickle, .* \(memoryview: a bytes-like object is required"):
        load_plain_pickle("X", write_pickle(tmp_path / "x.pkl", Asks(kind, 10**7), 2))


@refusal
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", ATTACKS)
def test_what_could_run_code_is_refused_by_its_name(tmp_path, name, protocol):
    target = tmp_path / "run"
    path = write_pickle(tmp_path / "gnd_roxford5k.pkl", ground_truth(extra=ATTACKS[name](target)), protocol)
    got = name if " " in name else rf"[\w.]+\.{name.split('.')[1]}"  # modules have several names, as posix and nt
    message = rf"RevisitedOxford: {re.escape(str(path))} must hold plain values and .* only, got {got}, which could run"
    with pytest.raises(ValueError, match=message):
        RevisitedOxford(tmp_path).prepare_data()
    assert not target.exists()


@refusal
@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"no pickle", b"cos\nsystem\n(S'true'\ntR", pickle.dumps([1])[:-1]])
def test_what_is_no_pickle_is_refused(tmp_path, data):
    (tmp_path / "gnd_roxford5k.pkl").write_bytes(data)
    with pytest.raises(ValueError, match=r"gnd_roxford5k.pkl must (be a pickle|hold plain values)"):
        RevisitedOxford(tmp_path).prepare_data()


GONE = object()


def entry(query, **changes):
    """The ground truth with another entry of one query."""
    gnd = [dict(each) for each in GND]
    gnd[query] |= changes
    return ground_truth(gnd=[{key: value for key, value in each.items() if value is not GONE} for each in gnd])


OF = rf"query 1 \({QUERIES[1]}\) in .*gnd_roxford5k.pkl"
REFUSALS = {
    "no dict": ([1], "must be a dict with imlist, qimlist and gnd, got list"),
    "no gnd": ({"imlist": [], "qimlist": []}, r"imlist, qimlist and gnd, got one with \['imlist', 'qimlist'\]"),
    "no names": (ground_truth(imlist=[]), r"`imlist` must be a list of names in .*, got \[\]"),
    "names that are none": (ground_truth(qimlist=[1, 2, 3]), r"`qimlist` must be a list of names .*, got \[1, 2, 3\]"),
    "one name": (ground_truth(qimlist="abc"), "`qimlist` must be a list of names .*, got abc"),
    "image twice": (
        ground_truth(imlist=[*IMAGES, IMAGES[2]]),
        f"`imlist` must contain each name only once .* '{IMAGES[2]}' tw",
    ),
    "query twice": (
        ground_truth(qimlist=[*QUERIES[:2], QUERIES[0]]),
        f"`qimlist` must contain each .* '{QUERIES[0]}' twi",
    ),
    "query in the database": (ground_truth(qimlist=[*QUERIES[:2], IMAGES[0]]), f"got 1, such as '{IMAGES[0]}'"),
    "fewer entries": (ground_truth(gnd=GND[:2]), "`gnd` must have one entry for each of 3 queries in .*, got 2"),
    "no entries": (ground_truth(gnd=None), "`gnd` must have one entry for each of 3 queries in .*, got NoneType"),
    "old protocol": (entry(1, ok=[1], easy=GONE, hard=GONE), "must be of the revisited protocol, .* with `ok`"),
    "no junk": (entry(1, junk=GONE), rf"must have bbx, easy, hard and junk of {OF}, got \['bbx', 'easy', 'hard'\]"),
    "entry that is none": (ground_truth(gnd=[GND[0], 5, GND[2]]), rf"bbx, easy, hard and junk of {OF}, got \[\]"),
    "three corners": (entry(1, bbx=[1, 2, 3]), rf"`bbx` must be 4 finite numbers of pixels for {OF}, got \[1, 2, 3\]"),
    "nan": (entry(1, bbx=[1, 2, 3, float("nan")]), r"`bbx` must be 4 finite numbers .*, got \[1, 2, 3, nan\]"),
    "infinite": (entry(1, bbx=[1, 2, 3, float("inf")]), r"`bbx` must be 4 finite numbers .*, got \[1, 2, 3, inf\]"),
    "far away": (entry(1, bbx=[1, 2, 3, 1e300]), r"`bbx` must be 4 finite numbers .*, got \[1, 2, 3, 1e\+300\]"),
    "corners in words": (entry(1, bbx="1234"), "`bbx` must be 4 finite numbers .*, got 1234"),
    "empty box": (entry(1, bbx=[9, 2, 9, 30]), r"`boxes` must hold pixels, got \[9, 2, 9, 30\] for jpg/radcliffe"),
    "index too large": (entry(1, hard=[8]), f"`hard` of {OF} must be positions in imlist, from 0 to 7, got 8"),
    "index below 0": (entry(1, junk=[-1]), f"`junk` of {OF} must be positions in imlist, from 0 to 7, got -1"),
    "fraction": (entry(1, easy=[1.5]), rf"`easy` of {OF} must be a list of integers, got \[1.5\]"),
    "bools": (entry(1, easy=np.zeros(8, bool)), f"`easy` of {OF} must be a list of integers, got"),
    "matrix": (entry(1, easy=np.ones((1, 1), int)), f"`easy` of {OF} must be a list of integers, got"),
    "number": (entry(1, easy=3), f"`easy` of {OF} must be a list of integers, got 3"),
    "image in two lists": (entry(1, easy=[2]), rf"must list an image only once for {OF}, got 2 \({IMAGES[2]}\) twice"),
    "path out of the root": (
        ground_truth(imlist=["../x", *IMAGES[1:]]),
        r"`paths` must lie inside the root, got 'jpg/\.",
    ),
}


@refusal
@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_odd_is_refused(tmp_path, case):
    value, message = REFUSALS[case]
    folder = write_revisited(tmp_path)
    write_pickle(folder / "gnd_roxford5k.pkl", value)
    with pytest.raises(ValueError, match=message):
        RevisitedOxford(folder).prepare_data()


@refusal
def test_missing_files_are_refused_with_a_hint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"RevisitedOxford: `root` must contain gnd_roxford5k.pkl, got"):
        RevisitedOxford(tmp_path).prepare_data()
    folder = write_revisited(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"pass root={folder}")):
        RevisitedOxford(folder / "jpg").prepare_data()
    (tmp_path / "list").mkdir()
    with pytest.raises(FileNotFoundError, match=r"RevisitedOxford: `root` must contain revisitop1m.txt, got"):
        RevisitedOxford(folder, distractors=tmp_path / "list").prepare_data()
    (folder / "jpg").rename(folder / "jpegs")
    with pytest.raises(FileNotFoundError, match="RevisitedOxford: `root` must contain jpg or images, got"):
        RevisitedOxford(folder).prepare_data()


@refusal
def test_several_ground_truths_are_refused(tmp_path):
    folder = write_revisited(tmp_path, pickled="gnd_a.pkl")
    write_pickle(folder / "gnd_b.pkl", ground_truth())
    with pytest.raises(
        ValueError, match=r"must contain gnd_roxford5k.pkl or one other gnd_\*.pkl, got gnd_a.pkl, gnd_b"
    ):
        RevisitedOxford(folder).prepare_data()


@refusal
def test_another_city_is_refused(tmp_path):
    folder = write_revisited(tmp_path, "rparis6k", pickled="gnd_rparis6k.pkl")
    with pytest.raises(
        FileNotFoundError, match=r"RevisitedOxford: `root` must contain gnd_roxford5k.pkl, got .*rparis6k"
    ):
        RevisitedOxford(folder).prepare_data()


@refusal
def test_a_size_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="RevisitedParis: `image_size` must be an integer >= 1, got 0"):
        RevisitedParis(tmp_path, image_size=0)
