"""Logging of values that are already the same on all processes."""

import re
import warnings
from collections.abc import Mapping

import pytorch_lightning as pl
from torch import Tensor


def log_without_sync(pl_module: pl.LightningModule, values: Mapping[str, Tensor]) -> None:
    """Log values that are equal on all processes; averaging them once more would change their last digits."""
    for name in values:
        # Lightning recommends sync_dist=True with several processes.
        warnings.filterwarnings("ignore", rf".*self\.log\('{re.escape(name)}', \.\.\., sync_dist=True")
    pl_module.log_dict(values, rank_zero_only=False, sync_dist=False)
