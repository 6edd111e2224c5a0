"""Break statements of the library at random, one at a time, and see whether the tests notice.

    python benchmarks/break_statements.py --breaks 20                                # of HEAD
    python benchmarks/break_statements.py --seed 1 --paths callbacks --commit 84b9e3ae
    python benchmarks/break_statements.py --without_checks --paths datamodules callbacks+lightning_retrieval/metrics

The commit is checked out into a temporary folder, in which one statement after the other is broken: a comparison is
replaced by its opposite, a condition negated, a call dropped, or a constant changed. The tests of the file's folder, or
those that are named, run after each, those of the file itself first, until one fails. Two commits with the same library
break the same statements for the same seed, so the two lists show what the tests of one notice and those of the other
do not. With `--without_checks`, statements that validate arguments or write messages are left out.
"""

import argparse
import ast
import copy
import importlib
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
NOT_NOTICED, TOO_LATE = "NOT NOTICED", "NO TEST FAILED IN TIME"
PACKAGES = "lightning_retrieval+callbacks+datamodules"
IMPORTED_ONCE = ("pytest", "torch", "torchvision.transforms.v2", "pytorch_lightning", "torchmetrics", "sklearn.metrics")
# Names of functions that validate or warn, and functions whose arguments are parts of a message.
CHECK = re.compile(r"^_?(check|checks|checked|warn|rank_zero_warn|refuse|raise|short_repr|first_of|first_line)(_|$)")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Break:
    """The text of a node in a file, by its offsets in bytes, and the text that replaces it."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, folder: Path) -> bytes:
        """Break the file; returns its content before."""
        content = (folder / self.path).read_bytes()
        self.write(folder, content[: self.start] + self.new.encode() + content[self.end :])
        return content

    def write(self, folder: Path, content: bytes) -> None:
        """Write the file; Python would run the cached code of another one that has the same size and time."""
        (folder / self.path).write_bytes(content)
        Path(importlib.util.cache_from_source(str(folder / self.path))).unlink(missing_ok=True)


def replacement(node: ast.AST) -> ast.AST | None:
    """What takes the place of a node; None for a node that is left as it is."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed = copy.deepcopy(node)
        changed.ops = [OPPOSITES[type(node.ops[0])]()]
        return changed
    if isinstance(node, (ast.Expr, ast.Await)) and isinstance(node.value, ast.Call):
        return ast.Pass()
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return ast.Constant(node.value + 1)
    return None


def is_check(node: ast.AST) -> bool:
    """Whether a node only validates or writes a message: it raises, warns, or is or calls a function that checks."""
    if isinstance(node, FUNCTIONS):
        return bool(CHECK.match(node.name))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return bool(CHECK.match(name))
    if isinstance(node, (ast.If, ast.ExceptHandler)) and not getattr(node, "orelse", []):
        last = node.body[-1]
        return is_check(last.value if isinstance(last, ast.Expr) else last)
    return isinstance(node, (ast.Raise, ast.JoinedStr))


def nodes_of(tree: ast.AST, without_checks: bool) -> list[ast.AST]:
    """The nodes of a syntax tree; those inside of checks are left out if wanted."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        if without_checks and is_check(node.value if isinstance(node, ast.Expr) else node):
            continue
        found.append(node)
        left += ast.iter_child_nodes(node)
    return found


def candidates(path: str, source: str, without_checks: bool) -> list[Break]:
    """All that can be broken in a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    pairs: list[tuple[ast.expr | ast.stmt, ast.AST]] = []
    for node in nodes_of(ast.parse(source), without_checks):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Compare):
            pairs.append((node.test, ast.UnaryOp(ast.Not(), node.test)))
        new = replacement(node)
        if new is not None and isinstance(node, (ast.expr, ast.stmt)):
            pairs.append((node, new))
    found = []
    for node, new in pairs:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        text = ast.unparse(new)
        if isinstance(new, ast.expr):
            text = f"({text})"
        found.append(Break(path, node.lineno, start, end, ast.unparse(node), text))
    return found


def drawn(folder: Path, paths: str, breaks: int, seed: int, without_checks: bool) -> list[Break]:
    """As many statements as asked for, of the files in these folders of the checked-out commit, joined by +."""
    found = []
    for path in paths.split("+"):
        files = sorted((folder / path).rglob("*.py")) if (folder / path).is_dir() else [folder / path]
        for file in files:
            source = file.read_text(encoding="utf-8")
            found += candidates(file.relative_to(folder).as_posix(), source, without_checks)
    return random.Random(seed).sample(found, breaks)


def tests_of(folder: Path, path: str) -> list[str]:
    """The tests of a file's folder; first those of the file itself."""
    tests = folder / "tests" / Path(path).parent
    own = tests / f"test_{Path(path).name}"
    if Path(path).parent.name == "lightning_retrieval":
        files = sorted(tests.glob("test_*.py"))
    else:
        files = sorted(tests.rglob("test_*.py"))
    files.sort(key=lambda file: file != own)
    return [str(file.relative_to(folder)) for file in files]


def run_tests(folder: Path, tests: list[str], timeout: float) -> tuple[int | None, str]:
    """Run tests in a fork of this process; the exit code, None if they take too long, and what was printed."""
    import pytest

    output = folder / "output-of-tests"
    process = os.fork()
    if process == 0:
        code = 1
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.setsid()
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            os.environ["PYTHONPATH"] = str(folder)
            code = pytest.main(
                ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-Wignore::pytest.PytestAssertRewriteWarning", *tests]
            )
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # the folder is the parent's to delete
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")
        time.sleep(0.1)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None, ""


def answer_of_tests(folder: Path, statement: Break, tests: list[str], timeout: float) -> str:
    """How the tests answer to a broken statement: with the first that fails, with none, or not in time."""
    content = statement.apply(folder)
    try:
        code, printed = run_tests(folder, tests or tests_of(folder, statement.path), timeout)
    finally:
        statement.write(folder, content)
    if code is None:
        return TOO_LATE
    if code == 0:
        return NOT_NOTICED
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0][:150] if failed else printed.strip()[-150:]


def check_out(commit: str, folder: Path) -> None:
    """Write the files of a commit to a folder, from which Python imports the packages as they are installed."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    for name in ("callbacks", "datamodules"):
        (folder / "lightning_retrieval" / name).symlink_to(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument(
        "--paths", nargs="+", default=[PACKAGES], help="files and folders that get as many breaks each; + joins several"
    )
    parser.add_argument("--without_checks", action="store_true", help="leave out what validates or writes messages")
    parser.add_argument("--tests", nargs="+", default=[], help="files of tests to run in place of the file's folder")
    parser.add_argument("--breaks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for the tests of one statement")
    args = parser.parse_args()
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_out(args.commit, folder)
        statements = []
        for paths in args.paths:
            statements += drawn(folder, paths, args.breaks, args.seed, args.without_checks)
        for statement in statements:
            answer = answer_of_tests(folder, statement, args.tests, args.timeout)
            unnoticed += answer in (NOT_NOTICED, TOO_LATE)
            print(f"{statement.path}:{statement.line}: {statement.old} -> {statement.new}\n    {answer}", flush=True)
    print(f"{len(statements)} statements broken, {unnoticed} not noticed")


if __name__ == "__main__":
    main()
