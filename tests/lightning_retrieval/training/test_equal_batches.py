"""Several processes whose loaders do not give each of them its own part of a batch raise, on all of them."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, default_collate

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import (
    AllClassesSampler,
    CategorySampler,
    PairSampler,
    PKSampler,
    RandomBatchSampler,
    RetrievalDataLoader,
    TagSampler,
)
from lightning_retrieval.distributed import rank
from tests.quiet_trainer import quiet_trainer

pytestmark = pytest.mark.refusal

SIZE = 26
LABELS = torch.arange(SIZE) // 4


class Items(Dataset):
    """Random vectors with their labels and, if `has_ids`, their indices. An index may be a list of indices."""

    def __init__(self, has_ids=False, labels=LABELS):
        self.images = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
        self.has_ids, self.labels = has_ids, labels

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if isinstance(index, list):
            return default_collate([self[one] for one in index])
        item = (self.images[index], self.labels[index], torch.tensor(int(index)))
        return item if self.has_ids else item[:2]


class Drawn(RetrievalModule):
    """A module that counts its steps, and takes the first of several loaders' batches."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), SmoothAPLoss())
        self.steps = 0

    def unpack_batch(self, batch):
        if isinstance(batch, dict):
            batch = batch["one"]
        while isinstance(batch[0], (list, tuple)):
            batch = batch[0]
        return super().unpack_batch(batch)

    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        self.steps += 1
        return result


class PlainModule(pl.LightningModule):
    """A module of a user."""

    def __init__(self):
        super().__init__()
        self.network, self.loss, self.steps = nn.Linear(6, 4), SmoothAPLoss(), 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return self.network(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def pk():
    return PKSampler(LABELS, classes_per_batch=2, samples_per_class=2)


def plain():
    return DataLoader(Items(), batch_sampler=pk())


SAMPLERS = {
    "PKSampler": pk,
    "AllClassesSampler": lambda: AllClassesSampler(LABELS, batch_size=14),
    "CategorySampler": lambda: CategorySampler(
        LABELS, LABELS % 2, classes_per_batch=2, samples_per_class=2, categories_per_batch=1
    ),
    "PairSampler": lambda: PairSampler(LABELS[::2], LABELS[::2], classes_per_batch=2),
    "RandomBatchSampler": lambda: RandomBatchSampler(SIZE, batch_size=6),
    "TagSampler": lambda: TagSampler(LABELS[:, None], tags_per_batch=2, samples_per_tag=2),
}
LOADERS = {
    "a list": lambda: [plain(), plain()],
    "a dict": lambda: {"one": DataLoader(Items(), batch_size=4), "other": plain()},
    "combined": lambda: CombinedLoader({"one": plain()}, "min_size"),
    "sampler": lambda: DataLoader(Items(), sampler=pk(), batch_size=None),
}


def run_fit(module, loaders, world, *, validation=None, **settings):
    """The error of a run of four steps, empty if there is none, and the number of steps before it."""
    settings = {"max_steps": 4, "strategy": "ddp", "devices": world, "use_distributed_sampler": False, **settings}
    trainer, message = quiet_trainer(**settings), ""
    try:
        trainer.fit(module, loaders, validation)
    except ValueError as error:
        message = str(error)
    return message, module.steps


def runs_with_our_samplers(_, world):
    found = {}
    for name, make in SAMPLERS.items():
        found[name] = run_fit(Drawn(), DataLoader(Items(), batch_sampler=make()), world)
    for name, make in LOADERS.items():
        found[name] = run_fit(Drawn(), make(), world)
    found["wrapped"] = run_fit(Drawn(), LOADERS["sampler"](), world, use_distributed_sampler=True)
    found["module of a user"] = run_fit(PlainModule(), plain(), world)
    batches = DataLoader(Items(), batch_size=4)
    found["validation"] = run_fit(PlainModule(), batches, world, validation=plain())
    return found


def test_a_sampler_of_global_batches_in_a_plain_loader_raises_before_the_first_step(run_processes):
    for found in run_processes(runs_with_our_samplers, 2, backend=None):
        for name, (message, steps) in found.items():
            sampler = name if name in SAMPLERS else "PKSampler"
            assert message.startswith(f"{sampler}: each of several processes "), name
            assert "got 2 processes that would all draw the same images, because" in message
            assert f"use RetrievalDataLoader(dataset, {sampler}(...))" in message
            assert steps == 0, name


class Unsharded(IterableDataset):
    """The same images in each process, in batches that are larger on rank 1."""

    def __init__(self, has_ids, larger):
        self.items, self.larger = Items(has_ids), larger

    def __iter__(self):
        size = 5 + (self.larger and rank() == 1)
        for begin in range(0, SIZE - size, size):
            yield self.items[list(range(begin, begin + size))]


def shuffled(seed, **settings):
    return DataLoader(Items(**settings), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(seed))


class Listed(list):
    """Batches of rows that each process lists for itself."""

    def __init__(self, *batches):
        super().__init__(Items()[batch] for batch in batches)


def runs_with_other_loaders(this, world):
    found = {}
    for has_ids in (False, True):
        found["equal", "shuffled", has_ids] = run_fit(Drawn(), shuffled(3, has_ids=has_ids), world)
        loader = DataLoader(Unsharded(has_ids, larger=world == 3), batch_size=None)
        found["equal", "unsharded", has_ids] = run_fit(Drawn(), loader, world)
    ones = [[0], [4], [8], [12]]
    found["equal", "rows one by one"] = run_fit(Drawn(), DataLoader(Listed(*ones), batch_size=None), world)
    # Below, each process has its own rows.
    chance = DataLoader(Listed([0], [4 + this], [12 + this], [8 + this]), batch_size=None)
    found["other", "a first row by chance"] = run_fit(Drawn(), chance, world)
    constant = torch.zeros(SIZE, dtype=torch.long)
    found["other", "one label"] = run_fit(Drawn(), shuffled(this, labels=constant), world)
    sharded = DistributedSampler(Items(), num_replicas=world, rank=this)
    found["other", "distributed"] = run_fit(Drawn(), DataLoader(Items(), batch_size=4, sampler=sharded), world)
    found["other", "ours"] = run_fit(Drawn(), RetrievalDataLoader(Items(), pk()), world)
    few = torch.tensor([0, 0, 1, 1])
    repeated = PKSampler(few, classes_per_batch=1, samples_per_class=12)  # each process gets the same two images
    items = Subset(Items(has_ids=True, labels=few), range(4))
    found["other", "repeated"] = run_fit(Drawn(), RetrievalDataLoader(items, repeated), world)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_equal_batches_raise_on_all_processes_and_batches_of_their_own_do_not(world, run_processes):
    for found in run_processes(runs_with_other_loaders, world, backend=None):
        for (kind, *case), (message, steps) in found.items():
            if kind == "other":
                assert message == "", case
                assert steps > 0, case
                continue
            same = "labels and ids" if True in case else "labels and inputs"
            ranks = "0 and 2" if world == 3 and "unsharded" in case else "0 and 1"
            assert f"the same {same} in " in message, case
            assert f"rows on the ranks {ranks}, " in message
            assert "use RetrievalDataLoader(" in message
            assert steps == (3 if "rows one by one" in case else 0), case


def runs_with_other_samplers(this, world):
    """By case, the message and the number of steps of a run whose processes have different samplers."""
    cases = {
        "other seeds": lambda: PKSampler(LABELS, classes_per_batch=4, samples_per_class=2, seed=this),
        "other labels": lambda: PKSampler(LABELS.roll(this), classes_per_batch=4, samples_per_class=2),
        "no classes": lambda: RandomBatchSampler(SIZE, batch_size=8, seed=this),
    }
    found = {}
    for name, sampler in cases.items():
        for has_ids in (False, True):
            found[name, has_ids] = run_fit(Drawn(), RetrievalDataLoader(Items(has_ids), sampler()), world)
    return found


def test_parts_of_different_global_batches_raise_on_all_processes(run_processes):
    for found in run_processes(runs_with_other_samplers, 2, backend=None):
        for case, (message, steps) in found.items():
            assert message.startswith("RetrievalDataLoader: all processes must draw the same global batches"), case
            assert "the same `seed`" in message
            assert steps == 0


class Augmented(Items):
    """Items with random transforms, which differ between the processes."""

    def __getitem__(self, index):
        image, *others = super().__getitem__(index)
        noise = torch.randn(6, generator=torch.Generator().manual_seed(100 * rank() + int(index)))
        return (image + noise, *others)


class Wrapped:
    """A sampler of a user that draws the batches of another one, or in each process a part of them."""

    def __init__(self, split):
        self.batches, self.split = PKSampler(LABELS, classes_per_batch=3, samples_per_class=4), split

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            yield batch[rank() :: 2] if self.split else batch


def warnings_of_runs(this, world):
    sharded = DistributedSampler(Items(), num_replicas=world, rank=this, shuffle=False)
    loaders = {
        "same images": DataLoader(Augmented(), batch_sampler=Wrapped(split=False)),
        "same classes": DataLoader(Augmented(), batch_sampler=Wrapped(split=True)),
        "same classes, ids": DataLoader(Augmented(has_ids=True), batch_sampler=Wrapped(split=True)),
        "distributed": DataLoader(Augmented(), batch_size=6, sampler=sharded),
        "other": DataLoader(Augmented(), batch_sampler=[[this, 4, 5, 8 + 4 * this]]),
    }
    found = {}
    for name, loader in loaders.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run_fit(Drawn(), loader, world)[0] == ""
        messages = [str(warning.message) for warning in caught]
        found[name] = [message for message in messages if "got the same labels in" in message]
    return found


def test_equal_labels_of_images_that_random_transforms_have_changed_warn(run_processes):
    """Without ids, nobody can tell the same images from others of the same classes."""
    first, second = run_processes(warnings_of_runs, 2, backend=None)
    assert {name: len(messages) for name, messages in first.items()} == {
        "same images": 1,
        "same classes": 1,
        "same classes, ids": 0,
        "distributed": 0,
        "other": 0,
    }
    assert "in 12 rows on the ranks 0 and 1; if their images are the same but for" in first["same images"][0]
    assert set(map(len, second.values())) == {0}
