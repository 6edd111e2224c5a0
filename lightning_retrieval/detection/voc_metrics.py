"""Mean Average Precision of a detector on Pascal VOC, for any number of processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_retrieval.checks import (
    check_bool,
    check_finite,
    check_integer,
    check_integers,
    check_mapping,
    check_positive,
    check_sequence,
    check_tensor,
)
from lightning_retrieval.detection.voc_ap import detection_outcomes, voc_average_precision


class VOCMetrics(Metric):
    """AP of each class and their mean, by the rules of Pascal VOC.

    An image that several processes evaluate, because a distributed sampler repeats it, is counted once.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        iou_threshold: overlap from which a detection has found an object, > 0 and at most 1.
        eleven_points: the rule of VOC 2007 to 2009, by which results on VOC 2007 are reported; False for the rule
            since 2010.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if a number is out of its range; in `update`, if shapes do not fit or a score is not finite.
        TypeError: if `eleven_points` is not a bool, or a detection or a target is not a mapping.

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
        24 bytes for each detection, and 24 for each object.

    Relations:
        `torchmetrics.detection.MeanAveragePrecision` has COCO's rules, without difficult objects.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    detections: list[Tensor]
    scores: list[Tensor]
    objects: list[Tensor]

    def __init__(self, classes: int, *, iou_threshold: float = 0.5, eleven_points: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        owner = type(self).__name__
        self.classes = check_integer(owner, "classes", classes, least=1)
        self.iou_threshold = check_positive(owner, "iou_threshold", iou_threshold)
        if self.iou_threshold > 1:
            raise ValueError(f"{owner}: `iou_threshold` must be at most 1, got {iou_threshold}.")
        self.eleven_points = check_bool(owner, "eleven_points", eleven_points)
        # detections: image, position in the image, label, outcome; objects: image, position, label, difficult
        for name in ("detections", "scores", "objects"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, detections: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add the images of a batch.

        Args:
            detections: of each image: `boxes` (N, 4), `scores` (N,) and `labels` (N,), as torchvision's detectors give
                them in evaluation.
            targets: of each image: `boxes` (M, 4), `labels` (M,), the number `image_id`, and optionally `difficult`
                (M,), bool.
        """
        owner = type(self).__name__
        check_sequence(owner, "detections", detections)
        check_sequence(owner, "targets", targets)
        if len(detections) != len(targets):
            raise ValueError(
                f"{owner}: `detections` must have one entry for each target, got {len(detections)} for "
                f"{len(targets)} targets."
            )
        for detected, target in zip(detections, targets):
            self._add_image(owner, detected, target)

    def compute(self) -> dict[str, Tensor]:
        """`AP50`, the mean over the classes that have objects, and `AP50_per_class`, NaN for those without.

        The number in the names is the threshold in percent.
        """
        no_rows = torch.empty(0, 4, dtype=torch.int64, device=self.device)
        objects = _joined(self.objects, no_rows)
        objects = objects[_first_of_each(objects)]
        counted = objects[objects[:, 3] == 0]
        detections = _joined(self.detections, no_rows)
        first = _first_of_each(detections)
        label, outcome = detections[first, 2], detections[first, 3]
        scores = _joined(self.scores, torch.empty(0, device=self.device))[first]
        found = []
        for class_ in range(1, self.classes + 1):
            of_class = label == class_
            count = int((counted[:, 2] == class_).sum())
            found.append(
                voc_average_precision(scores[of_class], outcome[of_class], count, eleven_points=self.eleven_points)
            )
        per_class = torch.tensor(found, device=self.device)
        name = f"AP{round(100 * self.iou_threshold)}"
        return {name: per_class.nanmean(), f"{name}_per_class": per_class}

    def init_args(self) -> dict[str, Any]:
        """The constructor arguments, from which a checkpoint rebuilds the metric."""
        return {
            "classes": self.classes,
            "iou_threshold": self.iou_threshold,
            "eleven_points": self.eleven_points,
        }

    def extra_repr(self) -> str:
        return f"classes={self.classes}, iou_threshold={self.iou_threshold}, eleven_points={self.eleven_points}"

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the rows of all processes; a process without images takes part with none."""
        if len(self.scores) == 0:
            self.scores.append(torch.empty(0, device=self.device))
            empty = torch.empty(0, 4, dtype=torch.int64, device=self.device)
            self.detections.append(empty)
            self.objects.append(empty)
        super().sync(*args, **kwargs)

    def _add_image(self, owner: str, detected: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        _check_keys(owner, "detections", detected, ("boxes", "labels", "scores"))
        _check_keys(owner, "targets", target, ("boxes", "labels", "image_id"))
        boxes, labels = _boxes_and_labels(owner, "detections", detected, self.classes)
        scores = detected["scores"]
        check_tensor(owner, "scores", scores)
        if scores.shape != labels.shape:
            raise ValueError(
                f"{owner}: `scores` must have shape {tuple(labels.shape)}, one for each box, got {tuple(scores.shape)}."
            )
        check_finite(owner, "scores", scores)
        object_boxes, object_labels = _boxes_and_labels(owner, "targets", target, self.classes)
        difficult = target.get("difficult")
        if difficult is None:
            difficult = torch.zeros_like(object_labels, dtype=torch.bool)
        outcomes = detection_outcomes(
            boxes, scores, labels, object_boxes, object_labels, difficult, iou_threshold=self.iou_threshold
        )
        image = int(target["image_id"])
        self.detections.append(_rows(image, labels, outcomes).to(self.device))
        self.scores.append(scores.detach().float().to(self.device))
        self.objects.append(_rows(image, object_labels, difficult).to(self.device))


def _check_keys(owner: str, name: str, given: Any, keys: Sequence[str]) -> None:
    """Check that what is known of one image is a mapping with these keys."""
    check_mapping(owner, name, given)
    for key in keys:
        if key not in given:
            raise ValueError(
                f"{owner}: `{name}` must have the keys {', '.join(keys)} for each image, got {', '.join(given)}."
            )


def _boxes_and_labels(
    owner: str, name: str, given: Mapping[str, Any], classes: int
) -> tuple[Float[Tensor, "box 4"], Int[Tensor, " box"]]:
    """The boxes and labels of one image, if they are valid."""
    boxes, labels = given["boxes"], given["labels"]
    for key, value in (("boxes", boxes), ("labels", labels)):
        check_tensor(owner, f"{name}[{key!r}]", value)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"{owner}: `boxes` of `{name}` must have shape (boxes, 4), got {tuple(boxes.shape)}.")
    check_integers(owner, "labels", labels, len(boxes), "boxes")
    if len(labels) > 0 and not 1 <= int(labels.min()) <= int(labels.max()) <= classes:
        raise ValueError(
            f"{owner}: `labels` of `{name}` must be from 1 to {classes}, got {int(labels.min())} to "
            f"{int(labels.max())}; 0 is background."
        )
    return boxes, labels


def _rows(image: int, labels: Int[Tensor, " row"], values: Tensor) -> Int[Tensor, "row 4"]:
    """Image, position in the image, label and value of each row."""
    positions = torch.arange(len(labels), device=labels.device)
    return torch.stack([torch.full_like(positions, image), positions, labels.long(), values.long()], 1)


def _joined(batches: list[Tensor], like: Tensor) -> Tensor:
    """The rows of all batches; `like`, which has no row, if there is no batch."""
    if len(batches) == 0:
        return like
    return dim_zero_cat(batches)


def _first_of_each(rows: Int[Tensor, "row 4"]) -> Int[Tensor, " unique"]:
    """Positions of the rows in the order of images and positions, without those that occur again."""
    unique, inverse = torch.unique(rows[:, :2], dim=0, return_inverse=True)
    positions = torch.arange(len(rows), device=rows.device)
    return positions.new_full((len(unique),), len(rows)).scatter_reduce(0, inverse, positions, "amin")
