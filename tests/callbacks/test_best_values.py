"""The best value of each metric, and what each logger keeps of it."""

import math

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.callbacks.evaluation import is_count, update_best
from tests.callbacks.glyph_runs import SMALL_LISTS, fit_glyphs

pytestmark = [pytest.mark.filterwarnings(message) for message in SMALL_LISTS]


class ValuesOf(RetrievalEvaluation):
    """Computes the given values of mAP."""

    def __init__(self, values):
        super().__init__((1,))
        self.values = values

    def _create_metrics(self, loader, sync_on_compute, dims):
        metrics = super()._create_metrics(loader, sync_on_compute, dims)
        metrics.compute = lambda: {"mAP": torch.tensor(next(self.values)), "skipped_queries": torch.tensor(3.0)}
        return metrics


@pytest.mark.slow
def test_best_is_the_highest_number_of_the_run(tmp_path, glyphs):
    values = iter([0.9, math.nan, 0.6, 0.4, math.nan])
    evaluation = ValuesOf(values)
    for version, (epochs, best) in enumerate([(3, 0.9), (2, 0.4)]):
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=CSVLogger(tmp_path, "csv"), callbacks=[evaluation],
            limit_train_batches=1, limit_val_batches=1, num_sanity_val_steps=0, log_every_n_steps=1,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()), glyphs)
        hyperparameters = yaml.safe_load((tmp_path / f"csv/version_{version}/hparams.yaml").read_text())
        assert hyperparameters["best"] == {"val/mAP": pytest.approx(best)}


class Interrupt(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise RuntimeError("the machine was stopped")


@pytest.mark.slow
def test_interrupted_run_logs_its_best(tmp_path, glyphs):
    with pytest.raises(RuntimeError, match=r"^the machine was stopped$"):
        fit_glyphs(CSVLogger(tmp_path, "csv"), glyphs, tmp_path, callbacks=[Interrupt()])
    assert yaml.safe_load((tmp_path / "csv/version_0/hparams.yaml").read_text())["best"]["val/mAP"] > 0


@pytest.mark.slow
def test_best_of_a_resumed_run_includes_its_first_part(tmp_path, glyphs):
    fit_glyphs(False, glyphs, tmp_path, epochs=1)
    (last,) = tmp_path.rglob("last.ckpt")
    saved = torch.load(last, map_location="cpu", weights_only=True)
    saved["callbacks"]["RetrievalEvaluation"]["best"]["val/mAP"] = 1.5
    torch.save(saved, last)
    trainer = fit_glyphs(CSVLogger(tmp_path, "csv"), glyphs, tmp_path, ckpt_path=last)
    hyperparameters = yaml.safe_load((tmp_path / "csv/version_0/hparams.yaml").read_text())
    assert hyperparameters["best"]["val/mAP"] == 1.5
    assert trainer.callback_metrics["val/mAP"] <= 1


def test_counts_and_nan_are_not_best_values():
    best = {"val/mAP": 0.5}
    update_best(best, {"val/mAP": 0.25, "val/R@1": 1.0, "val/NDCG": math.nan, "val/skipped_queries": 3.0})
    update_best(best, {"val/mAP": 0.75, "test/skipped_queries/easy": 2.0})
    assert best == {"val/mAP": 0.75, "val/R@1": 1.0}
    assert not is_count("val/mAP/easy")
