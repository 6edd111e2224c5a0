"""The shared checks: what they return, and their sentences."""

import functools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import checks


@pytest.mark.parametrize(
    ("check", "value", "kind"),
    [
        (checks.check_positive, np.float32(0.5), float),
        (checks.check_finite_number, np.float64(0.5), np.float64),
        (checks.check_not_negative, np.int32(2), int),
        (functools.partial(checks.check_integer, least=1), np.uint64(3), int),
    ],
)
def test_numbers_of_numpy_are_numbers(check, value, kind):
    found = check("x", value, owner="Owner")
    assert found == value
    assert type(found) is kind


def test_counts_become_a_tuple():
    assert checks.check_counts("ks", [1, np.int64(10)], owner="Owner") == (1, 10)
    assert checks.check_counts("ks", (), may_be_empty=True, owner="Owner") == ()


def test_a_path_is_a_string_or_a_path_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert checks.check_path("root", "images", owner="Owner") == Path("images")
    assert checks.check_path("root", Path("~/images"), owner="Owner") == Path("/home/somebody/images")


integer = functools.partial(checks.check_integer, least=1, most=9)
instance = functools.partial(checks.check_instance, kind=Path)
choice = functools.partial(checks.check_choice, choices=(False, "full"))

with warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])

INVALID = {
    TypeError: [
        (integer, np.float64(3.0), r"an integer >= 1, got .*3\.0.*"),
        (integer, torch.tensor(3), r"an integer >= 1, got tensor\(3\) \(Tensor\)"),
        (integer, np.timedelta64(3, "s"), r"an integer >= 1, got .*timedelta64.*"),
        (checks.check_positive, np.timedelta64(3, "s"), r"a number > 0, got .*timedelta64.*"),
        (checks.check_tensor, np.ones(2), "a tensor, got a NumPy array of float64; torch.from_numpy converts it"),
        (checks.check_tensor, np.array(["a"]), "a tensor, got a NumPy array of <U1"),
        (
            checks.check_tensor,
            np.ones(2, ">f4"),
            r"the byte order of this machine, got a NumPy array of >f4; array.astype\(.*",
        ),
        (checks.check_path, b"images", r"a string or a path, got b'images' \(bytes\)"),
        (checks.check_strings, "ab", "a sequence of strings, got one str"),
        (checks.check_strings, {"a": 1}, "a sequence of strings, got one dict"),
        (checks.check_strings, np.array("a"), "a sequence of strings, got one ndarray"),
        (checks.check_strings, torch.ones(2), "a sequence of strings, got one Tensor"),
        (checks.check_sequence, "ab", r"a list, got 'ab' \(str\)"),
        (instance, 3, r"an instance of Path, got 3 \(int\)"),
        (checks.check_float, torch.eye(2).to_sparse(), r"a dense tensor, got the layout torch.sparse_coo; call .*"),
        (checks.check_float, NESTED, "a dense tensor, got a nested tensor; call .*"),
        (checks.check_float, torch.ones(2, dtype=torch.complex64), "floating point, got torch.complex64"),
    ],
    ValueError: [
        (integer, 10, "an integer from 1 to 9, got 10"),
        *((checks.check_counts, value, "integers >= 1, .* got .*") for value in ((), "12", 3, {1: 2}, torch.ones(2))),
        (checks.check_path, "", "the path of a file or a folder, got ''"),
        (checks.check_path, "a\0b", r"the path of a file or a folder, got 'a\\x00b'"),
        (checks.check_positive, -1, "a finite number > 0, got -1"),
        (checks.check_positive, 1e-40, r"from 1e-12 to 1e\+12, got 1e-40"),
        (checks.check_positive, 10**400, r"from 1e-12 to 1e\+12, got 10+\.\.\."),
        (checks.check_finite_number, -(10**30), r"from -1e\+12 to 1e\+12, got -10+"),
        (checks.check_not_negative, -1, "a finite number >= 0, got -1"),
        (checks.check_not_negative, 1e300, r"from 0 to 1e\+12, got 1e\+300"),
        (choice, 0, "one of False, 'full', got 0"),
        (checks.check_float, torch.ones(2, device="meta"), "numbers, got a tensor on the device meta, .*"),
    ],
}


@pytest.mark.refusal
@pytest.mark.parametrize("kind", INVALID)
def test_invalid_values_raise(kind):
    for check, value, rule in INVALID[kind]:
        with pytest.raises(kind, match=rf"^Owner: `x` must (be|hold|have) {rule}\.$"):
            check("x", value, owner="Owner")


@pytest.mark.refusal
def test_other_invalid_values_raise():
    with pytest.raises(ValueError, match=r"^Owner: `x` must not begin with ~, .*, got '~nobody-of-this-name/a'\.$"):
        checks.check_path("x", "~nobody-of-this-name/a", owner="Owner")
    with pytest.raises(TypeError, match=r"^Owner: `x` must hold strings only, got b'b' \(bytes\)\.$"):
        checks.check_strings("x", ["a", b"b"], owner="Owner")
    checks.check_strings("x", np.array(["a", "b"]), owner="Owner")
    with pytest.raises(TypeError, match=r"^Owner: `x` must have one of the dtypes .*, got torch.float8_e4m3fn\.$"):
        checks.check_float("x", torch.ones(2).to(torch.float8_e4m3fn), owner="Owner")
    on_meta, cpu = torch.zeros(3, dtype=torch.int64, device="meta"), torch.device("cpu")
    with pytest.raises(ValueError, match=r"^Owner: `x` must be on the device of `embeddings`, cpu, got meta; move"):
        checks.check_integers("x", on_meta, 3, "embeddings", device=cpu, owner="Owner")


class Raises:
    def __repr__(self):
        raise RuntimeError("no repr")


def test_what_a_message_shows_is_one_short_line():
    assert checks.short_repr("a") == "'a'"
    assert checks.short_repr(torch.ones(2, 2)) == "tensor([[1., 1.], [1., 1.]])"
    assert len(checks.short_repr(list(range(1000)))) == 100
    assert checks.short_repr(Raises()).startswith("<")
    assert checks.first_line(ValueError("\n no network.\nat all")) == "no network"
    assert checks.first_line(KeyError()) == "KeyError"
