"""How long and branched functions are, and how dense statements: the figures, and the limits that they must keep.

`python tests/test_figures.py` prints the figures of the three packages, or of the files and folders that are named;
`pytest tests/test_figures.py -s` prints them too.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("lightning_retrieval", "callbacks", "datamodules")
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
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
# Nodes that hold statements of their own, although they are no statements.
BLOCKS = (ast.ExceptHandler, ast.match_case)
# Dataclasses and named tuples write their constructors themselves, so only constructors that are written out count.
CONSTRUCTORS = ("__init__", "__new__")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Figures:
    """What was counted in some files; `worst` holds (value, location) for each limit, largest first."""

    code_lines: int = 0
    conditional_expressions: int = 0
    comprehensions: int = 0
    worst: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def add(self, limit, value, location):
        self.worst.setdefault(limit, []).append((value, location))

    def add_totals(self):
        """Add what is divided by the lines of code of all files together."""
        thousands = max(1, self.code_lines) / 1000
        everywhere = "all files together"
        self.add("conditional expressions in 1,000 lines", self.conditional_expressions / thousands, everywhere)
        self.add("comprehensions in 1,000 lines", self.comprehensions / thousands, everywhere)

    def sort(self):
        for values in self.worst.values():
            values.sort(reverse=True)

    def over(self, limit):
        """Values above the limit, with their locations."""
        return [(value, location) for value, location in self.worst.get(limit, []) if value > LIMITS[limit]]


def source_files(paths):
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(path.rglob("*.py"))
        else:
            files.append(path)
    return files


def docstring_lines(tree):
    """The line numbers of all docstrings."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(source, tree):
    """The numbers of the lines that are neither blank nor comment nor docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(tree)


def own_nodes(function):
    """The nodes of a function, without those of functions and classes that are defined inside it."""
    pending, found = list(function.body), []
    while pending:
        node = pending.pop()
        found.append(node)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
    return found


def complexity(function):
    """1 + branches + boolean operators + comprehensions and their conditions."""
    total = 1
    for node in own_nodes(function):
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def dense_expressions(statement):
    """Conditional expressions and comprehensions in a statement, without those in the statements inside it."""
    pending, total = list(ast.iter_child_nodes(statement)), 0
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.stmt, *BLOCKS)):
            continue
        total += isinstance(node, (ast.IfExp, *COMPREHENSIONS))
        pending += ast.iter_child_nodes(node)
    return total


def positional_arguments(constructor):
    """How many arguments besides the first (`self` or `cls`) may be given by position."""
    return len(constructor.args.posonlyargs) + len(constructor.args.args) - 1


def measure(paths):
    figures = Figures()
    for path in source_files(paths):
        name = str(path)
        if path.is_relative_to(REPOSITORY):
            name = path.relative_to(REPOSITORY).as_posix()
        measure_source(path.read_text(encoding="utf-8"), name, figures)
    figures.add_totals()
    figures.sort()
    return figures


def measure_source(source, name, figures):
    """Add the figures of one file."""
    tree = ast.parse(source)
    lines = code_lines(source, tree)
    figures.code_lines += len(lines)
    for node in ast.walk(tree):
        figures.conditional_expressions += isinstance(node, ast.IfExp)
        figures.comprehensions += isinstance(node, COMPREHENSIONS)
        if isinstance(node, ast.stmt):
            limit = "conditional expressions and comprehensions in one statement"
            figures.add(limit, dense_expressions(node), f"{name}:{node.lineno}")
        if isinstance(node, ast.Nonlocal):
            figures.add("nonlocal statements", 1, f"{name}:{node.lineno}")
        if isinstance(node, FUNCTIONS):
            measure_function(node, lines, name, figures)


def measure_function(function, lines, name, figures):
    """Add the figures of one function of a file, whose lines of code are `lines`."""
    location = f"{name}:{function.lineno} {function.name}"
    body = lines.intersection(range(function.body[0].lineno, function.end_lineno + 1))
    figures.add("lines of a function body", len(body), location)
    figures.add("cyclomatic complexity", complexity(function), location)
    if function.name in CONSTRUCTORS:
        figures.add("positional constructor arguments", positional_arguments(function), location)


def report(figures, shown=3):
    """The figures as text: whatever is over a limit, and at least the `shown` largest values."""
    lines = [f"{figures.code_lines} lines of code"]
    for limit, allowed in LIMITS.items():
        over = figures.over(limit)
        lines.append(f"{limit}: at most {allowed}, {len(over)} over")
        for value, location in figures.worst.get(limit, [])[: max(shown, len(over))]:
            lines.append(f"    {value:6.1f}  {location}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def library():
    figures = measure([REPOSITORY / package for package in PACKAGES])
    print(f"\n{report(figures)}")
    return figures


@pytest.mark.parametrize("limit", LIMITS)
def test_the_library_keeps_the_limit_on(limit, library):
    assert not library.over(limit)


def measured(source):
    """The figures of a file with this text."""
    figures = Figures()
    measure_source(source, "file.py", figures)
    figures.add_totals()
    figures.sort()
    return figures


def test_the_counters_see_what_is_over_a_limit():
    too_much = {
        "lines of a function body": "def f():\n" + "    x = 1\n" * 41,
        "cyclomatic complexity": "def f(x):\n" + "    if x:\n        pass\n" * 14,
        "conditional expressions in 1,000 lines": "x = 1 if y else 2\n" + "x = 1\n" * 50,
        "comprehensions in 1,000 lines": "x = {y for y in z}\n" + "x = 1\n" * 40,
        "conditional expressions and comprehensions in one statement": "x = [1 if y else 2 for y in z]",
        "positional constructor arguments": "class A:\n    def __init__(self, a, b, c, d=1, *, e):\n        pass",
        "nonlocal statements": "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2",
    }
    for limit, source in too_much.items():
        assert len(measured(source).over(limit)) == 1, limit
    assert too_much.keys() == LIMITS.keys()


if __name__ == "__main__":
    print(report(measure(sys.argv[1:] or [REPOSITORY / package for package in PACKAGES])))
