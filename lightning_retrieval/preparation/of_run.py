"""How the images of a data module are transformed: as its arguments say, else as the model of the run wants."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerStatus
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_retrieval.preparation.pixels import Size
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import describe_transform, rebuild_transform, shown_transform
from lightning_retrieval.preparation.training_transforms import PaperName, TrainingTransform, training_transform

# What an `ImageSet` does to its images, which may be decided later than the data set is made.


Transform = Callable[[Any], Any]


class CurrentTransform:
    """A transform that the data sets of a data module share, and that the module of a run may exchange.

    Args:
        preparation: what is done at first.
    """

    def __init__(self, preparation: Preparation) -> None:
        self.current: Transform = preparation
        self.background = preparation.background  # the colour that shows through transparent pixels

    @property
    def takes_pixels(self) -> bool:
        """Whether the current transform takes tensors of uint8 instead of PIL images."""
        return getattr(self.current, "takes_pixels", False)

    @property
    def least_size(self) -> Size | None:
        """Height and width at which the current transform lets JPEGs be decoded, None for the full scale."""
        return getattr(self.current, "least_size", None)

    @property
    def to_uint8(self) -> Transform | None:
        """The current transform before it normalises, None if it is one that cannot be divided."""
        return getattr(self.current, "to_uint8", None)

    def __call__(self, image: Any) -> Any:
        return self.current(image)

    def __repr__(self) -> str:
        return f"CurrentTransform({self.current!r})"


# Batches of uint8, which are normalised on the device of the run: a quarter of the bytes are sent to it.


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


class ImageTransforms:
    """The transforms of a data module for training and for evaluation.

    What evaluation does to an image is, in this order: the transform that was given, the named preparation with the
    settings that were given, that with which the model was evaluated before, that of its embedder, the default.

    Args:
        owner: the class of the data module, prefix of error messages.
        paper: name of the paper whose transforms are used, or None.
        settings: those of a `Preparation` that were given, by name.
        train_transform: of training, or None.
        eval_transform: of evaluation, or None.
    """

    def __init__(
        self,
        owner: str,
        paper: PaperName | None,
        settings: Mapping[str, Any],
        *,
        train_transform: Transform | None,
        eval_transform: Transform | None,
    ) -> None:
        self.owner = owner
        self.paper = paper
        self.settings = dict(settings)
        self._given_train = train_transform
        self._given_eval = eval_transform
        self.preparation = Preparation()
        self.train = CurrentTransform(self.preparation)
        self.evaluation = CurrentTransform(self.preparation)
        self.follow(None)

    def follow(self, module: Any, *, predicts: bool = False) -> None:
        """Take the transforms for a run of this module.

        Args:
            module: the `LightningModule`, whose `preparation` is what its earlier evaluation did, or None.
            predicts: whether the run predicts, which must not be done with another preparation than the model's own.

        Raises:
            ValueError: if the model was evaluated with a function, which then has to be given, or, for a prediction,
                with another preparation.
        """
        recorded = getattr(module, "preparation", None)
        is_given = self._given_eval is not None or self.paper is not None or bool(self.settings)
        if recorded is not None and not is_given:
            evaluation = self._recorded(recorded)
        else:
            evaluation = self._given_eval or self._changed(self._base(module, recorded))
        if predicts and recorded is not None and describe_transform(evaluation) != recorded:
            raise ValueError(
                f"{self.owner}: images must be prepared as the model was evaluated, with {shown_transform(recorded)}, "
                f"got {shown_transform(describe_transform(evaluation))}; leave out the arguments that differ."
            )
        if isinstance(evaluation, Preparation):
            self.preparation = evaluation
        else:
            self.preparation = self._changed(self._base(module, None))
        background = self.preparation.background
        self.evaluation.current = evaluation
        self.evaluation.background = getattr(evaluation, "background", background)
        training = self._given_train or training_transform(self.paper or "plain", self.preparation)
        self.train.current = training
        self.train.background = getattr(training, "background", background)

    def _recorded(self, recorded: dict[str, Any]) -> Transform:
        """The transform that the model was evaluated with."""
        if "function" in recorded:
            raise ValueError(
                f"{self.owner}: `eval_transform` must be given, because the model was evaluated with "
                f"{shown_transform(recorded)}, whose code a checkpoint does not hold."
            )
        return rebuild_transform(self.owner, recorded)

    def _base(self, module: Any, recorded: dict[str, Any] | None) -> Preparation:
        """The preparation that the settings change."""
        if self.paper is not None:
            return Preparation.named(self.paper)
        if recorded is not None and "preparation" in recorded:
            return Preparation(**recorded["preparation"])
        wanted = getattr(getattr(module, "embedder", None), "preparation", None)
        if isinstance(wanted, Preparation):
            return wanted
        return Preparation()

    def _changed(self, preparation: Preparation) -> Preparation:
        settings = dict(self.settings)
        image_size = settings.pop("image_size", None)
        try:
            if image_size is not None:
                preparation = preparation.with_size(image_size)
            return dataclasses.replace(preparation, **settings)
        except (ValueError, TypeError) as error:
            message = str(error).replace("Preparation:", f"{self.owner}:", 1)
            raise type(error)(message) from None
