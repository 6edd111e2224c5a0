"""Read modules and data modules from checkpoints of Lightning: verified files, whose hyperparameters are data."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_retrieval.backend import (
    _default_map_location,
    _given_hyperparameters_context,
    _load,
    _restricted_classmethod,
    load_hparams_from_tags_csv,
    pl,
    warn_of_other_package,
)
from lightning_retrieval.checkpoints import (
    INSTANTIATORS,
    check_checkpoint,
    check_checkpoint_exists,
    is_sharded_checkpoint,
    read_checkpoint,
)
from lightning_retrieval.checks import check_choice, first_line, short_repr
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.models.pretrained import without_pretrained_weights
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data.describe import class_path, describe
from lightning_retrieval.plain_data.formats import check_format
from lightning_retrieval.plain_data.rebuild import arguments_of_file, built
from lightning_retrieval.plain_data.rules import add_named_packages, find_class


class CheckpointedDataModule(pl.LightningDataModule):
    """A data module that `load_from_checkpoint` rebuilds by the same rules as a module."""

    def __init__(self) -> None:
        warn_of_other_package()
        super().__init__()

    @_restricted_classmethod
    def load_from_checkpoint(
        cls,  # noqa: N805
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Any:  # not Self, which a run-time type checker cannot resolve in a decorated method
        """Rebuild a data module whose subclass has called `save_hyperparameters`; see `CheckpointedModule`.

        Args:
            checkpoint_path: a path, an address or a stream.
            map_location: device, or function of `torch.load`.
            hparams_file: YAML or CSV file of hyperparameters that replace those of the checkpoint.
            weights_only: False also unpickles objects that can run code; None means True.
            kwargs: constructor arguments that replace those of the checkpoint.

        Raises:
            FileNotFoundError: as for a module.
            ValueError: as for a module.
            TypeError: as for a module.
        """
        with owned_by(cls.__name__):
            checkpoint = read_module_checkpoint(cls, checkpoint_path, map_location, hparams_file, weights_only)
            data = module_of_checkpoint(cls, checkpoint, kwargs)
        if type(data).__qualname__ in checkpoint:
            data.load_state_dict(checkpoint[type(data).__qualname__])
        return data


def read_module_checkpoint(cls: Any, path: Any, map_location: Any, hparams_file: Any, weights_only: bool | None) -> Any:
    """The verified content of a checkpoint, with the hyperparameters of `hparams_file` if it is given.

    Args:
        cls: the class to load.
        path: `checkpoint_path` of `load_from_checkpoint`. The other arguments are also those of
            `load_from_checkpoint`.

    Raises:
        FileNotFoundError: if there is no checkpoint at the path, or no `hparams_file`.
        ValueError: if the checkpoint is damaged, or a file is no checkpoint or holds no hyperparameters.
    """
    check_checkpoint_exists("checkpoint_path", path)
    check_checkpoint(path)
    read: Any = _load
    if is_sharded_checkpoint(path):
        read = read_checkpoint
    checkpoint = read(path, map_location or _default_map_location, weights_only is not False)
    if not isinstance(checkpoint, dict):
        raise InvalidValue("must be a checkpoint of Lightning", argument="checkpoint_path", got=short_repr(checkpoint))
    if hparams_file is not None:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = _read_hparams_file(hparams_file)
    return checkpoint


def _read_hparams_file(hparams_file: Any) -> dict[str, Any]:
    """The hyperparameters in a YAML file, or in a CSV file with the columns key and value, as Lightning writes them."""
    path = check_path("hparams_file", hparams_file)
    try:
        if path.suffix.lower() == ".csv":
            content = load_hparams_from_tags_csv(path)
        else:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        rule = "must be a file of plain values"
        raise InvalidValue(rule, argument="hparams_file", got=f"{path} ({first_line(error)})") from None
    if not isinstance(content, dict) or not content:  # Lightning reads a CSV file that does not exist as empty
        raise InvalidValue("must be a file of names and values", argument="hparams_file", got=path)
    return content


def module_of_checkpoint(
    cls: type[Any], checkpoint: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Build the module that the hyperparameters of a checkpoint describe, with random weights.

    Args:
        cls: class of the module, unless LightningCLI has recorded a subclass.
        checkpoint: the checkpoint. All hyperparameters that are used are checked before anything is built.
        given: constructor arguments that replace those of the checkpoint.

    Raises:
        ValueError: if the checkpoint names a class or a setting that a file may not name, or an object must be passed
            again, or the checkpoint has another format.
        TypeError: if the checkpoint describes an object of the wrong kind for an argument, or lacks an argument.
    """
    check_format(checkpoint)
    saved = dict(checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {})
    path, instantiator = saved.pop("_class_path", None), saved.pop("_instantiator", None)
    argument = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME)  # if the constructor takes a single dict
    if isinstance(argument, str) and argument not in ("", "kwargs"):
        saved = {argument: saved}
    add_named_packages({"class_path": class_path(cls)})
    if path is not None:
        cls = find_class("_class_path", path, (cls,))
    if instantiator is not None:
        check_choice("_instantiator", instantiator, INSTANTIATORS)
    settings = arguments_of_file(cls, saved, given)
    with without_pretrained_weights():  # they would be downloaded, only to be replaced
        if instantiator is None:
            return cls(**settings, **given)
        arguments = {**built("", settings), **given}
        recorded = {**settings, **describe(dict(given))}
        if path is not None:
            recorded["_class_path"] = path
        with _given_hyperparameters_context(recorded, instantiator):
            return cls(**arguments)
