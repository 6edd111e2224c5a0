"""What the states in a checkpoint may make a resumed run delete, write and read: nothing but checkpoints of the run.

Lightning's `ModelCheckpoint` deletes the paths in its state. The same paths stand in each field, in each form that
Lightning or fsspec understands, and come in by each way; after the resume, the run saves checkpoints of its own.
"""

import functools
import os
import shutil
import warnings
from pathlib import Path

import fsspec
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.io import TorchCheckpointIO
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, Timer

from lightning_retrieval import RetrievalModule, SmoothAPLoss, checkpoints
from lightning_retrieval.callbacks.wandb_logger import RetrievalWandbLogger
from lightning_retrieval.checkpoints import (
    is_checkpoint,
    read_checkpoint,
    torch_writes_shards,
    write_checkpoint,
    write_sharded_checkpoint,
)
from lightning_retrieval.cli.main import main
from lightning_retrieval.training.checkpoint_files import restored_network
from lightning_retrieval.training.restored_states import restrict_states
from tests.lightning_retrieval.cli.example_config import SHORT, SMALL, write_example
from tests.lightning_retrieval.training.small_training import SGD, PointData, net, trainer

NEEDS_SHARDS = pytest.mark.skipif(not torch_writes_shards(), reason="needs torch 2.9")
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
        "drive": "C:\\Users\\photos\\private.txt",
        "backslashes": "link\\..\\..\\photos\\private.txt",
    }


FORMS = ("path", "file", "..", "link", "local://", "local:", "file://", "local://..", "local://link", "memory://")
FORMS += ("http://", "chain")
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


def run(folder: Path, steps: int, checkpoint=None, saving=None, trained=None, **settings):
    """A run to this step that saves after each of its steps; its Trainer."""
    saving = saving or callbacks(folder)
    fitted = trainer(callbacks=saving, enable_checkpointing=True, max_epochs=9, max_steps=steps, **settings)
    fitted.fit(trained or module(), datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
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


def put_everywhere(state: dict, path: str) -> None:
    for field in FIELDS:
        put(state, field, path)


def assert_own_paths(saving: list[ModelCheckpoint], folder: Path) -> None:
    """The paths of the callbacks are those of checkpoints in the folder."""
    for callback in saving:
        paths = [callback.best_model_path, callback.last_model_path, callback.kth_best_model_path]
        paths = list(filter(None, [*paths, *callback.best_k_models]))
        assert paths
        for path in paths:
            assert Path(path).resolve().parent == folder.resolve()
            assert Path(path).is_file()


@pytest.mark.parametrize(
    ("field", "form"), [*((field, "local://") for field in FIELDS), *(("every field", form) for form in FORMS)]
)
def test_fit_from_python(users_folder, stored, tmp_path, field, form):
    folder = tmp_path / "run"
    run(folder, 1)
    path = forms(users_folder, folder)[form]

    def change(state):
        if field == "every field":
            put_everywhere(state, path)
        else:
            put(state, field, path)

    checkpoint = write_states(folder / "last.ckpt", change)
    saving = callbacks(folder)
    with pytest.warns(UserWarning, match=DROPPED):
        run(folder, 3, checkpoint, saving)
    assert_own_paths(saving, folder)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test) metrics cover 2 of:UserWarning")
@pytest.mark.parametrize(("way", "form"), [("--ckpt_path", "local://"), ("--run_folder", "link")])
def test_fit_of_the_command_line(users_folder, tmp_path, way, form):
    folder, config = tmp_path / "run", write_example(tmp_path)
    arguments = ["fit", f"--config={config}", *SMALL, *SHORT, "--trainer.max_epochs=3"]
    main([*arguments, f"--run_folder={folder}", "--trainer.max_steps=1"])
    path = forms(users_folder, folder / "checkpoints")[form]
    for checkpoint in (folder / "checkpoints").glob("*.ckpt"):
        write_states(checkpoint, lambda state: put_everywhere(state, path))
    given = f"--run_folder={folder}"
    if way == "--ckpt_path":
        given = f"--ckpt_path={checkpoint}"
    with pytest.warns(UserWarning, match=DROPPED):
        main([*arguments, given, "--trainer.max_steps=2"])
    saved = [torch.load(path, weights_only=True) for path in tmp_path.rglob("*.ckpt")]
    assert 2 in [content["global_step"] for content in saved]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation(users_folder, tmp_path, stage):
    """Evaluation restores the states of callbacks too, and "best" would read what they name."""
    folder = tmp_path / "run"
    run(folder, 1)
    checkpoint = write_states(folder / "last.ckpt", lambda state: put(state, "best_model_path", "http://a.example/b"))
    evaluating = trainer(callbacks=callbacks(folder)[:1], enable_checkpointing=True)
    with pytest.warns(UserWarning, match=DROPPED):
        getattr(evaluating, stage)(module(), datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    with pytest.raises(ValueError, match="not configured to save the best model"):
        getattr(evaluating, stage)(module(), datamodule=PointData(), ckpt_path="best", weights_only=True)


class Kept(ModelCheckpoint):
    """A subclass that has paths of its own, takes the folder of the state, and deletes what it has kept."""

    kept: tuple = ()

    def state_dict(self):
        return {**super().state_dict(), "kept": list(self.kept)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.dirpath = state_dict["dirpath"]
        self.kept = state_dict["kept"]

    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        for path in self.kept:
            trainer.strategy.remove_checkpoint(path)


@pytest.mark.parametrize("form", ["file", "local://", "memory://", "drive", "backslashes"])
def test_a_subclass_of_the_users(users_folder, stored, tmp_path, form):
    folder = tmp_path / "run"
    run(folder, 1, saving=[Kept(folder, "{step}", every_n_train_steps=1, save_last=True)])
    path = forms(users_folder, folder)[form]
    checkpoint = write_states(folder / "last.ckpt", lambda state: state.update(kept=[path], dirpath=path), "Kept")
    saving = Kept(folder, "{step}", every_n_train_steps=1, save_last=True)
    with pytest.warns(UserWarning, match=DROPPED):
        run(folder, 2, checkpoint, [saving])
    assert saving.dirpath == str(folder)
    assert_own_paths([saving], folder)


class OwnHooks(RetrievalModule):
    """A subclass whose hooks do not call those of the library."""

    def on_save_checkpoint(self, checkpoint):
        pass

    def on_load_checkpoint(self, checkpoint):
        pass


def test_a_module_of_the_users_with_hooks_of_its_own(users_folder, tmp_path):
    folder = tmp_path / "run"
    run(folder, 1)
    checkpoint = write_states(folder / "last.ckpt", lambda state: put_everywhere(state, f"local://{users_folder}"))
    saving = callbacks(folder)
    with pytest.warns(UserWarning, match=DROPPED.replace("RetrievalModule", "OwnHooks")):
        run(folder, 3, checkpoint, saving, OwnHooks(net(), SmoothAPLoss(tau=0.1), optimizer=SGD))
    assert_own_paths(saving, folder)


def runs_of_a_subclass(rank, world_size, folders):
    """Resume in several processes; the paths that the callbacks have in this process, in each folder."""
    warnings.simplefilter("ignore")
    found = []
    for folder, checkpoint in folders.items():
        saving = callbacks(folder)
        trained = OwnHooks(net(), SmoothAPLoss(tau=0.1), optimizer=SGD)
        run(folder, 3, checkpoint, saving, trained, devices=world_size, strategy="ddp")
        for callback in saving:
            found += [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
    return sorted(filter(None, found))


@NEEDS_SHARDS
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_several_processes_and_sharded_checkpoints(users_folder, tmp_path, run_processes):
    folders = {tmp_path / "one file": None, tmp_path / "shards": tmp_path / "sharded.ckpt"}
    for folder, sharded in folders.items():
        run(folder, 1)
        folders[folder] = folder / "last.ckpt"
        write_states(folders[folder], lambda state: put_everywhere(state, f"local://{users_folder}"))
        if sharded is not None:
            write_sharded_checkpoint(sharded, torch.load(folders[folder], weights_only=True))
            folders[folder] = sharded
    of_first, of_second = run_processes(runs_of_a_subclass, 2, folders, backend=None)
    assert of_first == of_second
    assert {Path(path).resolve().parent for path in of_first} == {folder.resolve() for folder in folders}


@pytest.mark.filterwarnings("ignore:You have multiple `ModelCheckpoint` callback states")
def test_a_checkpoint_that_says_it_is_of_an_early_release(users_folder, tmp_path):
    """Lightning moves the paths of its early releases from elsewhere in the file to the states of callbacks."""
    run(tmp_path, 1)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    content["pytorch-lightning_version"] = "0.9.0"
    content["checkpoint_callback_best_model_path"] = f"local://{users_folder}"
    del content["callbacks"], content["loops"]
    torch.save(content, tmp_path / "last.ckpt")
    saving = [ModelCheckpoint(tmp_path, "last", every_n_train_steps=1)]
    with pytest.warns(UserWarning, match=DROPPED):
        run(tmp_path, 3, tmp_path / "last.ckpt", saving)
    assert_own_paths(saving, tmp_path)


class OwnFormat(TorchCheckpointIO):
    """A `CheckpointIO` of the user."""


@pytest.mark.parametrize("plugins", [None, OwnFormat()])
def test_only_checkpoints_of_the_run_are_removed(users_folder, stored, tmp_path, plugins):
    """Whoever asks for it: no other folder in the `dirpath`, and nothing outside."""
    folder = tmp_path / "run"
    done = run(folder, 1, plugins=plugins)
    saved = next(folder.glob("newest*.ckpt"))
    photos = folder / "photos.ckpt"
    shutil.copytree(users_folder, photos)
    (photos / "checkpoint.json").write_text("{}")  # of another program
    for path in (photos, *forms(users_folder, folder).values()):
        with pytest.warns(UserWarning, match=NOT_DELETED):
            done.strategy.remove_checkpoint(path)
    assert (photos / "trip" / "private.txt").read_text() == "private, too"
    (folder / "linked.ckpt").symlink_to(saved)
    done.strategy.remove_checkpoint(folder / "linked.ckpt")
    assert saved.is_file()
    done.strategy.remove_checkpoint(str(saved))
    assert not saved.exists()


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_sharded_checkpoint_is_removed_without_other_files(users_folder, tmp_path):
    done = run(tmp_path / "run", 1)
    for other in ((), ("notes.txt",), ("0123456789abcdef/notes.txt",)):
        path = tmp_path / "run" / "sharded.ckpt"
        write_sharded_checkpoint(path, {"epoch": 3})
        for name in other:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text("a note")
        write_sharded_checkpoint(path, {"epoch": 4})
        assert read_checkpoint(path) == {"epoch": 4}
        done.strategy.remove_checkpoint(path)
        assert [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()] == list(other)
        shutil.rmtree(path, ignore_errors=True)


def without_exchange(monkeypatch):
    """As on a file system that cannot exchange two names."""
    monkeypatch.setattr(checkpoints, "exchange_names", lambda first, second: False)


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("exchanges", [True, False])
def test_other_files_of_a_replaced_folder_stay_visible(tmp_path, monkeypatch, exchanges):
    """A file takes the place of a sharded checkpoint whose folder also has files of the user."""
    if not exchanges:
        without_exchange(monkeypatch)
    path = tmp_path / "last.ckpt"
    write_sharded_checkpoint(path, {"epoch": 3})
    (path / "notes").mkdir()
    (path / "notes" / "notes.txt").write_text("a note")
    with pytest.warns(UserWarning, match="had other files in its folder; they are in .*other-files-"):
        write_checkpoint(path, {"epoch": 4})
    assert read_checkpoint(path) == {"epoch": 4}
    (kept,) = [file.relative_to(tmp_path) for file in tmp_path.rglob("*.txt")]
    assert not any(part.startswith(".") or "last" in part for part in kept.parts)
    assert len(list(tmp_path.rglob("*.*"))) == 2


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", ["text", "folder", "link"])
def test_a_file_of_the_user_beside_a_checkpoint_is_no_new_checkpoint(users_folder, tmp_path, monkeypatch, kind):
    """Nothing that is called NAME.new, but is no checkpoint, is renamed, replaced or deleted."""
    own, path = tmp_path / "last.ckpt.new", tmp_path / "last.ckpt"
    if kind == "text":
        own.write_text("the user's")
    elif kind == "folder":
        shutil.copytree(users_folder, own)
    else:
        torch.save({"epoch": 1}, tmp_path / "elsewhere")
        own.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    assert not is_checkpoint(path)
    assert checkpoints.checkpoints_in(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
    without_exchange(monkeypatch)
    write_sharded_checkpoint(path, {"epoch": 3})
    if kind == "link":  # to a checkpoint: only the link may go
        assert torch.load(tmp_path / "elsewhere") == {"epoch": 1}
        return
    with pytest.raises(OSError, match=r"^the checkpoint .*last.ckpt cannot be written .*last.ckpt.new"):
        write_checkpoint(path, {"epoch": 4})
    assert read_checkpoint(path) == {"epoch": 3}
    assert set(before) <= set(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("value", "field"),
    [(3, "best_model_path"), ([], "best_k_models"), ({"x": "y"}, "best_k_models"), (torch.ones(9), "kth_value")],
)
@pytest.mark.filterwarnings("ignore:RetrievalModule. the states of callbacks in the checkpoint name paths:UserWarning")
def test_values_of_another_kind(tmp_path, value, field):
    run(tmp_path, 1)
    checkpoint = write_states(tmp_path / "last.ckpt", lambda state: state.update({field: value}))
    saving = callbacks(tmp_path)
    run(tmp_path, 3, checkpoint, saving)
    assert_own_paths(saving, tmp_path)


def test_an_honest_run_continues_as_before(tmp_path):
    """It deletes what it has saved before, without a warning."""
    run(tmp_path, 2)
    before = set(tmp_path.iterdir())
    saving = callbacks(tmp_path)
    run(tmp_path, 4, tmp_path / "last.ckpt", saving)
    assert_own_paths(saving, tmp_path)
    assert len(list(tmp_path.glob("newest*"))) <= 2  # Lightning keeps the one that the run was resumed from
    assert len(list(tmp_path.glob("best*"))) == 1
    assert before - set(tmp_path.iterdir())


@pytest.mark.parametrize(("mode", "best", "worst"), [("max", "c", "b"), ("min", "b", "c")])
def test_without_a_foreign_path_the_best_and_the_worst_are_chosen_among_the_others(tmp_path, mode, best, worst):
    """The foreign path was both, so that neither is known any more. With room for another, none is the worst."""
    scores = {}
    for name, score in (("b", 0.2), ("c", 0.7)):
        path = tmp_path / f"{name}.ckpt"
        write_checkpoint(path, {"epoch": 1})
        scores[str(path)] = torch.tensor(score)
    foreign = str(tmp_path.parent / "foreign.ckpt")
    for save_top_k in (2, 3):
        callback = ModelCheckpoint(tmp_path, monitor="val/mAP", mode=mode, save_top_k=save_top_k)
        state = {**callback.state_dict(), "best_k_models": {**scores, foreign: torch.tensor(0.5)}}
        state |= {"best_model_path": foreign, "kth_best_model_path": foreign, "kth_value": torch.tensor(0.5)}
        content = {"callbacks": {callback.state_key: state}, "pytorch-lightning_version": pl.__version__}
        with pytest.warns(UserWarning, match="the states of callbacks in the checkpoint name paths"):
            restored = restrict_states(
                trainer(default_root_dir=tmp_path, callbacks=[callback], enable_checkpointing=True), content
            )
        restored = restored["callbacks"][callback.state_key]
        assert restored["best_k_models"] == scores
        assert restored["best_model_path"] == str(tmp_path / f"{best}.ckpt")
        assert restored["best_model_score"] == scores[restored["best_model_path"]]
        expected = str(tmp_path / f"{worst}.ckpt") if save_top_k == 2 else ""
        assert restored["kth_best_model_path"] == expected
        assert restored["kth_value"] == scores.get(expected, callback.kth_value)


@pytest.mark.parametrize("moved", [False, True])
def test_another_folder(tmp_path, moved):
    """The best checkpoint of the earlier run may be read where it is, and is never deleted."""
    run(tmp_path / "first", 2)
    folder, checkpoint = tmp_path / "first", tmp_path / "first" / "last.ckpt"
    best = sorted(path.name for path in folder.iterdir())
    saving = callbacks(tmp_path / "second")
    if moved:
        folder = folder.rename(tmp_path / "moved")
        with pytest.warns(UserWarning, match=DROPPED):
            run(tmp_path / "second", 4, folder / "last.ckpt", saving)
        assert_own_paths(saving, tmp_path / "second")
    else:
        run(tmp_path / "second", 2, checkpoint, saving)
        assert all(Path(callback.best_model_path).parent == folder for callback in saving)
        run(tmp_path / "second", 4, checkpoint)
    assert sorted(path.name for path in folder.iterdir()) == best


def test_a_folder_where_a_checkpoint_would_be_saved(users_folder, tmp_path):
    """Neither a link nor a file takes the place of a folder of the user, even if it has some checkpoint.json."""
    photos = shutil.copytree(users_folder, tmp_path / "last.ckpt")
    (photos / "checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^RetrievalModule: ModelCheckpoint\(save_last='link'\) replaces .*last.ckpt"):
        run(tmp_path, 1, saving=callbacks(tmp_path, save_last="link")[1:])
    with pytest.raises(OSError, match=r"^RetrievalModule: the checkpoint .*last.ckpt cannot be written"):
        run(tmp_path, 1, saving=callbacks(tmp_path)[1:])
    assert (photos / "trip" / "private.txt").read_text() == "private, too"


def test_a_remote_folder_of_the_run(users_folder, stored):
    """A run saves and deletes in its own folder of another file system, and nowhere else there."""
    folder = "memory://run"
    run(folder, 2)
    run(folder, 4, f"{folder}/last.ckpt")
    newest = [path for path in stored.ls("/run", detail=False) if "newest" in path]
    assert newest == ["/run/newest-step=4.ckpt"]
    for path in (f"{folder}/../photos", f"{folder}/photos::{MEMORY}", MEMORY, f"local://{users_folder}"):
        with stored.open("/run/last.ckpt", "rb") as file:
            content = torch.load(file, weights_only=True)
        for state in content["callbacks"].values():
            put_everywhere(state, path)
        with stored.open("/run/last.ckpt", "wb") as file:
            torch.save(content, file)
        with pytest.warns(UserWarning, match=DROPPED):
            run(folder, content["global_step"] + 2, f"{folder}/last.ckpt")
    stored.rm("/run", recursive=True)


def test_a_link_to_the_last_checkpoint(tmp_path):
    for steps, checkpoint in ((2, None), (4, tmp_path / "last.ckpt")):
        run(tmp_path, steps, checkpoint, callbacks(tmp_path, save_last="link"))
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").is_file()


HUGE = torch.zeros(1).expand(10**12)
STATES = {
    "a count without end": (("loops", "fit_loop", "epoch_progress", "current", "completed"), 10**30),
    "a negative count": (("loops", "fit_loop", "epoch_loop.batch_progress", "current", "ready"), -1),
    "a text": (("loops", "fit_loop", "epoch_loop.state_dict", "_batches_that_stepped"), "many"),
    "a method": (("loops", "fit_loop", "epoch_progress", "total", "reset"), 1),
    "no dict of loops": (("loops",), [1]),
    "no dict of callbacks": (("callbacks",), [1]),
    "a method of a scheduler": (("lr_schedulers", 0, "get_lr"), 3),
    "the optimizer of a scheduler": (("lr_schedulers", 0, "optimizer"), {}),
    "a factor of a scheduler": (("lr_schedulers", 0, "gamma"), 10**400),
    "a learning rate": (("optimizer_states", 0, "param_groups", 0, "lr"), "x"),
    "epochs of a scheduler": (("lr_schedulers", 0, "last_epoch"), "x"),
    "time": (("callbacks", "Timer", "time_elapsed", "train"), float("nan")),
    "patience": (("callbacks", "EarlyStopping{'monitor': 'train/loss', 'mode': 'min'}", "wait_count"), "x"),
    "best score": (("callbacks", "EarlyStopping{'monitor': 'train/loss', 'mode': 'min'}", "best_score"), torch.ones(3)),
    "an optimizer's state": (("optimizer_states", 0, "state", 0, "exp_avg"), torch.ones(3)),
    "a huge optimizer's state": (
        ("optimizer_states", 0, "state", 0, "exp_avg"),
        torch.zeros(1, dtype=torch.int8).expand(10**12),
    ),
    "huge weights": (("state_dict", "embedder.0.weight"), HUGE),
    "something else that is huge": (("callbacks", "Other"), {"a": [HUGE]}),
    "a list in itself": (("callbacks", "Other"), "itself"),
}


def scheduled(folder: Path, steps: int, checkpoint=None):
    """A run whose checkpoint has the states of a scheduler, a timer and an early stopping."""
    saved = [ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)]
    saved += [Timer("00:01:00:00"), EarlyStopping("train/loss", check_on_train_epoch_end=True)]
    module = RetrievalModule(
        net(),
        SmoothAPLoss(tau=0.1),
        optimizer=functools.partial(torch.optim.AdamW, lr=0.1),
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )
    fitted = trainer(callbacks=saved, enable_checkpointing=True, max_epochs=9, max_steps=steps)
    fitted.fit(module, datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    return fitted


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduled")
    scheduled(folder, 1)
    return folder / "last.ckpt"


@pytest.mark.parametrize("case", STATES)
def test_states_that_no_run_has(tmp_path, of_a_run, case):
    """An error names the checkpoint before training begins, and before memory is taken."""
    keys, value = STATES[case]
    content = torch.load(of_a_run, weights_only=True)
    place = content
    for key in keys[:-1]:
        place = place[key]
    if value == "itself":
        value = []
        value.append(value)
    place[keys[-1]] = value
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"^RetrievalModule: (a|the) (checkpoint|state 'exp_avg' of the optimizer)"):
        scheduled(tmp_path, 2, tmp_path / "last.ckpt")


def test_states_of_a_run(tmp_path):
    """The same run continues from its own checkpoint."""
    scheduled(tmp_path, 2)
    assert scheduled(tmp_path, 5, tmp_path / "last.ckpt").global_step == 5


def test_huge_tensors_of_a_checkpoint_that_is_rebuilt(tmp_path, of_a_run):
    content = torch.load(of_a_run, weights_only=True)
    torch.save({**content, "state_dict": {**content["state_dict"], "more": HUGE}}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"^RetrievalModule: .* has a tensor of the shape \(1000000000000,\)"):
        RetrievalModule.load_from_checkpoint(tmp_path / "last.ckpt", embedder=net())
    with pytest.raises(ValueError, match=r"^RetrievalModule: the checkpoint has a tensor of the shape"):
        restored_network(torch.load(tmp_path / "last.ckpt", weights_only=True))


def test_files_elsewhere_are_not_published(users_folder, tmp_path, end_offline_run, monkeypatch):
    """Weights & Biases uploads the best checkpoint, whose path a resumed run has from the file."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    saving = {"every_n_train_steps": 1, "save_last": True, "save_top_k": 0, "enable_version_counter": False}
    run(tmp_path / "run", 1, saving=[ModelCheckpoint(tmp_path / "run", **saving)])
    private = tmp_path / "private.ckpt"
    torch.save({"private": "words of the user"}, private)
    change = functools.partial(put, field="best_model_path", path=str(private))
    checkpoint = write_states(tmp_path / "run" / "last.ckpt", change)
    logger = RetrievalWandbLogger(save_dir=tmp_path / "logged", offline=True)
    resumed = [ModelCheckpoint(tmp_path / "run", **saving)]
    run(tmp_path / "run", 3, checkpoint, resumed, logger=logger)
    assert resumed[0].best_model_path == str(private)  # which may be read
    end_offline_run()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != private]
    assert any(path.suffix == ".wandb" for path in written)
    assert not [path for path in written if b"words of the user" in path.read_bytes()]


def test_a_fifo_in_place_of_a_checkpoint(tmp_path):
    """Neither way of reading a checkpoint waits for somebody who writes into it."""
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"^RetrievalModule: .*last.ckpt must be a regular file, got a FIFO"):
        RetrievalModule.load_from_checkpoint(tmp_path / "last.ckpt", embedder=net())
    with pytest.raises(ValueError, match=r"^RetrievalModule: .*last.ckpt must be a regular file, got a FIFO"):
        run(tmp_path / "run", 1, tmp_path / "last.ckpt")
