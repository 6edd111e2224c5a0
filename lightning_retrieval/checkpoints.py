"""Checkpoints on disk: a file that `torch.save` wrote, or a folder with the shards of several processes.

- `torch.save` writes a zip archive with a checksum of each record. `torch.load` does not compare the checksums, and a
  flipped bit would silently change a weight. So files are verified before they are loaded.
- A sharded checkpoint is a folder. PyTorch's distributed checkpoint lets each process write its shards of the sharded
  tensors to a file of its own. These files have the safetensors format, because the reader of PyTorch's other format
  unpickles objects that can run code. Everything else is in the file `rest.pt`, in which tensors on the meta device
  stand for the sharded tensors. The manifest `checkpoint.json` names these files, with their checksums. It is written
  last, so a folder whose manifest exists is complete.
- A new checkpoint is written beside the earlier one, and then gets its name in one step. A file and a folder exchange
  their names; a system that cannot do this moves the earlier one away first. If the process is killed in between, the
  new one is complete and is called `NAME.new`; whatever reads the checkpoint `NAME` then gives it its name.
"""

import copy
import errno
import inspect
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.checks import check_path
from lightning_retrieval.distributed import rank, together
from lightning_retrieval.files import (
    POSIX,
    Manifest,
    delete,
    error_of_system,
    exchange_names,
    file_digest,
    flush,
    is_system_error,
    is_temporary,
    move_file,
    new_file,
    not_written,
    reason,
    remove,
    rename,
    temporary_path,
    writing,
)
from lightning_retrieval.first_checks import PENDING, RULE_OF_CHECKPOINT, check_model_exists
from lightning_retrieval.invalid import InvalidValue, MissingFile, MissingPackage
from lightning_retrieval.optional_packages import optional_import

ZIP_START = b"PK\x03\x04"
LEGACY_START = b"\x80\x02"  # files of torch.save before torch 1.6, which have no checksums
MANIFEST = Manifest(content="sharded checkpoint", name="checkpoint.json", command="fit", cure="take another checkpoint")
BEST_CHECKPOINT = Path("checkpoints", "best.ckpt")  # in the folder of a run
# LightningCLI stores one of these names in the hyperparameters.
INSTANTIATORS = ("pytorch_lightning.cli.instantiate_module", "lightning.pytorch.cli.instantiate_module")
REST = "rest.pt"
MOST_DEPTH, MOST_SHARED = 100, 100_000  # limits for the containers in a checkpoint, and for repeated visits of one
MOST_REPEATED_BYTES = 2**26  # by which the tensors of a checkpoint may be larger than what is stored
OTHER_FILES = "other-files-"  # start of the name of a folder with a user's files; Lightning looks for "last" in names
SAVED = re.compile(r"[0-9a-f]{16}")  # name of the folder with the files that were saved together
PART = re.compile(rf"{re.escape(REST)}|shard-[0-9]{{5,}}-model-00001-of-00001\.safetensors")  # name of a file in it
FILE = re.compile(rf"{SAVED.pattern}/({PART.pattern})")


def is_sharded_checkpoint(path: Any) -> bool:
    """Whether a path is that of a complete sharded checkpoint."""
    return isinstance(path, (str, Path)) and Path(path, MANIFEST.name).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a file or of a sharded checkpoint."""
    finish_replacement(path)
    return path.is_file() or is_sharded_checkpoint(path)


def holds_checkpoint(path: Path) -> bool:
    """Whether a path has what `torch.save` or `write_sharded_checkpoint` wrote, judged by its content."""
    try:
        if path.is_dir():
            return bool(_digests(path))
        if not path.is_file():
            return False
        with zipfile.ZipFile(path) as archive:
            return any(re.fullmatch("[^/]+/data.pkl", name) for name in archive.namelist())
    except Exception:  # a file of another kind can raise errors of many types
        return False


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, which may not exist, by the suffix of their names."""
    for pending in folder.glob(f"*.ckpt{PENDING}"):
        finish_replacement(pending.with_suffix(""))
    return sorted(folder.glob("*.ckpt"))


def saved_at(path: Path) -> int:
    """When a checkpoint was saved, in nanoseconds."""
    if is_sharded_checkpoint(path):
        path = path / MANIFEST.name
    return path.stat().st_mtime_ns


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of a checkpoint; that of the manifest, which has the checksums of all files, if it is sharded."""
    if is_sharded_checkpoint(path):
        path = path / MANIFEST.name
    return file_digest(path)


def checksums_of(checkpoint: Path) -> dict[str, str | int]:
    """The checksums that a checkpoint has of its parts, by their names."""
    if is_sharded_checkpoint(checkpoint):
        return {**_digests(checkpoint)}
    with zipfile.ZipFile(checkpoint) as archive:
        return {record.filename: record.CRC for record in archive.infolist()}


def find_damage(checkpoint: Any, part: slice = slice(None)) -> str | None:
    """A description of the damage of a checkpoint; None if it is intact, or has no checksums.

    Args:
        checkpoint: a path, or a stream.
        part: of a sharded checkpoint, the files that are verified.
    """
    if isinstance(checkpoint, (str, Path)):
        path = Path(checkpoint)
        finish_replacement(path)
        if path.is_dir():
            return _damage_of_folder(path, part)
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            return _damage_of_file(stream)
    if not (hasattr(checkpoint, "seekable") and checkpoint.seekable()):
        return None
    position = checkpoint.tell()
    damage = _damage_of_file(checkpoint)
    checkpoint.seek(position)
    return damage


def _damage_of_file(stream: Any) -> str | None:
    """A description of the damage of a file that `torch.save` wrote; None if it is intact."""
    start = stream.read(len(ZIP_START))
    if start.startswith(LEGACY_START):
        return None
    if start != ZIP_START:
        return "its first bytes are not those of a checkpoint"
    try:
        size = stream.seek(0, os.SEEK_END)
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                return "it has compressed records, which torch.save does not write"
            if sum(record.file_size for record in records) > size:
                return "its records claim to be larger than the file"
            record = archive.testzip()
    except Exception as error:  # a damaged archive can raise errors of many types
        if is_system_error(error):
            raise
        text = " ".join(str(error).split())
        return f"it is no complete zip archive ({text or type(error).__name__})"
    if record is not None:
        return f"the checksum of its record {record} is wrong"
    return None


def _damage_of_folder(folder: Path, part: slice) -> str | None:
    """A description of the damage of a sharded checkpoint; None if it is intact."""
    if not is_sharded_checkpoint(folder):
        return f"it is a folder without {MANIFEST.name}, because it was not saved completely, or is no checkpoint"
    try:
        digests = _digests(folder)
    except ValueError:
        return f"its {MANIFEST.name} is not as it was written"
    for file in _saved_folder(folder, digests).glob("*.safetensors"):
        if f"{file.parent.name}/{file.name}" not in digests:
            return f"its {MANIFEST.name} does not name its file {file.name}"
    for name, digest in sorted(digests.items())[part]:
        if not (folder / name).is_file():
            return f"it has no file {name}"
        if file_digest(folder / name) != digest:
            return f"the checksum of its file {name} is wrong"
    return None


def _digests(folder: Path) -> dict[str, str]:
    """The checksums in the manifest of a sharded checkpoint by file name.

    Raises:
        ValueError: if the manifest is damaged, or does not name the files of one saved checkpoint.
    """
    digests = MANIFEST.read(folder).get("files")
    if not isinstance(digests, dict) or not all(map(FILE.fullmatch, digests)):
        raise ValueError(f"{folder / MANIFEST.name} must have checksums by file names.")
    saved = {name.partition("/")[0] for name in digests}
    if len(saved) != 1 or f"{min(saved)}/{REST}" not in digests:
        raise ValueError(f"{folder / MANIFEST.name} must name the files of one saved checkpoint.")
    return digests


def _saved_folder(folder: Path, digests: dict[str, str]) -> Path:
    """The folder within a sharded checkpoint that has the files whose checksums are given."""
    return folder / min(digests).partition("/")[0]


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


def check_content(content: Any) -> None:
    """Raise if a checkpoint would take more memory or time than its file has bytes.

    A tensor can be a view that repeats a few stored values any number of times, and a list can contain itself.

    Args:
        content: content of the checkpoint, as read by `torch.load`.

    Raises:
        ValueError: if large tensors are larger than their storage, or containers are nested too deeply.
    """
    pending, visited, shared, repeated = [(content, 0)], set[int](), 0, 0
    while pending:
        item, depth = pending.pop()
        if isinstance(item, Tensor):
            repeated += _repeated_bytes(item)
        elif isinstance(item, (dict, list, tuple, set)):
            shared += id(item) in visited
            visited.add(id(item))
            parts: Any = item
            if isinstance(item, dict):
                parts = item.values()
            pending += [(value, depth + 1) for value in parts]
        if depth > MOST_DEPTH or shared > MOST_SHARED:  # lists that share lists may expand exponentially
            rule = "the checkpoint has lists or dicts that are nested too deeply"
            raise InvalidValue(rule, cure="take another one")
        if repeated > MOST_REPEATED_BYTES:
            rule = f"the checkpoint has a tensor of the shape {tuple(item.shape)}, of which the file stores only a part"
            raise InvalidValue(rule, cure="take another checkpoint")


def _repeated_bytes(tensor: Tensor) -> int:
    """The number of bytes by which a tensor is larger than its storage."""
    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "full_tensor"):
        return 0
    stored: int = tensor.untyped_storage().nbytes()
    return max(0, tensor.numel() * tensor.element_size() - stored)


def write_checkpoint(path: Path, content: Any) -> None:
    """Write a checkpoint of one file. An earlier checkpoint, a file or a folder, is replaced when it is complete.

    Args:
        path: path of the file; its folder is created if it does not exist.
        content: the checkpoint.

    Raises:
        OSError: if the file cannot be written; an earlier checkpoint is unchanged.
    """
    new = temporary_path(path)
    with writing(f"the checkpoint {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _save(content, new)
            _give_name(new, path)
        except BaseException:
            delete(new)
            raise


def _save(content: Any, path: Path) -> None:
    """Write a file with `torch.save`. An error of the operating system is raised as such."""
    with path.open("xb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            raise error_of_system(error) or error from None


def _give_name(new: Path, path: Path) -> None:
    """Replace what is at a path by a complete checkpoint; a file and a sharded checkpoint may replace each other."""
    finish_replacement(path)
    is_folder = path.is_dir() and not path.is_symlink()
    is_of_one_kind = not os.path.lexists(path) or is_folder == new.is_dir()
    if is_of_one_kind or (is_folder and not holds_checkpoint(path)):  # in the second case, this raises
        move_file(new, path)
        return
    if not exchange_names(new, path):
        pending = path.with_name(path.name + PENDING)
        if holds_checkpoint(pending):  # a process was killed before it moved the earlier one away
            _remove_replaced(pending)
        if os.path.lexists(pending):
            raise FileExistsError(errno.EEXIST, f"{pending} is no checkpoint", str(pending))
        rename(new, pending)
        rename(path, new)
        rename(pending, path)
    with suppress(OSError):  # as in `move_file`
        flush(path.parent)
    _remove_replaced(new)


def _remove_replaced(path: Path) -> None:
    """Remove a checkpoint whose name another one has; what else a user has put into its folder gets a clear name."""
    if not is_sharded_checkpoint(path):
        delete(path)
        return
    remove_sharded_checkpoint(path)
    if path.is_dir():
        others = path.with_name(f"{OTHER_FILES}{os.urandom(8).hex()}")
        rename(path, others)
        warnings.warn(
            f"checkpoint: a sharded checkpoint that was replaced had other files in its folder; they are in {others}.",
            stacklevel=2,
        )


def finish_replacement(path: Path) -> None:
    """Give a complete checkpoint its name if the process that replaced another one by it was killed in between."""
    pending = path.with_name(path.name + PENDING)
    if os.path.lexists(path) or not os.path.lexists(pending):
        return
    if pending.is_symlink() or not holds_checkpoint(pending):  # the file of a user or of another program
        return
    with suppress(FileNotFoundError):  # another process of the run was faster
        rename(pending, path)
        warnings.warn(
            f"checkpoint: {path} was complete but without its name, because a process was killed while it replaced an "
            "earlier checkpoint; it has its name now.",
            stacklevel=2,
        )


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
    path, saved = together(lambda: _places(path))[0]
    shards: dict[str, Tensor] = {}

    def without_shard(name: str, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        shards[name] = tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    rest = map_tensors(content, without_shard)
    try:
        together(lambda: _create(saved))
        _save_shards(saved, shards)
        digests = together(lambda: _save_rest(saved, rest))
        together(lambda: _replace(path, saved, {file: digest for of_rank in digests for file, digest in of_rank}))
    except Exception as error:  # of any type: an object in the checkpoint may fail to be pickled
        if rank() == 0 and not _is_published(path, saved):
            delete(saved)
            if saved.parent != path:
                delete(saved.parent)
        if not isinstance(error, (OSError, RuntimeError)):
            raise
        raise not_written(f"the checkpoint {path}", error) from None


def _places(path: Path) -> tuple[Path, Path]:
    """The path of a checkpoint, and that of the new folder for its files: in `path` if this is already a folder."""
    folder = path
    if not path.is_dir():
        folder = temporary_path(path)
    return path, folder / os.urandom(8).hex()


def _create(folder: Path) -> None:
    """Create a folder on the first process."""
    if rank() == 0:
        folder.mkdir(parents=True)


def _save_shards(saved: Path, shards: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(shards, storage_writer=HuggingFaceStorageWriter(str(saved), save_distributed=True))
    except CheckpointException as error:  # is no Exception
        cause, *_ = error.failures.values()
        raise RuntimeError(reason(cause[0])) from None


def _save_rest(saved: Path, rest: Any) -> list[tuple[str, str]]:
    """Save everything but the shards on the first process; names and checksums of all files of this process."""
    files = list(saved.glob(f"shard-{rank() + 1:05}-*"))
    if rank() == 0:
        _save(rest, saved / REST)
        flush(saved / REST)
        files.append(saved / REST)
    return [(f"{saved.name}/{file.name}", file_digest(file)) for file in files]


def _replace(path: Path, saved: Path, digests: dict[str, str]) -> None:
    """On the first process, write the manifest, then remove the files of earlier checkpoints in the same folder."""
    if rank() > 0:
        return
    flush(saved)
    with new_file(saved.parent / MANIFEST.name) as file:
        file.write(MANIFEST.encode({"files": digests}))
    if saved.parent != path:
        _give_name(saved.parent, path)
        return
    _remove_saved(path, but=saved)


def _remove_saved(folder: Path, but: Path | None = None) -> None:
    """Remove the folders with files that were saved together from the folder of a sharded checkpoint.

    Args:
        folder: the folder of the checkpoint.
        but: a folder in it that is kept.
    """
    for saved in folder.iterdir():
        if saved == but or saved.is_symlink() or not saved.is_dir() or not SAVED.fullmatch(saved.name):
            continue
        if all(map(PART.fullmatch, os.listdir(saved))):
            delete(saved)


def remove_sharded_checkpoint(path: Path) -> None:
    """Remove what is there of a sharded checkpoint, and its folder unless other files are in it."""
    remove(path / MANIFEST.name)
    _remove_saved(path)
    with suppress(OSError):
        path.rmdir()


def delete_temporary_checkpoints(folder: Path) -> None:
    """Delete what killed processes have left of checkpoints in a folder to which no other process writes.

    A folder with a temporary name may have been a checkpoint's before it was replaced; other files in it are kept.
    """
    for path in folder.iterdir():
        if not is_temporary(path):
            continue
        if path.is_symlink() or not path.is_dir():
            delete(path)
            continue
        delete_temporary_checkpoints(path)
        remove_sharded_checkpoint(path)


def _is_published(path: Path, saved: Path) -> bool:
    """Whether the checkpoint at a path has these files: another process may end after the first one has named them."""
    try:
        return saved.name in {name.partition("/")[0] for name in _digests(path)}
    except (OSError, ValueError):
        return False


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
    folder = Path(checkpoint)
    file = _saved_folder(folder, _digests(folder)) / REST
    return load_mapped(file, map_location, weights_only)


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
    """The content of a file that `torch.save` wrote, mapped into memory unless it is of before torch 1.6.

    On Windows, it is read into memory: a file that is mapped could not be replaced by the next checkpoint.

    Args:
        file: path of the file.
        map_location: as for `torch.load`.
        weights_only: as for `torch.load`.
    """
    with file.open("rb") as stream:
        is_archive = stream.read(len(ZIP_START)) == ZIP_START
    return torch.load(file, map_location=map_location, mmap=is_archive and POSIX, weights_only=weights_only)


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
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    sharded: dict[str, Tensor] = {}

    def find(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            sharded[name] = tensor
        return tensor

    map_tensors(rest, find)
    folder = Path(checkpoint)
    reader = HuggingFaceStorageReader(str(_saved_folder(folder, _digests(folder))))
    with _as_value_errors(folder):
        found: dict[str, Any] = {**reader.read_metadata().state_dict_metadata}
        for name, tensor in sharded.items():
            elements = sum(chunk.sizes.numel() for chunk in found[name].chunks)
            if found[name].size != tensor.shape or elements != tensor.numel():
                raise ValueError(f"{name} does not have the shape {tuple(tensor.shape)}")
    tensors = {name: allocate(name, tensor) for name, tensor in sharded.items()}
    with _as_value_errors(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=alone)
    return map_tensors(rest, lambda name, tensor: tensors.get(name, tensor))


@contextmanager
def _as_value_errors(folder: Path) -> Iterator[None]:
    """Context in which errors of reading the shards of a checkpoint become a ValueError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, Exception) as error:  # a file with a wrong header can raise errors of many types
        raise ValueError(
            f"the shards of the checkpoint {folder} are not those of its tensors ({reason(error)}); take another "
            "checkpoint."
        ) from None


def check_checkpoint(checkpoint: Any, part: slice = slice(None)) -> None:
    """Raise if a checkpoint is damaged.

    This function does not check paths that do not exist, remote addresses, streams that cannot be rewound, and files
    from before torch 1.6, which have no checksums.

    Args:
        checkpoint: a path, or a stream.
        part: as for `find_damage`.

    Raises:
        ValueError: if the file is truncated, was not written by `torch.save`, or has a wrong checksum.

    Cost:
        The file is read once. A file written with `torch.serialization.set_crc32_options(False)` has wrong checksums
        and counts as damaged.
    """
    damage = find_damage(checkpoint, part)
    if damage is not None:
        raise InvalidValue(f"the checkpoint {checkpoint} is damaged, {damage}", cure="take another checkpoint")


def check_checkpoint_exists(name: str, checkpoint: Any) -> None:
    """Raise unless an argument is a stream, a remote address, or the path of an existing checkpoint.

    Args:
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
    path = check_path(name, checkpoint)
    finish_replacement(path)
    if path.is_dir() and not is_sharded_checkpoint(path):
        raise InvalidValue("must be the path of a checkpoint", argument=name, got=f"the folder {path}")
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
    if is_checkpoint(checkpoint):
        return checkpoint
    check_model_exists(checkpoint)
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
    raise MissingFile(RULE_OF_CHECKPOINT, argument="checkpoint", got=got, cure=cure)
