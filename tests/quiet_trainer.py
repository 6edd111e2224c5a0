"""A Trainer on one CPU without logs, checkpoints, progress bars and summaries, for short runs of tests."""

import pytorch_lightning as pl

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(**settings) -> pl.Trainer:
    """A Trainer with these settings, which may replace those of `QUIET`."""
    return pl.Trainer(**{**QUIET, **settings})
