"""The documentation is correct: every block runs, every link has a target, every public name is documented.

The blocks of a page run from top to bottom in one folder with the files that a reader has: `examples` of the
repository, a folder `photos` with one folder of images per class, and an image `query.jpg`. The language of a block
says what it is:

    python   is run, with one namespace for all blocks of a page; a block with a title is a file, which can be imported
    console  each line after `$ ` is a command, which is run; other lines are output, which is not compared
    bash     each line is a command, as above
    yaml     is written to the file that its title names, for a later command
    text     output, directory trees and formulas: not run

Training stops after two batches and downloads no weights. Commands that create the environment are not run here;
`.ci/run` starts with them.
"""

import ast
import doctest
import functools
import importlib
import inspect
import json
import logging
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import sklearn  # noqa: F401 - sets variables of the environment when it is first imported: now, not within a test
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.cli.main import main
from lightning_retrieval.search.commands.options import COMMANDS, parse
from tests.quiet_trainer import quiet_trainer
from tests.source_tree import PACKAGES, REPOSITORY, module_name, syntax_trees
from tests.test_surface import public_objects

pytestmark = pytest.mark.slow

PUBLIC = public_objects()
PUBLIC_NAMES = {name.rpartition(".")[2] for name in PUBLIC}
RESULTS = REPOSITORY / "benchmarks" / "results"
TIMING = runpy.run_path(str(REPOSITORY / "benchmarks" / "timing.py"))
DOCS = REPOSITORY / "docs"
REFERENCE = sorted((DOCS / "api").glob("*.md"))
PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())

LANGUAGES = ("python", "console", "bash", "yaml", "text")
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
    "ignore:RetrievalEvaluation. .* have a k above the number of ranked images:UserWarning",
    "ignore:PairSampler. skipped .* because they have only queries or only candidates:UserWarning",
]


MODULES = sorted(module_name(path) for path in syntax_trees(*PACKAGES))


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0, "see the output above"


class Block(NamedTuple):
    line: int  # of the page, where the text begins
    language: str
    title: str | None
    text: str


def blocks_of(text):
    found = re.finditer(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, block.start()) + 2, *block.groups()) for block in found]


def commands_of(block):
    """The commands of a block, as lists of words, without the folder of the environment and without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [[words[0].removeprefix(".venv/bin/"), *words[1:]] for words in commands if words]


def run_blocks(text, page, monkeypatch):
    namespace = {"__name__": "__main__"}
    for block in blocks_of(text):
        run_block(block, page, namespace, monkeypatch)


def run_block(block, page, namespace, monkeypatch):
    if block.title:
        Path(block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        # Empty lines before it, so that an error names the line of the page.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
    elif block.language in ("console", "bash"):
        commands = commands_of(block)
        assert commands, f"no command in the block at line {block.line}; use the language `text` for other text"
        for command in commands:
            run_command(command, monkeypatch)
    else:
        assert block.language != "yaml", f'the block at line {block.line} names no file: ```yaml title="own.yaml"'
        assert block.language == "text", f"the block at line {block.line} is none of {LANGUAGES}"


def run_command(command, monkeypatch):
    if command[:3] == ["python", "-m", "lightning_retrieval.cli"]:
        command = ["lightning-retrieval", *command[3:]]
    program, *words = command
    if any(command[: len(start.split())] == start.split() for start in ENVIRONMENT):
        return
    if program == "lightning-retrieval":
        code = 0
        if words[0] == "fit":
            words += [f"--trainer.{name}={value}" for name, value in SHORT_FIT.items()]
        try:
            main(words)
        except SystemExit as end:
            code = end.code or 0
        # The data set of a page does not have the published number of images.
        assert code in ((0, 1) if words[0] == "check" else (0,)), f"{shlex.join(command)} ended with {code}"
    elif program == "python" and words and words[0].endswith(".py"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", words + SHORT_SCRIPTS.get(words[0], []))
            patch.syspath_prepend(Path(words[0]).resolve().parent)  # a script imports the modules beside it
            run_script(words[0])
    else:
        raise AssertionError(f"this test does not know how to run {shlex.join(command)}")


def run_script(path):
    """Run a script as `python` does; it may change how much Lightning prints."""
    logger = logging.getLogger("pytorch_lightning")
    level, code = logger.level, 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        logger.setLevel(level)
    assert code == 0, f"{path} ended with {code}"


def write_files_of_a_reader(folder):
    """Write the files that a reader has."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    for label in range(6):
        for number in range(3):
            path = folder / "photos" / f"class-{label}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((60, 48), 20 * (label + 1)).convert("RGB").save(path)
    Image.effect_noise((60, 48), 40).convert("RGB").save(folder / "query.jpg")


@pages
@pytest.mark.filterwarnings(*IGNORED)
def test_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    monkeypatch.syspath_prepend(tmp_path)
    write_files_of_a_reader(tmp_path)
    modules_before = set(sys.modules)
    run_blocks(page.read_text(encoding="utf-8"), page, monkeypatch)
    for name in set(sys.modules) - modules_before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def callers(run):
    """For each function of the packages that a call runs, the functions in which it ran: pairs of file and name."""
    inside, found = [], {}

    def record(frame, event, _):
        if event == "call":
            path = Path(frame.f_code.co_filename)
            key = None
            if path.is_relative_to(REPOSITORY):
                file = path.relative_to(REPOSITORY).as_posix().removeprefix("lightning_retrieval/")
                key = (file, frame.f_code.co_qualname)
                found.setdefault(key, set()).update(inside)
            inside.append(key)
        elif event == "return" and inside:
            inside.pop()

    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


class NumberedPoints(TensorDataset):
    def __getitem__(self, index):
        return {**dict(zip(("images", "labels"), super().__getitem__(index))), "ids": index}


def test_functions_of_a_step_and_of_an_evaluation_call_each_other_as_the_page_says():
    """Each is called by the nearest one above it that begins further left."""
    points = NumberedPoints(torch.randn(24, 6), torch.arange(24) // 4)
    module = RetrievalModule(torch.nn.Linear(6, 4), SmoothAPLoss(), chunk_size=5)
    trainer = quiet_trainer(max_epochs=1, callbacks=[RetrievalEvaluation(ks=(1,))])
    loader = DataLoader(points, batch_size=24)
    found, lines = callers(lambda: trainer.fit(module, loader, loader)), 0
    for block in blocks_of((DOCS / "how-a-step-works.md").read_text(encoding="utf-8")):
        above = []
        for line in block.text.splitlines():
            match = re.match(r"(\S+\.py) +([\w.]+)(.*)", line)
            if block.language != "text" or match is None:
                above = []
                continue
            indent, function = match.start(2), match.group(1, 2)
            above = [caller for caller in above if caller[0] < indent]
            lines += 1
            if "with several processes" not in match[3]:
                assert function in found, line
                assert not above or above[-1][1] in found[function], line
            above.append((indent, function))
    assert lines > 20


@pages
def test_commands_that_need_a_network_or_a_browser_have_valid_options(page):
    """Blocks of the language `text` are not run; commands of a search that are in them can at least be parsed."""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language != "text":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if "lightning-retrieval " in line else []
            if words[:1] == ["lightning-retrieval"] and words[1] in COMMANDS:
                parse(words[1], words[2:])


@pages
def test_every_block_of_a_page_is_found_and_every_file_is_used(page):
    """A fence that is indented or starts in another way would not be run."""
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(re.findall(r"^\s*(?:```|~~~)", text, flags=re.MULTILINE)) == 2 * len(blocks)
    for index, block in enumerate(blocks):
        if block.title:
            name = block.title.removesuffix(".py")
            assert any(name in after.text for after in blocks[index + 1 :]), f"{block.title} is never read"


def links(text):
    """Targets of links and images outside of code."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


def quoted(text):
    """(figure, section) of figures that link to the section of benchmarks.md in which they were measured."""
    return re.findall(r"\[([\d.,]+(?: \w+)?)\]\((?:docs/)?benchmarks\.md#([\w-]+)\)", text)


def measured(text, section):
    """The text of a section of a page."""
    parts = {
        re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-"): body
        for title, body in re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", text, flags=re.MULTILINE)
    }
    return parts[section]


@pages
def test_quoted_figures_are_those_of_the_benchmarks(page):
    benchmarks = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    wrong = [
        (figure, section)
        for figure, section in quoted(page.read_text(encoding="utf-8"))
        if not re.search(rf"\| {re.escape(figure)}[ |]", measured(benchmarks, section))
    ]
    assert not wrong


DIFFERENCE = r"([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)"


def negative(difference):
    """The same difference, seen from the other setting."""
    mean, low, high = (
        number.translate(str.maketrans("+-", "-+")) for number in re.fullmatch(DIFFERENCE, difference).groups()
    )
    return f"{mean} ({high} to {low})"


@pages
def test_quoted_differences_are_those_of_the_study(page):
    wrong = []
    for difference, path, section in quoted_differences(page.read_text(encoding="utf-8")):
        text = " ".join(measured((page.parent / path).read_text(encoding="utf-8"), section).split())
        stated = (f"difference {difference}:", f"difference {negative(difference)}:")
        in_table = (f"| {difference} |", f"| {negative(difference)} |")
        if not any(each in text for each in (*stated, *in_table)):
            wrong.append((difference, section))
    assert not wrong


def quoted_differences(text):
    """(difference, page, section) of differences that link to the section of the study's page that has them."""
    return re.findall(r"\[([^\[\]]*\d \([+-][^\[\]]*\))\]\((study/[\w-]+\.md)#([\w-]+)\)", text)


@pytest.mark.parametrize(
    ("section", "least"), [("all-losses-on-five-tasks", 15), ("what-the-study-shows", 4), ("other-choices", 15)]
)
def test_every_line_of_the_decision_tables_has_a_difference(section, least):
    text = measured((DOCS / "choosing-a-loss.md").read_text(encoding="utf-8"), section)
    lines = re.findall(r"^\|.*\|$", text, flags=re.MULTILINE)[2:]
    assert len(lines) >= least
    assert all(quoted_differences(line) for line in lines)


def cell(value):
    """A value of a benchmark's JSON as the benchmark prints it."""
    if isinstance(value, dict):
        return str(TIMING["Timing"](**value))
    return TIMING["_cell"](value)


def markdown(results):
    """The table of a benchmark's results; names of public classes are code."""
    columns = list(dict.fromkeys(column for row in results for column in row))
    lines = [columns, ["---"] * len(columns)]
    for row in results:
        cells = [cell(row.get(column)) for column in columns]
        lines.append([f"`{text}`" if text in PUBLIC_NAMES else text for text in cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_a_measured_table_is_that_of_its_results(file):
    """`benchmarks/results` holds what some commands wrote with `--json`."""
    table = markdown(json.loads(file.read_text(encoding="utf-8"))["results"])
    assert f"\n{table}\n" in (DOCS / "benchmarks.md").read_text(encoding="utf-8") + "\n"


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_relative_links_have_a_target(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\]\([^)\s]*\n", text)  # a target that goes on in the next line is no link
    targets = [target for target in links(text) if not re.match(r"[a-z]+:", target)]
    paths = [target.split("#")[0] for target in targets]
    assert not [path for path in paths if path and not (page.parent / path).exists()]


def targets(nav):
    """The files in a navigation of mkdocs.yml, whose entries are files, {title: file} or {title: entries}."""
    found = []
    for entry in nav:
        parts = entry.values() if isinstance(entry, dict) else [entry]
        for part in parts:
            found += targets(part) if isinstance(part, list) else [part]
    return found


def test_every_page_is_in_the_navigation():
    nav = targets(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in pages)


def pages_of_links(page):
    """The pages to which the text of a page or a notebook links."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    paths = [target.split("#")[0] for target in links(text) if not re.match(r"[a-z]+:", target)]
    found = {(page.parent / path).resolve() for path in paths if path.endswith((".md", ".ipynb"))}
    return {path for path in found if path.is_relative_to(DOCS) and path.exists()}


def test_every_page_is_at_most_two_links_from_the_home_page():
    """The groups of the sidebar do not count, because they are closed when a reader arrives."""
    first = pages_of_links(DOCS / "index.md")
    second = set().union(*(pages_of_links(page) for page in first))
    pages = {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")}
    assert pages - first - second <= {DOCS / "index.md"}


def test_the_sidebar_has_few_entries():
    """Material shows the first level alone until a section is opened, unless sections are always open."""
    config = yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    assert len(config["nav"]) <= 8
    assert not {"navigation.sections", "navigation.expand"} & set(config["theme"]["features"])


def referenced():
    """{entry: object} of the reference pages; an entry that does not exist fails."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    entries = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
    assert len(entries) == len(set(entries))
    parts = {entry: entry.rpartition(".") for entry in entries}
    return {entry: getattr(importlib.import_module(module), name) for entry, (module, _, name) in parts.items()}


def imported_by(page):
    """The modules and names that the page's blocks of Python import from modules of the library."""
    code = [block.text for block in blocks_of(page.read_text(encoding="utf-8")) if block.language == "python"]
    nodes = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if node.module.startswith("lightning_retrieval.")]
    return {(node.module, alias.name) for node in ours for alias in node.names}


OF_COMMANDS = "lightning_retrieval.search.commands."  # modules whose functions are public if the pages recommend them
OF_ARGUMENTS = "lightning_retrieval.arguments"  # for classes of a user's own; docs/extending.md describes it


@pages
def test_reference_has_what_the_pages_recommend(page):
    names = [(module, name) for module, name in imported_by(page) if module != OF_ARGUMENTS]
    things = {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in names}
    in_reference = set(referenced().values())
    assert not [name for name, thing in things.items() if thing not in in_reference]


def test_reference_has_every_public_name_and_no_other():
    in_reference, in_library = set(referenced().values()), set(PUBLIC.values())
    assert not [name for name, thing in PUBLIC.items() if thing not in in_reference]
    others = [thing for thing in in_reference if thing not in in_library]
    assert all(thing.__module__.startswith(OF_COMMANDS) for thing in others)
    assert len(in_reference) == len(referenced()), "an object is listed twice"


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_a_reference_page_has_the_names_of_its_package(page):
    entries = re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert entries
    assert all(entry.startswith(f"lightning_retrieval.{page.stem}.") for entry in entries)
    assert f"](api/{page.name})" in (DOCS / "api.md").read_text(encoding="utf-8")


def undocumented(cls):
    """Public methods and properties of the library, of the class or of a base, that have no docstring."""
    kinds = (property, functools.cached_property, staticmethod, classmethod)
    ours = [base for base in cls.__mro__ if base.__module__.startswith("lightning_retrieval")]
    names = {
        name
        for base in ours
        for name, part in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(part) or isinstance(part, kinds))
    }
    documented = {name for base in cls.__mro__ for name, part in vars(base).items() if getattr(part, "__doc__", None)}
    return sorted(names - documented)


@pytest.mark.parametrize("name", sorted(name for name, thing in PUBLIC.items() if inspect.isclass(thing)))
def test_public_methods_and_properties_have_docstrings(name):
    assert not undocumented(PUBLIC[name])
