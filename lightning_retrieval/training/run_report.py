"""What a run reports: the length of lists and the traffic of its first step, and its settings.

`quiet_trainer` hides messages of Lightning and PyTorch that say nothing about a run, and `RunProgressBar` shows its
progress. The commands use both.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm.contrib.logging import logging_redirect_tqdm  # type: ignore[import-untyped]

from lightning_retrieval.backend import (
    TensorBoardLogger,
    TQDMProgressBar,
    module_names,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_retrieval.distributed import world_size
from lightning_retrieval.losses.base import RetrievalLoss
from lightning_retrieval.losses.batch_loss import ranked_batch
from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.plain_data import logged_settings
from lightning_retrieval.preparation.of_run import data_module_of
from lightning_retrieval.ranking.labels import Role, finest
from lightning_retrieval.training.batch import GATHER_DTYPES, GlobalBatch
from lightning_retrieval.training.full_sharding import copies_of, is_sharded
from lightning_retrieval.training.optimizers import trainable_parameters

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
# The entries of a batch that a rule of relevance of this library reads, each with the rule.
RULES = {"cameras": "OtherCamera()", "roles": "GalleryOnly()", "tags": "SharedTags()"}
_MANY = 0.25  # fraction of the queries of a batch without a positive, from which on a run warns
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


def step_traffic(
    batch: int,
    dim: int,
    parameters: int,
    world: int,
    *,
    gather: bool = True,
    local_queries: bool = True,
    bytes_: int = 4,
    gathered_bytes: int | None = None,
    weights: int = 0,
    columns: int = 1,
    copies: int = 1,
) -> dict[str, float]:
    """The bytes that each process sends in a training step, if collectives are optimal (send nothing twice).

    Args:
        batch: B, rows of the global batch.
        dim: D, dimension of the embeddings.
        parameters: number of elements of the gradient.
        world: W, number of processes.
        gather: whether lists rank the global batch.
        local_queries: whether each process computes the loss of its local queries. The processes then exchange the
            gradients of embeddings.
        bytes_: number of bytes of one element.
        gathered_bytes: the same for an element of a gathered embedding; None if it is not rounded.
        weights: number of elements that are gathered in a step, if the network is sharded over the processes.
        columns: number of label levels, or of the columns of a rule of relevance.
        copies: number of groups of processes that each hold one copy of a sharded network.

    Returns:
        The bytes of each kind of traffic, by its name. With f = (W - 1) / W, these are f x B (D x gathered bytes +
            8 x columns + 8) for gathering the batch, where labels and ids have 8 bytes each; f x B D x bytes for the
            exchange of gradients of embeddings; and 2 f x parameters x bytes for the all-reduce of gradients. In a
            sharded network, the all-reduce is replaced by f x weights x bytes for gathering weights, and f x parameters
            x bytes for the reduce-scatter of gradients, of which each process gets its shard; W is then the number of
            processes that hold one copy. Several copies add 2 (copies - 1) / copies x parameters / W x bytes for the
            all-reduce of these shards.

    Example:
        >>> from lightning_retrieval.training.run_report import step_traffic
        >>> step_traffic(batch=384, dim=128, parameters=600_000, world=2)
        {'gather': 101376.0, 'exchange': 98304.0, 'all-reduce': 2400000.0}
    """
    others = (world - 1) / world
    bytes_of_row = dim * (gathered_bytes or bytes_) + 8 * columns + 8
    traffic = {
        "gather": others * batch * bytes_of_row * gather,
        "exchange": others * batch * dim * bytes_ * (gather and local_queries),
    }
    if weights > 0:
        processes = world / copies
        others = (processes - 1) / processes
        traffic |= {"weights": others * weights * bytes_, "reduce-scatter": others * parameters * bytes_}
        if copies > 1:
            traffic["all-reduce"] = 2 * (copies - 1) / copies * parameters / processes * bytes_
        return traffic
    return {**traffic, "all-reduce": 2 * others * parameters * bytes_}


def report_resumed_phase(module: Any, reached: float, done: float) -> None:
    """Say that weights of the loss do not go back if a run is resumed with more steps than it had before.

    Args:
        module: a `RetrievalModule` at the start of a run.
        reached: the fraction of the training that was done before.
        done: number of steps that are done divided by the number of steps of this run.
    """
    weights = module.loss.scheduled_weights()
    if weights and reached > done:
        rank_zero_info(
            f"{type(module).__name__}: the training goes on with more steps than it had before, of which the fraction "
            f"{reached:.3g} was done; the weights of {', '.join(weights)} in `loss` remain those of this fraction "
            "until a larger one is done, so that no phase begins again."
        )


def report_first_step(module: Any, step: GlobalBatch, chunk_sizes: Sequence[int], batches: Sequence[Any]) -> None:
    """Log the length of lists and the traffic of a step, warn of what may go wrong, and log settings.

    Args:
        module: a `RetrievalModule` in a run.
        step: the first step of the run, after its loss has been computed.
        chunk_sizes: for each side, the number of rows that are embedded at a time.
        batches: the batch of each side, as the loader yields it.
    """
    report = _FirstStep(module, step, chunk_sizes)
    report.warn_of_batch_norm()
    report.warn_of_early_memory()
    report.warn_of_lists_without_positives()
    rank_zero_info(f"{report.lists()}{report.traffic()}.")
    report.tell_of_ignored_entries(batches)
    log_settings(module.trainer, report.settings())


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


@dataclass
class _FirstStep:
    """The first step of a run, about which the report is written."""

    module: Any
    step: GlobalBatch
    chunk_sizes: Sequence[int]

    def __post_init__(self) -> None:
        self.owner = type(self.module).__name__
        self.rows = list(map(len, self.step.rows))
        self.list_length, self.dim = self.step.embeddings[-1].shape
        if len(self.chunk_sizes) == 1:  # an image is not in its own list
            self.list_length -= 1
        self.relevance = self.module.relevance
        self.class_sizes: list[int] = []  # empty if the rule of relevance has no classes
        if self.relevance is None or self.relevance.has_classes:
            self.class_sizes = torch.unique(finest(self.step.rows[-1].labels), return_counts=True)[1].tolist()
        self.without_positive = self._queries_without_positive()

    def warn_of_batch_norm(self) -> None:
        """Warn if BatchNorm layers, which mix the images of a batch, see the batch in chunks."""
        for network, side, rows in zip(self._networks(), self.chunk_sizes, self.rows):
            if side < rows and trainable_parameters(network) and _has_batch_norm(network):
                rank_zero_warn(
                    f"{self.owner}: BatchNorm sees {side} images at a time, not the batch of {rows}, "
                    "so the gradient is not that of the whole batch; freeze_batch_norm=True of Embedder, or such "
                    "layers in eval mode, make it exact."
                )
                return

    def _networks(self) -> list[nn.Module]:
        """The module that embeds each side."""
        queries, candidates = self.module.query_embedder, self.module.embedder
        if len(self.chunk_sizes) == 1 or queries is None:
            return [self.module] * len(self.chunk_sizes)
        return [queries, candidates]

    def warn_of_early_memory(self) -> None:
        """Warn if a network is trained from random weights and its memory has no warm-up."""
        memory, embedder = self.module.memory, self.module.embedder
        if memory is None or memory.start_step or memory.steps:
            return
        if not trainable_parameters(embedder):  # its embeddings do not age
            return
        if isinstance(embedder, Embedder) and embedder.has_random_weights:
            rank_zero_warn(
                f"{self.owner}: the memory begins at step 0 of a network with random weights, whose embeddings are out "
                "of date after a few steps, which lowers R@1; give CrossBatchMemory(start_step='auto') and the "
                "callback MemoryMonitor, or start from trained weights."
            )

    def _queries_without_positive(self) -> int:
        """Number of queries that the loss skips, as many do in batches of shuffled images; 0 if that is not known.

        A memory may have the positives in later steps. The losses of other libraries may learn without positives. Under
        a rule of relevance, a sampler of classes does not draw positives for each query.
        """
        losses = [loss for loss in self.module.loss.modules() if isinstance(loss, RetrievalLoss)]
        if self.module.memory is not None or self.relevance is not None or not losses:
            return 0
        embeddings, rows = [of_side.detach() for of_side in self.step.embeddings], self.step.rows
        batch = ranked_batch(embeddings[0], rows[0].labels, ids=rows[0].ids)
        if len(self.chunk_sizes) > 1:
            batch = ranked_batch(embeddings[0], rows[0].labels, embeddings[1], rows[1].labels)
        return max(loss.queries_without_value(batch) for loss in losses)

    def warn_of_lists_without_positives(self) -> None:
        """Warn if many queries have no positive in the batch. If no query has a positive, the loss warns."""
        if _MANY * self.rows[0] <= self.without_positive < self.rows[0]:
            rank_zero_warn(
                f"{self.owner}: {self.without_positive} of {self.rows[0]} queries of the first batch have no relevant "
                "image in their list, and such a list teaches nothing; draw several images of each class, as "
                "RetrievalDataLoader(dataset, PKSampler(labels, classes_per_batch=32, samples_per_class=4)) does."
            )

    def tell_of_ignored_entries(self, batches: Sequence[Any]) -> None:
        """Log which entries of a batch could decide what is relevant, but are ignored.

        Args:
            batches: the batch of each side in this process, as the loader yields it.
        """
        batch: dict[str, Any] = {}
        for batch_of_side in batches:
            if isinstance(batch_of_side, Mapping):
                batch |= batch_of_side
        ignored = [name for name in RULES if name in batch]
        if self.relevance is not None:
            ignored = [name for name in ignored if name not in self.relevance.reads]
        roles = batch.get("roles")
        if "roles" in ignored and isinstance(roles, Tensor) and bool((roles == Role.BOTH).all()):
            ignored.remove("roles")
        if ignored:
            cures = " or ".join(f"relevance={RULES[name]}" for name in ignored)
            rank_zero_info(
                f"{self.owner}: the lists of the loss ignore the {' and '.join(ignored)} of the images, which the "
                f"evaluation may follow; to train by the same rule, give {cures}, or a rule of your own."
            )

    def lists(self) -> str:
        """The first part of the report: the images in a batch, their classes, and the length of the lists."""
        text = f"{self.owner}: batches of {self._images()}, lists of {self.list_length} images"
        if self.relevance is not None:
            text += f" by {self.relevance}"
        text += self._memory()
        if 0 < self.without_positive < self.rows[0]:
            text += f", where {self.without_positive} of {self.rows[0]} queries have no relevant image in their list"
        if self.module.sides.directions == "both":
            text += f", and lists of {self.rows[0]} queries for each candidate"
        return text

    def _memory(self) -> str:
        """What the memory adds to the lists; empty without a memory."""
        memory = self.module.memory
        if memory is None:
            return ""
        text = f" and up to {memory.size} of the memory"
        if memory.mode == "one_list_detached":
            text += ", all without a gradient"
        elif memory.mode == "two_terms":
            text += " in a second term"
        if memory.start_step == "auto":
            text += ", as soon as MemoryMonitor finds little drift"
        elif memory.start_step:
            text += f", from step {memory.start_step + 1} on"  # the batch of step `start_step` is the first one stored
        return text

    def _images(self) -> str:
        if len(self.rows) > 1:
            text = f"{self.rows[0]} queries and {self.rows[1]} candidates"
            if self.class_sizes:
                text += f" of P = {len(self.class_sizes)} classes"
            return text
        if not self.class_sizes:
            return f"{self.rows[0]} images"
        fewest, most = min(self.class_sizes), max(self.class_sizes)
        of_each = f"{fewest}"
        if fewest != most:
            of_each = f"{fewest} to {most}"
        return f"P = {len(self.class_sizes)} classes with K = {of_each} images"

    def traffic(self) -> str:
        """The second part of the report: what each process sends in a step; empty for one process."""
        if world_size() == 1:
            return ""
        embeddings, gather_dtype = self.step.embeddings[0], GATHER_DTYPES[self.module.gather]
        traffic = step_traffic(
            sum(self.rows),
            self.dim,
            sum(parameter.numel() for parameter in trainable_parameters(self.module)),
            world_size(),
            gather=self.module.gather is not False,
            local_queries=self.step.divides_queries,
            bytes_=embeddings.element_size(),
            gathered_bytes=(gather_dtype or embeddings.dtype).itemsize,
            weights=self._gathered_weights(),
            columns=self.step.rows[0].labels[0].numel(),
            copies=max(map(copies_of, self.module.parameters()), default=1),
        )
        parts = ", ".join(f"{name} {size / 1e6:.3g}" for name, size in traffic.items())
        lists_of = "over"
        if self.module.gather is False:
            lists_of = "on each of"
        total = sum(traffic.values()) / 1e6
        return f", {lists_of} {world_size()} processes; each process sends {total:.3g} MB a step ({parts})"

    def _gathered_weights(self) -> int:
        """Number of weights that a step gathers: in a sharded network, each pass gathers all weights; else 0."""
        gathered = 0
        for network, side in zip(self._networks(), self.chunk_sizes):
            sharded: list[nn.Parameter] = list(filter(is_sharded, network.parameters()))
            gathered += side * sum(parameter.numel() for parameter in sharded)
        return gathered

    def settings(self) -> dict[str, Any]:
        """The batch and the sampler as plain data."""
        list_length = self.list_length
        if self.module.memory is not None:
            list_length += self.module.memory.size
        chunk_size: Any = self.chunk_sizes[0]
        if len(self.chunk_sizes) > 1:
            chunk_size = dict(zip(SIDES, self.chunk_sizes))
        settings: dict[str, Any] = {
            "batch": {
                "images": self.step.images,
                "classes": len(self.class_sizes),
                "list_length": list_length,
                "chunk_size": chunk_size,
                "processes": world_size(),
            }
        }
        if len(self.chunk_sizes) > 1:
            settings["batch"] |= dict(zip(SIDES, self.rows))
        sampler = getattr(self.module.trainer.train_dataloader, "batch_sampler", None)
        if sampler is not None:
            # RetrievalDataLoader wraps the sampler of global batches in a sampler of this process's shards.
            settings["sampler"] = logged_settings(getattr(sampler, "batch_sampler", sampler))
        return settings


def _has_batch_norm(network: nn.Module) -> bool:
    """Whether a network has BatchNorm layers that mix the rows that one process embeds at a time."""
    for layer in network.modules():
        if isinstance(layer, _BatchNorm) and layer.training and not isinstance(layer, nn.SyncBatchNorm):
            return True
    return False
