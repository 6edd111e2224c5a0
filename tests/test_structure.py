"""Imports point one way, and functions are short: read from the source, which is not run."""

import ast
import functools
import graphlib
import io
import json
import subprocess
import sys
import tokenize

import pytest

from tests.source_tree import PACKAGES, REPOSITORY, import_statements, imported_names, module_name, nodes, syntax_trees

# The layers of the library, lowest first. A module imports from its own layer and from lower ones.
LAYERS = (
    {"arguments", "checks", "compiled", "files", "invalid", "lazy_names", "optional_packages", "paths"},
    {"first_checks", "packed_strings", "progress", "random_state", "version"},
    {"backend", "command_line"},
    {"checkpoints", "distributed", "plain_data"},
    {"ranking", "preparation"},
    {"metrics", "losses", "models"},
    {"loading"},
    {"training"},
    {"detection"},
    {"callbacks", "datamodules"},
    {"search"},
    {"cli"},
)
# These are imported inside the function that needs them: whoever does not use them need not install or load them.
LAZY = {
    "albumentations",
    "datasets",
    "faiss",
    "faster_coco_eval",
    "gradio",
    "huggingface_hub",
    "matplotlib",
    "milvus_lite",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "peft",
    "pyarrow",
    "pymilvus",
    "safetensors",
    "sklearn",
    "timm",
    "tokenizers",
    "transformers",
    "wandb",
}
LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric"}
OF_POSIX = {"fcntl", "grp", "pwd", "resource", "termios"}  # modules that Windows lacks
LONGEST_FUNCTION = 40  # lines of its body that are neither blank nor comment nor docstring
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TREES = syntax_trees(*PACKAGES)


@functools.cache
def modules():
    """{name of each module of the library: syntax tree}."""
    return {module_name(path): tree for path, tree in TREES.items()}


def library_imports(tree, statements=import_statements):
    """Modules of the library that this one imports: the deepest that exists for each name."""
    found = set()
    for node in statements(tree):
        names = [name for name in imported_names(node) if name in modules()]
        only_submodules = isinstance(node, ast.ImportFrom) and len(names) == len(node.names) + 1
        found.update(names[1:] if only_submodules else names)
    return found


def package_of(module):
    """The part of the library that a module belongs to: `losses` for `lightning_retrieval.losses.base`."""
    return f"{module}.".split(".")[1]


def layer_of(package):
    (number,) = [number for number, packages in enumerate(LAYERS) if package in packages]
    return number


def at_import_time(tree):
    """Import statements that run when the module is loaded: not in functions, not for the type checker only."""
    pending, found = list(tree.body), []
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        for_type_checker = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not isinstance(node, FUNCTIONS) and not for_type_checker:
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def users_of(top_level_names, statements=import_statements):
    """Files that import from these top-level packages."""
    found = set()
    for path, tree in TREES.items():
        names = {name.split(".")[0] for node in statements(tree) for name in imported_names(node)}
        if names & top_level_names:
            found.add(path)
    return found


@pytest.fixture(scope="module")
def imports():
    """{module: modules of the library that it imports}, without the root, which only gathers the public names."""
    found = {name: library_imports(tree) - {name} for name, tree in modules().items()}
    del found["lightning_retrieval"]
    # The table of lazy names, which imports nothing by itself, has the callbacks of the search product.
    found["lightning_retrieval.callbacks"] = library_imports(modules()["lightning_retrieval.callbacks"], at_import_time)
    return found


@pytest.fixture(scope="module")
def graph(imports):
    """{package: other packages that it imports}."""
    found = {}
    for module, imported in imports.items():
        package = package_of(module)
        found.setdefault(package, set()).update({package_of(other) for other in imported} - {package})
    return found


def test_no_module_imports_from_a_higher_layer(graph):
    assert set(graph) == set().union(*LAYERS)
    upward = []
    for package, imported in graph.items():
        upward += [f"{package} imports {other}" for other in imported if layer_of(other) > layer_of(package)]
    assert not upward


def test_packages_that_know_nothing_of_each_other(graph):
    assert "datamodules" not in graph["callbacks"]
    assert not graph["datamodules"] & {"callbacks", "training"}
    assert {package for package in graph if "search" in graph[package]} <= {"cli"}


def test_neither_modules_nor_packages_import_in_a_circle(imports, graph):
    for each in (imports, graph):
        order = list(graphlib.TopologicalSorter(each).static_order())
        assert set(order) == set(each)


def test_only_one_module_decides_between_the_packages_of_lightning():
    assert users_of(LIGHTNING) == {"lightning_retrieval/backend.py"}


def test_heavy_packages_are_imported_where_they_are_needed():
    assert not users_of(LAZY | OF_POSIX, at_import_time)


# What torch and torchmetrics load by themselves is not in our control: torchmetrics loads matplotlib if it can.
IMPORT_THE_CORE = """
import json, sys, torch, torchvision, torchmetrics
before = set(sys.modules)
import lightning_retrieval as lr
assert lr.losses.SmoothAPLoss is lr.SmoothAPLoss
assert not hasattr(lr, "lossses")
import lightning_retrieval.metrics, lightning_retrieval.models, lightning_retrieval.training.chunked
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


@pytest.mark.slow
def test_importing_the_core_loads_nothing_heavy():
    """In a new interpreter, where packages are attributes of the root before they are imported."""
    done = subprocess.run([sys.executable, "-c", IMPORT_THE_CORE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "lightning_retrieval" in loaded
    assert not loaded & (LAZY | LIGHTNING)


def test_image_files_are_opened_in_one_place():
    """Pillow starts programs for some formats, so only `open_image`, which names the formats, opens files."""
    opened = set()
    for path, tree in TREES.items():
        calls = [ast.unparse(node.func) for node in nodes(tree) if isinstance(node, ast.Call)]
        if "Image.open" in calls or "PIL.Image.open" in calls:
            opened.add(path)
    assert opened == {"lightning_retrieval/preparation/prepare.py"}


def changes_of_files(tree):
    """Uses of what renames, replaces or deletes a file: `Path.replace` takes one argument, and `str.replace` two."""
    names = {"os.rename", "os.renames", "os.replace", "os.remove", "os.unlink", "shutil.rmtree", "shutil.move"}
    attributes = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    found = [node for node in attributes if node.attr == "unlink" or ast.unparse(node) in names]
    for call in [node for node in nodes(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]:
        if call.func.attr in ("rename", "replace") and len(call.args) == 1 and not call.keywords:
            found.append(call)
    return found


def test_files_are_renamed_and_deleted_in_one_module():
    """It waits for programs that have them open, as Windows asks for."""
    assert {path for path, tree in TREES.items() if changes_of_files(tree)} == {"lightning_retrieval/files.py"}


def code_lines(source, tree):
    """The numbers of the lines that are neither blank nor comment nor docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short(package):
    long = []
    for path, tree in syntax_trees(package).items():
        lines = code_lines((REPOSITORY / path).read_text(encoding="utf-8"), tree)
        for function in [node for node in nodes(tree) if isinstance(node, FUNCTIONS)]:
            body = lines.intersection(range(function.body[0].lineno, function.end_lineno + 1))
            if len(body) > LONGEST_FUNCTION:
                long.append(f"{path}:{function.lineno} has {len(body)} lines")
    assert not long
