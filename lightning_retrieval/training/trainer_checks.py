"""Checks for settings of a module and flags of a Trainer that do not work with ranked lists of the global batch."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, SequentialSampler

from lightning_retrieval.backend import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    BitsandbytesPrecision,
    CombinedLoader,
    DDPStrategy,
    DeepSpeedStrategy,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelParallelStrategy,
    ModelPruning,
    OnExceptionCheckpoint,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    SpikeDetection,
    StochasticWeightAveraging,
    TrainerFn,
    TransformerEnginePrecision,
    WeightAveraging,
    XLAStrategy,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_retrieval.checks import first_of, is_integer
from lightning_retrieval.distributed import gather_rows, to_host, world_size
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.blackbox_map import BlackboxMAPLoss
from lightning_retrieval.losses.third_party import as_batch_loss
from lightning_retrieval.models.sides import SIDES
from lightning_retrieval.plain_data import rebuild
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.training.batch import GlobalRows
from lightning_retrieval.training.full_sharding import has_sharded_parameters
from lightning_retrieval.training.optimizers import trained_parameters
from lightning_retrieval.training.sides import chunk_size_of

# Callbacks that need automatic optimization, with what each would do and what to use instead. Lightning's Tuner adds
# the callbacks `LearningRateFinder` and `BatchSizeFinder`.
WRONG_CALLBACKS = {
    StochasticWeightAveraging: "trains on in the epoch that it adds; use EMAWeightAveraging or WeightAveraging",
    LearningRateFinder: "does not see the loss of manual optimization; compare a few short runs instead",
    BatchSizeFinder: "would change the ranked lists; use chunk_size='auto', which fits any batch in memory",
    GradientAccumulationScheduler: "would cut the ranked lists apart; use larger batches and set chunk_size",
    SpikeDetection: "does not see the loss of manual optimization; leave it out",
}
_NEEDS_FULL = "needs full parameters, which ModelParallelStrategy does not keep"
# Callbacks that would fail or wait forever with `ModelParallelStrategy`, each with the reason.
WRONG_WHEN_SHARDED = {
    BaseFinetuning: _NEEDS_FULL,
    ModelPruning: _NEEDS_FULL,
    WeightAveraging: _NEEDS_FULL,
    OnExceptionCheckpoint: "saves with all processes, but one of them may have failed alone",
}


def adapt_loss(loss: nn.Module) -> BatchLoss:
    """Adapt a loss to the interface of this library; raise if the loss does not rank embeddings.

    Args:
        loss: a loss of this library or of another library.
    """
    if isinstance(loss, BlackboxMAPLoss):
        rule = "BlackboxMAPLoss takes scores of images for classes, not embeddings and labels"
        cure = "call it in a training loop of your own, or rank images by images with BlackboxAPLoss and a `memory`"
        raise InvalidType(rule, cure=cure)
    return as_batch_loss(loss)


def check_relevance(loss: BatchLoss, relevance: Any) -> Relevance | None:
    """Return the rule of relevance, rebuilt if it is plain data; raise if a term of the loss cannot follow it.

    Args:
        loss: the loss.
        relevance: a rule, the description of a rule, or None.
    """
    if relevance is None:
        return None
    rule: Relevance = rebuild("relevance", relevance, Relevance)  # type: ignore[type-abstract]
    for part in loss.modules():
        if isinstance(part, BatchLoss):
            part.check_relevance(rule)
    return rule


def check_trainer(trainer: Any) -> None:
    """Raise if a flag or a callback of the Trainer would break the ranked lists or the sum of gradients.

    Args:
        trainer: a `pytorch_lightning.Trainer`.

    Raises:
        ValueError: if there is such a flag or callback. The message names the flag or callback, and what to use
            instead.
    """
    for name in ("gradient_clip_val", "gradient_clip_algorithm"):
        value = getattr(trainer, name)
        value = getattr(value, "value", value)  # the clipping algorithm is an enum member
        if value:
            module_name = type(trainer.lightning_module).__name__
            cure = f"give it to the module: {module_name}(..., updates=Updates({name}={value!r}))"
            raise InvalidValue(f"Trainer({name}={value!r}) has no effect with manual optimization", cure=cure)
    if trainer.accumulate_grad_batches != 1:
        rule = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) would split the ranked lists"
        raise InvalidValue(rule, cure="use larger batches and embed them in chunks with chunk_size")
    overfit_batches = getattr(trainer, "overfit_batches", 0)
    if overfit_batches:
        raise InvalidValue(
            f"Trainer(overfit_batches={overfit_batches}) replaces the sampler, so that batches would no longer hold "
            "several images of each class",
            cure="use limit_train_batches instead",
        )
    for callback in trainer.callbacks:
        _check_callback(callback, trainer.lightning_module)
    _check_precision(trainer.precision_plugin)
    _check_strategy(trainer.strategy)
    if isinstance(trainer.strategy, ModelParallelStrategy):
        _check_model_parallel(trainer)


def keeps_parameters(strategy: Any) -> bool:
    """Whether a strategy gives optimizers the parameters of the module, not flat copies of them.

    Args:
        strategy: the strategy of a `pytorch_lightning.Trainer`.
    """
    is_known = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
    return is_known and not isinstance(strategy, DeepSpeedStrategy)


def check_filled(module: Any) -> None:
    """Raise if tensors of a module had no memory at the start, and have not been loaded from a checkpoint.

    Args:
        module: a `RetrievalModule` in a run, after its checkpoint, if any, has been loaded.

    Raises:
        ValueError: if there are such tensors. The message names one.
    """
    if module.unfilled:
        names = first_of(sorted(module.unfilled), 3)
        rule = "a network on the meta device must be filled from the first process or from a checkpoint"
        cure = "build the network on the CPU in the first process, or give a `ckpt_path` that holds them"
        raise InvalidValue(rule, type(module).__name__, got=f"no values for {names}", cure=cure)


def warn_of_half_parameters(module: Any) -> None:
    """Warn of trained parameters of 16 bits, unless the Trainer has converted the whole module.

    A step changes a parameter of bfloat16 only if it is larger than 1/256 of its value.

    Args:
        module: the LightningModule in a run.
    """
    if module.trainer.precision in ("bf16-true", "16-true"):
        return
    half = (torch.float16, torch.bfloat16)
    names = [name for name, parameter in trained_parameters(module) if parameter.dtype in half]
    if names:
        rank_zero_warn(
            f"{type(module).__name__}: parameters that learn should be float32, since small steps are lost in 16 bits, "
            f"got {len(names)} of 16 bits ({first_of(names, 3)}); load the network in float32 (of transformers: "
            "dtype=torch.float32), call its float(), or choose precision='bf16-true' of the Trainer."
        )


def warn_of_equal_rates(module: Any) -> None:
    """Warn if the module's own `configure_optimizers` gives all parameters one rate, although they have factors.

    Args:
        module: a `RetrievalModule` in a run.
    """
    rate_factors = {
        "head_lr_factor": module.updates.head_lr_factor,
        "layer_decay": module.updates.layer_decay,
        "query_lr_factor": module.sides.query_lr_factor,
        "loss_lr_factor": module.updates.loss_lr_factor,
    }
    factors = [f"{name}={factor}" for name, factor in rate_factors.items() if factor != 1]
    rates: set[float] = set()
    for optimizer in module.trainer.optimizers:
        for group in optimizer.param_groups:
            rates.add(float(group.get("initial_lr", group["lr"])))  # a warm-up may begin with the same rate
    if factors and len(rates) == 1:
        rank_zero_warn(
            f"{type(module).__name__}: the learning rates of the parameter groups must differ by {', '.join(factors)}, "
            f"but its `configure_optimizers` gives all of them {rates.pop():.3g}, perhaps by a scheduler that sets the "
            "rates itself, such as OneCycleLR; give the scheduler a list with a rate for each group, or leave the "
            "factors out."
        )


def check_memory_start(module: Any, steps: float) -> None:
    """Raise if a memory has `start_step="auto"` but no callback decides when it begins; say if it begins too late.

    Args:
        module: a `RetrievalModule` in a run.
        steps: the number of steps of the run; inf if it is unknown.

    Raises:
        ValueError: if there is no such callback. The message names a callback to add.
    """
    memory = module.memory
    if memory is None or memory.started:
        return
    if any(getattr(callback, "begins_memory", False) for callback in module.trainer.callbacks):
        return
    if memory.start_step != "auto":
        left = (steps - module.global_step) / max(len(module.trainer.optimizers), 1)
        if memory.steps + left <= memory.start_step + 1 and not module.trainer.fast_dev_run:
            rank_zero_info(
                f"CrossBatchMemory: the memory is never ranked in this run, which ends after "
                f"{memory.steps + left:.0f} batches, because its first batch is stored after start_step="
                f"{memory.start_step}; give CrossBatchMemory a smaller start_step, or train longer."
            )
        return
    raise InvalidValue(
        "CrossBatchMemory(start_step='auto') begins when MemoryMonitor finds that the embeddings no longer change "
        "fast, but the Trainer has no such callback",
        type(module).__name__,
        cure="give Trainer(callbacks=[MemoryMonitor()]), or a number as start_step",
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
        raise InvalidValue(
            f"the weights of {', '.join(weights)} in `loss` depend on the fraction of the training that is done, "
            "which needs a known number of steps",
            type(module).__name__,
            got=f"Trainer(max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}) with "
            f"{trainer.num_training_batches} batches in an epoch",
            cure="set max_steps",
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
    chunk_sizes = [chunk_size_of(module.chunk_size, side) for side in SIDES]
    if module.memory is not None and module.gather is False:
        rule = f"a memory must be the same on all {world_size()} processes, which gather=False does not provide"
        raise InvalidValue(rule, cure="keep gather=True")
    if has_sharded_parameters(module) and "auto" in chunk_sizes:
        raise InvalidValue(
            "chunk_size='auto' is found by each process for itself, but with ModelParallelStrategy they embed "
            "each chunk together",
            cure="give a number, such as chunk_size=32",
        )
    has_sync_norm = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    if has_sync_norm and set(chunk_sizes) != {None}:
        rule = "SyncBatchNorm waits for all processes at each chunk, but they may have unequal numbers of chunks"
        raise InvalidValue(rule, cure="set chunk_size=None, or remove sync_batchnorm")


def train_loaders(trainer: Any) -> list[Any]:
    """The loaders of training batches: one, or those of a `CombinedLoader`, a dict or a list.

    Args:
        trainer: a `pytorch_lightning.Trainer` in a run.
    """
    loaders: list[Any] = CombinedLoader(trainer.train_dataloader, "sequential").flattened
    return loaders


def first_drawn(trainer: Any) -> list[list[int]] | None:
    """The first global batch of each loader of training batches, as dataset indices.

    None unless all loaders give each process its own part of a global batch, as `RetrievalDataLoader` does.

    Args:
        trainer: a `pytorch_lightning.Trainer` in a run.
    """
    drawn: list[list[int]] = []
    for loader in train_loaders(trainer):
        of_loader = getattr(getattr(loader, "batch_sampler", None), "first_drawn", None)
        if of_loader is None:
            return None
        drawn.append(of_loader)
    return drawn


def has_distributed_samplers(trainer: Any) -> bool:
    """Whether all loaders of training batches have a `DistributedSampler`, as Lightning's own.

    Args:
        trainer: a `pytorch_lightning.Trainer` in a run.
    """
    return all(isinstance(getattr(loader, "sampler", None), DistributedSampler) for loader in train_loaders(trainer))


def check_samplers(trainer: Any) -> None:
    """Raise if all of several processes would draw the same batches from a sampler of global batches.

    Args:
        trainer: a `pytorch_lightning.Trainer` in a run.

    Raises:
        ValueError: if a loader other than `RetrievalDataLoader` has such a sampler. The message names the cure.
    """
    for loader in train_loaders(trainer):
        for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
            wrapper = getattr(sampler, "dataset", None)  # Lightning may wrap a sampler in a DistributedSampler
            original: Any = getattr(wrapper, "_sampler", sampler)
            if hasattr(original, "check_one_process"):
                original.check_one_process()


def check_draws_images(trainer: Any) -> None:
    """Raise if a loader of training images would collate whole batches, because its `sampler` draws batches.

    Args:
        trainer: a `pytorch_lightning.Trainer` in a run.
    """
    for loader in train_loaders(trainer):
        sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        if batch_sampler is None or sampler is batch_sampler:  # each item of the sampler is taken for a batch
            continue
        if sampler is not None and getattr(sampler, "sampler", None) is sampler:  # as the samplers of global batches
            raise InvalidValue(
                f"a {type(sampler).__name__} must be the `batch_sampler` of a DataLoader, because it draws whole "
                "batches",
                got="a DataLoader with it as its `sampler`",
                cure="use DataLoader(dataset, batch_sampler=...)",
            )


def check_first_batch(module: Any, labels: Sequence[Tensor], rows: Sequence[GlobalRows]) -> None:
    """Compare labels and ids of a run's first batch with what the sampler drew, if the sampler is known.

    Labels and ids of a wrong type are not checked here, because the loss raises for them.

    Args:
        module: a `RetrievalModule` in a run.
        labels: for each side, the labels of this process; those of the rows differ if the module has a rule of
            relevance.
        rows: for each side, the rows of all processes or, if the module does not gather, of this process.

    Raises:
        ValueError: if labels or ids contradict the sampler of a `RetrievalDataLoader`. Other loaders cause a warning.
    """
    if len(rows) == 1:
        _check_side(module, labels[0], rows[0], {}, is_ranked=True)
        return
    for side, labels_of_side, of_side in zip(SIDES, labels, rows):
        is_ranked = side == "candidates" or module.sides.directions == "both"
        _check_side(module, labels_of_side, of_side, {"side": side}, is_ranked=is_ranked)


def _check_side(module: Any, labels: Tensor, rows: GlobalRows, side: Mapping[str, str], *, is_ranked: bool) -> None:
    """Check one side of the first batch.

    Args:
        module: as for `check_first_batch`.
        labels: labels of this side in this process.
        rows: the rows of this side.
        side: the argument `side` of the loader's check, if the batch has two sides.
        is_ranked: whether lists consist of the rows of this side.
    """
    if not is_integer(rows.labels) or rows.labels.ndim not in (1, 2):
        return
    gathered, ranked_by_class = module.gather is not False, True
    if module.relevance is None:
        labels = rows.labels
    else:
        ranked_by_class = module.relevance.has_classes
        if gathered:
            labels = gather_rows(labels, rows.counts)
    labels, ids = to_host(labels), None
    if rows.ids is not None:
        if not is_integer(rows.ids) or rows.ids.shape != labels.shape[:1]:
            return
        ids = to_host(rows.ids)
    loader = module.trainer.train_dataloader
    if hasattr(loader, "check_first_batch"):
        loader.check_first_batch(labels, ids, gathered=gathered, **side)
    elif ids is not None and not side:  # only images of the same side are in each other's lists
        _warn_of_ids(module, finest(labels), ids)
    if module.memory is None and ranked_by_class and is_ranked:
        _warn_of_one_label(module, finest(labels))


def _warn_of_ids(module: Any, labels: Tensor, ids: Tensor) -> None:
    """Warn if an id has two labels, or if ids repeat although the loader seems to draw different images."""
    name = type(module).__name__
    unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    repeated = int((counts[inverse] > 1).sum())
    if not repeated:
        return
    cure = "give each image a different id, such as its index in the data set, or no ids"
    if world_size() > 1:  # without ids, images that several processes have drawn would be positives of their copies
        cure = (
            "give each image a different id, such as its index in the data set, and each process its own part of a "
            "batch, as RetrievalDataLoader does"
        )
    first = torch.full_like(unique, len(ids)).scatter_reduce(0, inverse, torch.arange(len(ids)), "amin")
    differs = (labels != labels[first][inverse]).nonzero()[:, 0]
    if len(differs):
        row = int(differs[0])
        labels_of_id = f"{int(labels[first[inverse[row]]])} and {int(labels[row])}"
        rank_zero_warn(
            f"{name}: an image must have one label, but in the first batch the id {int(ids[row])} has the labels "
            f"{labels_of_id}, and {len(ids)} images have {len(unique)} different ids; images with the same id are not "
            f"in each other's lists: {cure}."
        )
    elif _repeats_are_unexpected(module.trainer.train_dataloader, fraction_of_ids=len(unique) / len(ids)):
        rank_zero_warn(
            f"{name}: in the first batch {repeated} of {len(ids)} images share their id with others, so that they "
            f"are not in each other's lists; unless the sampler draws images several times, {cure}."
        )


def _repeats_are_unexpected(loader: Any, fraction_of_ids: float) -> bool:
    """Whether repeated ids in a batch are probably an error, judging by the sampler of a loader.

    Args:
        loader: the loader of the training batches.
        fraction_of_ids: number of different ids divided by the number of rows.
    """
    sampler = getattr(loader, "sampler", None)
    replacement = getattr(sampler, "replacement", None)
    draws_images = getattr(loader, "batch_size", None) is not None  # otherwise the sampler may draw whole batches
    if draws_images and (replacement is False or isinstance(sampler, SequentialSampler)):
        return True
    return replacement is not True and fraction_of_ids <= 0.5


def _warn_of_one_label(module: Any, labels: Tensor) -> None:
    name = type(module).__name__
    if len(labels) > 1 and bool((labels == labels[0]).all()):
        rank_zero_warn(
            f"{name}: all {len(labels)} images of the first batch have the label {int(labels[0])}, so that no list "
            "has a negative and nothing is learned; check the labels, and that the sampler draws several classes."
        )


def _check_callback(callback: Any, module: Any) -> None:
    for kind, reason in WRONG_CALLBACKS.items():
        if isinstance(callback, kind):
            raise InvalidValue(f"the callback {kind.__name__} of Lightning {reason}")
    if isinstance(callback, ModelCheckpoint):
        _check_model_checkpoint(callback, module)
    if isinstance(callback, BackboneFinetuning) and not isinstance(getattr(module, "backbone", None), nn.Module):
        raise InvalidValue(
            "the callback BackboneFinetuning of Lightning needs a module with a `backbone`",
            cure="give a subclass the property `backbone`, which returns a part of `embedder`, or derive a "
            "callback from BaseFinetuning",
        )


def _check_model_checkpoint(callback: Any, module: Any) -> None:
    """Raise if a checkpoint would never be saved, or would be ranked by an outdated metric."""
    if callback._train_time_interval is not None:
        rule = "ModelCheckpoint(train_time_interval=...) of Lightning never saves with manual optimization"
        raise InvalidValue(rule, cure="use every_n_train_steps")
    monitor = callback.monitor
    folders = re.findall(r"\{([^{}:]*/[^{}:]*)", callback.filename or "")
    if folders and callback.auto_insert_metric_name:
        metric = folders[0]
        rank_zero_warn(
            f"{type(module).__name__}: ModelCheckpoint(filename={callback.filename!r}) of Lightning would write each "
            f"checkpoint into a folder, since it inserts the name {metric!r}, which has a slash; give "
            f"filename='{{epoch}}-{metric.rpartition('/')[2]}={{{metric}:.3f}}' and auto_insert_metric_name=False."
        )
    if callback._every_n_train_steps and monitor is not None and not monitor.startswith("train/"):
        raise InvalidValue(
            f"ModelCheckpoint(monitor={monitor!r}, every_n_train_steps={callback._every_n_train_steps}) of "
            "Lightning would save before the validation, with the metric of the validation before it",
            cure="leave out every_n_train_steps, and add another ModelCheckpoint without monitor for the steps",
        )


def _check_precision(plugin: Any) -> None:
    if isinstance(plugin, (BitsandbytesPrecision, TransformerEnginePrecision)):
        rule = f"{type(plugin).__name__} replaces layers of the network, which has not been tested with this library"
        raise InvalidValue(rule, cure="use Trainer(precision='bf16-mixed') or another precision without it")


def _check_strategy(strategy: Any) -> None:
    if getattr(strategy, "_ddp_kwargs", {}).get("static_graph"):
        rule = "DDPStrategy(static_graph=True) expects one backward pass through DDP per step, but here there is none"
        raise InvalidValue(rule, cure="remove it")
    for name in ("ddp_comm_hook", "model_averaging_period"):
        if getattr(strategy, f"_{name}", None) is not None:
            rule = f"DDPStrategy({name}=...) has no effect on gradients that are summed once per step, outside of DDP"
            raise InvalidValue(rule, cure="remove it")
    if isinstance(strategy, (SingleDeviceXLAStrategy, XLAStrategy)):
        rule = f"{type(strategy).__name__} trains on a TPU, which has not been tested with this library"
        raise InvalidValue(rule, cure="use a GPU or the CPU")
    if not keeps_parameters(strategy):
        rule = f"gradients are summed over full parameters, which {type(strategy).__name__} does not keep"
        cure = "use Trainer(strategy='auto') or 'ddp', or ModelParallelStrategy for a large network"
        raise InvalidValue(rule, cure=cure)


def _check_model_parallel(trainer: Any) -> None:
    """Raise if a run with `ModelParallelStrategy` would fail, wait forever or train wrongly.

    Args:
        trainer: a `pytorch_lightning.Trainer` with this strategy.

    Raises:
        ValueError: if there is such a setting. The message names the setting, and what to use instead.
    """
    from torch.distributed.fsdp import FSDPModule

    strategy = trainer.strategy
    tensor_parallel_size = strategy._tensor_parallel_size
    if tensor_parallel_size == "auto":
        tensor_parallel_size = strategy.num_processes
    if tensor_parallel_size != 1 or strategy._save_distributed_checkpoint:
        processes = strategy.num_processes * strategy.num_nodes
        raise InvalidValue(
            "all processes must share the data, and a checkpoint must be one file",
            got=f"ModelParallelStrategy(tensor_parallel_size={strategy._tensor_parallel_size!r}, "
            f"save_distributed_checkpoint={strategy._save_distributed_checkpoint})",
            cure=f"use ModelParallelStrategy(data_parallel_size={processes}, tensor_parallel_size=1, "
            "save_distributed_checkpoint=False), or FSDP2Strategy(sharded_checkpoints=True)",
        )
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise InvalidValue(
            "ModelParallelStrategy needs a newer torch, in which gradients can be summed instead of averaged "
            "(FSDPModule.set_force_sum_reduction_for_comms)",
            got=f"torch {torch.__version__}",
            cure="update torch, or use DDP",
        )
    for callback in trainer.callbacks:
        for kind, reason in WRONG_WHEN_SHARDED.items():
            if isinstance(callback, kind):
                rule = f"the callback {type(callback).__name__} of Lightning {reason}"
                raise InvalidValue(rule, cure="leave it out, or use Trainer(strategy='ddp')")
    if trainer.state.fn == TrainerFn.PREDICTING and trainer.world_size > 1:
        raise InvalidValue(
            "in predict the processes may have unequal numbers of batches, but with ModelParallelStrategy they "
            "embed each batch together",
            cure="predict with Trainer(strategy='ddp') from a checkpoint",
        )
