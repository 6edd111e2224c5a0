"""Checkpoint files are verified before they are loaded.

`torch.save` writes a zip archive with a checksum of each record, but `torch.load` does not compare them: a flipped bit
becomes another weight, without a word.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO
from pytorch_lightning.core.saving import load_hparams_from_tags_csv

from lightning_retrieval.checks import check_path, first_line, short_repr

ZIP_START = b"PK\x03\x04"
HPARAMS_SUFFIXES = (".csv", ".yaml", ".yml")  # of Lightning
LEGACY_START = b"\x80\x02"  # files of torch.save before torch 1.6, which have no checksums


def check_checkpoint(owner: str, checkpoint: Any) -> None:
    """Raise if a checkpoint file is damaged.

    A file that does not exist, an address on another machine and a stream that cannot be rewound are not checked here.

    Args:
        owner: prefix of error messages.
        checkpoint: a path, or a stream.

    Raises:
        ValueError: if the file is cut short, or a checksum in it is not that of its content.

    Cost:
        The file is read once. Checksums that `torch.serialization.set_crc32_options(False)` left out count as damage.
    """
    damage = find_damage(checkpoint)
    if damage is not None:
        raise ValueError(f"{owner}: the checkpoint {checkpoint} is damaged, {damage}; take another checkpoint.")


def check_checkpoint_exists(owner: str, name: str, checkpoint: Any) -> None:
    """Raise unless an argument is a stream, an address on another machine, or the path of a file.

    Args:
        owner: prefix of error messages.
        name: the argument.
        checkpoint: its value.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if the path is empty or that of a folder.
        TypeError: if it is none of the three.
    """
    is_stream = hasattr(checkpoint, "read") and hasattr(checkpoint, "seek")
    is_address = isinstance(checkpoint, str) and "://" in checkpoint
    if is_stream or is_address:
        return
    path = check_path(owner, name, checkpoint)
    if path.is_dir():
        raise ValueError(f"{owner}: `{name}` must be the path of a checkpoint file, got the folder {path}.")
    if not path.exists():
        raise FileNotFoundError(
            f"{owner}: `{name}` must be the path of a checkpoint, got {path}, which does not exist."
        )


def check_map_location(owner: str, map_location: Any) -> None:
    """Raise unless `map_location` is what `torch.load` accepts: a device, a dict of devices, a function or None.

    Args:
        owner: prefix of error messages.
        map_location: the argument.

    Raises:
        ValueError: if it is a string that names no device.
        TypeError: if it is something else.
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


def check_hparams_file(owner: str, hparams_file: Any) -> None:
    """Raise unless `hparams_file` is a YAML or CSV file.

    Args:
        owner: prefix of error messages.
        hparams_file: the argument.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has another suffix.
        TypeError: if it is no path.
    """
    path = check_path(owner, "hparams_file", hparams_file)
    if path.suffix.lower() not in HPARAMS_SUFFIXES:
        raise ValueError(f"{owner}: `hparams_file` must end in {', '.join(HPARAMS_SUFFIXES)}, got {path}.")
    if not path.is_file():
        raise FileNotFoundError(f"{owner}: `hparams_file` must be a file, got {path}, which is none.")


def read_hparams_file(owner: str, hparams_file: str | Path) -> dict[str, Any]:
    """The hyperparameters of a file that `check_hparams_file` accepts, as plain data.

    Args:
        owner: prefix of error messages.
        hparams_file: YAML, or CSV with the columns key and value, as Lightning's loggers write them.

    Raises:
        ValueError: if it holds something else.
    """
    path = Path(hparams_file)
    try:
        if path.suffix.lower() == ".csv":
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


def find_damage(checkpoint: Any) -> str | None:
    """What is wrong with a checkpoint file; None if nothing is, or if it is not checked (see `check_checkpoint`).

    Args:
        checkpoint: a path, or a stream.
    """
    if isinstance(checkpoint, (str, Path)):
        if not Path(checkpoint).is_file():
            return None
        with open(checkpoint, "rb") as stream:
            return _find_damage(stream)
    if not (hasattr(checkpoint, "seekable") and checkpoint.seekable()):
        return None
    position = checkpoint.tell()
    damage = _find_damage(checkpoint)
    checkpoint.seek(position)
    return damage


class VerifiedCheckpoints(CheckpointIO):
    """Loads checkpoints only if they are not damaged; everything else is left to another `CheckpointIO`.

    Args:
        owner: prefix of error messages.
        checkpoint_io: writes, loads and removes the files.
    """

    def __init__(self, owner: str, checkpoint_io: CheckpointIO) -> None:
        self.owner = owner
        self.checkpoint_io = checkpoint_io

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint."""
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Verify a checkpoint and load it; unless the caller says otherwise, without what can run code.

        Raises:
            ValueError: if the file is damaged.
        """
        check_checkpoint(self.owner, path)
        if kwargs.get("weights_only", False) is None:  # Lightning would take it for False at an address
            kwargs["weights_only"] = True
        return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """End whatever the other `CheckpointIO` has started."""
        self.checkpoint_io.teardown()


def verify_checkpoints(owner: str, strategy: Any) -> None:
    """Let a strategy verify the checkpoints that it loads.

    Args:
        owner: prefix of error messages.
        strategy: of a `pytorch_lightning.Trainer`.
    """
    if not isinstance(strategy.checkpoint_io, VerifiedCheckpoints):
        strategy.checkpoint_io = VerifiedCheckpoints(owner, strategy.checkpoint_io)


def _find_damage(stream: Any) -> str | None:
    """What is wrong with a file that `torch.save` wrote; None if nothing is."""
    start = stream.read(len(ZIP_START))
    if start.startswith(LEGACY_START):
        return None
    if start != ZIP_START:
        return "its first bytes are not those of a checkpoint"
    try:
        with zipfile.ZipFile(stream) as archive:
            record = archive.testzip()
    except Exception as error:  # damage in the structure of the archive raises errors of many kinds
        text = " ".join(str(error).split())
        return f"it is no complete zip archive ({text or type(error).__name__})"
    if record is not None:
        return f"the checksum of its record {record} is wrong"
    return None
