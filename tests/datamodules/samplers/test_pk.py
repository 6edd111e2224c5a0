"""PKSampler: its contract is checked with dictionaries and loops, independently of the implementation."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.datamodules import PKSampler

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
@settings(max_examples=40, deadline=None)
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
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 7)])
def test_the_contract_holds_over_many_rounds(sizes, P, K):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    for epoch in range(5):
        assert_contract(list(make(labels, P, K, epoch=epoch)), labels, P, K)


def test_batches_equal_those_of_earlier_versions():
    assert list(make([0, 0, 1, 1, 1, 2, 2, 2], 2, 2, seed=5, epoch=1)) == [[1, 0, 3, 4], [7, 5, 1, 0]]


def test_batches_of_many_images_equal_those_of_earlier_versions():
    """There are more images than are shuffled at a time, and every class is refilled."""
    batches = list(make(np.arange(200_000) ** 2 % 20_011, 32, 8, seed=5))
    found = hashlib.sha256(np.array(batches).astype("<i8").tobytes()).hexdigest()
    assert found == "bd0ca5dee51c57ec0b755f4d231644f16198d0cca239d98479212e5f6dcf2e5c"


def test_each_class_and_each_image_is_drawn_equally_often():
    """There are 5 classes, 2 in a batch, 12 in an epoch: a refill within a batch must not favour any class."""
    classes, images = Counter(), Counter()
    for epoch in range(400):
        batches = list(make([c for c in range(5) for _ in range(9)], 2, 4, epoch=epoch))
        classes.update(index // 9 for index in batches[2])  # the first refill falls into this batch
        images.update(index for batch in batches for index in batch)
    assert max(classes.values()) < 1.25 * min(classes.values())  # 640 each, standard deviation about 40
    assert max(images.values()) < 1.25 * min(images.values())
