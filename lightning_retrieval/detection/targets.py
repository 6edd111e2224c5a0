"""Checks of the targets of a detector's batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_retrieval.invalid import InvalidType, InvalidValue


def check_class_labels(labels: Int[Tensor, " object"], lowest: int, highest: int) -> None:
    """Raise unless all labels are from `lowest` to `highest`.

    Args:
        labels: labels of objects or RoIs.
        lowest: 1 for objects, 0 if the background is a class.
        highest: number of foreground classes.
    """
    wrong = labels[(labels < lowest) | (labels > highest)]
    if len(wrong) > 0:
        cure = "0 is the background, so the detector needs one class more than there are classes of objects"
        raise InvalidValue(f"must be from {lowest} to {highest}", argument="labels", got=int(wrong[0]), cure=cure)


def check_targets(images: Sequence[Tensor], targets: Sequence[Mapping[str, Any]], classes: int) -> None:
    """Raise unless each image has one target, with boxes inside the image and labels from 1 to `classes`.

    Args:
        images: tensors of shape (channels, height, width).
        targets: a dict of `boxes` (objects, 4) and `labels` (objects,) for each image; both may be empty.
        classes: number of classes of objects.
    """
    if len(images) != len(targets):
        rule = "must be one for each image"
        raise InvalidValue(rule, argument="targets", got=f"{len(targets)} for {len(images)} images")
    for number, (image, target) in enumerate(zip(images, targets)):
        boxes, labels = _boxes_and_labels(number, target)
        check_class_labels(labels, 1, classes)
        height, width = image.shape[-2:]
        _check_boxes(f"image {_name(number, target)}", boxes, height, width)


def num_classes(detector: nn.Module) -> int | None:
    """Number of classes of objects that the box classifier of a detector has; None if it is unknown.

    Args:
        detector: a detector of torchvision, or a module with the same attributes.
    """
    heads = getattr(detector, "roi_heads", None)
    classifier = getattr(getattr(heads, "box_predictor", None), "cls_score", None)
    if not isinstance(classifier, nn.Linear):
        return None
    return classifier.out_features - 1


def _boxes_and_labels(number: int, target: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    missing = [name for name in ("boxes", "labels") if not isinstance(target.get(name), Tensor)]
    if missing:
        rule = f"must have tensors `boxes` and `labels`, lacks {missing} of image {number}"
        raise InvalidType(rule, argument="targets")
    boxes, labels = target["boxes"], target["labels"]
    if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        rule = "must have `boxes` of shape (objects, 4) and `labels` of shape (objects,)"
        got = f"{tuple(boxes.shape)} and {tuple(labels.shape)} of image {_name(number, target)}"
        raise InvalidValue(rule, argument="targets", got=got, cure="boxes of no objects are torch.zeros(0, 4)")
    if not boxes.is_floating_point() or labels.dtype != torch.int64:
        rule = "must be floating point and `labels` int64"
        raise InvalidType(rule, argument="boxes", got=f"{boxes.dtype} and {labels.dtype}")
    return boxes, labels


def _check_boxes(what: str, boxes: Float[Tensor, "object 4"], height: int, width: int) -> None:
    left, top, right, bottom = boxes.unbind(1)
    # Written so that NaN is invalid, too.
    is_right = (left < right) & (top < bottom) & (left >= 0) & (top >= 0) & (right <= width) & (bottom <= height)
    if bool(is_right.all()):
        return
    wrong = boxes[~is_right][0].tolist()
    rule = "must be (left, top, right, bottom) with left < right and top < bottom inside of the image"
    got = f"{wrong} in {what} of {width} x {height} pixels"
    raise InvalidValue(rule, argument="boxes", got=got, cure="correct or remove the box")


def _name(number: int, target: Mapping[str, Any]) -> str:
    """The name of an image in messages: its id if it has one, else its number."""
    if "image_id" in target:
        return f"with image_id {int(target['image_id'])}"
    return str(number)
