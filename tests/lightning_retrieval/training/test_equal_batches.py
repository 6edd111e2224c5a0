"""Several processes whose loaders do not give each of them its own part of a batch raise, on all of them."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import PKSampler, RetrievalDataLoader
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


class Counting(RetrievalModule):
    """Counts its steps, and takes the first of several loaders' batches."""

    def __init__(self, network=None, **settings):
        torch.manual_seed(0)
        super().__init__(network or nn.Linear(6, 4), SmoothAPLoss(), **settings)
        self.steps = 0

    def unpack_batch(self, batch):
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

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def pk(classes_per_batch=2, labels=LABELS, **settings):
    return PKSampler(labels, classes_per_batch=classes_per_batch, samples_per_class=2, **settings)


def plain():
    return DataLoader(Items(), batch_sampler=pk())


def shuffled(seed, **settings):
    return DataLoader(Items(**settings), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(seed))


def listed(*batches):
    """Batches that each process lists for itself."""
    return DataLoader([Items()[batch] for batch in batches], batch_size=None)


def only(*batches):
    return DataLoader(list(batches), batch_size=None)


def two_sides():
    """One query, and candidates."""
    items = Items(has_ids=True)
    return DataLoader([{"queries": items[[0]], "candidates": items[[1, 4, 8]]}] * 4, batch_size=None)


def run_fit(loaders, module=None):
    """The error of a run of four steps, the number of steps before it, and the warnings about equal labels."""
    module = module or Counting()
    trainer = quiet_trainer(max_steps=4, strategy="ddp", devices=2, use_distributed_sampler=False)
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loaders)
        except (ValueError, TypeError) as error:
            message = str(error)
    warned = sum("the same labels" in str(warning.message) for warning in caught)
    return message, module.steps, warned


def in_each_process(this, world):
    found = {}
    found["sampler", "plain loader"] = run_fit(plain())
    found["sampler", "list of loaders"] = run_fit([plain(), plain()])
    found["equal", "batches as items"] = run_fit(DataLoader(Items(), sampler=pk(), batch_size=None))
    found["sampler", "module of a user"] = run_fit(plain(), PlainModule())
    for has_ids in (False, True):
        found["equal", "shuffled", has_ids] = run_fit(shuffled(3, has_ids=has_ids))
        seeds = RetrievalDataLoader(Items(has_ids), pk(4, seed=this))
        found["drawn", "other seeds", has_ids] = run_fit(seeds)
    found["drawn", "other labels"] = run_fit(RetrievalDataLoader(Items(), pk(4, LABELS.roll(this))))
    # Below, each process has its own rows.
    few = torch.tensor([0, 0, 1, 1])
    repeated = PKSampler(few, classes_per_batch=1, samples_per_class=12)  # each process gets the same two images
    items = Subset(Items(has_ids=True, labels=few), range(4))
    sharded = DistributedSampler(Items(), num_replicas=world, rank=this)
    found["own", "a first row by chance"] = run_fit(listed([0], [4 + this]))
    found["own", "one label"] = run_fit(shuffled(this, labels=torch.zeros(SIZE, dtype=torch.long)))
    found["own", "distributed"] = run_fit(DataLoader(Augmented(), batch_size=4, sampler=sharded))
    found["own", "ours"] = run_fit(RetrievalDataLoader(Items(), pk()))
    found["own", "ours, not gathered"] = run_fit(RetrievalDataLoader(Items(), pk()), Counting(gather=False))
    found["equal", "not gathered"] = run_fit(shuffled(3), Counting(gather=False))
    found["equal", "two rows"] = run_fit(listed([0, 4], [1, 5]))
    found["equal", "two sides"] = run_fit(two_sides())
    found["own", "repeated"] = run_fit(RetrievalDataLoader(items, repeated))
    found["own", "same classes, ids"] = run_fit(DataLoader(Augmented(has_ids=True), batch_sampler=Wrapped(split=True)))
    found["warned", "same images"] = run_fit(DataLoader(Augmented(), batch_sampler=Wrapped(split=False)))
    found["warned", "same classes"] = run_fit(DataLoader(Augmented(), batch_sampler=Wrapped(split=True)))
    return found | wrong_batches(this)


def wrong_batches(this):
    """Batches that do not match, or that are invalid in one process only."""
    rows, labels, _ = Items(has_ids=True)[list(range(8 * this, 8 * this + 8))]
    norm = Counting(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)), chunk_size=4)
    return {
        ("wrong", "at least one row"): run_fit(only((rows[: 8 * this], labels[: 8 * this]))),
        ("wrong", "equally many rows"): run_fit(only((rows[this:], labels[this:])), Counting(gather=False)),
        ("wrong", "one label for each image"): run_fit(only((rows[this:], labels[1 - this :]))),
        ("wrong", "SyncBatchNorm"): run_fit(only((rows, labels)), norm),
    }


@pytest.fixture(scope="module")
def ranks(run_processes):
    """The results of both processes, by kind and case."""
    return run_processes(in_each_process, 2, backend=None, timeout=200)


def of_kind(ranks, kind):
    found = [(case, *result) for of_rank in ranks for (of_case, *case), result in of_rank.items() if of_case == kind]
    assert found
    return found


def test_a_sampler_of_global_batches_in_a_plain_loader_raises_before_the_first_step(ranks):
    for case, message, steps, _ in of_kind(ranks, "sampler"):
        assert message.startswith("PKSampler: "), case
        assert "use RetrievalDataLoader(" in message
        assert steps == 0, case


def test_equal_batches_raise_on_all_processes(ranks):
    for case, message, steps, _ in of_kind(ranks, "equal"):
        assert "the same rows" in message, case
        assert steps == 0, case


def test_parts_of_different_global_batches_raise_on_all_processes(ranks):
    for case, message, steps, _ in of_kind(ranks, "drawn"):
        assert "the same global batches" in message, case
        assert steps == 0


def test_batches_of_their_own_do_not_raise(ranks):
    for case, message, steps, warned in of_kind(ranks, "own"):
        assert (message, warned) == ("", 0), case
        assert steps > 0, case


def test_equal_labels_of_images_that_random_transforms_have_changed_warn(ranks):
    """Without ids, nobody can tell the same images from others of the same classes. The first process warns."""
    for this, of_rank in enumerate(ranks):
        for case, message, _, warned in of_kind([of_rank], "warned"):
            assert (message, warned) == ("", this == 0), case


def test_batches_that_do_not_match_raise_on_all_processes(ranks):
    """None of them waits for the others."""
    for (words,), message, steps, _ in of_kind(ranks, "wrong"):
        assert words in message
        assert steps == 0
