"""RetrievalDataLoader: shards, seeds, resumed epochs, the first batch, and Trainers in one process and in two."""

import copy
import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, default_collate

from lightning_retrieval import HAPLoss, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules.item_seeds import SeededIndex, augmentation_seeds, item_generator
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, collate_images, resume_position
from lightning_retrieval.datamodules.samplers.all_classes import AllClassesSampler
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler
from lightning_retrieval.datamodules.samplers.category import CategorySampler
from lightning_retrieval.datamodules.samplers.pk import PKSampler
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
    trainer = quiet_trainer(
        **{"max_epochs": 3, "accelerator": "cpu", "devices": 1, **kwargs},
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
    )
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


def batches_of(loader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


WORKERS = [{}, {"num_workers": 2, "persistent_workers": True}]


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
    indices = (SeededIndex(1, seed=4), SeededIndex(2, seed=4), SeededIndex(1, seed=5))
    draw = [torch.rand(3, generator=item_generator(index)).tolist() for index in indices]
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


@pytest.mark.parametrize("world", [1, 2, 4, 9])
def test_the_shards_in_rank_order_are_the_global_batch(monkeypatch, world):
    loader, shards = make(), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # the process group is created after the loader
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    for rank in range(world):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        assert len(loader) == BATCHES
        shards.append([(b["index"].tolist(), b["seed"].tolist()) for b in loader])
    for row, of_ranks in zip(expected(1), zip(*shards, strict=True), strict=True):
        assert [shard[0] for shard in of_ranks] == [x.tolist() for x in torch.tensor(row[2]).tensor_split(world)]
        assert [seed for shard in of_ranks for seed in shard[1]] == row[3]


@pytest.mark.refusal
def test_batches_in_another_order_than_drawn_raise():
    """The position of a loader counts batches, so a resumed run would lose some and repeat others."""
    sampler = PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: `in_order` must be True, .* got False; leave it out"):
        RetrievalDataLoader(range(4), sampler, num_workers=2, in_order=False)


@pytest.mark.refusal
def test_more_processes_than_images_raise(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 10)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    with pytest.raises(ValueError, match=r"for each process, got 9 images for 10 processes; enlarge"):
        next(iter(make()))


def test_start_applies_to_its_epoch_only():
    loader, rows = make(epoch=1, start=2, num_workers=1), [row[2] for row in expected()]
    assert len(loader) == BATCHES
    assert batches_of(loader) == batches_of(loader) == rows[5:6]
    loader.set_epoch(2)
    assert batches_of(loader) == rows[6:]
    loader.set_epoch(0)
    assert batches_of(loader) == rows[:3]
    with pytest.raises(ValueError, match=r"`start` must be at most the number of batches .*, got 4 for 3 batches"):
        make(start=4)


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


# --- one process with a Trainer


@pytest.mark.parametrize(("hook", "kwargs"), [(True, {}), (False, WORKERS[1])])
def test_a_run_resumed_after_any_step_continues_with_the_next_batch(tmp_path, kwargs, hook):
    """The loader is created in the hook, or it is passed to `fit` and restored by Lightning from its state."""
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Recorder(**kwargs)
    fit(whole, None if hook else make(**kwargs), callbacks=[save])
    assert whole.arrived == expected()
    assert torch.load(tmp_path / "step=1.ckpt", weights_only=True)["global_step"] == 1  # loads without running code
    for step in (2, 3):
        part = Recorder(**kwargs)
        fit(part, None if hook else make(**kwargs), ckpt_path=tmp_path / f"step={step}.ckpt")
        assert part.arrived == expected()[step:]


@pytest.mark.parametrize("hook", [True, False], ids=["hook", "passed"])
def test_resuming_with_the_limits_of_the_trainer(tmp_path, hook):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    limits = {"limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1}
    whole = Recorder()
    fit(whole, None if hook else make(), callbacks=[save], **limits)
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
    ddp = {"strategy": "ddp", "devices": world_size}
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    early = make()  # before there is a process group
    for name, loader, trainer in [
        ("whole", early, {"callbacks": [save]}),
        ("resumed", make(num_workers=2), {"ckpt_path": folder / "step=4.ckpt"}),
    ]:
        model = Recorder()
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
    for name, begin in {"whole": 0, "resumed": 4}.items():
        joined = []
        for a, b in zip(first[name], second[name], strict=True):
            assert (a[:2], len(a[2]), len(b[2])) == (b[:2], 5, 4)
            joined.append([*a[:2], a[2] + b[2], a[3] + b[3]])
        assert joined == expected()[begin:], name


# --- the first batch of a run


class Items(Dataset):
    """Random vectors with the labels and the ids that are given, as functions of the index."""

    def __init__(self, label_of, id_of):
        self.images = torch.randn(len(LABELS), 6, generator=torch.Generator().manual_seed(1))
        self.label_of, self.id_of = label_of, id_of

    def __len__(self):
        return len(LABELS)

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
    "pk": lambda labels: PKSampler(labels, classes_per_batch=3, samples_per_class=3, seed=3),
    "with replacement": lambda labels: PKSampler(labels, classes_per_batch=2, samples_per_class=6, seed=3),
    "all classes": lambda labels: AllClassesSampler(labels, batch_size=20),
    "category": lambda labels: CategorySampler(
        labels, [0] * len(labels), classes_per_batch=4, samples_per_class=3, categories_per_batch=1
    ),
}


def train_one_step(sampler, label_of, id_of, start=0, **settings) -> RetrievalModule:
    torch.manual_seed(0)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
    loader = RetrievalDataLoader(Items(label_of, id_of), sampler, start=start)
    fit(module, loader, **{"max_steps": 1, "max_epochs": 1, **settings})
    return module


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(
    ("label_of", "id_of"),
    [
        (label, int),
        (label, None),
        (lambda index: 100 - label(index), lambda index: 7 * index - 50),  # other names of the same classes
        (lambda index: [label(index), label(index) // 2], int),
        (lambda index: [index // 2, label(index)], int),  # batches of the classes of a coarser level
    ],
)
def test_the_first_batch_is_what_the_sampler_drew(kind, label_of, id_of):
    loss = HAPLoss() if isinstance(label_of(0), list) else SmoothAPLoss()
    module = RetrievalModule(nn.Linear(6, 4), loss)
    loader = RetrievalDataLoader(Items(label_of, id_of), SAMPLERS[kind](LABELS), start=1)
    assert fit(module, loader, max_steps=1).global_step == 1


@pytest.mark.refusal
@pytest.mark.parametrize(("kind", "id_of"), [("pk", label), *((kind, lambda index: index // 2) for kind in SAMPLERS)])
def test_ids_that_repeat_raise_before_the_first_step(kind, id_of):
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: each image must have an id of its own") as raised:
        train_one_step(SAMPLERS[kind](LABELS), label, id_of, start=1)
    shared, one, other = map(int, re.findall(r"id (\d+) for the images (\d+) and (\d+)", str(raised.value))[0])
    assert id_of(one) == id_of(other) == shared
    assert one != other


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("kind", "label_of", "id_of"),
    [
        ("pk", lambda index: label(index) // 2, int),
        ("pk", lambda index: index // 2, None),
        ("pk", lambda index: 0, lambda index: index + 50),
        *((kind, lambda index: label((index + 1) % 26), int) for kind in SAMPLERS),
    ],
)
def test_labels_that_are_not_those_of_the_sampler_raise_before_the_first_step(kind, label_of, id_of):
    with pytest.raises(ValueError, match=r"^RetrievalDataLoader: `batch_sampler` must .* got a first batch") as raised:
        train_one_step(SAMPLERS[kind](LABELS), label_of, id_of)
    found = re.findall(r"the images (\d+) and (\d+) have the labels (\d+) and (\d+),", str(raised.value))
    one, other, of_one, of_other = map(int, found[0])
    assert (label_of(one), label_of(other)) == (of_one, of_other)
    assert (label(one) == label(other)) == ("of one class for the sampler" in str(raised.value))
    assert (label(one) == label(other)) != (of_one == of_other)


@pytest.mark.parametrize(
    ("id_of", "collate"),
    [(lambda index: (index + 9) % 26, None), (int, lambda items: default_collate(items[::-1]))],
    ids=["ids of another list", "rows in another order"],
)
def test_the_images_of_a_batch_may_have_other_ids_or_another_order(id_of, collate):
    """One batch holds the whole data set, so that any order of its indices is one of the batch, too."""
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
    sampler = AllClassesSampler(LABELS, batch_size=26)
    loader = RetrievalDataLoader(Items(label, id_of), sampler, collate_fn=collate)
    assert fit(module, loader, max_steps=1).global_step == 1


def test_a_sampler_of_the_user_warns_of_other_labels():
    """Its groups may differ from the classes on purpose."""
    groups = [index // 6 for index in range(26)]
    with pytest.warns(UserWarning, match="K = 4 images where OwnSampler drew P = 2 classes of K = 6"):
        module = train_one_step(OwnSampler(groups), label, int)
    assert module.trainer.global_step == 1
    train_one_step(OwnSampler(LABELS), label, int)
    with pytest.raises(ValueError, match="each image must have an id of its own"):
        train_one_step(OwnSampler(LABELS), label, lambda index: index // 2)


def test_images_that_could_not_be_read_are_neither_missing_ids_nor_missing_labels():
    def fit_without_the_first_image(id_of):
        sampler = SAMPLERS["pk"](LABELS)
        loader = RetrievalDataLoader(Items(label, id_of), sampler, collate_fn=lambda items: default_collate(items[1:]))
        return fit(RetrievalModule(nn.Linear(6, 4), SmoothAPLoss()), loader, max_steps=1)

    assert fit_without_the_first_image(int).global_step == 1
    with pytest.raises(ValueError, match=r"got \d different `ids` for 9 images"):
        fit_without_the_first_image(lambda index: index // 2)


def message_of_a_rank(rank: int, world_size: int) -> str:
    """Ids that differ within each shard of 5 and 4 images, and repeat in the global batch."""
    sampler = SAMPLERS["pk"](LABELS)
    ids = {index: position % 5 for position, index in enumerate(next(iter(sampler)))}
    with pytest.raises(ValueError, match="ids") as raised:
        train_one_step(sampler, label, lambda index: ids.get(index, index), strategy="ddp", devices=world_size)
    train_one_step(sampler, label, int, strategy="ddp", devices=world_size)
    ungathered = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), gather=False)
    loader = RetrievalDataLoader(Items(label, int), SAMPLERS["all classes"](LABELS))
    assert fit(ungathered, loader, max_steps=1, strategy="ddp", devices=world_size).global_step == 1
    return str(raised.value)


@pytest.mark.slow
def test_ids_that_repeat_in_the_batch_of_all_processes_raise_on_each(run_processes):
    for message in run_processes(message_of_a_rank, 2, backend=None):
        assert "each image must have an id of its own, got 5 different `ids` for 9" in message


# --- images of different sizes


class Sizes(Items):
    """The images 3 and 5 are larger."""

    def __init__(self, form):
        super().__init__(label, int)
        self.form = form

    def __getitem__(self, index):
        item = {**super().__getitem__(index), "images": torch.zeros(3, 8, 9 if index in (3, 5) else 8)}
        parts = {"pair": ("images", "labels"), "triple": ("images", "labels", "ids")}
        return tuple(item[name] for name in parts[self.form]) if self.form in parts else item


@pytest.mark.refusal
@pytest.mark.parametrize("convert", [list, tuple, torch.tensor, np.array])
def test_tags_of_different_lengths_raise_with_the_cure(convert):
    class Tagged(torch.utils.data.Dataset):
        def __len__(self):
            return len(LABELS)

        def __getitem__(self, index):
            return {
                "images": torch.rand(3),
                "labels": label(index),
                "tags": convert([0] * (2 + index % 2)),
                "name": "a" * index,
            }

    sampler = PKSampler(LABELS, classes_per_batch=2, samples_per_class=4)
    loader = RetrievalDataLoader(Tagged(), batch_sampler=sampler)
    sentence = (
        r"^RetrievalDataLoader: `tags` must have the same length in all items, got the lengths .*; fill .* with -1"
    )
    with pytest.raises(ValueError, match=sentence):
        next(iter(loader))


@pytest.mark.refusal
@pytest.mark.parametrize("form", ["dict", "pair", "image"])
def test_arrays_of_another_byte_order_raise(form):
    """Torch takes no such array, and its own message names neither the entry nor a way to convert it."""
    image, label = np.zeros((3, 8, 8), np.dtype(np.float32).newbyteorder()), 1
    item = {"dict": {"images": image, "labels": label}, "pair": (image, label), "image": image}[form]
    sentence = r"^RetrievalDataLoader: `images` must have the byte order of this machine, got a NumPy array of .f4; "
    with pytest.raises(
        TypeError, match=sentence + r"array\.astype\(array\.dtype\.newbyteorder\('='\)\) converts it\.$"
    ):
        collate_images([item, item])


@pytest.mark.refusal
@pytest.mark.parametrize(("form", "which"), [("dict", "id"), ("triple", "id"), ("pair", "position")])
def test_images_of_different_sizes_raise(form, which):
    sampler = PKSampler(LABELS, classes_per_batch=7, samples_per_class=4)
    message = r"^RetrievalDataLoader: images of a batch must have the same size, got "
    message += rf"\(3, 8, 8\) of {which} \d+, \(3, 8, 9\) of {which} (\d+); let the transform crop"
    with pytest.raises(ValueError, match=message) as raised:
        list(RetrievalDataLoader(Sizes(form), sampler))
    if which == "id":
        assert int(re.search(message, str(raised.value))[1]) in (3, 5)
    assert len(list(RetrievalDataLoader(Sizes(form), sampler, collate_fn=list))) == len(sampler)
