"""PKSampler: its contract is checked with dictionaries and loops, independently of the implementation."""

import hashlib
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.datamodules.loader import RetrievalDataLoader
from lightning_retrieval.datamodules.samplers import category
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler
from lightning_retrieval.datamodules.samplers.pk import PKSampler

LABELS = [7, 7, 7, -1, -1, 5, 5, 5, 5, 5, 5, 9, 9, 9]


def make(labels=LABELS, P=2, K=3, seed=0, epoch=0) -> PKSampler:
    sampler = PKSampler(labels, classes_per_batch=P, samples_per_class=K, seed=seed)
    sampler.set_epoch(epoch)
    return sampler


def assert_rounds(drawn: list, of: set) -> None:
    """In each round, every member of `of` is drawn once before the next round begins."""
    for begin in range(0, len(drawn), len(of)):
        chunk = drawn[begin : begin + len(of)]
        assert set(chunk) <= of
        assert len(set(chunk)) == len(chunk)


def assert_contract(batches: list[list[int]], labels: list[int], P: int, K: int) -> None:
    """Check the whole contract of one epoch."""
    images = {label: {i for i, other in enumerate(labels) if other == label} for label in set(labels)}
    images = {label: members for label, members in images.items() if len(members) >= 2}
    taking_part = sum(map(len, images.values()))
    assert len(batches) == -(-taking_part // (P * K))
    classes, drawn = [], {label: [] for label in images}
    for batch in batches:
        assert len(batch) == P * K
        assert all(type(index) is int for index in batch)
        groups = [batch[g * K : g * K + K] for g in range(P)]
        owners = [labels[group[0]] for group in groups]
        assert len(set(owners)) == P
        for owner, group in zip(owners, groups, strict=True):
            assert {labels[index] for index in group} == {owner}
            times = Counter(dict.fromkeys(images[owner], 0))
            times.update(group)
            if len(images[owner]) >= K:
                assert max(times.values()) == 1
            else:
                assert max(times.values()) - min(times.values()) <= 1
            drawn[owner] += group
        classes += owners
    assert_rounds(classes, set(images))
    for label, members in images.items():
        assert_rounds(drawn[label], members)


@pytest.mark.filterwarnings("ignore:PKSampler. skipped .* classes in training:UserWarning")
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_class_and_image_is_drawn_once_before_any_is_drawn_twice(data):
    sizes = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=9).filter(lambda s: max(s) > 1))
    labels = [label * 3 - 5 for label, size in enumerate(sizes) for _ in range(size)]
    labels = data.draw(st.permutations(labels))
    P = data.draw(st.integers(1, sum(size > 1 for size in sizes)))
    K = data.draw(st.integers(2, 8))
    sampler = make(labels, P, K, data.draw(st.integers(0, 2**64)), data.draw(st.integers(0, 99)))
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert_contract(batches, labels, P, K)


@pytest.mark.parametrize("sizes", [[2, 40], [2, 2, 300], [7] * 6, [3, 4, 5, 6, 50]])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 5), (2, 7)])
def test_the_contract_holds_over_many_rounds(sizes, P, K):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    for epoch in range(5):
        assert_contract(list(make(labels, P, K, epoch=epoch)), labels, P, K)


def test_batches_are_a_function_of_seed_and_epoch():
    first = make(seed=3, epoch=2)
    assert list(first) == list(first) == list(make(seed=3, epoch=2))
    walked = make(seed=3)
    for epoch in (0, 1, 2):
        walked.set_epoch(epoch)
        batches = list(walked)
    assert batches == list(first)
    lists = [str(list(make(seed=seed, epoch=epoch))) for seed in range(4) for epoch in range(4)]
    assert len(set(lists)) == 16


def test_batches_equal_those_of_earlier_versions():
    assert list(make([0, 0, 1, 1, 1, 2, 2, 2], 2, 2, seed=5, epoch=1)) == [[1, 0, 3, 4], [7, 5, 1, 0]]


def test_batches_of_many_images_equal_those_of_earlier_versions():
    """There are more images than are shuffled at a time, and every class is refilled."""
    batches = list(make(np.arange(200_000) ** 2 % 20_011, 32, 8, seed=5))
    found = hashlib.sha256(np.array(batches).astype("<i8").tobytes()).hexdigest()
    assert found == "bd0ca5dee51c57ec0b755f4d231644f16198d0cca239d98479212e5f6dcf2e5c"


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_how_many_are_shuffled_at_a_time_changes_nothing(chunk, monkeypatch):
    whole = list(make(LABELS * 3, 3, 4))
    monkeypatch.setattr(category, "_CHUNK", chunk)
    assert list(make(LABELS * 3, 3, 4)) == whole


def test_an_epoch_resumes_at_the_position_of_the_loader():
    def loader(**position):
        return [batch.tolist() for batch in RetrievalDataLoader(range(len(LABELS)), make(K=2), **position)]

    whole = loader(epoch=1)
    assert whole == list(make(K=2, epoch=1))
    assert len(whole) == 4
    assert loader(epoch=1, start=2) == whole[2:]


def test_the_global_random_state_is_neither_used_nor_changed():
    states = torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate()
    before = list(make())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert pickle.dumps(np.random.get_state()) == states[1]
    assert random.getstate() == states[2]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert list(make()) == before


def test_each_class_and_each_image_is_drawn_equally_often():
    """There are 5 classes, 2 in a batch, 12 in an epoch: a refill within a batch must not favour any class."""
    classes, images = Counter(), Counter()
    for epoch in range(400):
        batches = list(make([c for c in range(5) for _ in range(9)], 2, 4, epoch=epoch))
        classes.update(index // 9 for index in batches[2])  # the first refill falls into this batch
        images.update(index for batch in batches for index in batch)
    assert max(classes.values()) < 1.25 * min(classes.values())  # 640 each, standard deviation about 40
    assert max(images.values()) < 1.25 * min(images.values())


@pytest.mark.parametrize(
    "as_given",
    [
        list,
        np.array,
        torch.tensor,
        lambda x: np.array(x, dtype=np.int8),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: [2**62 + label for label in x],
        lambda x: np.array(x) - 2**62,
        lambda x: np.array([label + 2**63 for label in x], dtype=np.uint64),
    ],
)
def test_labels_may_be_any_integers(as_given):
    assert list(make(as_given(LABELS))) == list(make(LABELS))


def test_single_image_classes_are_skipped_with_one_warning():
    labels = [1, 2, 2, 3, 3, 3, 4]
    with pytest.warns(UserWarning, match=r"PKSampler: skipped 2 of 4 classes .* a single image\.") as caught:
        sampler = make(labels, 2, 2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert {index for epoch in range(9) for batch in sampler for index in batch} <= {1, 2, 3, 4, 5}
    assert len(sampler) == 2  # ceil(5 / 4)


def test_the_pickled_state_holds_arrays_only():
    sampler = make(np.arange(100_000) // 10, 8, 4)
    assert len(pickle.dumps(sampler)) < 100_000 * 8 + 10_000 * 16 + 2_000
    assert not any(isinstance(value, (list, tuple, dict)) for value in vars(sampler).values())
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


def test_the_attribute_sampler_is_the_sampler_itself():
    sampler = make()
    loader = torch.utils.data.DataLoader(range(len(LABELS)), batch_sampler=sampler)
    assert loader.batch_sampler.sampler is sampler
    assert isinstance(sampler, GlobalBatchSampler)
    loader.batch_sampler.sampler.set_epoch(4)
    assert [batch.tolist() for batch in loader] == list(make(epoch=4))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"P": 5}, ValueError, r"PKSampler: `classes_per_batch` must be at most .* got 5 for 4 such classes \(0 more"),
        ({"P": 0}, ValueError, r"`classes_per_batch` must be an integer >= 1, got 0\."),
        ({"K": 1}, ValueError, r"`samples_per_class` must be an integer >= 2, got 1\."),
        ({"K": 2.0}, TypeError, r"`samples_per_class` must be an integer >= 2, got 2\.0 \(float\)"),
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
    with pytest.raises(error, match=message):
        make(**changed)


@pytest.mark.refusal
@pytest.mark.filterwarnings("ignore:PKSampler. skipped .* classes in training:UserWarning")
def test_classes_with_a_single_image_do_not_count_for_p():
    with pytest.raises(ValueError, match=r"got 3 for 2 such classes \(1 more have a single image\); lower it\."):
        make([0, 0, 1, 1, 2], P=3)
