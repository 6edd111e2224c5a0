"""Find a data set's files below its root, and suggest the right root if they are elsewhere."""

from collections.abc import Iterator, Sequence
from pathlib import Path

SEARCH_DEPTH = 2  # levels of folders, below the first, that are searched for a suggestion
MAX_ENTRIES = 1000  # of a folder, beyond which its subfolders are not searched


def find_file(
    owner: str, root: Path, *candidates: str, companion: str = "", root_name: str = "root", argument: str = ""
) -> Path:
    """Return the first of several paths below the root that exists, be it a file or a folder.

    Args:
        owner: prefix of error messages.
        root: the data set's folder.
        candidates: paths relative to the root.
        companion: a path that a folder must also contain to be suggested as the root; for file names that other data
            sets use too.
        root_name: the argument that is the root, for the message.
        argument: the argument that names the file, for the message; empty if the data set names it.

    Raises:
        FileNotFoundError: if none of the paths exists; the message says where such a file is, if one is nearby.
    """
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    wanted = " or ".join(candidates)
    if argument:
        wanted += f", the `{argument}`"
    if not root.is_dir():
        found = _without_root(root, candidates, companion, root_name)
        raise FileNotFoundError(f"{owner}: `{root_name}` must be a folder that contains {wanted}, got {root}, {found}.")
    suggestion = _suggestion(root.absolute(), candidates, companion, root_name)
    if not suggestion:
        suggestion = _suggestion(root.absolute().parent, candidates, companion, root_name)
    if not suggestion:
        suggestion = "no folder near it contains one"
    raise FileNotFoundError(f"{owner}: `{root_name}` must contain {wanted}, got {root}, which does not; {suggestion}.")


def _without_root(root: Path, candidates: Sequence[str], companion: str, root_name: str) -> str:
    """Say what the root is instead of a folder, and which folder may be meant."""
    problem = "which is a file" if root.is_file() else "which does not exist"
    nearest = root.absolute().parent
    while not nearest.is_dir():
        nearest = nearest.parent
    suggestion = _suggestion(nearest, candidates, companion, root_name)
    if suggestion:
        return f"{problem}; {suggestion}"
    return problem


def _suggestion(folder: Path, candidates: Sequence[str], companion: str, root_name: str) -> str:
    """Say which root below this folder has the files, or where a file of that name is; empty if nothing was found."""
    if folder == folder.parent:
        return ""  # the whole disk is not searched
    found = list(_entries_below(folder, SEARCH_DEPTH))
    for candidate in sorted(candidates, key=_length, reverse=True):
        parts = Path(candidate).parts
        for path in found:
            if path.parts[-len(parts) :] != parts:
                continue
            root = path.parents[len(parts) - 1]
            if (root / companion).exists():
                return f"pass {root_name}={root}"
    if companion:
        return ""
    for path in found:
        for candidate in candidates:
            if path.name == Path(candidate).name:
                return f"{path.name} is in {path.parent}"
    return ""


def _length(candidate: str) -> int:
    return len(Path(candidate).parts)


def _entries_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    yield from entries
    if depth == 0:
        return
    for entry in entries[:MAX_ENTRIES]:
        if entry.is_dir():
            yield from _entries_below(entry, depth - 1)
