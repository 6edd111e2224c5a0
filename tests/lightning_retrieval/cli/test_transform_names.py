"""The names that the help of the commands shows are those of the preparations that exist."""

from lightning_retrieval.cli.options import TRANSFORMS
from lightning_retrieval.models import Preparation


def test_names_are_those_of_the_preparations_that_exist():
    assert Preparation.NAMES == TRANSFORMS
