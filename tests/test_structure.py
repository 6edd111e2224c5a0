"""Imports point one way, and some things occur nowhere in the library: read from the source, which is not run."""

import ast
import functools
import graphlib
import json
import subprocess
import sys

import pytest

from tests.source_tree import (
    PACKAGES,
    called_name,
    import_statements,
    imported_names,
    lines_that_call,
    module_name,
    nodes,
    syntax_trees,
)

# The layers of the library, lowest first. A module imports from its own layer and from lower ones.
LAYERS = (
    {"arguments", "checks", "compiled", "csv_rows", "files", "invalid", "lazy_names", "optional_packages"},
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
# These may have a parameter `owner`, the prefix of error messages: the checks that constructors call for each of their
# arguments, the context around an optional import, and the errors themselves. Everywhere else, what the user calls
# names itself once (`owned_by`).
MAY_TAKE_AN_OWNER = {"arguments", "checks", "invalid", "optional_packages"}
# Only these modules of the core may import Lightning, so that a plain PyTorch loop can use the rest.
MAY_IMPORT_LIGHTNING = {
    "lightning_retrieval/loading.py",
    "lightning_retrieval/preparation/of_run.py",
    "lightning_retrieval/training/step.py",
    "lightning_retrieval/training/checkpointed_module.py",
    "lightning_retrieval/training/manual_training.py",
    "lightning_retrieval/training/restored_states.py",
    "lightning_retrieval/training/run_report.py",
    "lightning_retrieval/training/trainer_checks.py",
    "lightning_retrieval/search/commands/adapt.py",
    "lightning_retrieval/search/commands/embed.py",
    "lightning_retrieval/search/embedding_writer.py",
    "lightning_retrieval/search/report/callback.py",
    "lightning_retrieval/cli/fit.py",
}
MAY_IMPORT_BY_NAME = {
    "lightning_retrieval/backend.py",  # imports Lightning from the package that the program uses
    "lightning_retrieval/lazy_names.py",  # imports each public name when it is first used
    "lightning_retrieval/cli/main.py",  # finds the commands that use a trained model
    "lightning_retrieval/plain_data/rules.py",  # rebuilds a class from the path that a file holds
}


@functools.cache
def modules():
    """{name of each module of the library: syntax tree}."""
    return {module_name(path): tree for path, tree in syntax_trees(*PACKAGES).items()}


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


def upward_imports(imports):
    """Imports of a module of a higher layer, given {module: modules that it imports}."""
    found = []
    for module, imported in imports.items():
        layer = layer_of(package_of(module))
        found += [f"{module} imports {other}" for other in sorted(imported) if layer_of(package_of(other)) > layer]
    return found


def package_graph(imports):
    """{package: other packages that it imports}, given {module: modules that it imports}."""
    graph = {}
    for module, imported in imports.items():
        package = package_of(module)
        graph.setdefault(package, set()).update({package_of(other) for other in imported} - {package})
    return graph


def at_import_time(tree):
    """Import statements that run when the module is loaded: not in functions, not for the type checker only."""
    pending, found = list(tree.body), []
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(node)
        for_type_checker = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not for_type_checker:
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def top_levels(node):
    """The top-level packages that an import statement imports from."""
    return {name.split(".")[0] for name in imported_names(node)}


def imports_from(top_level_names, trees, statements=import_statements):
    """Locations of imports of these top-level packages."""
    found = []
    for path, tree in trees.items():
        found += [f"{path}:{node.lineno}" for node in statements(tree) if top_levels(node) & top_level_names]
    return found


@pytest.fixture(scope="module")
def imports():
    """{module: modules of the library that it imports}, without the root.

    The root only gathers the public names of all packages. Nothing in the library may import from it.
    """
    found = {name: library_imports(tree) - {name} for name, tree in modules().items()}
    del found["lightning_retrieval"]
    # The table of lazy names, which imports nothing by itself, has the callbacks of the search product.
    found["lightning_retrieval.callbacks"] = library_imports(modules()["lightning_retrieval.callbacks"], at_import_time)
    return found


def test_nothing_in_the_library_imports_from_its_root(imports):
    assert not [module for module, imported in imports.items() if "lightning_retrieval" in imported]


def test_every_package_has_a_layer():
    packages = {package_of(module) for module in modules()} - {""}
    assert packages == set().union(*LAYERS)


def test_no_module_imports_from_a_higher_layer(imports):
    assert not upward_imports(imports)


def test_callbacks_and_datamodules_do_not_import_each_other(imports):
    graph = package_graph(imports)
    assert "datamodules" not in graph["callbacks"]
    assert "callbacks" not in graph["datamodules"]


def test_data_modules_know_neither_training_nor_a_network(imports):
    known = set()
    for module, imported in imports.items():
        if package_of(module) == "datamodules":
            known |= imported
    assert "training" not in {package_of(module) for module in known}
    of_models = {module for module in known if package_of(module) == "models"}
    assert of_models == {"lightning_retrieval.models.sides", "lightning_retrieval.models.tokenizers"}


def test_nothing_outside_of_search_imports_it(imports):
    """Training and evaluation know nothing of what happens after them, except in tables of lazy names."""
    users = set()
    for module, imported in imports.items():
        if package_of(module) != "search" and "search" in {package_of(other) for other in imported}:
            users.add(module)
    assert not users


def test_neither_modules_nor_packages_import_in_a_circle(imports):
    for graph in (imports, package_graph(imports)):
        order = list(graphlib.TopologicalSorter(graph).static_order())
        assert set(order) == set(graph)


def test_only_the_named_modules_of_the_core_import_lightning():
    core = {path: tree for path, tree in syntax_trees(*PACKAGES).items() if path.startswith("lightning_retrieval/")}
    users = {path for path, tree in core.items() if "lightning_retrieval.backend" in library_imports(tree)}
    assert users == MAY_IMPORT_LIGHTNING


def test_only_one_module_decides_between_the_packages_of_lightning():
    locations = imports_from({"pytorch_lightning", "lightning", "lightning_fabric"}, syntax_trees(*PACKAGES))
    assert {location.split(":")[0] for location in locations} == {"lightning_retrieval/backend.py"}


def test_only_the_named_modules_import_by_name():
    found = {path for path, tree in syntax_trees(*PACKAGES).items() if lines_that_call(tree, "import_module")}
    assert found == MAY_IMPORT_BY_NAME
    assert not [path for path, tree in syntax_trees(*PACKAGES).items() if lines_that_call(tree, "__import__")]


def test_heavy_packages_are_imported_where_they_are_needed():
    assert not imports_from(LAZY, syntax_trees(*PACKAGES), at_import_time)


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
    assert not loaded & (LAZY | {"pytorch_lightning", "lightning"})


def test_image_files_are_opened_in_one_place():
    """Pillow starts programs for some formats, so only `open_image`, which names the formats, opens files."""
    opened = set()
    for path, tree in syntax_trees(*PACKAGES).items():
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
    changing = {path for path, tree in syntax_trees(*PACKAGES).items() if changes_of_files(tree)}
    assert changing == {"lightning_retrieval/files.py"}


def test_modules_that_windows_lacks_are_imported_where_they_are_used():
    """So the commands, the examples, the benchmarks and all other tests of a file run without them."""
    lacking = {"fcntl", "grp", "pwd", "resource", "termios"}
    found = []
    for path, tree in syntax_trees(*PACKAGES, "tests", "benchmarks", "examples").items():
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and lacking.intersection(imported_names(node)):
                found.append(path)
    assert not found


def test_the_library_moves_no_tensor_to_a_device_of_its_choice():
    assert not [path for path, tree in syntax_trees(*PACKAGES).items() if lines_that_call(tree, "cuda")]


def test_the_tests_use_the_result_of_every_comparison():
    dropped = []
    for path, tree in syntax_trees("tests").items():
        statements = [node.value for node in nodes(tree) if isinstance(node, ast.Expr)]
        calls = [node for node in statements if isinstance(node, ast.Call)]
        names = ("allclose", "array_equal", "equal", "isclose")
        dropped += [f"{path}:{call.lineno}" for call in calls if called_name(call) in names]
    assert not dropped


def names_an_owner(node):
    """Whether a function has a parameter `owner`, or is called so, as a property is; or a class has such a field."""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        return "owner" in names | {node.name}
    if isinstance(node, ast.ClassDef):
        fields = [getattr(line.target, "id", "") for line in node.body if isinstance(line, ast.AnnAssign)]
        return "owner" in fields
    return False


def test_only_the_checks_take_an_owner():
    """Everything else below a public function raises errors without one, and the public function adds its name."""
    found = set()
    for path, tree in syntax_trees(*PACKAGES).items():
        if module_name(path).removeprefix("lightning_retrieval.") in MAY_TAKE_AN_OWNER:
            continue
        found |= {f"{path}: {node.name}" for node in nodes(tree) if names_an_owner(node)}
    assert found == set()
