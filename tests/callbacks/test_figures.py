"""Where the figures of evaluation sets are written, when, and which loggers get them."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval.callbacks import PrecisionRecallCurve, ScoreHistogram, TrainingCurve
from lightning_retrieval.metrics import RandomGalleryMetrics
from tests.callbacks.figure_runs import labelled_points, make_loader, make_module, make_trainer


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


@pytest.mark.slow
def test_weights_and_biases_gets_the_figures(tmp_path, end_offline_run):
    callbacks = ScoreHistogram(), PrecisionRecallCurve(), TrainingCurve()
    run = make_trainer(tmp_path, *callbacks, logger=WandbLogger("run", tmp_path))
    run.fit(make_module(), make_loader(1), make_loader(2))
    end_offline_run()
    sent = {path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/files/media/images/retrieval/*.png")}
    written = {path.read_bytes() for path in tmp_path.rglob("*.png") if "media" not in path.parts}
    assert len(sent) == 3
    assert sent == written


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
def test_every_n_epochs_and_the_evaluation_are_validated(tmp_path):
    for kind in (ScoreHistogram, PrecisionRecallCurve):
        with pytest.raises(ValueError, match=rf"^{kind.__name__}: `every_n_epochs` must be an integer >= 1, got 0\."):
            kind(every_n_epochs=0)
        run = pl.Trainer(accelerator="cpu", logger=False, callbacks=[kind()], enable_checkpointing=False)
        with pytest.raises(
            ValueError,
            match=rf"^{kind.__name__}: .* must have the callback RetrievalEvaluation, .* it has none; pass both",
        ):
            run.validate(make_module(), make_loader(2), verbose=False)
