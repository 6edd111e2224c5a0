"""RetrievalWandbLogger, read back from the files of an offline run."""

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_retrieval.callbacks import RetrievalGallery, RetrievalWandbLogger, ScoreHistogram
from tests.callbacks.glyph_runs import BATCHES, SMALL_LISTS, fit_glyphs, offline_runs

pytestmark = [pytest.mark.filterwarnings(message) for message in SMALL_LISTS]


@pytest.mark.slow
def test_offline_run_contains_config_metrics_figures_and_checkpoint(tmp_path, no_key, glyphs, end_offline_run):
    logger = RetrievalWandbLogger("small", tmp_path, project="glyphs", tags=["test"])
    trainer = fit_glyphs(logger, glyphs, tmp_path, callbacks=[RetrievalGallery(queries=2, k=3), ScoreHistogram()])
    end_offline_run()
    (run,) = offline_runs(tmp_path)

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
    assert len(run.column("train/images_per_second")) == 2 * (BATCHES - 1)  # none of the first step of an epoch

    pictures = [path.name.split("_")[0] for path in run.folder.glob("files/media/images/retrieval/*.png")]
    assert sorted(pictures) == ["scores-val"] * 2 + ["val"] * 2

    (artifact,) = run.artifacts
    best = trainer.checkpoint_callback
    assert artifact["type"] == "model"
    assert artifact["aliases"] >= {"best", f"val-mAP-{max(logged):.4f}"}
    assert artifact["metadata"] == {
        "file": f"epoch={logged.index(max(logged))}.ckpt",
        "val/mAP": float(best.best_model_score),
    }
    assert artifact["files"] == ["model.ckpt"]


@pytest.mark.slow
def test_run_with_the_same_id_continues(tmp_path, no_key, glyphs, end_offline_run):
    def logger():
        return RetrievalWandbLogger(save_dir=tmp_path, project="glyphs", id="first")

    fit_glyphs(logger(), glyphs, tmp_path, epochs=1)
    end_offline_run()
    trainer = fit_glyphs(logger(), glyphs, tmp_path, epochs=2, ckpt_path="last")
    end_offline_run()
    assert trainer.global_step == 2 * BATCHES
    before, after = offline_runs(tmp_path)
    assert before.id == after.id == "first"
    assert [run.column("trainer/global_step")[-1] for run in (before, after)] == [BATCHES - 1, 2 * BATCHES - 1]
    assert min(after.column("trainer/global_step")) == BATCHES
    assert {path.name for path in tmp_path.rglob("*.ckpt")} >= {"last.ckpt"}
    assert len({path.parent for path in tmp_path.rglob("*.ckpt")}) == 1
    assert after.summary["best/val/mAP"] == max(before.column("val/mAP") + after.column("val/mAP"))


@pytest.mark.slow
def test_aliases_of_artifacts_name_the_monitored_metric(tmp_path, no_key, glyphs, end_offline_run):
    """Several checkpoints of one run: the first that looks at a metric is the best."""
    callbacks = [
        ModelCheckpoint(monitor="train/loss", mode="min", filename="loss:{epoch}"),
        ModelCheckpoint(filename="latest"),
    ]
    fit_glyphs(RetrievalWandbLogger(save_dir=tmp_path), glyphs, tmp_path, epochs=1, callbacks=callbacks)
    end_offline_run()
    (run,) = offline_runs(tmp_path)
    by_file = {artifact["metadata"]["file"]: artifact["aliases"] - {"latest"} for artifact in run.artifacts}
    (score,), loss = run.column("val/mAP"), run.column("train/loss")[-1]
    assert by_file == {
        "epoch=0.ckpt": {"best", f"val-mAP-{score:.4f}"},
        "loss:epoch=0.ckpt": {f"train-loss-{loss:.4f}"},
        "latest.ckpt": {"last"},
    }


@pytest.mark.slow
def test_failed_upload_of_an_artifact_gives_a_warning(tmp_path, no_key, glyphs, monkeypatch, end_offline_run):
    import wandb

    def full(*arguments, **settings):
        raise OSError("no space left on device")

    monkeypatch.setattr(wandb.Artifact, "add_file", full)
    with pytest.warns(UserWarning, match=r"ckpt could not be uploaded as an artifact: no space left on device"):
        fit_glyphs(RetrievalWandbLogger(save_dir=tmp_path), glyphs, tmp_path, epochs=1)
    end_offline_run()
    assert not offline_runs(tmp_path)[0].artifacts


@pytest.mark.refusal
def test_offline_must_be_a_flag(tmp_path):
    with pytest.raises(TypeError, match=r"^RetrievalWandbLogger: `offline` must be True, False or None, got 'yes'\.$"):
        RetrievalWandbLogger(offline="yes")
