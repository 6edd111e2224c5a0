"""What a run tells loggers and progress bar: read back from the files of Weights & Biases, TensorBoard and CSV."""

import csv
import json
import math
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import (
    APMonitor,
    RetrievalEvaluation,
    RetrievalGallery,
    RetrievalWandbLogger,
    ScoreHistogram,
)
from lightning_retrieval.datamodules import Glyphs
from tests.wandb_files import OfflineRun

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '(train|val|test)_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:GPU available but not used:UserWarning"),
    pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test) metrics cover .* of .* batches:UserWarning"),
    pytest.mark.filterwarnings("ignore:RetrievalEvaluation. .* have a k above the number of ranked images:UserWarning"),
    pytest.mark.filterwarnings("ignore:RetrievalModule. BatchNorm sees:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]
BATCHES = 3  # of an epoch


@pytest.fixture
def no_key(tmp_path, monkeypatch, end_offline_run):
    """A person who has never heard of Weights & Biases."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, "")  # so that it is taken away in the end, if the logger sets it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


@pytest.fixture(scope="module")
def glyphs():
    return Glyphs(classes_per_batch=6, samples_per_class=3, eval_batch_size=64, seed=2)


def fit(logger, glyphs, folder, epochs=2, callbacks=(), **settings):
    torch.manual_seed(0)
    network = Embedder("glyph_net", embedding_dim=8)
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=epochs,
        logger=logger,
        log_every_n_steps=1,
        limit_train_batches=BATCHES,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        callbacks=[
            RetrievalEvaluation((1, 5)),
            APMonitor(),
            ModelCheckpoint(monitor="val/mAP", mode="max", save_last=True, filename="{epoch}"),
            *callbacks,
        ],
    )
    module = RetrievalModule(network, SmoothAPLoss(tau=0.02), chunk_size=7, memory=CrossBatchMemory(20))
    trainer.fit(module, glyphs, **settings)
    return trainer


def offline_runs(folder):
    return [OfflineRun(path) for path in sorted(folder.glob("wandb/offline-run-*"))]


def test_an_offline_run_of_weights_and_biases_holds_all_that_is_tracked(tmp_path, no_key, glyphs, end_offline_run):
    logger = RetrievalWandbLogger("small", tmp_path, project="glyphs", tags=["test"])
    trainer = fit(logger, glyphs, tmp_path, callbacks=[RetrievalGallery(queries=2, k=3), ScoreHistogram()])
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


def test_a_run_of_one_id_goes_on_where_it_stopped(tmp_path, no_key, glyphs, end_offline_run):
    def logger():
        return RetrievalWandbLogger(save_dir=tmp_path, project="glyphs", id="first")

    fit(logger(), glyphs, tmp_path, epochs=1)
    end_offline_run()
    trainer = fit(logger(), glyphs, tmp_path, epochs=2, ckpt_path="last")
    end_offline_run()
    assert trainer.global_step == 2 * BATCHES
    before, after = offline_runs(tmp_path)
    assert before.id == after.id == "first"
    assert [run.column("trainer/global_step")[-1] for run in (before, after)] == [BATCHES - 1, 2 * BATCHES - 1]
    assert min(after.column("trainer/global_step")) == BATCHES
    assert {path.name for path in tmp_path.rglob("*.ckpt")} >= {"last.ckpt"}
    assert len({path.parent for path in tmp_path.rglob("*.ckpt")}) == 1
    assert after.summary["best/val/mAP"] == max(before.column("val/mAP") + after.column("val/mAP"))


def test_it_is_online_where_there_is_a_key_and_as_was_said(tmp_path, no_key, monkeypatch):
    def is_offline(**settings):
        return RetrievalWandbLogger(save_dir=tmp_path, **settings).offline

    assert is_offline()
    assert is_offline(offline=True)
    assert not is_offline(offline=False)
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine example.org login user password secret\n")
    assert is_offline()
    netrc.write_text("machine api.wandb.ai login user password " + 40 * "0" + "\n")
    assert not is_offline()
    assert is_offline(offline=True)
    netrc.write_text("half a line")
    assert is_offline()
    netrc.unlink()
    with monkeypatch.context() as there:
        there.setenv("WANDB_API_KEY", 40 * "0")
        assert not is_offline()
    monkeypatch.setenv("WANDB_MODE", "online")
    assert not is_offline()


def test_keys_are_those_that_would_be_found(tmp_path, no_key, monkeypatch):
    def is_offline():
        return RetrievalWandbLogger(save_dir=tmp_path).offline

    netrc = tmp_path / "home" / ".netrc"
    monkeypatch.setenv("WANDB_API_KEY", "  ")
    monkeypatch.setenv("WANDB_MODE", "")
    assert is_offline()
    netrc.write_bytes(b"machine api.wandb.ai login m\xfcller password x\n")  # not UTF-8
    assert is_offline()
    netrc.write_text("machine api.wandb.ai login user password x\n")
    assert not is_offline()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # for which there is none
    assert is_offline()
    netrc.write_text("machine wandb.example.org login user password x\n")
    assert not is_offline()
    monkeypatch.setenv("NETRC", str(tmp_path / "elsewhere"))
    assert is_offline()


def test_artifacts_say_why_they_were_chosen(tmp_path, no_key, glyphs, end_offline_run):
    """Several checkpoints of one run: the first that looks at a metric is the best."""
    callbacks = [
        ModelCheckpoint(monitor="train/loss", mode="min", filename="loss:{epoch}"),
        ModelCheckpoint(filename="latest"),
    ]
    fit(RetrievalWandbLogger(save_dir=tmp_path), glyphs, tmp_path, epochs=1, callbacks=callbacks)
    end_offline_run()
    (run,) = offline_runs(tmp_path)
    by_file = {artifact["metadata"]["file"]: artifact["aliases"] - {"latest"} for artifact in run.artifacts}
    (score,), loss = run.column("val/mAP"), run.column("train/loss")[-1]
    assert by_file == {
        "epoch=0.ckpt": {"best", f"val-mAP-{score:.4f}"},
        "loss:epoch=0.ckpt": {f"train-loss-{loss:.4f}"},
        "latest.ckpt": {"last"},
    }


def test_a_run_does_not_fail_for_its_artifact(tmp_path, no_key, glyphs, monkeypatch, end_offline_run):
    import wandb

    def full(*arguments, **settings):
        raise OSError("no space left on device")

    monkeypatch.setattr(wandb.Artifact, "add_file", full)
    with pytest.warns(UserWarning, match=r"ckpt could not be uploaded as an artifact: no space left on device"):
        fit(RetrievalWandbLogger(save_dir=tmp_path), glyphs, tmp_path, epochs=1)
    end_offline_run()
    assert not offline_runs(tmp_path)[0].artifacts


class ValuesOf(RetrievalEvaluation):
    """Has these mAPs, whatever is found."""

    def __init__(self, values):
        super().__init__((1,))
        self.values = values

    def _create_metrics(self, loader, sync_on_compute):
        metrics = super()._create_metrics(loader, sync_on_compute)
        metrics.compute = lambda: {"mAP": torch.tensor(next(self.values)), "skipped_queries": torch.tensor(3.0)}
        return metrics


def test_the_best_is_the_highest_number_of_this_run(tmp_path, glyphs):
    values = iter([0.9, math.nan, 0.6, 0.4, math.nan])
    evaluation = ValuesOf(values)
    for version, (epochs, best) in enumerate([(3, 0.9), (2, 0.4)]):
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=CSVLogger(tmp_path, "csv"), callbacks=[evaluation],
            limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=0, log_every_n_steps=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()), glyphs)
        told = yaml.safe_load((tmp_path / f"csv/version_{version}/hparams.yaml").read_text())
        assert told["best"] == {"val/mAP": pytest.approx(best)}


class Interrupt(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise RuntimeError("the machine is taken away")


def test_an_interrupted_run_keeps_its_best(tmp_path, glyphs):
    with pytest.raises(RuntimeError, match=r"^the machine is taken away$"):
        fit(CSVLogger(tmp_path, "csv"), glyphs, tmp_path, callbacks=[Interrupt()])
    assert yaml.safe_load((tmp_path / "csv/version_0/hparams.yaml").read_text())["best"]["val/mAP"] > 0


def test_an_evaluation_alone_says_of_what(tmp_path, glyphs):
    for stage in ("test", "validate"):
        logger = CSVLogger(tmp_path, stage)
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=logger,
            limit_val_batches=1,
            limit_test_batches=1,
            callbacks=[RetrievalEvaluation()],
        )
        getattr(trainer, stage)(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()), glyphs, verbose=False)
        logger.save()
        told = yaml.safe_load((tmp_path / stage / "version_0/hparams.yaml").read_text())
        assert told["data"]["classes_per_batch"] == 6


@pytest.mark.refusal
def test_offline_is_a_flag(tmp_path):
    with pytest.raises(TypeError, match=r"^RetrievalWandbLogger: `offline` must be True, False or None, got 'yes'\.$"):
        RetrievalWandbLogger(offline="yes")


def test_tensorboard_and_csv_hold_the_same(tmp_path, glyphs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")
    trainer = fit(loggers, glyphs, tmp_path)
    loggers[1].experiment.close()
    events = EventAccumulator(str(tmp_path / "board/version_0"))
    events.Reload()
    logged = [event.value for event in events.Scalars("val/mAP")]
    facts = yaml.safe_load((tmp_path / "csv/version_0/hparams.yaml").read_text())
    assert facts["data"]["class_path"].endswith(".Glyphs")
    assert facts["sampler"]["classes_per_batch"] == 6
    assert facts["batch"]["images"] == 18
    for name in ("data", "sampler", "batch"):
        (text,) = events.Tensors(f"{name}/text_summary")
        assert json.loads(text.tensor_proto.string_val[0].decode().strip("`").removeprefix("json")) == facts[name]
    assert yaml.safe_load((tmp_path / "board/version_0/hparams.yaml").read_text())["loss"] == facts["loss"]
    assert facts["best"]["val/mAP"] == pytest.approx(max(logged), rel=1e-6)
    assert events.Scalars("best/val/mAP")[-1].value == max(logged)
    assert events.Scalars("hp_metric")[-1].value == pytest.approx(float(trainer.checkpoint_callback.best_model_score))


def test_the_best_of_a_resumed_run_is_of_all_of_it(tmp_path, glyphs):
    fit(False, glyphs, tmp_path, epochs=1)
    (last,) = tmp_path.rglob("last.ckpt")
    saved = torch.load(last, map_location="cpu", weights_only=True)
    saved["callbacks"]["RetrievalEvaluation"]["best"]["val/mAP"] = 1.5
    torch.save(saved, last)
    trainer = fit(CSVLogger(tmp_path, "csv"), glyphs, tmp_path, ckpt_path=last)
    hyperparameters = yaml.safe_load((tmp_path / "csv/version_0/hparams.yaml").read_text())
    assert hyperparameters["best"]["val/mAP"] == 1.5
    assert trainer.callback_metrics["val/mAP"] <= 1


def test_progress_bars_show_loss_ap_and_speed(tmp_path, glyphs):
    trainer = fit(False, glyphs, tmp_path, epochs=1)
    shown = trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module)
    assert {"train/loss", "train/AP", "train/images_per_second"} <= shown.keys()


class Clock(pl.Callback):
    """Time goes on as it says: in each step, and between epochs."""

    def __init__(self):
        self.now = 0.0

    def on_train_batch_start(self, *arguments):
        self.now += 0.2

    def on_train_epoch_start(self, *arguments):
        self.now += 100

    on_validation_start = on_train_epoch_start


@pytest.mark.parametrize("validated", [1, 0])
def test_images_a_second_count_steps_with_their_loading_only(validated, tmp_path, glyphs, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("lightning_retrieval.training.throughput.time", SimpleNamespace(perf_counter=lambda: clock.now))
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=CSVLogger(tmp_path, "csv"), callbacks=[clock, RetrievalEvaluation()],
        limit_train_batches=BATCHES, limit_val_batches=validated, num_sanity_val_steps=0, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()), glyphs)
    with (tmp_path / "csv/version_0/metrics.csv").open() as file:
        speeds = [float(row["train/images_per_second"] or 0) for row in csv.DictReader(file)]
    assert [speed for speed in speeds if speed] == pytest.approx([18 / 0.2] * 2 * (BATCHES - 1))
