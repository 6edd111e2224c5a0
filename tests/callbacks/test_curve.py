"""TrainingCurve: a figure after each validation, whose points are in the checkpoint."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation, TrainingCurve


def fit(folder, curve, epochs=2, ckpt_path=None, logger=True) -> pl.Trainer:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(12, 6), torch.arange(12) // 4)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(tau=0.1), optimizer=optimizer)
    run = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        callbacks=[RetrievalEvaluation((1,)), curve],
        logger=CSVLogger(folder, version=0) if logger else False,
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    run.validate(module, DataLoader(data, batch_size=8), verbose=False)  # writes no figure
    return run


@pytest.mark.parametrize("logger", [True, False])
def test_figure_is_in_the_log_folder(tmp_path, logger):
    curve = TrainingCurve()
    run = fit(tmp_path, curve, logger=logger)
    folder = tmp_path / "lightning_logs/version_0" if logger else tmp_path
    assert [path.parent for path in tmp_path.rglob("curve*")] == [folder]
    with Image.open(folder / "curve.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (704, 396))
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert (44, 160, 44) in colours  # the green of the metric's line
    assert [step for step, _ in curve.points] == [2, 4]
    assert curve.points[-1][1] == pytest.approx(run.callback_metrics["val/mAP"].item(), abs=1e-6)
    assert [step for step, _ in curve.losses] == [1, 2, 3, 4]


@pytest.mark.slow
def test_resumed_run_continues_the_curve(tmp_path):
    whole, first, second = TrainingCurve(), TrainingCurve(), TrainingCurve()
    fit(tmp_path / "whole", whole, epochs=4)
    half = fit(tmp_path / "half", first)
    half.save_checkpoint(tmp_path / "half.ckpt")
    fit(tmp_path / "rest", second, epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert len(whole.points) == 4
    assert second.points == whole.points
    assert second.losses == whole.losses
    pictures = [
        (tmp_path / name / "lightning_logs/version_0/curve.png").read_bytes() for name in ("whole", "rest", "half")
    ]
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.refusal
def test_metric_must_be_logged(tmp_path):
    with pytest.raises(
        ValueError, match=r"`metric` must be logged in validation, got 'val/R@7'; logged metrics are .*'val/mA"
    ):
        fit(tmp_path, TrainingCurve("val/R@7"))
