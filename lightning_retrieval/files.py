"""Files that survive a crash: atomic writes, checksums, manifests, and a lock for a single writer.

All files whose loss would matter are written by `new_file`: such a file always has either its complete old content or
its complete new content.

Files are renamed, replaced and deleted by `rename`, `remove` and `delete` only. Windows does none of these with a file
that is open or mapped into memory, so the caller has closed it before.
"""

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from lightning_retrieval.invalid import InvalidValue, MissingFile, NotWritten
from lightning_retrieval.paths import cure_of_missing

LOCK = "lock"
HELD = ".held"  # suffix of the file that is there while a lock is held on Windows
TEMPORARY = ".tmp"  # suffix of a file that is being written
# Errors that do not depend on what is written: the disk is full, or the user may not write there.
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
# Matches absolute paths of any system, and paths with a part `..`.
_OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(^|[/\\])\.\.([/\\]|$)")
# Matches relative paths that are, on Windows, on another drive, or that of a device.
_DEVICE_OF_WINDOWS = re.compile(
    r"^[A-Z]:|(^|[/\\])(CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9]) *(\.[^/\\]*)?([/\\]|$)", re.IGNORECASE
)
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
SECONDS_IN_USE = 5.0  # how long Windows may refuse to change a file, because a virus scanner or a reader has it open
WORKING_FOLDER, EXCHANGE = -100, 2  # `AT_FDCWD` and `RENAME_EXCHANGE` of Linux


def _locks_of_posix() -> Any:
    """The module `fcntl`; None on Windows."""
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


_fcntl = _locks_of_posix()
POSIX = _fcntl is not None
"""Whether files that are open or mapped into memory can be replaced and deleted, and folders can be flushed."""

_locks: set[IO[str]] = set()  # open files whose locks this process holds


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Context with a new file that replaces `path` on exit.

    The content is flushed to the disk before the file gets its name. If the block raises, `path` does not change. Only
    a killed process leaves a temporary file, named `.<random>.tmp`.

    Raises:
        OSError: if the file cannot be written.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            yield file
        move_file(temporary, path)
    except BaseException:
        delete(temporary)
        raise


def temporary_path(path: Path) -> Path:
    """A new path in the same folder, `.<random>.tmp`, for what will replace `path` when it is complete."""
    return path.with_name(f".{os.urandom(8).hex()}{TEMPORARY}")


def move_file(source: Path, path: Path) -> None:
    """Flush a new file to the disk, then replace `path` on the same file system by it."""
    flush(source)
    rename(source, path)
    flush(path.parent)


def rename(source: Path, path: Path) -> None:
    """Give a file or a folder the name `path` on the same file system; a file replaces the file of this name."""
    _change(partial(os.replace, source, path))


def remove(path: Path) -> None:
    """Delete a file or a link, if it exists."""
    _change(partial(path.unlink, missing_ok=True))


def _change(change: Callable[[], object]) -> None:
    """Rename or delete a file. On Windows, wait for other programs that have it open for a moment."""
    deadline = time.monotonic() + SECONDS_IN_USE
    while not POSIX and time.monotonic() < deadline:
        with suppress(PermissionError):
            change()
            return
        time.sleep(0.05)
    change()


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders of one file system in one step.

    Returns:
        False if the system or the file system (such as NFS) cannot do this; then nothing has changed.

    Raises:
        OSError: if the names cannot be changed.
    """
    if not POSIX:
        return False
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is None:
        return False
    if exchange(WORKING_FOLDER, os.fsencode(first), WORKING_FOLDER, os.fsencode(second), EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def delete(path: Path) -> None:
    """Delete a file or a folder that no other file refers to. What cannot be deleted does no harm."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        remove(path)


@contextmanager
def new_files(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Context with an empty folder, whose files replace all files of these names in `folder` on exit.

    The two folders exchange their names in one step, where the new one has links to all other files. If the system
    cannot do that, the earlier files are deleted first, and the new ones get their names in reverse order: a killed
    process leaves some files of one version, and the first file only if all others are there, but never a mix.

    Args:
        folder: path of the folder, which is created if it does not exist.
        names: names of all files that this writer may write; first the one without which the others are not used.

    Raises:
        OSError: if a folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    new = temporary_path(folder / "new")
    new.mkdir()
    try:
        yield new
        for path in (*new.iterdir(), new):
            flush(path)
        if not _exchange_folders(new, folder.resolve(), names):
            _replace_files(new, folder, names)
    finally:
        delete(new)


def _exchange_folders(new: Path, folder: Path, names: Sequence[str]) -> bool:
    """Let a new folder within another one take its name, with all files that have other names; False if it cannot."""
    owners = {(new.stat().st_uid, new.stat().st_gid), (folder.stat().st_uid, folder.stat().st_gid)}
    beside = temporary_path(folder)
    try:
        if len(owners) > 1 or Path.cwd().is_relative_to(folder):
            return False
        for path in folder.iterdir():
            if path.name not in names and not is_temporary(path):
                _link(path, new / path.name)
        shutil.copymode(folder, new)
        rename(new, beside)
    except OSError:  # the folder above cannot be written to, or is on another file system, or files have no links
        return False
    if not exchange_names(beside, folder):
        rename(beside, new)
        return False
    flush(folder.parent)
    for path in beside.iterdir():  # another process may have written a file since the links were made
        if path.name not in names and not is_temporary(path) and not os.path.lexists(folder / path.name):
            rename(path, folder / path.name)
    delete(beside)
    return True


def _link(path: Path, target: Path) -> None:
    """Give a file, or all files in a folder, a second name."""
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, target, symlinks=True, copy_function=partial(os.link, follow_symlinks=False))
    else:
        os.link(path, target, follow_symlinks=False)


def _replace_files(new: Path, folder: Path, names: Sequence[str]) -> None:
    """Delete the files of these names, and give new ones their names in reverse order."""
    written = os.listdir(new)  # raises if another process has replaced `folder`, and `new` with it
    for name in names:
        remove(folder / name)
    for name in reversed(names):
        if name in written:
            move_file(new / name, folder / name)


def is_temporary(path: Path) -> bool:
    """Whether a path was made by `temporary_path`."""
    return bool(re.fullmatch(rf"\.[0-9a-f]{{16}}{TEMPORARY}", path.name))


def delete_temporary_files(folder: Path) -> None:
    """Delete the temporary files of killed processes in a folder to which no other process writes."""
    for path in folder.iterdir():
        if is_temporary(path):
            delete(path)


def flush(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk.

    Windows and some file systems, such as those of SMB, cannot flush a folder.
    """
    if path.is_dir():
        if POSIX:
            with suppress(OSError):
                _flush(path, os.O_RDONLY)
    else:
        _flush(path, os.O_RDWR)  # Windows flushes only what is open for writing


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leaves_root(path: str) -> bool:
    """Whether a path is absolute or contains `..`, so that it may lie outside the folder that it is relative to.

    On Windows, that also holds for a path such as `d:x`, and for names of devices, such as `aux.txt`.
    """
    return _OUTSIDE.search(path) is not None or (not POSIX and _DEVICE_OF_WINDOWS.search(path) is not None)


def is_of_others(path: Path, own_format: str) -> bool:
    """Whether a JSON file is that of another program: a dict whose `format` is not the given one.

    A file that is missing or damaged may be replaced.

    Args:
        path: path of the file.
        own_format: the value of `format` that this library writes.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") != own_format


def reason(error: BaseException) -> str:
    """The message of an error as one line; for an error of the operating system, only its text."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Context in which a failure to write is raised as one sentence with the path and the reason.

    Args:
        what: path of the file or folder, which the block must leave unchanged if it fails.

    Raises:
        OSError: in place of an `OSError`, or of a `RuntimeError` that torch raises because of one.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if error_of_system(error) is None:
            raise
        raise not_written(what, error) from None


def not_written(what: object, error: BaseException) -> NotWritten:
    """The error for a file that cannot be written.

    Args:
        what: path of the file, which is unchanged.
        error: the error that has been raised, perhaps because of an error of the operating system.
    """
    cause = error_of_system(error) or error
    return NotWritten(f"{what} cannot be written ({reason(cause)}); what was saved there before is unchanged.")


def error_of_system(error: BaseException) -> OSError | None:
    """The error of the operating system that has led to an error; None if it has another cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause


def is_system_error(error: BaseException) -> bool:
    """Whether an error while a file is read says nothing about its content, such as a missing permission.

    EINVAL is not counted: zipfile raises it for positions in damaged archives.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is not read into memory as a whole."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class DigestStream:
    """A write-only binary stream that computes the SHA-256 of its content.

    The stream has no file descriptor, so NumPy cannot bypass `write`.

    Args:
        stream: the stream to write to.
    """

    closed = False  # pyarrow asks for it

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.error: OSError | None = None
        """The first error of the stream, which faiss does not report."""

    def write(self, data: Any) -> int:
        """Write an object with the buffer protocol, such as `bytes`, and return its number of bytes."""
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


def write_verified(path: Path, write: Callable[[DigestStream], object]) -> str:
    """Write a file with `new_file`, and verify its content on the disk before it gets its name.

    Args:
        path: path of the file.
        write: function that writes the content to a stream.

    Returns:
        SHA-256 of the file.

    Raises:
        OSError: if the file cannot be written completely.
    """
    with writing(path), new_file(path) as file:
        stream = DigestStream(file)
        try:
            write(stream)
        finally:
            if stream.error is not None:
                raise stream.error
        file.flush()
        temporary = Path(file.name)
        flush(temporary)
        if file_digest(temporary) != stream.hexdigest():
            raise OSError("not all of it has reached the disk")
    return stream.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """A JSON file that describes the other files in its folder, with a checksum of its own values.

    Args:
        content: the kind of content of the folder, such as `"index"`.
        name: file name.
        command: the command of `lightning-retrieval` that writes such a folder.
        cure: advice if the file is damaged.
        version: version of the format.
    """

    content: str
    name: str
    command: str
    cure: str
    version: int = 1

    @property
    def format(self) -> str:
        """The value of `format` in the file."""
        return f"lightning-retrieval {self.content}"

    def encode(self, values: Mapping[str, Any]) -> bytes:
        """The content of a file with these plain values."""
        header = {"format": self.format, "version": self.version, "sha256": _digest_of_values(values)}
        return (json.dumps({**header, **values}, indent=1) + "\n").encode()

    def check_exists(self, folder: Path) -> Path:
        """Return the path of the file; raise unless a folder has it.

        Raises:
            FileNotFoundError: if the folder has no such file.
        """
        path = folder / self.name
        if not path.is_file():
            rule = f"the {self.content} must be a folder with {self.name} in it"
            cure = cure_of_missing(folder) or f"`lightning-retrieval {self.command}` writes one"
            raise MissingFile(rule, got=folder, cure=cure)
        return path

    def read(self, folder: Path) -> dict[str, Any]:
        """The values in the file.

        Raises:
            FileNotFoundError: if the folder has no such file.
            ValueError: if the file is damaged, or has another format or version.
        """
        path = self.check_exists(folder)
        try:
            values = dict(json.loads(path.read_bytes()))
            header = {name: values.pop(name, None) for name in ("format", "version", "sha256")}
            digest = _digest_of_values(values)
        except (TypeError, ValueError):
            raise InvalidValue(f"{path} is damaged, it is not valid JSON", cure=self.cure) from None
        written = f"{header['format']!r} of version {header['version']!r}"
        if (header["format"], header["version"]) != (self.format, self.version):
            rule = f"{path} must be a manifest of the format {self.format!r} of version {self.version}"
            raise InvalidValue(rule, got=written, cure="write it again, or give another folder")
        if header["sha256"] != digest:
            raise InvalidValue(f"{path} is damaged, its checksum is not the one written in it", cure=self.cure)
        return values


def _digest_of_values(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def folder_lock(folder: Path, name: str = LOCK, *, shared: bool = False) -> Iterator[Callable[[], None]]:
    """Context that holds the lock of a folder; the operating system releases it if the process ends.

    Forked children, such as data-loader workers, do not hold the lock, because they may outlive a killed process.
    Windows has no shared locks: only the process that took the lock first holds it.

    Args:
        folder: an existing folder.
        name: name of the lock file in the folder.
        shared: whether the lock is shared with other processes that also pass `shared=True`.

    Yields:
        A function that shares the lock from then on.

    Raises:
        ValueError: if another process holds the lock.
        OSError: if the lock file cannot be opened for writing.
    """
    take = _lock_of_posix if POSIX else _lock_of_windows
    with take(folder, name, shared=shared) as share:
        yield share


@contextmanager
def _lock_of_posix(folder: Path, name: str, *, shared: bool) -> Iterator[Callable[[], None]]:
    with writing(folder / name):
        # A link is not followed, since it may lead out of the folder.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        opened = os.fdopen(os.open(folder / name, flags, 0o666), "a+")
    with opened as file:
        _take_lock(folder, file, shared=shared)
        _locks.add(file)
        try:
            yield partial(_take_lock, folder, file, shared=True)
        finally:
            _locks.discard(file)


@contextmanager
def _lock_of_windows(folder: Path, name: str, *, shared: bool) -> Iterator[Callable[[], None]]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f"{name}{HELD}", timeout=0, thread_local=False)
    with writing(folder / name):
        (folder / name).touch()  # so that a folder has the same files on every system
        try:
            if not shared:
                lock.acquire()
        except Timeout:  # an `OSError`
            raise _in_use(folder) from None
    try:
        yield lambda: None
    finally:
        lock.release()


def is_lock(path: Path, name: str = LOCK) -> bool:
    """Whether a path is that of a file of `folder_lock`."""
    return path.name in (name, f"{name}{HELD}")


def _close_locks() -> None:
    """In a forked child, close the files whose locks belong to the parent.

    Their descriptors are redirected to /dev/null, so that closing the Python file objects later closes no other file.
    """
    for file in _locks:
        other = os.open(os.devnull, os.O_RDWR)
        os.dup2(other, file.fileno(), inheritable=False)
        os.close(other)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks)


def _take_lock(folder: Path, file: IO[str], *, shared: bool) -> None:
    """Lock an open file, or convert its lock between shared and exclusive."""
    kind = _fcntl.LOCK_EX
    if shared:
        kind = _fcntl.LOCK_SH
    try:
        _fcntl.flock(file, kind | _fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder) from None
    except OSError:  # a file system without locks
        pass


def _in_use(folder: Path) -> InvalidValue:
    """The error for a folder whose lock another process holds."""
    rule = f"{folder} is being written to by another process"
    return InvalidValue(rule, cure="wait until it has finished, or give another path")
