"""What a run warns of, refuses and logs in its first steps, where people really go wrong."""

import pytest
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_retrieval import (
    CalibrationLoss,
    CrossBatchMemory,
    HAPLoss,
    RetrievalModule,
    ROADMAPLoss,
    SharedTags,
    SmoothAPLoss,
)
from lightning_retrieval.datamodules import PKSampler, RetrievalDataLoader
from lightning_retrieval.losses import Schedule, WeightedSum
from tests.lightning_retrieval.training.small_training import SGD, assert_same, batches, fit, net, warnings_with

CLASSES = torch.arange(24) // 6
INDEX = torch.arange(24)


def warnings_of_a_step(labels, ids, memory=None, **loader) -> list[str]:
    """What a first step says of its batch, from a loader that is not of this library."""
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), labels, ids)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), memory=memory)
    return warnings_with("an id of its own", fit, module, DataLoader(data, **{"batch_size": 24, **loader}), max_steps=1)


@pytest.mark.parametrize("ids", [INDEX.remainder(23), CLASSES], ids=["one id of two classes", "labels as ids"])
def test_ids_that_collide_warn(ids):
    assert len(warnings_of_a_step(CLASSES, ids)) == 1
    assert warnings_of_a_step(CLASSES, INDEX) == []


def test_ids_that_repeat_although_each_image_is_drawn_once_warn():
    """As those of two data sets, each of which begins at 0; the labels are the same."""
    few = INDEX.clamp(max=20)
    for loader in ({"shuffle": True}, {}):
        assert len(warnings_of_a_step(CLASSES, few, **loader)) == 1


def test_ids_that_collide_in_a_later_batch_warn():
    """As those of two data sets, each of which begins at 0."""
    data = TensorDataset(torch.randn(24, 6), CLASSES, INDEX.remainder(20))
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
    loader = DataLoader(data, batch_sampler=[[0, 1, 6, 7], [12, 13, 18, 19], [2, 3, 22, 23]])
    assert len(warnings_with("an id of its own", fit, module, loader, max_steps=2)) == 0
    assert len(warnings_with("an id of its own", fit, module, loader, max_steps=3)) == 1


def test_images_that_another_sampler_draws_several_times_do_not_warn():
    few = torch.arange(24).clamp(min=1, max=21) // 7  # one class has 3 images, fewer than are drawn of it
    often = WeightedRandomSampler([1.0] * 2 + [1e-9] * 20 + [1.0] * 2, 24)
    torch.manual_seed(0)
    for sampler in (RandomSampler(INDEX, replacement=True, num_samples=24), MPerClassSampler(few, 6, 24, 24), often):
        drawn = list(sampler)
        assert len(set(drawn)) < len(drawn)
        torch.manual_seed(2)
        assert warnings_of_a_step(CLASSES, INDEX, sampler=sampler) == []


class Wrapped:
    """A user's loader or sampler around another one, whose epoch it does not know."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


class FromEpoch2(RetrievalModule):
    """A module whose run continues in epoch 2."""

    def on_fit_start(self):
        super().on_fit_start()
        self.trainer.fit_loop.epoch_progress.current.completed = 2
        self.trainer.fit_loop.epoch_progress.current.processed = 2


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_sampler_that_is_not_told_the_epoch_warns(is_wrapped, is_resumed):
    """Lightning tells it those of this library, but not what is inside of a user's own."""
    data = TensorDataset(torch.randn(24, 6), CLASSES, INDEX)
    sampler, other = (PKSampler(CLASSES, classes_per_batch=2, samples_per_class=3) for _ in range(2))
    of_torch = DistributedSampler(data, 1, 0)
    loaders = [
        DataLoader(data, batch_sampler=sampler),
        RetrievalDataLoader(data, other),
        DataLoader(data, batch_size=6, sampler=of_torch),
    ]
    warned = [False] * 3
    if is_wrapped:
        loaders[0] = DataLoader(data, batch_sampler=Wrapped(sampler))
        loaders[1] = Wrapped(loaders[1])
        loaders[2] = DataLoader(data, batch_size=6, sampler=Wrapped(of_torch))
        warned = [is_resumed, is_resumed, True]  # the samplers of this library count the epochs
    for loader, warns in zip(loaders, warned, strict=True):
        module = (FromEpoch2 if is_resumed else RetrievalModule)(nn.Linear(6, 4), SmoothAPLoss())
        assert (len(warnings_with("not told the epoch", fit, module, loader, max_epochs=4)) > 0) == warns


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_with_the_labels_of_another_data_set_raises(num_workers):
    """Those of the whole data set for a part of it, whose indices do not exist, and those of the part for the whole."""
    data = TensorDataset(torch.randn(24, 6), CLASSES, INDEX)
    part = Subset(data, range(0, 24, 2))
    labels = {data: CLASSES, part: CLASSES[part.indices]}
    for read in labels:
        for known in labels:
            sampler = PKSampler(labels[known], classes_per_batch=2, samples_per_class=3)
            loader = DataLoader(read, batch_sampler=sampler, num_workers=num_workers)
            module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
            if known is read:
                fit(module, loader, max_steps=1)
                continue
            with pytest.raises(ValueError, match=r"dataset.*PKSampler"):
                fit(module, loader, max_steps=1)
            with pytest.raises(ValueError, match=r"dataset.*PKSampler"):
                RetrievalDataLoader(read, sampler)


@pytest.mark.parametrize(
    ("loss", "without"),
    [
        (SmoothAPLoss(), "3 of 8"),
        (SmoothAPLoss(include_self=True), "3 of 8"),
        (ROADMAPLoss(), "3 of 8"),
        (HAPLoss(), "2 of 8"),
        (CalibrationLoss(pair_mean="all"), None),
        (ContrastiveLoss(), None),
    ],
)
def test_lists_without_a_positive_are_warned_of(loss, without):
    """A shuffled loader draws classes of one to three images; a loss of pairs learns from such lists, too."""
    rows, labels = torch.randn(8, 6), torch.tensor([0, 0, 0, 1, 1, 2, 3, 4])
    if isinstance(loss, HAPLoss):
        labels = torch.stack([labels, labels.clamp(min=2)], 1)
    messages = warnings_of_lists(loss, (rows, labels))
    assert [f"{without} queries" in message for message in messages] == [True] * (without is not None)


def warnings_of_lists(loss, batch, **settings):
    module = RetrievalModule(nn.Linear(6, 4), loss, **settings)
    return warnings_with("no relevant image", fit, module, [batch], max_steps=1)


def test_lists_that_may_have_a_positive_are_not_warned_of():
    """By a rule of tags, in a memory, and if they are few."""
    rows, labels = torch.randn(8, 6), torch.tensor([0, 0, 0, 1, 1, 2, 3, 4])
    tagged = {"images": rows, "labels": labels, "tags": torch.tensor([[7, 8, 8, 9, 9, 5, 4, 3]]).T}
    assert warnings_of_lists(SmoothAPLoss(), tagged, relevance=SharedTags()) == []
    assert warnings_of_lists(SmoothAPLoss(), (rows, labels, torch.arange(8)), memory=CrossBatchMemory(8)) == []
    assert warnings_of_lists(SmoothAPLoss(), (rows[:6], labels[:6])) == []
    sides = {"queries": (rows[3:], labels[3:]), "candidates": (rows[:4], labels[:4])}
    (message,) = warnings_of_lists(SmoothAPLoss(), sides)
    assert "3 of 5 queries" in message


class OwnNorm(RetrievalModule):
    """With a BatchNorm that learns, or that always evaluates."""

    def __init__(self, evaluated, chunk_size):
        super().__init__(net(), SmoothAPLoss(), chunk_size=chunk_size)
        self.evaluated = evaluated
        self.norm = nn.BatchNorm1d(4).double()
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.norm.train(mode and not self.evaluated)
        return self

    def forward(self, images):
        return self.norm(self.embedder(images))


def test_batch_norm_in_chunks_warns_once():
    data = [(images[:9], labels[:9]) for images, labels in batches()]
    assert len(warnings_with("BatchNorm", fit, OwnNorm(False, 3), data)) == 1
    for evaluated, chunk_size in ((True, 3), (False, 9), (False, None)):
        assert warnings_with("BatchNorm", fit, OwnNorm(evaluated, chunk_size), data) == []


@pytest.mark.parametrize(("settings", "length"), [({}, 9), ({"memory": CrossBatchMemory(16, 1)}, 25)])
def test_the_batch_is_logged(settings, length, tmp_path):
    labels, ids = torch.tensor([7, 7, 7, 1, 1, 1, 5, 5, 5, 5]), torch.arange(10)
    module = RetrievalModule(net(), SmoothAPLoss(), chunk_size=4, **settings)
    fit(module, [(images, labels, ids) for images, _ in batches(2)], logger=CSVLogger(tmp_path, "", 0))
    logged = yaml.safe_load((tmp_path / "version_0" / "hparams.yaml").read_text())["batch"]
    assert logged == {"images": 10, "classes": 3, "list_length": length, "chunk_size": 4, "processes": 1}


class Endless(IterableDataset):
    """Batches of a number that is not known."""

    def __iter__(self):
        while True:
            yield from batches()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("data", "limits"),
    [(batches(), {"max_epochs": -1}), (DataLoader(Endless(), batch_size=None), {"max_epochs": 2})],
    ids=["no limit", "no number of batches"],
)
def test_weights_that_change_need_a_number_of_steps(data, limits):
    terms = {
        "pairs": (Schedule([(0, 1), (0.2, 0)]), CalibrationLoss()),
        "ap": (Schedule([(0, 0), (0.2, 1)]), SmoothAPLoss()),
    }
    module = RetrievalModule(net(), WeightedSum(terms), optimizer=SGD)
    with pytest.raises(ValueError, match="set max_steps"):
        fit(module, data, **limits)
    assert_same(module.embedder, net())
    fit(module, data, **{**limits, "max_steps": 2})
    assert module.trainer.global_step == 2


@pytest.mark.parametrize(
    ("dtype", "precision", "count"),
    [(torch.bfloat16, "bf16-mixed", 1), (torch.bfloat16, "bf16-true", 0), (torch.float32, "bf16-mixed", 0)],
)
def test_parameters_of_16_bits_are_warned_of(dtype, precision, count):
    """Such as those of a model that transformers has loaded in the type of its file."""
    module = RetrievalModule(nn.Sequential(nn.Linear(6, 4).to(dtype)), SmoothAPLoss())
    data = [(torch.randn(6, 6), torch.tensor([0, 0, 1, 1, 2, 2]))]
    assert (
        len(warnings_with("parameters that learn should be float32", fit, module, data, precision=precision)) == count
    )
