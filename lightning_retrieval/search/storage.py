"""A folder of files with a manifest that says which of them count, how long they are and what their checksums are.

    INDEX/manifest.json
    INDEX/files-5f0c21d4/...
    INDEX/lock

All files of one state lie in one inner folder. A change writes another inner folder beside it and then replaces the
manifest, in one step of the file system: whoever opens the folder finds the old state or the new one, whole. What the
manifest does not name is taken away after that, and again at the next change where a process was ended in between. One
process at a time changes the folder: it holds the lock.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORMAT, VERSION = "lightning-retrieval index", 1
MANIFEST, LOCK = "manifest.json", "lock"


def check_folder(who: str, folder: Path) -> None:
    """Refuse a folder to write to that holds anything but an index, whole, damaged or begun.

    Raises:
        ValueError: if it does, or is a file.
    """
    if folder.is_dir():
        manifest = folder / MANIFEST
        inner = [path for path in folder.iterdir() if _is_inner(path)]
        foreign = [path for path in folder.iterdir() if path not in inner and path not in (manifest, folder / LOCK)]
        ours = _has_our_format(manifest)
        if ours or (ours is None and not foreign and (inner or not manifest.exists())):
            return
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"{who}: the index must be written to a new folder or over an index, got {folder}, which is something "
            "else; give another path."
        )


def write_folder(
    who: str, folder: Path, writers: Mapping[str, Callable[[Path], None]], settings: Mapping[str, Any]
) -> None:
    """Make the folder hold these files and settings, and none of the files of before.

    Args:
        who: who speaks in error messages.
        folder: made where missing.
        writers: by file name, what writes the file to a path.
        settings: plain values, kept in the manifest.

    Raises:
        ValueError: if the folder holds anything but an index, or another process writes to it.
    """
    check_folder(who, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(who, folder):
        inner = folder / f"files-{secrets.token_hex(4)}"
        inner.mkdir()
        partial = inner / MANIFEST
        try:
            for name, write in writers.items():
                write(inner / name)
            files = {f"{inner.name}/{name}": _seal(inner / name) for name in writers}
            body = {"files": files, "settings": dict(settings)}
            manifest = {"format": FORMAT, "version": VERSION, "sha256": _digest(body), **body}
            partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            for path in (*inner.iterdir(), inner, folder):  # on the disk before the manifest names them
                _flush(path)
        except BaseException:
            shutil.rmtree(inner, ignore_errors=True)
            raise
        os.replace(partial, folder / MANIFEST)
        _flush(folder)
        for other in folder.iterdir():
            if other != inner and _is_inner(other):
                shutil.rmtree(other, ignore_errors=True)


def read_folder(who: str, folder: Path, verify: bool) -> tuple[dict[str, Path], dict[str, Any]]:
    """The files, by name, and the settings.

    Args:
        who: who speaks in error messages.
        folder: what `write_folder` wrote.
        verify: read all files once and compare their checksums; else only their lengths are compared.

    Raises:
        FileNotFoundError: if the folder or one of its files is not there.
        ValueError: if it is no index, is damaged, or is of a format that is not known here.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{who}: the index must be a folder with {MANIFEST} in it, got {folder}.")
    rebuild = "build the index again"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{who}: {path} is damaged, it is no JSON; {rebuild}.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{who}: {path} is not that of an index; give the folder that the index was saved to.")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{who}: {folder} has format version {manifest.get('version')!r}, but this release knows {VERSION}; "
            f"{rebuild}, or use the release that wrote it."
        )
    body = {name: manifest.get(name) for name in ("files", "settings")}
    if _digest(body) != manifest.get("sha256"):
        raise ValueError(f"{who}: {path} is damaged, its checksum is not the one written in it; {rebuild}.")
    found: dict[str, Path] = {}
    for name, seal in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{who}: {folder} is damaged, {name} is missing; {rebuild}.")
        size = file.stat().st_size
        if size != seal["bytes"]:
            raise ValueError(f"{who}: {file} is damaged, it has {size} bytes instead of {seal['bytes']}; {rebuild}.")
        if verify and _seal(file) != seal:
            raise ValueError(f"{who}: {file} is damaged, its checksum is not that of the manifest; {rebuild}.")
        found[file.name] = file
    return found, manifest["settings"]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _locked(who: str, folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system takes back from a process that ends."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{who}: {folder} is being written to by another process; wait for its end, or give another path."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def _is_inner(path: Path) -> bool:
    return bool(re.fullmatch("files-[0-9a-f]{8}", path.name)) and path.is_dir()


def _has_our_format(manifest: Path) -> bool | None:
    """Whether it is the manifest of an index; None where it is not there or is no JSON, which a damaged one may be."""
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return isinstance(found, dict) and found.get("format") == FORMAT


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
