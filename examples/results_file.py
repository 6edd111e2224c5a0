"""Files of results, for the studies and `compare.py`: a run that is killed leaves each of them as a whole."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def write_file(file: Path, content: str | Figure) -> None:
    """Write a file as a whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    if isinstance(content, str):
        part.write_text(content, encoding="utf-8")
    else:
        content.savefig(part, format="png")
    os.replace(part, file)


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a file of results by their keys; none if there is no such file.

    A last line without an end is left out: the process that appended it was killed.
    """
    if not file.exists():
        return {}
    lines = file.read_text().split("\n")[:-1]
    results = [json.loads(line) for line in lines]
    return {result["key"]: result for result in results}


def write_results(file: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a file of results: one line for each run."""
    write_file(file, "".join(json.dumps(result) + "\n" for result in results.values()))


def append_result(file: Path, result: Mapping[str, Any]) -> None:
    """Append the line of a run to a file of results, all of whose lines have an end."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")
