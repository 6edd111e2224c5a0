"""ScoreHistogram and PrecisionRecallCurve: what they draw and log, where the pictures lie, which loggers get them."""

import functools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import (
    PrecisionRecallCurve,
    RetrievalEvaluation,
    ScoreHistogram,
    TrainingCurve,
    precision_recall,
    score_histogram,
)
from lightning_retrieval.metrics import RandomGalleryMetrics
from lightning_retrieval.metrics.curves import mean_precision

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '(train|val|test)_dataloader' does not have many workers:UserWarning",
    "ignore:GPU available but not used:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

GREEN = (44, 160, 44)


def data(seed: int, size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 6
    rows = torch.randn(6, 5, generator=generator)[labels] + 0.7 * torch.randn(size, 5, generator=generator)
    return TensorDataset(rows, labels)


def loader(seed: int) -> DataLoader:
    return DataLoader(data(seed), batch_size=8)


def module() -> RetrievalModule:
    torch.manual_seed(3)
    return RetrievalModule(nn.Linear(5, 4), SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.SGD, lr=0.1))


def trainer(folder, *callbacks, **kwargs) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[RetrievalEvaluation((1,)), *callbacks],
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "max_epochs": 1, **kwargs},
    )


def metrics_of(model: RetrievalModule, seed: int) -> RetrievalMetrics:
    metrics = RetrievalMetrics((1,))
    with torch.no_grad():
        metrics.update(model(data(seed)[:][0]), data(seed)[:][1])
    return metrics


def colours(path) -> set[tuple[int, int, int]]:
    with Image.open(path) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return {colour for _, colour in picture.getcolors(1 << 20)}


def drawn(monkeypatch, module) -> list:
    """The figures that a callback makes."""
    figures, real = [], module.new_figure
    monkeypatch.setattr(module, "new_figure", lambda *size: figures.append(real(*size)) or figures[-1])
    return figures


def test_the_histogram_shows_both_densities_and_logs_their_overlap(tmp_path, monkeypatch):
    figures, model = drawn(monkeypatch, score_histogram), module()
    (logged,) = trainer(tmp_path, ScoreHistogram(bins=10)).test(model, loader(2), verbose=False)
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["72 positive pairs", "480 negative pairs"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("cosine similarity", "density")
    with torch.no_grad():
        rows = nn.functional.normalize(model(data(2)[:][0]), dim=1)
    labels, others = data(2)[:][1], ~torch.eye(24, dtype=torch.bool)
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


def test_the_curve_is_the_mean_precision(tmp_path, monkeypatch):
    figures, model = drawn(monkeypatch, precision_recall), module()
    (logged,) = trainer(tmp_path, PrecisionRecallCurve()).test(model, loader(2), verbose=False)
    (axes,) = figures[0].axes
    (line,) = axes.lines
    assert np.allclose(line.get_xdata(), np.arange(101) / 100)
    assert np.allclose(line.get_ydata(), mean_precision(metrics_of(model, 2)))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision, interpolated")
    assert axes.get_title() == f"test/mAP = {logged['test/mAP']:.3f}"
    assert GREEN in colours(tmp_path / "retrieval/precision-recall-test.png")


def test_pictures_lie_beside_the_logs_when_they_are_due(tmp_path):
    callbacks = ScoreHistogram(every_n_epochs=2), PrecisionRecallCurve()
    run = trainer(tmp_path, *callbacks, logger=CSVLogger(tmp_path, version=0), max_epochs=2)
    run.fit(module(), loader(1), {"near": loader(2), "far": loader(3)})
    assert sorted(path.name for path in (tmp_path / "lightning_logs/version_0/retrieval").iterdir()) == [
        "precision-recall-val-epoch=000-set=far.png",
        "precision-recall-val-epoch=000-set=near.png",
        "precision-recall-val-epoch=001-set=far.png",
        "precision-recall-val-epoch=001-set=near.png",
        "scores-val-epoch=001-set=far.png",
        "scores-val-epoch=001-set=near.png",
    ]
    assert {"val/near/score_overlap", "val/far/score_overlap"} <= set(run.callback_metrics)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_they_arrive_in_tensorboard(tmp_path):
    """Under one name, so that epochs can be leafed through."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callbacks = ScoreHistogram(), PrecisionRecallCurve(), TrainingCurve()
    run = trainer(tmp_path, *callbacks, logger=TensorBoardLogger(tmp_path, version=0), max_epochs=2)
    run.fit(module(), loader(1), loader(2))
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


def test_they_arrive_in_weights_and_biases_offline(tmp_path, end_offline_run):
    callbacks = ScoreHistogram(), PrecisionRecallCurve(), TrainingCurve()
    run = trainer(tmp_path, *callbacks, logger=WandbLogger("run", tmp_path))
    run.fit(module(), loader(1), loader(2))
    end_offline_run()
    sent = {path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/files/media/images/retrieval/*.png")}
    written = {path.read_bytes() for path in tmp_path.rglob("*.png") if "media" not in path.parts}
    assert len(sent) == 3
    assert sent == written


def test_a_set_without_any_positive_is_drawn_all_the_same(tmp_path):
    alone = DataLoader(TensorDataset(torch.randn(4, 5), torch.arange(4)), batch_size=4)
    with pytest.warns(UserWarning, match="none of the 4 queries has a relevant candidate"):
        (logged,) = trainer(tmp_path, ScoreHistogram(), PrecisionRecallCurve()).test(module(), alone, verbose=False)
    assert np.isnan(logged["test/score_overlap"])
    assert len(list(tmp_path.rglob("*.png"))) == 2


def test_sets_measured_in_another_way_are_left_out_with_one_warning(tmp_path):
    class Vehicles(TensorDataset):
        metrics = RandomGalleryMetrics

    sets = [loader(2), DataLoader(Vehicles(*data(3).tensors), batch_size=8)]
    run = trainer(tmp_path, ScoreHistogram(), max_epochs=2)
    with pytest.warns(
        UserWarning, match=r"^ScoreHistogram: .* RetrievalMetrics are supported; val/1/, evaluated by Rand"
    ) as said:
        run.fit(module(), loader(1), sets)
    assert len([w for w in said if "is skipped" in str(w.message)]) == 1
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == [
        "scores-val-epoch=000-set=0.png",
        "scores-val-epoch=001-set=0.png",
    ]


@pytest.mark.refusal
def test_settings_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"^ScoreHistogram: `bins` must be an integer >= 2, got 1\."):
        ScoreHistogram(bins=1)
    for kind in (ScoreHistogram, PrecisionRecallCurve):
        with pytest.raises(ValueError, match=rf"^{kind.__name__}: `every_n_epochs` must be an integer >= 1, got 0\."):
            kind(every_n_epochs=0)
        run = pl.Trainer(accelerator="cpu", logger=False, callbacks=[kind()], enable_checkpointing=False)
        with pytest.raises(
            ValueError,
            match=rf"^{kind.__name__}: .* must have the callback RetrievalEvaluation, .* it has none; pass both",
        ):
            run.validate(module(), loader(2), verbose=False)
