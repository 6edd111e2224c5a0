"""What all samplers have in common: labels of any kind, batches by seed and epoch, and a state of arrays."""

import pickle
import random

import numpy as np
import pytest
import torch

from lightning_retrieval.datamodules import (
    AllClassesSampler,
    CategorySampler,
    PKSampler,
    RandomBatchSampler,
    RetrievalDataLoader,
)
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler

LABELS = [7, 7, 7, -1, -1, 5, 5, 5, 5, 5, 5, 9, 9, 9]
SAMPLERS = {
    "PKSampler": lambda labels, **seed: PKSampler(labels, classes_per_batch=2, samples_per_class=2, **seed),
    "CategorySampler": lambda labels, **seed: CategorySampler(
        labels, np.asarray(labels) % 2, classes_per_batch=2, samples_per_class=2, categories_per_batch=1, **seed
    ),
    "AllClassesSampler": lambda labels, **seed: AllClassesSampler(labels, batch_size=4, **seed),
}
IGNORED = [
    "ignore:PKSampler. skipped .* classes in training:UserWarning",
    "ignore:CategorySampler. (skipped .* classes in training|.* have fewer than the):UserWarning",
    "ignore:AllClassesSampler. skipped .* classes in training:UserWarning",
]
pytestmark = pytest.mark.filterwarnings(*IGNORED)


def make(kind, labels=LABELS, epoch=0, **seed):
    sampler = SAMPLERS[kind](labels, **seed)
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize("kind", SAMPLERS)
def test_batches_are_a_function_of_seed_and_epoch(kind):
    first = make(kind, seed=3, epoch=2)
    assert list(first) == list(first) == list(make(kind, seed=3, epoch=2))
    walked = make(kind, seed=3)
    for epoch in (0, 1, 2):
        walked.set_epoch(epoch)
        batches = list(walked)
    assert batches == list(first)
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
def test_the_pickled_state_holds_arrays_only(kind):
    sampler = make(kind, np.arange(40_000) // 10_000)
    assert len(pickle.dumps(sampler)) < 40_000 * 8 + 8_000
    assert not any(isinstance(value, (list, tuple, dict)) for value in vars(sampler).values())
    copy = pickle.loads(pickle.dumps(sampler))
    assert [next(iter(copy)) for _ in range(2)] == [next(iter(sampler)) for _ in range(2)]


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
    with pytest.warns(UserWarning, match=rf"^{kind}: skipped 2 of 5 classes .* a single image\.") as caught:
        sampler = SAMPLERS[kind](labels)
    caught = [warning for warning in caught if "skipped" in str(warning.message)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {index for batch in sampler for index in batch} <= {1, 2, 3, 4, 5, 6, 7}
    assert len(sampler) == 2  # ceil(7 / 4)


@pytest.mark.parametrize(
    "as_given",
    [
        torch.tensor,
        lambda x: np.array(x, dtype=np.int8),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: [2**62 + label for label in x],
        lambda x: np.array(x) - 2**62,
        lambda x: np.array([label + 2**63 for label in x], dtype=np.uint64),
    ],
)
def test_labels_may_be_any_integers(as_given):
    assert list(make("PKSampler", as_given(LABELS))) == list(make("PKSampler"))


def test_the_attribute_sampler_is_the_sampler_itself():
    sampler = make("PKSampler")
    loader = torch.utils.data.DataLoader(range(len(LABELS)), batch_sampler=sampler)
    assert loader.batch_sampler.sampler is sampler
    assert isinstance(sampler, GlobalBatchSampler)
    loader.batch_sampler.sampler.set_epoch(4)
    assert [batch.tolist() for batch in loader] == list(make("PKSampler", epoch=4))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"seed": -3}, ValueError, r"`seed` must be an integer >= 0, got -3\."),
        ({"epoch": -1}, ValueError, r"`epoch` must be an integer >= 0, got -1\."),
        ({"labels": []}, ValueError, r"`labels` must be one integer for each image, got shape \(0,\)\."),
        ({"labels": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"for each image, got shape \(2, 3\)\."),
        ({"labels": 7}, ValueError, r"for each image, got shape \(\)\."),
        ({"labels": [[1], [1, 2]]}, ValueError, r"for each image, got rows of unequal length\."),
        ({"labels": torch.tensor([1.0, 1.0])}, TypeError, r"`labels` must be integers, got float32\."),
        ({"labels": [True, False]}, TypeError, r"`labels` must be integers, got bool\."),
        ({"labels": ["a", "a"]}, TypeError, r"`labels` must be integers, got <U1\."),
        ({"labels": [1, 2, 3]}, ValueError, r"at least 2 images, got 3 images of 3 classes; check"),
    ],
)
def test_invalid_arguments_raise_an_error(changed, error, message):
    with pytest.raises(error, match=rf"^PKSampler: .*{message}"):
        make("PKSampler", **changed)


# --- random batches, without classes


def test_an_epoch_has_full_batches_of_different_images():
    sampler = RandomBatchSampler(11, batch_size=4, seed=3)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [4, 4]
    assert len(sampler) == 2
    drawn = [image for batch in batches for image in batch]
    assert len(set(drawn)) == 8
    assert set(drawn) <= set(range(11))


def test_random_batches_depend_on_seed_and_epoch():
    sampler = RandomBatchSampler(50, batch_size=5, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    assert list(RandomBatchSampler(50, batch_size=5, seed=4)) != first
    sampler.set_epoch(1)
    assert list(sampler) != first
