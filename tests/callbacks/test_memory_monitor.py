"""MemoryMonitor: drift and cosines compared with loops over the embeddings of a recorded run."""

import functools
import math
import os

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SharedTags, SmoothAPLoss
from lightning_retrieval.callbacks import MemoryMonitor
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.csv_logs import logged
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

PROBE = 6


class Net(nn.Module):
    """A net with dropout and batch norm, whose training mode gives other embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))

    def forward(self, images):
        return self.layers(images)


class Record(pl.Callback):
    """Records the embeddings of the first images of the first batch, in evaluation mode, before each step."""

    def __init__(self):
        self.images, self.embeddings = None, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.images is None:
            images, labels, _ = module.unpack_batch(batch)
            self.images, self.labels = images[:PROBE], labels[:PROBE].tolist()
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        with torch.no_grad():
            self.embeddings.append(module(self.images).tolist())
        for part, mode in modes:
            part.training = mode


def batches(classes=3, steps=6):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        labels = torch.arange(8) % classes
        yield torch.randn(8, 6, generator=generator) + labels[:, None], labels, torch.arange(8) + 8 * step


def sgd_module(network, **settings):
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    return RetrievalModule(network, SmoothAPLoss(tau=0.1), optimizer=sgd, seed=5, **settings)


def fit(folder, *callbacks, data=None, **settings):
    module = sgd_module(Net(), **settings)
    logger = CSVLogger(folder, version=0)
    trainer = quiet_trainer(max_epochs=1, callbacks=list(callbacks), logger=logger, log_every_n_steps=1)
    trainer.fit(module, DataLoader(list(data or batches()), batch_size=None))
    return module


def assert_same_weights(found, expected):
    """Also the statistics of batch norm."""
    for name, value in expected.embedder.state_dict().items():
        assert torch.equal(found.embedder.state_dict()[name], value), name


def cosine(a, b):
    product = sum(x * y for x, y in zip(a, b))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


@pytest.mark.parametrize(("size", "interval"), [(9, 2), (24, 3)])
def test_drift_and_cosines_are_those_of_a_loop(size, interval, tmp_path):
    record = Record()
    fit(tmp_path, record, MemoryMonitor(PROBE), memory=CrossBatchMemory(size, start_step=2))
    rows = logged(tmp_path)
    for step, values in rows.items():
        measured = step // interval * interval
        if measured == 0:
            assert "train/memory_drift" not in values
            continue
        now, before = record.embeddings[measured], record.embeddings[measured - interval]
        drift = sum(1 - cosine(a, b) for a, b in zip(before, now)) / PROBE
        pairs = [(i, j) for i in range(PROBE) for j in range(i) if record.labels[i] != record.labels[j]]
        negative = sum(cosine(now[i], now[j]) for i, j in pairs) / len(pairs)
        assert values["train/memory_drift"] == pytest.approx(drift, abs=1e-5)
        assert values["train/negative_cosine"] == pytest.approx(negative, abs=1e-5)
        assert drift > 1e-3
    assert len(rows) == 6


def test_the_run_is_the_same_with_and_without(tmp_path):
    """The weights, the statistics of batch norm and the random numbers of dropout."""
    watched = fit(tmp_path / "a", MemoryMonitor(), memory=CrossBatchMemory(9))
    plain = fit(tmp_path / "b", memory=CrossBatchMemory(9))
    assert_same_weights(watched, plain)


def test_negatives_are_those_of_the_rule_of_relevance(tmp_path):
    """Images of tags 0 and 1, of which the fourth and the fifth have both; an image without tags is no own negative."""
    tags = torch.tensor([[0, -1], [1, -1], [0, -1], [0, 1], [1, 0], [-1, -1], [1, -1], [0, -1]])
    data = [{"images": x, "labels": labels, "ids": ids, "tags": tags} for x, labels, ids in batches()]
    record = Record()
    fit(
        tmp_path,
        record,
        MemoryMonitor(PROBE),
        data=data,
        memory=CrossBatchMemory(9, start_step=2),
        relevance=SharedTags(),
    )
    pairs = [(0, 1), (1, 2), *((i, 5) for i in range(5))]
    now = record.embeddings[4]
    negative = sum(cosine(now[i], now[j]) for i, j in pairs) / len(pairs)
    assert logged(tmp_path)[4]["train/negative_cosine"] == pytest.approx(negative, abs=1e-5)


def test_one_class_has_no_negatives(tmp_path):
    fit(tmp_path, MemoryMonitor(), data=batches(classes=1), memory=CrossBatchMemory(9))
    last = logged(tmp_path)[5]
    assert "train/memory_drift" in last
    assert "train/negative_cosine" not in last


# --- a memory with start_step="auto"

SIZE, INTERVAL = 9, 2
START_DRIFT = 0.06


def test_it_begins_at_the_first_interval_with_less_drift(tmp_path):
    """The run is that with this number as `start_step`, bit for bit."""
    fit(tmp_path / "drifts", MemoryMonitor(PROBE), data=batches(steps=10), memory=CrossBatchMemory(SIZE, 1000))
    values = logged(tmp_path / "drifts")
    measured = {step: values[step]["train/memory_drift"] for step in range(INTERVAL, 10, INTERVAL)}
    begin = min(measured, key=measured.get)
    limit = measured[begin] * 1.0001
    assert begin > INTERVAL
    memory = CrossBatchMemory(SIZE, "auto")
    found = fit(tmp_path / "a", MemoryMonitor(PROBE, limit), data=batches(steps=10), memory=memory)
    expected = fit(tmp_path / "b", data=batches(steps=10), memory=CrossBatchMemory(SIZE, begin))
    without = fit(tmp_path / "c", data=batches(steps=10))
    assert_same_weights(found, expected)
    assert not torch.equal(found.embedder.layers[0].weight, without.embedder.layers[0].weight)


@pytest.mark.parametrize(("steps", "start_drift"), [(2, 2.0), (10, 1e-9)])
def test_a_memory_that_never_begins_is_warned_of(steps, start_drift, tmp_path):
    monitor = MemoryMonitor(PROBE, start_drift)
    with pytest.warns(UserWarning, match=f"the memory has not begun in {steps} steps"):
        fit(tmp_path, monitor, data=batches(steps=steps), memory=CrossBatchMemory(SIZE, "auto"))


class Begins(pl.Callback):
    """A callback of one's own that decides."""

    begins_memory = True

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 3:
            module.memory.begin()


def test_a_callback_of_ones_own_may_decide(tmp_path):
    module = fit(tmp_path, Begins(), memory=CrossBatchMemory(100, "auto"))
    assert len(module.memory) == 24  # of the last three of six batches
    fit(tmp_path / "again", memory=module.memory)  # it has begun, so nothing has to decide


class PointData(RetrievalDataModule):
    train_set = val_set = test_set = Points(2, 26)


def fit_points(folder, start_drift, checkpoint=None, callbacks=()):
    """Nine steps with intervals of two, and a checkpoint after each; or the rest of them, from a checkpoint."""
    module = sgd_module(Net(), memory=CrossBatchMemory(15, "auto"))
    trainer = quiet_trainer(
        enable_checkpointing=True,
        max_epochs=3,
        callbacks=[
            MemoryMonitor(PROBE, start_drift),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            *callbacks,
        ],
        logger=CSVLogger(folder, version=0),
        log_every_n_steps=1,
        limit_val_batches=0,
    )
    data = PointData(classes_per_batch=3, samples_per_class=3, seed=1)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    return module


def test_a_resumed_run_begins_at_the_same_step(tmp_path):
    """From a checkpoint of any step; until it begins, it also logs the same."""
    whole = fit_points(tmp_path, start_drift=START_DRIFT)
    rows, begun = logged(tmp_path), []
    for step in (2, 4, 6):
        checkpoint = tmp_path / f"step={step}.ckpt"
        begun.append(RetrievalModule.load_from_checkpoint(checkpoint, embedder=Net()).memory.started)
        part = fit_points(tmp_path / str(step), START_DRIFT, checkpoint)
        assert_same_weights(part, whole)
        if not begun[-1]:
            found = logged(tmp_path / str(step))
            for values in [*found.values(), *rows.values()]:
                values.pop("train/images/s", None)
            assert found == {later: rows[later] for later in range(step, 9)}
    assert begun == [False, False, True]


class Crash(pl.Callback):
    """Fails within a step, and leaves a checkpoint as `OnExceptionCheckpoint` does."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def on_train_batch_start(self, trainer, module, *_):
        if module.memory.steps == 4:
            trainer.save_checkpoint(self.checkpoint)
            raise RuntimeError("of a step")


def test_a_run_that_crashed_within_a_step_does_not_measure_it_again(tmp_path):
    """Else the drift would be that of the same weights, 0, and the memory would begin."""
    no_drift_is_that_small = START_DRIFT / 100
    with pytest.raises(RuntimeError, match="of a step"):
        fit_points(tmp_path, no_drift_is_that_small, callbacks=[Crash(tmp_path / "crashed.ckpt")])
    with pytest.warns(UserWarning, match="the memory has not begun in 9 steps"):
        resumed = fit_points(tmp_path / "resumed", no_drift_is_that_small, tmp_path / "crashed.ckpt")
    assert not resumed.memory.started


def run_of_rank(rank, world, start_drift):
    """What one of the processes ends with: the first one has 5 of 8 images."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher does; the group is there already
    data = []
    for batch in batches(steps=10):
        images, *rest = (part.split([5, 3])[rank] if world == 2 else part for part in batch)
        data.append((images.double(), *rest))
    # Without BatchNorm, embeddings do not depend on the division of a batch.
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    module = sgd_module(network, memory=CrossBatchMemory(SIZE, "auto"))
    begun = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            begun.append(module.memory.started)

    trainer = quiet_trainer(
        max_epochs=1,
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        precision="64-true",
        use_distributed_sampler=False,
        callbacks=[MemoryMonitor(PROBE, start_drift), Watch()],
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
    return begun, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_two_processes_begin_when_one_does(run_processes):
    """With unequal shares of each batch, and a probe that is larger than each share."""
    start_drift = 0.02
    ((begun, weights),) = run_processes(run_of_rank, 1, start_drift)
    assert begun[0] is False
    assert begun[-1] is True
    for found, of_process in run_processes(run_of_rank, 2, start_drift):
        assert found == begun
        torch.testing.assert_close(of_process, weights, rtol=0, atol=1e-9)
