"""Finds the image files of an index, whose folder and paths are data that another user may have written.

A page with results embeds pictures, so an index must not choose which files are read. Its folder of images is used only
if a command of this user has embedded the images of this folder before; `name_folder` adds the folder to a list in the
user's data folder. A path of an index must lie in the folder, after all symbolic links are followed.
"""

import os
from contextlib import suppress
from pathlib import Path


def name_folder(folder: Path) -> str:
    """Add a folder of images that the user has given to the list of such folders; return its absolute path.

    If the list cannot be written, the user must give the folder again to see its pictures.

    Args:
        folder: an existing folder.
    """
    real = os.fsencode(os.path.realpath(folder))
    with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
        if real not in _named_folders():
            file = _list_of_folders()
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as stream:
                stream.write(real + b"\0")
    return folder.absolute().as_posix()


def is_named(folder: Path) -> bool:
    """Whether the user has given a folder to a command that embeds images, see `name_folder`.

    Args:
        folder: a folder.
    """
    with suppress(OSError, RuntimeError, ValueError):  # no list, no home folder, or a null character in the path
        return os.fsencode(os.path.realpath(folder)) in _named_folders()
    return False


def image_file(folder: Path, path: str) -> Path:
    """The file of an image, with all symbolic links followed.

    Args:
        folder: folder of the images.
        path: path of the image in the index.

    Raises:
        ValueError: if the file is not in the folder.
    """
    real = Path(os.path.realpath(folder))
    file = Path(os.path.realpath(real / path))
    if not file.is_relative_to(real):
        raise ValueError("it is outside of the folder")
    return file


def _list_of_folders() -> Path:
    """The file with the list: paths that each end with a null character."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return data / "lightning-retrieval" / "image-folders"


def _named_folders() -> list[bytes]:
    file = _list_of_folders()
    if not file.is_file():
        return []
    return file.read_bytes().split(b"\0")[:-1]
