"""Imports point one way, and a few things are nowhere: read from the source, not run."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOMS = {
    "lightning_retrieval": "lightning_retrieval",
    "callbacks": "lightning_retrieval.callbacks",
    "datamodules": "lightning_retrieval.datamodules",
}
# Imported inside the function that needs them, so that who does not use them need not wait for them, or have them.
LAZY = {"faiss", "matplotlib", "pyarrow", "sklearn", "timm", "wandb"}
MAY_IMPORT_LIGHTNING = {"lightning_retrieval/training/module.py", "lightning_retrieval/cli/main.py"}
MAY_PRINT = {"callbacks/evaluation.py", "lightning_retrieval/cli/main.py"}  # the table at the end, a layout's report
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}


def source_files(*folders):
    return {
        path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
    }


LIBRARY = source_files(*ROOMS)
TESTS = source_files("tests")


def module_name(path):
    room, _, rest = path.partition("/")
    parts = [ROOMS[room], *rest.removesuffix(".py").split("/")]
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): tree for path, tree in LIBRARY.items()}


def imported_names(node):
    """Dotted names that an import statement may load: `from a import b` may load a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


def imports(tree):
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def library_imports(tree):
    """Modules of the library that this one imports: the deepest that exists for each name."""
    found = set()
    for node in imports(tree):
        names = [name for name in imported_names(node) if name in MODULES]
        if isinstance(node, ast.ImportFrom) and len(names) > 1:
            names = names[1:] if len(names) == len(node.names) + 1 else names  # only submodules were asked for
        found.update(names)
    return found


def at_import_time(tree):
    """Import statements that run when the module is loaded: not in functions, not for the type checker only."""
    waiting, found = list(tree.body), []
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_typing:
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def calls(tree, name):
    """Lines of calls of a function or a method of this name."""
    functions = ((node.lineno, node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [line for line, function in functions if getattr(function, "attr", getattr(function, "id", None)) == name]


def test_core_imports_neither_callbacks_nor_datamodules():
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in LIBRARY.items()
        if path.startswith("lightning_retrieval/")
        for node in imports(tree)
        for name in imported_names(node)
        if name.startswith(("lightning_retrieval.callbacks", "lightning_retrieval.datamodules"))
    ]
    assert not wrong


def test_callbacks_and_datamodules_do_not_import_each_other():
    wrong = [
        f"{path}:{node.lineno}"
        for room, other in (("callbacks/", "datamodules"), ("datamodules/", "callbacks"))
        for path, tree in LIBRARY.items()
        if path.startswith(room)
        for node in imports(tree)
        for name in imported_names(node)
        if name.startswith(f"lightning_retrieval.{other}")
    ]
    assert not wrong


def test_in_the_core_only_module_and_cli_import_lightning():
    found = {
        path
        for path, tree in LIBRARY.items()
        if path.startswith("lightning_retrieval/")
        for node in imports(tree)
        for name in imported_names(node)
        if name.split(".")[0] in ("pytorch_lightning", "lightning", "lightning_fabric")
    }
    assert found == MAY_IMPORT_LIGHTNING


def test_imports_have_no_cycle():
    graph = {name: library_imports(tree) - {name} for name, tree in MODULES.items()}
    # The root gives RetrievalModule when it is asked for, and nothing of the library may import from the root.
    assert not [name for name, wanted in graph.items() if "lightning_retrieval" in wanted]
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(MODULES)


def test_imports_are_absolute():
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in {**LIBRARY, **TESTS}.items()
        for node in imports(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_heavy_imports_wait_until_they_are_needed():
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in LIBRARY.items()
        for node in at_import_time(tree)
        for name in imported_names(node)
        if name.split(".")[0] in LAZY
    ]
    assert not wrong


def test_import_of_the_core_loads_nothing_heavy():
    # What torch and torchmetrics load by themselves (torchmetrics loads matplotlib where it is) is not ours to change.
    program = (
        "import sys, torch, torchvision, torchmetrics; before = set(sys.modules); "
        "import lightning_retrieval, lightning_retrieval.losses, lightning_retrieval.metrics, "
        "lightning_retrieval.models, lightning_retrieval.training.chunked; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "lightning_retrieval" in loaded
    assert not loaded & (LAZY | {"pytorch_lightning", "lightning"})


def test_library_never_asserts():
    # An assert vanishes under `python -O`, and its message is no sentence.
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in LIBRARY.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not wrong


@pytest.mark.parametrize(("name", "allowed"), [("cuda", set()), ("print", MAY_PRINT)])
def test_library_never_calls(name, allowed):
    wrong = {path: lines for path, tree in LIBRARY.items() if (lines := calls(tree, name)) and path not in allowed}
    assert not wrong


def dropped_comparisons(tree):
    """Lines with a comparison whose answer nobody looks at."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "attr", getattr(node.value.func, "id", None)) in COMPARISONS
    ]


def test_tests_look_at_every_comparison():
    assert not {path: lines for path, tree in TESTS.items() if (lines := dropped_comparisons(tree))}


def test_dropped_comparisons_are_seen():
    source = "torch.equal(a, b)\na.allclose(b)\nassert torch.equal(a, b)\nsame = torch.isclose(a, b)\nisclose(a, b)"
    assert sorted(dropped_comparisons(ast.parse(source))) == [1, 2, 5]
