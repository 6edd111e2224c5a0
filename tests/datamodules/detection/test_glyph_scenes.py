"""GlyphScenes: what an item is, that it depends on (seed, split, index) alone, and what is invalid."""

import pytest
import torch

from lightning_retrieval.datamodules import GlyphScenes


def test_items_are_what_detectors_take():
    data = GlyphScenes(train_size=20, batch_size=4, seed=1)
    images, targets = next(iter(data.train_dataloader()))
    assert len(images) == len(targets) == 4
    for image, target in zip(images, targets):
        assert image.shape == (3, 112, 112)
        assert image.dtype == torch.float32
        assert 0 <= image.min() < image.max() <= 1
        assert target["boxes"].shape == (len(target["labels"]), 4)
        assert target["labels"].dtype == torch.int64
    assert len(data.class_names) == 15
    assert data.check().splits["train"] == ((20, 15), ())


def test_a_scene_is_a_function_of_seed_split_and_index():
    first, again, other = GlyphScenes(), GlyphScenes(seed=4, train_size=9), GlyphScenes(scene_seed=1)
    image, target = first.train_set[5]
    same, same_target = again.train_set[5]
    assert torch.equal(image, same)
    assert all(torch.equal(target[key], same_target[key]) for key in target)
    for different in (first.train_set[6], first.val_set[5], first.test_set[5], other.train_set[5]):
        assert not torch.equal(image, different[0])
    assert len(first.train_set) == 4000
    with pytest.raises(IndexError, match="has 9 scenes, got the index 9"):
        again.train_set[9]


def test_a_run_does_not_depend_on_the_workers():
    batches = []
    for workers in (0, 2):
        data = GlyphScenes(train_size=12, batch_size=4, num_workers=workers, seed=3)
        batches.append([target["image_id"].item() for _, targets in data.train_dataloader() for target in targets])
    assert batches[0] == batches[1]
    assert sorted(batches[0]) == list(range(12))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"`num_classes` must be an integer .* got 43", {"num_classes": 43}),
        (ValueError, "`image_size` must be an integer >= 64.* got 20", {"image_size": 20}),
        (ValueError, "`max_rotation` must be .* got -1", {"max_rotation": -1}),
        (TypeError, "`max_objects` must be an integer", {"max_objects": 1.5}),
        (ValueError, "`train_size` must be an integer >= 2.* got 1", {"train_size": 1}),
    ],
)
def test_invalid_settings(error, match, arguments):
    with pytest.raises(error, match=f"^GlyphScenes: {match}"):
        GlyphScenes(**arguments)
