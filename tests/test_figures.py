"""How long and branched functions are, and how dense statements: the figures, and the limits that they must keep.

`python tests/test_figures.py` prints the figures of the three packages, or of the files and folders that are named.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = [REPOSITORY / name for name in ("lightning_retrieval", "callbacks", "datamodules")]
LIMITS = {
    "lines of a function body": 40,
    "cyclomatic complexity": 14,
    "conditional expressions in 1,000 lines": 16,
    "comprehensions in 1,000 lines": 20,
    "conditional expressions and comprehensions in one statement": 1,
    "positional constructor arguments": 3,
    "nonlocal statements": 0,
}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def source_files(paths):
    files = []
    for path in map(Path, paths):
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def code_lines(source, tree):
    """The numbers of the lines that are neither blank nor comment nor docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def inside(node, others):
    """The nodes in a node, without what nodes of other kinds contain."""
    pending, found = list(ast.iter_child_nodes(node)), []
    while pending:
        child = pending.pop()
        found.append(child)
        if not isinstance(child, others):
            pending += ast.iter_child_nodes(child)
    return found


def complexity(function):
    """1 + branches + boolean operators + comprehensions and their conditions."""
    total = 1
    for node in inside(function, (*FUNCTIONS, ast.ClassDef)):
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def dense_expressions(statement):
    """Conditional expressions and comprehensions in a statement, without those in the statements inside it."""
    nodes = inside(statement, (ast.stmt, ast.ExceptHandler, ast.match_case))
    return sum(isinstance(node, (ast.IfExp, *COMPREHENSIONS)) for node in nodes)


def figures_of_function(function, lines):
    body = lines.intersection(range(function.body[0].lineno, function.end_lineno + 1))
    yield "lines of a function body", len(body)
    yield "cyclomatic complexity", complexity(function)
    # Dataclasses and named tuples write their constructors themselves, so only constructors that are written out count.
    if function.name in ("__init__", "__new__"):
        yield "positional constructor arguments", len(function.args.posonlyargs) + len(function.args.args) - 1


def figures_of_file(source):
    """(limit, value, line) of each function and statement of a file, and its numbers of lines and expressions."""
    tree = ast.parse(source)
    lines, found = code_lines(source, tree), []
    counts = {"lines": len(lines), "conditional expressions": 0, "comprehensions": 0}
    for node in ast.walk(tree):
        counts["conditional expressions"] += isinstance(node, ast.IfExp)
        counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
        if isinstance(node, ast.stmt):
            limit = "conditional expressions and comprehensions in one statement"
            found.append((limit, dense_expressions(node), node.lineno))
        if isinstance(node, ast.Nonlocal):
            found.append(("nonlocal statements", 1, node.lineno))
        if isinstance(node, FUNCTIONS):
            found += [(limit, value, node.lineno) for limit, value in figures_of_function(node, lines)]
    return found, counts


def measure(paths):
    """{limit: [(value, location)], largest first} of all files together."""
    figures = {limit: [] for limit in LIMITS}
    totals = {"lines": 0, "conditional expressions": 0, "comprehensions": 0}
    for path in source_files(paths):
        found, counts = figures_of_file(path.read_text(encoding="utf-8"))
        for limit, value, line in found:
            figures[limit].append((value, f"{path}:{line}"))
        totals = {name: total + counts[name] for name, total in totals.items()}
    for name in ("conditional expressions", "comprehensions"):
        figures[f"{name} in 1,000 lines"].append((1000 * totals[name] / totals["lines"], "all files together"))
    return {limit: sorted(values, reverse=True) for limit, values in figures.items()}


@pytest.fixture(scope="module")
def library():
    return measure(PACKAGES)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_library_keeps_the_limit_on(limit, library):
    assert not [location for value, location in library[limit] if value > LIMITS[limit]]


if __name__ == "__main__":
    for limit, values in measure(sys.argv[1:] or PACKAGES).items():
        print(f"{limit}: at most {LIMITS[limit]}")
        for value, location in values[: max(3, sum(value > LIMITS[limit] for value, _ in values))]:
            print(f"    {value:6.1f}  {location}")
