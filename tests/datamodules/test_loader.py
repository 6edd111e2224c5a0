"""RetrievalDataLoader: shards, seeds, resumed epochs, and Trainers in one process and in two."""

import copy
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from lightning_retrieval.datamodules.item_seeds import SeededIndex, augmentation_seeds, item_generator
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, resume_position
from lightning_retrieval.datamodules.samplers.pk import PKSampler

LABELS = [image // 4 for image in range(26)]  # seven classes, the last with two images
BATCHES = 3  # of P = 3, K = 3


class Indices:
    """A dataset that returns the index and the seed with which it is called."""

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        return {"index": index, "seed": index.seed}


class Recorder(pl.LightningModule):
    """A module that records the batches, and fails in a step if asked to."""

    def __init__(self, fail_at=None, **kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.arrived, self.fail_at, self.kwargs = [], fail_at, kwargs

    def train_dataloader(self):
        return make(**self.kwargs, **resume_position(self.trainer))

    def training_step(self, batch, batch_idx):
        if self.fail_at == (self.current_epoch, batch_idx):
            raise KeyError("as asked")
        self.arrived.append([self.current_epoch, batch_idx, batch["index"].tolist(), batch["seed"].tolist()])
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def make(seed=3, **kwargs) -> RetrievalDataLoader:
    return RetrievalDataLoader(
        Indices(), PKSampler(LABELS, classes_per_batch=3, samples_per_class=3, seed=seed), **kwargs
    )


def expected(epochs=3) -> list:
    """The batches and seeds in one process, from the sampler and a hash that is written with Python's integers."""
    sampler, rows = make()._rank_sampler.batch_sampler, []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(sampler):
            rows.append(
                [epoch, number, batch, [splitmix(3, epoch, number, position) for position in range(len(batch))]]
            )
    return rows


def splitmix(*parts: int) -> int:
    state = 0
    for part in parts:
        state = ((state ^ part) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def fit(model, loader=None, ckpt_path=None, callbacks=(), **kwargs) -> pl.Trainer:
    trainer = pl.Trainer(
        **{"max_epochs": 3, "accelerator": "cpu", "devices": 1, **kwargs},
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def batches_of(loader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


WORKERS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


# --- the index and its seed


def test_a_seeded_index_is_an_int_that_keeps_its_seed():
    index = SeededIndex(5, seed=2**63 - 1)
    for same in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index), copy.copy(index)):
        assert type(same) is SeededIndex
        assert (same, same.seed) == (5, 2**63 - 1)
    assert ("abcdefg"[index], np.arange(9)[index], torch.arange(9)[index].item(), {5: "x"}[index]) == ("f", 5, 5, "x")
    assert torch.utils.data.default_collate([index, index]).tolist() == [5, 5]
    assert (repr(index), type(index + 1)) == ("5", int)


def test_item_generator_depends_on_the_seed_and_is_none_for_a_plain_int():
    draw = [
        torch.rand(3, generator=item_generator(SeededIndex(i, seed=s))).tolist() for i, s in [(1, 4), (2, 4), (1, 5)]
    ]
    assert draw[0] == draw[1] != draw[2]
    assert item_generator(3) is None
    assert item_generator(SeededIndex(0, seed=2**63 - 1)).initial_seed() == 2**63 - 1


def test_augmentation_seeds_equal_the_hash_and_do_not_collide():
    cases = list(itertools.product((0, 1, 2**63, 2**64 + 5), (0, 1, 70_000), (0, 1, 9)))
    seeds = [augmentation_seeds(*case, np.arange(50)).tolist() for case in cases]
    assert seeds == [[splitmix(case[0] % 2**64, *case[1:], position) for position in range(50)] for case in cases]
    assert len(set(itertools.chain(*seeds))) == 50 * len(cases)
    assert min(map(min, seeds)) >= 0
    bits = np.array(seeds).astype(np.uint64).reshape(-1, 1) >> np.arange(63, dtype=np.uint64) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06  # 1800 seeds: five standard deviations


# --- the loader by itself


@pytest.mark.parametrize("kwargs", WORKERS, ids=str)
def test_workers_change_neither_batches_nor_seeds(kwargs):
    loader, rows = make(**kwargs), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        rows += [[epoch, n, b["index"].tolist(), b["seed"].tolist()] for n, b in enumerate(loader)]
    assert rows == expected()


def test_getitems_of_a_dataset_is_called_with_seeded_indices():
    class Many(Indices):
        def __getitems__(self, indices):
            assert all(type(index) is SeededIndex for index in indices)
            return [self[index] for index in indices]

    loader = RetrievalDataLoader(Many(), make()._rank_sampler.batch_sampler)
    assert batches_of(loader) == [row[2] for row in expected(1)]


def test_lightning_finds_a_distributed_sampler_and_one_set_epoch():
    loader = make()
    assert isinstance(loader, DataLoader)
    assert isinstance(loader.sampler, TorchDistributedSampler)
    assert loader.sampler is loader.batch_sampler is loader.batch_sampler.sampler
    loader.sampler.set_epoch(2)
    assert batches_of(loader) == [row[2] for row in expected()][2 * BATCHES :]


@pytest.mark.parametrize("world", range(1, 10))
def test_the_shards_in_rank_order_are_the_global_batch(monkeypatch, world):
    loader, shards = make(), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # the process group is created after the loader
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        assert len(loader) == BATCHES
        shards.append([(b["index"].tolist(), b["seed"].tolist()) for b in loader])
    for row, of_ranks in zip(expected(1), zip(*shards, strict=True), strict=True):
        assert [shard[0] for shard in of_ranks] == [x.tolist() for x in torch.tensor(row[2]).tensor_split(world)]
        assert [seed for shard in of_ranks for seed in shard[1]] == row[3]


@pytest.mark.refusal
def test_more_processes_than_images_raise(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 10)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match=r"for each process, got 9 images for 10 processes; enlarge"):
        next(iter(make()))


@pytest.mark.parametrize("kwargs", WORKERS, ids=str)
def test_start_applies_to_its_epoch_only(kwargs):
    loader, rows = make(epoch=1, start=2, **kwargs), [row[2] for row in expected()]
    assert len(loader) == BATCHES
    assert batches_of(loader) == batches_of(loader) == rows[5:6]
    loader.set_epoch(2)
    assert batches_of(loader) == rows[6:]
    loader.set_epoch(0)
    assert batches_of(loader) == rows[:3]


def test_set_epoch_takes_effect_after_iter_but_before_the_first_batch():
    loader = make(num_workers=1)
    batches = iter(loader)
    loader.set_epoch(1)
    assert batches_of(batches) == [row[2] for row in expected()][3:6]


def test_state_dict_continues_after_the_last_batch_returned():
    loader, rows = make(num_workers=2), [row[2] for row in expected()]
    loader.set_epoch(1)
    assert loader.state_dict() == {"epoch": 1, "start": 0}
    batches = iter(loader)
    next(batches), next(batches)  # the workers are ahead
    state = loader.state_dict()
    assert state == {"epoch": 1, "start": 2}
    other = make()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert batches_of(other) == rows[5:6]
    assert other.state_dict() == {"epoch": 1, "start": 3}
    with_start = make(epoch=0, start=0)
    with_start.load_state_dict(state)
    assert batches_of(with_start) == rows[:3]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"start": 4}, ValueError, r"`start` must be at most the number of batches of an epoch, got 4 for 3 batches"),
        ({"start": -1}, ValueError, r"`start` must be an integer >= 0, got -1\."),
        ({"epoch": 1.0}, TypeError, r"`epoch` must be an integer >= 0, got 1\.0"),
    ],
)
def test_positions_out_of_range_raise(kwargs, error, message):
    with pytest.raises(error, match=message):
        make(**kwargs)


@pytest.mark.refusal
def test_another_kind_of_batch_sampler_raises():
    with pytest.raises(TypeError, match=r"`batch_sampler` must be a GlobalBatchSampler such as PKSampler, got list\."):
        RetrievalDataLoader(Indices(), [[0, 1]])


# --- one process with a Trainer


@pytest.mark.parametrize("kwargs", WORKERS, ids=str)
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "passed"])
def test_a_run_resumed_after_any_step_continues_with_the_next_batch(tmp_path, kwargs, hook):
    """The loader is created in the hook, or it is passed to `fit` and restored by Lightning from its state."""
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Recorder(**kwargs)
    fit(whole, None if hook else make(**kwargs), callbacks=[save])
    assert whole.arrived == expected()
    assert torch.load(tmp_path / "step=1.ckpt", weights_only=True)["global_step"] == 1  # loads without running code
    for step in range(1, 9) if not kwargs else (2, 3):
        part = Recorder(**kwargs)
        fit(part, None if hook else make(**kwargs), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert part.arrived == expected()[step:]


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "passed"])
@pytest.mark.parametrize(
    "trainer", [{"limit_train_batches": 2}, {"max_steps": 7}, {"reload_dataloaders_every_n_epochs": 1}]
)
def test_resuming_with_the_limits_of_the_trainer(tmp_path, trainer, hook):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Recorder()
    fit(whole, None if hook else make(), callbacks=[save], **trainer)
    assert len(whole.arrived) == {"limit_train_batches": 6, "max_steps": 7}.get(next(iter(trainer)), 9)
    for step in range(1, len(whole.arrived)):
        part = Recorder()
        fit(part, None if hook else make(), ckpt_path=tmp_path / f"step={step}.ckpt", **trainer)
        assert part.arrived == whole.arrived[step:]


@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("hook", [True, False], ids=["hook", "passed"])
def test_a_finished_run_continues_with_the_next_epoch(tmp_path, kwargs, hook):
    fit(Recorder(), None if hook else make(), max_epochs=2).save_checkpoint(tmp_path / "end.ckpt")
    part = Recorder(**kwargs)
    fit(part, None if hook else make(**kwargs), ckpt_path=tmp_path / "end.ckpt")
    assert part.arrived == expected()[6:]


@pytest.mark.parametrize("fail_at", [(0, 1), (1, 0), (1, 2)])
def test_the_batch_of_a_failed_step_is_repeated(tmp_path, fail_at):
    save = ModelCheckpoint(tmp_path, filename="failed", every_n_train_steps=100, save_on_exception=True)
    first, second = Recorder(fail_at=fail_at), Recorder()
    with pytest.raises(KeyError, match="as asked"):
        fit(first, callbacks=[save])
    fit(second, ckpt_path=tmp_path / "failed.ckpt")
    assert first.arrived + second.arrived == expected()


def test_set_epoch_reaches_a_plain_loader_in_one_process():
    sampler = PKSampler(LABELS, classes_per_batch=3, samples_per_class=3, seed=3)
    model = Recorder()
    fit(model, DataLoader([{"index": i, "seed": 0} for i in range(26)], batch_sampler=sampler))
    assert [row[:3] for row in model.arrived] == [row[:3] for row in expected()]


# --- two processes


def run_rank(rank: int, world_size: int, folder: Path) -> dict:
    """Run four fits with the Trainer's default flags on one rank, the last two resumed; return the batches of each."""
    arrived = {}
    ddp = {"strategy": "ddp", "devices": world_size}
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    early = make()  # before there is a process group
    for name, kwargs, loader, trainer in [
        ("passed", {}, early, {"callbacks": [save]}),
        ("workers", {"num_workers": 2}, None, {}),
        ("resumed", {}, None, {"ckpt_path": folder / "step=4.ckpt"}),
        ("resumed, passed", {}, make(num_workers=2), {"ckpt_path": folder / "step=4.ckpt"}),
    ]:
        model = Recorder(**kwargs)
        fit(model, loader, **trainer, **ddp)
        arrived[name] = model.arrived
    assert isinstance(early.sampler, DistributedSampler)
    dist.barrier()
    dist.destroy_process_group()
    return arrived


@pytest.mark.slow
def test_two_processes(tmp_path, run_processes):
    """The shards have 5 and 4 of 9 images; joined, they are the batches of one process, also in a resumed run."""
    first, second = run_processes(run_rank, 2, tmp_path, backend=None)
    for name, begin in {"passed": 0, "workers": 0, "resumed": 4, "resumed, passed": 4}.items():
        joined = []
        for a, b in zip(first[name], second[name], strict=True):
            assert (a[:2], len(a[2]), len(b[2])) == (b[:2], 5, 4)
            joined.append([*a[:2], a[2] + b[2], a[3] + b[3]])
        assert joined == expected()[begin:], name


@pytest.mark.refusal
@pytest.mark.parametrize(("dataset", "came"), [(range(5), "got 5"), (range(7), "got 7"), (None, "got None")])
def test_a_dataset_of_another_size_raises(dataset, came):
    sampler = PKSampler([0, 0, 1, 1, 2, 2], classes_per_batch=2, samples_per_class=2)
    with pytest.raises(
        ValueError, match=rf"^RetrievalDataLoader: `dataset` must have one item for each of the 6 .*{came}"
    ):
        RetrievalDataLoader(dataset, sampler)
