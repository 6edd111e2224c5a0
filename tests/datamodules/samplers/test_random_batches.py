"""RandomBatchSampler: each image at most once in an epoch, by seed and epoch."""

import pytest

from lightning_retrieval.datamodules import RandomBatchSampler


def test_an_epoch_has_full_batches_of_different_images():
    sampler = RandomBatchSampler(11, batch_size=4, seed=3)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [4, 4]
    assert len(sampler) == 2
    drawn = [image for batch in batches for image in batch]
    assert len(set(drawn)) == 8
    assert set(drawn) <= set(range(11))


def test_batches_depend_on_seed_and_epoch():
    sampler = RandomBatchSampler(50, batch_size=5, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    assert list(RandomBatchSampler(50, batch_size=5, seed=4)) != first
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_images": 1, "batch_size": 1}, "`num_images`"),
        ({"num_images": 3, "batch_size": 4}, "`batch_size` must be at most the number of images, got 4 for 3 images"),
        ({"num_images": 3, "batch_size": 0}, "`batch_size`"),
    ],
)
def test_invalid_arguments(settings, message):
    with pytest.raises(ValueError, match=f"RandomBatchSampler: {message}"):
        RandomBatchSampler(**settings)
