"""Invalid settings, targets and detections of detectors, and wrong files of their data sets."""

import json
import math
from pathlib import Path

import torch
from PIL import Image
from torchvision.models.detection.retinanet import RetinaNet

from lightning_retrieval.datamodules import BoxIndex, BoxSet, CocoDetection, GlyphScenes, PascalVOC
from lightning_retrieval.detection import (
    COCOMetrics,
    DetectionAPLoss,
    DetectionModule,
    PyramidFasterRCNN,
    RankedRoIHeads,
    TinyFasterRCNN,
    VOCMetrics,
)
from lightning_retrieval.detection.tiny import TinyPyramid
from lightning_retrieval.invalid import InvalidType, InvalidValue, MissingFile
from tests.datamodules.detection.small_voc import write_voc
from tests.lightning_retrieval.detection.scenes import NOTHING, make_batch
from tests.quiet_trainer import quiet_trainer
from tests.refusals import refusal_test

BOX, BOXES = [1, 2, 5, 6], torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 40.0, 50.0]])


def tiny():
    return TinyFasterRCNN(2, width=4, image_size=64, rois_per_image=8)


def loss_of(labels):
    return DetectionAPLoss()(torch.zeros(3, 4), torch.tensor(labels))


def training_step(targets=None, **changes):
    """A step of a module with an image whose target has changes."""
    images, of_scene = make_batch([4], **changes)
    module = DetectionModule(tiny())
    batches = [(images, of_scene if targets is None else targets)]
    quiet_trainer(max_epochs=1).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))


def update(detections=None, targets=None, metric=VOCMetrics):
    found = {"boxes": BOXES, "scores": torch.tensor([0.6, 0.9]), "labels": torch.tensor([1, 1]), **(detections or {})}
    objects = {"boxes": BOXES[:1], "labels": torch.tensor([1]), "image_id": 3, **(targets or {})}
    metric(2).update([found], [objects])


def box_index(*objects, paths=("a",)):
    return BoxIndex(paths, objects, class_names=["cat", "dog"])


def read_box(write=None, box=BOX):
    """Read an image with a box; a function writes its file."""
    if write is not None:
        write(Path("a.png"))
    return BoxSet(BoxIndex(["a.png"], [([box], [1], [False])], class_names=["cat"]), ".", train=False)[0]


IMAGE, CAT = {"id": 7, "file_name": "a.png", "width": 20, "height": 10}, {"id": 18, "name": "cat"}
ANNOTATION = {"id": 1, "image_id": 7, "category_id": 18, "bbox": [2, 1, 7, 5.5], "iscrowd": 0}


def coco(**changes):
    """Read files of COCO's format, the first of which has changes."""
    whole = {"images": [IMAGE], "annotations": [ANNOTATION], "categories": [CAT]}
    Path("test.json").write_text(json.dumps(whole))
    if changes.get("train") is None:
        changes["train"] = json.dumps({**whole, **changes})
    Path("train.json").write_text(changes["train"])
    CocoDetection(".", train="train.json", test="test.json").prepare_data()


def coco_annotation(**changes):
    coco(annotations=[{**ANNOTATION, **changes}])


def voc(old="", new="", missing=None, listed=None):
    """Read Pascal VOC after a change of an annotation, with another image in its list, or without one of its files."""
    write_voc(Path())
    if listed is not None:
        Path("VOC2007/ImageSets/Main/trainval.txt").write_text(listed)
    annotation = Path("VOC2007/Annotations/000000.xml")
    annotation.write_text(annotation.read_text().replace(old, new, 1))
    if missing is not None:
        Path(missing).rename("away")
    PascalVOC(".").prepare_data()


TABLE = {
    "DetectionAPLoss": [
        (lambda: DetectionAPLoss(batch_memory=-1), InvalidValue, "batch_memory"),
        (lambda: DetectionAPLoss(interclass_coef=2), InvalidValue, "interclass_coef"),
        (lambda: loss_of([0, 4, 1]), InvalidValue, "labels"),
        (lambda: loss_of([0, 1]), InvalidValue, "labels"),
    ],
    "RankedRoIHeads": [
        (lambda: RankedRoIHeads(RetinaNet(TinyPyramid(4), 3), DetectionAPLoss()), InvalidType, "roi_heads"),
        (lambda: RankedRoIHeads(tiny(), DetectionAPLoss()), InvalidType, "roi_heads"),
    ],
    "DetectionModule": [
        (lambda: DetectionModule(RetinaNet(TinyPyramid(4), 3), DetectionAPLoss()), InvalidType, "detector"),
        (lambda: training_step([NOTHING, NOTHING]), InvalidValue, "targets"),
        (lambda: training_step(boxes=torch.tensor([[3.0, 3.0, 3.0, 9.0]])), InvalidValue, "boxes"),
        (lambda: training_step(boxes=torch.tensor([[3.0, 3.0, 65.0, 9.0]])), InvalidValue, "boxes"),
        (lambda: training_step(boxes=torch.tensor([[3.0, 3.0, math.nan, 9.0]])), InvalidValue, "boxes"),
        (lambda: training_step(labels=torch.tensor([3])), InvalidValue, "labels"),
        (lambda: training_step(labels=torch.tensor([1, 1])), InvalidValue, "targets"),
        (lambda: training_step(labels=torch.tensor([1.0])), InvalidType, "boxes"),
    ],
    "PyramidFasterRCNN": [
        (lambda: PyramidFasterRCNN(2, "resnet9", pretrained=False), InvalidValue, "backbone_name"),
        (lambda: PyramidFasterRCNN(2, "dla46_c", pretrained=False), InvalidValue, "backbone_name"),  # other strides
    ],
    "VOCMetrics": [
        (lambda: VOCMetrics(3, iou_threshold=50), InvalidValue, "iou_threshold"),
        (lambda: VOCMetrics(0), InvalidValue, "classes"),
        (lambda: update({"labels": torch.tensor([0, 1])}), InvalidValue, "labels"),
        (lambda: update({"scores": torch.tensor([math.inf, 1])}), InvalidValue, "scores"),
        (lambda: update({"scores": torch.ones(3)}), InvalidValue, "scores"),
        (lambda: update(targets={"difficult": torch.ones(2)}), InvalidValue, "difficult"),
        (lambda: update(targets={"boxes": BOXES[:1] * math.nan}), InvalidValue, "targets['boxes']"),
        (lambda: update(targets={"image_id": "a"}), InvalidType, "targets"),
        (lambda: VOCMetrics(2).update([{"boxes": BOXES}], [NOTHING]), InvalidValue, "detections"),
    ],
    "COCOMetrics": [(lambda: COCOMetrics(2).update([], [NOTHING]), InvalidValue, "detections")],
    "BoxIndex": [
        (lambda: box_index(paths=()), InvalidValue, "paths"),
        (lambda: box_index(([BOX], [1], [False]), paths=["b/../../a"]), InvalidValue, "paths"),
        (lambda: box_index(), InvalidValue, "objects"),  # none for the path
        (lambda: box_index(([BOX], [], [])), InvalidValue, "objects"),
        (lambda: box_index(([BOX], [0], [False])), InvalidValue, "objects"),  # the background
        (lambda: box_index(([BOX], [3], [False])), InvalidValue, "objects"),
        (lambda: box_index(([[5, 2, 5, 6]], [1], [False])), InvalidValue, "objects"),
    ],
    "BoxSet": [
        (lambda: read_box(), MissingFile, "", "a.png"),
        (lambda: read_box(lambda path: path.write_text("no image")), InvalidValue, "", "a.png"),
        (lambda: read_box(lambda path: Image.new("RGB", (1, 9)).save(path)), InvalidValue, ""),  # box beyond the image
    ],
    "CocoDetection": [
        (lambda: CocoDetection(".", train="a.json", test="b.json").prepare_data(), MissingFile, "root", "a.json"),
        (lambda: coco(train='{"images": [\n1,\n'), InvalidValue, "", "line 3"),
        (lambda: coco(images=[{"id": 7}]), InvalidValue, "", "file_name"),
        (lambda: coco(images=[{**IMAGE, "file_name": "../a.png"}]), InvalidValue, "paths", "../a.png"),
        (lambda: coco(annotations=[], categories=[{"id": 1, "name": "eel"}]), InvalidValue, "test", "cat"),
        (lambda: coco_annotation(bbox=[1, 2, -1, 3]), InvalidValue, "objects", "a.png"),
        (lambda: coco_annotation(bbox=[1, math.nan, 3, 3]), InvalidValue, "objects", "a.png"),
        (lambda: coco_annotation(image_id=8), InvalidValue, "", "8"),
        (lambda: coco_annotation(category_id=8), InvalidValue, "", "8"),
    ],
    "PascalVOC": [
        (lambda: PascalVOC(".", train_sets=["VOC2010"]), InvalidValue, "train_sets"),
        (lambda: PascalVOC(".", train_sets=[]), InvalidValue, "train_sets"),
        (lambda: PascalVOC(".").prepare_data(), MissingFile, "root"),
        (lambda: voc(missing="VOC2007/Annotations/000000.xml"), MissingFile, "", "000000.xml"),
        (lambda: voc(listed="../../../VOC2007/JPEGImages/000000"), InvalidValue, "", "line 1"),
        (lambda: voc("</object>", "</thing>"), InvalidValue, "", "000000.xml"),
        (lambda: voc("dog", "sofabed"), InvalidValue, "", "sofabed"),
        (lambda: voc("<xmin>2<", "<xmin>two<"), InvalidValue, "", "two"),
        (lambda: voc("<xmax>15<", "<xmax>1<"), InvalidValue, "objects", "000000.jpg"),
    ],
    "GlyphScenes": [
        (lambda: GlyphScenes(num_classes=43), InvalidValue, "num_classes"),
        (lambda: GlyphScenes(image_size=63), InvalidValue, "image_size"),
        (lambda: GlyphScenes(train_size=1), InvalidValue, "train_size"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
