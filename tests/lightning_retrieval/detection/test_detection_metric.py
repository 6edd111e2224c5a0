"""What all metrics of detectors share: objects that are ignored, and invalid input."""

import math

import pytest
import torch

from lightning_retrieval.detection import COCOMetrics, VOCMetrics

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


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((detected(labels=torch.tensor([0, 1])), target()), ValueError, "`labels` of `detections` must be from 1 to 2"),
        ((detected(), target(labels=torch.tensor([3]))), ValueError, "`labels` of `targets` must be from 1 to 2"),
        ((detected(scores=torch.tensor([math.inf, 1])), target()), ValueError, "`scores` must hold finite numbers"),
        ((detected(scores=torch.ones(3)), target()), ValueError, r"`scores` must have shape \(2,\), one for each box"),
        ((detected(), target(difficult=torch.ones(2))), ValueError, r"`difficult` must have shape \(1,\)"),
        ((detected(), target(iscrowd=[0])), TypeError, r"`targets\['iscrowd'\]` must be a tensor"),
        ((detected(), target(image_id="a")), TypeError, "`targets` must have an integer as `image_id`, got 'a'"),
        (({"boxes": BOXES}, target()), ValueError, "`detections` must have the keys boxes, labels, scores"),
        ((detected(), {}), ValueError, "`targets` must have the keys boxes, labels"),
        ((3, target()), TypeError, "`detections` must be a dict, got 3"),
    ],
)
@pytest.mark.parametrize("metric", METRICS)
def test_invalid_images(metric, given, error, message):
    with pytest.raises(error, match=f"^{metric.__name__}: {message}"):
        metric(2).update([given[0]], [given[1]])
