"""What the library does on Windows, as far as processes show it that behave as on Windows (tests/as_on_windows)."""

import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import faiss
import pytest
import torch

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.backend import ModelCheckpoint
from lightning_retrieval.callbacks import ResumableCSVLogger
from lightning_retrieval.datamodules import ImageIndex
from lightning_retrieval.plain_data import logged_settings
from tests.lightning_retrieval.search.store.vectors import built
from tests.lightning_retrieval.training.small_training import PointData, net
from tests.quiet_trainer import quiet_trainer

REPOSITORY = Path(__file__).parents[1]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a process of Linux behaves as on Windows")


def start(name, folder):
    """Start a function of this file in a process that behaves as on Windows."""
    command = f"import json, pathlib, tests.test_windows as t; print(json.dumps(t.{name}(pathlib.Path.cwd())))"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests" / "as_on_windows"), str(REPOSITORY)]),
        "AS_ON_WINDOWS_LOG": str(folder / "log"),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", command]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def result_of(name, folder):
    """What a function of this file returns."""
    process = start(name, folder)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return json.loads(printed.splitlines()[-1])


def run(folder, checkpoint):
    """Train, and save the same checkpoint after each step; returns the last step."""
    save = ModelCheckpoint(folder / "run", filename="only", every_n_train_steps=1, enable_version_counter=False)
    logger = ResumableCSVLogger(folder / "run")
    epochs = 2 if checkpoint else 1
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[save], logger=logger, enable_checkpointing=True)
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1))
    trainer.fit(module, datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    return trainer.global_step


def save_again(folder):
    """Save what has been loaded from the same place, while it is in use."""
    first = run(folder, None)
    checkpoint = folder / "run" / "only.ckpt"
    loaded = [RetrievalModule.load_from_checkpoint(checkpoint, embedder=net())]
    last = run(folder, checkpoint)
    Embedder("glyph_net", 8).save_pretrained(folder / "model")
    loaded.append(Embedder.from_pretrained(folder / "model"))
    loaded[-1].save_pretrained(folder / "model")
    index = RetrievalIndex(4, factory="IVF2,Flat")
    index.add(torch.randn(100, 4))
    for name in ("index", "Bücher"):
        index.save(folder / name)
    mapped = RetrievalIndex.load(folder / "index", mapped=True)
    index.save(folder / "index")
    found = RetrievalIndex.load(folder / "Bücher", mapped=True).search(torch.eye(4), 3)[1]
    return {
        "steps": [first, last],
        "loaded": len(loaded),
        "reads": len(RetrievalIndex.load(folder / "index")),
        "finds": torch.equal(found, mapped.search(torch.eye(4), 3)[1]),
    }


@on_linux
@pytest.mark.slow
def test_nothing_has_a_file_open_when_it_is_replaced_or_deleted(tmp_path):
    found = result_of("save_again", tmp_path)
    assert found == {"steps": [3, 6], "loaded": 2, "reads": 100, "finds": True}
    assert not (tmp_path / "log").exists()  # of rules that were broken


def save_slowly(folder):
    """Save an index; in the middle, wait for a line of standard input."""
    index, write = built(rows=50), faiss.write_index

    def wait(*args):
        print("saving", flush=True)
        sys.stdin.readline()
        write(*args)

    faiss.write_index = wait
    try:
        index.save(folder)
    except ValueError as error:
        return str(error)
    return "saved"


@on_linux
@pytest.mark.slow
@pytest.mark.refusal
def test_one_save_at_a_time_and_none_after_the_end_of_a_process(tmp_path):
    """Without `fcntl`."""
    holder = start("save_slowly", tmp_path)
    try:
        assert holder.stdout.readline() == "saving\n"
        assert "is being written to by another process" in result_of("save_slowly", tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    assert result_of("save_slowly", tmp_path) == "saved"


def error_of(function, *args):
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def paths_of_devices(folder):
    images = ("d:a.jpg", "con/a.jpg", "a/Nul", "aux.txt/b", "a/lpt1 .x", "console/a")
    return [bool(error_of(ImageIndex, [path], [0])) for path in images]


@on_linux
@pytest.mark.slow
@pytest.mark.refusal
def test_names_of_devices_are_no_files(tmp_path):
    found = result_of("paths_of_devices", tmp_path)
    assert found == [True] * 5 + [False]


def test_logged_paths_are_those_of_every_system():
    module = torch.nn.Module()
    module.__class__ = type("Of", (torch.nn.Module,), {"__init__": lambda self, root: None})
    module.root = PureWindowsPath("C:\\data\\birds")
    assert logged_settings(module)["root"] == "C:/data/birds"
