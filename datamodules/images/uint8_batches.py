"""Batches of uint8, which are normalised on the device of the run: a quarter of the bytes are sent to it."""

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerStatus
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_retrieval.datamodules.images.current_transform import CurrentTransform
from lightning_retrieval.datamodules.images.transforms import TrainingTransform
from lightning_retrieval.models import Preparation

UNNORMALIZED = "unnormalized"  # key of the batches of an `ImageSet` in uint8


def normalized_batch(batch: Any, normalize: Callable[[Tensor], Tensor]) -> Any:
    """The batch with normalised images, whatever lists and dicts it is part of; others are left as they are.

    Args:
        batch: of one or several loaders.
        normalize: a function from images of uint8 to those that the network receives.
    """
    if isinstance(batch, dict):
        if UNNORMALIZED not in batch:
            return {name: normalized_batch(part, normalize) for name, part in batch.items()}
        normalized = {name: value for name, value in batch.items() if name != UNNORMALIZED}
        normalized["images"] = normalize(batch["images"])
        return normalized
    if type(batch) in (list, tuple):
        return type(batch)(normalized_batch(part, normalize) for part in batch)
    return batch


def sends_uint8(datamodule: pl.LightningDataModule, transform: Any, preparation: Preparation) -> bool:
    """Whether a loader gives uint8: in a run whose hooks do not change batches before the device.

    The transform must normalise by the mean and the standard deviation of the preparation.

    Args:
        datamodule: that normalises the images of its batches on the device.
        transform: of the images of the loader.
        preparation: by which the data module normalises.
    """
    trainer = datamodule.trainer
    if trainer is None or trainer.state.status != TrainerStatus.RUNNING:
        return False
    if not _normalizes_alike(transform, preparation):
        return False
    owners = (datamodule, trainer.lightning_module)
    return not any(is_overridden("on_before_batch_transfer", owner) for owner in owners)


def _normalizes_alike(transform: Any, preparation: Preparation) -> bool:
    """Whether a transform normalises as a preparation does; False for a function of the user."""
    if isinstance(transform, CurrentTransform):
        transform = transform.current
    if isinstance(transform, TrainingTransform):
        transform = transform.preparation
    if not isinstance(transform, Preparation):
        return False
    return (transform.mean, transform.std) == (preparation.mean, preparation.std)
