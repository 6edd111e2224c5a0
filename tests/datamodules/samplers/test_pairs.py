"""PairSampler: its contract for each side is checked with dictionaries and loops, whatever the implementation."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.datamodules import PairSampler
from tests.datamodules.samplers.test_pk import assert_rounds

QUERIES, CANDIDATES = [7, 5, 5, 9, 7], [5, 5, 7, 7, 7, 9]

pytestmark = pytest.mark.filterwarnings("ignore:PairSampler. skipped .* classes in training:UserWarning")


def make(queries=QUERIES, candidates=CANDIDATES, P=2, Q=1, K=2, seed=0, epoch=0) -> PairSampler:
    sampler = PairSampler(queries, candidates, classes_per_batch=P, queries_per_class=Q, samples_per_class=K, seed=seed)
    sampler.set_epoch(epoch)
    return sampler


def assert_side(groups: list[list[int]], classes: list[int], labels: list[int]) -> None:
    """Groups of one side hold rows of their classes: each row once before any twice, and in a group as seldom."""
    drawn: dict[int, list[int]] = {}
    for group, owner in zip(groups, classes, strict=True):
        members = {row for row, label in enumerate(labels) if label == owner}
        assert set(group) <= members
        times = Counter(dict.fromkeys(members, 0))
        times.update(group)
        assert max(times.values()) - min(times.values()) <= 1
        drawn.setdefault(owner, []).extend(group)
    for owner, rows in drawn.items():
        assert_rounds(rows, {row for row, label in enumerate(labels) if label == owner})


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_class_and_each_row_of_a_side_is_drawn_once_before_any_is_drawn_twice(data):
    sides = st.lists(st.integers(0, 6), min_size=1, max_size=30)
    queries, candidates = data.draw(sides), data.draw(sides)
    shared = set(queries) & set(candidates)
    if not shared:
        return
    P, Q, K = data.draw(st.integers(1, len(shared))), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    sampler = make(queries, candidates, P, Q, K, data.draw(st.integers(0, 2**64)), data.draw(st.integers(0, 99)))
    batches = list(sampler)
    of_side = [sum(label in shared for label in side) for side in (queries, candidates)]
    assert len(batches) == len(sampler) == max(math.ceil(of_side[0] / (P * Q)), math.ceil(of_side[1] / (P * K)))

    classes, query_groups, candidate_groups = [], [], []
    for batch in batches:
        assert all(type(index) is int for index in batch)
        own, other = batch[: P * Q], [index - len(queries) for index in batch[P * Q :]]
        groups = [own[g * Q : g * Q + Q] for g in range(P)]
        owners = [queries[group[0]] for group in groups]
        assert len(set(owners)) == P
        classes += owners
        query_groups += groups
        candidate_groups += [other[g * K : g * K + K] for g in range(P)]
    assert_rounds(classes, shared)
    assert_side(query_groups, classes, queries)
    assert_side(candidate_groups, classes, candidates)


def test_batches_depend_on_seed_and_epoch_only():
    batches = list(make(seed=3, epoch=1))
    assert batches == list(make(seed=3, epoch=1))
    assert batches != list(make(seed=4, epoch=1))
    assert batches != list(make(seed=3, epoch=0))


def test_rows_of_several_drawn_indices_have_the_classes_of_the_sampler():
    sampler = make()
    labels = QUERIES + CANDIDATES
    for batch in sampler:
        found = sampler.class_labels[sampler.classes_of(batch)]
        assert found.tolist() == [labels[index] for index in batch]


@pytest.mark.filterwarnings("default:PairSampler. skipped")
def test_classes_on_one_side_are_skipped_with_one_warning():
    with pytest.warns(UserWarning, match="skipped 3 of 5 classes") as caught:
        sampler = make([0, 1, 2, 3], [2, 3, 4], P=1)
    assert len(caught) == 1
    assert {index for batch in sampler for index in batch} <= {2, 3, 4, 5}
