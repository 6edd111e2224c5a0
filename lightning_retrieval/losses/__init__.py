"""Losses over ranked lists: each a paper's formula on one base class."""

from lightning_retrieval.losses.base import RetrievalLoss
from lightning_retrieval.losses.smooth_ap import SmoothAPLoss

__all__ = ["RetrievalLoss", "SmoothAPLoss"]
