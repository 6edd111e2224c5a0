"""Files that must survive a crash: checksums, flushing to the disk, and a lock for one writer at a time."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

LOCK = "lock"


CHUNK = 1 << 20  # bytes read at a time


UNCHANGED = "what was saved there before is unchanged, so free space on the disk and save again"


_locks: set[IO[str]] = set()  # open files whose locks this process holds


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class DigestStream:
    """A binary stream that only writes, and computes the SHA-256 of what it was given.

    It has no file descriptor, so NumPy writes through it, too, and not past it.

    Args:
        stream: where the bytes go.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.error: OSError | None = None
        """The first error of the stream; faiss' own error does not say what it was."""

    def write(self, data: Any) -> int:
        """Write all bytes of an object with the buffer protocol, such as `bytes` or pyarrow's buffers; their number."""
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self._digest.update(data)
        return len(data)

    def hexdigest(self) -> str:
        """SHA-256 of all bytes so far."""
        return self._digest.hexdigest()


def write_verified(owner: str, path: Path, write: Callable[[DigestStream], None]) -> str:
    """Write a file, wait until it is on the disk, and compare it with what was to be written.

    Args:
        owner: prefix of error messages.
        path: of the new file.
        write: writes the content to a stream.

    Returns:
        SHA-256 of the file.

    Raises:
        OSError: if the file cannot be written completely.
    """
    digest = None
    try:
        with path.open("wb") as file:
            digest = DigestStream(file)
            write(digest)
        flush(path)
    except (OSError, RuntimeError) as error:
        cause = error
        if digest is not None and digest.error is not None:
            cause = digest.error
        raise OSError(f"{owner}: {path} cannot be written ({reason(cause)}); {UNCHANGED}.") from None
    if file_digest(path) != digest.hexdigest():
        raise OSError(f"{owner}: {path} was not written completely; {UNCHANGED}.")
    return digest.hexdigest()


def reason(error: BaseException) -> str:
    """The message of an error on one line; of an error of the operating system, its text alone."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return " ".join(text.split()) or type(error).__name__


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(owner: str, folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[IO[str]]:
    """Hold the lock of a folder; the operating system releases it if the process ends.

    Forked children, such as the workers of a data loader, do not hold it: they may outlive a process that is killed.

    Args:
        owner: prefix of error messages.
        folder: an existing folder.
        name: of the file in it that is locked.
        shared: hold it together with other processes that share it.

    Raises:
        ValueError: if another process holds the lock.
    """
    with (folder / name).open("a+") as file:
        take_lock(owner, folder, file, shared=shared)
        _locks.add(file)
        try:
            yield file
        finally:
            _locks.discard(file)


def _close_locks() -> None:
    """In a forked child, close the files whose locks belong to its parent.

    Another file takes their descriptors, so that whoever closes the objects of Python closes nothing else.
    """
    for file in _locks:
        other = os.open(os.devnull, os.O_RDWR)
        os.dup2(other, file.fileno(), inheritable=False)
        os.close(other)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks)


def take_lock(owner: str, folder: Path, file: IO[str], *, shared: bool) -> None:
    """Lock the open file of `folder_lock`, or turn the lock into one that is shared, or that is not."""
    kind = fcntl.LOCK_EX
    if shared:
        kind = fcntl.LOCK_SH
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{owner}: {folder} is being written to by another process; wait until it has finished, or give "
            "another path."
        ) from None
    except OSError:  # a file system without locks
        pass
