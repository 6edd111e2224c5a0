"""Read modules and data modules from checkpoints of Lightning: verified files, whose hyperparameters are data."""

import sys
from collections.abc import Mapping
from pathlib import Path
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
    find_damage,
    finish_replacement,
    is_checkpoint,
    is_sharded_checkpoint,
    read_checkpoint,
)
from lightning_retrieval.checks import check_choice, check_flag, check_path, first_line, short_repr
from lightning_retrieval.csv_rows import csv_rows
from lightning_retrieval.distributed import rank
from lightning_retrieval.files import check_regular_file
from lightning_retrieval.models.limits import limited_to, weights_of
from lightning_retrieval.models.pretrained import without_pretrained_weights
from lightning_retrieval.plain_data.describe import class_path, describe
from lightning_retrieval.plain_data.rebuild import DescriptionReader, check_arguments
from lightning_retrieval.plain_data.rules import add_named_packages

# LightningCLI stores one of these names in the hyperparameters.
INSTANTIATORS = ("pytorch_lightning.cli.instantiate_module", "lightning.pytorch.cli.instantiate_module")


def check_checkpoint(owner: str, checkpoint: Any, part: slice = slice(None)) -> None:
    """Raise if a checkpoint is damaged.

    This function does not check paths that do not exist, remote addresses, streams that cannot be rewound, and files
    from before torch 1.6, which have no checksums.

    Args:
        owner: prefix of error messages.
        checkpoint: a path, or a stream.
        part: as for `find_damage`.

    Raises:
        ValueError: if the file is truncated, was not written by `torch.save`, has a wrong checksum, or is a FIFO.

    Cost:
        The file is read once. A file written with `torch.serialization.set_crc32_options(False)` has wrong checksums
        and counts as damaged.
    """
    if isinstance(checkpoint, (str, Path)):
        check_regular_file(owner, Path(checkpoint))
    damage = find_damage(checkpoint, part)
    if damage is not None:
        raise ValueError(f"{owner}: the checkpoint {checkpoint} is damaged, {damage}; take another checkpoint.")


def check_checkpoint_exists(owner: str, name: str, checkpoint: Any) -> None:
    """Raise unless an argument is a stream, a remote address, or the path of an existing checkpoint.

    Args:
        owner: prefix of error messages.
        name: name of the argument.
        checkpoint: value of the argument.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if the path is empty, or is a folder that is not a sharded checkpoint.
        TypeError: if the value is neither a path nor a stream.
    """
    is_stream = hasattr(checkpoint, "read") and hasattr(checkpoint, "seek")
    is_address = isinstance(checkpoint, str) and "://" in checkpoint
    if is_stream or is_address:
        return
    path = check_path(owner, name, checkpoint)
    finish_replacement(path)
    if path.is_dir() and not is_sharded_checkpoint(path):
        raise ValueError(f"{owner}: `{name}` must be the path of a checkpoint, got the folder {path}.")
    if not path.exists():
        raise FileNotFoundError(
            f"{owner}: `{name}` must be the path of a checkpoint, got {path}, which does not exist."
        )


def check_map_location(owner: str, map_location: Any) -> None:
    """Raise unless `torch.load` accepts `map_location`: a device, a dict of devices, a function or None.

    Args:
        owner: prefix of error messages.
        map_location: value of the argument.

    Raises:
        ValueError: if `map_location` is a string that is not the name of a device.
        TypeError: if `map_location` is of another type.
    """
    if isinstance(map_location, str):
        try:
            torch.device(map_location)
        except RuntimeError:
            raise ValueError(
                f"{owner}: `map_location` must be a device such as 'cpu' or 'cuda:0', got {map_location!r}."
            ) from None
    elif not (map_location is None or isinstance(map_location, (torch.device, dict)) or callable(map_location)):
        raise TypeError(
            f"{owner}: `map_location` must be a device such as 'cpu', got {short_repr(map_location)} "
            f"({type(map_location).__name__})."
        )


HPARAMS_SUFFIXES = (".csv", ".yaml", ".yml")  # suffixes of the files that Lightning writes


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
        checkpoint = _read_checkpoint(cls, checkpoint_path, map_location, hparams_file, weights_only)
        data = module_of_checkpoint(cls, checkpoint, kwargs)
        if type(data).__qualname__ in checkpoint:
            data.load_state_dict(checkpoint[type(data).__qualname__])
        return data


def _read_checkpoint(cls: Any, path: Any, map_location: Any, hparams_file: Any, weights_only: bool | None) -> Any:
    """The verified content of a checkpoint, with the hyperparameters of `hparams_file` if it is given.

    Args:
        cls: the class to load.
        path: `checkpoint_path` of `load_from_checkpoint`. The other arguments are also those of
            `load_from_checkpoint`.
    """
    owner = cls.__name__
    check_flag(owner, "weights_only", weights_only)
    check_checkpoint_exists(owner, "checkpoint_path", path)
    check_map_location(owner, map_location)
    replacing = None
    if hparams_file is not None:
        replacing = _read_hparams_file(owner, hparams_file)
    check_checkpoint(owner, path)
    read: Any = _load
    if is_sharded_checkpoint(path):
        read = read_checkpoint
    checkpoint = read(path, map_location or _default_map_location, weights_only is not False)
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{owner}: `checkpoint_path` must be a checkpoint of Lightning, got {short_repr(checkpoint)}.")
    if replacing is not None:
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = replacing
    return checkpoint


def _read_hparams_file(owner: str, hparams_file: Any) -> dict[str, Any]:
    """Read the hyperparameters in a YAML or CSV file as plain data.

    Args:
        owner: prefix of error messages.
        hparams_file: path of a YAML file, or of a CSV file with the columns key and value, as Lightning's loggers
            write.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the suffix is not .csv, .yaml or .yml, or the file does not hold names and plain values.
        TypeError: if `hparams_file` is not a path.
    """
    path = check_path(owner, "hparams_file", hparams_file)
    if path.suffix.lower() not in HPARAMS_SUFFIXES:
        raise ValueError(f"{owner}: `hparams_file` must end in {', '.join(HPARAMS_SUFFIXES)}, got {path}.")
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: `hparams_file` must be an existing file, got {path}.")
    try:
        if path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8") as lines:
                list(csv_rows(lines))  # raises for a stray quote, which would hide the lines after it
            content = load_hparams_from_tags_csv(path)
        else:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, IndexError, MemoryError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(
            f"{owner}: `hparams_file` must be a file of plain values, got {path} ({first_line(error)})."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{owner}: `hparams_file` must be a file of names and values, got {path}.")
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
    owner = cls.__name__
    saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    if not isinstance(saved, Mapping):
        raise ValueError(f"{owner}: a checkpoint must have a dict of hyperparameters, got {short_repr(saved)}.")
    used = {name: value for name, value in saved.items() if name not in given}
    instantiator = used.pop("_instantiator", None)
    if instantiator is not None:
        check_choice(owner, "_instantiator", instantiator, INSTANTIATORS)
    argument = checkpoint.get(
        cls.CHECKPOINT_HYPER_PARAMS_NAME
    )  # name of the argument, if the constructor takes a single dict
    if isinstance(argument, str) and argument not in ("", "kwargs"):
        used = {argument: used}
    add_named_packages({"class_path": class_path(cls)})
    settings = DescriptionReader(owner).settings(cls, used)
    check_arguments(owner, cls.CHECKPOINT_HYPER_PARAMS_KEY, settings.cls, {*settings.plain, *given})
    # Pretrained weights would be downloaded, only to be replaced.
    with without_pretrained_weights(), limited_to(owner, weights_of(checkpoint)):
        if instantiator is None:
            return settings.cls(**settings.plain, **given)
        arguments = {**settings.arguments(), **given}
        with _given_hyperparameters_context({**used, **describe(dict(given))}, instantiator):
            return settings.cls(**arguments)


BEST_CHECKPOINT = Path("checkpoints", "best.ckpt")  # in the folder of a run


def find_checkpoint(owner: str, checkpoint: Path, name: str = "checkpoint") -> Path:
    """The file of a checkpoint. For a folder, this is the best checkpoint of the newest run in it, which is logged.

    Args:
        owner: prefix of error messages.
        checkpoint: a file, the folder of a run, or the folder with the runs `version_0`, `version_1` and so on. The
            newest run is the one with the highest number among those that have a file `checkpoints/best.ckpt`.
        name: name of the argument that gives the checkpoint, for error messages.

    Raises:
        FileNotFoundError: if the path does not exist, or the folder has no such file.
    """
    if is_checkpoint(checkpoint):
        return checkpoint
    rule = f"{owner}: `{name}` must be a checkpoint that training wrote, or the folder of its runs, got {checkpoint}"
    if not checkpoint.is_dir():
        raise FileNotFoundError(f"{rule}, which does not exist.")
    runs = [run for run in checkpoint.glob("version_*") if run.name.removeprefix("version_").isdecimal()]
    runs.sort(key=lambda run: int(run.name.removeprefix("version_")), reverse=True)
    for run in [checkpoint, *runs]:
        best = run / BEST_CHECKPOINT
        if is_checkpoint(best):
            if rank() == 0:
                print(f"The checkpoint is {best}.", file=sys.stderr)
            return best
    raise FileNotFoundError(
        f"{rule}, in which neither {BEST_CHECKPOINT} nor version_*/{BEST_CHECKPOINT} exists; give the path of a file, "
        "or train with ModelCheckpoint(filename='best')."
    )
