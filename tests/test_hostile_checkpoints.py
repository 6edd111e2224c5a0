"""A resumed run deletes, replaces and publishes nothing but its own checkpoints, whatever its checkpoint says.

Lightning's `ModelCheckpoint` deletes the paths in its state. They may have any form that Lightning or fsspec knows.
"""

import functools
import os
import shutil
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
from lightning_fabric.plugins.io import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.checkpoints import (
    read_checkpoint,
    torch_writes_shards,
    write_checkpoint,
    write_sharded_checkpoint,
)
from lightning_retrieval.cli.main import main
from tests.lightning_retrieval.cli.example_config import SHORT, SMALL, write_example
from tests.lightning_retrieval.training.small_training import SGD, PointData, net, trainer

NEEDS_SHARDS = pytest.mark.skipif(not torch_writes_shards(), reason="needs torch 2.9")
pytestmark = [pytest.mark.hostile, pytest.mark.refusal]

DROPPED = "no checkpoints of this run"
NOT_DELETED = "was not deleted"
# Names of the user's folder, or of another machine, that Lightning or fsspec would resolve.
FORMS = (
    "{photos}",
    "{photos}/private.txt",
    "{folder}/{relative}",
    "{folder}/link/trip",
    "local://{photos}",
    "file://{photos}",
    "local://{folder}/{relative}",
    "memory://photos",
    "http://photos.example/private.ckpt",
    "simplecache::local://{photos}",
)

OF_WINDOWS = ("C:\\Users\\photos\\private.txt", "link\\..\\..\\photos\\private.txt")


def path_of(form: str, photos: Path, folder: Path) -> str:
    """The path that a form makes of the user's folder and the folder of the run."""
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to(photos)
    return form.format(photos=photos, folder=folder, relative=os.path.relpath(photos, folder))


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


def put_everywhere(state: dict, path: str) -> None:
    """Put a path into each field of a state; the worst of the best checkpoints is the next one to be deleted."""
    score = torch.tensor(-1.0)
    state |= {"best_model_path": path, "last_model_path": path, "kth_best_model_path": path}
    state |= {"kth_value": score, "best_k_models": {path: score}}


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
def test_fit_from_python(users_folder, stored, tmp_path, form):
    folder = tmp_path / "run"
    run(folder, 1)
    path = path_of(form, users_folder, folder)
    checkpoint = write_states(folder / "last.ckpt", lambda state: put_everywhere(state, path))
    saving = callbacks(folder)
    with pytest.warns(UserWarning, match=DROPPED):
        run(folder, 3, checkpoint, saving)
    assert_own_paths(saving, folder)
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test) metrics cover 2 of:UserWarning")
@pytest.mark.parametrize(("way", "form"), [("--ckpt_path", "local://{photos}"), ("--run_folder", "{folder}/link/trip")])
def test_fit_of_the_command_line(users_folder, tmp_path, way, form):
    folder, config = tmp_path / "run", write_example(tmp_path)
    arguments = ["fit", f"--config={config}", *SMALL, *SHORT, "--trainer.max_epochs=3"]
    main([*arguments, f"--run_folder={folder}", "--trainer.max_steps=1"])
    path = path_of(form, users_folder, folder / "checkpoints")
    for checkpoint in (folder / "checkpoints").glob("*.ckpt"):
        write_states(checkpoint, lambda state: put_everywhere(state, path))
    given = f"--run_folder={folder}"
    if way == "--ckpt_path":
        given = f"--ckpt_path={checkpoint}"
    with pytest.warns(UserWarning, match=DROPPED):
        main([*arguments, given, "--trainer.max_steps=2"])
    saved = [torch.load(path, weights_only=True) for path in tmp_path.rglob("*.ckpt")]
    assert 2 in [content["global_step"] for content in saved]


def test_evaluation(users_folder, tmp_path):
    """Evaluation restores the states of callbacks too, and "best" would read what they name."""
    folder = tmp_path / "run"
    run(folder, 1)
    checkpoint = write_states(folder / "last.ckpt", lambda state: put_everywhere(state, "http://a.example/b"))
    evaluating = trainer(callbacks=callbacks(folder)[:1], enable_checkpointing=True)
    with pytest.warns(UserWarning, match=DROPPED):
        evaluating.test(module(), datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    with pytest.raises(ValueError, match="best"):
        evaluating.test(module(), datamodule=PointData(), ckpt_path="best", weights_only=True)


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


@pytest.mark.parametrize("form", ["{photos}/private.txt", "local://{photos}", "memory://photos", *OF_WINDOWS])
def test_a_subclass_of_the_users(users_folder, stored, tmp_path, form):
    folder = tmp_path / "run"
    run(folder, 1, saving=[Kept(folder, "{step}", every_n_train_steps=1, save_last=True)])
    path = path_of(form, users_folder, folder)
    checkpoint = write_states(folder / "last.ckpt", lambda state: state.update(kept=[path], dirpath=path), "Kept")
    saving = Kept(folder, "{step}", every_n_train_steps=1, save_last=True)
    with pytest.warns(UserWarning, match=NOT_DELETED):
        run(folder, 2, checkpoint, [saving])
    assert saving.dirpath == str(folder)
    assert_own_paths([saving], folder)


class Named(ModelCheckpoint):
    """A subclass that takes the names of its files from the state."""

    def state_dict(self):
        return {**super().state_dict(), "filename": self.filename}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.filename = state_dict["filename"]


class Simple(Checkpoint):
    """A callback of the user's that saves after each step, in the folder of the state."""

    def __init__(self, dirpath):
        self.dirpath = str(dirpath)

    def state_dict(self):
        return {"dirpath": self.dirpath}

    def load_state_dict(self, state_dict):
        self.dirpath = state_dict["dirpath"]

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(f"{self.dirpath}/simple.ckpt")


@pytest.mark.parametrize("form", ["{photos}/private", "{folder}/{relative}/private", "{relative}/private"])
@pytest.mark.parametrize("kind", [Named, Simple])
def test_a_subclass_writes_nowhere_else(users_folder, tmp_path, kind, form):
    """Into the folder of the user's, which is beside that of the run."""
    folder = tmp_path / "run"

    def saving():
        if kind is Simple:
            return [Simple(folder)]
        return [Named(folder, "{step}", every_n_train_steps=1)]

    run(folder, 1, saving=saving())
    checkpoint = next(folder.glob("*.ckpt"))
    path = path_of(form, users_folder, folder)
    name = {Named: "filename", Simple: "dirpath"}[kind]
    write_states(checkpoint, lambda state: state.update({name: path}), kind.__name__)
    run(folder, 2, checkpoint, saving())
    assert len(list(folder.glob("*.ckpt"))) >= 1


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
    with pytest.warns(UserWarning, match=DROPPED):
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
    content["checkpoint_callback_best_model_score"] = 0.0
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
    (photos / "rest.pt").write_text("of another program")
    (folder / "notes.txt").write_text("a note")
    for path in (photos, folder / "notes.txt", *(path_of(form, users_folder, folder) for form in FORMS)):
        with pytest.warns(UserWarning, match=NOT_DELETED):
            done.strategy.remove_checkpoint(path)
    assert (photos / "trip" / "private.txt").read_text() == "private, too"
    assert (folder / "notes.txt").read_text() == "a note"
    (folder / "linked.ckpt").symlink_to(saved)
    done.strategy.remove_checkpoint(folder / "linked.ckpt")
    assert saved.is_file()
    done.strategy.remove_checkpoint(str(saved))
    assert not saved.exists()


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_sharded_checkpoint_is_removed_without_other_files(users_folder, tmp_path):
    done = run(tmp_path / "run", 1)
    for other in ((), ("notes.txt",), ("shards/notes.txt",)):
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


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_file_takes_the_place_of_a_sharded_checkpoint_without_other_files(tmp_path):
    path = tmp_path / "last.ckpt"
    write_sharded_checkpoint(path, {"epoch": 3})
    write_checkpoint(path, {"epoch": 4})
    assert read_checkpoint(path) == {"epoch": 4}
    path.unlink()
    write_sharded_checkpoint(path, {"epoch": 5})
    (path / "notes.txt").write_text("a note")
    with pytest.raises(OSError, match="cannot be written"):
        write_checkpoint(path, {"epoch": 6})
    assert (path / "notes.txt").read_text() == "a note"
    assert read_checkpoint(path) == {"epoch": 5}


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("write", [write_checkpoint, write_sharded_checkpoint])
def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path, write):
    """As `save_last="link"` leaves one."""
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    write_sharded_checkpoint(best, {"epoch": 3})
    last.symlink_to(best)
    write(last, {"epoch": 4})
    assert not last.is_symlink()
    assert (read_checkpoint(best), read_checkpoint(last)) == ({"epoch": 3}, {"epoch": 4})


@NEEDS_SHARDS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("write", [write_checkpoint, write_sharded_checkpoint])
def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path, write):
    """Though it has a file of the name that a sharded checkpoint has."""
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "rest.pt").write_text("of another program")
    with pytest.raises(OSError, match="cannot be written"):
        write(tmp_path / "last.ckpt", {"epoch": 4})
    assert (tmp_path / "last.ckpt" / "rest.pt").read_text() == "of another program"


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
    """Neither a link nor a file takes the place of a folder of the user, even if it has some rest.pt."""
    photos = shutil.copytree(users_folder, tmp_path / "last.ckpt")
    (photos / "rest.pt").write_text("of another program")
    with pytest.raises(ValueError, match="save_last='link'"):
        run(tmp_path, 1, saving=callbacks(tmp_path, save_last="link")[1:])
    with pytest.raises(OSError, match="cannot be written"):
        run(tmp_path, 1, saving=callbacks(tmp_path)[1:])
    assert (photos / "trip" / "private.txt").read_text() == "private, too"


def test_a_remote_folder_of_the_run(users_folder, stored):
    """A run saves and deletes in its own folder of another file system, and nowhere else there."""
    folder = "memory://run"
    run(folder, 2)
    run(folder, 4, f"{folder}/last.ckpt")
    newest = [path for path in stored.ls("/run", detail=False) if "newest" in path]
    assert newest == ["/run/newest-step=4.ckpt"]
    for path in (f"{folder}/../photos", f"{folder}/photos::memory://photos", f"local://{users_folder}"):
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


def test_an_optimizer_state_of_another_shape(tmp_path):
    """Fused updates would write beyond the state."""
    adam = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.AdamW, lr=0.1))
    run(tmp_path, 1, trained=adam)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    content["optimizer_states"][0]["state"][0]["exp_avg"] = torch.ones(3)
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"^RetrievalModule: .*exp_avg"):
        run(tmp_path, 2, tmp_path / "last.ckpt", trained=adam)
