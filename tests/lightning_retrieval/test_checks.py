"""The shared checks: what they return, and their sentences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import checks


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint64])
def test_an_integer_of_numpy_is_an_integer(kind):
    value = checks.check_integer("Owner", "size", kind(3), least=1)
    assert value == 3
    assert type(value) is int


@pytest.mark.parametrize("check", [checks.check_positive, checks.check_finite_number, checks.check_not_negative])
@pytest.mark.parametrize(
    ("value", "kind"), [(np.float32(0.5), float), (np.float64(0.5), np.float64), (np.int32(2), int)]
)
def test_a_number_of_numpy_is_a_number(check, value, kind):
    assert check("Owner", "weight", value) == value
    assert type(check("Owner", "weight", value)) is kind


@pytest.mark.refusal
@pytest.mark.parametrize("value", [np.bool_(True), np.float64(3.0), torch.tensor(3), np.array(3)])
def test_what_is_no_integer_raises(value):
    with pytest.raises(TypeError, match=r"^Owner: `size` must be an integer >= 1, got .* \(\w+\)\.$"):
        checks.check_integer("Owner", "size", value, least=1)


@pytest.mark.refusal
def test_an_integer_that_is_too_large_raises():
    with pytest.raises(ValueError, match=r"^Owner: `size` must be an integer from 1 to 9, got 10\.$"):
        checks.check_integer("Owner", "size", 10, least=1, most=9)


def test_counts_become_a_tuple():
    assert checks.check_counts("Owner", "ks", [1, np.int64(10)]) == (1, 10)
    assert checks.check_counts("Owner", "ks", (), may_be_empty=True) == ()


@pytest.mark.refusal
@pytest.mark.parametrize("values", [(), "12", 3, None, {1: 2}, torch.ones(2)])
def test_what_are_no_counts_raise(values):
    with pytest.raises(ValueError, match=r"^Owner: `ks` must hold integers >= 1, such as \(1, 10\), got .*\.$"):
        checks.check_counts("Owner", "ks", values)


def test_a_path_is_a_string_or_a_path_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert checks.check_path("Owner", "root", "images") == Path("images")
    assert checks.check_path("Owner", "root", Path("~/images")) == Path("/home/somebody/images")


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        (None, TypeError, r"must be a string or a path, got None \(NoneType\)"),
        (b"images", TypeError, r"must be a string or a path, got b'images' \(bytes\)"),
        ("", ValueError, "must be the path of a file or a folder, got ''"),
        ("a\0b", ValueError, r"must be the path of a file or a folder, got 'a\\x00b'"),
        (
            "~nobody-of-this-name/a",
            ValueError,
            "must not begin with ~, because the home folder is not known, got '~no.*'",
        ),
    ],
)
def test_what_is_no_path_raises(value, error, sentence):
    with pytest.raises(error, match=rf"^Owner: `root` {sentence}\.$"):
        checks.check_path("Owner", "root", value)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("ab", "must be a sequence of strings, got one str"),
        ({"a": 1}, "must be a sequence of strings, got one dict"),
        (np.array("a"), "must be a sequence of strings, got one ndarray"),
        (torch.ones(2), "must be a sequence of strings, got one Tensor"),
        (["a", b"b"], r"must hold strings only, got b'b' \(bytes\)"),
    ],
)
def test_what_are_no_strings_raise(values, sentence):
    with pytest.raises(TypeError, match=rf"^Owner: `names` {sentence}\.$"):
        checks.check_strings("Owner", "names", values)
    checks.check_strings("Owner", "names", np.array(["a", "b"]))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (checks.check_callable, "must be callable, got 3"),
        (checks.check_string, "must be a string, got 3"),
        (checks.check_mapping, "must be a dict, got 3"),
        (lambda *arguments: checks.check_instance(*arguments, Path), "must be an instance of Path, got 3"),
    ],
)
def test_a_value_of_another_type_raises(check, sentence):
    with pytest.raises(TypeError, match=rf"^Owner: `x` {sentence} \(int\)\.$"):
        check("Owner", "x", 3)


class Raises:
    def __repr__(self):
        raise RuntimeError("no repr")


def test_what_a_message_shows_is_one_short_line():
    assert checks.short_repr("a") == "'a'"
    assert checks.short_repr(torch.ones(2, 2)) == "tensor([[1., 1.], [1., 1.]])"
    assert len(checks.short_repr(list(range(1000)))) == 100
    assert checks.short_repr(Raises()).startswith("<")


def test_the_first_line_of_an_error():
    assert checks.first_line(ValueError("\n no network.\nat all")) == "no network"
    assert checks.first_line(KeyError()) == "KeyError"


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("check", "value", "sentence"),
    [
        (checks.check_positive, 1e-40, r"must be from 1e-12 to 1e\+12, got 1e-40"),
        pytest.param(checks.check_positive, 10**400, r"must be from 1e-12 to 1e\+12, got 10+\.\.\.", id="10**400"),
        (checks.check_finite_number, -(10**30), r"must be from -1e\+12 to 1e\+12, got -10+"),
        (checks.check_not_negative, 1e300, r"must be from 0 to 1e\+12, got 1e\+300"),
    ],
)
def test_a_number_with_which_float32_overflows_raises(check, value, sentence):
    with pytest.raises(ValueError, match=rf"^Owner: `x` {sentence}\.$"):
        check("Owner", "x", value)


@pytest.mark.refusal
def test_zero_is_not_false():
    with pytest.raises(ValueError, match=r"^Owner: `x` must be one of False, 'full', got 0\.$"):
        checks.check_choice("Owner", "x", 0, (False, "full"))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("value", "error", "sentence"),
    [
        (torch.eye(2).to_sparse(), TypeError, r"must be a dense tensor, got the layout torch.sparse_coo; call .*"),
        (torch.ones(2, device="meta"), ValueError, "must hold numbers, got a tensor on the device meta, .*"),
        (torch.ones(2).to(torch.float8_e4m3fn), TypeError, "must have one of the dtypes .*, got torch.float8_e4m3fn"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "must be floating point, got torch.complex64"),
        (np.ones(2), TypeError, "must be a tensor, got ndarray"),
    ],
)
def test_a_tensor_that_cannot_be_computed_with_raises(value, error, sentence):
    with pytest.raises(error, match=rf"^Owner: `x` {sentence}\.$"):
        checks.check_float("Owner", "x", value)


@pytest.mark.refusal
def test_a_tensor_on_another_device_raises():
    cpu, sentence = torch.device("cpu"), r"must be on the device of `embeddings`, cpu, got meta; move it there\.$"
    values = torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=rf"^Owner: `ids` {sentence}"):
        checks.check_integers("Owner", "ids", values, 3, "embeddings", device=cpu)
    with pytest.raises(ValueError, match=rf"^Owner: `labels` {sentence}"):
        checks.check_labels("Owner", "labels", values[:, None], 3, "embeddings", device=cpu)
