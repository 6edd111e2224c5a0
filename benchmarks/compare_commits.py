"""Run a benchmark in two commits in turn, and compare the times in its tables.

    python benchmarks/compare_commits.py 84b9e3ae losses --products      # against HEAD, three pairs of runs
    python benchmarks/compare_commits.py 84b9e3ae loop --pairs 5 --to 81f09aa2

Both commits are checked out and installed into temporary folders, without their requirements, which are those of this
environment. Each runs its own `benchmarks/<name>.py`, with the options that follow. In each pair of runs, the row of a
table of the newer commit is compared with the same row of the other one: the median of each time or, in a row without
times, the ratio that the benchmark itself has computed. The last row compares the CPU time of all processes of a run.
A ratio below 1 means that the newer commit is faster.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

from timing import environment, range_of, report

REPOSITORY = Path(__file__).parents[1]
WHOLE_RUN = ("whole run", "CPU time")
Measures = dict[tuple[str, str], float]  # {(row, column): seconds or ratio}


def check_out(commit: str, folder: Path) -> None:
    """Write the files of a commit to a folder, and install its packages into `installed` there."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "installed")]
    subprocess.run([*pip, "--no-build-isolation", str(folder)], check=True)


def measures_of(results: list[dict[str, Any]]) -> Measures:
    """The times in the rows of a table; of a row without times, the ratio of which the row has a range.

    Differences of times, which noise can make negative, have no ratio, and are left out.
    """
    found: Measures = {}
    for row in results:
        named = [f"{name} {value}" for name, value in row.items() if isinstance(value, (str, bool, int))]
        name = ", ".join(named)
        times = {column: value for column, value in row.items() if isinstance(value, dict)}
        for column, value in times.items():
            if value["lowest"] > 0:
                found[name, column] = value["median"]
        if not times and "lowest" in row:
            column = list(row)[list(row).index("lowest") - 1]
            found[name, column] = row[column]
    return found


def run(folder: Path, benchmark: str, options: list[str]) -> Measures:
    """Run a benchmark of a checked-out commit once."""
    import resource

    file = folder / "results.json"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(folder / "benchmarks" / f"{benchmark}.py"), *options, "--json", str(file)]
    installed = folder / "installed"  # also where it runs: `python -m` imports what is in the current folder first
    path = {"PYTHONPATH": str(installed)}
    subprocess.run(command, check=True, cwd=installed, env={**os.environ, **path}, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**measures_of(json.loads(file.read_text())["results"]), WHOLE_RUN: spent}


def compare(folders: tuple[Path, Path], benchmark: str, options: list[str], pairs: int) -> list[dict[str, Any]]:
    """The ratio of the second commit to the first for all times that both have."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for number in range(pairs):
        print(f"pair {number + 1} of {pairs}", file=sys.stderr)
        first, second = (run(folder, benchmark, options) for folder in folders)
        for measure in first.keys() & second.keys():
            ratios.setdefault(measure, []).append(second[measure] / first[measure])
    rows = []
    for (row, column), found in sorted(ratios.items(), key=lambda item: (item[0] == WHOLE_RUN, item[0])):
        rows.append({"row": row, "of": column, **range_of("now over before", found), "pairs": len(found)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a benchmark in two commits in turn, and compare its times.")
    parser.add_argument("commit", help="the commit before")
    parser.add_argument("benchmark", help="name of a file in benchmarks/, without .py")
    parser.add_argument("--to", default="HEAD", metavar="COMMIT", help="the commit that is compared with it (HEAD)")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each commit (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options, of_benchmark = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name, "before"), Path(name, "now"))
        for folder, commit in zip(folders, (options.commit, options.to)):
            check_out(commit, folder)
        rows = compare(folders, options.benchmark, of_benchmark, options.pairs)
    title = f"{' '.join([options.benchmark, *of_benchmark])}: {options.to} over {options.commit}"
    report(title, environment("cpu"), rows, options.json)


if __name__ == "__main__":
    main()
