"""Files that must survive a crash: checksums, flushing to the disk, and a lock for one writer at a time."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"
CHUNK = 1 << 20  # bytes read at a time


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(owner: str, folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the operating system releases it if the process ends.

    Args:
        owner: prefix of error messages.
        folder: an existing folder.

    Raises:
        ValueError: if another process holds the lock.
    """
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{owner}: {folder} is being written to by another process; wait until it has finished, or give "
                "another path."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
