"""Detectors trained for Average Precision (RaMBO)."""

from lightning_retrieval.detection.ap_loss import DetectionAPLoss

__all__ = ["DetectionAPLoss"]
