"""Metrics of detectors against pycocotools and loops as in the VOC kit, on any number of processes."""

import contextlib
import io
import math

import pytest
import torch

from lightning_retrieval.detection import COCOMetrics, VOCMetrics

CLASSES = 4


def make_images(count, seed=0):
    """Detections near the objects and elsewhere; no object is of the last class."""
    generator = torch.Generator().manual_seed(seed)
    detections, targets = [], []
    for image in range(count):
        objects = int(torch.randint(0, 5, (), generator=generator))
        corner = 60 * torch.rand(objects, 2, generator=generator)
        boxes = torch.cat([corner, corner + 10 + 20 * torch.rand(objects, 2, generator=generator)], 1)
        labels = torch.randint(1, CLASSES, (objects,), generator=generator)
        found = torch.cat([boxes + torch.randn(objects, 4, generator=generator), boxes + 40])
        wrong = torch.randint(1, CLASSES + 1, (2 * objects,), generator=generator)
        is_wrong = torch.rand(2 * objects, generator=generator) < 0.2
        guesses = torch.where(is_wrong, wrong, labels.repeat(2))
        scores = torch.rand(2 * objects, generator=generator)
        detections.append({"boxes": found, "scores": scores, "labels": guesses})
        targets.append({"boxes": boxes, "labels": labels, "image_id": torch.tensor(10 * image + 3)})
    return detections, targets


def small_set(seed):
    """Integer boxes and numbers of objects with a factor of 100, so that overlaps and recalls equal thresholds."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    objects, images = (4, 5, 8, 10, 20, 25, 40, 50)[int(integers(0, 8))], int(integers(1, 5))
    detections, targets = [], []
    for count in torch.arange(objects).tensor_split(images):
        corner = integers(0, 60, len(count), 2)
        boxes = torch.cat([corner, corner + integers(4, 21, len(count), 2)], 1)
        labels = integers(1, CLASSES, len(count))
        found = torch.cat([boxes + integers(-1, 2, len(count), 4), boxes.flip(0)])
        scores = integers(1, 100, len(found)) / 128  # some are equal
        ignored = integers(0, 8, len(count)) == 0
        detections.append({"boxes": found.float(), "scores": scores, "labels": torch.cat([labels, labels])})
        targets.append({"boxes": boxes.float(), "labels": labels, "iscrowd": ignored})
    return detections, targets


def coco_rows(images):
    """The boxes of all images in COCO's format."""
    rows = []
    for number, image in enumerate(images):
        corners = image["boxes"].double()
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
        columns = [image["labels"].tolist(), boxes]
        columns += [image[name].tolist() if name in image else [0] * len(boxes) for name in ("scores", "iscrowd")]
        for label, box, score, ignored in zip(*columns):
            row = {"id": len(rows) + 1, "image_id": number, "category_id": label, "bbox": box, "score": score}
            rows.append({**row, "area": box[2] * box[3], "iscrowd": int(ignored)})
    return rows


def ap_by_pycocotools(detections, targets):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, found = COCO(), COCO()
    with contextlib.redirect_stdout(io.StringIO()):
        for coco, rows in ((truth, coco_rows(targets)), (found, coco_rows(detections))):
            images = [{"id": number} for number in range(len(targets))]
            categories = [{"id": label} for label in range(1, CLASSES + 1)]
            coco.dataset = {"info": {}, "images": images, "categories": categories, "annotations": rows}
            coco.createIndex()
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precisions = evaluation.eval["precision"][0, :, :, 0, -1]  # at an overlap of .5: recall, class
    return [*evaluation.stats[:2], *precisions.mean(0)]


def test_values_are_those_of_pycocotools():
    pytest.importorskip("pycocotools")
    for seed in range(30):
        detections, targets = small_set(seed)
        metrics = COCOMetrics(CLASSES)
        metrics.update(detections, targets)
        result = metrics.compute()
        expected = ap_by_pycocotools(detections, targets)
        found = [result["AP"].item(), result["AP50"].item(), *result["AP50_per_class"].nan_to_num(-1).tolist()]
        assert found == pytest.approx(expected, abs=1e-6), seed


@pytest.mark.parametrize("images", [0, 1, 4])
def test_ap_without_an_object_that_counts_is_nan(images):
    detections, targets = make_images(images)
    for target in targets:
        target["iscrowd"] = torch.ones_like(target["labels"])
    metrics = COCOMetrics(CLASSES)
    metrics.update(detections, targets)
    result = metrics.compute()
    assert {name: value.shape for name, value in result.items()} == {"AP": (), "AP50": (), "AP50_per_class": (CLASSES,)}
    assert all(bool(value.isnan().all()) for value in result.values())


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


def columns(rows, image):
    """Both numbers of the rows of an image, and their boxes of inclusive pixels in continuous coordinates."""
    chosen = [row for row in rows if row[0] == image]
    boxes = torch.tensor([row[3] for row in chosen], dtype=torch.float64).reshape(-1, 4)
    numbers = torch.tensor([row[1:3] for row in chosen], dtype=torch.float32).reshape(-1, 2)
    return *numbers.T, boxes - torch.tensor([1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("seed", range(5))
def test_as_the_development_kit(seed, threshold):
    detections, objects = random_case(seed)
    for eleven_points in (True, False):
        metrics = VOCMetrics(3, iou_threshold=threshold, eleven_points=eleven_points)
        for image in range(6):
            scores, labels, boxes = columns(detections, image)
            of_objects, difficult, object_boxes = columns(objects, image)
            found = {"boxes": boxes, "scores": scores, "labels": labels.long()}
            target = {"boxes": object_boxes, "labels": of_objects.long(), "difficult": difficult.bool()}
            metrics.update([found], [target])
        settings = (threshold, eleven_points)
        expected = [development_kit(detections, objects, class_, *settings) for class_ in (1, 2, 3)]
        found = metrics.compute()[f"AP{100 * threshold:.0f}_per_class"]
        assert found.tolist() == pytest.approx(expected, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("eleven_points", [True, False])
def test_a_class_without_detections_is_0_and_one_without_objects_nan(eleven_points):
    metrics = VOCMetrics(2, eleven_points=eleven_points)
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long)}
    metrics.update([nothing], [target()])
    assert metrics.compute()["AP50_per_class"].tolist() == pytest.approx([0, math.nan], nan_ok=True)


@pytest.fixture(scope="module")
def images():
    """Seven images; in image 5 there is no object, and nothing is found in image 4."""
    detections, targets = make_images(7)
    for number, target in enumerate(targets):
        target["difficult"] = target["labels"] == number
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    targets[5] = {**targets[5], **nothing, "difficult": torch.zeros(0)}
    detections[4] = {**nothing, "scores": torch.zeros(0)}
    return detections, targets


def evaluated(metrics, images, numbers):
    """The values of some of the images; what was evaluated before leaves nothing."""
    detections, targets = images
    metrics.update(detections[:2], targets[:2])
    metrics.reset()
    for number in numbers:
        metrics.update([detections[number]], [targets[number]])
    return metrics.compute()


def test_mean_is_over_the_classes_with_objects(images):
    result = evaluated(VOCMetrics(CLASSES), images, range(7))
    per_class = [value for value in result["AP50_per_class"].tolist() if not math.isnan(value)]
    assert 0 < result["AP50"] < 1
    assert result["AP50"].item() == pytest.approx(sum(per_class) / len(per_class))
    exact = evaluated(VOCMetrics(CLASSES, eleven_points=False), images, range(7))
    assert not torch.equal(result["AP50"], exact["AP50"])


METRICS = [COCOMetrics, VOCMetrics]


@pytest.mark.parametrize("metric", METRICS)
def test_order_and_repetition_of_images_do_not_matter(metric, images):
    expected = evaluated(metric(CLASSES), images, range(7))
    again = evaluated(metric(CLASSES), images, [6, 3, 0, 1, 5, 2, 4, 3, 0])
    torch.testing.assert_close(again, expected, rtol=0, atol=0, equal_nan=True)


def evaluated_on(rank, world_size, images):
    """A sampler has repeated image 0; the last process has none. Labels of 8 bits are as good as others."""
    shards = [[0, 2, 4, 6, 0], [1, 3, 5, 2], []]
    images = [[{**image, "labels": image["labels"].to(torch.uint8)} for image in side] for side in images]
    return [evaluated(metric(CLASSES), images, shards[rank]) for metric in METRICS]


def test_three_processes_have_the_result_of_one(run_processes, images):
    expected = [evaluated(metric(CLASSES), images, range(7)) for metric in METRICS]
    for results in run_processes(evaluated_on, 3, images):
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.refusal
@pytest.mark.parametrize(("metric", "change"), [(COCOMetrics, "boxes"), (VOCMetrics, "labels"), (VOCMetrics, "fewer")])
def test_two_images_with_one_id_raise(metric, change):
    """Such as the images of two data sets that both count from 0."""
    detections, targets = make_images(7)
    number = next(index for index, target in enumerate(targets) if len(target["labels"]) > 1)
    other = dict(targets[number])
    if change == "boxes":
        other["boxes"] = other["boxes"] + 1
    elif change == "labels":
        other["labels"] = other["labels"] % CLASSES + 1
    else:
        other |= {name: other[name][1:] for name in ("boxes", "labels")}
    metrics = metric(CLASSES)
    metrics.update(detections, targets)
    metrics.update([detections[number]], [other])
    with pytest.raises(ValueError, match=f"{metric.__name__}: .*{10 * number + 3}"):
        metrics.compute()


def test_equal_scores_of_two_images_are_ranked_by_the_ids():
    box, label = torch.tensor([[0.0, 0.0, 10.0, 10.0]]), torch.tensor([1])
    items = []
    for number, found in ((0, box + 50), (1, box)):  # the first detection is false
        detected = {"boxes": found, "scores": torch.tensor([0.5]), "labels": label}
        items.append((detected, {"boxes": box, "labels": label, "image_id": number}))
    for order in (items, items[::-1]):
        metrics = VOCMetrics(1, eleven_points=False)
        for detected, target in order:
            metrics.update([detected], [target])
        assert metrics.compute()["AP50"] == 0.25  # the true one has rank 2 and finds one of two objects


BOXES = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 40.0, 50.0]])


def detected(**changes):
    return {"boxes": BOXES, "scores": torch.tensor([0.6, 0.9]), "labels": torch.tensor([1, 1]), **changes}


def target(**changes):
    return {"boxes": BOXES[:1], "labels": torch.tensor([1]), "image_id": 3, **changes}


@pytest.mark.parametrize(("metric", "name"), [(COCOMetrics, "difficult"), (VOCMetrics, "iscrowd")])
def test_an_ignored_object_is_neither_found_nor_missed(metric, name):
    objects = {"boxes": BOXES, "labels": torch.tensor([1, 1])}
    other = {"difficult": "iscrowd", "iscrowd": "difficult"}[name]  # an object is ignored if one of both flags is set
    for ignored in ([False, True], [True, False], [False, False]):
        metrics = metric(2)
        flags = {name: torch.tensor(ignored), other: torch.zeros(2)}
        metrics.update([detected()], [target(**objects, **flags)])
        assert metrics.compute()["AP50"] == pytest.approx(1)
    one_found = detected(boxes=BOXES[:1], scores=torch.tensor([0.6]), labels=torch.tensor([1]))
    missed, ignored = metric(2), metric(2)
    missed.update([one_found], [target(**objects)])
    ignored.update([one_found], [target(**objects, **{name: torch.tensor([False, True])})])
    assert missed.compute()["AP50"] < 0.6
    assert ignored.compute()["AP50"] == pytest.approx(1)
