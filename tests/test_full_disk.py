"""On a full disk, a writer fails with one sentence, and what was saved there before is unchanged."""

import contextlib
import io
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from tests.lightning_retrieval.cli.example_config import SMALL, write_example
from tests.lightning_retrieval.search.commands.glyph_commands import save_checkpoint
from tests.test_kills import export, save_file, save_model

pytestmark = [pytest.mark.slow, pytest.mark.refusal]

LIMIT = 40_000  # bytes, fewer than the weights have
WRITERS = {"file": save_file, "model": save_model, "export": export}
ARGUMENTS = {"file": (2.0,), "model": ("glyph_net", 4)}


def limit_files():
    """From now on, no file may be longer than the limit."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def write(rank, world_size, writer, *args):
    writer(*args)


def error_of(rank, world_size, limited, writer, *args):
    if limited:
        limit_files()
    with pytest.raises(OSError) as raised:  # noqa: PT011
        writer(*args)
    return str(raised.value)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(name, run_alone, tmp_path):
    if name == "export":
        pytest.importorskip("onnxscript")
        if not can_write_onnx(torch.__version__):
            pytest.skip("torch writes ONNX from 2.8 on")
    folder = tmp_path / "folder"
    folder.mkdir()
    module = RetrievalModule(Embedder("glyph_net", 4, image_size=32), SmoothAPLoss())
    checkpoint = save_checkpoint(tmp_path / "model.ckpt", module)
    arguments = (folder / "old", *ARGUMENTS.get(name, (checkpoint, {})))
    run_alone(write, WRITERS[name], *arguments)
    before = content(folder)
    error = run_alone(error_of, True, WRITERS[name], *arguments)
    assert re.search(r"/old cannot be written \(File too large\)", error), error
    assert content(folder) == before
    assert [path.name for path in folder.iterdir()] == ["old"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that nobody may write to")
@pytest.mark.parametrize("name", ["file", "model"])
def test_a_folder_that_may_not_be_written_to_is_named(name, run_alone):
    error = run_alone(error_of, False, WRITERS[name], Path("/sys/model.ckpt"), *ARGUMENTS[name])
    assert re.search(r"/sys/model.ckpt cannot be written \(.*[Pp]ermi", error), error


def fit(folder, epochs):
    options = ["--trainer.limit_train_batches=2", "--trainer.check_val_every_n_epoch=1", "--test_after_fit=false"]
    options += ["--data.init_args.classes_per_batch=4", f"--trainer.max_epochs={epochs}"]
    main(["fit", f"--config={write_example(folder)}", *SMALL, *options, f"--run_folder={folder / 'run'}"])


def continue_on_a_full_disk(rank, world_size, folder):
    """The exit code, and what was printed as an error."""
    limit_files()
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as end:
        fit(folder, 2)
    return end.value.code, printed.getvalue()


def test_fit_on_a_full_disk_keeps_the_earlier_checkpoints(run_alone, tmp_path):
    run_alone(write, fit, tmp_path, 1)
    checkpoints = content(tmp_path / "run" / "checkpoints")
    assert checkpoints
    code, printed = run_alone(continue_on_a_full_disk, tmp_path)
    assert code == 2
    assert "Traceback" not in printed
    assert re.search(r"/run/\S* cannot be written \(File too large\)", printed)
    assert content(tmp_path / "run" / "checkpoints") == checkpoints
