"""The names that the help of `index` shows are those of the transforms that exist."""

from lightning_retrieval.cli.transform_names import GLYPHS, TRANSFORMS
from lightning_retrieval.datamodules.images.transforms import REFERENCE_NAMES


def test_names_are_those_of_the_transforms_that_exist():
    assert (*REFERENCE_NAMES, GLYPHS) == TRANSFORMS
