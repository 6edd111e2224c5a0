"""Average Precision of a detector by the rules of COCO, for any number of processes.

COCO averages AP over ten thresholds of overlap, from 0.5 to 0.95; AP50 has the first one alone. Precision is
interpolated at 101 levels of recall; at most 100 detections of an image count; objects with `iscrowd` are ignored. A
class without objects has no AP, and is skipped in the mean. torchmetrics' `MeanAveragePrecision` computes all of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_retrieval.checks import check_finite, check_integer
from lightning_retrieval.distributed import rank

MAX_IMAGES = 1 << 40  # of one process, in one evaluation
STATES = {"_images": (2, torch.int64), "_boxes": (5, torch.float32), "_box_facts": (4, torch.int64)}


class COCOMetrics(Metric):
    """AP, AP50, and the AP50 of each class, by COCO's rules.

    An image that several processes evaluate, because a distributed sampler repeats it, is counted once, by the
    `image_id` of its target.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if `classes` is out of its range; in `update`, if there are not as many detections as targets, or a
            score is not finite.
        ImportError: if faster-coco-eval is not installed.

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
        52 bytes for each detection and each object.

    Relations:
        `VOCMetrics` has the rules of Pascal VOC, which has difficult objects.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    _images: list[Tensor]
    _boxes: list[Tensor]
    _box_facts: list[Tensor]

    def __init__(self, classes: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.classes = check_integer("COCOMetrics", "classes", classes, least=1)
        _check_backend()
        self._updates = 0
        for name in STATES:
            self.add_state(name, default=[], dist_reduce_fx="cat")
        self._begin()

    def update(self, detections: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add images.

        Args:
            detections: `boxes` (detections, 4), `scores` and `labels` of each image.
            targets: `boxes` (objects, 4), `labels`, and optionally `image_id` and `iscrowd` of each image.
        """
        if len(detections) != len(targets):
            raise ValueError(
                f"COCOMetrics: `detections` must be one for each target, got {len(detections)} for {len(targets)}."
            )
        for detection, target in zip(detections, targets):
            check_finite("COCOMetrics", "scores", detection["scores"])
            key = rank() * MAX_IMAGES + self._updates
            self._updates += 1
            # An image without an id gets one that no other image has.
            image_id = int(target.get("image_id", -1 - key))
            self._images.append(torch.tensor([[key, image_id]], device=self.device))
            crowd = target.get("iscrowd", torch.zeros_like(target["labels"]))
            self._add(key, 0, target, torch.ones_like(target["boxes"][:, 0]), crowd)
            self._add(key, 1, detection, detection["scores"], torch.zeros_like(detection["labels"]))

    def compute(self) -> dict[str, Tensor]:
        """`AP`, `AP50` and `AP50_per_class`, which is NaN for a class without objects."""
        from torchmetrics.detection import MeanAveragePrecision

        metric = MeanAveragePrecision(backend="faster_coco_eval", extended_summary=True, sync_on_compute=False)
        metric.warn_on_many_detections = False
        metric.update(*self._images_once())
        result = metric.compute()
        per_class = _average_precision_per_class(result["precision"], result["classes"].flatten(), self.classes)
        found = {"AP": result["map"], "AP50": result["map_50"], "AP50_per_class": per_class}
        return {name: value.to(self.device) for name, value in found.items()}

    def reset(self) -> None:
        """Forget all images."""
        super().reset()
        self._begin()

    def init_args(self) -> dict[str, Any]:
        """The constructor arguments, from which a checkpoint rebuilds the metric."""
        return {"classes": self.classes}

    def extra_repr(self) -> str:
        return f"classes={self.classes}"

    def _begin(self) -> None:
        """Begin each state with no row, so that a process without images has one of the right shape, too."""
        self._updates = 0
        for name, (columns, dtype) in STATES.items():
            setattr(self, name, [torch.zeros(0, columns, dtype=dtype, device=self.device)])

    def _add(self, key: int, is_detection: int, boxes: Mapping[str, Any], scores: Tensor, crowd: Tensor) -> None:
        """Add the detections or the objects of an image."""
        rows = torch.cat([boxes["boxes"], scores[:, None]], 1)
        labels = boxes["labels"]
        facts = [torch.full_like(labels, key), torch.full_like(labels, is_detection), labels, crowd]
        self._boxes.append(rows.to(self.device, torch.float32))
        self._box_facts.append(torch.stack(facts, 1).to(self.device, torch.int64))

    def _images_once(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Detections and targets of each image, in the order of the ids, without the copies of other processes."""
        images, boxes = dim_zero_cat(self._images).cpu(), dim_zero_cat(self._boxes).cpu()
        key, is_detection, label, crowd = dim_zero_cat(self._box_facts).cpu().unbind(1)
        copies: dict[int, list[int]] = {}
        for image_key, image_id in images.tolist():
            copies.setdefault(image_id, []).append(image_key)
        rows_of = _rows_by_key(key)
        detections, targets = [], []
        for image_id in sorted(copies):
            rows = rows_of.get(min(copies[image_id]), torch.zeros(0, dtype=torch.int64))
            found, objects = rows[is_detection[rows] == 1], rows[is_detection[rows] == 0]
            detections.append({"boxes": boxes[found, :4], "scores": boxes[found, 4], "labels": label[found]})
            targets.append({"boxes": boxes[objects, :4], "labels": label[objects], "iscrowd": crowd[objects]})
        return detections, targets


def _rows_by_key(key: Int[Tensor, " row"]) -> dict[int, Int[Tensor, " _"]]:
    """{key: its rows}, in their order."""
    order = key.argsort(stable=True)
    keys, counts = torch.unique_consecutive(key[order], return_counts=True)
    return dict(zip(keys.tolist(), order.split(counts.tolist())))


def _average_precision_per_class(
    precision: Float[Tensor, "threshold recall class area cap"], labels: Int[Tensor, " class"], classes: int
) -> Float[Tensor, " class"]:
    """AP50 of each class from COCO's table of precisions, which is -1 for a class without objects."""
    first_threshold = precision[0, :, :, 0, -1].float()  # (recall, class)
    values = torch.full((classes,), torch.nan)
    for column, label in enumerate(labels.tolist()):
        of_class = first_threshold[:, column]
        if bool((of_class > -1).any()):
            values[label - 1] = of_class.mean()
    return values


def _check_backend() -> None:
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError:
        raise ImportError(
            'COCOMetrics: COCO\'s rules need faster-coco-eval: pip install "lightning-retrieval[detection]".'
        ) from None
