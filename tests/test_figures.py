"""How large, dense and branched the code is: the figures, and the limits that they must keep.

`python tests/test_figures.py` prints them, for all three packages or for the files and folders that are named; `pytest
tests/test_figures.py -s` prints them too.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("lightning_retrieval", "callbacks", "datamodules")
LIMITS = {
    "lines of a file": 350,
    "lines of a function body": 40,
    "cyclomatic complexity": 14,
    "conditional expressions in 1,000 lines": 16,
    "comprehensions in 1,000 lines": 20,
    "positional constructor arguments": 3,
}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


@dataclass
class Figures:
    """What was counted in some files; `worst` holds (value, where) of each limit, largest first."""

    code_lines: int = 0
    conditional_expressions: int = 0
    comprehensions: int = 0
    worst: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def note(self, limit, value, where):
        self.worst.setdefault(limit, []).append((value, where))

    def finish(self):
        """Add the two densities, and put the worst first."""
        for limit, count in (
            ("conditional expressions in 1,000 lines", self.conditional_expressions),
            ("comprehensions in 1,000 lines", self.comprehensions),
        ):
            self.note(limit, 1000 * count / max(1, self.code_lines), "all files together")
        for values in self.worst.values():
            values.sort(reverse=True)
        return self

    def over(self, limit):
        return [(value, where) for value, where in self.worst.get(limit, []) if value > LIMITS[limit]]


def source_files(paths):
    files = []
    for path in map(Path, paths):
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def docstring_lines(tree):
    """The lines of all docstrings."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(source, tree):
    """Numbers of the lines that are neither blank nor comment nor docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(tree)


def own_nodes(function):
    """The nodes of a function without those of functions and classes that are defined in it."""
    waiting, found = list(function.body), []
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
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


def positional_arguments(constructor):
    """How many arguments besides `self` may be given by position."""
    return len(constructor.args.posonlyargs) + len(constructor.args.args) - 1


def measure(paths):
    figures = Figures()
    for path in source_files(paths):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        name = path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else str(path)
        lines = code_lines(source, tree)
        figures.code_lines += len(lines)
        figures.note("lines of a file", len(source.splitlines()), name)
        for node in ast.walk(tree):
            figures.conditional_expressions += isinstance(node, ast.IfExp)
            figures.comprehensions += isinstance(node, COMPREHENSIONS)
            if not isinstance(node, FUNCTIONS):
                continue
            where = f"{name}:{node.lineno} {node.name}"
            body = set(range(node.body[0].lineno, node.end_lineno + 1)) & lines
            figures.note("lines of a function body", len(body), where)
            figures.note("cyclomatic complexity", complexity(node), where)
            if node.name == "__init__":
                figures.note("positional constructor arguments", positional_arguments(node), where)
    return figures.finish()


def report(figures, shown=3):
    lines = [f"{figures.code_lines} lines of code"]
    for limit, allowed in LIMITS.items():
        over = figures.over(limit)
        lines.append(f"{limit}: at most {allowed}, {len(over)} over")
        for value, where in (over or figures.worst.get(limit, []))[: max(shown, len(over))]:
            lines.append(f"    {value:6.1f}  {where}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(measure(sys.argv[1:] or [REPOSITORY / package for package in PACKAGES])))
