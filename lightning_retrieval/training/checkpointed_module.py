"""Modules whose checkpoints are written as plain data and verified when read, and how such modules are rebuilt.

`BaseFinetuning` freezes its layers at the start of every run, and unfreezes them at the start of one epoch. A run that
is resumed after that epoch would keep them frozen, so a checkpoint lists the parameters that are trained.
"""

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_retrieval.backend import (
    BaseFinetuning,
    CheckpointIO,
    TorchCheckpointIO,
    _restricted_classmethod,
    _WrappingCheckpointIO,
    pl,
    rank_zero_warn,
    warn_of_other_package,
)
from lightning_retrieval.checkpoints import (
    check_checkpoint,
    is_sharded_checkpoint,
    read_checkpoint,
    remove_sharded_checkpoint,
    write_checkpoint,
)
from lightning_retrieval.compiled import without_wrappers
from lightning_retrieval.files import remove
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.loading import module_of_checkpoint, read_module_checkpoint
from lightning_retrieval.models.sides import TwoSides
from lightning_retrieval.plain_data import (
    FORMAT,
    FORMAT_KEY,
    KWARGS,
    check_format,
    describe,
    unsharded_class,
    without_sources,
)
from lightning_retrieval.training import checkpoint_files
from lightning_retrieval.training.restored_states import (
    is_checkpoint_of,
    is_file_or_checkpoint,
    keep_own_paths,
    local_path,
)

TRAINABLE = "trainable_parameters"  # key of a checkpoint


class VerifiedCheckpoints(CheckpointIO):
    """Verifies checkpoints before they are loaded, and that only checkpoints of the run are removed.

    What the states in a checkpoint may make the run do is restricted here, where no subclass of a module can skip it.
    Everything else is delegated to another `CheckpointIO`.

    Args:
        checkpoint_io: the `CheckpointIO` that writes, loads and removes the files.
        trainer: the Trainer. Only what it has saved, or is in the `dirpath` of one of its callbacks, is removed.
    """

    def __init__(self, checkpoint_io: CheckpointIO, trainer: Any = None) -> None:
        self.checkpoint_io = _beside_target(checkpoint_io)
        self.trainer = trainer
        self._saved: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint. A local file of Lightning's own `CheckpointIO` gets its name when it is complete."""
        self._saved.add(str(path))
        with owned_by(self._owner):
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify a checkpoint and load it. With `weights_only` None or True, nothing in it can run code.

        Raises:
            ValueError: if the file is damaged.
        """
        if weights_only is None:  # for a remote address, Lightning would treat None as False
            weights_only = True
        with owned_by(self._owner):
            check_checkpoint(path)
            if is_sharded_checkpoint(path):
                content: dict[str, Any] = read_checkpoint(path, weights_only=weights_only)
            else:
                content = self.checkpoint_io.load_checkpoint(path, map_location, weights_only=weights_only)
            if self.trainer is not None:
                content = keep_own_paths(self.trainer, content)
        return content

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint of the run. Any other path, and any folder but a sharded checkpoint, stays as it is."""
        if not (self._is_of_run(path) and is_file_or_checkpoint(path)):
            rank_zero_warn(f"{self._owner}: {path} is no checkpoint of this run, so it was not deleted.")
            return
        local = local_path(path)
        if local is not None and local.is_symlink():
            remove(local)
        elif local is not None and local.is_dir():
            remove_sharded_checkpoint(local)
        else:
            self.checkpoint_io.remove_checkpoint(path)

    def _is_of_run(self, path: Any) -> bool:
        """Whether this run has saved to a path, or one of its callbacks saves to the folder of the path."""
        callbacks = getattr(self.trainer, "callbacks", ())
        return str(path) in self._saved or any(is_checkpoint_of(callback, path) for callback in callbacks)

    def teardown(self) -> None:
        """Tear down the other `CheckpointIO`."""
        with owned_by(self._owner):  # of an error of a thread that has written
            self.checkpoint_io.teardown()

    @property
    def _owner(self) -> str:
        """The class of the module, prefix of error messages."""
        if self.trainer is None:
            return ""
        return type(self.trainer.lightning_module).__name__


class _BesideTarget(TorchCheckpointIO):
    """Writes a local file beside its target, and leaves a remote address to Lightning.

    Lightning writes a local file to the folder for temporary files first. If that is on another file system, the target
    is then overwritten in place, and a killed process leaves neither the old nor the new checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint. A local file gets its name when it is complete."""
        file_system, local = fsspec.core.url_to_fs(str(path))
        if storage_options is None and isinstance(file_system, LocalFileSystem):
            write_checkpoint(Path(local), checkpoint)
        else:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)


def _beside_target(checkpoint_io: CheckpointIO) -> CheckpointIO:
    """`_BesideTarget` in place of Lightning's own `CheckpointIO`, also within another one, such as the async one."""
    if type(checkpoint_io) is TorchCheckpointIO:
        return _BesideTarget()
    if isinstance(checkpoint_io, _WrappingCheckpointIO) and checkpoint_io.checkpoint_io is not None:
        checkpoint_io._checkpoint_io = _beside_target(checkpoint_io.checkpoint_io)
    return checkpoint_io


class CheckpointedModule(pl.LightningModule):
    """A module whose checkpoints hold plain values, for `weights_only=True`, and are verified before loading."""

    # The preparation of images in evaluation, as plain data; None if the data module did not record it.
    preparation: dict[str, Any] | None = None
    # The same for the queries of data with two sides.
    query_preparation: dict[str, Any] | None = None

    def __init__(self) -> None:
        warn_of_other_package()
        super().__init__()

    def _keep_hyperparameters(self, objects: Mapping[str, Any], frame: FrameType | None) -> None:
        """Save the arguments of all constructors of this object as hyperparameters, in the form of plain values.

        Args:
            objects: the arguments that are objects. They are saved as class path and arguments.
            frame: stack frame of the constructor that has them.
        """
        kwargs = _names_of_kwargs(self, frame)
        self.save_hyperparameters(ignore=list(objects), frame=frame)
        if "_instantiator" in self.hparams:  # LightningCLI: the config, already plain values
            self.save_hyperparameters(frame=frame)
            return
        # Lightning compares the given object with each constructor argument in the frames above `frame`. Such a
        # comparison fails for an array, and a metric equals anything. So it gets the outermost frame.
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
        self.save_hyperparameters(describe({**self.hparams, **objects, **kwargs}), frame=frame)

    def _set_trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        if isinstance(trainer, pl.Trainer):
            self._verify_checkpoints()
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]

    trainer: Any = property(
        pl.LightningModule.trainer.fget,  # type: ignore[attr-defined]
        _set_trainer,
        doc="The Trainer. When it is set, which no hook of a subclass can prevent, it begins to verify checkpoints.",
    )

    def configure_callbacks(self) -> Any:
        """Replace wrappers of `torch.compile`."""
        without_wrappers(self)
        return super().configure_callbacks()

    def _verify_checkpoints(self) -> None:
        """Let the Trainer's strategy write and read checkpoints by `VerifiedCheckpoints`."""
        strategy = self.trainer.strategy
        if not isinstance(strategy.checkpoint_io, VerifiedCheckpoints):
            strategy.checkpoint_io = VerifiedCheckpoints(strategy.checkpoint_io, self.trainer)

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
        """Rebuild a module from a checkpoint, after checking its checksums and all names in it.

        The hyperparameters of the checkpoint are data: `plain_data` decides which classes they may name.

        Args:
            checkpoint_path: a path, an address or a stream.
            map_location: device, or function of `torch.load`.
            hparams_file: YAML or CSV file of hyperparameters that replace those of the checkpoint.
            strict: whether the names of the weights must match those of the module.
            weights_only: False also unpickles objects that can run code; None means True.
            kwargs: constructor arguments that replace those of the checkpoint.

        Raises:
            FileNotFoundError: if there is no file at a path.
            ValueError: if the path is a folder, the file is damaged, the file names a class or a setting that a file
                may not name, or an object must be passed again.
            TypeError: if the checkpoint describes an object of the wrong kind for an argument.
        """
        with owned_by(cls.__name__):
            checkpoint = read_module_checkpoint(cls, checkpoint_path, map_location, hparams_file, weights_only)
        return restored_module(cls, checkpoint, kwargs, strict)

    @owned
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Prepare the module for the weights of a checkpoint, and convert it to the run's precision.

        Lightning would convert it after the weights are loaded.
        """
        check_format(checkpoint)
        checkpoint_files.rename_plainly_in(checkpoint)
        if self._trainer is not None:
            self.trainer.precision_plugin.convert_module(self)
        _unfreeze(self, checkpoint.get(TRAINABLE, ()))
        checkpoint_files.add_base_weights(self, checkpoint)
        checkpoint_files.load_preparations(self, checkpoint)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Complete the checkpoint, and make its hyperparameters plain even if a subclass saved objects in them."""
        checkpoint[FORMAT_KEY] = FORMAT
        without_wrappers(self)
        checkpoint_files.rename_plainly_in(checkpoint)
        checkpoint_files.remove_base_weights(self, checkpoint)
        if _has_finetuning(self):
            checkpoint[TRAINABLE] = [name for name, value in self.named_parameters() if value.requires_grad]
        for name in checkpoint_files.PREPARATIONS:
            if getattr(self, name) is not None:
                checkpoint[name] = getattr(self, name)
        if self.CHECKPOINT_HYPER_PARAMS_KEY in checkpoint:
            described = describe(dict(checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]))
            complete = _with_complete_parts(described, self)
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = without_sources(complete)


def _names_of_kwargs(module: Any, frame: Any) -> dict[str, list[str]]:
    """The hyperparameter with the names that the caller of the outermost constructor has given to its `**kwargs`.

    A subclass may pass other arguments of the base class itself, which loading must not give to its `**kwargs`. Without
    `**kwargs`, or with `*args`, whose names are unknown, there is no such hyperparameter.

    Args:
        module: the object that is constructed.
        frame: stack frame of one of its constructors.
    """
    while _is_constructor_of(module, frame.f_back):
        frame = frame.f_back
    arguments = inspect.getargvalues(frame)
    if arguments.keywords is None or arguments.varargs is not None:
        return {}
    return {KWARGS: list(arguments.locals[arguments.keywords])}


def _is_constructor_of(module: Any, frame: Any) -> bool:
    """Whether a stack frame is that of a constructor of an object."""
    if frame is None or frame.f_code.co_name != "__init__" or not frame.f_code.co_varnames:
        return False
    return frame.f_locals.get(frame.f_code.co_varnames[0]) is module


def _with_complete_parts(arguments: dict[str, Any], module: Any) -> dict[str, Any]:
    """The arguments of an object, with the complete description of each part that has the method `init_args`.

    A config may give only the name of a model; the structure of the model is then read from a hub or a folder. From a
    complete description, the model can be rebuilt without the hub or the folder.

    Args:
        arguments: arguments of the object's constructor as plain data, by the names of the object's attributes.
        module: the object.
    """
    complete = dict(arguments)
    for name, value in arguments.items():
        part = getattr(module, name, None)
        if not isinstance(value, dict):
            continue
        class_name = str(value.get("class_path")).rpartition(".")[2]
        if class_name != unsharded_class(part).__name__:
            continue
        if hasattr(part, "init_args"):
            described = describe(part)
            if described["init_args"] is not None:
                complete[name] = described
        elif isinstance(part, TwoSides) and value.get("init_args"):
            complete[name] = {**value, "init_args": _with_complete_parts(value["init_args"], part)}
    return complete


def restored_module(
    cls: type[Any],
    checkpoint: dict[str, Any],
    given: Mapping[str, Any] = MappingProxyType({}),
    strict: bool | None = None,
) -> Any:
    """Build the module of a checkpoint and load its weights, as Lightning's `load_from_checkpoint` does.

    Args:
        cls: as for `module_of_checkpoint`.
        checkpoint: content of the checkpoint, as read by `torch.load`.
        given: constructor arguments that replace those of the checkpoint.
        strict: whether the names of the weights must match those of the module; None uses the module's
            `strict_loading`.

    Raises:
        ValueError: as for `module_of_checkpoint`, and if the checkpoint has no weights of a module.
        TypeError: as for `module_of_checkpoint`.
    """
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        rule = "a checkpoint must have the weights of a module, its `state_dict`"
        raise InvalidValue(rule, cls.__name__, got="none")
    with owned_by(cls.__name__):
        module = module_of_checkpoint(cls, checkpoint, given)
        module.configure_model()
        module.on_load_checkpoint(checkpoint)
        if strict is None:
            strict = module.strict_loading
        checkpoint_files.load_weights(module, checkpoint["state_dict"], strict=strict)
    devices = [value.device for value in state.values() if isinstance(value, Tensor)]
    return module.to(*devices[:1])


def _has_finetuning(module: Any) -> bool:
    """Whether a LightningModule is in a run with a `BaseFinetuning` callback."""
    if module._trainer is None:
        return False
    return any(isinstance(callback, BaseFinetuning) for callback in module.trainer.callbacks)


def _unfreeze(module: Any, trainable: Collection[str]) -> None:
    """Unfreeze the parameters that were trained when a checkpoint was written, if the run has a `BaseFinetuning`.

    Args:
        module: a LightningModule.
        trainable: names of the parameters that were trained.
    """
    if not _has_finetuning(module):
        return
    names = set(trainable)
    for prefix, layer in module.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if name in names and not parameter.requires_grad:
                parameter.requires_grad = True
                if isinstance(layer, _BatchNorm):  # freezing has stopped the layer's running statistics
                    layer.track_running_stats = True
