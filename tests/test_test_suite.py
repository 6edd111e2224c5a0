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
# Tests that belong to no single source file: {file: what they test}.
OF_NO_SINGLE_FILE = {
    "tests/datamodules/readers/test_error_locations.py": "all readers, with errors in their lists",
    "tests/datamodules/readers/test_every_reader.py": "what all readers have in common",
    "tests/lightning_retrieval/losses/test_every_loss.py": "what all losses have in common",
    "tests/lightning_retrieval/losses/test_extreme_settings.py": "all losses, with extreme settings",
    "tests/lightning_retrieval/losses/test_golden.py": "all losses, against the numbers of the official code",
    "tests/lightning_retrieval/losses/test_query_range.py": "all losses, computed for a range of the queries",
    "tests/datamodules/samplers/test_scale.py": "all samplers, on ten million images",
}
# Files that also run as scripts: to print the figures, to write the public names.
SCRIPTS = {"tests/test_figures.py", "tests/test_surface.py"}
NAMES_OF_EXAMPLES = {"WholeClassesSampler"}
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}


def mirrored_file(test_file):
    """The source file or package that a test file mirrors; None if there is none.

    `test_module_ddp.py` may test `module.py` or a package `module`: its name continues that of the source after `_`.
    """
    (folder,) = [folder for folder in MIRRORED if test_file.startswith(f"{folder}/")]
    path = Path(MIRRORED[folder], Path(test_file).relative_to(folder))
    words = path.stem.removeprefix("test_").split("_")
    for count in range(len(words), 0, -1):
        source = path.with_name("_".join(words[:count]))
        for candidate in (source.with_suffix(".py"), source):
            if (REPOSITORY / candidate).exists():
                return candidate.as_posix()
    return None


def in_mirrored_folder(path):
    return path.startswith(tuple(f"{folder}/" for folder in MIRRORED))


def test_test_files_mirror_source_files():
    files = [path for path in TESTS if in_mirrored_folder(path) and Path(path).name.startswith("test_")]
    assert len(files) > 50
    assert {path for path in files if mirrored_file(path) is None} == OF_NO_SINGLE_FILE.keys()


def test_a_test_file_without_a_source_file_is_seen():
    assert mirrored_file("tests/lightning_retrieval/losses/test_base.py") == "lightning_retrieval/losses/base.py"
    assert mirrored_file("tests/lightning_retrieval/losses/test_base_more.py") == "lightning_retrieval/losses/base.py"
    assert mirrored_file("tests/lightning_retrieval/losses/test_nothing.py") is None
    assert mirrored_file("tests/lightning_retrieval/losses/test_basement.py") is None
    assert mirrored_file("tests/callbacks/test_base.py") is None


def test_processes_are_started_by_one_launcher():
    assert {path for path, tree in TESTS.items() if lines_that_call(tree, "Popen")} == {
        "tests/processes.py",
        "tests/browser.py",  # keeps a browser open while a test uses its page
        "tests/datamodules/glyphs/test_cache.py",  # runs Python with warnings as errors
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
