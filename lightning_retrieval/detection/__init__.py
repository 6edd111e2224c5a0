"""Detectors trained for Average Precision (RaMBO): the loss, RoI heads and a module that use it, and metrics.

`DetectionModule` is imported only when it is first used, because the loss and the heads do not need Lightning.
"""

from typing import TYPE_CHECKING, Any

from lightning_retrieval.detection.ap_loss import DetectionAPLoss
from lightning_retrieval.detection.metric import COCOMetrics
from lightning_retrieval.detection.pyramid import PyramidFasterRCNN
from lightning_retrieval.detection.roi_heads import RankedRoIHeads
from lightning_retrieval.detection.tiny import TinyFasterRCNN
from lightning_retrieval.detection.voc import VOCMetrics

if TYPE_CHECKING:
    from lightning_retrieval.detection.module import DetectionModule

__all__ = [
    "COCOMetrics",
    "DetectionAPLoss",
    "DetectionModule",
    "PyramidFasterRCNN",
    "RankedRoIHeads",
    "TinyFasterRCNN",
    "VOCMetrics",
]


def __getattr__(name: str) -> Any:
    if name == "DetectionModule":
        from lightning_retrieval.detection.module import DetectionModule

        return DetectionModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
