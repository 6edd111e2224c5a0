"""What all metrics of detectors share: objects that are ignored, and invalid input."""

import math

import pytest
import torch

from lightning_retrieval.detection import COCOMetrics, VOCMetrics
from lightning_retrieval.detection import metric as detection_metric

METRICS = [COCOMetrics, VOCMetrics]
BOXES = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 40.0, 50.0]])


def detected(**changes):
    return {"boxes": BOXES, "scores": torch.tensor([0.6, 0.9]), "labels": torch.tensor([1, 1]), **changes}


def target(**changes):
    return {"boxes": BOXES[:1], "labels": torch.tensor([1]), "image_id": 3, **changes}


@pytest.mark.parametrize("name", ["difficult", "iscrowd"])
@pytest.mark.parametrize("metric", METRICS)
def test_an_ignored_object_is_neither_found_nor_missed(metric, name):
    objects = {"boxes": BOXES, "labels": torch.tensor([1, 1])}
    for ignored in ([False, True], [True, False], [False, False]):
        metrics = metric(2)
        metrics.update([detected()], [target(**objects, **{name: torch.tensor(ignored)})])
        assert metrics.compute()["AP50"] == pytest.approx(1)
    one_found = detected(boxes=BOXES[:1], scores=torch.tensor([0.6]), labels=torch.tensor([1]))
    missed, ignored = metric(2), metric(2)
    missed.update([one_found], [target(**objects)])
    ignored.update([one_found], [target(**objects, **{name: torch.tensor([False, True])})])
    assert missed.compute()["AP50"] < 0.6
    assert ignored.compute()["AP50"] == pytest.approx(1)


@pytest.mark.parametrize("metric", METRICS)
def test_an_object_is_ignored_if_one_of_both_flags_is_set(metric):
    objects = {"boxes": BOXES, "labels": torch.tensor([1, 1])}
    flags = {"difficult": torch.tensor([0.0, 0.5]), "iscrowd": torch.tensor([0, 0])}
    metrics = metric(2)
    metrics.update([detected()], [target(**objects, **flags)])
    assert metrics.images_once()[1][0]["ignored"].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("metric", METRICS)
def test_labels_of_few_bits_on_any_rank(metric, dtype, monkeypatch):
    """The key of an image, which is stored beside its labels, has the rank in its upper bits."""
    monkeypatch.setattr(detection_metric, "rank", lambda: 3)
    metrics = metric(2)
    labels = torch.tensor([1, 1], dtype=dtype)
    metrics.update([detected(labels=labels)], [target(boxes=BOXES, labels=labels)])
    assert metrics.compute()["AP50"] == pytest.approx(1)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((detected(labels=torch.tensor([0, 1])), target()), ValueError, "`labels` of `detections` must be from 1 to 2"),
        ((detected(scores=torch.tensor([math.inf, 1])), target()), ValueError, "`scores` must hold finite numbers"),
        ((detected(scores=torch.ones(3)), target()), ValueError, r"`scores` must have shape \(2,\), one for each box"),
        ((detected(), target(difficult=torch.ones(2))), ValueError, r"`difficult` must have shape \(1,\)"),
        ((detected(), target(iscrowd=[0])), TypeError, r"`targets\['iscrowd'\]` must be a tensor"),
        ((detected(), target(image_id="a")), TypeError, "`targets` must have an integer as `image_id`, got 'a'"),
        (
            (detected(), target(image_id=1 << 63)),
            ValueError,
            "`targets` must have an `image_id` of at most 64 bits, got",
        ),
        (
            (detected(), target(boxes=BOXES[:1] * math.nan)),
            ValueError,
            r"`targets\['boxes'\]` must hold finite numbers",
        ),
        (({"boxes": BOXES}, target()), ValueError, "`detections` must have the keys boxes, labels, scores"),
        ((3, target()), TypeError, "`detections` must be a dict, got 3"),
    ],
)
def test_invalid_images(given, error, message):
    with pytest.raises(error, match=f"^VOCMetrics: {message}"):
        VOCMetrics(2).update([given[0]], [given[1]])
