"""Average Precision of detections as Pascal VOC defines it (Everingham et al., IJCV 2010, section 4.2).

The rules are those of `VOCevaldet` in the development kit. Each detection belongs to the object of its class and image
that it overlaps most. If the two overlap by the threshold or more, the best-scored detection of the object is true and
the others are false; detections of a difficult object count neither way, and difficult objects need not be found.

Boxes are (left, top, right, bottom) in continuous coordinates. The kit's boxes are of inclusive pixels, counted from 1:
the overlaps are the same if 1 is subtracted from the left and the top.
"""

from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchvision.ops import box_iou


class Outcome(IntEnum):
    """What a detection counts as."""

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
    """The `Outcome` of each detection of one image; of equal scores, the first detection takes the object."""
    outcomes = torch.full_like(labels, Outcome.FALSE)
    if len(boxes) == 0 or len(object_boxes) == 0:
        return outcomes
    overlaps = box_iou(boxes, object_boxes)
    overlaps = overlaps.masked_fill(labels[:, None] != object_labels, -1)
    overlap, nearest = overlaps.max(1)
    found = overlap >= iou_threshold

    order = scores.argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    none_found = torch.full((len(object_boxes),), len(order), dtype=place.dtype, device=place.device)
    first_place = none_found.scatter_reduce(0, nearest[found], place[found], "amin")

    outcomes[found & (place == first_place[nearest])] = Outcome.TRUE
    outcomes[found & difficult[nearest]] = Outcome.IGNORED
    return outcomes


def voc_average_precision(
    scores: Float[Tensor, " detection"],
    outcomes: Int[Tensor, " detection"],
    objects: int,
    *,
    eleven_points: bool,
) -> float:
    """AP of one class over all images.

    Args:
        scores: of all detections of the class; equal ones are ranked in the order given.
        outcomes: the `Outcome` of each detection.
        objects: number of objects of the class that are not difficult.
        eleven_points: the rule until VOC 2009: the mean, over the recalls 0, 0.1, ..., 1, of the highest precision at
            this recall or a higher one. If False, the rule since VOC 2010: the mean of these precisions over all
            recalls, which is the area under the precision-recall curve made monotone.

    Returns:
        The AP, NaN without objects.

    Example:
        >>> import torch
        >>> from lightning_retrieval.detection.voc_ap import Outcome, voc_average_precision
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
    found = is_true.cumsum(0)  # true detections among the best, exact integers
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
