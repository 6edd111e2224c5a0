"""Checks for settings of a module and flags of a Trainer that do not work with ranked lists of the global batch."""

import math
from typing import Any, get_args

from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
)
from pytorch_lightning.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from pytorch_lightning.strategies.single_xla import SingleDeviceXLAStrategy
from pytorch_lightning.strategies.xla import XLAStrategy
from torch import nn

from lightning_retrieval.checks import check_choice, check_finite_number
from lightning_retrieval.distributed import world_size
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.blackbox_map import BlackboxMAPLoss
from lightning_retrieval.losses.third_party import USE_OTHER_LOSS, as_batch_loss
from lightning_retrieval.plain_data import rebuild
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.training.full_sharding import check_model_parallel, check_placements, has_sharded_parameters
from lightning_retrieval.training.memory import CrossBatchMemory, MemoryMode

# Callbacks that need automatic optimization, with what each would do and what to use instead. Lightning's Tuner adds
# the callbacks `LearningRateFinder` and `BatchSizeFinder`.
WRONG_CALLBACKS = {
    StochasticWeightAveraging: "trains on in the epoch that it adds; use EMAWeightAveraging or WeightAveraging",
    LearningRateFinder: "does not see the loss of manual optimization; compare a few short runs instead",
    BatchSizeFinder: "would change the ranked lists; use chunk_size='auto', which fits any batch in memory",
    GradientAccumulationScheduler: "would cut the ranked lists apart; use larger batches and set chunk_size",
    SpikeDetection: "does not see the loss of manual optimization; leave it out",
}


def adapt_loss(owner: str, loss: nn.Module) -> BatchLoss:
    """Adapt a loss to the interface of this library; raise if the loss does not rank embeddings.

    Args:
        owner: prefix of error messages.
        loss: a loss of this library or of another library.
    """
    if isinstance(loss, BlackboxMAPLoss):
        raise TypeError(
            f"{owner}: BlackboxMAPLoss takes scores of images for classes, not embeddings and labels; call it in a "
            "training loop of your own, or rank images by images with BlackboxAPLoss and a `memory`."
        )
    return as_batch_loss(loss)


def check_memory(
    owner: str, loss: BatchLoss, memory: CrossBatchMemory | None, mode: MemoryMode, weight: float | None
) -> float:
    """Return the weight of the term with the memory, 1 by default; raise if the settings contradict each other.

    Args:
        owner: prefix of error messages.
        loss: the loss.
        memory: past batches, or None.
        mode: how the memory is ranked.
        weight: weight of the second term, which ranks the memory, or None.
    """
    check_choice(owner, "memory_mode", mode, get_args(MemoryMode))
    if mode != "one_list" and memory is None:
        raise ValueError(f"{owner}: `memory_mode` {mode!r} was given without `memory`; give both or neither.")
    if weight is not None:
        weight = check_finite_number(owner, "memory_weight", weight)
        if mode != "two_terms":
            raise ValueError(
                f"{owner}: `memory_weight` must be None unless `memory_mode` is 'two_terms', got {weight} for "
                f"{mode!r}, whose loss is a single term; give memory_mode='two_terms' or no weight."
            )
    if memory is not None and loss.terms_without_references:
        raise TypeError(
            f"{owner}: with a `memory` the loss must rank references and exclude the query's own copy, which "
            f"{', '.join(loss.terms_without_references)} cannot do; {USE_OTHER_LOSS}."
        )
    if weight is None:
        return 1.0
    return weight


def check_relevance(owner: str, loss: BatchLoss, relevance: Any) -> Relevance | None:
    """Return the rule of relevance, rebuilt if it is plain data; raise if a term of the loss cannot follow it.

    Args:
        owner: prefix of error messages.
        loss: the loss.
        relevance: a rule, the description of a rule, or None.
    """
    if relevance is None:
        return None
    rule: Relevance = rebuild(owner, "relevance", relevance, Relevance)  # type: ignore[type-abstract]
    for part in loss.modules():
        if isinstance(part, BatchLoss):
            part.check_relevance(rule)
    return rule


def check_trainer(owner: str, trainer: Any) -> None:
    """Raise if a flag or a callback of the Trainer would break the ranked lists or the sum of gradients.

    Args:
        owner: name of the module's class.
        trainer: a `pytorch_lightning.Trainer`.

    Raises:
        ValueError: if there is such a flag or callback. The message names the flag or callback, and what to use
            instead.
    """
    for name in ("gradient_clip_val", "gradient_clip_algorithm"):
        value = getattr(trainer, name)
        value = getattr(value, "value", value)  # the clipping algorithm is an enum member
        if value:
            raise ValueError(
                f"{owner}: Trainer({name}={value!r}) has no effect with manual optimization; give it to the module: "
                f"{owner}(..., {name}={value!r})."
            )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"{owner}: Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) would split the ranked "
            "lists; use larger batches and embed them in chunks with chunk_size."
        )
    overfit_batches = getattr(trainer, "overfit_batches", 0)
    if overfit_batches:
        raise ValueError(
            f"{owner}: Trainer(overfit_batches={overfit_batches}) replaces the sampler, so that batches would no "
            "longer hold several images of each class; use limit_train_batches instead."
        )
    for callback in trainer.callbacks:
        _check_callback(owner, callback, trainer.lightning_module)
    _check_precision(owner, trainer.precision_plugin)
    _check_strategy(owner, trainer.strategy)
    if isinstance(trainer.strategy, ModelParallelStrategy):
        check_model_parallel(owner, trainer)


def keeps_parameters(strategy: Any) -> bool:
    """Whether a strategy gives optimizers the parameters of the module, not flat copies of them.

    Args:
        strategy: the strategy of a `pytorch_lightning.Trainer`.
    """
    is_known = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
    return is_known and not isinstance(strategy, DeepSpeedStrategy)


def check_memory_start(module: Any) -> None:
    """Raise if a memory has `start_step="auto"` but no callback decides when it begins.

    Args:
        module: a `RetrievalModule` in a run.

    Raises:
        ValueError: if there is no such callback. The message names a callback to add.
    """
    memory = module.memory
    if memory is None or memory.start_step != "auto" or memory.started:
        return
    if not any(getattr(callback, "begins_memory", False) for callback in module.trainer.callbacks):
        raise ValueError(
            f"{type(module).__name__}: CrossBatchMemory(start_step='auto') begins when MemoryMonitor finds that the "
            "embeddings no longer change fast, but the Trainer has no such callback; give "
            "Trainer(callbacks=[MemoryMonitor()]), or a number as start_step."
        )


def check_schedule(module: Any, steps: float) -> None:
    """Raise if weights of the loss change during training, but the training has no end.

    Args:
        module: a `RetrievalModule` in a run.
        steps: the number of steps of the run; inf if it is unknown.

    Raises:
        ValueError: if there are such weights and the number of steps is unknown.
    """
    weights, trainer = module.loss.scheduled_weights(), module.trainer
    if weights and math.isinf(steps):
        raise ValueError(
            f"{type(module).__name__}: the weights of {', '.join(weights)} in `loss` depend on the fraction of the "
            "training that is done, which needs a known number of steps, got Trainer("
            f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}) with {trainer.num_training_batches} "
            "batches in an epoch; set max_steps."
        )


def check_processes(module: Any) -> None:
    """Raise if a module's settings do not work with several processes.

    Args:
        module: a `RetrievalModule`.

    Raises:
        ValueError: if a setting does not work. The message names the setting, and what to use instead.
    """
    if world_size() == 1:
        return
    owner = type(module).__name__
    if module.memory is not None and not module.gather:
        raise ValueError(
            f"{owner}: a memory must be the same on all {world_size()} processes, which gather=False does not provide; "
            "keep gather=True."
        )
    if has_sharded_parameters(module):
        check_placements(owner, list(module.parameters()))
        if module.chunk_size == "auto":
            raise ValueError(
                f"{owner}: chunk_size='auto' is found by each process for itself, but with ModelParallelStrategy they "
                "embed each chunk together; give a number, such as chunk_size=32."
            )
    has_sync_norm = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    if has_sync_norm and module.chunk_size is not None:
        raise ValueError(
            f"{owner}: SyncBatchNorm waits for all processes at each chunk, but they may have unequal numbers of "
            "chunks; set chunk_size=None, or remove sync_batchnorm."
        )


def _check_callback(owner: str, callback: Any, module: Any) -> None:
    for kind, reason in WRONG_CALLBACKS.items():
        if isinstance(callback, kind):
            raise ValueError(f"{owner}: the callback {kind.__name__} of Lightning {reason}.")
    if isinstance(callback, ModelCheckpoint):
        _check_model_checkpoint(owner, callback)
    if isinstance(callback, BackboneFinetuning) and not isinstance(getattr(module, "backbone", None), nn.Module):
        raise ValueError(
            f"{owner}: the callback BackboneFinetuning of Lightning needs a module with a `backbone`; give a subclass "
            "the property `backbone`, which returns a part of `embedder`, or derive a callback from BaseFinetuning."
        )


def _check_model_checkpoint(owner: str, callback: Any) -> None:
    """Raise if a checkpoint would never be saved, or would be ranked by an outdated metric."""
    if callback._train_time_interval is not None:
        raise ValueError(
            f"{owner}: ModelCheckpoint(train_time_interval=...) of Lightning never saves with manual optimization; use "
            "every_n_train_steps."
        )
    monitor = callback.monitor
    if callback._every_n_train_steps and monitor is not None and not monitor.startswith("train/"):
        raise ValueError(
            f"{owner}: ModelCheckpoint(monitor={monitor!r}, every_n_train_steps={callback._every_n_train_steps}) of "
            "Lightning would save before the validation, with the metric of the validation before it; leave out "
            "every_n_train_steps, and add another ModelCheckpoint without monitor for the steps."
        )


def _check_precision(owner: str, plugin: Any) -> None:
    if isinstance(plugin, (BitsandbytesPrecision, TransformerEnginePrecision)):
        raise ValueError(
            f"{owner}: {type(plugin).__name__} replaces layers of the network, which has not been tested with this "
            "library; use Trainer(precision='bf16-mixed') or another precision without it."
        )


def _check_strategy(owner: str, strategy: Any) -> None:
    if getattr(strategy, "_ddp_kwargs", {}).get("static_graph"):
        raise ValueError(
            f"{owner}: DDPStrategy(static_graph=True) expects one backward pass through DDP per step, but here there "
            "is none; remove it."
        )
    for name in ("ddp_comm_hook", "model_averaging_period"):
        if getattr(strategy, f"_{name}", None) is not None:
            raise ValueError(
                f"{owner}: DDPStrategy({name}=...) has no effect on gradients that are summed once per step, outside "
                "of DDP; remove it."
            )
    if isinstance(strategy, (SingleDeviceXLAStrategy, XLAStrategy)):
        raise ValueError(
            f"{owner}: {type(strategy).__name__} trains on a TPU, which has not been tested with this library; use a "
            "GPU or the CPU."
        )
    if not keeps_parameters(strategy):
        raise ValueError(
            f"{owner}: gradients are summed over full parameters, which {type(strategy).__name__} does not keep; "
            "use Trainer(strategy='auto') or 'ddp', or ModelParallelStrategy for a large network."
        )
