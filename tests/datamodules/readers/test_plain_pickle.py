"""The ground truth of Revisited Oxford is a pickle from elsewhere: plain values are loaded, and no code in it runs."""

import io
import os
import pickle
import re
import subprocess
from functools import partial

import numpy as np
import pytest
import torch

from lightning_retrieval.datamodules import RevisitedOxford
from tests.datamodules.small_revisited import IMAGES, ground_truth, write_pickle, write_revisited

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("module", [b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"])
def test_arrays_numbers_and_bytes_of_all_versions_of_numpy_and_pickle_are_known(tmp_path, protocol, module):
    folder = write_revisited(tmp_path)
    plain = [np.arange(3, dtype=">i8"), np.float64(2.5), bytearray(b"a\xff"), b"", b"\xff\x00"]
    path = write_pickle(folder / "gnd_roxford5k.pkl", ground_truth(extra=plain), protocol)
    path.write_bytes(re.sub(rb"cnumpy\._?core\.multiarray\n", module, path.read_bytes()))
    data = RevisitedOxford(folder)
    data.setup("test")
    assert len(data.test_set) >= len(IMAGES)
    assert np.dtype("i8").isnative  # NumPy's own dtype, which an array of the other byte order would set


class Call:
    """Is pickled as a function call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class DtypeWithState:
    """Is pickled as NumPy's dtype of float64 with a state of objects."""

    def __reduce__(self):
        return np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 63)


ATTACKS = {
    "os.system": lambda target: Call(os.system, f"touch {target}"),
    "builtins.eval": lambda target: Call(eval, f"open({str(target)!r}, 'w')"),
    "builtins.getattr": lambda target: Call(getattr, 1, "real"),
    "builtins.__import__": lambda target: Call(__import__, "antigravity"),
    "io.open": lambda target: Call(io.open, str(target), "w"),
    "subprocess.check_output": lambda target: Call(subprocess.check_output, ["touch", str(target)]),
    "functools.partial": lambda target: partial(open, str(target), "w"),
    "pickle.loads": lambda target: Call(pickle.loads, b"N."),
    "torch.load": lambda target: Call(torch.load, str(target)),
    "numpy.load": lambda target: Call(np.load, str(target), None, True),
    "an array of objects": lambda target: np.array([print, None], dtype=object),
    "a dtype of objects": lambda target: DtypeWithState(),
}


@pytest.mark.refusal
@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", ATTACKS)
def test_what_could_run_code_raises(tmp_path, name, protocol):
    target = tmp_path / "run"
    write_pickle(tmp_path / "gnd_roxford5k.pkl", ground_truth(extra=ATTACKS[name](target)), protocol)
    with pytest.raises(ValueError, match=r"^RevisitedOxford: .* plain values"):
        RevisitedOxford(tmp_path).prepare_data()
    assert not target.exists()
    assert np.dtype("f8").flags == 0


@pytest.mark.refusal
@pytest.mark.parametrize("function", ["numpy.core.multiarray\nscalar", "numpy\ndtype", "builtins\nbytes"])
def test_functions_that_may_be_called_cannot_be_changed(tmp_path, function):
    """A state of a function that a pickle sets would be the state for everybody."""
    state = pickle.dumps((None, {"__defaults__": None, "__kwdefaults__": None}), 0)[:-1]
    (tmp_path / "gnd_roxford5k.pkl").write_bytes(f"c{function}\n".encode() + state + b"b.")
    with pytest.raises(ValueError, match=r"^RevisitedOxford: .* plain values"):
        RevisitedOxford(tmp_path).prepare_data()


@pytest.mark.refusal
@pytest.mark.parametrize("data", [b"", b"no pickle", b"cos\nsystem\n(S'true'\ntR", pickle.dumps([1])[:-1]])
def test_a_file_that_is_not_a_pickle_raises(tmp_path, data):
    (tmp_path / "gnd_roxford5k.pkl").write_bytes(data)
    with pytest.raises(ValueError, match=r"^RevisitedOxford: .*gnd_roxford5k.pkl"):
        RevisitedOxford(tmp_path).prepare_data()
