"""The base class of detection metrics, which collects detections and objects on any number of processes, and COCO's AP.

COCO averages AP over ten thresholds of overlap, from 0.5 to 0.95; AP50 uses only the first. Precision is interpolated
at 101 levels of recall; at most 100 detections per image count; objects with `iscrowd` are ignored. A class without
objects has no AP, and is skipped in the mean. The computation is done by torchmetrics' `MeanAveragePrecision`.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.checks import (
    check_finite,
    check_integers,
    check_tensor,
    short_repr,
)
from lightning_retrieval.distributed import rank
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned
from lightning_retrieval.optional_packages import optional_import

MAX_IMAGES = 1 << 40  # maximum number of images per process and evaluation
LEAST_ID = -(1 << 63)

# The number of columns and the dtype of each state. A row of `_images` is a key and an id. A row of `_boxes` is a box
# and its score. A row of `_annotations` belongs to a box: the key of its image, 1 for a detection or 0 for an object,
# the label, and 1 if the box is ignored.
STATES = {"_images": (2, torch.int64), "_boxes": (5, torch.float32), "_annotations": (4, torch.int64)}

# These thresholds are in float64, as in pycocotools, because overlaps and recalls often equal a threshold. By default,
# torchmetrics has float32.
OVERLAPS = np.linspace(0.5, 0.95, 10).tolist()
RECALLS = np.linspace(0.0, 1.0, 101).tolist()

Images = list[dict[str, Tensor]]


class DetectionMetric(Metric):
    """Base class of metrics of detections. A subclass implements `compute` with the images that `images_once` returns.

    An image that several processes evaluate, because a distributed sampler repeats it, is recognised by the `image_id`
    of its target and counted once.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if `classes` is out of its range; in `update`, if shapes do not match, a label is out of its range,
            or a score or a box is not finite; in `compute`, if images with the same `image_id` have other objects.
        TypeError: if `classes` is not an integer; in `update`, if an entry of a detection or a target is not a tensor.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    _images: list[Tensor]
    _boxes: list[Tensor]
    _annotations: list[Tensor]

    def __init__(self, classes: PositiveInt, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.classes = checked(self, classes=classes)
        for name in STATES:
            self.add_state(name, default=[], dist_reduce_fx="cat")
        self._begin()

    @owned
    def update(self, detections: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add the images of a batch.

        Args:
            detections: for each image, `boxes` (detections, 4), `scores` and `labels` (detections,), as returned by
                torchvision's detectors in evaluation.
            targets: for each image, `boxes` (objects, 4), `labels` (objects,), and optionally the number `image_id`,
                and `difficult` and `iscrowd` (objects,): objects for which one of them is true are ignored.
        """
        if len(detections) != len(targets):
            rule = "must be one for each target"
            raise InvalidValue(rule, argument="detections", got=f"{len(detections)} for {len(targets)} in `targets`")
        for detected, target in zip(detections, targets):
            self._add_image(detected, target)

    def reset(self) -> None:
        """Remove all images."""
        super().reset()
        self._begin()

    def init_args(self) -> dict[str, Any]:
        """The constructor arguments, from which a checkpoint rebuilds the metric."""
        return {"classes": self.classes}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.init_args().items())

    @owned
    def images_once(self) -> tuple[Images, Images]:
        """Detections and targets of each image, on the CPU, in the order of the ids, without duplicate images.

        Detections have `boxes`, `scores` and `labels`; targets have `boxes`, `labels` and `ignored` (1 or 0).

        Raises:
            ValueError: if images with the same id have different objects.
        """
        images, boxes = dim_zero_cat(self._images).cpu(), dim_zero_cat(self._boxes).cpu()
        key, is_detection, label, ignored = dim_zero_cat(self._annotations).cpu().unbind(1)
        copies: dict[int, list[int]] = {}
        for image_key, image_id in images.tolist():
            copies.setdefault(image_id, []).append(image_key)
        rows_of = _rows_by_key(key)
        no_rows = torch.zeros(0, dtype=torch.int64)
        detections, targets = [], []
        for image_id in sorted(copies):
            rows_of_copies = [rows_of.get(image_key, no_rows) for image_key in sorted(copies[image_id])]
            objects_of_copies = [rows[is_detection[rows] == 0] for rows in rows_of_copies]
            rows, objects = rows_of_copies[0], objects_of_copies[0]
            found = rows[is_detection[rows] == 1]
            for other in objects_of_copies[1:]:
                if not (torch.equal(boxes[objects], boxes[other]) and torch.equal(label[objects], label[other])):
                    raise _shared_id(image_id, len(objects), len(other))
            detections.append({"boxes": boxes[found, :4], "scores": boxes[found, 4], "labels": label[found]})
            targets.append({"boxes": boxes[objects, :4], "labels": label[objects], "ignored": ignored[objects]})
        return detections, targets

    def _begin(self) -> None:
        """Initialise each state with zero rows, so that it has the right shape even on a process without images."""
        self._updates = 0
        for name, (columns, dtype) in STATES.items():
            setattr(self, name, [torch.zeros(0, columns, dtype=dtype, device=self.device)])

    def _add_image(self, detected: Any, target: Any) -> None:
        found_boxes, found_labels = _boxes_and_labels("detections", detected, self.classes)
        scores = _one_for_each("detections", detected, "scores", found_labels)
        check_finite("scores", scores)
        boxes, labels = _boxes_and_labels("targets", target, self.classes)
        ignored = torch.zeros_like(labels)
        for name in ("difficult", "iscrowd"):
            if target.get(name) is not None:
                ignored |= _one_for_each("targets", target, name, labels) != 0
        key = rank() * MAX_IMAGES + self._updates
        self._updates += 1
        # An image without an id gets a unique id; the ids ascend, so that equal scores of such images keep their order.
        image_id = _image_id(target.get("image_id", LEAST_ID + key))
        self._images.append(torch.tensor([[key, image_id]], device=self.device))
        self._add_boxes(key, 0, boxes, torch.ones_like(boxes[:, 0]), labels, ignored)
        self._add_boxes(key, 1, found_boxes, scores, found_labels, torch.zeros_like(found_labels))

    def _add_boxes(
        self, key: int, is_detection: int, boxes: Tensor, scores: Tensor, labels: Tensor, ignored: Tensor
    ) -> None:
        """Add the detections or the objects of an image."""
        columns = [torch.full_like(labels, key), torch.full_like(labels, is_detection), labels, ignored]
        self._boxes.append(torch.cat([boxes, scores[:, None]], 1).detach().to(self.device, torch.float32))
        self._annotations.append(torch.stack(columns, 1).to(self.device, torch.int64))


def _boxes_and_labels(name: str, given: Any, classes: int) -> tuple[Float[Tensor, "box 4"], Int[Tensor, " box"]]:
    """The boxes and labels of one image; raises if they are invalid."""
    keys = {"detections": ("boxes", "labels", "scores"), "targets": ("boxes", "labels")}[name]
    for key in keys:
        if key not in given:
            rule = f"must have the keys {', '.join(keys)} for each image"
            raise InvalidValue(rule, argument=name, got=", ".join(map(str, given)))
        check_tensor(f"{name}[{key!r}]", given[key])
    boxes, labels = given["boxes"], given["labels"]
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise InvalidValue(f"of `{name}` must have shape (boxes, 4)", argument="boxes", got=tuple(boxes.shape))
    check_finite(f"{name}['boxes']", boxes)
    check_integers("labels", labels, len(boxes), "boxes")
    if len(labels) > 0 and not 1 <= int(labels.min()) <= int(labels.max()) <= classes:
        got = f"{int(labels.min())} to {int(labels.max())}"
        raise InvalidValue(
            f"of `{name}` must be from 1 to {classes}", argument="labels", got=got, cure="0 is background"
        )
    return boxes, labels.to(torch.int64)  # 64 bits, because labels are stored together with keys of images


def _one_for_each(name: str, given: Mapping[str, Any], key: str, labels: Tensor) -> Tensor:
    """The tensor with this key; raises unless it has one value for each box."""
    values: Tensor = given[key]
    check_tensor(f"{name}[{key!r}]", values)
    if values.shape != labels.shape:
        rule = f"must have shape {tuple(labels.shape)}, one for each box"
        raise InvalidValue(rule, argument=key, got=tuple(values.shape))
    return values


def _image_id(value: Any) -> int:
    try:
        image_id = operator.index(value)
    except TypeError:
        raise InvalidType("must have an integer as `image_id`", argument="targets", got=short_repr(value)) from None
    if not LEAST_ID <= image_id < -LEAST_ID:
        raise InvalidValue("must have an `image_id` of at most 64 bits", argument="targets", got=short_repr(value))
    return image_id


def _shared_id(image_id: int, objects: int, others: int) -> InvalidValue:
    rule = "with the same `image_id` must be the same image"
    got = f"other objects for a second image with the id {image_id} ({objects} and {others} objects)"
    cure = "if two data sets both count from 0, add the length of the first to the ids of the second"
    return InvalidValue(rule, argument="targets", got=got, cure=cure)


def _rows_by_key(key: Int[Tensor, " row"]) -> dict[int, Int[Tensor, " _"]]:
    """Map each key to the indices of the rows with this key, in order."""
    order = key.argsort(stable=True)
    keys, counts = torch.unique_consecutive(key[order], return_counts=True)
    return dict(zip(keys.tolist(), order.split(counts.tolist())))


class COCOMetrics(DetectionMetric):
    """AP, AP50, and the AP50 of each class, by COCO's rules.

    An image that several processes evaluate, because a distributed sampler repeats it, is recognised by the `image_id`
    of its target and counted once.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if `classes` is out of its range; in `update`, if shapes do not match, a label is out of its range,
            or a score or a box is not finite; in `compute`, if images with the same `image_id` have other objects.
        TypeError: if `classes` is not an integer; in `update`, if an entry of a detection or a target is not a tensor.
        ModuleNotFoundError: if faster-coco-eval is not installed.

    Example:
        >>> import torch
        >>> from lightning_retrieval.detection import COCOMetrics
        >>> metrics = COCOMetrics(2)
        >>> box = torch.tensor([[0.0, 0.0, 10.0, 10.0]])
        >>> detected = {"boxes": box + 1, "scores": torch.tensor([0.8]), "labels": torch.tensor([2])}
        >>> metrics.update([detected], [{"boxes": box, "labels": torch.tensor([2])}])
        >>> result = metrics.compute()
        >>> result["AP50"], result["AP50_per_class"]  # the overlap is 81 / 119; there is no object of class 1
        (tensor(1.), tensor([nan, 1.]))

    Cost:
        Each detection and each object takes 52 bytes.

    Relations:
        `VOCMetrics` has the rules of Pascal VOC, which has difficult objects.
    """

    def __init__(self, classes: int, **kwargs: Any) -> None:
        super().__init__(classes, **kwargs)
        missing = 'COCO\'s rules need faster-coco-eval: pip install "lightning-retrieval[detection]".'
        with optional_import(missing, "COCOMetrics"):
            import faster_coco_eval  # noqa: F401

    def compute(self) -> dict[str, Tensor]:
        """`AP`, `AP50` and `AP50_per_class`, NaN for a class without objects. Without any objects, all are NaN."""
        from torchmetrics.detection import MeanAveragePrecision

        detections, targets = self.images_once()
        counted = sum(int((target["ignored"] == 0).sum()) for target in targets)
        if counted == 0:  # torchmetrics would return -1 or, without any image, raise
            nothing = torch.tensor(torch.nan, device=self.device)
            return {"AP": nothing, "AP50": nothing, "AP50_per_class": nothing.repeat(self.classes)}
        metric = MeanAveragePrecision(
            iou_thresholds=OVERLAPS,
            rec_thresholds=RECALLS,
            backend="faster_coco_eval",
            extended_summary=True,
            sync_on_compute=False,
        )
        metric.warn_on_many_detections = False
        metric.update(detections, [{**target, "iscrowd": target["ignored"]} for target in targets])
        result = metric.compute()
        per_class = _average_precision_per_class(result["precision"], result["classes"].flatten(), self.classes)
        values = {"AP": result["map"], "AP50": result["map_50"], "AP50_per_class": per_class}
        return {name: value.to(self.device) for name, value in values.items()}


def _average_precision_per_class(
    precision: Float[Tensor, "threshold recall found area cap"], labels: Int[Tensor, " found"], classes: int
) -> Float[Tensor, " class"]:
    """AP50 of each class from COCO's table of precisions, which is -1 for a class without objects."""
    first_threshold = precision[0, :, :, 0, -1].float()  # (recall, class)
    values = torch.full((classes,), torch.nan)
    for column, label in enumerate(labels.tolist()):
        of_class = first_threshold[:, column]
        if bool((of_class > -1).any()):
            values[label - 1] = of_class.mean()
    return values
