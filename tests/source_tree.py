"""The source files of the repository as syntax trees, and the few questions that several tests ask of them."""

import ast
import functools
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# Each folder of source code, and the package as which it is installed.
PACKAGES = {
    "lightning_retrieval": "lightning_retrieval",
    "callbacks": "lightning_retrieval.callbacks",
    "datamodules": "lightning_retrieval.datamodules",
}


def syntax_trees(*folders):
    """{path in the repository: syntax tree} of all Python files in these folders."""
    trees = {}
    for folder in folders:
        trees.update(_trees_of(folder))
    return trees


@functools.cache
def _trees_of(folder):
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    return {file.relative_to(REPOSITORY).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@functools.cache
def nodes(tree):
    """All nodes of a syntax tree, which most tests ask for."""
    return list(ast.walk(tree))


def module_name(path):
    """The name by which a file of the library is imported."""
    folder, _, rest = path.partition("/")
    name = ".".join([PACKAGES[folder], *rest.removesuffix(".py").split("/")])
    return name.removesuffix(".__init__")


def import_statements(tree):
    return [node for node in nodes(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported_names(node):
    """Dotted names that an import statement may load: `from a import b` may load a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
