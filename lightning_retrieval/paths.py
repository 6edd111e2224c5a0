"""Paths that a user gives: what they mean is the same in each command, config and call.

`~` is the home folder, and links are followed. If a path does not exist, the error has what helps, if it is known:
another Unicode form or case, `\\` for `/`, or a folder too many.
"""

import errno
import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from lightning_retrieval.invalid import InvalidValue, MissingFile

ExistingPath = Annotated[Path, "exists"]  # of an option of a command that names a file or a folder which must be there


def check_path(name: str, value: str | os.PathLike[str], *, owner: str = "", exists: bool = False) -> Path:
    """Return the path, with `~` replaced by the home folder.

    Args:
        name: name of the argument.
        value: the path as the user has given it.
        owner: the class or function whose argument it is.
        exists: whether there must be a file or a folder.

    Raises:
        ValueError: if the path is empty, which would be the current folder.
        FileNotFoundError: if nothing is there, or the path begins with `~` and there is no such home folder.
    """
    text = os.fspath(value)
    if not text:
        raise InvalidValue("must be the path of a file or a folder", owner, name, got="an empty text")
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # a user of a container has no home folder
        rule = "must be in a home folder that is known"
        raise MissingFile(rule, owner, name, got=text, cure="give the path without ~") from None
    if exists:
        try:
            path.stat()
        except OSError as error:  # also a folder that this user may not enter, or a name that is too long
            is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            got = f"{path}, which does not exist" if is_missing else f"{path} ({error.strerror})"
            rule = "must be a file or a folder"
            raise MissingFile(rule, owner, name, got=got, cure=cure_of_missing(path)) from None
    return path


def check_own_entries(name: str, folder: Path, *, owner: str = "") -> None:
    """Raise if an entry of a folder is a link that leads out of it: what is written there would be written elsewhere.

    Args:
        name: name of the argument with the folder.
        folder: the folder, which need not exist.
        owner: the class or function whose argument it is.

    Raises:
        ValueError: if there is such a link.
    """
    top = os.path.realpath(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(top):
            rule = "must be a folder without links that lead out of it"
            raise InvalidValue(rule, owner, name, got=f"{path}, which leads to {os.readlink(path)}")


def find_file(root: Path, *candidates: str, root_name: str = "root", argument: str = "") -> Path:
    """Return the first of several paths below a folder that exists, whether it is a file or a folder.

    Args:
        root: the folder of a data set.
        candidates: paths relative to the folder.
        root_name: name of the argument with the folder, for the message.
        argument: name of the argument with the path, for the message; empty if the data set defines the path.

    Raises:
        FileNotFoundError: if none of the paths exists.
    """
    for candidate in candidates:
        if os.path.exists(root / candidate):
            return root / candidate
    wanted = " or ".join(candidates)
    if argument:
        wanted += f", the `{argument}`"
    if not root.is_dir():
        problem = "which is a file" if root.is_file() else "which does not exist"
        rule = f"must be a folder that contains {wanted}"
        raise MissingFile(rule, argument=root_name, got=f"{root}, {problem}", cure=cure_of_missing(root))
    cure = ""
    for candidate in candidates:
        cure = cure or cure_of_missing(root / candidate)
        if os.path.exists(root.absolute().parent / candidate):
            cure = f"pass {root_name}={root.absolute().parent}"
    raise MissingFile(f"must contain {wanted}", argument=root_name, got=f"{root}, which does not", cure=cure)


def cure_of_missing(path: Path) -> str:
    """What helps if there is nothing at a path; "" if it is not known.

    Args:
        path: a path at which there is neither a file nor a folder.
    """
    slashed = Path(str(path).replace("\\", "/"))
    if slashed != path and os.path.exists(slashed):
        return "write / in place of \\ in the path"
    similar = None if os.path.lexists(path) else _similar(path)  # a file in place of a folder, or a link to nothing
    if similar is not None and unicodedata.normalize("NFC", str(similar)) == unicodedata.normalize("NFC", str(path)):
        return "write accented letters in the Unicode form of the names on the disk (NFC or NFD)"
    if similar is not None:
        return f"there is {similar}"
    parts = path.parts
    for position in range(bool(path.anchor), len(parts) - 1):
        shorter = Path(*parts[:position], *parts[position + 1 :])
        if os.path.exists(shorter):
            return f"leave out {parts[position]}, since there is {shorter}"
    return ""


def cure_of_names(names: Iterable[str], paths: Iterable[str], folder: Path | None) -> str:
    """What helps if a table lacks images, because it names them otherwise; "" if it is not known.

    Args:
        names: the names in the table.
        paths: the paths of the images, relative to the folder.
        folder: the folder; None if it is not known.
    """
    known = set(paths)
    unknown = [name for name in names if name not in known]
    if folder is None or not unknown:
        return ""
    return cure_of_missing(folder / unknown[0])


def _similar(path: Path) -> Path | None:
    """An existing path with the same names in another Unicode form or case, or with a suffix; None if there is none."""
    found = Path()
    for part in path.parts:
        if not os.path.lexists(found / part):
            try:
                names = os.listdir(found)
            except OSError:  # no folder, or one that this user may pass, but not list, such as a shared /home
                return None
            wanted = _folded(part)
            same = [name for name in names if wanted in (_folded(name), _folded(os.path.splitext(name)[0]))]
            if not same:
                return None
            part = min(same, key=len)
        found /= part
    return found


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
