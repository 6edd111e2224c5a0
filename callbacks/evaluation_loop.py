"""Evaluation outside the Trainer's own loops: of the test set before training, and of training images."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_retrieval.callbacks.evaluation_set import EvaluationSet
from lightning_retrieval.callbacks.loaders import limited_length


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and afterwards each of its submodules back into the mode it had before."""
    was_training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in was_training.items():
            part.training = training


def batches_on_device(trainer: pl.Trainer, batches: Iterable[Any], description: str) -> Iterator[Any]:
    """Yield batches in the Trainer's precision and on its device, with a progress bar if the Trainer has one."""
    hidden = trainer.progress_bar_callback is None or not trainer.is_global_zero
    for batch in tqdm(batches, desc=description, disable=hidden, leave=False):
        converted = trainer.precision_plugin.convert_input(batch)
        yield trainer.strategy.batch_to_device(converted)


def collect_test_set(trainer: pl.Trainer, pl_module: pl.LightningModule, evaluation_set: EvaluationSet) -> None:
    """Call `test_step` with each batch of a test set, as the Trainer's test loop does, and collect its outputs.

    Args:
        trainer: its precision, device and `limit_test_batches` are used.
        pl_module: the module to evaluate; its state is not changed.
        evaluation_set: collects the outputs.
    """
    loader = evaluation_set.loader
    batches = itertools.islice(loader, limited_length(loader, trainer.limit_test_batches))
    with evaluation_mode(pl_module), torch.no_grad(), trainer.precision_plugin.test_step_context():
        for batch_idx, batch in enumerate(batches_on_device(trainer, batches, "Untrained test")):
            outputs = pl_module.test_step(batch, batch_idx)
            evaluation_set.add(type(pl_module).__name__, outputs)
