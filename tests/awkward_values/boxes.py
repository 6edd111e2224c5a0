"""Valid calls of the data modules with boxes and of the metrics of detectors."""

import torch

from lightning_retrieval.datamodules import BoxIndex, BoxSet, CocoDetection, PascalVOC, RandomBatchSampler
from lightning_retrieval.detection import VOCMetrics
from tests.awkward_values.calls import Call

OBJECTS = [([[1.0, 2.0, 3.0, 4.0]], [1], [False])]
SETTINGS = {"batch_size": 2, "eval_batch_size": 2, "num_workers": 0, "seed": 0, "pin_memory": False}


def index():
    return BoxIndex(["a.jpg"], OBJECTS, class_names=["cat"])


def detected():
    return {"boxes": torch.ones(1, 4), "scores": torch.ones(1), "labels": torch.tensor([1])}


def target():
    return {"boxes": torch.ones(1, 4), "labels": torch.tensor([1]), "image_id": 3}


def evaluate(**batch):
    metrics = VOCMetrics(3)
    metrics.update(**batch)
    return metrics.compute()["AP50"]


CALLS = {
    "BoxIndex": [
        Call("BoxIndex", BoxIndex, lambda: {"paths": ["a.jpg"], "objects": OBJECTS, "class_names": ["cat"]}, use=len),
    ],
    "BoxSet": [Call("BoxSet", BoxSet, lambda: {"index": index(), "root": ".", "train": True}, use=len)],
    "CocoDetection": [
        Call(
            "CocoDetection",
            CocoDetection,
            lambda: {"root": ".", "train": "train.json", "test": "test.json", "val": "val.json", **SETTINGS},
            use=lambda data: True,
        )
    ],
    "PascalVOC": [Call("PascalVOC", PascalVOC, lambda: {"root": ".", "train_sets": ["VOC2007"], **SETTINGS})],
    "RandomBatchSampler": [
        Call("RandomBatchSampler", RandomBatchSampler, lambda: {"num_images": 7, "batch_size": 3, "seed": 1}, use=list)
    ],
    "VOCMetrics": [
        Call("VOCMetrics", VOCMetrics, lambda: {"classes": 3, "iou_threshold": 0.5, "eleven_points": True}),
        Call(
            "VOCMetrics",
            evaluate,
            lambda: {"detections": [detected()], "targets": [target()]},
            signature=VOCMetrics.update,
        ),
    ],
}
