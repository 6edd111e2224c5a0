"""Checkpoints of all modules: verified when they are read, plain when they are written."""

from collections.abc import Mapping
from types import FrameType
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.cloud_io import _load
from pytorch_lightning.utilities.model_helpers import _restricted_classmethod

from lightning_retrieval.checks import check_flag
from lightning_retrieval.models.pretrained import without_pretrained_weights
from lightning_retrieval.training.base_weights import add_base_weights, remove_base_weights
from lightning_retrieval.training.checkpoint_files import (
    check_checkpoint,
    check_checkpoint_exists,
    check_hparams_file,
    check_map_location,
    verify_checkpoints,
)
from lightning_retrieval.training.finetuning import TRAINABLE, has_finetuning, unfreeze
from lightning_retrieval.training.full_sharding import undivided_class
from lightning_retrieval.training.hyperparameters import check_command_line_hyperparameters, describe

PREPARATION = "preparation"  # in a checkpoint: what evaluation did to an image


class CheckpointedModule(pl.LightningModule):
    """A module whose checkpoints hold plain values, so they load with `weights_only=True`, and are verified first."""

    # What evaluation did to an image, as plain data of `describe_transform`; None if the data module did not say it.
    preparation: dict[str, Any] | None = None

    def _keep_hyperparameters(self, objects: Mapping[str, Any], frame: FrameType | None) -> None:
        """Keep the arguments of a constructor as hyperparameters of plain values.

        Args:
            objects: the arguments that are objects, which are kept as their classes and arguments.
            frame: of the constructor.
        """
        self.save_hyperparameters(ignore=list(objects), frame=frame)
        if "_instantiator" in self.hparams:  # LightningCLI: the hyperparameters are the config, which is plain already
            self.save_hyperparameters(frame=frame)
            return
        # Lightning compares what it is given with each argument of the constructors that it finds in the frames above,
        # which fails for an array, and finds that a metric equals anything. The outermost frame has none above it.
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        self.save_hyperparameters(describe({**self.hparams, **objects}), frame=frame)

    def configure_callbacks(self) -> Any:
        """Let the Trainer verify the checkpoints that it loads."""
        verify_checkpoints(type(self).__name__, self.trainer.strategy)
        return super().configure_callbacks()

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:  # not Self, which a run-time type checker cannot resolve in a decorated method
        """Rebuild a module from a checkpoint, as Lightning does, after its checksums and class paths have been checked.

        Args:
            checkpoint_path: a path, an address or a stream.
            map_location: device, or function of `torch.load`.
            hparams_file: YAML or CSV file of hyperparameters that replace those of the checkpoint.
            strict: whether the names of the weights must be those of the module.
            weights_only: False also unpickles what can run code.
            kwargs: constructor arguments that replace those of the checkpoint.

        Raises:
            FileNotFoundError: if there is no file at a path.
            ValueError: if the path is that of a folder, the file is damaged, or it names a class whose module is
                neither imported nor in one of `class_paths.TRUSTED_PACKAGES`.
            TypeError: if `strict` or `weights_only` is not True, False or None, or another argument is neither a path
                nor a device.
        """
        check_flag(cls.__name__, "strict", strict)
        check_flag(cls.__name__, "weights_only", weights_only)
        check_checkpoint_exists(cls.__name__, "checkpoint_path", checkpoint_path)
        check_map_location(cls.__name__, map_location)
        if hparams_file is not None:
            check_hparams_file(cls.__name__, hparams_file)
        check_checkpoint(cls.__name__, checkpoint_path)
        if hparams_file is None:
            _check_class_paths(cls, checkpoint_path, weights_only, kwargs)
        with without_pretrained_weights():  # they would be downloaded, only to be replaced
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert to the run's precision before the weights are loaded; Lightning does so afterwards."""
        if self._trainer is not None:
            self.trainer.precision_plugin.convert_module(self)
        unfreeze(self, checkpoint.get(TRAINABLE, ()))
        add_base_weights(type(self).__name__, self, checkpoint)
        self.preparation = checkpoint.get(PREPARATION)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep hyperparameters plain, even if a subclass has called `save_hyperparameters` itself."""
        remove_base_weights(self, checkpoint)
        if has_finetuning(self):
            checkpoint[TRAINABLE] = [name for name, value in self.named_parameters() if value.requires_grad]
        if self.preparation is not None:
            checkpoint[PREPARATION] = self.preparation
        if self.CHECKPOINT_HYPER_PARAMS_KEY in checkpoint:
            described = describe(dict(checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]))
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = self._with_complete_parts(described)

    def _with_complete_parts(self, hyperparameters: dict[str, Any]) -> dict[str, Any]:
        """Hyperparameters in which the parts that describe themselves do so.

        A config may only name a model, whose structure was then read from a hub or a folder. What the part itself
        describes needs neither.
        """
        complete = dict(hyperparameters)
        for name, value in hyperparameters.items():
            part = getattr(self, name, None)
            named = isinstance(value, dict) and str(value.get("class_path")).rpartition(".")[2]
            if named == undivided_class(part).__name__ and hasattr(part, "init_args"):
                described = describe(part)
                if described["init_args"] is not None:
                    complete[name] = described
        return complete


def _check_class_paths(
    cls: type[pl.LightningModule], checkpoint_path: Any, weights_only: bool | None, replaced: Mapping[str, Any]
) -> None:
    """Raise if rebuilding the module of a checkpoint would import modules that the user has not imported.

    Args:
        cls: class of the module.
        checkpoint_path: path, URL or binary stream, which is left at its position.
        weights_only: as for `load_from_checkpoint`.
        replaced: hyperparameters that the checkpoint does not determine.
    """
    is_stream = hasattr(checkpoint_path, "seek")
    if is_stream:
        position = checkpoint_path.tell()
    saved = _load(checkpoint_path, map_location="meta", weights_only=weights_only)
    if is_stream:
        checkpoint_path.seek(position)
    hyperparameters = saved.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    if "_instantiator" in hyperparameters:  # otherwise the constructor looks the classes up
        used = {name: value for name, value in hyperparameters.items() if name not in replaced}
        check_command_line_hyperparameters(cls.__name__, used)
