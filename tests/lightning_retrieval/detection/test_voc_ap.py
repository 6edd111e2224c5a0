"""AP of detections against a plain loop with the rules of the VOC development kit."""

import math

import pytest
import torch

from lightning_retrieval.detection.voc import Outcome, detection_outcomes, voc_average_precision


def overlap_of_pixels(a, b):
    """Intersection over union of two boxes of inclusive pixels, as the development kit computes it."""
    left, top, right, bottom = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    width, height = right - left + 1, bottom - top + 1
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def development_kit(detections, objects, class_, threshold, eleven_points):
    """AP of one class: detections (image, score, label, box), objects (image, label, difficult, box)."""
    mine = [found for found in detections if found[2] == class_]
    mine.sort(key=lambda found: -found[1])
    taken = set()
    true, false = [], []
    for image, _, _, box in mine:
        best, best_object = -math.inf, None
        for position, (other_image, label, _, other) in enumerate(objects):
            if other_image == image and label == class_ and overlap_of_pixels(box, other) > best:
                best, best_object = overlap_of_pixels(box, other), position
        is_true = is_false = 0
        if best >= threshold:
            if not objects[best_object][2]:
                is_true, is_false = int(best_object not in taken), int(best_object in taken)
                taken.add(best_object)
        else:
            is_false = 1
        true.append(is_true)
        false.append(is_false)
    count = sum(label == class_ and not difficult for _, label, difficult, _ in objects)
    if count == 0:
        return math.nan
    recall, precision = [], []
    for end in range(1, len(mine) + 1):
        hits = sum(true[:end])
        recall.append((hits, count))
        precision.append(hits / max(1, hits + sum(false[:end])))
    if eleven_points:
        points = [[p for (hits, n), p in zip(recall, precision) if 10 * hits >= t * n] for t in range(11)]
        return sum(max(reached, default=0) for reached in points) / 11
    area, earlier = 0.0, 0.0
    for position, (hits, n) in enumerate(recall):
        area += (hits / n - earlier) * max(precision[position:])
        earlier = hits / n
    return area


def random_case(seed):
    """Detections and objects of six images with boxes of inclusive pixels, a third of the objects difficult."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    objects, detections = [], []
    for image in range(6):
        for _ in range(integer(0, 6)):
            left, top = integer(1, 60), integer(1, 60)
            box = (left, top, left + integer(5, 30), top + integer(5, 30))
            objects.append((image, integer(1, 4), integer(0, 3) == 0, box))
        for _ in range(integer(0, 30)):
            left, top = integer(1, 60), integer(1, 60)
            box = (left, top, left + integer(5, 30), top + integer(5, 30))
            near = [other for other in objects if other[0] == image]
            label = integer(1, 4)
            if near and integer(0, 3):
                chosen = near[integer(0, len(near))]
                box = tuple(value + integer(-2, 3) for value in chosen[3])
                label = chosen[1]
            detections.append((image, integer(0, 40) / 40, label, box))
    return detections, objects


def continuous(boxes):
    """Boxes of inclusive pixels, counted from 1, in continuous coordinates."""
    return torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4) - torch.tensor([1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("seed", range(5))
def test_as_the_development_kit(seed, threshold):
    detections, objects = random_case(seed)
    outcomes = []
    for image in range(6):
        found = [detection for detection in detections if detection[0] == image]
        present = [thing for thing in objects if thing[0] == image]
        outcomes += detection_outcomes(
            continuous([detection[3] for detection in found]),
            torch.tensor([detection[1] for detection in found]),
            torch.tensor([detection[2] for detection in found], dtype=torch.int64),
            continuous([thing[3] for thing in present]),
            torch.tensor([thing[1] for thing in present], dtype=torch.int64),
            torch.tensor([thing[2] for thing in present], dtype=torch.bool),
            iou_threshold=threshold,
        ).tolist()
    for class_ in (1, 2, 3):
        chosen = [position for position, detection in enumerate(detections) if detection[2] == class_]
        scores = torch.tensor([detections[position][1] for position in chosen])
        of_class = torch.tensor([outcomes[position] for position in chosen], dtype=torch.int64)
        count = sum(label == class_ and not difficult for _, label, difficult, _ in objects)
        for eleven_points in (True, False):
            expected = development_kit(detections, objects, class_, threshold, eleven_points)
            value = voc_average_precision(scores, of_class, count, eleven_points=eleven_points)
            assert value == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_cases_cover_every_outcome():
    seen = set()
    for seed in range(12):
        detections, objects = random_case(seed)
        found = [detection for detection in detections if detection[0] == 0]
        present = [thing for thing in objects if thing[0] == 0]
        seen |= set(
            detection_outcomes(
                continuous([detection[3] for detection in found]),
                torch.tensor([detection[1] for detection in found]),
                torch.tensor([detection[2] for detection in found], dtype=torch.int64),
                continuous([thing[3] for thing in present]),
                torch.tensor([thing[1] for thing in present], dtype=torch.int64),
                torch.tensor([thing[2] for thing in present], dtype=torch.bool),
            ).tolist()
        )
    assert seen == set(Outcome)


def test_without_detections_and_without_objects():
    nothing = torch.empty(0)
    assert voc_average_precision(nothing, nothing.long(), 3, eleven_points=True) == 0
    assert voc_average_precision(nothing, nothing.long(), 3, eleven_points=False) == 0
    assert math.isnan(voc_average_precision(nothing, nothing.long(), 0, eleven_points=True))
