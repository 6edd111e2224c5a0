"""Figures of training and of evaluation sets: what they show, where they are written, and which loggers get them."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval.callbacks import (
    PrecisionRecallCurve,
    RetrievalEvaluation,
    ScoreHistogram,
    TrainingCurve,
    curves,
)
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics
from lightning_retrieval.metrics.curves import mean_precision
from tests.callbacks.point_runs import PointsModule, labelled_points, make_trainer

GREEN = (44, 160, 44)


def run_with(folder, *callbacks, **settings):
    """A Trainer that writes into the folder, and evaluates the sets of a `PointsModule`: 23 points, in 5 batches."""
    return make_trainer(RetrievalEvaluation((1,)), *callbacks, default_root_dir=folder, **settings)


def colours_of(path):
    with Image.open(path) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return {colour for _, colour in picture.getcolors(1 << 20)}


def test_the_log_folder_and_tensorboard_get_the_figures_every_n_epochs(tmp_path):
    """All epochs have the same name in TensorBoard, which shows them as steps of one figure."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callbacks = ScoreHistogram(every_n_epochs=2), PrecisionRecallCurve(), TrainingCurve("val/near/mAP")
    run = run_with(tmp_path, *callbacks, logger=TensorBoardLogger(tmp_path, version=0), max_epochs=2)
    sets = {name: DataLoader(labelled_points(seed), batch_size=8) for name, seed in (("near", 2), ("far", 3))}
    run.fit(PointsModule(), DataLoader(labelled_points(1), batch_size=8), sets)
    run.logger.experiment.close()
    folder = tmp_path / "lightning_logs/version_0"
    assert sorted(path.name for path in (folder / "retrieval").iterdir()) == [
        "precision-recall-val-epoch=000-set=far.png",
        "precision-recall-val-epoch=000-set=near.png",
        "precision-recall-val-epoch=001-set=far.png",
        "precision-recall-val-epoch=001-set=near.png",
        "scores-val-epoch=001-set=far.png",
        "scores-val-epoch=001-set=near.png",
    ]
    assert (folder / "curve.png").exists()
    assert {"val/near/score_overlap", "val/far/score_overlap"} <= set(run.callback_metrics)
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    steps = {"curve": [3, 6], "scores-val-set=far": [6], "scores-val-set=near": [6]}
    steps |= {f"precision-recall-val-set={name}": [3, 6] for name in sets}
    found = {name: [event.step for event in events.Images(name)] for name in events.Tags()["images"]}
    assert found == {f"retrieval/{name}": of_name for name, of_name in steps.items()}
    (event,) = events.Images("retrieval/scores-val-set=far")
    (tmp_path / "event.png").write_bytes(event.encoded_image_string)
    file_of_event = folder / "retrieval/scores-val-epoch=001-set=far.png"
    with Image.open(tmp_path / "event.png") as sent, Image.open(file_of_event) as file:
        assert np.array_equal(np.asarray(sent), np.asarray(file))


def test_set_without_a_positive_is_drawn(tmp_path):
    alone = DataLoader(TensorDataset(torch.randn(4, 6), torch.arange(4)), batch_size=4)
    with pytest.warns(UserWarning, match="none of the 4 queries has a relevant candidate"):
        (logged,) = run_with(tmp_path, ScoreHistogram(), PrecisionRecallCurve()).test(
            PointsModule(), alone, verbose=False
        )
    assert np.isnan(logged["test/score_overlap"])
    assert len(list(tmp_path.rglob("*.png"))) == 2


def test_sets_with_another_metric_are_skipped_with_one_warning(tmp_path):
    class Vehicles(TensorDataset):
        metrics = RandomGalleryMetrics

    sets = [DataLoader(kind(*labelled_points(3).tensors), batch_size=8) for kind in (TensorDataset, Vehicles)]
    run = run_with(tmp_path, ScoreHistogram(), max_epochs=2)
    with pytest.warns(UserWarning, match=r"^ScoreHistogram: .* RetrievalMetrics are supported; val/1/") as caught:
        run.fit(PointsModule(), val_dataloaders=sets)
    assert len([w for w in caught if "is skipped" in str(w.message)]) == 1
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == [
        "scores-val-epoch=000-set=0.png",
        "scores-val-epoch=001-set=0.png",
    ]


def test_figures_show_the_mean_precision_and_both_densities(tmp_path, monkeypatch):
    """The overlap of the densities is logged."""
    figures, new_figure = [], curves.new_figure
    monkeypatch.setattr(curves, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    module = PointsModule()
    (logged,) = run_with(tmp_path, PrecisionRecallCurve(), ScoreHistogram(bins=10)).test(module, verbose=False)
    points, labels = labelled_points(3).tensors
    with torch.no_grad():
        embeddings = module.eval()(points)
    metrics = RetrievalMetrics((1,))
    metrics.update(embeddings, labels)
    (axes,) = figures[0].axes
    (line,) = axes.lines
    assert np.allclose(line.get_xdata(), np.arange(101) / 100)
    assert np.allclose(line.get_ydata(), mean_precision(metrics))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision, interpolated")
    assert axes.get_title() == f"test/mAP = {logged['test/mAP']:.3f}"
    assert GREEN in colours_of(tmp_path / "retrieval/precision-recall-test.png")

    (axes,) = figures[1].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("cosine similarity", "density")
    rows = nn.functional.normalize(embeddings, dim=1)
    others = ~torch.eye(23, dtype=torch.bool)
    scores, same_label, fractions = rows @ rows.T, labels[:, None] == labels, []
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    for steps, kind, relevant, text in zip(axes.patches, ("positive", "negative"), (same_label, ~same_label), legend):
        values, edges, _ = steps.get_data()
        of_kind = scores[relevant & others].double().numpy()
        assert text == f"{len(of_kind)} {kind} pairs"
        assert np.allclose(values, np.histogram(of_kind, edges, density=True)[0])
        assert len(edges) == 11
        assert axes.get_xlim() == (edges[0], edges[-1])
        fractions.append(values * np.diff(edges))
    assert edges[0] <= scores[others].min() < edges[1]
    assert edges[-2] < scores[others].max() <= edges[-1]
    assert logged["test/score_overlap"] == pytest.approx(np.minimum(*fractions).sum(), abs=1e-9)
    assert 0.05 < logged["test/score_overlap"] < 0.95
    assert axes.get_title() == f"test/score_overlap = {logged['test/score_overlap']:.3f}"
    assert (tmp_path / "retrieval/scores-test.png").exists()


def fit_with_curve(folder, curve, epochs=2, **settings):
    run, module = run_with(folder, curve, max_epochs=epochs), PointsModule()
    run.fit(module, **settings)
    run.validate(module, verbose=False)  # writes no figure
    return run


def test_the_training_curve_shows_the_metric_after_each_validation(tmp_path):
    curve = TrainingCurve()
    run = fit_with_curve(tmp_path, curve)
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.size == (704, 396)
    assert GREEN in colours_of(tmp_path / "curve.png")
    assert [step for step, _ in curve.points] == [3, 6]
    assert curve.points[-1][1] == pytest.approx(run.callback_metrics["val/mAP"].item(), abs=1e-6)
    assert [step for step, _ in curve.losses] == [1, 2, 3, 4, 5, 6]


class Logged(pl.LightningModule):
    """Logs the next one of given values after each epoch."""

    def __init__(self, values):
        super().__init__()
        self.values, self.layer = list(values), nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/mAP", self.values[self.current_epoch], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        ((0.520, 0.518, 0.515), 0.01, 0.15),
        ((0.004, 0.002, 0.0), 0.01, 0.15),
        ((1.0, 1.0, 0.998), 0.01, 0.15),
        ((51.4, 51.2, 51.0), 0.01, 0.15),
        ((0.52, 0.55, 0.62), 0.6, 0.95),
        ((0.0, 0.7, 1.0), 0.6, 0.95),
        ((float("nan"), 0.3, 0.3), 0.01, 0.15),
        ((float("nan"),) * 3, 0, 0.15),
    ],
    ids=str,
)
def test_small_differences_look_small_in_the_training_curve(values, least, most, tmp_path):
    """Measured in the picture: the fraction of its height over which the points and their line extend."""
    trainer = make_trainer(TrainingCurve(), default_root_dir=tmp_path, max_epochs=3, num_sanity_val_steps=0)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    trainer.fit(Logged(values), loader, loader)
    with Image.open(tmp_path / "curve.png") as picture:
        is_green = (np.asarray(picture) == GREEN).all(2)[:, 90:]  # without the label of the axis
    rows = is_green.any(1).nonzero()[0]
    extent = (rows.max() - rows.min()) / len(is_green) if len(rows) else 0
    assert least <= extent <= most


def test_resumed_run_continues_the_curve(tmp_path):
    whole, first, second = TrainingCurve(), TrainingCurve(), TrainingCurve()
    fit_with_curve(tmp_path / "whole", whole)
    half = fit_with_curve(tmp_path / "half", first, epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    fit_with_curve(tmp_path / "rest", second, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert len(whole.points) == 2
    assert second.points == whole.points
    assert second.losses == whole.losses
    pictures = [(tmp_path / name / "curve.png").read_bytes() for name in ("whole", "rest", "half")]
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.refusal
def test_metric_must_be_logged(tmp_path):
    with pytest.raises(ValueError, match=r"`metric` must be logged in validation, got 'val/R@7'; logged .*'val/mA"):
        fit_with_curve(tmp_path, TrainingCurve("val/R@7"))
