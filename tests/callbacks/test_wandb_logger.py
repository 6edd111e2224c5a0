"""RetrievalWandbLogger, read back from the files of an offline run."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_retrieval.callbacks import (
    PrecisionRecallCurve,
    RetrievalGallery,
    RetrievalWandbLogger,
    ScoreHistogram,
    TrainingCurve,
)
from lightning_retrieval.callbacks.csv_logger import run_folder
from tests.callbacks.glyph_runs import BATCHES, SMALL_LISTS, fit_glyphs, offline_runs, small_glyphs

pytestmark = [pytest.mark.filterwarnings(message) for message in SMALL_LISTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder and the parts of a run: two epochs with figures, and an epoch that continues them."""
    import wandb

    folder = tmp_path_factory.mktemp("wandb")
    callbacks = [
        RetrievalGallery(queries=2, k=3),
        ScoreHistogram(),
        PrecisionRecallCurve(),
        TrainingCurve(),
        ModelCheckpoint(filename="latest"),
    ]
    settings = {"save_dir": folder, "project": "glyphs", "id": "first", "tags": ["test"]}
    with pytest.MonkeyPatch.context() as patch:
        offline_environment(patch, folder)
        glyphs = small_glyphs()
        fit_glyphs(RetrievalWandbLogger("small", **settings), glyphs, folder, callbacks=callbacks)
        wandb.finish()
        fit_glyphs(RetrievalWandbLogger(**settings), glyphs, folder, epochs=3, ckpt_path=callbacks[-1].best_model_path)
        wandb.finish()
        wandb.teardown()
    first, second = offline_runs(folder)
    return folder, first, second


def offline_environment(patch, folder):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        patch.delenv(name, raising=False)
    cache = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    patch.setenv("XDG_CACHE_HOME", str(cache))  # in which the glyphs are drawn already
    patch.setenv("HOME", str(folder))
    patch.setenv("WANDB_MODE", "offline")
    patch.setenv("WANDB_SILENT", "true")
    for name in ("DATA", "CACHE", "CONFIG"):
        patch.setenv(f"WANDB_{name}_DIR", str(folder / "home"))


@pytest.mark.slow
def test_offline_run_contains_config_and_metrics(runs):
    run = runs[1]
    assert run.config["data"]["class_path"] == "lightning_retrieval.datamodules.Glyphs"
    assert run.config["data"]["classes_per_batch"] == 6
    assert run.config["sampler"]["class_path"].endswith(".PKSampler")
    assert run.config["sampler"]["samples_per_class"] == 3
    batch = {"images": 18, "classes": 6, "list_length": 17 + 20, "chunk_size": 7, "processes": 1}
    assert run.config["batch"] == batch
    assert run.config["loss"]["init_args"]["tau"] == 0.02

    logged = run.column("val/mAP")
    assert len(logged) == 2
    assert run.summary["val/mAP"] == {"max": max(logged), "last": logged[-1]}
    losses = run.column("train/loss")
    assert len(losses) == 2 * BATCHES
    assert run.summary["train/loss"] == {"min": min(losses), "last": losses[-1]}
    gaps = run.column("val/decomposability_gap")
    assert run.summary["val/decomposability_gap"] == {"min": min(gaps), "last": gaps[-1]}
    assert len(run.column("train/AP")) == 2 * BATCHES
    assert len(run.column("train/images/s")) == 2 * (BATCHES - 1)  # none of the first step of an epoch


@pytest.mark.slow
def test_offline_run_contains_the_figures_that_are_written(runs):
    folder, run, _ = runs
    sent = {path.read_bytes() for path in run.folder.glob("files/media/images/retrieval/*.png")}
    written = {path.read_bytes() for path in folder.rglob("*.png") if "media" not in path.parts}
    assert len(sent) == 8
    assert written < sent  # the curve after the first epoch is no longer there


@pytest.mark.slow
def test_run_with_the_same_id_continues(runs):
    folder, before, after = runs
    assert before.id == after.id == "first"
    assert [run.column("trainer/global_step")[-1] for run in (before, after)] == [2 * BATCHES - 1, 3 * BATCHES - 1]
    assert min(after.column("trainer/global_step")) == 2 * BATCHES
    assert len({path.parent for path in folder.rglob("*.ckpt")}) == 1
    assert after.summary["best/val/mAP"] == max(before.column("val/mAP") + after.column("val/mAP"))


@pytest.mark.slow
def test_the_folder_of_a_run_holds_all_its_files(runs):
    folder, first, second = runs
    assert {path.name for path in folder.iterdir()} - {"home", ".cache", ".config"} == {"glyphs"}
    assert [path.name for path in (folder / "glyphs").iterdir()] == ["first"]
    assert {path.name for path in (folder / "glyphs/first").iterdir()} == {
        *("checkpoints", "curve.png", "retrieval", "wandb")
    }
    assert {run.folder.parent for run in (first, second)} == {folder / "glyphs/first/wandb"}


def folder_of_rank(rank, world_size, folder):
    """The folder of a run whose id differs between the processes until the first one's is used."""
    logger = RetrievalWandbLogger(save_dir=folder, offline=True)
    return logger.version, run_folder(SimpleNamespace(log_dir=str(folder), logger=logger))


def test_the_id_of_a_run_is_that_of_the_first_process(tmp_path, run_processes, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    (first, folder), (second, folder_of_second) = run_processes(folder_of_rank, 2, tmp_path)
    assert folder == folder_of_second == tmp_path / "lightning-retrieval" / first
    assert first != second
    monkeypatch.setenv("WANDB_RUN_ID", "swept")
    assert folder_of_rank(0, 1, tmp_path)[0] == "swept"
