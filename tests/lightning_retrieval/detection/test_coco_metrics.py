"""COCO's AP by torchmetrics against loops over the definition, pycocotools, and two processes."""

import contextlib
import io
import sys

import pytest
import torch
from torchvision.ops import box_iou

from lightning_retrieval.detection import COCOMetrics

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


def ap_by_loops(detections, targets, label, threshold):
    """COCO's AP of one class at one threshold: 101 levels of recall, each object found once, by the best detection."""
    rows, objects = [], 0
    for image, (found, target) in enumerate(zip(detections, targets)):
        objects += int((target["labels"] == label).sum())
        for box, score in zip(found["boxes"][found["labels"] == label], found["scores"][found["labels"] == label]):
            rows.append((-score.item(), image, box))
    if objects == 0:
        return None
    used, hits = set(), []
    for _, image, box in sorted(rows, key=lambda row: row[:2]):
        best, best_iou = None, threshold
        for number, (other, its_label) in enumerate(zip(targets[image]["boxes"], targets[image]["labels"])):
            iou = box_iou(box[None], other[None]).item()
            if its_label == label and (image, number) not in used and iou >= best_iou:
                best, best_iou = number, iou
        hits.append(best is not None)
        used.add((image, best))
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    recalls = [sum(hits[: i + 1]) / objects for i in range(len(hits))]
    total = 0.0
    for level in range(101):
        reached = [p for p, r in zip(precisions, recalls) if r >= level / 100 - 1e-12]
        total += max(reached, default=0.0)
    return total / 101


def test_values_are_those_of_loops():
    detections, targets = make_images(30)
    metrics = COCOMetrics(CLASSES)
    metrics.update(detections[:11], targets[:11])
    metrics.update(detections[11:], targets[11:])
    result = metrics.compute()
    thresholds = [0.5 + 0.05 * step for step in range(10)]
    table = [[ap_by_loops(detections, targets, k, t) for k in range(1, CLASSES)] for t in thresholds]
    assert 0.1 < result["AP"] < result["AP50"] < 0.9
    assert result["AP50_per_class"][:-1].tolist() == pytest.approx(table[0], abs=1e-6)
    assert result["AP50_per_class"][-1].isnan()
    assert result["AP50"].item() == pytest.approx(sum(table[0]) / 3, abs=1e-6)
    assert result["AP"].item() == pytest.approx(sum(map(sum, table)) / 30, abs=1e-6)


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
    return evaluation.stats[:2]


def test_values_are_those_of_pycocotools():
    pytest.importorskip("pycocotools")
    for seed in range(40):
        detections, targets = small_set(seed)
        metrics = COCOMetrics(CLASSES)
        metrics.update(detections, targets)
        result = metrics.compute()
        expected = ap_by_pycocotools(detections, targets)
        assert [result["AP"].item(), result["AP50"].item()] == pytest.approx(expected, abs=1e-6), seed


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


def ap_of_shards(rank, world_size):
    """The AP of seven images of which two processes evaluate eight: the sampler repeats the first one."""
    detections, targets = make_images(7)
    order = [0, 1, 2, 3, 4, 5, 6, 0][rank::world_size] if world_size > 1 else range(7)
    metrics = COCOMetrics(CLASSES)
    for i in order:
        metrics.update([detections[i]], [targets[i]])
    return {name: value.tolist() for name, value in metrics.compute().items()}


def ap_of_one_process(rank, world_size):
    """The other process evaluates no image."""
    metrics = COCOMetrics(CLASSES)
    if rank == 0:
        metrics.update(*make_images(7))
    return metrics.compute()["AP"].item()


def test_processes_give_the_value_of_one(run_processes):
    alone = ap_of_shards(0, 1)
    shards = run_processes(ap_of_shards, 2)
    assert str(shards) == str([alone, alone])  # NaN is not equal to itself
    assert run_processes(ap_of_one_process, 2) == [alone["AP"]] * 2


@pytest.mark.refusal
def test_what_is_invalid(monkeypatch):
    detections, targets = make_images(2)
    with pytest.raises(ValueError, match=r"^COCOMetrics: `detections` must be one for each target, got 1 for 2"):
        COCOMetrics(CLASSES).update(detections[:1], targets)
    detections[0]["scores"] = torch.full_like(detections[0]["scores"], torch.nan)
    with pytest.raises(ValueError, match=r"^COCOMetrics: `scores` must hold finite numbers only"):
        COCOMetrics(CLASSES).update(detections, targets)
    with pytest.raises(ValueError, match=r"^COCOMetrics: `classes` must be an integer >= 1"):
        COCOMetrics(0)
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ImportError, match=r"^COCOMetrics: .*pip install \"lightning-retrieval\[detection\]\""):
        COCOMetrics(2)
