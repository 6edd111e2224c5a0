"""Transforms of albumentations, which take and return a dict of arrays, as functions of a PIL image."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_retrieval.optional_packages import optional_import

UPDATE = "NO_ALBUMENTATIONS_UPDATE"  # variable of the environment


class AlbumentationsTransform:
    """A transform of albumentations as a function from a PIL image.

    Its random numbers are seeded by torch's seed, which `ImageSet` sets for each training image, because albumentations
    has a generator of its own.

    Args:
        transform: `albumentations.Compose` or another transform; let it end in `albumentations.pytorch.ToTensorV2`.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Image.Image) -> Any:
        self.transform.set_random_seed(torch.initial_seed() % 2**32)
        return self.transform(image=np.array(image))["image"]

    def __repr__(self) -> str:
        return repr(self.transform)

    def as_dict(self) -> dict[str, Any] | None:
        """The transform as plain data, None if it contains functions."""
        try:
            return {"albumentations": json.loads(json.dumps(self.transform.to_dict()))}  # with lists for tuples
        except (NotImplementedError, AttributeError, ValueError, TypeError):
            return None

    @classmethod
    def from_dict(cls, owner: str, described: dict[str, Any]) -> "AlbumentationsTransform":
        """The transform of plain data; only classes of albumentations are made.

        Args:
            owner: prefix of error messages.
            described: what `as_dict` returned.

        Raises:
            ModuleNotFoundError: if albumentations is not installed.
        """
        with (
            _without_a_question_to_pypi(),
            optional_import(
                f"{owner}: the model was evaluated with a transform of albumentations, which is not installed; install "
                "it: pip install 'lightning-retrieval[albumentations]'."
            ),
        ):
            import albumentations  # type: ignore[import-untyped]
        return cls(albumentations.from_dict(described["albumentations"]))


def of_pil_images(transform: Any) -> Any:
    """The transform as a function of a PIL image: those of albumentations are wrapped, all others are that already."""
    if f"{type(transform).__module__}.".startswith("albumentations."):
        return AlbumentationsTransform(transform)
    return transform


@contextmanager
def _without_a_question_to_pypi() -> Iterator[None]:
    """Import albumentations without the connection by which it looks for a newer version."""
    given = os.environ.get(UPDATE)
    os.environ[UPDATE] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[UPDATE]
