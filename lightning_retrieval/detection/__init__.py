"""Detectors trained for Average Precision (RaMBO)."""

from lightning_retrieval.detection.ap_loss import DetectionAPLoss
from lightning_retrieval.detection.voc_metrics import VOCMetrics

__all__ = ["DetectionAPLoss", "VOCMetrics"]
