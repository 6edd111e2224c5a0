"""Finding and reading a data set's own files: what is missing or odd is named with its place."""

import csv
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

DEPTH = 2  # folders below the root, and one above it, in which something like the file is looked for


def find_file(who: str, root: Path, *candidates: str, beside: str = "") -> Path:
    """The first of these paths below the root that is there, a file or a folder.

    Args:
        who: begins the message.
        root: the data set's folder.
        candidates: paths from it.
        beside: what another root must hold too, to be proposed; of a name that other data sets have as well.

    Raises:
        FileNotFoundError: if none is, saying where one of that name lies.
    """
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    wanted = " or ".join(candidates)
    if not root.is_dir():
        what = "is a file" if root.is_file() else "is not there"
        near = next(folder for folder in root.absolute().parents if folder.is_dir())
        cure = _cure(near, candidates, beside)
        raise FileNotFoundError(
            f"{who}: `root` must be a folder that holds {wanted}, got {root}, which {what}{cure and '; ' + cure}."
        )
    cure = _cure(root.absolute(), candidates, beside) or _cure(root.absolute().parent, candidates, beside)
    where = f"; {cure}" if cure else ", nor a folder near it"
    raise FileNotFoundError(f"{who}: `root` must hold {wanted}, which {root} does not{where}.")


def _cure(folder: Path, candidates: Sequence[str], beside: str) -> str:
    """Which root below this folder to give, or where a file of the name lies; empty where there is none."""
    wishes = sorted((Path(candidate).parts for candidate in candidates), key=len, reverse=True)
    places = [] if folder == folder.parent else list(_below(folder, DEPTH))  # not the whole disk
    bases = [place.parents[len(w) - 1] for w in wishes for place in places if place.parts[-len(w) :] == w]
    likes = [place for place in places if not beside and place.name in {wish[-1] for wish in wishes}]
    bases = [base for base in bases if (base / beside).exists()]
    if bases:
        return f"give root={bases[0]}"
    return f"a {likes[0].name} lies in {likes[0].parent}" if likes else ""


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    yield from entries
    if depth:
        for entry in entries[:1000]:
            if entry.is_dir():
                yield from _below(entry, depth - 1)


def text_lines(who: str, path: Path) -> Iterator[str]:
    """The lines of a text file in UTF-8 with their ends, without the byte order mark that some editors begin it with.

    Raises:
        ValueError: if it is a folder; at a line in another encoding, with its number.
    """
    if path.is_dir():
        raise ValueError(f"{who}: {path} must be a text file, got a folder.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{who}: {path} must be text in UTF-8, got the byte {line[error.start]:#x} in line {number}; save "
                    "it as UTF-8."
                ) from None
            yield text


def read_rows(
    who: str,
    path: Path,
    fields: int,
    *,
    header: Sequence[str] | None = None,
    skip: int = 0,
    more: bool = False,
) -> Iterator[list[str]]:
    """The fields of each line that is not blank.

    Args:
        who: begins every message.
        path: a text file in UTF-8.
        fields: how many a line must have.
        header: the fields that the first line after `skip` must be, or None where there is no header.
        skip: lines before it.
        more: whether a line may have more fields.

    Raises:
        ValueError: if the file is not in UTF-8, the header is another, or lines have other numbers of fields, with
            their line numbers.
    """
    odd: list[int] = []  # lines
    for number, line in enumerate(text_lines(who, path), 1):
        if number <= skip:
            continue
        found = line.split()
        if header is not None and number == skip + 1:
            if found != list(header):
                raise ValueError(
                    f"{who}: line {number} of {path} must be the header {' '.join(header)!r}, got {line.strip()!r}."
                )
            continue
        if not found:
            continue
        if len(found) < fields or (len(found) > fields and not more):
            odd.append(number)
        elif not odd:
            yield found
    _refuse_lines(who, path, fields, odd)


def csv_rows(who: str, path: Path) -> Iterator[tuple[list[str], int]]:
    """The fields of each row of a CSV file that is not blank, the header first, each with the line that it ends at.

    Raises:
        ValueError: if the file is in another encoding or no CSV.
    """
    reader = csv.reader(text_lines(who, path), skipinitialspace=True)
    try:
        for row in reader:
            if row:
                yield row, reader.line_num
    except csv.Error as error:
        raise ValueError(f"{who}: {path} must be a CSV file, got {error} in line {reader.line_num}.") from None


def csv_columns(who: str, path: Path, columns: Sequence[str]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The fields of each row of a CSV file that stand below these names, wherever they are, and the row's line.

    Raises:
        ValueError: if the header lacks a name, or rows end before a column, with their line numbers.
    """
    rows = csv_rows(who, path)
    header = [name.strip() for name in next(rows, ([], 1))[0]]
    missing = [name for name in columns if name not in header]
    if missing:
        raise ValueError(
            f"{who}: line 1 of {path} must name the columns {', '.join(columns)}, separated by commas; "
            f"{', '.join(missing)} missing in {','.join(header)!r}."
        )
    places = [header.index(name) for name in columns]
    least = max(places) + 1
    odd: list[int] = []
    for row, line in rows:
        if len(row) < least:
            odd.append(line)
        elif not odd:
            yield tuple(row[place].strip() for place in places), line
    _refuse_lines(who, path, least, odd)


def _refuse_lines(who: str, path: Path, fields: int, odd: Sequence[int]) -> None:
    if odd:
        shown = ", ".join(map(str, odd[:5])) + (", ..." if len(odd) > 5 else "")
        raise ValueError(
            f"{who}: each line of {path} must have {fields} fields, which {len(odd)} have not (line {shown})."
        )


def integers(who: str, path: Path, column: str, values: Sequence[str], bits: int = 64) -> list[int]:
    """The values as integers of so many bits, refused with the file's and the column's name if one is none."""
    try:
        found = [int(value) for value in values]
        if all(_fits(number, bits) for number in (min(found, default=0), max(found, default=0))):
            return found
    except ValueError:
        pass
    odd = next(value for value in values if not _fits(value, bits))
    with path.open(encoding="utf-8-sig") as lines:
        line = next((f" in line {number}" for number, line in enumerate(lines, 1) if odd in line.split()), "")
    shown = repr(odd) if len(odd) <= 40 else f"{odd[:40]!r}..."
    raise ValueError(f"{who}: `{column}` must be integers in {path}, got {shown}{line}.")


def _fits(value: int | str, bits: int) -> bool:
    most: int = 2 ** (bits - 1)
    try:
        return -most <= int(value) < most
    except ValueError:
        return False


def plain_path(path: str) -> str:
    """A path without `./` and `//`, so that it is spelt in one way; steps up stay, to be refused."""
    return posixpath.normpath(path) if path and ".." not in path.split("/") else path


def refuse_duplicates(who: str, path: Path, column: str, values: Sequence[object]) -> None:
    """Refuse values that occur twice."""
    hashes = np.fromiter(map(hash, values), np.int64, len(values))  # of millions of paths, a set of them is large
    if len(np.unique(hashes)) == len(values):
        return
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{who}: `{column}` must be different in each line of {path}, got {value!r} twice.")
        seen.add(value)


def line_of(path: Path, row: Sequence[str]) -> int:
    """The number of the first line that has these fields, for a message about them."""
    with path.open(encoding="utf-8-sig") as lines:
        return next((number for number, line in enumerate(lines, 1) if line.split() == list(row)), 0)


def refuse_empty(who: str, path: Path, split: str, rows: Sequence[object]) -> None:
    """Refuse a split without images."""
    if not rows:
        raise ValueError(f"{who}: the split {split!r} must hold at least one image, got none in {path}.")
