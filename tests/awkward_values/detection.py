"""Valid calls of the detectors' loss, heads, modules and metrics."""

import functools

import torch

from lightning_retrieval.detection import (
    COCOMetrics,
    DetectionAPLoss,
    DetectionModule,
    PyramidFasterRCNN,
    RankedRoIHeads,
    TinyFasterRCNN,
    VOCMetrics,
)
from tests.awkward_values.calls import Call

LOGITS = torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])


def loss_of_batch(loss):
    return loss(LOGITS, torch.tensor([1, 2, 0, 2]))


def detected():
    return {"boxes": torch.ones(1, 4), "scores": torch.ones(1), "labels": torch.tensor([1])}


def target():
    return {"boxes": torch.ones(1, 4), "labels": torch.tensor([1]), "image_id": 3}


def evaluation(metric):
    def evaluate(**batch):
        made = metric(3)
        made.update(**batch)
        return made.compute()["AP50"]

    arguments = {"detections": [detected()], "targets": [target()]}
    return Call(metric.__name__, evaluate, lambda: arguments, signature=metric.update)


def tiny(num_classes=2):
    return TinyFasterRCNN(num_classes, width=2)


def detect(detector):
    return detector.eval()([torch.rand(3, 32, 32)])[0]["boxes"]


def module_settings():
    return {
        "detector": tiny(),
        "loss": DetectionAPLoss(),
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "lr_scheduler_monitor": "val/AP50",
        "metrics": VOCMetrics(2),
        "seed": 3,
    }


def pyramid_settings():
    return {
        "num_classes": 2, "backbone_name": "test_resnet", "pretrained": False, "min_size": 32, "max_size": 32,
        "pyramid_channels": 8, "head_features": 8,
    }  # fmt: skip


CALLS = {
    "COCOMetrics": [Call("COCOMetrics", COCOMetrics, lambda: {"classes": 3}), evaluation(COCOMetrics)],
    "DetectionAPLoss": [
        Call("DetectionAPLoss", DetectionAPLoss, use=loss_of_batch),
        Call(
            "DetectionAPLoss",
            lambda class_logits, labels: DetectionAPLoss()(class_logits, labels),
            lambda: {"class_logits": LOGITS.clone(), "labels": torch.tensor([1, 2, 0, 2])},
            signature=DetectionAPLoss.forward,
        ),
    ],
    "DetectionModule": [Call("DetectionModule", DetectionModule, module_settings)],
    "PyramidFasterRCNN": [
        Call(
            "PyramidFasterRCNN",
            PyramidFasterRCNN,
            pyramid_settings,
            use=detect,
            without={"pretrained": "True would download weights"},
        )
    ],
    "RankedRoIHeads": [
        Call("RankedRoIHeads", RankedRoIHeads, lambda: {"roi_heads": tiny().roi_heads, "loss": DetectionAPLoss()})
    ],
    "TinyFasterRCNN": [Call("TinyFasterRCNN", TinyFasterRCNN, lambda: {"num_classes": 2, "width": 2}, use=detect)],
    "VOCMetrics": [
        Call("VOCMetrics", VOCMetrics, lambda: {"classes": 3}),
        evaluation(VOCMetrics),
    ],
}
