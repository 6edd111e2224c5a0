"""The test set is evaluated before training as the Trainer would do it, and the module is left as it was."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn

from lightning_retrieval import Embedder, RetrievalMetrics
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.callbacks.evaluation import evaluation_mode
from tests.callbacks.point_runs import KS, PointsModule, expected_metrics, make_trainer


def test_before_fit_is_logged_at_step_0_and_printed_beside_the_trained_results(tmp_path, capsys):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS, before_fit=True)
    untrained, modes = expected_metrics(PointsModule(), 3, "test"), []
    module.embedder[2].eval()  # as frozen layers are

    class Modes(pl.Callback):
        """Records the modes after the untrained evaluation: callbacks are called in order."""

        def on_train_start(self, trainer, module):
            modes.append([(name, part.training) for name, part in module.named_modules()])

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            assert all(p.grad is None for p in module.parameters()) or batch_idx > 0 or trainer.current_epoch > 0

    logger = CSVLogger(tmp_path, version=0)
    run = make_trainer(evaluation, Modes(), logger=logger, max_epochs=2)
    run.fit(module)
    assert {name for name, training in modes[0] if not training} == {"embedder.2"}
    assert evaluation.results["untrained"] == pytest.approx(untrained, abs=1e-12)
    header, first = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[:2]
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert row["step"] == "0"
    assert {name: float(row[name]) for name in untrained} == pytest.approx(untrained, abs=1e-6)
    assert row["train/loss"] == ""

    capsys.readouterr()
    run.test(module, verbose=False)
    trained = expected_metrics(module, 3, "test")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.strip()] == [
        ["untrained", "trained"],
        *(
            [name, *(f"{table[name]:.{0 if 'skipped' in name else 4}f}" for table in (untrained, trained))]
            for name in untrained
        ),
    ]
    assert untrained["test/mAP"] != pytest.approx(trained["test/mAP"], abs=1e-4)


def test_before_fit_is_skipped_in_a_resumed_run(tmp_path):
    make_trainer().fit(module := PointsModule())
    half = make_trainer(RetrievalEvaluation(KS))
    half.fit(module)
    half.save_checkpoint(tmp_path / "half.ckpt")
    evaluation = RetrievalEvaluation(KS, before_fit=True)
    make_trainer(evaluation, max_epochs=2).fit(PointsModule(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert set(evaluation.results) == {"val"}


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 2), (1.0, 5), (9, 5)])
def test_before_fit_evaluates_the_same_batches_as_the_test(monkeypatch, limit, batches):
    given, real = [], RetrievalMetrics.update

    def update(self, embeddings, labels, ids=None, **kwargs):
        given.append(ids.tolist())
        real(self, embeddings, labels, ids, **kwargs)

    monkeypatch.setattr(RetrievalMetrics, "update", update)
    run = make_trainer(RetrievalEvaluation(KS, before_fit=True), limit_test_batches=limit, limit_val_batches=0)
    run.fit(PointsModule())
    before = len(given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RetrievalEvaluation: test metrics cover 2 of 5 batches")
        run.test(run.lightning_module, verbose=False)
    assert given[:before] == given[before:]
    assert len(given) == 2 * batches


def test_each_module_returns_to_its_own_mode_after_an_error():
    """Frozen layers stay in evaluation mode."""
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    layers[1].eval()
    modes = []

    def evaluate():
        with evaluation_mode(layers):
            modes.extend(layer.training for layer in layers.modules())
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        evaluate()
    assert modes == [False, False, False]
    assert [layer.training for layer in layers.modules()] == [True, True, False]


class Pooled(Embedder):
    """An embedder of points, with a fixed backbone of 3 features."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), 4, feature_dim=3, pooling="avg")


def test_before_fit_evaluates_the_backbone_without_the_new_head(tmp_path, capsys):
    module, evaluation = PointsModule(), RetrievalEvaluation(KS, before_fit=True, dims=(4,))
    module.embedder = Pooled()
    bare = PointsModule()
    bare.embedder = Pooled().backbone
    expected = expected_metrics(bare, 3, "test")
    logger = CSVLogger(tmp_path, version=0)
    run = make_trainer(evaluation, logger=logger, max_epochs=1)
    run.fit(module)
    assert evaluation.results["backbone"] == pytest.approx(expected, abs=1e-6)
    header, first = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[:2]
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert float(row["backbone/test/mAP"]) == pytest.approx(expected["test/mAP"], abs=1e-6)
    assert row["test/mAP"] != row["backbone/test/mAP"]
    capsys.readouterr()
    run.test(module, verbose=False)
    assert capsys.readouterr().out.split()[:3] == ["backbone", "untrained", "trained"]
    with module.embedder.without_head():
        assert module(torch.randn(2, 6)).shape == (2, 3)
    assert module(torch.randn(2, 6)).shape == (2, 4)
