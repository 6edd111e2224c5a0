"""VOCMetrics: the mean over classes, images that are repeated, several processes, and invalid input."""

import math

import pytest
import torch
import torch.distributed as dist

from lightning_retrieval.detection import VOCMetrics

CLASSES = 3


def image(number):
    """Detections and objects of one image; image 4 has no detection, image 5 no object."""
    generator = torch.Generator().manual_seed(number)
    objects = 0 if number == 5 else 3
    corner = 50 * torch.rand(objects, 2, generator=generator)
    boxes = torch.cat([corner, corner + 10 + 20 * torch.rand(objects, 2, generator=generator)], 1)
    labels = torch.randint(1, CLASSES + 1, (objects,), generator=generator)
    target = {"boxes": boxes, "labels": labels, "image_id": torch.tensor(number), "difficult": labels == number}
    found = 0 if number == 4 else 20
    nearest = torch.randint(0, max(1, objects), (found,), generator=generator)
    if objects == 0:
        boxes, labels = torch.tensor([[5.0, 5.0, 20.0, 20.0]]), torch.tensor([2])
    shifted = boxes[nearest] + 3 * torch.randn(found, 4, generator=generator).clamp(-1, 1)
    scores = torch.rand(found, generator=generator)
    return {"boxes": shifted, "scores": scores, "labels": labels[nearest]}, target


def evaluated(numbers, eleven_points=True):
    metrics = VOCMetrics(CLASSES, eleven_points=eleven_points)
    metrics.update(*([part] for part in image(9)))
    metrics.reset()  # what was evaluated before leaves nothing
    for number in numbers:
        detected, target = image(number)
        metrics.update([detected], [target])
    return metrics.compute()


def test_mean_is_over_the_classes_with_objects():
    result = evaluated([0, 1, 4, 5])
    per_class = [value for value in result["AP50_per_class"].tolist() if not math.isnan(value)]
    assert 0 < result["AP50"] < 1
    assert result["AP50"].item() == pytest.approx(sum(per_class) / len(per_class))
    assert not torch.equal(result["AP50"], evaluated([0, 1, 4, 5], eleven_points=False)["AP50"])


def test_order_and_repetition_of_images_do_not_matter():
    expected = evaluated(range(7))
    again = evaluated([6, 3, 0, 1, 5, 2, 4, 3, 0])
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_equal_scores_of_two_images_are_ranked_by_the_ids():
    box, label = torch.tensor([[0.0, 0.0, 10.0, 10.0]]), torch.tensor([1])
    items = []
    for number, found in ((0, box + 50), (1, box)):  # the first detection is false
        detected = {"boxes": found, "scores": torch.tensor([0.5]), "labels": label}
        items.append((detected, {"boxes": box, "labels": label, "image_id": number}))
    for order in (items, items[::-1]):
        metrics = VOCMetrics(1, eleven_points=False)
        for detected, target in order:
            metrics.update([detected], [target])
        assert metrics.compute()["AP50"] == 0.25  # the true one has rank 2 and finds one of two objects


def _evaluated_on(rank, world_size):
    shards = {0: [0, 2, 4, 6, 0], 1: [1, 3, 5], 2: []}  # a sampler has repeated image 0; the last process has none
    return evaluated([*shards[rank], *([2] if rank == 1 else [])]), dist.get_world_size()


def test_three_processes_have_the_result_of_one(run_processes):
    expected = evaluated(range(7))
    results = run_processes(_evaluated_on, 3)
    for result, world_size in results:
        assert world_size == 3
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.refusal
def test_invalid_settings_and_lists():
    with pytest.raises(ValueError, match="VOCMetrics: `iou_threshold` must be at most 1, got 50"):
        VOCMetrics(3, iou_threshold=50)
    with pytest.raises(ValueError, match="`detections` must be one for each target, got 0 for 1"):
        VOCMetrics(3).update([], [image(0)[1]])
