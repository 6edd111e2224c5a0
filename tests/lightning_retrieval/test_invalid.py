"""Errors that keep their parts: the sentence, other owners and names, pickling, and errors of data-loader workers."""

import copy
import pickle

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval.checks import check_positive
from lightning_retrieval.invalid import InvalidType, InvalidValue, MissingFile, MissingPackage, NotWritten, owned_by

KINDS = {
    InvalidType: TypeError,
    InvalidValue: ValueError,
    MissingFile: FileNotFoundError,
    MissingPackage: ModuleNotFoundError,
    NotWritten: OSError,
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


def test_a_context_names_its_own_owner_and_keeps_the_cause():
    cause = KeyError("cause")
    with pytest.raises(InvalidValue, match=r"^outer: `width` must be 1\.$") as raised, owned_by("outer", size="width"):
        raise InvalidValue("must be 1", "inner", "size") from cause
    assert raised.value.__cause__ is cause
    with pytest.raises(ValueError, match=r"^other$"), owned_by("outer"):
        raise ValueError("other")


class WithInvalidItem(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, position):
        check_positive("me", "tau", -1.0)


def test_an_error_of_a_data_loader_worker_keeps_its_type_and_sentence():
    batches = iter(DataLoader(WithInvalidItem(), num_workers=1))
    with pytest.raises(ValueError, match=r"me: `tau` must be a finite number > 0, got -1\.0"):
        next(batches)
    batches._shutdown_workers()
