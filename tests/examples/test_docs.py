"""The code of the documentation runs, and its links have a target.

The blocks of a page run from top to bottom in one folder with the files that a reader has: `examples` of the
repository, a folder `photos` with one folder of images per class, and an image `query.jpg`. The language of a block
says what it is:

    python   is run, with one namespace for all blocks of a page; a block with a title is a file, which can be imported
    console  each line after `$ ` is a command, which is run; other lines are output, which is not compared
    bash     each line is a command, as above
    yaml     is written to the file that its title names, for a later command
    text     output, directory trees and formulas: not run; the options of commands in it must exist

Training stops after two batches. Nothing is downloaded: commands with `--weights DEFAULT` get a file of random weights.
Commands that create the environment are not run here; `.ci/run` starts with them.
"""

import doctest
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from torchvision.models import get_model

from lightning_retrieval.cli.main import main
from tests.examples.scripts import run_script
from tests.source_tree import PACKAGES, REPOSITORY, module_name, syntax_trees
from tests.test_surface import public_objects

pytestmark = pytest.mark.slow

DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
FURTHER_PAGES = [
    *(REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(REPOSITORY / name for name in ("examples/README.md", "tests/README.md")),
    *sorted((REPOSITORY / "examples/study").glob("*.md")),
]

ENVIRONMENT = (
    "git clone",
    "cd",
    ".",
    "source",
    "python3 -m venv",
    "pip install",
    "python -m pip install",
    "python -m pytest",
)
SHORT_FIT = {  # for the command line; an environment variable limits scripts and blocks
    "max_epochs": 1,
    "limit_train_batches": 2,
    "limit_val_batches": 2,
    "limit_test_batches": 2,
    "check_val_every_n_epoch": 1,
}
SHORT = ["--weights", "none", "--epochs", "1", "--workers", "0", "--size", "32", "--backbone", "squeezenet1_1"]
SHORT_SCRIPTS = {
    "examples/own_images.py": SHORT,
    "examples/compare.py": [*SHORT, "--seeds", "0", "1"],
    "examples/relevance.py": ["--steps", "1", "--seeds", "0", "--tags", "4", "--classes", "9"],
    "examples/two_sides.py": ["--steps", "1", "--seeds", "0", "--tasks", "fonts, one network"],
}
IGNORED = [  # what the library warns of in short runs, and of characters that are in one of two fonts
    "ignore:RetrievalEvaluation. (val|test) metrics cover:UserWarning",
    "ignore:PairSampler. skipped .* because they have only queries or only candidates:UserWarning",
]


def each(paths):
    return pytest.mark.parametrize("page", paths, ids=lambda page: page.relative_to(REPOSITORY).as_posix())


@pytest.mark.parametrize("name", [module_name(path) for path in syntax_trees(*PACKAGES)])
def test_examples_of_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0, "see the output above"


class Block(NamedTuple):
    line: int  # of the page, where the text begins
    language: str
    title: str | None
    text: str


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    blocks = [Block(text.count("\n", 0, block.start()) + 2, *block.groups()) for block in found]
    fences = re.findall(r"^\s*(?:```|~~~)", text, flags=re.MULTILINE)
    assert len(fences) == 2 * len(blocks), (
        f"{page} has a fence that is indented or has other marks; it would not be run"
    )
    return blocks


def commands_of(block):
    """The commands of a block, as lists of words, without the folder of the environment and without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [[words[0].removeprefix(".venv/bin/"), *words[1:]] for words in commands if words]


def run_block(block, page, namespace, monkeypatch):
    if block.title:
        Path(block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        # Empty lines before it, so that an error names the line of the page.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
    elif block.language in ("console", "bash"):
        for command in commands_of(block):
            run_command(command, monkeypatch)
    else:
        assert block.language == "text", f"the block at line {block.line} has an unknown language, or no title"


def run_command(command, monkeypatch):
    if command[:3] == ["python", "-m", "lightning_retrieval.cli"]:
        command = ["lightning-retrieval", *command[3:]]
    program, *words = with_random_weights(command)
    if any(command[: len(start.split())] == start.split() for start in ENVIRONMENT):
        return
    if program == "lightning-retrieval":
        if words[0] == "fit":
            words += [f"--trainer.{name}={value}" for name, value in SHORT_FIT.items()]
        code = 0
        try:
            main(words)
        except SystemExit as end:
            code = end.code or 0
        # The data set of a page does not have the published number of images.
        assert code in ((0, 1) if words[0] == "check" else (0,)), f"{shlex.join(command)} ended with {code}"
    else:
        assert program == "python", f"this test does not know how to run {shlex.join(command)}"
        run_script(words[0], *words[1:], *SHORT_SCRIPTS.get(words[0], []), monkeypatch=monkeypatch)


def with_random_weights(command):
    """The command with a file of random weights in place of `--weights DEFAULT`, which would be downloaded."""
    if "DEFAULT" not in command:
        return command
    name = command[command.index("--backbone") + 1]
    file = Path(f"{name}.pt")
    if not file.exists():
        torch.save(get_model(name).state_dict(), file)
    return [str(file) if word == "DEFAULT" else word for word in command]


def write_files_of_a_reader(folder):
    """Write the files that a reader has."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    for label in range(6):
        for number in range(3):
            path = folder / "photos" / f"class-{label}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((60, 48), 20 * (label + 1)).convert("RGB").save(path)
    Image.effect_noise((60, 48), 40).convert("RGB").save(folder / "query.jpg")


@each([page for page in PAGES if "```" in page.read_text(encoding="utf-8")])
@pytest.mark.filterwarnings(*IGNORED)
def test_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    monkeypatch.syspath_prepend(tmp_path)
    write_files_of_a_reader(tmp_path)
    modules_before = set(sys.modules)
    namespace = {"__name__": "__main__"}
    for block in blocks_of(page):
        run_block(block, page, namespace, monkeypatch)
    for name in set(sys.modules) - modules_before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def commands_not_run(page):
    """The commands in blocks of text."""
    texts = [block.text.replace("\\\n", " ") for block in blocks_of(page) if block.language == "text"]
    found = re.findall(r"^(?:\$ )?lightning-retrieval (.*)$", "\n".join(texts), flags=re.MULTILINE)
    return [shlex.split(words.replace("--ckpt_path CHECKPOINT", ""), comments=True) for words in dict.fromkeys(found)]


@each([page for page in PAGES if commands_not_run(page)])
def test_commands_that_are_not_run_have_valid_options(page, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    for command, *words in commands_not_run(page):
        is_config = any(word.startswith("examples/") for word in words)
        asked = [*words, "--print_config"] if is_config else [*words[: 2 * (command == "check")], "--help"]
        with pytest.raises(SystemExit) as ended:
            main([command, *asked])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        options = {word for word in words if word.startswith("-")}
        assert is_config or options <= set(re.findall(r"--?[\w.]+", out)), shlex.join([command, *words])


@each(NOTEBOOKS)
def test_a_notebook_runs(page, tmp_path, monkeypatch):
    """In a new kernel, without the cells that install something, which have the tag `skip-execution`."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TEST_BATCHES", "2")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    notebook = nbformat.read(page, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("max_epochs=3", "max_epochs=1").replace("EPOCHS = 20", "EPOCHS = 1")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert list(tmp_path.glob("*.index"))


@each(NOTEBOOKS)
def test_a_notebook_is_stored_with_its_outputs(page):
    """The site shows the stored outputs; messages about the machine and progress bars are none of them."""
    cells = [cell for cell in json.loads(page.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert all(output.get("name") != "stderr" and output["output_type"] != "error" for output in outputs)


@each([*PAGES, *NOTEBOOKS, *FURTHER_PAGES])
def test_relative_links_have_a_target(page):
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(lines) for lines in cells)
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"\]\([^)\s]*\n", text), "a target that goes on in the next line is no link"
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    paths = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    assert not [path for path in paths if path and not (page.parent / path).exists()]


def test_the_reference_has_every_public_name():
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    entries = [entry.rpartition(".") for entry in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)]
    in_reference = [getattr(importlib.import_module(module), name) for module, _, name in entries]
    assert not [name for name, thing in public_objects().items() if thing not in in_reference]
