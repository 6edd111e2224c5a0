"""Losses over ranked lists: formulas of papers, and this library's log rank, on top of one base class."""

from lightning_retrieval.losses.base import LossSettings, RetrievalLoss
from lightning_retrieval.losses.binned_ap import FastAPLoss, QuantizedAPLoss
from lightning_retrieval.losses.blackbox import BlackboxAPLoss, BlackboxRecallLoss, blackbox_rank
from lightning_retrieval.losses.blackbox_map import BlackboxMAPLoss
from lightning_retrieval.losses.combined import NestedLoss, Schedule, WeightedSum
from lightning_retrieval.losses.hap import HAPLoss
from lightning_retrieval.losses.log_rank import LogRankLoss
from lightning_retrieval.losses.recall_at_k import RecallAtKLoss
from lightning_retrieval.losses.roadmap import CalibrationLoss, PairLoss, ROADMAPLoss, SupAPLoss
from lightning_retrieval.losses.smooth_ap import SmoothAPLoss

__all__ = [
    "BlackboxAPLoss",
    "BlackboxMAPLoss",
    "BlackboxRecallLoss",
    "CalibrationLoss",
    "FastAPLoss",
    "HAPLoss",
    "LogRankLoss",
    "LossSettings",
    "NestedLoss",
    "PairLoss",
    "QuantizedAPLoss",
    "ROADMAPLoss",
    "RecallAtKLoss",
    "RetrievalLoss",
    "Schedule",
    "SmoothAPLoss",
    "SupAPLoss",
    "WeightedSum",
    "blackbox_rank",
]
