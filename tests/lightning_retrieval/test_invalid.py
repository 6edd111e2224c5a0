"""Errors that keep their parts: the sentence, other owners and names, pickling, and errors of data-loader workers."""

import copy
import inspect
import pickle

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval.checks import check_positive
from lightning_retrieval.invalid import (
    Failed,
    InvalidType,
    InvalidValue,
    MissingFile,
    MissingPackage,
    NotWritten,
    owned,
    owned_by,
    reported_as,
)

KINDS = {
    InvalidType: TypeError,
    InvalidValue: ValueError,
    MissingFile: FileNotFoundError,
    MissingPackage: ModuleNotFoundError,
    NotWritten: OSError,
    Failed: OSError,
}
PARTS = {"got": "`k` of 3", "cure": "give `overwrite`"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_of_pythons_type_and_a_copy_keeps_its_parts(kind):
    error = kind("must be new", "me", "output", **PARTS)
    sentence = "me: `output` must be new, got `k` of 3; give `overwrite`."
    for same in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(same, KINDS[kind])
        assert str(same) == sentence
        assert vars(same) == vars(error)


def test_another_owner_has_other_names_in_the_rule_and_the_cure_but_not_in_the_value():
    error = InvalidValue("must be at least `k`", "search_images", "images", **PARTS)
    other = error.of("search", images="--images", k="-k", overwrite="--overwrite")
    assert str(other) == "search: `--images` must be at least `-k`, got `k` of 3; give `--overwrite`."
    assert str(error.of("")) == "`images` must be at least `k`, got `k` of 3; give `overwrite`."


def _private(k):
    raise InvalidValue("must be 1", argument="k", got=k) from KeyError("cause")


@owned_by("public")
def public(k):
    """A function that names itself."""
    _private(k)


def test_an_error_belongs_to_the_public_function_whose_private_function_raises_it():
    assert public.__doc__ == "A function that names itself."
    with pytest.raises(InvalidValue, match=r"^public: `k` must be 1, got 2\.$") as raised, owned_by("caller"):
        public(2)
    assert isinstance(raised.value.__cause__, KeyError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    with pytest.raises(ValueError, match=r"^other$"), owned_by("caller"), reported_as("other"):
        raise ValueError("other")


def test_an_error_can_be_reported_as_that_of_another_owner():
    with (
        pytest.raises(InvalidValue, match=r"^search: `-k` must be 1, got 2\.$") as raised,
        reported_as("search", k="-k"),
    ):
        public(2)
    assert isinstance(raised.value.__cause__, KeyError)


class WithInvalidItem(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, position):
        check_positive("tau", -1.0, owner="me")


def test_an_error_of_a_data_loader_worker_keeps_its_type_and_sentence():
    batches = iter(DataLoader(WithInvalidItem(), num_workers=1))
    with pytest.raises(ValueError, match=r"me: `tau` must be a finite number > 0, got -1\.0"):
        next(batches)
    batches._shutdown_workers()


def test_a_method_names_the_class_of_its_object():
    """A subclass names itself, and the signature stays, which jsonargparse and Lightning read."""

    class Base:
        @owned
        def double(self, k, *, owner="", most=9):
            if k > most:
                raise InvalidValue("must be small", owner, "k", got=k)
            return 2 * k

    class Derived(Base):
        pass

    assert Base().double(3) == 6
    with pytest.raises(InvalidValue, match=r"^Derived: `k` must be small, got 10\.$"):
        Derived().double(10)
    with pytest.raises(InvalidValue, match=r"^first: `k` must be small, got 5\.$"):
        Derived().double(5, owner="first", most=4)
    assert list(inspect.signature(Derived.double).parameters) == ["self", "k", "owner", "most"]
