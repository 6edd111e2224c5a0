"""RetrievalDataLoader: shards, seeds, resumed epochs, the first batch, and Trainers in one process and in two."""

import copy
import itertools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from lightning_retrieval import HAPLoss, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import (
    AllClassesSampler,
    CategorySampler,
    GlobalBatchSampler,
    PKSampler,
    RetrievalDataLoader,
    item_generator,
    resume_position,
)
from tests.quiet_trainer import quiet_trainer

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


def pk_sampler():
    return PKSampler(LABELS, classes_per_batch=3, samples_per_class=3, seed=3)


def make(**kwargs):
    return RetrievalDataLoader(Indices(), pk_sampler(), **kwargs)


def expected(epochs=3) -> list:
    """The batches and seeds in one process, from the sampler and a hash that is written with Python's integers."""
    sampler, rows = pk_sampler(), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(sampler):
            seeds = [splitmix(3, epoch, number, position) for position in range(len(batch))]
            rows.append([epoch, number, batch, seeds])
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
    settings = {"max_epochs": 3, **kwargs}
    trainer = quiet_trainer(**settings, callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def batches_of(loader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def saves_each_step(folder):
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


WORKERS = {"num_workers": 2, "persistent_workers": True}


# --- the loader by itself


def test_an_index_is_an_int_that_keeps_its_seed_which_gives_the_generator_of_an_item():
    loader = RetrievalDataLoader(list(range(26)), pk_sampler(), collate_fn=list)
    index = next(iter(loader.batch_sampler))[4]
    for same in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index), copy.copy(index)):
        assert (same, same.seed) == (expected(1)[0][2][4], expected(1)[0][3][4])
        assert item_generator(same).initial_seed() == index.seed
    assert torch.arange(26)[index].item() == np.arange(26)[index] == index
    assert (str(index), default_collate([index, index]).tolist()) == (f"{int(index)}", [index] * 2)
    assert item_generator(3) is None


@pytest.mark.parametrize("kwargs", [{}, WORKERS], ids=["no workers", "workers"])
def test_workers_change_neither_batches_nor_seeds(kwargs):
    loader, rows = make(**kwargs), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        rows += [[epoch, n, b["index"].tolist(), b["seed"].tolist()] for n, b in enumerate(loader)]
    assert rows == expected()


@pytest.mark.parametrize("kwargs", [{}, WORKERS, {"num_workers": 2}], ids=["no workers", "persistent", "workers"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_each_iteration_of_a_plain_loop_is_another_epoch(kwargs, is_plain):
    """An iteration that is broken off counts, too. Without seeds, a plain loader has those of the sampler's batches."""
    loader, rows = make(**kwargs), [row[2:] for row in expected(4)]
    if is_plain:
        loader = DataLoader(list(range(26)), batch_sampler=pk_sampler(), collate_fn=list, **kwargs)
    next(iter(loader))
    iterations = [list(loader) for _ in range(3)]
    if is_plain:
        assert list(itertools.chain(*iterations)) == [batch for batch, _ in rows[3:]]
    else:
        assert [[b["index"].tolist(), b["seed"].tolist()] for b in itertools.chain(*iterations)] == rows[3:]


@pytest.mark.parametrize("world", [2, 4, 9])
def test_the_shards_in_rank_order_are_the_global_batch(monkeypatch, world):
    loader, shards = make(), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # the process group is created after the loader
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    for rank in range(world):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        assert len(loader) == BATCHES
        loader.set_epoch(0)
        shards.append([(b["index"].tolist(), b["seed"].tolist()) for b in loader])
    for row, of_ranks in zip(expected(1), zip(*shards, strict=True), strict=True):
        assert [shard[0] for shard in of_ranks] == [x.tolist() for x in torch.tensor(row[2]).tensor_split(world)]
        assert [seed for shard in of_ranks for seed in shard[1]] == row[3]


def test_start_applies_to_its_epoch_only():
    loader, rows = make(epoch=1, start=2), [row[2] for row in expected()]
    assert len(loader) == BATCHES
    assert batches_of(loader) == rows[5:6]
    assert batches_of(loader) == rows[6:]
    loader.set_epoch(1)
    assert batches_of(loader) == rows[5:6]
    loader.set_epoch(0)
    assert batches_of(loader) == rows[:3]


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
    for is_told in (True, False):
        other.load_state_dict({"epoch": 1, "start": 3})
        if is_told:  # as by Lightning, which ends the epoch
            other.set_epoch(1)
            assert batches_of(other) == []
        assert batches_of(other) == rows[6:]
    with_start = make(epoch=0, start=0)
    with_start.load_state_dict(state)
    assert batches_of(with_start) == rows[:3]


# --- one process with a Trainer


@pytest.mark.parametrize(("hook", "kwargs"), [(True, {}), (False, WORKERS)], ids=["hook", "passed"])
def test_a_run_resumed_after_any_step_continues_with_the_next_batch(tmp_path, kwargs, hook):
    """The loader is created in the hook, or it is passed to `fit` and restored by Lightning from its state."""
    whole = Recorder(**kwargs)
    fit(whole, None if hook else make(**kwargs), callbacks=[saves_each_step(tmp_path)])
    assert whole.arrived == expected()
    assert torch.load(tmp_path / "step=1.ckpt", weights_only=True)["global_step"] == 1  # loads without running code
    for step in (2, 3):
        part = Recorder(**kwargs)
        fit(part, None if hook else make(**kwargs), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert part.arrived == expected()[step:]


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "passed"])
def test_resuming_with_the_limits_of_the_trainer(tmp_path, hook):
    limits = {"limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1}
    whole = Recorder()
    fit(whole, None if hook else make(), callbacks=[saves_each_step(tmp_path)], **limits)
    assert len(whole.arrived) == 6
    for step in (2, 3):
        part = Recorder()
        fit(part, None if hook else make(), ckpt_path=tmp_path / f"step={step}.ckpt", **limits)
        assert part.arrived == whole.arrived[step:]


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "passed"])
def test_a_finished_run_continues_with_the_next_epoch(tmp_path, hook):
    fit(Recorder(), None if hook else make(), max_epochs=2).save_checkpoint(tmp_path / "end.ckpt")
    part = Recorder()
    fit(part, None if hook else make(), ckpt_path=tmp_path / "end.ckpt")
    assert part.arrived == expected()[6:]


@pytest.mark.parametrize("fail_at", [(0, 1), (1, 0)])
def test_the_batch_of_a_failed_step_is_repeated(tmp_path, fail_at):
    save = ModelCheckpoint(tmp_path, filename="failed", every_n_train_steps=100, save_on_exception=True)
    first, second = Recorder(fail_at=fail_at), Recorder()
    with pytest.raises(KeyError, match="as asked"):
        fit(first, callbacks=[save])
    fit(second, ckpt_path=tmp_path / "failed.ckpt")
    assert first.arrived + second.arrived == expected()


# --- two processes


def run_rank(rank: int, world_size: int, folder: Path) -> dict:
    """Run two fits with the Trainer's default flags on one rank, the second one resumed; the batches of each."""
    arrived = {}
    early = make()  # before there is a process group
    for name, loader, settings in [
        ("whole", early, {"callbacks": [saves_each_step(folder)]}),
        ("resumed", make(num_workers=2), {"ckpt_path": folder / "step=4.ckpt"}),
    ]:
        model = Recorder()
        fit(model, loader, **settings, strategy="ddp", devices=world_size)
        arrived[name] = model.arrived
    assert isinstance(early.sampler, DistributedSampler)
    dist.barrier()
    dist.destroy_process_group()
    return arrived


@pytest.mark.slow
def test_two_processes(tmp_path, run_processes):
    """The shards have 5 and 4 of 9 images; joined, they are the batches of one process, also in a resumed run."""
    first, second = run_processes(run_rank, 2, tmp_path, backend=None)
    for name, begin in {"whole": 0, "resumed": 4}.items():
        joined = []
        for a, b in zip(first[name], second[name], strict=True):
            assert (a[:2], len(a[2]), len(b[2])) == (b[:2], 5, 4)
            joined.append([*a[:2], a[2] + b[2], a[3] + b[3]])
        assert joined == expected()[begin:], name


# --- the first batch of a run


class Items(Dataset):
    """Random vectors with the labels and the ids that are given, as functions of the index."""

    def __init__(self, label_of, id_of, size=26):
        self.images = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))
        self.label_of, self.id_of = label_of, id_of

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        item = {"images": self.images[index], "labels": torch.tensor(self.label_of(index))}
        if self.id_of is not None:
            item["ids"] = torch.tensor(self.id_of(int(index)))
        return item


def label(index):
    return LABELS[index]


class OwnSampler(GlobalBatchSampler):
    """Batches of a user, in groups of his own."""

    def __len__(self):
        return 2

    def draw(self, generator):
        return np.arange(24).reshape(2, 12)


SAMPLERS = {
    "pk": lambda: pk_sampler(),
    "with replacement": lambda: PKSampler(LABELS, classes_per_batch=2, samples_per_class=6, seed=3),
    "all classes": lambda: AllClassesSampler(LABELS, batch_size=20),
    "category": lambda: CategorySampler(
        LABELS, [0] * len(LABELS), classes_per_batch=4, samples_per_class=3, categories_per_batch=1
    ),
}


def train_one_step(sampler, label_of, id_of, collate=None, start=0, **settings):
    """The number of steps after a run of one step."""
    module = RetrievalModule(nn.Linear(6, 4), HAPLoss() if isinstance(label_of(0), list) else SmoothAPLoss())
    loader = RetrievalDataLoader(Items(label_of, id_of), sampler, start=start, collate_fn=collate)
    return fit(module, loader, **{"max_steps": 1, **settings}).global_step


@pytest.mark.parametrize(
    ("kind", "label_of", "id_of"),
    [
        *((kind, label, int) for kind in SAMPLERS),
        ("pk", label, None),
        ("pk", lambda index: 100 - label(index), lambda index: 7 * index - 50),  # other names of the same classes
        ("pk", lambda index: [index // 2, label(index)], int),  # batches of the classes of a coarser level
    ],
)
def test_the_first_batch_is_what_the_sampler_drew(kind, label_of, id_of):
    assert train_one_step(SAMPLERS[kind](), label_of, id_of, start=1) == 1


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("kind", "id_of"), [("pk", label), ("with replacement", lambda index: index // 2), ("all classes", label)]
)
def test_ids_that_repeat_raise_before_the_first_step(kind, id_of):
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: .* id of its own"):
        train_one_step(SAMPLERS[kind](), label, id_of, start=1)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("kind", "label_of", "id_of"),
    [
        ("pk", lambda index: label(index) // 2, int),
        ("pk", lambda index: index // 2, None),
        ("pk", lambda index: 0, lambda index: index + 50),
        ("all classes", lambda index: label((index + 1) % 26), int),
    ],
)
def test_labels_that_are_not_those_of_the_sampler_raise_before_the_first_step(kind, label_of, id_of):
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: `batch_sampler` "):
        train_one_step(SAMPLERS[kind](), label_of, id_of)


@pytest.mark.parametrize(
    ("id_of", "collate"),
    [(lambda index: (index + 9) % 26, None), (int, lambda items: default_collate(items[::-1]))],
    ids=["ids of another list", "rows in another order"],
)
def test_the_images_of_a_batch_may_have_other_ids_or_another_order(id_of, collate):
    """One batch holds the whole data set, so that any order of its indices is one of the batch, too."""
    assert train_one_step(AllClassesSampler(LABELS, batch_size=26), label, id_of, collate) == 1


def test_a_sampler_of_the_user_warns_of_other_labels():
    """Its groups may differ from the classes on purpose."""
    groups = [index // 6 for index in range(26)]
    with pytest.warns(UserWarning, match="`batch_sampler` must be made with the labels"):
        assert train_one_step(OwnSampler(groups), label, int) == 1
    assert train_one_step(OwnSampler(LABELS), label, int) == 1
    with pytest.raises(ValueError, match="id of its own"):
        train_one_step(OwnSampler(LABELS), label, lambda index: index // 2)


def test_images_that_could_not_be_read_are_neither_missing_ids_nor_missing_labels():
    def without_the_first(items):
        return default_collate(items[1:])

    assert train_one_step(pk_sampler(), label, int, without_the_first) == 1
    with pytest.raises(ValueError, match="id of its own"):
        train_one_step(pk_sampler(), label, lambda index: index // 2, without_the_first)


@pytest.mark.refusal
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("label_of", "id_of"),
    [
        (lambda index: index % 24 // 4, None),
        (lambda index: [index % 24 // 4, 0], int),
        (lambda index: index // 4, lambda index: index % 24),
    ],
    ids=["labels", "labels of levels", "ids"],
)
def test_joined_data_sets_whose_labels_or_ids_both_begin_at_0_raise_once_a_batch_shows_it(label_of, id_of, num_workers):
    """The first two batches have no image and no class of which another one has the id or the label."""
    sampler = PKSampler(np.arange(48) // 4, classes_per_batch=3, samples_per_class=4, seed=5)
    collide = [len({index % 24 for index in batch}) < 12 for batch in sampler]
    assert collide == [False, False, True, False]
    module = RetrievalModule(nn.Linear(6, 4), HAPLoss() if isinstance(label_of(0), list) else SmoothAPLoss())
    items = Items(label_of, id_of, size=48)
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: "):
        fit(module, RetrievalDataLoader(items, sampler, num_workers=num_workers))
    assert module.global_step == 2


def test_a_data_set_may_replace_images_after_the_first_batch():
    replaced = list(pk_sampler())[1][0]
    other = (replaced + 13) % 26
    assert train_one_step(pk_sampler(), lambda i: label(other if i == replaced else i), int, max_steps=3) == 3


def message_of_a_rank(rank: int, world_size: int) -> str:
    """Ids that differ within each shard of 5 and 4 images, and repeat in the global batch."""
    ddp = {"strategy": "ddp", "devices": world_size}
    ids = {index: position % 5 for position, index in enumerate(expected(1)[0][2])}
    with pytest.raises(ValueError, match="ids") as raised:
        train_one_step(pk_sampler(), label, lambda index: ids.get(index, index), **ddp)
    assert train_one_step(pk_sampler(), label, int, **ddp) == 1
    ungathered = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), gather=False)
    loader = RetrievalDataLoader(Items(label, int), SAMPLERS["all classes"]())
    assert fit(ungathered, loader, max_steps=1, **ddp).global_step == 1
    return str(raised.value)


@pytest.mark.slow
def test_ids_that_repeat_in_the_batch_of_all_processes_raise_on_each(run_processes):
    for message in run_processes(message_of_a_rank, 2, backend=None):
        assert "id of its own, got 5 different" in message


CELLS = """
from functions import double
from lightning_retrieval.datamodules import PKSampler, RetrievalDataLoader

class Rows(list):
    pass

def of_cell(rows):
    return rows

sampler = PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)
for rows, collate in ((Rows(range(4)), double), (range(4), of_cell), (range(4), double)):
    settings = {"num_workers": 1, "collate_fn": collate, "multiprocessing_context": METHOD}
    try:
        print(sorted(next(iter(RetrievalDataLoader(rows, sampler, **settings)))))
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_are_refused_if_they_would_not_find_what_a_notebook_defines(method, tmp_path):
    """A program without a file is to them what a notebook is."""
    (tmp_path / "functions.py").write_text("def double(numbers):\n    return [2 * number for number in numbers]\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    program = [sys.executable, "-c", CELLS.replace("METHOD", repr(method))]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    first, second, third = ended.stdout.splitlines()
    assert third == "[0, 2, 4, 6]"
    if method == "fork":
        assert (first, second) == ("[0, 2, 4, 6]", "[0, 1, 2, 3]")
        return
    for line, name in ((first, "Rows"), (second, "of_cell")):
        assert name in line
        assert "num_workers=0" in line
