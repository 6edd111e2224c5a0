"""Figures of training and of evaluation sets: what they show, where they are written, and which loggers get them."""

import itertools
from collections import Counter

import numpy as np
import pytest
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
)
from lightning_retrieval.metrics import RandomGalleryMetrics
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

    callbacks = ScoreHistogram(every_n_epochs=2), TrainingCurve("val/near/mAP")
    run = run_with(tmp_path, *callbacks, logger=TensorBoardLogger(tmp_path, version=0), max_epochs=2)
    sets = {name: DataLoader(labelled_points(seed), batch_size=8) for name, seed in (("near", 2), ("far", 3))}
    run.fit(PointsModule(), DataLoader(labelled_points(1), batch_size=8), sets)
    run.logger.experiment.close()
    folder = tmp_path / "lightning_logs/version_0"
    assert sorted(path.name for path in (folder / "retrieval").iterdir()) == [
        "scores-val-epoch=001-set=far.png",
        "scores-val-epoch=001-set=near.png",
    ]
    assert (folder / "curve.png").exists()
    assert {"val/near/score_overlap", "val/far/score_overlap"} <= set(run.callback_metrics)
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    steps = {"curve": [3, 6], "scores-val-set=far": [6], "scores-val-set=near": [6]}
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
    with pytest.warns(UserWarning, match="is skipped"):
        run.fit(PointsModule(), val_dataloaders=sets)
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == [
        "scores-val-epoch=000-set=0.png",
        "scores-val-epoch=001-set=0.png",
    ]


def test_the_overlap_of_the_densities_is_logged(tmp_path):
    """Of points whose similarities are 1, 0 or -1."""
    points = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, -1], [-1, 0], [0, -1]])
    labels = [0, 0, 0, 1, 1, 1]
    counts = {True: Counter(), False: Counter()}
    for i, j in itertools.permutations(range(6), 2):
        counts[labels[i] == labels[j]][float(points[i] @ points[j])] += 1
    fractions = [{score: n / count.total() for score, n in count.items()} for count in counts.values()]
    expected = sum(min(fractions[0].get(score, 0), fractions[1].get(score, 0)) for score in (-1, 0, 1))
    module = PointsModule()
    module.embedder = nn.Identity()
    loader = DataLoader(TensorDataset(points, torch.tensor(labels)), batch_size=4)
    run = run_with(tmp_path, PrecisionRecallCurve(), ScoreHistogram(bins=10))
    (logged,) = run.test(module, loader, verbose=False)
    assert 0.1 < expected < 0.9
    assert logged["test/score_overlap"] == pytest.approx(expected)
    for name in ("precision-recall-test.png", "scores-test.png"):
        assert (tmp_path / "retrieval" / name).exists()


def fit_with_curve(folder, curve, epochs=2, **settings):
    run, module = run_with(folder, curve, max_epochs=epochs), PointsModule()
    run.fit(module, **settings)
    run.validate(module, verbose=False)  # writes no figure
    return run


def test_the_training_curve_shows_the_metric_after_each_validation(tmp_path):
    curve = TrainingCurve()
    run = fit_with_curve(tmp_path, curve)
    assert GREEN in colours_of(tmp_path / "curve.png")
    assert [step for step, _ in curve.points] == [3, 6]
    assert curve.points[-1][1] == pytest.approx(run.callback_metrics["val/mAP"].item(), abs=1e-6)
    assert [step for step, _ in curve.losses] == [1, 2, 3, 4, 5, 6]


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
