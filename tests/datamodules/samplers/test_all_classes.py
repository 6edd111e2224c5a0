"""AllClassesSampler: its contract is checked with dictionaries and loops, independently of the implementation."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.datamodules import AllClassesSampler
from tests.datamodules.samplers.test_pk import assert_rounds

LABELS = [7, 7, 7, -1, -1, 5, 5, 5, 5, 5, 5, 9, 9, 9]


def make(labels=LABELS, size=9, seed=0, epoch=0) -> AllClassesSampler:
    sampler = AllClassesSampler(labels, batch_size=size, seed=seed)
    sampler.set_epoch(epoch)
    return sampler


def distribute(images: dict, size: int) -> tuple[dict, int, set]:
    """Give each class one position after the other while there are enough positions for all classes that have images.

    Returns:
        The number of positions of each class, the number of positions that remain, and the classes that may get them.
    """
    counts = dict.fromkeys(images, 0)
    while True:
        unfinished = {label for label in images if counts[label] < len(images[label])}
        if not unfinished or sum(counts.values()) + len(unfinished) > size:
            return counts, size - sum(counts.values()), unfinished
        for label in unfinished:
            counts[label] += 1


def assert_contract(batches: list[list[int]], labels: list[int], size: int) -> None:
    """Check the whole contract of one epoch."""
    images = {label: {i for i, other in enumerate(labels) if other == label} for label in set(labels)}
    images = {label: members for label, members in images.items() if len(members) >= 2}
    assert len(batches) == -(-sum(map(len, images.values())) // size)
    counts, remaining, unfinished = distribute(images, size)
    drawn = {label: [] for label in images}
    for batch in batches:
        assert len(batch) == len(set(batch)) == size
        assert all(type(index) is int for index in batch)
        owners = [labels[index] for index in batch]
        assert sum(a != b for a, b in itertools.pairwise(owners)) == len(images) - 1  # adjacent
        times = Counter(owners)
        assert times.keys() == images.keys()
        one_more = {label for label in images if times[label] != counts[label]}
        assert one_more <= unfinished
        assert len(one_more) == remaining
        assert all(times[label] == counts[label] + 1 for label in one_more)
        for index in batch:
            drawn[labels[index]].append(index)
    for label, members in images.items():
        assert_rounds(drawn[label], members)


@pytest.mark.filterwarnings("ignore:AllClassesSampler. skipped .* classes in training:UserWarning")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_batch_holds_every_class_with_as_many_images_as_fit(data):
    sizes = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=9).filter(lambda s: max(s) > 1))
    labels = [label * 3 - 5 for label, size in enumerate(sizes) for _ in range(size)]
    labels = data.draw(st.permutations(labels))
    kept = [size for size in sizes if size > 1]
    size = data.draw(st.integers(max(2, len(kept)), sum(kept)))
    sampler = make(labels, size, data.draw(st.integers(0, 2**64)), data.draw(st.integers(0, 99)))
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert_contract(batches, labels, size)


@pytest.mark.parametrize(("sizes", "size"), [([2, 40], 9), ([2, 2, 300], 13), ([7] * 6, 42), ([3, 4, 5, 6, 50], 6)])
def test_the_contract_holds_over_many_rounds(sizes, size):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    for epoch in range(5):
        assert_contract(list(make(labels, size, epoch=epoch)), labels, size)


def test_batches_equal_those_of_earlier_versions():
    sampler = make([0, 0, 1, 1, 1, 2, 2, 2, 2], 7, seed=5, epoch=1)
    assert list(sampler) == [[4, 2, 3, 5, 6, 0, 1], [8, 7, 5, 0, 1, 2, 4]]


def test_each_class_and_each_image_is_drawn_equally_often():
    """Batches of 7 from 5 classes of 9 images: two classes get a second position, and rounds begin within batches."""
    second, images, first = Counter(), Counter(), Counter()
    for epoch in range(400):
        batches = list(make([c for c in range(5) for _ in range(9)], 7, epoch=epoch))
        for batch in batches:
            owners = [index // 9 for index in batch]
            second.update(label for label, times in Counter(owners).items() if times == 2)
            first[owners[0]] += 1
        images.update(batches[-1])
    assert max(second.values()) < 1.15 * min(second.values())  # 1120 each, standard deviation about 26
    assert max(first.values()) < 1.25 * min(first.values())  # 560 each: no class is always on the first rank
    assert max(images.values()) < 2 * min(images.values())  # 62 each, standard deviation about 7
