"""On a full disk, and in a folder that may not be written to, writers say so in one sentence, and change nothing."""

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
from lightning_retrieval.search.commands.export import export_model
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from tests.lightning_retrieval.cli.example_config import SMALL, write_example
from tests.lightning_retrieval.search.commands.glyph_commands import save_checkpoint
from tests.test_kills import save_file, save_index, save_model, save_shards, write_shards

READ_ONLY = Path("/sys")  # nobody may create a file here
LIMIT = 40_000  # bytes, fewer than the weights have
CURE = r"what was saved there before is unchanged, so (free space|give another path).*\."
SENTENCE = rf"^(\w+: )?(the checkpoint )?/\S+ cannot be written \([\w ]+\); {CURE}$"


def limit_files():
    """From now on, no file may be longer than the limit."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def message_of(rank, world_size, write, path, *args):
    """The message of a writer; unless nobody may write to the path, no file may be longer than the limit."""
    if not path.is_relative_to(READ_ONLY):
        limit_files()
    try:
        write(path, *args)
    except OSError as error:
        return str(error)
    return "nothing was raised"


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_export(folder, checkpoint):
    export_model(checkpoint, folder)


def save_embeddings(folder):
    write_shards(folder, "npy", 1.0)


WRITERS = {"file": save_file, "shards": save_shards, "model": save_model, "export": save_export}
IN_FOLDERS = {"index": save_index, "embeddings": save_embeddings}  # write several files, one after the other
ARGUMENTS = {"file": (2.0,), "shards": (2.0,), "model": ("glyph_net", 4), "index": (50,), "embeddings": ()}


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", 4, image_size=32), SmoothAPLoss())
    return save_checkpoint(tmp_path / "model.ckpt", module)


@pytest.mark.slow
@pytest.mark.refusal
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(name, checkpoint, run_alone, tmp_path):
    if name == "export":
        pytest.importorskip("onnxscript")
        if not can_write_onnx(torch.__version__):
            pytest.skip("torch writes ONNX from 2.8 on")
    folder = tmp_path / "folder"
    folder.mkdir()
    run_alone(write_freely, WRITERS[name], folder / "old", *ARGUMENTS.get(name, (checkpoint,)))
    before = content(folder)
    message = run_alone(message_of, WRITERS[name], folder / "old", *ARGUMENTS.get(name, (checkpoint,)))
    assert re.match(SENTENCE, message), message
    assert "File too large" in message
    assert content(folder) == before
    assert [path.name for path in folder.iterdir()] == ["old"]


def write_freely(rank, world_size, write, *args):
    write(*args)


@pytest.mark.slow
@pytest.mark.refusal
@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that nobody may write to")
@pytest.mark.parametrize("name", [*WRITERS, *IN_FOLDERS])
def test_a_folder_that_may_not_be_written_to_is_named(name, checkpoint, run_alone):
    if name == "export":
        pytest.importorskip("onnxscript")
        if not can_write_onnx(torch.__version__):
            pytest.skip("torch writes ONNX from 2.8 on")
    write = {**WRITERS, **IN_FOLDERS}[name]
    message = run_alone(message_of, write, READ_ONLY / "model.ckpt", *ARGUMENTS.get(name, (checkpoint,)))
    assert re.match(SENTENCE, message), message
    assert "/sys/model.ckpt" in message
    assert "permi" in message


def fit_limited(rank, world_size, folder):
    """Continue a run when no file may be longer than the limit; the exit code, and what it printed as an error."""
    limit_files()
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            fit(folder, 2)
        except SystemExit as end:
            return end.code, printed.getvalue()
    return 0, printed.getvalue()


def fit(folder, epochs):
    options = ["--trainer.limit_train_batches=2", "--trainer.check_val_every_n_epoch=1", "--test_after_fit=false"]
    options += ["--data.init_args.classes_per_batch=4", f"--trainer.max_epochs={epochs}"]
    main(["fit", f"--config={write_example(folder)}", *SMALL, *options, f"--run_folder={folder / 'run'}"])


def fit_freely(rank, world_size, folder):
    fit(folder, 1)


@pytest.mark.slow
@pytest.mark.refusal
def test_fit_on_a_full_disk_keeps_the_earlier_checkpoints(run_alone, tmp_path):
    run_alone(fit_freely, tmp_path)
    checkpoints = content(tmp_path / "run" / "checkpoints")
    assert checkpoints
    code, printed = run_alone(fit_limited, tmp_path)
    assert code == 2
    assert "Traceback" not in printed
    assert re.search(
        r"/run/\S* cannot be written \(File too large\); what was saved there before is unchanged", printed
    )
    assert content(tmp_path / "run" / "checkpoints") == checkpoints
