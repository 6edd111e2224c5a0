"""What the library does on Windows, as far as processes show it that behave as on Windows (tests/as_on_windows)."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path, PureWindowsPath

import pytest
import torch

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss, files
from lightning_retrieval.backend import ModelCheckpoint
from lightning_retrieval.callbacks import ResumableCSVLogger
from lightning_retrieval.checks import check_path
from lightning_retrieval.files import folder_lock, leaves_root, new_file, new_files, remove, rename
from lightning_retrieval.plain_data import logged_settings
from tests.lightning_retrieval.training.small_training import PointData, net
from tests.quiet_trainer import quiet_trainer

REPOSITORY = Path(__file__).parents[1]
RULES = REPOSITORY / "tests" / "as_on_windows"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a process of Linux behaves as on Windows")


def start(name, folder):
    """Start a function of this file in a process that behaves as on Windows."""
    command = f"import json, pathlib, tests.test_windows as t; print(json.dumps(t.{name}(pathlib.Path.cwd())))"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(RULES), str(REPOSITORY)]),
        "AS_ON_WINDOWS_LOG": str(folder / "log"),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", command]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def result_of(name, folder):
    """What a function of this file returns, and what has been written down of rules that it has broken."""
    process = start(name, folder)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    log = folder / "log"
    return json.loads(printed.splitlines()[-1]), log.read_text() if log.exists() else ""


def error_of(function, *args):
    try:
        function(*args)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def write(path):
    with new_file(path) as file:
        file.write(b"1234")


def change_files_in_use(folder):
    """The errors of changes of files that are open or mapped into memory, or that have names of devices."""
    for name in ("open", "mapped", "free"):
        (folder / name).write_bytes(b"1234")
    (folder / "folder").mkdir()
    files.SECONDS_IN_USE = 0.2
    mapped = torch.from_file(str(folder / "mapped"), size=4, dtype=torch.uint8)
    errors = []
    with (folder / "open").open("rb"):
        for name in ("open", "mapped"):
            errors.append(error_of(remove, folder / name))
            errors.append(error_of(rename, folder / name, folder / "new"))
            errors.append(error_of(rename, folder / "free", folder / name))
    errors.append(error_of(rename, folder / "free", folder / "folder"))
    errors.append(error_of(write, folder / "aux.txt"))
    assert mapped.tolist() == [49, 50, 51, 52]
    del mapped
    remove(folder / "mapped")
    files.SECONDS_IN_USE = 60
    reader = (folder / "open").open("rb")
    threading.Timer(0.2, reader.close).start()
    rename(folder / "free", folder / "open")  # waits for the reader
    return {"errors": errors, "files": sorted(path.name for path in folder.iterdir())}


@pytest.mark.slow
@on_linux
def test_a_process_that_behaves_as_on_windows_changes_no_file_that_is_in_use(tmp_path):
    """The rules that `.ci/windows` applies to all of its tests."""
    found, log = result_of("change_files_in_use", tmp_path)
    assert [error.startswith("PermissionError") for error in found["errors"]] == [True] * 8
    assert found["files"] == ["folder", "log", "open"]
    assert "test_windows.py" in log
    assert log.count("is open or mapped") >= 6


def run(folder, checkpoint):
    """Train, and save the same checkpoint after each step."""
    save = ModelCheckpoint(folder / "run", filename="only", every_n_train_steps=1, enable_version_counter=False)
    logger = ResumableCSVLogger(folder / "run")
    trainer = quiet_trainer(
        max_epochs=2 if checkpoint else 1, callbacks=[save], logger=logger, enable_checkpointing=True
    )
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1))
    trainer.fit(module, datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    return module, trainer.global_step


def save_again(folder):
    """Save what has been loaded from the same place, while it is in use."""
    _, first = run(folder, None)
    checkpoint = folder / "run" / "only.ckpt"
    loaded = RetrievalModule.load_from_checkpoint(checkpoint, embedder=net())
    module, last = run(folder, checkpoint)
    embedder = Embedder("glyph_net", 8)
    embedder.save_pretrained(folder / "model")
    embedders = [Embedder.from_pretrained(folder / "model")]
    embedders[0].save_pretrained(folder / "model")
    index = RetrievalIndex(4, factory="IVF2,Flat")
    index.add(torch.randn(100, 4))
    index.save(folder / "index")
    mapped = RetrievalIndex.load(folder / "index", mapped=True)
    index.save(folder / "index")
    index.save(folder / "Bücher")
    found = RetrievalIndex.load(folder / "Bücher", mapped=True).search(torch.eye(4), 3)[1]
    for content in ("old", "new"):
        with new_files(folder / "files", ["a", "b"]) as new:
            (new / "a").write_text(content)
    return {
        "steps": [first, last],
        "is_open": loaded is not module and len(mapped) == 100,
        "files": (folder / "files" / "a").read_text(),
        "reads": len(RetrievalIndex.load(folder / "index")),
        "finds": torch.equal(found, mapped.search(torch.eye(4), 3)[1]),
    }


@on_linux
@pytest.mark.slow
def test_nothing_has_a_file_open_when_it_is_replaced_or_deleted(tmp_path):
    found, log = result_of("save_again", tmp_path)
    assert log == ""
    assert found == {"steps": [3, 6], "is_open": True, "files": "new", "reads": 100, "finds": True}


def take_lock(folder):
    """Hold the lock of a folder until something is written to this process; the error of a second lock."""
    with folder_lock(folder) as share:
        error = error_of(folder_lock(folder).__enter__)
        share()
        print("locked", flush=True)
        sys.stdin.readline()
    return error


@on_linux
@pytest.mark.refusal
@pytest.mark.slow
def test_a_lock_without_fcntl_keeps_others_out_and_ends_with_its_process(tmp_path):
    holder, message = start("take_lock", tmp_path), "InvalidValue: {} is being written to by another process"
    try:
        assert holder.stdout.readline() == "locked\n"
        other = start("take_lock", tmp_path)
        assert other.communicate("", timeout=240) == ("", None)
        assert other.returncode == 1
    finally:
        holder.kill()
        holder.communicate()
    after, _ = start("take_lock", tmp_path).communicate("", timeout=240)
    assert message.format(tmp_path) in after


def paths_of_devices(folder):
    outside = [leaves_root(path) for path in ("d:a.jpg", "con/a.jpg", "a/Nul", "aux.txt/b", "a/lpt1 .x", "console/a")]
    messages = [error_of(check_path, "output", path) for path in ("a/prn.index", "what?.ckpt", "a/b.ckpt")]
    return {"outside": outside, "messages": messages}


@on_linux
@pytest.mark.refusal
@pytest.mark.slow
def test_names_of_devices_are_no_files(tmp_path):
    found, _ = result_of("paths_of_devices", tmp_path)
    assert found["outside"] == [True] * 5 + [False]
    for message, path in zip(found["messages"], ("a/prn.index", "what?.ckpt")):
        assert message.startswith("InvalidValue: `output` must be without the characters")
        assert repr(path) in message
    assert found["messages"][2] == ""


@pytest.mark.parametrize("path", ["C:\\a", "\\a", "\\\\server\\a", "a\\..\\..\\b", "c:/a"])
def test_paths_of_windows_leave_a_folder_on_every_system(path):
    assert leaves_root(path)


def test_logged_paths_are_those_of_every_system():
    module = torch.nn.Module()
    module.__class__ = type("Of", (torch.nn.Module,), {"__init__": lambda self, root: None})
    module.root = PureWindowsPath("C:\\data\\birds")
    assert logged_settings(module)["root"] == "C:/data/birds"
