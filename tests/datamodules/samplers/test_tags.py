"""TagSampler: its contract is checked with dictionaries and loops, independently of the implementation."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_retrieval.datamodules import TagSampler
from tests.datamodules.samplers.test_pk import assert_contract as assert_contract_of_classes

pytestmark = pytest.mark.filterwarnings("ignore:TagSampler. skipped .* tags in training:UserWarning")


def make(tags_of_images, P=2, K=2, seed=0, epoch=0) -> TagSampler:
    width = max(map(len, tags_of_images))
    padded = [[*tags, *[-1] * (width - len(tags))] for tags in tags_of_images]
    sampler = TagSampler(torch.tensor(padded), tags_per_batch=P, samples_per_tag=K, seed=seed)
    sampler.set_epoch(epoch)
    return sampler


def images_by_tag(tags_of_images) -> dict[int, set[int]]:
    """The images of each tag that several images have."""
    found: dict[int, set[int]] = {}
    for image, tags in enumerate(tags_of_images):
        for tag in tags:
            found.setdefault(tag, set()).add(image)
    return {tag: images for tag, images in found.items() if len(images) > 1}


def assert_contract(batches: list[list[int]], tags_of_images, P: int, K: int) -> None:
    images = images_by_tag(tags_of_images)
    tagged = set().union(*images.values())
    assert len(batches) == -(-len(tagged) // (P * K))
    for batch in batches:
        assert all(type(index) is int for index in batch)
        assert len(batch) == len(set(batch)) == P * K
        assert set(batch) <= tagged
        complete = [tag for tag, members in images.items() if len(members & set(batch)) >= min(K, len(members))]
        assert len(complete) >= P


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_batch_has_different_images_and_all_it_can_have_of_p_tags(data):
    tags_of_images = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=5), min_size=2, max_size=60))
    tags_of_images.append([3])
    tags_of_images.append([4, 3])
    images = images_by_tag(tags_of_images)
    total = len(set().union(*images.values()))
    K = data.draw(st.integers(2, max(2, total // 2)))
    P = data.draw(st.integers(1, max(1, min(len(images), total // K))))
    sampler = make(tags_of_images, P, K, data.draw(st.integers(0, 2**64)), data.draw(st.integers(0, 99)))
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert_contract(batches, tags_of_images, P, K)


@pytest.mark.parametrize("sizes", [[7] * 6, [5, 5, 6, 50], [8, 300]])
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 5)])
def test_tags_without_common_images_are_drawn_like_classes(sizes, P, K):
    """Every tag is drawn once before any is drawn twice, and so is every image of a tag, whatever the sizes."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    for epoch in range(5):
        batches = list(make([[label] for label in labels], P, K, epoch=epoch))
        assert_contract_of_classes(batches, labels, P, K)


def test_a_frequent_tag_is_drawn_as_often_as_a_rare_one():
    """Tag 0 is on every image. The positions that the two images of a rare tag leave are filled with further tags."""
    tags_of_images = [[0, 1 + image // 2] if image < 40 else [0] for image in range(400)]
    rare, all_images = Counter(), 0
    for epoch in range(20):
        for batch in make(tags_of_images, P=4, K=4, epoch=epoch):
            rare.update(tags_of_images[image][1] for image in batch if image < 40)
            all_images += len(batch)
    assert sum(rare.values()) > 0.5 * all_images  # 40 of 400 images have a rare tag
    assert min(rare[tag] for tag in range(1, 21)) > 0.8 * max(rare.values())


def test_each_image_is_drawn_equally_often():
    tags_of_images = [[image % 3, 3 + image // 10] for image in range(60)]
    drawn = Counter(
        image for epoch in range(600) for batch in make(tags_of_images, 3, 3, epoch=epoch) for image in batch
    )
    assert max(drawn.values()) < 1.25 * min(drawn.values())


def test_a_tag_that_an_image_has_twice_counts_once_and_padding_may_stand_anywhere():
    sampler = TagSampler([[5, 5, 7], [-1, 7, -1], [-1, -1, 7]], tags_per_batch=1, samples_per_tag=3)
    assert [sorted(batch) for batch in sampler] == [[0, 1, 2]]
    assert sampler.class_labels.tolist() == [7]
