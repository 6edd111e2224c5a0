"""The file cache of the glyph images: where it is, and how a file is written completely or not at all."""

import hashlib
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder of the cache: `cache_dir`, or `lightning-retrieval` in the user's cache folder.

    Raises:
        ValueError: if `cache_dir` is an empty string.
        TypeError: if `cache_dir` is not a string, a path or None.
        FileNotFoundError: if the user has no home folder.
    """
    if cache_dir is None:
        return _expand_user(_user_cache_folder()) / "lightning-retrieval"
    if not isinstance(cache_dir, str | Path):
        raise TypeError(
            f"load_glyph_images: `cache_dir` must be a string, a path or None, got {type(cache_dir).__name__}."
        )
    if not str(cache_dir):
        raise ValueError("load_glyph_images: `cache_dir` must name a folder, got ''.")
    return _expand_user(Path(cache_dir))


def read_cache(path: Path) -> bytes | None:
    """The content of a file in the cache; None if it is missing, incomplete or damaged."""
    try:
        content, checksum = path.read_bytes(), _checksum_path(path).read_bytes()
    except OSError:
        return None
    if checksum != _checksum(content):
        return None
    return content


def check_writable(path: Path) -> None:
    """Check that a file can be written at this path, without writing it.

    Raises:
        OSError: of the type that the system raised, if it cannot.
    """
    _write(path, None)


def write_cache(path: Path, content: bytes) -> None:
    """Write a file and its checksum to the cache.

    Raises:
        OSError: of the type that the system raised, if the file cannot be written; the folder then has no parts of it.
    """
    _write(path, content)
    _write(_checksum_path(path), _checksum(content))


def _user_cache_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local"))
    if sys.platform == "darwin":
        return Path("~/Library/Caches")
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification says to ignore an unset, empty or relative path
        return Path("~/.cache")
    return Path(folder)


def _expand_user(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError:  # in a container whose user has no home; os.path.expanduser would return a folder named ~
        raise FileNotFoundError(
            f"load_glyph_images: `cache_dir` must be a folder that can be found, got {str(folder)!r}, but the user has "
            "no home folder; pass another folder."
        ) from None


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode("ascii") + b"\n"


def _write(path: Path, content: bytes | None) -> None:
    """Write a file completely or not at all; with None only find out whether it could be written."""
    # A random name, since another process may write the same file. Not one of tempfile, whose files other users cannot
    # read.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(content or b"")
        if content is not None:
            os.replace(temporary, path)
    except OSError as error:
        raise type(error)(
            f"load_glyph_images: `cache_dir` must be a folder that can be created and written, got "
            f"{str(path.parent)!r} ({error.strerror}); pass another folder."
        ) from None
    finally:
        with suppress(OSError):  # it is gone if it was renamed to `path`
            temporary.unlink()
