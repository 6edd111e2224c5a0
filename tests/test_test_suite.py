"""Rules of the test suite itself: its folders mirror the packages, and no comparison is dropped."""

import ast
from pathlib import Path

from tests.source_tree import REPOSITORY, called_name, syntax_trees

TESTS = syntax_trees("tests")
PACKAGES = ("lightning_retrieval", "callbacks", "datamodules")
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}


def test_folders_of_tests_mirror_packages():
    folders = {Path(path).parent.relative_to("tests") for path in TESTS}
    mirrored = [folder for folder in folders if folder.parts and folder.parts[0] in PACKAGES]
    assert mirrored
    assert not [folder for folder in mirrored if not (REPOSITORY / folder / "__init__.py").exists()]


def dropped_comparisons(tree):
    """Line numbers of comparisons whose result is not used."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return sorted(node.lineno for node in statements if called_name(node.value) in COMPARISONS)


def test_every_comparison_is_used():
    assert not {path: lines for path, tree in TESTS.items() if (lines := dropped_comparisons(tree))}


def test_dropped_comparisons_are_seen():
    source = "torch.equal(a, b)\na.allclose(b)\nassert torch.equal(a, b)\nsame = torch.isclose(a, b)\nisclose(a, b)"
    assert dropped_comparisons(ast.parse(source)) == [1, 2, 5]
