"""Every public name answers awkward values with a right result, or with an error that names owner and argument.

The valid calls stand in tables, in `tests/awkward_values`. Each argument of each call is replaced by each of
`awkward_values`. An error must be a ValueError, a TypeError or a FileNotFoundError.
"""

import itertools

import pytest
import torch

from tests.awkward_values import callbacks, calls, datamodules, detection, losses, metrics, models, search, training
from tests.awkward_values.calls import Call, complaints, missing_arguments, numpy_integers_that_raise, problem_of_error
from tests.test_surface import public_objects

pytestmark = pytest.mark.refusal

PACKAGES = (callbacks, datamodules, detection, losses, metrics, models, search, training)
TABLES = [package.CALLS for package in PACKAGES]
CALLS = {name: of_name for table in TABLES for name, of_name in table.items()}
CASES = {}  # without the calls that stand for an abstract base class, too
for name, of_name in CALLS.items():
    if of_name not in CASES.values():
        CASES[name] = of_name


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """The calls that need files write them into the working directory."""
    monkeypatch.chdir(tmp_path)


def test_every_public_name_is_in_a_table():
    assert len(CALLS) == sum(map(len, TABLES)), "a name is in two tables"
    missing = public_objects().keys() - CALLS.keys()
    assert not missing, f"write valid calls in tests/awkward_values for {sorted(missing)}"


@pytest.mark.parametrize("name", CASES)
def test_awkward_values_give_a_right_result_or_an_error_that_names_the_argument(name):
    found = [line for call in CASES[name] for line in complaints(call)]
    assert not found, f"{len(found)} answers to awkward values:\n" + "\n".join(found)


@pytest.mark.parametrize("name", CASES)
def test_integers_of_numpy_are_integers(name):
    found = [line for call in CASES[name] for line in numpy_integers_that_raise(call)]
    assert not found, f"{len(found)} integers of NumPy:\n" + "\n".join(found)


# --- that faults are seen


def without_a_check(x: float) -> float:
    return torch.tensor(1.0) * x


def with_a_truthy_flag(x: bool) -> bool:
    return not x


def with_nan(x: float) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError("with_nan: `x` must be a number.")
    return x


def without_end(x: int) -> int:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError("without_end: `x` must be an integer.")
    return sum(1 for _ in itertools.takewhile(lambda i: i < x, itertools.count()))


def faults(function, valid):
    call = Call(function.__name__, function, lambda: {"x": valid})
    return [line.removeprefix(f"{function.__name__}: x=") for line in complaints(call)]


def test_faults_are_seen(monkeypatch):
    assert any(line.startswith("'abc' raised TypeError") for line in faults(without_a_check, 1.0))
    assert "an array was accepted, though its annotation forbids it" in faults(without_a_check, 1.0)
    assert "0 was accepted, though its annotation forbids it" in faults(with_a_truthy_flag, True)
    assert faults(with_nan, 1.0) == ["nan gave nan", "inf gave inf"]
    monkeypatch.setattr(calls, "SECONDS", 0.05)
    too_large = ["10**30 took more than 0.05 seconds", "2**63 took more than 0.05 seconds"]
    assert faults(without_end, 1) == too_large
    unnamed = ValueError("of_another_name: `max` must be below 0.")
    assert problem_of_error(unnamed, "of_another_name", "x").startswith("raised ValueError")
    assert problem_of_error(unnamed, "of_another_name", "max") is None
    assert missing_arguments(Call("with_nan", with_nan)) == ["with_nan: the table gives no value for ['x']"]
