"""The program finds the command, shows help without importing torch, and the small commands do what they say."""

import io
import json
import os
import platform
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
from lightning_retrieval.cli.check import data_modules
from lightning_retrieval.cli.main import OTHER_COMMANDS, main
from tests.lightning_retrieval.cli.example_config import IGNORED
from tests.lightning_retrieval.search.commands.glyph_commands import run

pytestmark = pytest.mark.filterwarnings(*IGNORED)

COMMANDS = list(OTHER_COMMANDS)

# Runs each command line, and prints its exit code, what it wrote and whether torch was imported.
RUN_EACH = """
import contextlib, io, json, sys
from lightning_retrieval.cli.main import main
results = []
for args in json.load(sys.stdin):
    code, written = 0, io.StringIO()
    with contextlib.redirect_stderr(written), contextlib.redirect_stdout(written):
        try:
            main(args)
        except SystemExit as end:
            code = end.code
    results.append([code, written.getvalue(), "torch" in sys.modules])
json.dump(results, sys.stdout)
"""
# What the options alone show to be wrong, and the part of the command line that the message names.
WRONG = {
    "index --checkpoint no.ckpt --images photos --output new": "--checkpoint",
    "index --embeddings no --output new": "no",
    "embed --checkpoint a.ckpt --images no --output new": "--images",
    "report --checkpoint a.ckpt --images photos --output new --weights DEFAULT": "--weights",
    "export --checkpoint a.ckpt --output new --input int8": "--input",
    "adapt --embeddings no --output new.ckpt": "no",
    "search --index no a.jpg": "no",
    "demo --index no": "no",
    "shrink no small": "IMAGES",
    "check --data ImageFolder --root no": "--root",
    "fit --config no.yaml": "--config",
}


def test_help_and_messages_about_options_come_without_an_import_of_torch(tmp_path):
    """Which takes seconds; and a wrong command line writes nothing."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "a.ckpt").write_bytes(b"not read yet")
    lines = ["--help", *(f"{command} --help" for command in COMMANDS), *WRONG]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps([line.split() for line in lines]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for line, (code, written, imported) in zip(lines, json.loads(done.stdout), strict=True):
        assert (code, imported) == (2 if line in WRONG else 0, False), (line, written)
        assert WRONG.get(line, f"usage: lightning-retrieval {line.removesuffix('--help')}".strip()) in written, line
        assert line not in WRONG or written.count("\n") == 1, (line, written)
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "a.ckpt"}


def test_commands_know_their_options_without_docstrings():
    command = [sys.executable, "-OO", "-m", "lightning_retrieval.cli", "export", "--help"]
    assert "--checkpoint" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_help_shows_the_options_of_classes(capsys):
    """Those of the module, of a callback, and of every data module."""
    _, out, _ = run(capsys, "fit", "--help")
    assert "--trainer.max_epochs" in out
    _, out, _ = run(capsys, "fit", "--model.help=lightning_retrieval.RetrievalModule")
    assert "--model.chunk_size" in out
    _, out, _ = run(capsys, "fit", "--data.help=lightning_retrieval.datamodules.CUB200")
    assert re.search(r"^  --data.root ROOT\s[^()]*\(required", out, flags=re.MULTILINE)
    _, out, _ = run(capsys, "check", "--data", "InShop", "--help")
    assert "--high_res" in out
    _, out, _ = run(capsys, "check", "--help")
    assert [name for name in ("CUB200", "ImageTable", "Pairs", "RevisitedParis", "VehicleID") if name not in out] == []


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
        ("index --images phot", "photos"),
        ("check --data CU", "CUB200"),
    ):
        bash = ["bash", "--norc", "-c", PRESS_TABULATOR, "", tmp_path / "script", "lightning-retrieval", *typed.split()]
        pressed = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (pressed.stdout, pressed.stderr) == (f"{completed}\n", "")


@pytest.mark.slow
def test_the_output_of_a_command_may_be_read_in_part(tmp_path):
    """As in `lightning-retrieval env | head -1`, where head ends after the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lightning_retrieval.cli", "env"]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=240)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_names_that_the_output_cannot_hold_are_escaped(encoding, tmp_path, monkeypatch):
    """As on Windows, if the output goes to a file or another program."""
    draw(tmp_path, "\u65e5\u672c/a.jpg", "\u65e5\u672c/b.jpg", "c/a.jpg", "c/b.jpg")
    (tmp_path / "\u65e5\u672c" / "\u58ca.jpg").write_bytes(b"no image")
    output = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--data", "ImageFolder", "--root", str(tmp_path)])
    output.flush()
    assert (ended.value.code, r"\u65e5\u672c/\u58ca.jpg" in output.buffer.getvalue().decode()) == (1, True)


def draw(folder, *names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, len(folder.name), 0)).save(folder / name)


def rows_of(out):
    return [line.split() for line in out.splitlines()]


def test_check_counts_the_images_of_a_folder(tmp_path, capsys):
    """Its settings have no prefix, or the prefix that they have in `fit`."""
    draw(tmp_path, *(f"deep/{label}/{number}.png" for label in "abcd" for number in range(2)))
    printed = []
    for prefix in ("--", "--data."):
        options = [f"{prefix}root", tmp_path, f"{prefix}classes=2", f"{prefix}test_fraction", 0.25]
        code, out, err = run(capsys, "check", "--data", "ImageFolder", *options)
        assert (code, err) == (0, "")
        printed.append(out)
    assert rows_of(out)[:3] == [["split", "images", "classes"], ["train", "6", "3"], ["test", "2", "1"]]
    assert printed[0] == printed[1]


def test_check_counts_the_images_of_a_table_and_names_missing_files(tmp_path, capsys):
    draw(tmp_path, "a/0.png", "b/0.png")
    table = tmp_path / "table.csv"
    table.write_text("image,label,split\na/0.png,a,train\nb/0.png,b,test\ngone.png,b,test\n")
    code, out, err = run(capsys, "check", "--data=ImageTable", "--root", tmp_path, "--table", table)
    assert (code, err) == (1, "")
    assert "missing: gone.png" in out.splitlines()
    table.write_text("Datei\tLand\tsplit\na/0.png\ta\ttrain\nb/0.png\tb\ttest\n")
    args = ("check", "--data=ImageTable", "--root", tmp_path, "--table", table, "--delimiter", "tab")
    code, out, err = run(capsys, *args, "--columns", "image=Datei,label=Land")
    assert (code, err) == (0, "")
    assert rows_of(out)[1:3] == [["train", "1", "1"], ["test", "1", "1"]]


def test_check_counts_both_sides_of_pairs(tmp_path, capsys):
    for side, classes in (("sketches", "abcd"), ("photos", "abcdef")):
        draw(tmp_path / side, *(f"{label}/0.png" for label in classes))
    options = ["check", "--data", "Pairs", "--queries", "ImageFolder", "--queries.root", tmp_path / "sketches"]
    of_candidates = ["--candidates", "ImageFolder", "--candidates.root", tmp_path / "photos"]
    code, out, err = run(capsys, *options, *of_candidates)
    assert (code, err) == (0, "")
    counts = {row[0]: row[1:] for row in rows_of(out)[:5]}
    assert counts["queries/train"] == counts["queries/test"] == ["2", "2"]
    assert counts["candidates/train"] == counts["candidates/test"] == ["3", "3"]


def test_check_compares_with_the_published_counts(capsys):
    code, out, err = run(capsys, "check", "--data", "Glyphs")
    assert err == ""
    rows = rows_of(out)[:4]
    assert rows[0] == ["split", "images", "classes", "published:", "images", "classes"]
    assert [row[0] for row in rows[1:]] == ["train", "val", "test"]
    assert (code == 0) == all(row[1:3] == row[3:] for row in rows[1:])  # as with the fonts of the table


@pytest.mark.parametrize(("null", "form"), [("null", "{}={}"), ("None", "{} {}")])
def test_null_and_none_are_no_text(null, form, tmp_path, capsys, monkeypatch):
    """Optional strings, paths and sizes of the module, of objects in it, of data and trainer."""
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


def test_a_path_of_a_config_may_begin_with_the_home_folder(tmp_path, monkeypatch, capsys):
    """Also that of a class of Lightning, which would use a folder that is called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    logger = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": "~/logs"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    args = ["--config=~/a.yaml", "--model=RetrievalModule", "--model.embedder=Embedder", "--data=Glyphs"]
    code, printed, _ = run(capsys, "fit", *args, "--model.loss=LogRankLoss", "--run_folder=~/run", "--print_config")
    config = yaml.safe_load(printed)
    assert code == 0
    assert config["trainer"]["logger"]["init_args"]["save_dir"] == str(tmp_path / "logs")
    assert config["run_folder"] == str(tmp_path / "run")


def test_the_version_is_that_of_the_installed_package(capsys):
    assert run(capsys, "--version") == (0, f"lightning-retrieval {lightning_retrieval.__version__}\n", "")


def test_example_writes_a_config_that_fit_runs_and_replaces_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["example", "glyphs"])
    assert capsys.readouterr().out == "Run it with: lightning-retrieval fit --config glyphs.yaml\n"
    assert run(capsys, "fit", "--config", "glyphs.yaml", "--print_config")[0] == 0
    main(["example", "glyphs", "--output=-other file.yaml"])
    assert capsys.readouterr().out == "Run it with: lightning-retrieval fit --config './-other file.yaml'\n"
    Path("glyphs.yaml").write_text("of the user")
    assert run(capsys, "example", "glyphs")[0] == 2
    assert Path("glyphs.yaml").read_text() == "of the user"


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


def test_a_command_opens_photographs_of_any_size(tmp_path):
    """Here of more than twice the pixels of which Pillow warns."""
    (tmp_path / "photos").mkdir()
    Image.new("1", (20_000, 10_000), 1).save(tmp_path / "photos/a.png")
    program = [sys.executable, "-m", "lightning_retrieval.cli", "shrink", "--size=8", "photos", "small"]
    subprocess.run(program, cwd=tmp_path, check=True)
    with Image.open(tmp_path / "small/a.png") as image:
        assert image.size == (16, 8)


FAULTS = """
import resource
from lightning_retrieval.command_line import imports_of_command
with imports_of_command():
    import torch
for batch in range(20):
    if batch == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc hands the memory of each batch back")
def test_a_command_keeps_the_memory_of_a_batch_for_the_next():
    """The system need not clear its pages, of 4 KiB, again."""
    ended = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 1 << 14


def test_the_help_of_check_names_every_data_set(capsys):
    code, out, _ = run(capsys, "check", "--help")
    assert code == 0
    assert set(data_modules()) <= set(re.findall(r"\w+", out))
