"""The preparation of images in a run, which is decided by an object of the data module, `RunPreparation`.

    arguments of the data module          -+
    what the model was evaluated with     -+->  RunPreparation.follow  ->  transforms of the data sets
    what the model's embedder wants       -+              |
                                                          v
                                                  record_preparation   ->  the module and its checkpoints

`follow` ignores the preparation that the same run has recorded: the choice depends on the model before the run.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_retrieval.backend import TrainerStatus, is_overridden, pl
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.preparation.decoding import CurrentTransform
from lightning_retrieval.preparation.of_model import ModuleSide
from lightning_retrieval.preparation.pixels import UNNORMALIZED
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.preparation.serialised import (
    Transform,
    of_pil_images,
    recorded_preparation,
    serialise_transform,
    shown_transform,
)
from lightning_retrieval.preparation.training_transforms import PaperName, TrainingTransform, training_transform


class RunPreparation:
    """The transforms of images in a run, for training and for evaluation.

    Evaluation uses the first of these that exists: the given transform, the named preparation with the given settings,
    the transform of the model's earlier evaluation, the preparation of the model's embedder, the default.

    Args:
        paper: name of the paper whose transforms are used, or None.
        settings: the given settings of a `Preparation`, by name.
        train_transform: the given transform for training, or None.
        eval_transform: the given transform for evaluation, or None.

    Raises:
        ValueError: if a setting is out of its range.
        TypeError: if a setting has the wrong type.
    """

    def __init__(
        self,
        paper: PaperName | None,
        settings: Mapping[str, Any],
        *,
        train_transform: Transform | None,
        eval_transform: Transform | None,
    ) -> None:
        self.paper = paper
        self.settings = dict(settings)
        self._given_train = of_pil_images(train_transform)
        self._given_eval = of_pil_images(eval_transform)
        self._serialised: dict[str, Any] | None = None
        self.preparation = Preparation()
        self.train = CurrentTransform(self.preparation)
        self.evaluation = CurrentTransform(self.preparation)
        self.follow(ModuleSide())

    def follow(self, side: ModuleSide, *, predicts: bool = False) -> None:
        """Choose the transforms of the data sets for a run of a module.

        Args:
            side: the network that embeds the images, and the transform of its earlier evaluation.
            predicts: whether the run predicts. A prediction must prepare images as in the model's evaluation.

        Raises:
            ValueError: if the model was evaluated with a function and no transform is given, or if a prediction would
                prepare images otherwise than the model's evaluation did, as far as its transform has a name.
        """
        recorded: Any = side.recorded
        evaluation: Transform | None
        if recorded is not None and recorded is self._serialised:  # this run has recorded it
            return
        is_given = self._given_eval is not None or self.paper is not None or bool(self.settings)
        if recorded is not None and not is_given:
            evaluation = recorded_preparation(recorded)
        else:
            evaluation = self._given_eval or self._changed(self._base(side.wanted, recorded))
        if evaluation is None:
            rule = f"must be given, because the model was evaluated with {shown_transform(recorded)}, whose code a "
            raise InvalidValue(f"{rule}checkpoint does not hold", argument="eval_transform")
        if predicts and recorded is not None and serialise_transform(evaluation) != recorded:
            rule = f"images must be prepared as the model was evaluated, with {shown_transform(recorded)}"
            cure = "leave out the arguments that differ"
            raise InvalidValue(rule, got=shown_transform(serialise_transform(evaluation)), cure=cure)
        if isinstance(evaluation, Preparation):
            self.preparation = evaluation
        else:
            self.preparation = self._changed(self._base(side.wanted, None))
        training = self._given_train or training_transform(self.paper or "plain", self.preparation)
        self.evaluation.set(evaluation, self.preparation.background)
        self.train.set(training, self.preparation.background)
        self._serialised = None

    def serialised(self) -> dict[str, Any]:
        """The evaluation transform as plain data; the same object until `follow` chooses again."""
        if self._serialised is None:
            self._serialised = serialise_transform(self.evaluation.current)
        return self._serialised

    def sends_uint8(self, datamodule: pl.LightningDataModule, transform: Any) -> bool:
        """Whether a loader yields images of uint8, so that images are normalised on the device.

        The answer is True during a run if the transform normalises with the mean and the standard deviation of the
        evaluation, and no hook changes batches before they are moved to the device.

        Args:
            datamodule: the data module, which normalises the images of its batches on the device.
            transform: the transform of the loader's images.
        """
        trainer = datamodule.trainer
        if trainer is None or trainer.state.status != TrainerStatus.RUNNING:
            return False
        if isinstance(transform, TrainingTransform):
            transform = transform.preparation
        if not isinstance(transform, Preparation):  # the transform is the user's function
            return False
        if (transform.mean, transform.std) != (self.preparation.mean, self.preparation.std):
            return False
        owners = (datamodule, trainer.lightning_module)
        return not any(is_overridden("on_before_batch_transfer", owner) for owner in owners)

    def _base(self, wanted: Preparation | None, recorded: dict[str, Any] | None) -> Preparation:
        """The preparation to which the given settings are applied."""
        if self.paper is not None:
            return Preparation.named(self.paper)
        if recorded is not None and "preparation" in recorded:
            return Preparation(**recorded["preparation"])
        return wanted or Preparation()

    def _changed(self, preparation: Preparation) -> Preparation:
        settings = dict(self.settings)
        image_size = settings.pop("image_size", None)
        with reported_as():
            if image_size is not None:
                preparation = preparation.with_size(image_size)
            return dataclasses.replace(preparation, **settings)


def data_module_of(loop: Any) -> Any:
    """The data module that one of the Trainer's loops reads; None if it was given loaders.

    `trainer.datamodule` is then that of an earlier call.

    Args:
        loop: a loop of a `pytorch_lightning.Trainer`, such as `trainer.fit_loop`.
    """
    source = loop._data_source.instance
    if isinstance(source, pl.LightningDataModule):
        return source
    return None


def record_preparation(module: Any) -> None:
    """Store the evaluation transforms of a run in its module, for its checkpoints and its later runs.

    Args:
        module: a `LightningModule`; its `preparation` becomes None if the data module of the run does not define one.
            Its `query_preparation` is the transform of queries, None unless the data has two sides.
    """
    datamodule = data_module_of(module.trainer.fit_loop)
    module.preparation = getattr(datamodule, "serialised_preparation", None)
    module.query_preparation = getattr(datamodule, "serialised_query_preparation", None)


def normalized_batch(batch: Any, normalize: Callable[[Tensor], Tensor]) -> Any:
    """Normalise the uint8 batches in nested lists and dicts; other batches do not change.

    Normalisation happens on the device of the run, because uint8 images take a quarter of the bytes of float32 images.

    Args:
        batch: a batch of one or several loaders.
        normalize: maps images of uint8 to the input of the network.
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
