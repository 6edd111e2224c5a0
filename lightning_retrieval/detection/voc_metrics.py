"""Mean Average Precision of a detector on Pascal VOC, for any number of processes."""

from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.checks import check_bool, check_positive
from lightning_retrieval.detection.detection_metric import DetectionMetric
from lightning_retrieval.detection.voc_ap import detection_outcomes, voc_average_precision


class VOCMetrics(DetectionMetric):
    """AP of each class and their mean, by the rules of Pascal VOC.

    An image that several processes evaluate, because a distributed sampler repeats it, is counted once, by the
    `image_id` of its target.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        iou_threshold: overlap from which a detection has found an object, > 0 and at most 1.
        eleven_points: the rule of VOC 2007 to 2009, by which results on VOC 2007 are reported; False for the rule
            since 2010.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if a number is out of its range; in `update`, if shapes do not fit, a label is out of its range, or
            a score or a box is not finite.
        TypeError: if an argument has another type; in `update`, if a detection or a target is not a mapping of tensors.

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
        52 bytes for each detection and each object.

    Relations:
        `COCOMetrics` has COCO's rules.
    """

    def __init__(self, classes: int, *, iou_threshold: float = 0.5, eleven_points: bool = True, **kwargs: Any) -> None:
        super().__init__(classes, **kwargs)
        owner = type(self).__name__
        self.iou_threshold = check_positive(owner, "iou_threshold", iou_threshold)
        if self.iou_threshold > 1:
            raise ValueError(f"{owner}: `iou_threshold` must be at most 1, got {iou_threshold}.")
        self.eleven_points = check_bool(owner, "eleven_points", eleven_points)

    def compute(self) -> dict[str, Tensor]:
        """`AP50`, the mean over the classes that have objects, and `AP50_per_class`, NaN for those without.

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
