"""How the images of a data module are transformed: as its arguments say, else as the model of the run wants."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_retrieval.datamodules.images.current_transform import CurrentTransform, Transform
from lightning_retrieval.datamodules.images.transforms import PaperName, training_transform
from lightning_retrieval.models import Preparation
from lightning_retrieval.training.described_transforms import (
    describe_transform,
    rebuild_transform,
    shown_transform,
)


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
