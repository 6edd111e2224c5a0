"""The program finds the command, its help shows whole sentences, and its messages are in terms of the command line."""

import argparse
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from PIL import Image

import lightning_retrieval
from lightning_retrieval import datamodules
from lightning_retrieval.cli.check import DATA_MODULES, data_modules
from lightning_retrieval.cli.main import LIGHTNING_COMMANDS, OTHER_COMMANDS, main
from lightning_retrieval.command_line import command_line_message, printable
from lightning_retrieval.datamodules import RetrievalDataModule
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.models import Preparation
from lightning_retrieval.search.commands.options import TRANSFORMS, make_parser
from tests.lightning_retrieval.cli.example_config import IGNORED
from tests.lightning_retrieval.search.commands.glyph_commands import run

pytestmark = pytest.mark.filterwarnings(*IGNORED)

LINES = 50  # of a screen
NARROW, WIDE = 80, 200  # columns
OPTION = re.compile(r"^  -.*\n(?:      .*\n)*", flags=re.MULTILINE)  # with its sentence, which may be below it
DEFAULT = re.compile(r" (?:\[[^\]]*\]|\(required\))$")
CLASSES = [
    "--model.help=lightning_retrieval.RetrievalModule",
    "--trainer.callbacks.help=lightning_retrieval.RetrievalEvaluation",
    *(f"--data.help=lightning_retrieval.datamodules.{name}" for name in datamodules.__all__
      if isinstance(found := getattr(datamodules, name), type) and issubclass(found, RetrievalDataModule)
      and not inspect.isabstract(found)),
]  # fmt: skip


@pytest.mark.refusal
@pytest.mark.parametrize("args", ["fit --config a.yaml", b"fit", 3, [1], ["index", None]])
def test_arguments_that_are_no_list_raise(args):
    with pytest.raises(TypeError, match=r"^main: `args` must be a list of strings, such as \['fit', .*, got .*\)\.$"):
        main(args)


WITHOUT_TORCH = """
import sys
from lightning_retrieval.cli.main import main

for command in sys.argv[1:]:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0
assert "torch" not in sys.modules and "pytorch_lightning" not in sys.modules
"""


def test_help_appears_without_an_import_of_torch():
    program = [sys.executable, "-c", WITHOUT_TORCH, "", *OTHER_COMMANDS]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    usages = [line.split()[:3] for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert usages[1:] == [["usage:", "lightning-retrieval", command] for command in OTHER_COMMANDS]


COLLECTIONS = """
import gc, sys
from lightning_retrieval.cli.main import main

during = []
gc.callbacks.append(lambda phase, info: during.append("torch" in sys.modules and "torchvision" not in sys.modules))
try:
    main(["search", "--index", sys.argv[1], sys.argv[2]])
except SystemExit as end:
    assert end.code == 2
print(sum(during), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def test_a_command_imports_libraries_without_garbage_collections(tmp_path):
    """They took a quarter of the time of a search."""
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "manifest.json").write_text("{}")
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    program = [sys.executable, "-c", COLLECTIONS, tmp_path / "index", tmp_path / "a.png"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "True", "True"], done.stderr


@pytest.mark.parametrize("args", [["fot"], []])
def test_error_for_an_unknown_or_missing_command_names_every_command(args, capsys):
    code, _, err = run(capsys, *args)
    assert code == 2
    assert all(command in err for command in (*LIGHTNING_COMMANDS, *OTHER_COMMANDS))


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        ("indx", "index"),
        ("index --chekpoint=a", "--checkpoint"),
        ("check --data=CUBB", "CUB200"),
        ("check --data=CUB200 --rooot=a", "--root"),
        ("fit --modle=a", "--model"),
        ("fit --data=Glyph", "lightning_retrieval.datamodules.Glyphs"),
        ("fit --data=lightning_retrieval.datamodules.Glyphs --data.samples_per_clas=2", "samples_per_class"),
        ("fit --trainer.callbacks+=lightning_retrieval.callbacks.APMonitr", "lightning_retrieval.callbacks.APMonitor"),
        ("fit --model=RetrievalModule --model.loss=ROADMAP", "lightning_retrieval.losses.ROADMAPLoss"),
        ("fit --model=RetrievalModule --model.loss=SmoothApLos", "lightning_retrieval.losses.SmoothAPLoss"),
        ("fit --model=RetrievalModule --model.loss=lightning_retrieval.SmoothAPLoss --model.loss.tauu=1", "tau"),
    ],
)
def test_an_error_for_an_unknown_name_suggests_a_similar_one(args, meant, capsys):
    code, _, err = run(capsys, *args.split())
    assert code == 2
    assert f"did you mean {meant}?" in err
    assert "Expected" not in err


LOSS = "fit --model=RetrievalModule --model.loss="


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        (f"{LOSS}SupConnLoss", "Expected a dot import path string: SupConnLoss"),
        (f"{LOSS}TriplesLoss", "Expected a dot import path string: TriplesLoss"),
        (f"{LOSS}MySmoothAPLoss", "Expected a dot import path string: MySmoothAPLoss"),
        (f"{LOSS}torch.nn.Embeding", "module 'torch.nn' has no attribute 'Embeding'"),
        (f"{LOSS}{__name__}.Outer.Loss --model.loss.alpa=1", "Option 'alpa' is not accepted"),
        (f"{LOSS}{__name__}.made_loss --model.loss.arg=1", "Option 'arg' is not accepted"),
        (f"{LOSS}{__name__}.OpenLoss --model.loss.kwarg=1", "Option 'kwarg' is not accepted"),
    ],
)
def test_a_name_that_may_be_the_users_keeps_the_full_report(args, reported, capsys):
    code, _, err = run(capsys, *args.split())
    assert code == 2
    assert reported in err
    assert "did you mean" not in err


class Outer:
    class Loss(SmoothAPLoss):
        def __init__(self, alpha: float = 1.0):
            super().__init__(alpha)


class OpenLoss(SmoothAPLoss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


def made_loss(tau: float = 1.0) -> SmoothAPLoss:
    return SmoothAPLoss(tau)


@pytest.mark.parametrize(
    ("args", "shown"),
    [(["a\nb"], r"a\nb"), (["--x\ny=1"], r"--x\ny"), ([""], "''"), (["=b"], "=b"), (["--", "b"], "b")],
)
def test_an_unknown_argument_is_shown_in_one_line(args, shown, capsys):
    code, out, err = run(capsys, "demo", "--index=a", *args)
    assert (code, out) == (2, "")
    assert (
        err == f"lightning-retrieval demo: error: unrecognized argument {shown}. See lightning-retrieval demo --help.\n"
    )


def test_index_names_all_missing_options(capsys):
    _, _, err = run(capsys, "index")
    assert "--output, --checkpoint, --images; --embeddings replaces --checkpoint and --images" in err
    assert len(err.splitlines()) == 1
    _, _, err = run(capsys, "index", "--embeddings=a")
    assert "required: --output." in err


# Calls what the script has installed for the program, as bash does when the user presses the tabulator key.
PRESS_TABULATOR = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
installed=$(complete -p lightning-retrieval)
function=${installed#* -F }
"${function% lightning-retrieval}" "$1" "${!#}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_options_classes_and_files(tmp_path, capsys):
    code, script, _ = run(capsys, "completion", "bash")
    assert code == 0
    (tmp_path / "script").write_text(script)
    (tmp_path / "photos").mkdir()
    for typed, completed in (
        ("ind", "index"),
        ("completion z", "zsh"),
        ("fit --trainer.max_e", "--trainer.max_epochs"),
        ("fit --config phot", "photos"),
        ("search --checkp", "--checkpoint"),
        ("index --images phot", "photos"),
        ("check --data CU", "CUB200"),
    ):
        bash = ["bash", "--norc", "-c", PRESS_TABULATOR, "", tmp_path / "script", "lightning-retrieval", *typed.split()]
        pressed = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (pressed.stdout, pressed.stderr) == (f"{completed}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["completion bash", "env"])
def test_the_output_of_a_command_may_be_read_in_part(arguments, tmp_path):
    """As in `lightning-retrieval env | head -1`, where head ends after the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lightning_retrieval.cli", *arguments.split()]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=240)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("command", [*OTHER_COMMANDS, *LIGHTNING_COMMANDS])
def test_help_has_an_example(command, help_of):
    example = help_of(NARROW, command, "--help").partition("example")[2]
    assert re.search(rf"lightning-retrieval {command} (--|bash|>)", example)


@pytest.fixture
def help_of(capsys, monkeypatch):
    """What a command prints for `--help` on a terminal with this number of columns."""

    def printed(columns, *args):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit, match=r"^0$"):
            main(list(args))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= columns
        assert " ..." not in text.replace("COMMAND ...", "").replace("IMAGE ...", "")
        return text

    return printed


def arguments_of(*callables):
    """The arguments that docstrings describe, each description on one line; the last docstring has precedence."""
    found = {}
    for described in callables:
        text = inspect.cleandoc(described.__doc__ or "")
        section = re.search(r"^Args:\n+((?:    .*\n?|\n)*)", text, flags=re.MULTILINE)
        if section is None:
            continue
        for argument in re.split(r"^    (?=\w)", section[1], flags=re.MULTILINE)[1:]:
            name, _, description = argument.partition(":")
            found[name] = " ".join(description.split())
    return found


def sentences(printed, prefix):
    """The sentence that is shown for each option, without its default, by the name without a prefix."""
    shown = {}
    for option in OPTION.findall(printed):
        name, *words = option.split()
        assert len(option.splitlines()) <= 6
        if name.startswith(f"--{prefix}.") and not name.endswith(".help"):
            shown[name.removeprefix(f"--{prefix}.")] = DEFAULT.sub("", " ".join(words))
    return shown


def is_whole(shown, description):
    """Whether the first sentence of a description, or all of it, is shown."""
    rest = description.removeprefix(shown)
    is_end = rest in ("", ".") or rest.startswith((". ", ".Set ", " Default: "))  # "instantiation.Set to True"
    return bool(shown) and description.startswith(shown) and is_end


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_help_of_a_command_has_whole_sentences_in_80_columns(command, help_of):
    printed = help_of(NARROW, command, "--help")
    named = {line.split()[0].rstrip(",") for line in printed.splitlines() if line.startswith("  -")}
    assert {"-h", "-c", "--trainer.max_epochs", "--model", "--model.help", "--data"} <= named
    shown = sentences(printed, "trainer")
    described = arguments_of(pl.Trainer.__init__)
    assert len(shown) > 40
    assert [name for name, sentence in shown.items() if not is_whole(sentence, described[name])] == []
    name = "--trainer.check_val_every_n_epoch"
    assert f"  {name}\n      Perform a validation loop after every `N` training epochs [1]\n" in printed
    assert "--data.help lightning_retrieval.datamodules.CUB200" in printed
    assert "Defaults to" not in printed
    printed = help_of(WIDE, command, "--help")
    assert max(len(group.splitlines()) for group in printed.split("\n\n")) <= LINES
    (epochs,) = (line for line in printed.splitlines() if name in line)
    assert re.fullmatch(rf"  {name} +Perform a validation loop after .* \[1\]", epochs)


@pytest.mark.parametrize("kind", CLASSES)
def test_help_of_a_class_has_whole_sentences_in_80_columns(kind, help_of):
    printed = help_of(NARROW, "fit", kind)
    assert len(printed.splitlines()) <= 2 * LINES
    option, _, path = kind.removeprefix("--").partition(".help=")
    package, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(package), name)
    shown = sentences(printed, option)
    described = arguments_of(*reversed(cls.__mro__))
    assert len(shown) > 5
    assert [name for name, sentence in shown.items() if not is_whole(sentence, described[name])] == []
    if "root" in shown:
        assert re.search(r"^  --data.root\n(?:      .*\n)*      .*\(required\)$", printed, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", [CLASSES[0], "--data.help=lightning_retrieval.datamodules.ImageTable"])
def test_help_of_a_class_fits_on_a_wide_screen(kind, help_of):
    assert len(help_of(WIDE, "fit", kind).splitlines()) <= LINES


OTHERS = [[command, "--help"] for command in OTHER_COMMANDS] + [["--help"], ["check", "--data", "CUB200", "--help"]]


@pytest.mark.parametrize("args", OTHERS, ids=" ".join)
def test_help_of_another_command_has_whole_sentences_in_80_columns(args, help_of):
    """All words are there that a terminal without an end shows."""
    narrow, endless = (help_of(columns, *args).split() for columns in (NARROW, 10_000))
    assert narrow == endless


def test_owners_become_the_command_and_arguments_its_options():
    error = InvalidValue("must be at most the `images` of `index_images`", "search_images", "k", got="`other`")
    message = "search: `-k` must be at most the `--images` of `lightning-retrieval index`, got `other`."
    assert command_line_message("search", error, ["k", "images"]) == message
    for owner in ("", "search_images"):  # which another command may have called
        error = InvalidValue("must be given", owner, "images")
        assert command_line_message("demo", error, ["images"]) == "demo: `--images` must be given."
    error = InvalidValue("must be one of search_images: `factory`", "RetrievalIndex", "factory")
    message = "search: `--factory` must be one of search_images: `--factory`."
    assert command_line_message("search", error, ["factory"]) == message
    error = InvalidValue("must be > 0", "SmoothAPLoss", "tau")  # whose argument is no option, even if there is one
    assert command_line_message("adapt", error, ["tau"]) == str(error)
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert command_line_message("demo", error, []) == str(error)


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "limit"), [("n" * 300, "names of at most 255 bytes"), ("n/" * 3000, "short enough")])
def test_a_path_is_too_long_as_a_whole_or_by_one_of_its_names(name, limit):
    with pytest.raises(OSError, match="File name too long") as raised:
        open(name).close()
    message = command_line_message("index", raised.value, [])
    assert message.startswith("index: a path must ")
    assert limit in message


def test_characters_that_cannot_be_printed_are_escaped():
    assert printable("a b/ü\n\x1b\udc80.jpg") == r"a b/ü\n\x1b\udc80.jpg"


def test_names_of_transforms_are_those_of_the_preparations_that_exist():
    assert Preparation.NAMES == TRANSFORMS


def test_counts_and_missing_files(tmp_path, capsys):
    for label, number in itertools.product("abcd", range(2)):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (ord(label), number, 0)).save(tmp_path / label / f"{number}.png")
    code, out, err = run(capsys, "check", "--data", "ImageFolder", "--root", tmp_path, "--test_fraction", 0.25)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[:3]]
    assert rows == [["split", "images", "classes"], ["train", "6", "3"], ["test", "2", "1"]]
    assert out.splitlines()[3:] == ["note: all images have 8 x 8 pixels"]

    (tmp_path / "table.csv").write_text("image,label,split\na/0.png,a,train\nb/0.png,b,test\ngone.png,b,test\n")
    table = tmp_path / "table.csv"
    code, out, err = run(capsys, "check", "--data=ImageTable", "--root", tmp_path, "--table", table)
    assert (code, err) == (1, "")
    assert "missing: gone.png" in out.splitlines()


@pytest.mark.refusal
def test_check_names_its_options_in_place_of_the_arguments_of_python(tmp_path, capsys):
    for name in ("a/x/1.png", "b/y/1.png", "file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name, "png")
    for options, sentence in (
        (["--root", tmp_path / "file"], "check: `--root` must be a folder of class folders, got .*, which is a file"),
        (
            ["--root", tmp_path],
            "check: .*set --categories True .*, or --classes deepest to make a class of each folder",
        ),
        (["--root", tmp_path, "--test_fraction", 2], "check: `--test_fraction` must be between 0 and 1, got 2"),
    ):
        code, out, err = run(capsys, "check", "--data", "ImageFolder", *options)
        lines = [line for line in err.splitlines() if not line.startswith("check: loading ")]
        assert (code, out, len(lines)) == (2, "", 1)
        assert re.match(sentence, lines[0]), lines
        assert '="' not in lines[0]
        assert "=True" not in lines[0]


def test_check_takes_the_settings_of_a_data_module_with_the_prefix_of_fit(tmp_path, capsys):
    for number, label in enumerate("abcd"):
        (tmp_path / "deep" / label).mkdir(parents=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "deep" / label / "0.png")
    printed = []
    for prefix in ("--", "--data."):
        options = [f"{prefix}root", tmp_path, f"{prefix}classes=2"]
        code, out, err = run(capsys, "check", "--data", "ImageFolder", *options)
        assert (code, err) == (0, "")
        printed.append(out)
    assert printed[0] == printed[1]
    assert printed[0].splitlines()[1].split() == ["train", "2", "2"]
    _, out, _ = run(capsys, "check", "--help")
    assert "--data ImageFolder --help" in " ".join(out.split())


@pytest.mark.slow
def test_check_shows_its_first_line_before_it_imports_libraries(tmp_path):
    """The line comes at once, while the images are read seconds later; help and errors come without it."""
    for label in "ab":
        (tmp_path / label).mkdir()
        Image.new("RGB", (8, 8), (ord(label), 0, 0)).save(tmp_path / label / "0.png")
    program = [sys.executable, "-X", "importtime", "-m", "lightning_retrieval.cli", "check", "--data"]
    done = subprocess.run([*program, "ImageFolder", "--root", tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    shown = re.search(r"^check: loading ImageFolder", done.stderr, flags=re.MULTILINE)
    assert shown.start() < re.search(r"\| +torch$", done.stderr, flags=re.MULTILINE).start()
    for more in (["ImageFolder", "--help"], ["Nothing"]):
        done = subprocess.run([*program, *more], capture_output=True, text=True, timeout=120)
        assert "check: loading" not in done.stderr


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--num_workers=a", "`--num_workers` must be an integer, got a."),
        ("--test_fraction=half", "`--test_fraction` must be a number, got half."),
        (
            "--eval_transform=torchvision.transforms.v2.Resize --eval_transform.size=a",
            "Resize: `size` must be a list, an integer or null, got a.",
        ),
    ],
)
def test_check_reports_an_invalid_setting_in_one_sentence(given, sentence, tmp_path, capsys):
    code, _, err = run(capsys, "check", "--data=ImageFolder", f"--root={tmp_path}", *given.split())
    assert code == 2
    assert err.splitlines()[-1] == f"lightning-retrieval check: error: {sentence} See lightning-retrieval check --help."


def test_both_sides_of_pairs_are_counted(tmp_path, capsys):
    for side, classes in (("sketches", "abcd"), ("photos", "abcdef")):
        for label in classes:
            (tmp_path / side / label).mkdir(parents=True)
            Image.new("RGB", (8, 8), (ord(label), len(side), 0)).save(tmp_path / side / label / "0.png")
    options = ["check", "--data", "Pairs", "--queries", "ImageFolder", "--queries.root", tmp_path / "sketches"]
    of_candidates = ["--candidates", "ImageFolder", "--candidates.root", tmp_path / "photos"]
    code, out, err = run(capsys, *options, *of_candidates)
    assert (code, err) == (0, "")
    counts = {row[0]: row[1:] for row in map(str.split, out.splitlines()[:5])}
    assert counts["queries/train"] == counts["queries/test"] == ["2", "2"]
    assert counts["candidates/train"] == counts["candidates/test"] == ["3", "3"]


def test_glyphs_need_no_root(capsys):
    code, out, err = run(capsys, "check", "--data", "Glyphs")
    assert err == ""
    rows = [line.split() for line in out.splitlines()[:4]]
    assert rows[0] == ["split", "images", "classes", "published:", "images", "classes"]
    assert [row[0] for row in rows[1:]] == ["train", "val", "test"]
    assert (code == 0) == all(row[1:3] == row[3:] for row in rows[1:])  # as with the fonts of the table


def test_a_package_that_check_needs_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, out, err = run(capsys, "check", "--data", "HuggingFaceImages", "--path", "user/birds")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'lightning-retrieval[" in err


def test_data_modules_are_known_by_name(capsys):
    assert list(DATA_MODULES) == sorted(data_modules())
    code, _, err = run(capsys, "check", "--data", "Nothing", "--root", "x")
    assert (code, "there is no data module 'Nothing'" in err) == (2, True)
    assert "DataModule" not in err  # not the classes that are made to be subclassed
    code, out, _ = run(capsys, "check", "--help")
    assert (code, [name for name in DATA_MODULES if name not in out]) == (0, [])
    code, out, _ = run(capsys, "check", "--data", "InShop", "--help")
    assert (code, "--high_res" in out) == (0, True)


@pytest.mark.parametrize(("null", "form"), [("null", "{}={}"), ("None", "{} {}")])
def test_null_and_none_are_no_text_in_a_config(null, form, tmp_path, capsys, monkeypatch):
    """Optional strings, paths and sizes of the module, of objects in it, of the data and of the trainer."""
    monkeypatch.chdir(tmp_path)
    omitted = ("model.embedder.weights", "model.embedder.image_size", "model.sides", "data.cache_dir")
    args = ["fit", "--model=RetrievalModule", "--model.embedder=Embedder", "--model.embedder.backbone=resnet18"]
    args += ["--model.loss=LogRankLoss", "--data=Glyphs"]
    for name in (*omitted, "trainer.default_root_dir"):
        args += form.format(f"--{name}", null).split()
    code, printed, err = run(capsys, *args, "--print_config")
    assert (code, err) == (0, "")
    config = yaml.safe_load(printed)
    embedder = config["model"]["init_args"]["embedder"]["init_args"]
    assert (embedder["weights"], embedder["image_size"], config["model"]["init_args"]["sides"]) == (None,) * 3
    assert (config["data"]["init_args"]["cache_dir"], config["trainer"]["default_root_dir"]) == (None, None)
    code, _, _ = run(capsys, "check", "--data=Glyphs", *form.format("--cache_dir", null).split())
    assert code != 2  # 1 with fonts of another release of matplotlib
    assert not list(tmp_path.iterdir())  # no folder is named None


@pytest.mark.parametrize("null", ["null", "None"])
@pytest.mark.parametrize("command", ["adapt", "embed", "export", "index", "search", "demo"])
def test_an_option_given_as_null_or_none_is_not_given(null, command):
    parser = make_parser(command)
    omitted = {}
    for action in parser._actions:
        is_optional = bool(action.option_strings) and not action.required and action.default is None
        if is_optional and action.nargs is None and type(action) is argparse._StoreAction:
            omitted[action.dest] = action.option_strings[0]
    assert omitted
    required = [
        f"{action.option_strings[0]}=x" for action in parser._actions if action.required and action.option_strings
    ]
    options = parser.parse_args([*required, *(f"{name}={null}" for name in omitted.values())])
    assert {name: getattr(options, name) for name in omitted} == dict.fromkeys(omitted)


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lightning-retrieval {lightning_retrieval.__version__}\n"


def test_example_writes_a_config_that_fit_runs_and_replaces_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["example", "glyphs"])
    assert capsys.readouterr().out == "Run it with: lightning-retrieval fit --config glyphs.yaml\n"
    assert run(capsys, "fit", "--config", "glyphs.yaml", "--print_config")[0] == 0
    main(["example", "glyphs", "--output=-other file.yaml"])
    assert capsys.readouterr().out == "Run it with: lightning-retrieval fit --config './-other file.yaml'\n"
    Path("glyphs.yaml").write_text("of the user")
    Path("folder").mkdir()
    for options, sentence in (
        ([], "example: `--output` must be a new file, got glyphs.yaml, which exists; give another name."),
        (
            ["--output", "folder"],
            "example: `--output` must be a new file, got folder, which exists; give another name.",
        ),
        (["--output", "no/a.yaml"], "example: no/a.yaml cannot be written (No such file or directory); "),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["example", "glyphs", *options])
        assert capsys.readouterr().err.startswith(sentence)
    assert Path("glyphs.yaml").read_text() == "of the user"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["-other file.yaml", "folder", "glyphs.yaml"]


def test_env_shows_what_a_bug_report_needs(capsys):
    main(["env"])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    values = {name: value.strip() for name, value in lines.items()}
    assert values["lightning-retrieval"] == lightning_retrieval.__version__
    assert values["torch"] == metadata.version("torch")
    assert values["pytorch-lightning"] == pl.__version__
    assert values["timm"] == metadata.version("timm")  # of an extra
    assert values["GPUs"] == str(torch.cuda.device_count())
    assert values["Python"].startswith("3.")
    assert "ruff" not in values  # of those who work on the library


def test_env_names_packages_that_are_not_installed(capsys, monkeypatch):
    def version(package):
        if package == "timm":
            raise metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("lightning_retrieval.cli.env.version", version)
    main(["env"])
    assert re.search(r"^timm: +not installed$", capsys.readouterr().out, flags=re.MULTILINE)
