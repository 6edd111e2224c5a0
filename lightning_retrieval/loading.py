"""Read modules and data modules from checkpoints of Lightning: verified files, whose hyperparameters are data."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
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
from lightning_retrieval.checks import check_choice, check_path, first_line, short_repr
from lightning_retrieval.csv_rows import csv_rows
from lightning_retrieval.invalid import InvalidType, InvalidValue, MissingFile, owned_by
from lightning_retrieval.models.limits import limited_to, weights_of
from lightning_retrieval.models.pretrained import without_pretrained_weights
from lightning_retrieval.plain_data.describe import class_path, describe
from lightning_retrieval.plain_data.formats import FORMAT_KEY, format_of
from lightning_retrieval.plain_data.rebuild import check_arguments, checked_settings
from lightning_retrieval.plain_data.rules import add_named_packages, find_class

HPARAMS_SUFFIXES = (".csv", ".yaml", ".yml")  # suffixes of the files that Lightning writes


def check_map_location(map_location: Any) -> None:
    """Raise unless `torch.load` accepts `map_location`: a device, a dict of devices, a function or None.

    Args:
        map_location: value of the argument.

    Raises:
        ValueError: if `map_location` is a string that is not the name of a device.
        TypeError: if `map_location` is of another type.
    """
    if isinstance(map_location, str):
        try:
            torch.device(map_location)
        except RuntimeError:
            rule = "must be a device such as 'cpu' or 'cuda:0'"
            raise InvalidValue(rule, argument="map_location", got=repr(map_location)) from None
    elif not (map_location is None or isinstance(map_location, (torch.device, dict)) or callable(map_location)):
        got = f"{short_repr(map_location)} ({type(map_location).__name__})"
        raise InvalidType("must be a device such as 'cpu'", argument="map_location", got=got)


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
    """
    check_map_location(map_location)
    replacing = None
    check_checkpoint_exists("checkpoint_path", path)
    if hparams_file is not None:
        replacing = _read_hparams_file(hparams_file)
    check_checkpoint(path)
    read: Any = _load
    if is_sharded_checkpoint(path):
        read = read_checkpoint
    checkpoint = read(path, map_location or _default_map_location, weights_only is not False)
    if not isinstance(checkpoint, dict):
        raise InvalidValue("must be a checkpoint of Lightning", argument="checkpoint_path", got=short_repr(checkpoint))
    if replacing is not None:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = replacing
        checkpoint[FORMAT_KEY] = 1  # the file of a logger has no number
    return checkpoint


def _read_hparams_file(hparams_file: Any) -> dict[str, Any]:
    """Read the hyperparameters in a YAML or CSV file as plain data.

    Args:
        hparams_file: path of a YAML file, or of a CSV file with the columns key and value, as Lightning's loggers
            write.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the suffix is not .csv, .yaml or .yml, or the file does not hold names and plain values.
        TypeError: if `hparams_file` is not a path.
    """
    path = check_path("hparams_file", hparams_file)
    if path.suffix.lower() not in HPARAMS_SUFFIXES:
        raise InvalidValue(f"must end in {', '.join(HPARAMS_SUFFIXES)}", argument="hparams_file", got=path)
    if not path.is_file():
        raise MissingFile("must be an existing file", argument="hparams_file", got=path)
    try:
        if path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8") as lines:
                list(csv_rows(lines))  # raises for a stray quote, which would hide the lines after it
            content = load_hparams_from_tags_csv(path)
        else:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, IndexError, MemoryError, RecursionError, yaml.YAMLError) as error:
        rule = "must be a file of plain values"
        raise InvalidValue(rule, argument="hparams_file", got=f"{path} ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise InvalidValue("must be a file of names and values", argument="hparams_file", got=path)
    return content


def module_of_checkpoint(
    cls: type[Any], checkpoint: Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Build the module that the hyperparameters of a checkpoint describe, with random weights.

    Args:
        cls: class of the module, unless LightningCLI has recorded a subclass.
        checkpoint: the checkpoint. All its hyperparameters are checked before anything is built.
        given: constructor arguments that replace those of the checkpoint.

    Raises:
        ValueError: if the checkpoint names a class or a setting that a file may not name, or an object must be passed
            again.
        TypeError: if the checkpoint describes an object of the wrong kind for an argument.
    """
    saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    if not isinstance(saved, Mapping):
        raise InvalidValue("a checkpoint must have a dict of hyperparameters", got=short_repr(saved))
    used = dict(saved)
    path, instantiator = used.pop("_class_path", None), used.pop("_instantiator", None)
    argument = checkpoint.get(
        cls.CHECKPOINT_HYPER_PARAMS_NAME
    )  # name of the argument, if the constructor takes a single dict
    if isinstance(argument, str) and argument not in ("", "kwargs"):
        used = {argument: used}
    add_named_packages({"class_path": class_path(cls)})
    if path is not None:
        cls = find_class("_class_path", path, (cls,))
    if instantiator is not None:
        check_choice("_instantiator", instantiator, INSTANTIATORS)
    settings = checked_settings(cls, used, of_format=format_of(checkpoint), given=given)
    check_arguments(cls.CHECKPOINT_HYPER_PARAMS_KEY, cls, {*settings.plain, *given})
    # Pretrained weights would be downloaded, only to be replaced.
    with without_pretrained_weights(), limited_to(weights_of(checkpoint)):
        if instantiator is None:
            return cls(**settings.plain, **given)
        arguments = {**settings.arguments(), **given}
        recorded = {**settings.plain, **describe(dict(given))}
        if path is not None:
            recorded["_class_path"] = path
        with _given_hyperparameters_context(recorded, instantiator):
            return cls(**arguments)
