"""Figures of training and of evaluation sets: what they show, where they are written, and which loggers get them."""

import functools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import (
    PrecisionRecallCurve,
    RetrievalEvaluation,
    ScoreHistogram,
    TrainingCurve,
    curves,
)
from lightning_retrieval.metrics import RandomGalleryMetrics
from lightning_retrieval.metrics.curves import mean_precision
from tests.callbacks.figure_runs import (
    colours_of,
    labelled_points,
    make_loader,
    make_module,
    make_trainer,
    metrics_of,
    record_figures,
)
from tests.quiet_trainer import quiet_trainer


def test_figures_are_in_the_log_folder_every_n_epochs(tmp_path):
    callbacks = ScoreHistogram(every_n_epochs=2), PrecisionRecallCurve()
    run = make_trainer(tmp_path, *callbacks, logger=CSVLogger(tmp_path, version=0), max_epochs=2)
    run.fit(make_module(), make_loader(1), {"near": make_loader(2), "far": make_loader(3)})
    assert sorted(path.name for path in (tmp_path / "lightning_logs/version_0/retrieval").iterdir()) == [
        "precision-recall-val-epoch=000-set=far.png",
        "precision-recall-val-epoch=000-set=near.png",
        "precision-recall-val-epoch=001-set=far.png",
        "precision-recall-val-epoch=001-set=near.png",
        "scores-val-epoch=001-set=far.png",
        "scores-val-epoch=001-set=near.png",
    ]
    assert {"val/near/score_overlap", "val/far/score_overlap"} <= set(run.callback_metrics)


@pytest.mark.slow
def test_tensorboard_gets_the_figures(tmp_path):
    """All epochs have the same name, so that TensorBoard shows them as steps of one figure."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callbacks = ScoreHistogram(), PrecisionRecallCurve(), TrainingCurve()
    run = make_trainer(tmp_path, *callbacks, logger=TensorBoardLogger(tmp_path, version=0), max_epochs=2)
    run.fit(make_module(), make_loader(1), make_loader(2))
    run.logger.experiment.close()
    folder = tmp_path / "lightning_logs/version_0"
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    names = ["retrieval/curve", "retrieval/precision-recall-val", "retrieval/scores-val"]
    assert sorted(events.Tags()["images"]) == names
    assert [[event.step for event in events.Images(name)] for name in names] == [[3, 6]] * 3
    (tmp_path / "event.png").write_bytes(events.Images(names[2])[1].encoded_image_string)
    with Image.open(tmp_path / "event.png") as sent, Image.open(folder / "retrieval/scores-val-epoch=001.png") as file:
        assert np.array_equal(np.asarray(sent), np.asarray(file))


def test_set_without_a_positive_is_drawn(tmp_path):
    alone = DataLoader(TensorDataset(torch.randn(4, 5), torch.arange(4)), batch_size=4)
    with pytest.warns(UserWarning, match="none of the 4 queries has a relevant candidate"):
        (logged,) = make_trainer(tmp_path, ScoreHistogram(), PrecisionRecallCurve()).test(
            make_module(), alone, verbose=False
        )
    assert np.isnan(logged["test/score_overlap"])
    assert len(list(tmp_path.rglob("*.png"))) == 2


def test_sets_with_another_metric_are_skipped_with_one_warning(tmp_path):
    class Vehicles(TensorDataset):
        metrics = RandomGalleryMetrics

    sets = [make_loader(2), DataLoader(Vehicles(*labelled_points(3).tensors), batch_size=8)]
    run = make_trainer(tmp_path, ScoreHistogram(), max_epochs=2)
    with pytest.warns(
        UserWarning, match=r"^ScoreHistogram: .* RetrievalMetrics are supported; val/1/, evaluated by Rand"
    ) as caught:
        run.fit(make_module(), make_loader(1), sets)
    assert len([w for w in caught if "is skipped" in str(w.message)]) == 1
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == [
        "scores-val-epoch=000-set=0.png",
        "scores-val-epoch=001-set=0.png",
    ]


@pytest.mark.refusal
def test_epochs_between_figures_are_validated():
    with pytest.raises(ValueError, match=r"^ScoreHistogram: `every_n_epochs` must be an integer >= 1, got 0\."):
        ScoreHistogram(every_n_epochs=0)


GREEN = (44, 160, 44)


def test_figure_shows_the_mean_precision(tmp_path, monkeypatch):
    figures, model = record_figures(monkeypatch, curves), make_module()
    (logged,) = make_trainer(tmp_path, PrecisionRecallCurve()).test(model, make_loader(2), verbose=False)
    (axes,) = figures[0].axes
    (line,) = axes.lines
    assert np.allclose(line.get_xdata(), np.arange(101) / 100)
    assert np.allclose(line.get_ydata(), mean_precision(metrics_of(model, 2)))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision, interpolated")
    assert axes.get_title() == f"test/mAP = {logged['test/mAP']:.3f}"
    assert GREEN in colours_of(tmp_path / "retrieval/precision-recall-test.png")


def test_figure_shows_both_densities_and_their_overlap_is_logged(tmp_path, monkeypatch):
    figures, model = record_figures(monkeypatch, curves), make_module()
    (logged,) = make_trainer(tmp_path, ScoreHistogram(bins=10)).test(model, make_loader(2), verbose=False)
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["72 positive pairs", "480 negative pairs"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("cosine similarity", "density")
    with torch.no_grad():
        rows = nn.functional.normalize(model(labelled_points(2)[:][0]), dim=1)
    labels, others = labelled_points(2)[:][1], ~torch.eye(24, dtype=torch.bool)
    scores, shares = rows @ rows.T, []
    for steps, relevant in zip(axes.patches, (labels[:, None] == labels, labels[:, None] != labels)):
        values, edges, _ = steps.get_data()
        of_kind = scores[relevant & others].double().numpy()
        assert np.allclose(values, np.histogram(of_kind, edges, density=True)[0])
        assert len(edges) == 11
        assert axes.get_xlim() == (edges[0], edges[-1])
        shares.append(values * np.diff(edges))
    assert edges[0] <= scores[others].min() < edges[1]
    assert edges[-2] < scores[others].max() <= edges[-1]
    assert logged["test/score_overlap"] == pytest.approx(np.minimum(*shares).sum(), abs=1e-9)
    assert 0.05 < logged["test/score_overlap"] < 0.95
    assert axes.get_title() == f"test/score_overlap = {logged['test/score_overlap']:.3f}"
    assert (tmp_path / "retrieval/scores-test.png").exists()


@pytest.mark.refusal
def test_bins_must_be_at_least_2():
    with pytest.raises(ValueError, match=r"^ScoreHistogram: `bins` must be an integer >= 2, got 1\."):
        ScoreHistogram(bins=1)


def fit_with_curve(folder, curve, epochs=2, ckpt_path=None, logger=True) -> pl.Trainer:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(12, 6), torch.arange(12) // 4)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(tau=0.1), optimizer=optimizer)
    run = quiet_trainer(
        max_epochs=epochs,
        callbacks=[RetrievalEvaluation((1,)), curve],
        logger=CSVLogger(folder, version=0) if logger else False,
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    run.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    run.validate(module, DataLoader(data, batch_size=8), verbose=False)  # writes no figure
    return run


@pytest.mark.parametrize("logger", [True, False])
def test_figure_is_in_the_log_folder(tmp_path, logger):
    curve = TrainingCurve()
    run = fit_with_curve(tmp_path, curve, logger=logger)
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
    fit_with_curve(tmp_path / "whole", whole, epochs=2)
    half = fit_with_curve(tmp_path / "half", first, epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    fit_with_curve(tmp_path / "rest", second, epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert len(whole.points) == 2
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
        fit_with_curve(tmp_path, TrainingCurve("val/R@7"))
