"""Valid calls of the detectors' loss, heads, modules and metrics."""

import torch

from lightning_retrieval.detection import DetectionAPLoss
from tests.awkward_values.calls import Call

LOGITS = torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])


def loss_settings():
    return {
        "lambda_": 0.5, "margin": 0.1, "interclass_coef": 0.3, "batch_memory": 2, "weight": 5.0, "gather": True
    }  # fmt: skip


def loss_of_batch(loss):
    return loss(LOGITS, torch.tensor([1, 2, 0, 2]))


CALLS = {
    "DetectionAPLoss": [
        Call("DetectionAPLoss", DetectionAPLoss, loss_settings, use=loss_of_batch),
        Call(
            "DetectionAPLoss",
            lambda class_logits, labels: DetectionAPLoss()(class_logits, labels),
            lambda: {"class_logits": LOGITS.clone(), "labels": torch.tensor([1, 2, 0, 2])},
            signature=DetectionAPLoss.forward,
        ),
    ],
}
