"""CategorySampler: its contract is checked with dictionaries and loops, independently of the implementation."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.datamodules import CategorySampler
from tests.datamodules.samplers.test_pk import assert_rounds

LABELS = [7, 7, 7, -1, -1, 5, 5, 5, 5, 5, 5, 9, 9, 9, 4, 4, 4, 4, 6, 6, 8, 8, 8]
OF_CLASS = {7: 30, -1: 10, 5: 30, 9: 10, 4: -20, 6: -20, 8: 30}
CATEGORIES = [OF_CLASS[label] for label in LABELS]
IGNORED = [
    "ignore:CategorySampler. skipped .* classes in training:UserWarning",
    "ignore:CategorySampler. .* have fewer than the:UserWarning",
]


def make(labels=LABELS, categories=CATEGORIES, P=4, K=3, C=2, seed=0, epoch=0) -> CategorySampler:
    sampler = CategorySampler(
        labels, categories, classes_per_batch=P, samples_per_class=K, categories_per_batch=C, seed=seed
    )
    sampler.set_epoch(epoch)
    return sampler


def runs(values: list) -> list[list]:
    """Positions of adjacent equal values, one list for each run of them."""
    found = []
    for position, value in enumerate(values):
        if position and value == values[position - 1]:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def assert_balanced(drawn: list, of: set) -> None:
    """No member of `of` is drawn twice if there are enough; else the numbers of draws differ by at most one."""
    times = Counter(dict.fromkeys(of, 0))
    times.update(drawn)
    assert times.keys() == of
    if len(drawn) <= len(of):
        assert max(times.values()) <= 1
    else:
        assert max(times.values()) - min(times.values()) <= 1


def assert_contract(batches: list[list[int]], labels: list, categories: list, P: int, K: int, C: int) -> list:
    """Check the contract of one epoch; return the combinations of categories in the order of the batches."""
    images = {label: {i for i, other in enumerate(labels) if other == label} for label in set(labels)}
    images = {label: members for label, members in images.items() if len(members) >= 2}
    category = {label: categories[min(members)] for label, members in images.items()}
    classes = {name: {label for label in images if category[label] == name} for name in set(category.values())}
    assert len(batches) == -(-sum(map(len, images.values())) // (P * K))
    combinations, drawn_classes, drawn_images = [], {c: [] for c in classes}, {label: [] for label in images}
    for batch in batches:
        assert len(batch) == P * K
        assert all(type(index) is int for index in batch)
        owners = [labels[index] for index in batch]
        parts = runs([category[owner] for owner in owners])
        assert len(parts) == C  # side by side
        combinations.append(frozenset(category[owners[part[0]]] for part in parts))
        assert len(combinations[-1]) == C
        by_class = runs(owners)
        assert len(by_class) == len(set(owners))  # side by side
        for part in parts:
            assert len(part) == P // C * K
            part_classes = [owners[position] for position in part[::K]]
            part_category = category[part_classes[0]]
            assert_balanced(part_classes, classes[part_category])
            drawn_classes[part_category].append(part_classes)
        for positions in by_class:
            owner, group = owners[positions[0]], [batch[position] for position in positions]
            assert len(group) % K == 0
            assert_balanced(group, images[owner])
            for begin in range(0, len(group), K):
                assert_balanced(group[begin : begin + K], images[owner])
            drawn_images[owner] += group
    for label, members in images.items():
        assert_rounds(drawn_images[label], members)
    for name, members in classes.items():
        assert_class_rounds(drawn_classes[name], members)
    return combinations


def assert_class_rounds(groups: list[list], of: set) -> None:
    """Like `assert_rounds`, but for groups in another order than the queue: no class is ahead of another by two."""
    times = Counter(dict.fromkeys(of, 0))
    for group in groups:
        times.update(group)
        assert max(times.values()) - min(times.values()) <= 1


@pytest.mark.filterwarnings(*IGNORED)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_class_and_image_is_drawn_once_before_any_is_drawn_twice(data):
    sizes = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=12).filter(lambda s: max(s) > 1))
    of_class = data.draw(st.lists(st.integers(-3, 3), min_size=len(sizes), max_size=len(sizes)))
    pairs = [(label * 3 - 5, of_class[label] * 7) for label, size in enumerate(sizes) for _ in range(size)]
    labels, categories = map(list, zip(*data.draw(st.permutations(pairs))))
    taking_part = {c for c, size in zip(of_class, sizes) if size > 1}
    C = data.draw(st.integers(1, len(taking_part)))
    P, K = C * data.draw(st.integers(1, 5)), data.draw(st.integers(2, 8))
    sampler = make(labels, categories, P, K, C, data.draw(st.integers(0, 2**64)), data.draw(st.integers(0, 99)))
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert_contract(batches, labels, categories, P, K, C)


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("sizes", [[2, 40], [7] * 6, [3, 4, 5, 6, 50], [2, 3, 300]])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (6, 4)])
def test_the_contract_holds_over_many_rounds(sizes, P, K):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    categories = [int(label == 0) for label in labels]
    for epoch in range(5):
        for C in {1, 2} if P % 2 == 0 else {1}:
            assert_contract(list(make(labels, categories, P, K, C, epoch=epoch)), labels, categories, P, K, C)


@pytest.mark.parametrize(("count", "C"), [(3, 2), (5, 2), (5, 3), (4, 1), (4, 4)])
def test_every_combination_is_drawn_once_before_any_is_drawn_twice_across_epochs(count, C):
    labels = [label for label in range(3 * count) for _ in range(5)]
    categories = [label % count for label in labels]
    combinations, orders = [], set()
    for epoch in range(25):
        batches = list(make(labels, categories, 2 * C, 3, C, epoch=epoch))
        combinations += assert_contract(batches, labels, categories, 2 * C, 3, C)
    every = set(combinations)
    assert len(every) == math.comb(count, C)
    assert_rounds(combinations, every)
    for begin in range(0, len(combinations) - len(every) + 1, len(every)):
        orders.add(tuple(combinations[begin : begin + len(every)]))
    assert len(orders) > 1 or len(every) == 1  # each refill has a new order


def test_the_order_of_the_combinations_depends_on_the_seed():
    labels = [label for label in range(10) for _ in range(5)]
    categories, orders = [label % 5 for label in labels], set()
    for seed in range(3):
        batches = list(make(labels, categories, 4, 3, seed=seed))
        orders.add(tuple(assert_contract(batches, labels, categories, 4, 3, 2)))
    assert len(orders) == 3


def test_each_category_is_drawn_once_per_round_if_there_are_too_many_combinations_to_list():
    """There are 8.5 million combinations of 7 out of 40 categories."""
    labels = [label for label in range(80) for _ in range(4)]
    categories = [label % 40 for label in labels]
    sampler = make(labels, categories, 7, 2, 7)
    combinations = []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        drawn = assert_contract(list(sampler), labels, categories, 7, 2, 7)
        assert_class_rounds(drawn, set(range(40)))
        combinations += drawn
    assert len(set(combinations)) > 0.8 * len(combinations)


def test_batches_equal_those_of_earlier_versions():
    labels = [0, 0, 1, 1, 1, 2, 2, 2]
    sampler = make(labels, [0, 0, 1, 1, 1, 0, 0, 0], P=2, K=2, seed=5, epoch=1)
    assert list(sampler) == [[4, 2, 5, 6], [1, 0, 3, 4]]


def test_each_class_and_each_image_is_drawn_equally_often():
    labels = [label for label in range(10) for _ in range(9)]
    categories = [label % 2 for label in labels]
    classes, images, second = Counter(), Counter(), Counter()
    for epoch in range(400):
        batches = list(make(labels, categories, 6, 4, epoch=epoch))
        classes.update(index // 9 for index in batches[1][::4])  # the first refill of the classes falls into this batch
        second.update(batches[1])
        images.update(index for batch in batches for index in batch)
    assert max(classes.values()) < 1.25 * min(classes.values())  # 240 each, standard deviation about 10
    assert max(second.values()) < 1.8 * min(second.values())  # 107 each, standard deviation about 9
    assert max(images.values()) < 1.25 * min(images.values())


def test_categories_with_few_classes_give_one_warning():
    with pytest.warns(UserWarning, match="2 of 3 categories have fewer") as caught:
        make(P=6)
    assert len(caught) == 1
    make(P=4)  # two of each: enough
