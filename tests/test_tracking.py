"""What a run logs, read back from the files of TensorBoard and CSV."""

import csv
import json
import time

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_retrieval import CalibrationLoss, Embedder, RetrievalModule, SmoothAPLoss, WeightedSum
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.losses.combined import Schedule
from tests.callbacks.glyph_runs import BATCHES, SMALL_LISTS, fit_glyphs, small_glyphs
from tests.quiet_trainer import quiet_trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*SMALL_LISTS)]


@pytest.fixture(scope="module")
def glyphs():
    return small_glyphs()


def test_evaluation_without_training_logs_the_data_module(tmp_path, glyphs):
    for stage in ("test", "validate"):
        logger = CSVLogger(tmp_path, stage)
        few = {"limit_val_batches": 1, "limit_test_batches": 1}
        trainer = quiet_trainer(logger=logger, callbacks=[RetrievalEvaluation()], **few)
        getattr(trainer, stage)(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()), glyphs, verbose=False)
        logger.save()
        hyperparameters = yaml.safe_load((tmp_path / stage / "version_0/hparams.yaml").read_text())
        assert hyperparameters["data"]["classes_per_batch"] == 6


def test_tensorboard_and_csv_contain_the_same(tmp_path, glyphs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")
    trainer = fit_glyphs(loggers, glyphs, tmp_path)
    loggers[1].experiment.close()
    events = EventAccumulator(str(tmp_path / "board/version_0"))
    events.Reload()
    logged = [event.value for event in events.Scalars("val/mAP")]
    hparams = yaml.safe_load((tmp_path / "csv/version_0/hparams.yaml").read_text())
    assert hparams["data"]["class_path"].endswith(".Glyphs")
    assert hparams["sampler"]["classes_per_batch"] == 6
    assert hparams["batch"]["images"] == 18
    for name in ("data", "sampler", "batch"):
        (text,) = events.Tensors(f"{name}/text_summary")
        assert json.loads(text.tensor_proto.string_val[0].decode().strip("`").removeprefix("json")) == hparams[name]
    assert yaml.safe_load((tmp_path / "board/version_0/hparams.yaml").read_text())["loss"] == hparams["loss"]
    assert hparams["best"]["val/mAP"] == pytest.approx(max(logged), rel=1e-6)
    assert events.Scalars("best/val/mAP")[-1].value == max(logged)
    assert events.Scalars("hp_metric")[-1].value == pytest.approx(float(trainer.checkpoint_callback.best_model_score))


class WithLog(RetrievalModule):
    """Overrides `log`, so that it is called for each value."""

    def log(self, name, *arguments, **keywords):
        super().log(name, *arguments, **keywords)


class Metrics(pl.Callback):
    """Keeps what Lightning knows of the values of each step, and logs a value of its own between them."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("of the callback", float(batch_idx))
        self._keep(trainer)

    def on_train_batch_start(self, trainer, *arguments):
        self._keep(trainer)

    on_train_epoch_end = on_validation_end = on_train_batch_start

    def _keep(self, trainer):
        for values in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            self.found.append({name: float(value) for name, value in values.items() if name != "train/images/s"})


def test_values_are_those_of_a_call_of_log_in_each_step(tmp_path, glyphs):
    found = []
    for kind in (RetrievalModule, WithLog):
        pl.seed_everything(0)
        metrics = Metrics()
        loss = WeightedSum(
            {"ap": (1.0, SmoothAPLoss()), "calibration": (Schedule([(0, 1), (0.5, 0)]), CalibrationLoss())}
        )
        logger = CSVLogger(tmp_path, kind.__name__)
        few = {"limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 2, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(max_epochs=2, logger=logger, callbacks=[metrics, RetrievalEvaluation()], **few)
        trainer.fit(kind(Embedder("glyph_net", 8), loss), glyphs)
        found.append(metrics.found)
    assert found[0] == found[1]
    assert len({values.get("train/loss") for values in found[0]}) == 9  # None, and the loss of each step


def test_throughput_excludes_the_time_between_epochs(tmp_path, glyphs, monkeypatch):
    """Before each validation, the clock goes forward by an hour, which no step of a busy machine takes."""
    clock, pauses = time.perf_counter, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600 * len(pauses))
    few = {"limit_train_batches": BATCHES, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    pause = LambdaCallback(on_validation_start=lambda *_: pauses.append(1))
    callbacks = [pause, RetrievalEvaluation()]
    logger = CSVLogger(tmp_path, "csv")
    trainer = quiet_trainer(max_epochs=2, logger=logger, callbacks=callbacks, log_every_n_steps=1, **few)
    trainer.fit(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()), glyphs)
    with (tmp_path / "csv/version_0/metrics.csv").open() as file:
        speeds = [float(row["train/images/s"]) for row in csv.DictReader(file) if row["train/images/s"]]
    assert len(speeds) == 2 * (BATCHES - 1)  # the second batch of an epoch is the first with a value
    assert min(speeds) > 18 / 3600


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore:Converting a tensor", "ignore:.*might cause the trace")
def test_tensorboard_gets_the_graph_of_the_network(tmp_path):
    """`log_graph=True` traces the module, before the first step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss(), chunk_size=8)
    module.example_input_array = torch.rand(2, 1, 32, 32)
    data = [(torch.rand(8, 1, 32, 32), torch.arange(8) // 2) for _ in range(2)]
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    trainer = quiet_trainer(max_epochs=1, logger=logger)
    trainer.fit(module, DataLoader(data, batch_size=None))
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert trainer.global_step == 2
    assert any("Embedder" in node.name for node in events.Graph().node)
