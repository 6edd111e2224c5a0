"""Large arrays in files that all processes of a machine map, so that its memory holds them once.

The files are in a folder of the user in the folder for temporary files, see `TMPDIR`. Each process that uses arrays
holds a shared lock on their folder, which the operating system releases however the process ends. The last one deletes
them. What is left of processes that were killed is deleted as soon as other arrays are shared.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.context import get_spawning_popen
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARED_FROM = 1 << 23  # bytes; smaller arrays are kept in the memory of each process


_LOCK = "lock"


Arrays = Mapping[str, NDArray[Any]]


def is_large(arrays: Arrays) -> bool:
    """Whether arrays are so large that processes should share them."""
    return sum(array.nbytes for array in arrays.values()) >= SHARED_FROM


def digest_of_arrays(arrays: Arrays) -> str:
    """A hash of the names, types and values of arrays, the same in each process and on each machine."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class SharedArrays(Mapping[str, NDArray[Any]]):
    """Named arrays in the files of a folder, mapped into memory.

    Writing to an array changes it in this process only. A process that is spawned, such as the worker of a data loader,
    is sent the path of the folder; any other pickle holds the arrays themselves.

    Args:
        path: the folder, with a file `<name>.npy` for each array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._arrays = {file.stem: _map(file) for file in sorted(path.iterdir())}
        except BaseException:
            os.close(descriptor)
            raise
        Finalize(self, _release, (descriptor, path), exitpriority=0)  # not called in a process that is forked later

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            return SharedArrays, (self.path,)
        return dict, (self._arrays,)


def share_arrays(owner: str, key: str, make: Callable[[], Arrays]) -> SharedArrays | None:
    """Arrays that all processes of this machine map; None, with a warning, if they cannot be written to files.

    Args:
        owner: prefix of the warning.
        key: a name that determines the arrays; with the same one, processes get the same arrays.
        make: creates the arrays. Of several processes one calls it, and the others wait.
    """
    try:
        folder = Path(tempfile.gettempdir(), f"lightning-retrieval-{os.getuid()}")
        with _only_process(folder):
            _delete_unused(folder)
            found = _open(folder / key)
            if found is None:
                _write(folder / key, make())
                found = SharedArrays(folder / key)
            return found
    except OSError as error:
        warnings.warn(
            f"{owner}: each process keeps its own copy of the list of images, because it cannot be written to a "
            f"temporary file ({error}); set TMPDIR to a folder with enough space.",
            stacklevel=2,
        )
        return None


@contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Create the folder, and wait until no other process holds its lock."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise OSError(f"{folder} is not a folder of this user")
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile may have the file open


def _delete_unused(folder: Path) -> None:
    """Delete what processes that were killed have left."""
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                _delete_if_unused(descriptor, path)
            finally:
                os.close(descriptor)


def _delete_if_unused(descriptor: int, path: Path) -> None:
    """Delete the folder that a descriptor has open; raises a BlockingIOError if another process uses its arrays."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shutil.rmtree(path)


def _release(descriptor: int, path: Path) -> None:
    """Delete the files of arrays that this process no longer uses, if no other process does."""
    with suppress(OSError):
        _delete_if_unused(descriptor, path)
    os.close(descriptor)


def _open(path: Path) -> SharedArrays | None:
    """The arrays in a folder, or None if there is none, also because its last user is just deleting it."""
    try:
        return SharedArrays(path)
    except FileNotFoundError:
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.mkdir(mode=0o700)
    try:
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array, allow_pickle=False)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _map(file: Path) -> NDArray[Any]:
    """The array in a file, whose pages are copied if they are changed."""
    return np.asarray(np.load(file, mmap_mode="c", allow_pickle=False))
