"""What can be said from the options alone is said before torch is imported, which takes seconds, and by the same words
as later; and commands that read a table have the same options for it."""

import json
import re
import subprocess
import sys

import pytest

from lightning_retrieval.search.commands.options import COMMANDS, make_parser

# Runs each command line, and prints its exit code, what it wrote and whether torch was imported.
RUN_EACH = """
import contextlib, io, json, sys
from lightning_retrieval.cli.main import main
results = []
for args in json.load(sys.stdin):
    code, errors = 0, io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            main(args)
        except SystemExit as end:
            code = end.code
    results.append([code, errors.getvalue(), "torch" in sys.modules])
json.dump(results, sys.stdout)
"""
# @ and % stand for options that are valid until the files are read.
BACKBONE = "--backbone resnet18 --images photos --output new --weights"
VALID = "--checkpoint a.ckpt --images photos --output"
CASES = {
    "index --checkpoint no.ckpt --images photos --output new": "`--checkpoint` must be a checkpoint that .* exist",
    "index --checkpoint a.ckpt --images no --output new": "index: `--images` must be a folder of images, got no, which",
    "index @ new --shards 0": "index: `--shards` must be an integer >= 1, got 0",
    "index @ new --missing keep": "`--missing` must be given with `--metadata`",
    "index @ new --metadata no.csv": "`--metadata` must be a CSV or Parquet",
    "index @ new --columns oml": "`--columns` must be given for a table only",
    "index @ new --validation no": "must be given with `--false_match_rate`",
    "index --embeddings no --output new": "index: the embeddings must be a folder with _manifest.json in it, got no",
    "index % no.pth": "`--weights` must be a file .* does not exist",
    "index % dir.pth": "`--weights` must be a .* is a folder",
    "embed @ new --batch_size 0": "embed: `--batch_size` must be an integer >= 1",
    "embed @ new --delimiter ;": "`--delimiter` must be given for a table only",
    "embed @ new --root photos": "`--root` must be given for a table only, got",
    "report @ new.txt": "report: `--output` must end with .html",
    "report @ mine.html": "report: `--output` must be a new file, or a page that",
    "report @ table.html": "the table of the report would replace a file",
    "report @ new.html --false_match_rate 2": "must be from 0 to 1, got 2",
    "report @ new.html --false_match_rate nan": "must be a finite number",
    "export --checkpoint a.ckpt --output new --images photos": "must not be given without `--int8`, which alone uses",
    "export --checkpoint a.ckpt --output new --int8": "export: `--images` must be given with `--int8`",
    "export --checkpoint a.ckpt --output new --int8 --images photos --columns oml": "must be given for a table only",
    "adapt --embeddings no --output no/new.ckpt": "`--output` must be a file in an existing folder, got no/new.ckpt",
    "adapt --embeddings no --output new.ckpt --lr -1": "adapt: `--lr` must be a finite number > 0, got -1",
    "adapt --embeddings no --output new.ckpt --batch_size 3": "adapt: `--batch_size` must be an integer >= 4, got 3",
    "adapt --embeddings no --output new.ckpt --loss_args [1]": "adapt: `--loss_args` must be a JSON object",
    "search --index no a.jpg": "search: the index must be a folder with manifest.json in it, got no",
    "search --index no a.jpg -k 0": "search: `-k` must be an integer >= 1, got 0",
    "search --index no a.jpg --threshold inf": "search: `--threshold` must be a finite number, got inf",
    "search --index no a.jpg --html mine.html": "search: `--html` must be a new file, or a page that `search` wrote",
    "demo --index no": "demo: the index must be a folder with manifest.json in it, got no",
    "shrink no small": "shrink: `PHOTOS` must be a folder of images, got no, which is not a folder",
    "shrink photos small --size 0": "shrink: `--size` must be an integer >= 1, got 0",
    "check --data ImageFolder --root no": "check: error: --root must be the folder of the data set, got no, which does",
    "check --data InShop --data.root=no": "check: error: --root must be the folder of the data set, got no, which does",
    "index --checkpoint a.ckpt --images= --output new": "argument --images: must be the path of a file or a folder, g",
    "search --index= a.jpg": "argument --index: must be the path of a file or a folder, got an empty text",
    "fit --config=": "fit: error: --config must be an existing file, got an empty text",
    "fit --config photos": "fit: error: --config must be an existing file, got photos",
    "fit --config no.yaml": "fit: error: --config must be an existing file, got no.yaml",
    "test --config=no.yaml --ckpt_path no.ckpt": "test: error: --config must be an existing file, got no.yaml",
}


@pytest.mark.refusal
def test_options_are_checked_before_torch_is_imported(tmp_path):
    for folder in ("photos", "dir.pth"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a.ckpt").write_bytes(b"not read yet")
    (tmp_path / "mine.html").write_text("<!DOCTYPE html>mine")
    (tmp_path / "table.csv").write_text("image,label\n")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=json.dumps([command.replace("@", VALID).replace("%", BACKBONE).split() for command in CASES]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for (command, sentence), (code, error, imported) in zip(CASES.items(), json.loads(done.stdout), strict=True):
        assert (code, error.count("\n"), imported) == (2, 1, False), (command, error)
        assert re.search(sentence, error), command
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_read_a_table_have_the_same_options_for_it(command):
    actions = {action.dest: action for action in make_parser(command)._actions}
    reads_a_table = any("TABLE" in str(action.metavar) for action in actions.values())
    assert reads_a_table == ("columns" in actions) == ("delimiter" in actions)
    if reads_a_table:
        others = {action.dest: action for action in make_parser("embed")._actions}
        for name in ("columns", "delimiter"):
            assert (actions[name].help, actions[name].type) == (others[name].help, others[name].type)
