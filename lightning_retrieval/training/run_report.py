"""What a run reports: the batch and the lists of its first step, and its settings.

`quiet_trainer` hides messages of Lightning and PyTorch that say nothing about a run, and `RunProgressBar` shows its
progress. The commands use both.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm  # type: ignore[import-untyped]

from lightning_retrieval.backend import TensorBoardLogger, TQDMProgressBar, module_names, pl, rank_zero_info
from lightning_retrieval.distributed import world_size
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.plain_data import logged_settings
from lightning_retrieval.preparation.of_run import data_module_of
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.first_steps import warn_of_batch_norm, warn_of_lists_without_positives

# Beginnings of log messages.
HIDDEN_LOGS = (
    "GPU available: False",
    "TPU available: False",
    "💡 Tip: ",  # advertises a service
    "Seed set to ",
    "Restoring states from the checkpoint",  # a second message follows when the states have been restored
    "`Trainer.fit` stopped: `max_epochs=",
)
RANK = re.compile(r"^\[rank: \d+\] ")  # before a log message, if there are several processes
TRAINER = r"(pytorch_lightning|lightning\.pytorch)\."  # regular expression for the modules of Lightning
# Regular expressions for the beginning of a warning, and for the module that issues it.
HIDDEN_WARNINGS = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", TRAINER),
    (r"Checkpoint directory .* exists and is not empty", TRAINER),
    (r"Using `DistributedSampler` with the dataloaders", TRAINER),  # the metrics count each image once
)
LOGGERS = ("utilities.rank_zero", "utilities.seed")  # of each package of Lightning


@contextmanager
def quiet_trainer(*expected: str) -> Iterator[None]:
    """Context in which a Trainer does not report what the user of a command has not chosen and cannot change.

    Log messages are written above a progress bar, not on its line.

    Args:
        expected: regular expressions for the beginnings of further warnings to hide, whatever module issues them.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.training.run_report import quiet_trainer
        >>> with quiet_trainer():
        ...     trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    """
    packages = module_names()
    loggers = [logging.getLogger(f"{package}.{name}") for package in packages for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(_is_about_the_run)
    try:
        with warnings.catch_warnings(), logging_redirect_tqdm(list(map(logging.getLogger, packages))):
            for message, module in HIDDEN_WARNINGS:
                warnings.filterwarnings("ignore", message, module=module)
            for message in expected:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_about_the_run)


class RunProgressBar(TQDMProgressBar):
    """Progress bar whose values fit a terminal of 80 columns.

    It shows `train/loss` as `loss`, a throughput of 10 images/s or more as an integer, and not the number of the run.
    Without a progress bar among its callbacks, a Trainer would choose one of two, depending on installed packages.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.training.run_report import RunProgressBar
        >>> trainer = pl.Trainer(callbacks=[RunProgressBar()], logger=False, enable_checkpointing=False)
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # without batches per second

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The values that are shown beside the bar, by their names."""
        values = super().get_metrics(trainer, pl_module)
        values.pop("v_num", None)
        shown: dict[str, Any] = {name.removeprefix("train/"): value for name, value in values.items()}
        throughput = shown.get("images/s", 0.0)
        if throughput >= 10:
            shown["images/s"] = round(throughput)
        return shown


def _is_about_the_run(record: logging.LogRecord) -> bool:
    message = RANK.sub("", record.getMessage())
    return not message.startswith(HIDDEN_LOGS)


def report_first_step(module: Any, step: Any, chunk_sizes: Sequence[int]) -> None:
    """Log the images of a batch and the length of its lists, warn of what may go wrong, and log settings.

    Args:
        module: a `RetrievalModule` in a run.
        step: the `GlobalBatch` of the first step of the run, after its loss has been computed.
        chunk_sizes: number of rows of each side that are embedded at a time.
    """
    rows = list(map(len, step.rows))
    warn_of_batch_norm(module, rows, chunk_sizes)
    warn_of_lists_without_positives(module, step.rows, step.embeddings)
    batch: dict[str, Any] = {"images": step.images, "classes": 0, "processes": world_size()}
    if len(rows) == 1:  # an image is not in its own list
        batch |= {"list_length": rows[0] - 1, "chunk_size": chunk_sizes[0]}
    else:
        batch |= {
            "queries": rows[0],
            "candidates": rows[1],
            "list_length": rows[1],
            "chunk_size": dict(zip(SIDES, chunk_sizes)),
        }
    if module.relevance is None or module.relevance.has_classes:
        batch["classes"] = len(finest(step.rows[-1].labels).unique())
    text = "batches of {images} images of {classes} classes, lists of {list_length} images, processes: {processes}"
    rank_zero_info(f"{type(module).__name__}: {text.format(**batch)}.")
    if module.memory is not None:
        batch["list_length"] += module.memory.size
    settings = {"batch": batch}
    sampler = getattr(module.trainer.train_dataloader, "batch_sampler", None)
    if sampler is not None:
        # RetrievalDataLoader wraps the sampler of global batches in a sampler of this process's shards.
        settings["sampler"] = logged_settings(getattr(sampler, "batch_sampler", sampler))
    log_settings(module.trainer, settings)


def log_settings(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Log settings, and the settings of the data module, as hyperparameters; TensorBoard gets them as text.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
        settings: plain data by name.
    """
    settings = dict(settings)
    data_module = data_module_of(trainer._active_loop)
    if data_module is not None:
        settings["data"] = logged_settings(data_module)
    if not settings:
        return
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):  # TensorBoard stores only the first hyperparameters that are logged
            for name, value in settings.items():
                logger.experiment.add_text(name, f"```json\n{json.dumps(value, indent=2)}\n```")
        else:
            logger.log_hyperparams(settings)
