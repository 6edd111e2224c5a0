"""Hides messages of Lightning and PyTorch that say nothing about a run; the messages of all other code appear."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Beginnings of log messages.
HIDDEN_LOGS = (
    "GPU available: False",
    "TPU available: False",
    "💡 Tip: ",  # advertises a service
    "Seed set to ",
    "Restoring states from the checkpoint",  # a second message follows when the states have been restored
    "`Trainer.fit` stopped: `max_epochs=",
)
# Regular expressions for the beginning of a warning, and for the module that issues it.
HIDDEN_WARNINGS = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", r"pytorch_lightning\."),
    (r"Checkpoint directory .* exists and is not empty", r"pytorch_lightning\."),
)
LOGGERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero")


@contextmanager
def quiet_trainer(*expected: str) -> Iterator[None]:
    """Context in which a Trainer does not report what the user of a command has not chosen and cannot change.

    Args:
        expected: regular expressions for the beginnings of further warnings to hide, whatever module issues them.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.training.quiet_trainer import quiet_trainer
        >>> with quiet_trainer():
        ...     trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    """
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(_is_about_the_run)
    try:
        with warnings.catch_warnings():
            for message, module in HIDDEN_WARNINGS:
                warnings.filterwarnings("ignore", message, module=module)
            for message in expected:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_about_the_run)


def _is_about_the_run(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(HIDDEN_LOGS)
