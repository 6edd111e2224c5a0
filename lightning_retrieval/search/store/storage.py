"""A folder of files with a manifest that lists the valid files with their sizes and checksums.

    INDEX/manifest.json
    INDEX/files-5f0c21d4/...
    INDEX/lock

All files of one version are in one inner folder. A change writes a new inner folder and then replaces the manifest in
one atomic step, so a reader always finds a complete version, old or new. Afterwards, inner folders that are not in the
manifest are deleted. Inner folders that a killed process left are deleted before the next change, to free space. Only
one process at a time can change the folder: the process that holds the lock.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightning_retrieval.files import (
    DigestStream,
    delete,
    delete_temporary_files,
    file_digest,
    flush,
    folder_lock,
    is_lock,
    is_temporary,
    not_written,
    write_verified,
    writing,
)
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.search.formats import INDEX, REBUILD

FORMAT, MANIFEST = INDEX, INDEX.name
ATTEMPTS = 100  # maximum number of attempts to read while other processes replace the index

Writer = Callable[[DigestStream], None]
Read = TypeVar("Read")


def check_folder(folder: Path) -> None:
    """Raise unless an index may be written to a path: a new path, an empty folder, or the folder of an index.

    An index in the folder may be damaged or incomplete.

    Raises:
        ValueError: if the path is a file, or a folder that holds anything but an index.
    """
    occupied = folder.exists() or folder.is_symlink()
    if occupied and not (folder.is_dir() and _may_be_replaced(folder)):
        rule = "the index must be written to a new folder or over an index"
        raise InvalidValue(rule, got=f"{folder}, which is something else", cure="give another path")


class NewVersion:
    """The files of a new version of a folder, which replaces the old version when it is published.

    Args:
        folder: folder of the index.
        inner: empty inner folder for the files. Any other files in the inner folder must be deleted before the version
            is published.
    """

    def __init__(self, folder: Path, inner: Path) -> None:
        self.inner = inner
        self.is_published = False
        self._folder = folder
        self._fingerprints: dict[str, Any] = {}

    def write(self, name: str, write: Writer) -> Path:
        """Write a file and return its path.

        Args:
            name: file name.
            write: writes the content to a stream.

        Raises:
            OSError: if the file cannot be written completely.
        """
        path = self.inner / name
        digest = write_verified(path, write)
        self._fingerprints[f"{self.inner.name}/{name}"] = _fingerprint(path, digest)
        return path

    def write_all(self, writers: Mapping[str, Writer]) -> None:
        """Write several files.

        Args:
            writers: for each file name, a function that writes the content to a stream.
        """
        for name, write in writers.items():
            self.write(name, write)

    def publish(self, settings: Mapping[str, Any]) -> None:
        """Replace the content of the folder by the written files and these settings.

        Args:
            settings: plain values, stored in the manifest.
        """
        content = FORMAT.encode({"files": self._fingerprints, "settings": dict(settings)})
        for path in (self.inner, self._folder):
            flush(path)
        self.is_published = True  # set first, so that an interrupt cannot lead to the deletion of files in the manifest
        try:
            write_verified(self._folder / MANIFEST, lambda stream: stream.write(content))
        except OSError:
            self.is_published = False
            raise


@contextmanager
def new_version(folder: Path) -> Iterator[NewVersion]:
    """Context that locks a folder while the caller writes and publishes a new version of its files.

    If the caller raises, the folder keeps its previous content.

    Args:
        folder: folder of the index, which is created if it does not exist.

    Raises:
        ValueError: if the folder holds anything but an index, is inside a file, or another process writes to it.
    """
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        rule = "the index must be written to a folder"
        raise InvalidValue(rule, got=f"{folder}, which is inside a file", cure="give another path") from None
    except OSError as error:
        raise not_written(folder, error) from None
    with folder_lock(folder):
        delete_temporary_files(folder)
        _delete_unused(folder)
        version = NewVersion(folder, folder / f"files-{secrets.token_hex(4)}")
        with writing(folder):
            version.inner.mkdir()
        try:
            yield version
        finally:
            if not version.is_published:
                delete(version.inner)
        _delete_unused(folder)


def read_folder(folder: Path, verify: bool, read: Callable[[dict[str, Path], dict[str, Any]], Read]) -> Read:
    """Check the files of a saved index and return the result of `read`.

    If another process replaces the index meanwhile, so that files of the old version disappear, the new version is
    read.

    Args:
        folder: folder of the index.
        verify: compare checksums, which reads all files once; if False, compare only sizes.
        read: maps the files, by name, and the settings to the result; `read` may be called several times.

    Raises:
        FileNotFoundError: if the folder or one of its files does not exist.
        ValueError: if the folder does not hold an index, is damaged, or has an unknown format version.
    """
    attempt = 1
    while True:
        manifest = _read_manifest(folder)
        try:
            files = _check_files(folder, manifest["files"], verify)
            return read(files, dict(manifest["settings"]))
        except (OSError, ValueError):
            if attempt == ATTEMPTS or _read_manifest(folder) == manifest:
                raise
        attempt += 1


def _check_files(folder: Path, expected: Mapping[str, Any], verify: bool) -> dict[str, Path]:
    """The files of an index, by name; raises if one is missing or damaged."""
    files: dict[str, Path] = {}
    for name, fingerprint in expected.items():
        file = folder / name
        if not file.is_file():
            raise MissingFile(f"{folder} is damaged, {name} is missing", cure=REBUILD)
        size = file.stat().st_size
        if size != fingerprint["bytes"]:
            rule = f"{file} is damaged, it has {size} bytes instead of {fingerprint['bytes']}"
            raise InvalidValue(rule, cure=REBUILD)
        if verify and _fingerprint(file, file_digest(file)) != fingerprint:
            raise InvalidValue(f"{file} is damaged, its checksum is not that of the manifest", cure=REBUILD)
        files[file.name] = file
    return files


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of an index; raise if it is damaged or not a manifest."""
    manifest = FORMAT.read(folder)
    is_valid = manifest.keys() == {"files", "settings"} and _lists_files(manifest["files"])
    if not is_valid or not isinstance(manifest["settings"], dict):
        raise InvalidValue(f"{folder / MANIFEST} is damaged, it does not list files and settings", cure=REBUILD)
    return manifest


def _lists_files(files: Any) -> bool:
    """Whether `files` lists files of one inner folder, each with its size and checksum."""
    if not isinstance(files, dict):
        return False
    folders = set()
    for name, fingerprint in files.items():
        folder, _, file = name.partition("/")
        folders.add(folder)
        is_plain = re.fullmatch("files-[0-9a-f]{8}", folder) and re.fullmatch(r"\w[\w.-]*", file)
        if not is_plain or not isinstance(fingerprint, dict) or fingerprint.keys() != {"bytes", "sha256"}:
            return False
    return len(folders) <= 1


def _may_be_replaced(folder: Path) -> bool:
    """Whether a folder is empty or holds an index, which may be damaged or incomplete."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # the file may be the damaged manifest of an index
            has_inner = any(map(_is_inner, folder.iterdir()))
            return has_inner and not _has_other_files(folder)
        return isinstance(content, dict) and content.get("format") == FORMAT.format
    return not _has_other_files(folder)


def _has_other_files(folder: Path) -> bool:
    """Whether a folder holds files that are not part of an index."""
    for path in folder.iterdir():
        is_part = path.name == MANIFEST or is_lock(path) or _is_inner(path) or is_temporary(path)
        if not is_part:
            return True
    return False


def _is_inner(path: Path) -> bool:
    return bool(re.fullmatch("files-[0-9a-f]{8}", path.name)) and path.is_dir()


def _delete_unused(folder: Path) -> None:
    """Delete the inner folders that are not in the manifest; if the manifest cannot be read, delete nothing."""
    used = set()
    if (folder / MANIFEST).exists():
        try:
            files = _read_manifest(folder)["files"]
        except (OSError, ValueError):
            return
        used = {name.split("/")[0] for name in files}
    for path in folder.iterdir():
        if path.name not in used and _is_inner(path) and not path.is_symlink():
            delete(path)


def _fingerprint(path: Path, digest: str) -> dict[str, Any]:
    """Size and checksum of a file."""
    return {"bytes": path.stat().st_size, "sha256": digest}
