"""Pickles from other sources: plain values are loaded, everything else raises and runs no code."""

import io
import os
import pickle
import re
import subprocess
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch

from lightning_retrieval.datamodules import RevisitedOxford
from lightning_retrieval.datamodules.readers.plain_pickle import load_plain_pickle
from tests.datamodules.small_revisited import ground_truth, write_pickle

refusal = pytest.mark.refusal


@pytest.mark.parametrize("name", [b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"])
@pytest.mark.parametrize("value", [np.arange(3), np.float64(2.5)], ids=["array", "number"])
def test_names_of_older_and_newer_numpy_are_known(tmp_path, name, value):
    data, changed = re.subn(rb"cnumpy\._?core\.multiarray\n", name, pickle.dumps(value, 2))
    assert changed == 1
    (tmp_path / "value.pkl").write_bytes(data)
    assert np.array_equal(load_plain_pickle(tmp_path / "value.pkl"), value)


def test_numpys_own_dtype_is_not_changed(tmp_path):
    """An array of the other byte order sets the state of its dtype."""
    value = np.arange(3, dtype=">i8")
    assert np.array_equal(load_plain_pickle(write_pickle(tmp_path / "value.pkl", value, 2)), value)
    assert np.dtype("i8").isnative


class Call:
    """Is pickled as a function call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


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
def test_functions_that_may_be_called_cannot_be_changed(tmp_path, function):
    state = pickle.dumps((None, {"__defaults__": None, "__kwdefaults__": None}), 0)[:-1]
    (tmp_path / "x.pkl").write_bytes(f"c{function}\n".encode() + state + b"b.")
    with pytest.raises(ValueError, match=r"x.pkl must contain only plain values .*, got the state of a function"):
        load_plain_pickle(tmp_path / "x.pkl")


class DtypeWithState:
    """Is pickled as a NumPy dtype with this state."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return np.dtype, ("f8", False, True), self.state


@refusal
@pytest.mark.parametrize("protocol", [0, 4])
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
def test_dtypes_that_are_not_plain_raise(tmp_path, state, protocol):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps([DtypeWithState(state)], protocol))
    with pytest.raises(ValueError, match=r"x.pkl must contain only plain values .*, got a dtype with the state \("):
        load_plain_pickle(tmp_path / "x.pkl")
    assert np.dtype("f8").flags == 0


@pytest.mark.parametrize("protocol", range(6))
def test_bytes_and_bytearrays_are_read_in_all_protocols(tmp_path, protocol):
    values = [bytearray(b"a\xff"), bytearray(), b"", b"\xff\x00"]
    assert load_plain_pickle(write_pickle(tmp_path / "x.pkl", values, protocol)) == values


@refusal
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_made_from_a_number_allocate_no_memory(tmp_path, kind):
    with pytest.raises(ValueError, match=r"x.pkl must be a pickle, .* \(memoryview: a bytes-like object is required"):
        load_plain_pickle(write_pickle(tmp_path / "x.pkl", Call(kind, 10**7), 2))


ATTACKS = {
    "os.system": lambda target: Call(os.system, f"touch {target}"),
    "builtins.eval": lambda target: Call(eval, f"open({str(target)!r}, 'w')"),
    "builtins.exec": lambda target: Call(exec, f"open({str(target)!r}, 'w')"),
    "builtins.getattr": lambda target: Call(getattr, 1, "real"),
    "builtins.__import__": lambda target: Call(__import__, "antigravity"),
    "io.open": lambda target: Call(io.open, str(target), "w"),
    "subprocess.check_output": lambda target: Call(subprocess.check_output, ["touch", str(target)]),
    "functools.partial": lambda target: partial(open, str(target), "w"),
    "pickle.loads": lambda target: Call(pickle.loads, b"N."),
    "torch.load": lambda target: Call(torch.load, str(target)),
    "numpy.load": lambda target: Call(np.load, str(target), None, True),
    "collections.OrderedDict": lambda target: OrderedDict(a=1),
    "an array of object": lambda target: np.array([print, None], dtype=object),
}


@refusal
@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", ATTACKS)
def test_what_could_run_code_raises_with_its_name(tmp_path, name, protocol):
    target = tmp_path / "run"
    path = write_pickle(tmp_path / "gnd_roxford5k.pkl", ground_truth(extra=ATTACKS[name](target)), protocol)
    got = name if " " in name else rf"[\w.]+\.{name.split('.')[1]}"  # modules have several names, as posix and nt
    message = rf"RevisitedOxford: {re.escape(str(path))} must contain only plain values and .*, got {got}, which"
    with pytest.raises(ValueError, match=message):
        RevisitedOxford(tmp_path).prepare_data()
    assert not target.exists()


@refusal
@pytest.mark.parametrize(
    "data", [b"]" * 10_000 + b"a" * 9_999, b")" + b"\x85" * 10_000, b"]2a"], ids=["list", "tuple", "list in itself"]
)
def test_a_pickle_that_is_nested_too_deeply_is_damaged(tmp_path, data):
    """As a whole, and where a box should be."""
    path = tmp_path / "gnd_roxford5k.pkl"
    truth = ground_truth()
    truth["gnd"][0]["bbx"] = "here"
    box = pickle.dumps("here", 2)[2:-3]
    inside = pickle.dumps(truth, 2).replace(box, data)
    for content in (data + b".", inside):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^RevisitedOxford: .*gnd_roxford5k.pkl is damaged: its lists"):
            RevisitedOxford(tmp_path).prepare_data()


@refusal
@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"no pickle", b"cos\nsystem\n(S'true'\ntR", pickle.dumps([1])[:-1]])
def test_a_file_that_is_not_a_pickle_raises(tmp_path, data):
    (tmp_path / "gnd_roxford5k.pkl").write_bytes(data)
    with pytest.raises(ValueError, match=r"gnd_roxford5k.pkl must (be a pickle|contain only plain values)"):
        RevisitedOxford(tmp_path).prepare_data()
