"""APMonitor: AP and AP_e of the training batches compared with loops, and the gap of the evaluation set."""

import functools
import math
import os

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_metric_learning.losses import ContrastiveLoss
from sklearn.metrics import average_precision_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import CrossBatchMemory, LogRankLoss, RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation
from lightning_retrieval.callbacks.ap_monitor import cut_into_batches, decomposability_gap
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    CalibrationLoss,
    FastAPLoss,
    QuantizedAPLoss,
    RetrievalLoss,
    ROADMAPLoss,
    WeightedSum,
)
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from tests.csv_logs import logged
from tests.lightning_retrieval.metrics.helpers import IDS, SIZE, filled, points
from tests.lightning_retrieval.metrics.helpers import lists as lists_of_set
from tests.quiet_trainer import quiet_trainer

TAU = 0.1


def data(seed: int, size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 12 // 3
    labels[5] = 9  # a query without a positive
    rows = torch.randn(10, 6, generator=generator)[labels] + torch.randn(size, 6, generator=generator)
    return TensorDataset(rows, labels, torch.arange(size) + 100 * seed)


class Record(pl.Callback):
    """Records the embeddings that the loss of each step gets, and what is logged after the step."""

    def __init__(self):
        self.steps, self.losses = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        with torch.no_grad():
            self.steps.append((module(batch[0]), batch[1], batch[2]))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(trainer.callback_metrics["train/loss"].item())


def fit(folder, loss, *callbacks, every=2, epochs=2, train=None, **kwargs):
    torch.manual_seed(3)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    module = RetrievalModule(nn.Linear(6, 3), loss, optimizer=optimizer, **kwargs)
    run = quiet_trainer(
        max_epochs=epochs,
        callbacks=[RetrievalEvaluation((1,)), *callbacks],
        logger=CSVLogger(folder, version=0),
        log_every_n_steps=every,
    )
    run.fit(module, DataLoader(train or data(1), batch_size=8), DataLoader(data(2), batch_size=8))
    return run


def lists(rows, labels):
    """For each query with a positive, the scores and the relevance of the other rows."""
    unit = nn.functional.normalize(rows.double(), dim=1)
    for query in range(len(labels)):
        others = [other for other in range(len(labels)) if other != query]
        relevant = [bool(labels[other] == labels[query]) for other in others]
        if any(relevant):
            yield [float(unit[query] @ unit[other]) for other in others], relevant


def smooth_ap(scores, relevant) -> float:
    """Equations 5 to 7 of Smooth-AP, for one list."""
    total = 0.0
    for i in [index for index, positive in enumerate(relevant) if positive]:
        above = [1 / (1 + math.exp((scores[i] - score) / TAU)) for score in scores]
        above[i] = 1.0
        total += sum(a for a, positive in zip(above, relevant) if positive) / sum(above)
    return total / sum(relevant)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("settings", [{}, {"include_self": True, "class_balanced": True, "reduction": "sum"}])
def test_ap_and_its_error_are_those_of_the_batches(tmp_path, settings):
    record = Record()
    fit(tmp_path, SmoothAPLoss(TAU, **settings), record, APMonitor())
    rows = logged(tmp_path)
    assert [step for step in rows if "train/AP" in rows[step]] == [1, 3, 5]
    for step in (1, 3, 5):
        found = list(lists(*record.steps[step][:2]))
        ap = mean(average_precision_score(relevant, scores) for scores, relevant in found)
        predicted = mean(smooth_ap(scores, relevant) for scores, relevant in found)
        assert rows[step]["train/AP"] == pytest.approx(ap, abs=1e-6)
        assert rows[step]["train/AP_e"] == pytest.approx(abs(predicted - ap), abs=1e-6)
        if not settings:
            assert 0.2 < ap < 0.99
            assert rows[step]["train/AP_e"] == pytest.approx(abs(1 - rows[step]["train/loss"] - ap), abs=1e-6)


def test_a_batch_that_the_module_skips_leaves_no_trace(tmp_path):
    class Skips(RetrievalModule):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    module = Skips(nn.Linear(6, 3), SmoothAPLoss(TAU))
    run = quiet_trainer(max_epochs=2, callbacks=[RetrievalEvaluation((1,)), APMonitor()])
    run.fit(module, DataLoader(data(1), batch_size=8), DataLoader(data(2), batch_size=8))
    assert module.loss.observers == []


class OwnSurrogate(RetrievalLoss):
    """A user's own approximation: the share of positives among the items that score above 0."""

    approximates_ap = True

    def query_losses(self, block):
        above = (block.scores * 10).sigmoid() * block.candidate
        return 1 - (above * block.relevant).sum(1) / above.sum(1)


@pytest.mark.parametrize(
    ("loss", "term"),
    [
        (ROADMAPLoss(), "/sup_ap"),
        (WeightedSum({"a": (1.0, CalibrationLoss()), "b": (2.0, QuantizedAPLoss())}), "/b"),
        (FastAPLoss(), ""),
        (OwnSurrogate(), ""),
    ],
    ids=["ROADMAP", "WeightedSum", "FastAP", "a user's own"],
)
def test_the_term_that_approximates_ap_is_used(tmp_path, loss, term):
    fit(tmp_path, loss, APMonitor(), epochs=1)
    row = logged(tmp_path)[1]
    assert row["train/AP_e"] == pytest.approx(abs(1 - row[f"train/loss{term}"] - row["train/AP"]), abs=1e-6)


@pytest.mark.parametrize("mode", ["one_list", "two_terms"])
def test_memory_is_in_the_lists_if_it_is_in_those_of_the_loss(tmp_path, mode):
    record = Record()
    fit(
        tmp_path,
        BlackboxAPLoss(margin=0.0),
        record,
        APMonitor(),
        epochs=1,
        memory=CrossBatchMemory(12, mode=mode),
    )
    row = logged(tmp_path)[1]
    loss = row["train/loss/batch" if mode == "two_terms" else "train/loss"]
    assert row["train/AP"] == pytest.approx(1 - loss, abs=1e-6)
    assert row["train/AP_e"] == pytest.approx(0, abs=1e-6)
    of_batch = mean(average_precision_score(relevant, scores) for scores, relevant in lists(*record.steps[1][:2]))
    assert (abs(row["train/AP"] - of_batch) < 1e-6) == (mode == "two_terms")


@pytest.mark.parametrize(
    ("loss", "memory"), [(LogRankLoss(), None), (ContrastiveLoss(), CrossBatchMemory(12))], ids=["ours", "PML"]
)
def test_losses_that_do_not_approximate_ap_have_no_error(tmp_path, loss, memory):
    """The lists of a third-party loss are those of the batch, without the memory."""
    record = Record()
    fit(tmp_path, loss, record, APMonitor(), memory=memory)
    row = logged(tmp_path)[3]
    ap = mean(average_precision_score(relevant, scores) for scores, relevant in lists(*record.steps[3][:2]))
    assert row["train/AP"] == pytest.approx(ap, abs=1e-6)
    assert not any("AP_e" in name for step in logged(tmp_path).values() for name in step)


def test_batch_without_a_positive_has_no_ap(tmp_path):
    nothing = TensorDataset(torch.randn(4, 6), torch.arange(4))
    with pytest.warns(UserWarning, match="no row of the batch has a positive"):
        fit(tmp_path, SmoothAPLoss(), APMonitor(), every=1, epochs=1, train=nothing)
    assert "train/loss" in logged(tmp_path)[0]
    assert "train/AP" not in logged(tmp_path)[0]


def test_gap_is_that_of_batches_like_the_training_batches(tmp_path):
    """Training batches have 8 images of 3 or 4 classes."""
    monitor, gaps = APMonitor(), []

    class Compare(pl.Callback):
        def on_validation_epoch_end(self, trainer, module):
            if not trainer.sanity_checking:
                metrics = RetrievalMetrics()
                with torch.no_grad():
                    metrics.update(module(data(2)[:][0]), data(2)[:][1], data(2)[:][2])
                gaps.append(float(decomposability_gap(metrics, *shape)))

    first = data(1)[:8][1]
    shape = (len(first.unique()), round(8 / len(first.unique())))
    run = fit(tmp_path, SmoothAPLoss(TAU), monitor, Compare(), every=3)
    rows = logged(tmp_path)
    assert [rows[step]["val/decomposability_gap"] for step in (2, 5)] == pytest.approx(gaps, abs=1e-6)
    assert gaps[0] != pytest.approx(gaps[1], abs=1e-4)
    (tested,) = run.test(run.lightning_module, DataLoader(data(3), batch_size=8), verbose=False)
    assert 0 < tested["test/decomposability_gap"] < 1
    before_training = quiet_trainer(callbacks=[RetrievalEvaluation((1,)), APMonitor()])
    (validated,) = before_training.validate(run.lightning_module, DataLoader(data(2), batch_size=8), verbose=False)
    assert "val/mAP" in validated
    assert "val/decomposability_gap" not in validated


def test_monitor_does_not_change_the_run(tmp_path):
    with_it, without = Record(), Record()
    fit(tmp_path / "with", SmoothAPLoss(TAU), with_it, APMonitor(), every=1)
    fit(tmp_path / "without", SmoothAPLoss(TAU), without, every=1)
    assert with_it.losses == without.losses


def logged_by_rank(rank, world, folder):
    """The values of the first step, whose batch the processes divide unequally."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world))
    batch = data(4)[:]
    if world == 2:
        batch = [part.split([15, 9])[rank] for part in batch]
    torch.manual_seed(3)
    module = RetrievalModule(nn.Linear(6, 3), SmoothAPLoss(TAU))
    strategy = "ddp" if world > 1 else "auto"
    callbacks = [RetrievalEvaluation((1,)), APMonitor()]
    run = quiet_trainer(
        max_steps=1, devices=world, strategy=strategy, callbacks=callbacks, log_every_n_steps=1, limit_val_batches=0
    )
    run.fit(module, DataLoader([batch], batch_size=None))
    return {name: float(run.callback_metrics[name]) for name in ("train/AP", "train/AP_e")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")
def test_two_processes_compute_the_same(run_processes, tmp_path):
    (expected,) = run_processes(logged_by_rank, 1, tmp_path)
    assert 0 < expected["train/AP"] < 1
    for found in run_processes(logged_by_rank, 2, tmp_path):
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_set_is_cut_into_batches_like_those_of_training():
    """Promise 1: `val/decomposability_gap` is computed of these batches, which no log shows."""
    labels = points()[1]
    batches = cut_into_batches(labels, 5, 4)
    every = torch.cat(batches)
    assert len(every.unique()) == len(every) > SIZE - 20  # but the last, smaller batch
    assert len(labels[batches[0]].unique()) == 5
    assert max(map(len, batches)) <= 5 * 4
    assert torch.equal(torch.cat(cut_into_batches(labels, 5, 4)), every)
    alike = torch.arange(48) // 4
    counts = [torch.unique(alike[batch], return_counts=True)[1].tolist() for batch in cut_into_batches(alike, 3, 4)]
    assert counts == [[4, 4, 4]] * 4


@pytest.mark.parametrize("kind", ["all", "queries apart"])
def test_the_gap_is_mean_ap_of_batches_minus_ap_of_the_set(kind):
    def aps(chosen=None):
        return [
            average_precision_score(relevant, scores)
            for scores, relevant in lists_of_set(kind, chosen)
            if relevant.any()
        ]

    by_id = IDS.argsort()  # the metric has its rows in the order of their ids
    batches = cut_into_batches(points()[1][by_id], 5, 4)
    within = [ap for batch in batches for ap in aps(by_id[batch])]
    expected = np.mean(within) - np.mean(aps())
    assert float(decomposability_gap(filled(kind), 5, 4)) == pytest.approx(expected, abs=1e-9)
    assert expected > 0.1


@pytest.mark.parametrize("kind", ["plain", "expanded", "cameras"])
def test_there_is_no_gap_where_the_batch_is_the_set(kind):
    metrics = RetrievalMetrics((1,))
    if kind == "expanded":
        metrics.query_expansion, metrics.database_augmentation = QueryExpansion(k=5), DatabaseAugmentation(k=5)
    metrics.update(*points(), IDS, cameras=IDS % 3 if kind == "cameras" else None)
    assert float(decomposability_gap(metrics, 10_000, 10_000)) == pytest.approx(0, abs=1e-12)
