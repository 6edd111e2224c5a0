"""What the states in a checkpoint may make a resumed run delete, write and read: nothing but checkpoints of the run.

Lightning's `ModelCheckpoint` deletes the paths in its state. The same paths stand in each field, in each form that
Lightning or fsspec understands, and come in by each way; after the resume, the run saves checkpoints of its own.
"""

import os
from pathlib import Path

import fsspec
import pytest
import torch
from lightning_fabric.plugins.io import TorchCheckpointIO
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from tests.lightning_retrieval.cli.example_config import SHORT, SMALL, write_example
from tests.lightning_retrieval.training.small_training import SGD, PointData, net, trainer

pytestmark = [pytest.mark.hostile, pytest.mark.refusal]

DROPPED = "RetrievalModule: the states of callbacks in the checkpoint name paths that are no checkpoints of this run"
NOT_DELETED = "is no checkpoint of this run, so it was not deleted"
MEMORY = "memory://photos"


def forms(photos: Path, folder: Path) -> dict[str, str]:
    """Names of the user's folder, or of another machine: what Lightning or fsspec would resolve to it."""
    (folder / "link").symlink_to(photos)
    return {
        "path": str(photos),
        "file": str(photos / "private.txt"),
        "local://": f"local://{photos}",
        "local:": f"local:{photos}",
        "file://": f"file://{photos}",
        "..": f"{folder}/{os.path.relpath(photos, folder)}",
        "local://..": f"local://{folder}/{os.path.relpath(photos, folder)}",
        "link": f"{folder}/link/trip",
        "local://link": f"local://{folder}/link/trip",
        "memory://": MEMORY,
        "http://": "http://photos.example/private.ckpt",
        "chain": f"simplecache::local://{photos}",
    }


PLAIN = ("path", "file", "..", "link")
ADDRESSES = ("local://", "local:", "file://", "local://..", "local://link", "memory://", "http://", "chain")
FORMS = (*PLAIN, *ADDRESSES)
FIELDS = ("best_model_path", "last_model_path", "kth_best_model_path", "best_k_models")


@pytest.fixture
def stored():
    """A folder in fsspec's memory, which must stay as it was."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/photos/private.txt", b"private")
    yield memory
    assert memory.cat("/photos/private.txt") == b"private", "the user's folder in memory has changed"
    memory.rm("/photos", recursive=True)


def module() -> RetrievalModule:
    return RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD)


def callbacks(folder: Path, **settings) -> list[ModelCheckpoint]:
    """One that saves the last weights after each step, as our documentation shows, and one that keeps the best."""
    best = {"monitor": "train/loss", "mode": "max", "save_last": True, "enable_version_counter": False, **settings}
    return [
        ModelCheckpoint(folder, "newest-{step}", every_n_train_steps=1),
        ModelCheckpoint(folder, "best-{step}", every_n_train_steps=1, **best),
    ]


def run(folder: Path, steps: int, checkpoint=None, saving=None, **settings):
    """A run to this step that saves after each of its steps; its Trainer."""
    saving = saving or callbacks(folder)
    fitted = trainer(callbacks=saving, enable_checkpointing=True, max_epochs=9, max_steps=steps, **settings)
    fitted.fit(module(), datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    assert fitted.global_step == steps
    return fitted


def write_states(path: Path, change, name: str = "ModelCheckpoint") -> Path:
    """Change the states of the callbacks of this name in a checkpoint."""
    content = torch.load(path, weights_only=True)
    for key in content["callbacks"]:
        if key.startswith(name):
            change(content["callbacks"][key])
    torch.save(content, path)
    return path


def put(state: dict, field: str, path: str) -> None:
    """Put a path into a field of a state; the worst of the best checkpoints is the next one to be deleted."""
    if field in ("kth_best_model_path", "best_k_models"):
        state["kth_best_model_path"], state["kth_value"] = path, torch.tensor(-1.0)
        state["best_k_models"] = {path: torch.tensor(-1.0)}
    else:
        state[field] = path


def assert_own_paths(saving: list[ModelCheckpoint], folder: Path) -> None:
    """The paths of the callbacks are those of checkpoints in the folder."""
    for callback in saving:
        paths = [callback.best_model_path, callback.last_model_path, callback.kth_best_model_path]
        paths = list(filter(None, [*paths, *callback.best_k_models]))
        assert paths
        for path in paths:
            assert Path(path).resolve().parent == folder.resolve()
            assert Path(path).is_file()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("field", FIELDS)
def test_fit_from_python(users_folder, stored, tmp_path, field, form):
    folder = tmp_path / "run"
    run(folder, 1)
    path = forms(users_folder, folder)[form]
    checkpoint = write_states(folder / "last.ckpt", lambda state: put(state, field, path))
    saving = callbacks(folder)
    with pytest.warns(UserWarning, match=DROPPED):
        run(folder, 3, checkpoint, saving)
    assert_own_paths(saving, folder)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] > 1
