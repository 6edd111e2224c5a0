"""Average Precision of a detector by the rules of COCO, for any number of processes.

COCO averages AP over ten thresholds of overlap, from 0.5 to 0.95; AP50 has the first one alone. Precision is
interpolated at 101 levels of recall; at most 100 detections of an image count; objects with `iscrowd` are ignored. A
class without objects has no AP, and is skipped in the mean. torchmetrics' `MeanAveragePrecision` computes all of it.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.detection.detection_metric import DetectionMetric, Images
from lightning_retrieval.optional_packages import optional_import

# As in pycocotools, in float64: an overlap or a recall often equals one of them, and torchmetrics' are float32.
OVERLAPS = np.linspace(0.5, 0.95, 10).tolist()
RECALLS = np.linspace(0.0, 1.0, 101).tolist()


class COCOMetrics(DetectionMetric):
    """AP, AP50, and the AP50 of each class, by COCO's rules.

    An image that several processes evaluate, because a distributed sampler repeats it, is counted once, by the
    `image_id` of its target.

    Args:
        classes: number of classes, >= 1, with labels from 1; 0 is background.
        kwargs: arguments of `torchmetrics.Metric`.

    Raises:
        ValueError: if `classes` is out of its range; in `update`, if shapes do not fit, a label is out of its range, or
            a score or a box is not finite.
        TypeError: if `classes` is not an integer; in `update`, if a detection or a target is not a mapping of tensors.
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
        52 bytes for each detection and each object.

    Relations:
        `VOCMetrics` has the rules of Pascal VOC, which has difficult objects.
    """

    def __init__(self, classes: int, **kwargs: Any) -> None:
        super().__init__(classes, **kwargs)
        _check_backend()

    def compute(self) -> dict[str, Tensor]:
        """`AP`, `AP50` and `AP50_per_class`, which is NaN for a class without objects; all are if no class has any."""
        found = self._found(*self.images_once())
        return {name: value.to(self.device) for name, value in found.items()}

    def _found(self, detections: Images, targets: Images) -> dict[str, Tensor]:
        from torchmetrics.detection import MeanAveragePrecision

        counted = sum(int((target["ignored"] == 0).sum()) for target in targets)
        if counted == 0:  # for which torchmetrics has -1 or, without any image, an error
            nothing = torch.tensor(torch.nan)
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
        return {"AP": result["map"], "AP50": result["map_50"], "AP50_per_class": per_class}


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


def _check_backend() -> None:
    with optional_import(
        'COCOMetrics: COCO\'s rules need faster-coco-eval: pip install "lightning-retrieval[detection]".'
    ):
        import faster_coco_eval  # noqa: F401
