"""Mean Average Precision of a detector as defined by Pascal VOC (Everingham et al., IJCV 2010, section 4.2).

The rules are those of `VOCevaldet` in the development kit. Each detection is assigned to the object of its class and
image that it overlaps most. If the overlap is below the threshold, the detection is false. Otherwise, the best-scored
detection of an object is true and its other detections are false. Detections of difficult objects are ignored, and
difficult objects need not be found.

Boxes are (left, top, right, bottom) in continuous coordinates. The kit's boxes consist of inclusive pixels counted from
1; subtracting 1 from left and top gives the same overlaps.
"""

from enum import IntEnum
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.ops import box_iou

from lightning_retrieval.arguments import checked, numbers
from lightning_retrieval.checks import SMALLEST
from lightning_retrieval.detection.metric import DetectionMetric


class Outcome(IntEnum):
    """The way in which a detection counts: as false, as true, or not at all."""

    FALSE = 0
    TRUE = 1
    IGNORED = 2


def detection_outcomes(
    boxes: Float[Tensor, "detection 4"],
    scores: Float[Tensor, " detection"],
    labels: Int[Tensor, " detection"],
    object_boxes: Float[Tensor, "object 4"],
    object_labels: Int[Tensor, " object"],
    difficult: Bool[Tensor, " object"],
    *,
    iou_threshold: float = 0.5,
) -> Int[Tensor, " detection"]:
    """The `Outcome` of each detection of one image. If scores are equal, the first detection gets the object."""
    outcomes = torch.full_like(labels, Outcome.FALSE)
    if len(boxes) == 0 or len(object_boxes) == 0:
        return outcomes
    overlaps = box_iou(boxes, object_boxes)
    overlaps = overlaps.masked_fill(labels[:, None] != object_labels, -1)
    overlap, nearest = overlaps.max(1)
    found = overlap >= iou_threshold

    order = scores.argsort(descending=True, stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    none_found = torch.full((len(object_boxes),), len(order), dtype=position.dtype, device=position.device)
    first = none_found.scatter_reduce(0, nearest[found], position[found], "amin")

    outcomes[found & (position == first[nearest])] = Outcome.TRUE
    outcomes[found & difficult[nearest]] = Outcome.IGNORED
    return outcomes


def voc_average_precision(
    scores: Float[Tensor, " detection"], outcomes: Int[Tensor, " detection"], objects: int, *, eleven_points: bool
) -> float:
    """AP of one class over all images.

    Args:
        scores: scores of all detections of the class; equal scores are ranked in the given order.
        outcomes: the `Outcome` of each detection.
        objects: number of objects of the class that are not difficult.
        eleven_points: use the rule of VOC 2007 to 2009: the mean, over the recalls 0, 0.1, ..., 1, of the highest
            precision at this or a higher recall. If False, use the rule since VOC 2010: the mean of these precisions
            over all recalls, which is the area under the precision-recall curve made monotone.

    Returns:
        The AP, NaN without objects.

    Example:
        >>> import torch
        >>> from lightning_retrieval.detection.voc import Outcome, voc_average_precision
        >>> scores = torch.tensor([0.9, 0.8, 0.7])
        >>> outcomes = torch.tensor([Outcome.TRUE, Outcome.FALSE, Outcome.TRUE])
        >>> voc_average_precision(scores, outcomes, 2, eleven_points=False)  # (1 + 2/3) / 2
        0.8333333333333333
        >>> voc_average_precision(scores, outcomes, 2, eleven_points=True)  # 1 up to a recall of 0.5, then 2/3
        0.8484848484848484
    """
    if objects == 0:
        return float("nan")
    counted = outcomes != Outcome.IGNORED
    order = scores[counted].argsort(descending=True, stable=True)
    is_true = (outcomes[counted][order] == Outcome.TRUE).cpu()
    found = is_true.cumsum(0)  # number of true detections among the best, as exact integers
    precision = found.double() / torch.arange(1, len(found) + 1)
    if not eleven_points:
        best_from_here = precision.flip(0).cummax(0).values.flip(0)
        return float(best_from_here[is_true].sum() / objects)
    total = 0.0
    for tenth in range(11):
        reached = precision[10 * found >= tenth * objects]
        if len(reached) > 0:
            total += float(reached.max())
    return total / 11


class VOCMetrics(DetectionMetric):
    """AP of each class and their mean, by the rules of Pascal VOC.

    An image that several processes evaluate, because a distributed sampler repeats it, is recognised by the `image_id`
    of its target and counted once.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        iou_threshold: smallest overlap at which a detection has found an object, > 0 and at most 1.
        eleven_points: use the rule of VOC 2007 to 2009, as in published results on VOC 2007. If False, use the rule
            since VOC 2010.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if a number is out of its range; in `update`, if shapes do not match, a label is out of its range,
            or a score or a box is not finite.
        TypeError: if an argument has the wrong type; in `update`, if an entry of a detection or a target is not a
            tensor.

    Example:
        >>> import torch
        >>> from lightning_retrieval.detection import VOCMetrics
        >>> metrics = VOCMetrics(2)
        >>> box = torch.tensor([[0.0, 0.0, 10.0, 10.0]])
        >>> detected = {"boxes": box + 1, "scores": torch.tensor([0.8]), "labels": torch.tensor([2])}
        >>> metrics.update([detected], [{"boxes": box, "labels": torch.tensor([2]), "image_id": 7}])
        >>> result = metrics.compute()
        >>> result["AP50"], result["AP50_per_class"]  # the overlap is 81 / 119; there is no object of class 1
        (tensor(1.), tensor([nan, 1.]))

    Cost:
        Each detection and each object takes 52 bytes.

    Relations:
        `COCOMetrics` has COCO's rules.
    """

    def __init__(
        self,
        classes: int,
        *,
        iou_threshold: Annotated[float, numbers(SMALLEST, 1)] = 0.5,
        eleven_points: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(classes, **kwargs)
        self.iou_threshold = checked(self, iou_threshold=iou_threshold)
        self.eleven_points = eleven_points

    def compute(self) -> dict[str, Tensor]:
        """`AP50`, the mean over the classes with objects, and `AP50_per_class`, NaN for classes without objects.

        The number in the names is the threshold in percent.
        """
        detections, targets = self.images_once()
        outcomes, counted = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for found, target in zip(detections, targets):
            difficult = target["ignored"] != 0
            outcome = detection_outcomes(
                found["boxes"],
                found["scores"],
                found["labels"],
                target["boxes"],
                target["labels"],
                difficult,
                iou_threshold=self.iou_threshold,
            )
            outcomes.append(outcome)
            counted.append(target["labels"][~difficult])
        scores = torch.cat([torch.zeros(0), *(found["scores"] for found in detections)])
        labels = torch.cat([torch.zeros(0, dtype=torch.int64), *(found["labels"] for found in detections)])
        per_class = self._average_precision(scores, labels, torch.cat(outcomes), torch.cat(counted)).to(self.device)
        name = f"AP{round(100 * self.iou_threshold)}"
        return {name: per_class.nanmean(), f"{name}_per_class": per_class}

    def init_args(self) -> dict[str, Any]:
        return {**super().init_args(), "iou_threshold": self.iou_threshold, "eleven_points": self.eleven_points}

    def _average_precision(self, scores: Tensor, labels: Tensor, outcomes: Tensor, objects: Tensor) -> Tensor:
        """AP of each class, from all detections and the labels of the objects that count."""
        found = []
        for class_ in range(1, self.classes + 1):
            of_class = labels == class_
            count = int((objects == class_).sum())
            value = voc_average_precision(scores[of_class], outcomes[of_class], count, eleven_points=self.eleven_points)
            found.append(value)
        return torch.tensor(found)
