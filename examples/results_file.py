"""Files of results, for `study.py` and `compare.py`: a run that is killed leaves each of them as a whole."""

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
    """Return the lines of `results.jsonl` by their keys; none if there is no such file."""
    if not file.exists():
        return {}
    results = [json.loads(line) for line in file.read_text().splitlines()]
    return {result["key"]: result for result in results}


def write_results(file: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `results.jsonl`: one line for each run."""
    write_file(file, "".join(json.dumps(result) + "\n" for result in results.values()))
