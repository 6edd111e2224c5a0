"""The ground truth of Revisited Oxford and Paris: parsed from plain values and arrays; invalid values raise."""

import numpy as np
import pytest

from lightning_retrieval.datamodules import RevisitedOxford
from lightning_retrieval.datamodules.readers.plain_pickle import load_plain_pickle
from tests.datamodules.small_revisited import GND, IMAGES, QUERIES, ground_truth, write_pickle, write_revisited

refusal = pytest.mark.refusal

ARRAYS = {
    "arrays": lambda values, dtype: np.array(values, dtype),
    "numbers": lambda values, dtype: [np.dtype(dtype).type(value) for value in values],
    "tuples": lambda values, dtype: tuple(values),
}


@pytest.mark.parametrize("protocol", [0, 2, 5])
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
    assert {type(position) for of_query in truth.lists["easy"] for position in of_query} == {int}
    assert load_plain_pickle("X", path)["extra"] == [{1, 2}, frozenset([b"x"]), None, True, 1.5]


GONE = object()


def entry(query, **changes):
    """The ground truth with another entry of one query."""
    gnd = [dict(each) for each in GND]
    gnd[query] |= changes
    return ground_truth(gnd=[{key: value for key, value in each.items() if value is not GONE} for each in gnd])


OF = rf"query 1 \({QUERIES[1]}\) in .*gnd_roxford5k.pkl"
INVALID = {
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
@pytest.mark.parametrize("case", INVALID)
def test_invalid_values_raise(tmp_path, case):
    value, message = INVALID[case]
    folder = write_revisited(tmp_path)
    write_pickle(folder / "gnd_roxford5k.pkl", value)
    with pytest.raises(ValueError, match=message):
        RevisitedOxford(folder).prepare_data()
