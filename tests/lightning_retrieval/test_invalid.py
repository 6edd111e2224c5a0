"""Errors about arguments on their way to the user: through processes, subclasses and commands."""

import copy
import pickle

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval import SmoothAPLoss
from lightning_retrieval.invalid import (
    Failed,
    InvalidType,
    InvalidValue,
    MissingFile,
    MissingPackage,
    NotWritten,
    Unreachable,
)

KINDS = {
    InvalidType: TypeError,
    InvalidValue: ValueError,
    MissingFile: FileNotFoundError,
    MissingPackage: ModuleNotFoundError,
    NotWritten: OSError,
    Failed: OSError,
    Unreachable: ConnectionError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_of_pythons_type_and_a_copy_keeps_its_parts(kind):
    error = kind("must be new", "me", "output", got="`k` of 3", cure="give `overwrite`")
    for same in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(same, KINDS[kind])
        assert str(same) == "me: `output` must be new, got `k` of 3; give `overwrite`."
        assert (same.owner, same.argument, same.got) == ("me", "output", "`k` of 3")


def test_a_command_names_its_options_in_the_rule_and_the_cure_but_not_in_the_value():
    error = InvalidValue("must be at least `k`", "search_images", "images", got="`k` of 3", cure="give `overwrite`")
    other = error.of("search", images="--images", k="-k", overwrite="--overwrite")
    assert str(other) == "search: `--images` must be at least `-k`, got `k` of 3; give `--overwrite`."


class WithInvalidItem(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, position):
        SmoothAPLoss(tau=-1.0)


def test_an_error_of_a_data_loader_worker_keeps_its_type_and_sentence():
    batches = iter(DataLoader(WithInvalidItem(), num_workers=1))
    with pytest.raises(InvalidValue, match=r"SmoothAPLoss: `tau` must be "):
        next(batches)
    batches._shutdown_workers()
