"""Checkpoints on disk: a file that `torch.save` wrote, or a folder with the shards of several processes.

- `torch.save` writes a zip archive with a checksum of each record. `torch.load` does not compare the checksums, and a
  flipped bit would silently change a weight. So files are verified before they are loaded. A new file is written beside
  the earlier one, and then replaces it in one step.
- A sharded checkpoint is a folder. PyTorch's distributed checkpoint lets each process write its shards of the sharded
  tensors to a file of its own. These files have the safetensors format, because the reader of PyTorch's other format
  unpickles objects that can run code. Everything else is in the file `rest.pt`, in which tensors on the meta device
  stand for the sharded tensors. This file is written last, so a folder that has it is complete. As with Lightning's own
  sharded checkpoints, the shards have no checksums, and a process that is killed while it replaces an earlier
  checkpoint may leave none.
"""

import copy
import errno
import hashlib
import inspect
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.distributed import rank, together
from lightning_retrieval.files import (
    POSIX,
    delete,
    file_digest,
    is_system_error,
    is_temporary,
    move_file,
    new_file,
    reason,
    remove,
    temporary_path,
    writing,
)
from lightning_retrieval.invalid import InvalidValue, MissingFile, MissingPackage
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.paths import check_path

BEST_CHECKPOINT = Path("checkpoints", "best.ckpt")  # in the folder of a run
# LightningCLI stores one of these names in the hyperparameters.
INSTANTIATORS = ("pytorch_lightning.cli.instantiate_module", "lightning.pytorch.cli.instantiate_module")
REST, SHARDS = "rest.pt", "shard-*-model-00001-of-00001.safetensors"  # names of the files of a sharded checkpoint


def is_sharded_checkpoint(path: Any) -> bool:
    """Whether a path is that of a complete sharded checkpoint."""
    return isinstance(path, (str, Path)) and Path(path, REST).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a file or of a sharded checkpoint."""
    return path.is_file() or is_sharded_checkpoint(path)


def holds_checkpoint(path: Path) -> bool:
    """Whether a path has what `torch.save` or `write_sharded_checkpoint` wrote, judged by its content."""
    try:
        return any(re.fullmatch("[^/]+/data.pkl", name) for name in checksums_of(path))
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, which may not exist, by the suffix of their names."""
    return sorted(folder.glob("*.ckpt"))


def _file_of(checkpoint: Path) -> Path:
    """The file that `torch.save` wrote, which a sharded checkpoint has beside its shards."""
    if checkpoint.is_dir():
        return checkpoint / REST
    return checkpoint


def saved_at(checkpoint: Path) -> int:
    """When a checkpoint was saved, in nanoseconds."""
    return _file_of(checkpoint).stat().st_mtime_ns


def checkpoint_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint; that of the digests of all its files, if it is sharded."""
    if not is_sharded_checkpoint(checkpoint):
        return file_digest(checkpoint)
    digests = hashlib.sha256()
    for file in _files_of_shards(checkpoint):
        digests.update(file_digest(file).encode())
    return digests.hexdigest()


def checksums_of(checkpoint: Path) -> dict[str, int]:
    """The checksums that a checkpoint has of its parts, by their names; the shards have none."""
    with zipfile.ZipFile(_file_of(checkpoint)) as archive:
        return {record.filename: record.CRC for record in archive.infolist()}


def find_damage(checkpoint: Any) -> str | None:
    """A description of the damage of a checkpoint; None if it is intact, or does not exist.

    Args:
        checkpoint: a path, or a stream.
    """
    if isinstance(checkpoint, (str, Path)):
        path = Path(checkpoint)
        if path.is_dir() and not is_sharded_checkpoint(path):
            return f"it is a folder without {REST}, because it was not saved completely, or is no checkpoint"
        if not _file_of(path).is_file():
            return None
        with _file_of(path).open("rb") as stream:
            return _damage_of_file(stream)
    if not (hasattr(checkpoint, "seekable") and checkpoint.seekable()):
        return None
    position = checkpoint.tell()
    damage = _damage_of_file(checkpoint)
    checkpoint.seek(position)
    return damage


def _damage_of_file(stream: Any) -> str | None:
    """A description of the damage of a file that `torch.save` wrote; None if it is intact."""
    try:
        with zipfile.ZipFile(stream) as archive:
            record = archive.testzip()
    except Exception as error:  # a damaged archive can raise errors of many types
        if is_system_error(error):
            raise
        return reason(error)
    if record is not None:
        return f"the checksum of its record {record} is wrong"
    return None


def map_tensors(content: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """A copy of nested dicts, lists and tuples whose tensors are replaced.

    Args:
        content: any object.
        change: function of the name of a tensor and the tensor. A name is composed of the keys and positions that lead
            to the tensor, such as `state_dict/embedder.head.weight`.
        name: name of `content`.
    """
    if isinstance(content, Tensor):
        return change(name, content)
    if isinstance(content, dict):
        changed = copy.copy(content)  # copies also `_metadata`, the attribute with the versions of modules
        for key, value in content.items():
            changed[key] = map_tensors(value, change, f"{name}/{key}".lstrip("/"))
        return changed
    if type(content) in (list, tuple):
        items = (map_tensors(value, change, f"{name}/{position}") for position, value in enumerate(content))
        return type(content)(items)
    return content


def write_checkpoint(path: Path, content: Any) -> None:
    """Write a checkpoint of one file. An earlier checkpoint, a file or a folder, is replaced when it is complete.

    A folder that has anything but a sharded checkpoint stays as it is.

    Args:
        path: path of the file; its folder is created if it does not exist.
        content: the checkpoint.

    Raises:
        OSError: if the file cannot be written; an earlier checkpoint is unchanged.
    """
    with writing(f"the checkpoint {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            torch.save(content, file)
            file.flush()
            if path.is_dir() and not path.is_symlink() and {*path.iterdir()} <= {*_files_of_shards(path)}:
                _remove_shards(path)


def write_sharded_checkpoint(path: Path, content: Any) -> None:
    """Write a checkpoint; each process writes its shards. All processes must call this function.

    The path is a folder of a file system that all processes share. An earlier checkpoint is removed only after the new
    one is complete, whether it is a folder or a file.

    Args:
        path: path of the folder; that of the first process counts.
        content: the checkpoint, with `DTensor`s of several processes, for example.

    Raises:
        OSError: on all processes, if a file cannot be written.
    """
    path, new = together(lambda: (path, temporary_path(path)))[0]
    shards: dict[str, Tensor] = {}

    def without_shard(name: str, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        shards[name] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    rest = map_tensors(content, without_shard)
    try:
        with writing(f"the checkpoint {path}"):
            _save_shards(new, shards)
            together(lambda: _complete(new, rest, path))
    except BaseException:
        if rank() == 0:
            delete(new)
        raise


def _save_shards(folder: Path, shards: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(shards, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # is no Exception
        cause, *_ = error.failures.values()
        raise cause[0] from None


def _complete(new: Path, rest: Any, path: Path) -> None:
    """On the first process, save everything but the shards, and replace an earlier checkpoint by the new files."""
    if rank() > 0:
        return
    torch.save(rest, new / REST)
    if path.is_dir() and not path.is_symlink():
        _remove_shards(path)
    else:
        remove(path)
    path.mkdir(exist_ok=True)
    for file in sorted(new.iterdir(), reverse=True):  # `REST` is the last one
        move_file(file, path / file.name)
    new.rmdir()


def _remove_shards(folder: Path) -> None:
    """Remove an earlier sharded checkpoint, complete or not, but not a file of another program that has its name."""
    if (folder / REST).exists() and not holds_checkpoint(folder):
        raise FileExistsError(errno.EEXIST, f"{folder} is no checkpoint", str(folder))
    remove_sharded_checkpoint(folder)


def remove_sharded_checkpoint(folder: Path) -> None:
    """Remove what is there of a sharded checkpoint, and its folder unless other files are in it."""
    for file in _files_of_shards(folder):
        remove(file)
    with suppress(OSError):
        folder.rmdir()


def _files_of_shards(folder: Path) -> list[Path]:
    """The files that a sharded checkpoint has or may have."""
    return [folder / REST, *sorted(folder.glob(SHARDS))]


def delete_temporary_checkpoints(folder: Path) -> None:
    """Delete what killed processes have left of checkpoints in a folder to which no other process writes."""
    for path in filter(is_temporary, folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_sharded_checkpoint(path)
        else:
            delete(path)


def torch_writes_shards() -> bool:
    """Whether the installed torch can write and read shards in the safetensors format: 2.9 or later."""
    import torch.distributed.checkpoint as torch_checkpoint

    writer = getattr(torch_checkpoint, "HuggingFaceStorageWriter", None)
    return writer is not None and "save_distributed" in inspect.signature(writer).parameters


def check_can_be_sharded() -> None:
    """Raise unless the installed packages can write and read sharded checkpoints.

    Raises:
        ModuleNotFoundError: if safetensors is not installed, or torch is older than 2.9.
    """
    with optional_import("sharded checkpoints need safetensors: pip install safetensors."):
        import safetensors  # noqa: F401
    if not torch_writes_shards():
        cure = "update torch, or read and write checkpoints that are one file"
        raise MissingPackage("sharded checkpoints need torch >= 2.9", got=torch.__version__, cure=cure)


def read_checkpoint(checkpoint: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
    """The content of a checkpoint, which `find_damage` has found to be intact.

    Args:
        checkpoint: a path, or a stream.
        map_location: as for `torch.load`. Sharded tensors are on the CPU, unless `map_location` is a device.
        weights_only: as for `torch.load`.
    """
    if not is_sharded_checkpoint(checkpoint):
        return torch.load(checkpoint, map_location=map_location, weights_only=weights_only)
    rest = read_rest(checkpoint, map_location, weights_only)
    if str(map_location) == "meta":
        return rest
    device = "cpu"
    if isinstance(map_location, (str, torch.device)):
        device = str(map_location)

    def allocate(name: str, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device)

    return read_shards(checkpoint, rest, allocate, alone=True)


def read_rest(checkpoint: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
    """The content of a sharded checkpoint, with tensors on the meta device in place of sharded tensors."""
    return load_mapped(Path(checkpoint, REST), map_location, weights_only)


def is_of_another_program(content: Any) -> bool:
    """Whether the content of a checkpoint describes no `RetrievalModule` and no subclass of it.

    Args:
        content: content of the checkpoint.
    """
    if not isinstance(content, Mapping):
        return True
    described = content.get("hyper_parameters")
    return not (isinstance(described, Mapping) and {"embedder", "_class_path"} & described.keys())


def load_mapped(file: Path, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
    """The content of a file that `torch.save` wrote, mapped into memory.

    On Windows, it is read into memory: a file that is mapped could not be replaced by the next checkpoint.

    Args:
        file: path of the file.
        map_location: as for `torch.load`.
        weights_only: as for `torch.load`.
    """
    return torch.load(file, map_location=map_location, mmap=POSIX, weights_only=weights_only)


def read_shards(checkpoint: Any, rest: Any, allocate: Callable[[str, Tensor], Tensor], *, alone: bool = False) -> Any:
    """Read the sharded tensors of a sharded checkpoint.

    Args:
        checkpoint: path of the checkpoint.
        rest: content of the checkpoint, as returned by `read_rest`.
        allocate: function that makes a tensor to be filled, of the name and shape of a sharded tensor: a full tensor,
            or a `DTensor` with any placement.
        alone: whether only this process reads. Otherwise, all processes must call this function.

    Returns:
        The content with the sharded tensors.

    Raises:
        ModuleNotFoundError: as for `check_can_be_sharded`.
        ValueError: if the files lack a tensor or a part of it.
    """
    check_can_be_sharded()
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    sharded: dict[str, Tensor] = {}

    def find(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            sharded[name] = tensor
        return tensor

    map_tensors(rest, find)
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        found: dict[str, Any] = {**reader.read_metadata().state_dict_metadata}
        for name, tensor in sharded.items():  # torch does not notice that a part of a tensor is missing
            if sum(chunk.sizes.numel() for chunk in found[name].chunks) != tensor.numel():
                raise ValueError(f"its files do not have all of {name}")
        tensors = {name: allocate(name, tensor) for name, tensor in sharded.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=alone)
    except (CheckpointException, Exception) as error:  # `CheckpointException` is no Exception
        raise InvalidValue(f"{checkpoint} is damaged: {reason(error)}") from None
    return map_tensors(rest, lambda name, tensor: tensors.get(name, tensor))


def check_checkpoint(checkpoint: Any) -> None:
    """Raise if a checkpoint is damaged.

    This function does not check paths that do not exist, remote addresses, streams that cannot be rewound, and shards,
    which have no checksums.

    Args:
        checkpoint: a path, or a stream.

    Raises:
        ValueError: if the file is truncated, was not written by `torch.save`, or has a wrong checksum.

    Cost:
        The file is read once. A file written with `torch.serialization.set_crc32_options(False)` has wrong checksums
        and counts as damaged.
    """
    damage = find_damage(checkpoint)
    if damage is not None:
        raise InvalidValue(f"{checkpoint} is damaged: {damage}")


def check_checkpoint_exists(name: str, checkpoint: Any) -> None:
    """Raise unless an argument is a stream, a remote address, or the path of an existing checkpoint.

    Args:
        name: name of the argument.
        checkpoint: value of the argument.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if the path is empty.
        TypeError: if the value is neither a path nor a stream.
    """
    is_stream = hasattr(checkpoint, "read") and hasattr(checkpoint, "seek")
    is_address = isinstance(checkpoint, str) and "://" in checkpoint
    if is_stream or is_address:
        return
    path = check_path(name, checkpoint)
    if not path.exists():
        raise MissingFile("must be the path of a checkpoint", argument=name, got=f"{path}, which does not exist")


def find_checkpoint(checkpoint: Path) -> Path:
    """The file of a checkpoint. For a folder, this is the best checkpoint of the newest run in it, which is logged.

    Args:
        checkpoint: a file, the folder of a run, or the folder with the runs `version_0`, `version_1` and so on. The
            newest run is the one with the highest number among those that have a file `checkpoints/best.ckpt`.

    Raises:
        FileNotFoundError: if the path does not exist, or the folder has no such file.
    """
    checkpoint = check_path("checkpoint", checkpoint, exists=True)
    if is_checkpoint(checkpoint):
        return checkpoint
    runs = [run for run in checkpoint.glob("version_*") if run.name.removeprefix("version_").isdecimal()]
    runs.sort(key=lambda run: int(run.name.removeprefix("version_")), reverse=True)
    for run in [checkpoint, *runs]:
        best = run / BEST_CHECKPOINT
        if is_checkpoint(best):
            if rank() == 0:
                print(f"The checkpoint is {best}.", file=sys.stderr)
            return best
    got = f"{checkpoint}, in which neither {BEST_CHECKPOINT} nor version_*/{BEST_CHECKPOINT} exists"
    cure = "give the path of a file, or train with ModelCheckpoint(filename='best')"
    rule = "must be a checkpoint that training wrote, or the folder of its runs"
    raise MissingFile(rule, argument="checkpoint", got=got, cure=cure)
