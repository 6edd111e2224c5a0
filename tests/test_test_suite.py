"""Rules of the test suite itself: where a test belongs, how it starts processes, which warnings it may ignore."""

import ast
import re
from pathlib import Path

from tests.source_tree import REPOSITORY, called_name, lines_that_call, syntax_trees
from tests.test_surface import public_objects

TESTS = syntax_trees("tests")
MIRRORED = {
    "tests/lightning_retrieval": "lightning_retrieval",
    "tests/callbacks": "callbacks",
    "tests/datamodules": "datamodules",
}
# Files that also run as scripts: to print the figures, to write the public names.
SCRIPTS = {"tests/test_figures.py", "tests/test_surface.py"}
NAMES_OF_EXAMPLES = {"WholeClassesSampler"}
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}


def test_folders_of_tests_mirror_packages():
    folders = {Path(path).parent.as_posix() for path in TESTS}
    for folder, package in MIRRORED.items():
        of_package = {path for path in folders if f"{path}/".startswith(f"{folder}/")}
        assert len(of_package) > 0
        sources = {path.replace(folder, package, 1) for path in of_package}
        assert not {path for path in sources if not (REPOSITORY / path / "__init__.py").exists()}


def test_processes_are_started_by_one_launcher():
    assert {path for path, tree in TESTS.items() if lines_that_call(tree, "Popen")} == {
        "tests/processes.py",
        "tests/browser.py",  # keeps a browser open while a test uses its page
        "tests/test_study.py",  # kills an example
    }
    assert {path for path, tree in TESTS.items() if is_script(tree)} == SCRIPTS


def is_script(tree):
    """Whether a file has a part that only runs if it is run as a script."""
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body)


def third_party_filters(tree, names):
    """The warning filters of a test file that ignore a warning without naming a public object of the library."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    filters = [text for text in strings if text.startswith("ignore:")]
    return [text for text in filters if not names.intersection(re.findall(r"\w+", text))]


def test_third_party_warnings_are_tolerated_in_setup_cfg_only():
    names = {*public_objects(), *NAMES_OF_EXAMPLES}
    others = {path: tree for path, tree in TESTS.items() if path != "tests/test_test_suite.py"}
    assert not {path: found for path, tree in others.items() if (found := third_party_filters(tree, names))}


def test_third_party_warnings_are_seen():
    tree = ast.parse("a = ['ignore:PKSampler. left out:UserWarning', 'ignore:torch is old:UserWarning', 'ignored']")
    assert third_party_filters(tree, {"PKSampler"}) == ["ignore:torch is old:UserWarning"]


def dropped_comparisons(tree):
    """Line numbers of comparisons whose result is not used."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return sorted(node.lineno for node in statements if called_name(node.value) in COMPARISONS)


def test_every_comparison_is_used():
    assert not {path: lines for path, tree in TESTS.items() if (lines := dropped_comparisons(tree))}


def test_dropped_comparisons_are_seen():
    source = "torch.equal(a, b)\na.allclose(b)\nassert torch.equal(a, b)\nsame = torch.isclose(a, b)\nisclose(a, b)"
    assert dropped_comparisons(ast.parse(source)) == [1, 2, 5]
