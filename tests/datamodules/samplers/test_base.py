"""What all samplers have in common: batches by seed and epoch, labels of any kind, time and memory."""

import pickle
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval.datamodules import (
    AllClassesSampler,
    CategorySampler,
    PKSampler,
    RandomBatchSampler,
    RetrievalDataLoader,
    TagSampler,
)

LABELS = [7, 7, 7, -1, -1, 5, 5, 5, 5, 5, 5, 9, 9, 9]
SAMPLERS = {
    "PKSampler": lambda labels, **seed: PKSampler(labels, classes_per_batch=2, samples_per_class=2, **seed),
    "CategorySampler": lambda labels, **seed: CategorySampler(
        labels, np.asarray(labels) % 2, classes_per_batch=2, samples_per_class=2, categories_per_batch=1, **seed
    ),
    "AllClassesSampler": lambda labels, **seed: AllClassesSampler(labels, batch_size=4, **seed),
    "TagSampler": lambda labels, **seed: TagSampler(
        np.asarray(labels)[:, None] + [1, 20_000], tags_per_batch=2, samples_per_tag=2, **seed
    ),
}
IGNORED = [
    "ignore:PKSampler. skipped .* classes in training:UserWarning",
    "ignore:CategorySampler. (skipped .* classes in training|.* have fewer than the):UserWarning",
    "ignore:AllClassesSampler. skipped .* classes in training:UserWarning",
    "ignore:TagSampler. skipped .* tags in training:UserWarning",
]
pytestmark = pytest.mark.filterwarnings(*IGNORED)


def make(kind, labels=LABELS, epoch=0, **seed):
    sampler = SAMPLERS[kind](labels, **seed)
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_a_function_of_seed_and_epoch(kind):
    first = make(kind, seed=3, epoch=2)
    batches = list(first)
    assert batches == list(make(kind, seed=3, epoch=2))
    walked = make(kind, seed=3)
    assert [list(walked) for _ in range(4)] == [list(make(kind, seed=3, epoch=epoch)) for epoch in range(4)]
    walked.set_epoch(2)
    assert list(walked) == batches
    lists = [str(list(make(kind, seed=seed, epoch=epoch))) for seed in range(4) for epoch in range(4)]
    assert len(set(lists)) == 16


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_global_random_state_is_neither_used_nor_changed(kind):
    states = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
    before = list(make(kind))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert pickle.dumps(np.random.get_state()) == states[1]
    assert random.getstate() == states[2]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert list(make(kind)) == before


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_epoch_resumes_at_the_position_of_the_loader(kind):
    def loader(**position):
        return [batch.tolist() for batch in RetrievalDataLoader(range(len(LABELS)), make(kind), **position)]

    whole = loader(epoch=1)
    assert whole == list(make(kind, epoch=1))
    assert len(whole) == 4
    assert loader(epoch=1, start=2) == whole[2:]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_single_image_classes_are_skipped_with_one_warning(kind):
    labels = [1, 2, 2, 3, 3, 3, 5, 5, 4]
    groups = "4 of 10 tags" if kind == "TagSampler" else "2 of 5 classes"
    with pytest.warns(UserWarning, match=f"{kind}: skipped {groups}") as caught:
        sampler = SAMPLERS[kind](labels)
    assert sum("skipped" in str(warning.message) for warning in caught) == 1
    assert {index for batch in sampler for index in batch} <= {1, 2, 3, 4, 5, 6, 7}
    assert len(sampler) == 2  # ceil(7 / 4)


@pytest.mark.parametrize(
    "as_given",
    [
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: [2**62 + label for label in x],
        lambda x: np.array(x) - 2**62,
        lambda x: np.array([label + 2**62 for label in x], dtype=np.uint64),
    ],
)
def test_labels_may_be_any_integers(as_given):
    assert list(make("PKSampler", as_given(LABELS))) == list(make("PKSampler"))


def test_lightning_finds_the_epoch_of_the_sampler():
    sampler = make("PKSampler")
    loader = torch.utils.data.DataLoader(range(len(LABELS)), batch_sampler=sampler)
    loader.batch_sampler.sampler.set_epoch(4)
    assert [batch.tolist() for batch in loader] == list(make("PKSampler", epoch=4))


def test_an_epoch_has_full_batches_of_different_images():
    sampler = RandomBatchSampler(11, batch_size=4, seed=3)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [4, 4]
    assert len(sampler) == 2
    drawn = [image for batch in batches for image in batch]
    assert len(set(drawn)) == 8
    assert set(drawn) <= set(range(11))


def test_random_batches_are_a_function_of_seed_and_epoch():
    sampler = RandomBatchSampler(50, batch_size=5, seed=3)
    first, second = list(sampler), list(sampler)
    assert first != second != list(RandomBatchSampler(50, batch_size=5, seed=4)) != first
    sampler.set_epoch(0)
    assert [list(sampler), list(sampler)] == [first, second]


IMAGES = 1_000_000
PK = {"classes_per_batch": 32, "samples_per_class": 4}
CASES = {  # number of classes, number of categories, and the sampler
    "PK": (100_000, 0, lambda labels, _: PKSampler(labels, **PK)),
    "12 categories": (100_000, 12, lambda labels, categories: CategorySampler(labels, categories, **PK)),
    "all classes": (10_000, 0, lambda labels, _: AllClassesSampler(labels, batch_size=15_000)),
    "tags": (1_000, 0, lambda labels, _: TagSampler(labels[:, None] + [0, 7], tags_per_batch=32, samples_per_tag=4)),
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_million_images_take_less_than_a_second_and_110_megabytes(run_alone):
    for case, measured in run_alone(measure_all).items():
        assert measured["images"] == (15_000 if case == "all classes" else 128)
        assert 0 < measured["seconds"] < 1, case  # processor time, independent of other processes
        assert 0 < measured["bytes"] < 1.1e8, case


def measure_all(rank, world_size):
    return {case: measure(*settings) for case, settings in CASES.items()}


def measure(classes, count, make):
    """The time and the memory of a sampler and its first batch."""
    labels = np.random.default_rng(0).integers(classes, size=IMAGES)
    categories = labels % count if count else None
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the current memory
    before, start = memory("VmRSS"), time.process_time()
    batch = next(iter(make(labels, categories)))
    seconds, peak = time.process_time() - start, memory("VmHWM")
    return {"images": len(batch), "seconds": seconds, "bytes": peak - before}


def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
