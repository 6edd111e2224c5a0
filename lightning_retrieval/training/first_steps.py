"""What people really do wrong in a run, and what it would train in silence.

Each is found before or in the first step or, if only later batches show it, in the first step with such a batch.

| what is wrong | found by |
| --- | --- |
| a callback, a flag or a strategy of Lightning with which lists or gradients would be wrong | `check_trainer` |
| checkpoints that would never be saved, or with an outdated metric | `check_trainer` |
| weights that were never filled, or that learn in 16 bits | `check_start` |
| a sampler with the labels of another data set, such as the whole of a `Subset` | `check_start` |
| a scheduler that removes the factors of the parameter groups | `check_start` |
| a memory that never begins | `check_start` |
| weights of the loss that change during a training without a known end | `check_start` |
| settings that several processes cannot share | `check_start` |
| processes with the same rows, or with rows that are not parts of one batch | `check_first_batch` |
| ids that collide, and labels that are not those of the images | `check_first_batch`, `check_later_batch` |
| a sampler that was not told the epoch, from the second epoch on | `warn_of_epoch` |
| BatchNorm layers that see the batch in chunks | `warn_of_batch_norm` |
| lists in which no image is relevant | `warn_of_lists_without_positives` |

Parameters in no optimizer are found in `optimizers.py`.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from lightning_retrieval.backend import (
    BatchSizeFinder,
    CombinedLoader,
    DDPStrategy,
    DeepSpeedStrategy,
    LearningRateFinder,
    ModelParallelStrategy,
    OnExceptionCheckpoint,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    StochasticWeightAveraging,
    TrainerFn,
    XLAStrategy,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_retrieval.checks import first_of, is_integer
from lightning_retrieval.distributed import gather_rows, to_host, world_size
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses.base import RetrievalLoss
from lightning_retrieval.losses.batch_loss import ranked_batch
from lightning_retrieval.models.sides import SIDES, Side
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.batch import GlobalRows
from lightning_retrieval.training.full_sharding import sharded_modules
from lightning_retrieval.training.optimizers import trainable_parameters, trained_parameters
from lightning_retrieval.training.sides import Unpacked, chunk_size_of

Check = tuple[Any, str, str]  # whether something is wrong, what it is, and the cure
LEAST_ROWS = 2  # number of rows from which batches are not equal by chance
LEAST_LABELS = 3  # number of different labels from which the labels of batches are not equal by chance
MANY = 0.25  # fraction of the queries of a batch without a positive, from which on a run warns


def check_trainer(module: Any) -> None:
    """Raise if a callback, a flag or the strategy of the Trainer would train a module wrongly or wait forever.

    Args:
        module: a `RetrievalModule` whose Trainer begins to fit, to evaluate or to predict.

    Raises:
        ValueError: if there is such a setting. The message names the setting, and what to use instead.
    """
    trainer = module.trainer
    checks: list[Check] = [
        (
            trainer.overfit_batches,
            "Trainer(overfit_batches=...) replaces the sampler, so that batches would no longer hold whole classes",
            "use limit_train_batches instead",
        ),
        (
            trainer.gradient_clip_val,
            "Trainer(gradient_clip_val=...) does not work with manual optimization",
            f"give {type(module).__name__}(..., updates=Updates(gradient_clip_val={trainer.gradient_clip_val}))",
        ),
        (
            trainer.accumulate_grad_batches != 1,
            "Trainer(accumulate_grad_batches=...) would cut the ranked lists apart",
            "use larger batches, which chunk_size embeds in parts",
        ),
        *_checks_of_strategy(trainer),
    ]
    for callback in trainer.callbacks:
        checks += _checks_of(callback, isinstance(trainer.strategy, ModelParallelStrategy))
    _raise_first(checks)


def _checks_of_strategy(trainer: Any) -> list[Check]:
    """What may be wrong with the strategy of a Trainer."""
    strategy = trainer.strategy
    settings = vars(strategy) | vars(strategy).get("_ddp_kwargs", {})
    predicts = trainer.state.fn == TrainerFn.PREDICTING and trainer.world_size > 1
    is_sharded = isinstance(strategy, ModelParallelStrategy)
    return [
        (
            not keeps_parameters(strategy),
            f"{type(strategy).__name__} replaces the parameters over which gradients are summed, or trains on a TPU",
            "use Trainer(strategy='auto') or 'ddp', or FSDP2Strategy() for a large network",
        ),
        (
            any(map(settings.get, ("static_graph", "_ddp_comm_hook", "_model_averaging_period"))),
            "static_graph, ddp_comm_hook and model_averaging_period of DDPStrategy do not work with gradients that are "
            "summed outside of DDP",
            "remove them",
        ),
        (
            is_sharded and (settings["_tensor_parallel_size"] != 1 or settings["_save_distributed_checkpoint"]),
            "with ModelParallelStrategy, all processes must share the data, and a checkpoint must be one file",
            "use FSDP2Strategy() or, for checkpoints in shards, FSDP2Strategy(sharded_checkpoints=True)",
        ),
        (
            is_sharded and predicts,
            "in predict the processes may have unequal numbers of batches, but with ModelParallelStrategy they embed "
            "each batch together",
            "predict with Trainer(strategy='ddp') from a checkpoint",
        ),
    ]


def keeps_parameters(strategy: Any) -> bool:
    """Whether optimizers get the parameters of the module itself, on a GPU or the CPU, and not flat copies of them.

    Args:
        strategy: the strategy of a `pytorch_lightning.Trainer`.
    """
    is_known = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy))
    return is_known and not isinstance(strategy, (DeepSpeedStrategy, SingleDeviceXLAStrategy, XLAStrategy))


def _checks_of(callback: Any, is_sharded: bool) -> list[Check]:
    """What may be wrong with a callback of Lightning. The two finders are added by Lightning's Tuner."""
    interval, steps = getattr(callback, "_train_time_interval", None), getattr(callback, "_every_n_train_steps", 0)
    monitor = getattr(callback, "monitor", None)
    return [
        (
            isinstance(callback, StochasticWeightAveraging),
            "StochasticWeightAveraging of Lightning trains on in the epoch that it adds",
            "use EMAWeightAveraging or WeightAveraging",
        ),
        (
            isinstance(callback, LearningRateFinder),
            "LearningRateFinder of Lightning does not see the loss of manual optimization",
            "compare a few short runs instead",
        ),
        (
            isinstance(callback, BatchSizeFinder),
            "BatchSizeFinder of Lightning would change the ranked lists",
            "use chunk_size='auto', which fits any batch in memory",
        ),
        (
            is_sharded and isinstance(callback, OnExceptionCheckpoint),
            "OnExceptionCheckpoint of Lightning saves with all processes, but one of them may have failed alone",
            "leave it out, or use Trainer(strategy='ddp')",
        ),
        (
            interval is not None,
            "ModelCheckpoint(train_time_interval=...) of Lightning never saves with manual optimization",
            "use every_n_train_steps",
        ),
        (
            steps > 0 and monitor and not monitor.startswith("train/"),
            f"ModelCheckpoint(monitor={monitor!r}, every_n_train_steps={steps}) of Lightning would save before the "
            "validation, with the metric of the validation before it",
            "leave out every_n_train_steps, and add another ModelCheckpoint without monitor for the steps",
        ),
    ]


def _raise_first(checks: Sequence[Check]) -> None:
    """Raise an error for the first thing that is wrong."""
    for is_wrong, rule, cure in checks:
        if is_wrong:
            raise InvalidValue(rule, cure=cure)


def check_start(module: Any, steps: float) -> None:
    """Raise if a module cannot be trained by this run; warn of what would train less than it seems to.

    Args:
        module: a `RetrievalModule` in a run that begins to train.
        steps: the number of steps of the run; inf if it is unknown.

    Raises:
        ValueError: if something is wrong. The message names a cure.
    """
    check_filled(module)
    _check_datasets(module.trainer.train_dataloader)
    _warn_of_half_parameters(module)
    _warn_of_equal_rates(module)
    _check_memory(module, steps)
    weights = module.loss.scheduled_weights()
    if weights and math.isinf(steps):
        rule = f"the weights of {', '.join(weights)} in `loss` change with the fraction of the training that is done"
        raise InvalidValue(rule, got="a run without a known number of steps", cure="set max_steps")
    if world_size() == 1:
        return
    chunk_sizes = [chunk_size_of(module.chunk_size, side) for side in SIDES]
    has_sync_norm = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    checks: list[Check] = [
        (
            module.memory is not None and module.gather is False,
            "a memory must be the same on all processes, which gather=False does not provide",
            "keep gather=True",
        ),
        (
            sharded_modules(module) and "auto" in chunk_sizes,
            "chunk_size='auto' is found by each process, but with ModelParallelStrategy they embed each chunk together",
            "give a number, such as chunk_size=32",
        ),
        (
            has_sync_norm and chunk_sizes != [None, None],
            "SyncBatchNorm waits for all processes at each chunk, but they may have unequal numbers of chunks",
            "set chunk_size=None, or remove sync_batchnorm",
        ),
    ]
    _raise_first(checks)


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


def _warn_of_half_parameters(module: Any) -> None:
    """Warn of trained parameters of 16 bits, unless the Trainer has converted the whole module.

    A step changes a parameter of bfloat16 only if it is larger than 1/256 of its value.
    """
    half = (torch.float16, torch.bfloat16)
    names = [name for name, parameter in trained_parameters(module) if parameter.dtype in half]
    if names and module.trainer.precision not in ("bf16-true", "16-true"):
        rank_zero_warn(
            f"{type(module).__name__}: parameters that learn should be float32, since small steps are lost in 16 bits, "
            f"got {len(names)} of 16 bits ({first_of(names, 3)}); load the network in float32 (of transformers: "
            "dtype=torch.float32), call its float(), or choose precision='bf16-true' of the Trainer."
        )


def _warn_of_equal_rates(module: Any) -> None:
    """Warn if the module's own `configure_optimizers` gives all parameters one rate, although they have factors."""
    updates = module.updates
    factors = {updates.head_lr_factor, updates.layer_decay, updates.loss_lr_factor, module.sides.query_lr_factor}
    rates = set()
    for optimizer in module.trainer.optimizers:
        rates |= {float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups}
    if factors != {1} and len(rates) == 1:
        rank_zero_warn(
            f"{type(module).__name__}: the learning rates of the parameter groups must differ by the factors of "
            f"`updates` and `sides`, but `configure_optimizers` gives all of them {rates.pop():.3g}, perhaps by a "
            "scheduler that sets the rates itself, such as OneCycleLR; give the scheduler a list with a rate for each "
            "group, or leave the factors out."
        )


def _check_memory(module: Any, steps: float) -> None:
    """Raise if nothing tells a memory when to begin; say if it begins too late to be ranked in this run."""
    memory, trainer = module.memory, module.trainer
    is_told = any(getattr(callback, "begins_memory", False) for callback in trainer.callbacks)
    if memory is None or memory.started or is_told:
        return
    if memory.start_step == "auto":
        raise InvalidValue(
            "CrossBatchMemory(start_step='auto') begins when MemoryMonitor finds that the embeddings no longer change "
            "fast, but the Trainer has no such callback",
            cure="give Trainer(callbacks=[MemoryMonitor()]), or a number as start_step",
        )
    last = memory.steps + (steps - module.global_step) / max(len(trainer.optimizers), 1)
    if last <= memory.start_step + 1:
        rank_zero_info(
            f"{type(module).__name__}: the memory is never ranked in this run of {last:.0f} batches, because its first "
            f"batch is stored after start_step={memory.start_step}; give CrossBatchMemory a smaller start_step, or "
            "train longer."
        )


def _check_datasets(loaders: Any) -> None:
    """Raise if a plain loader has a sampler of this library that was made with the labels of another data set."""
    for loader in CombinedLoader(loaders, "sequential").flattened:
        sampler: Any = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "check_dataset"):
            sampler.check_dataset(loader.dataset)


def check_first_batch(module: Any, unpacked: Sequence[Unpacked], rows: Sequence[GlobalRows]) -> None:
    """Compare the first batch with those of other processes and with what the sampler drew.

    Labels and ids of all processes are gathered once more, so that all of them raise the same error, whatever the rule
    of relevance and `gather` are.

    Args:
        module: a `RetrievalModule` in a run.
        unpacked: inputs, labels and ids of each side in this process.
        rows: the rows of each side that the loss ranks, with the number of rows of each process, `counts`.

    Raises:
        ValueError: if processes have the same rows or parts of different batches, or if labels or ids contradict the
            sampler of a `RetrievalDataLoader`. Other loaders cause a warning.
    """
    if not all(map(_are_integers, rows)):
        return  # the loss raises
    loader = module.trainer.train_dataloader
    if world_size() > 1:
        counts = [sum(of_process) for of_process in zip(*(of_side.counts for of_side in rows))]
        _check_parts(unpacked, counts, CombinedLoader(loader, "sequential").flattened)
    for name, (_, labels, ids), of_side in zip(_side_names(rows), unpacked, rows):
        labels = to_host(gather_rows(labels.long(), of_side.counts))
        if ids is not None:
            ids = to_host(gather_rows(ids.long(), of_side.counts))
        if hasattr(loader, "check_batch"):
            loader.check_batch(labels, ids, side=name)
        elif ids is not None and name is None:  # the lists of two sides ignore ids
            _warn_of_ids(module, finest(labels), ids, is_first=True)


def check_later_batch(module: Any, rows: Sequence[GlobalRows]) -> None:
    """Compare a batch with what the sampler drew, as far as this needs neither a further collective nor a wait.

    Args:
        module: a `RetrievalModule` in a run.
        rows: as for `check_first_batch`, on the host.

    Raises:
        ValueError: if several images have the same id, or two classes of the sampler have the same label.
    """
    loader = module.trainer.train_dataloader
    for name, of_side in zip(_side_names(rows), rows):
        labels = None
        if module.relevance is None:
            labels = of_side.labels
        if hasattr(loader, "check_batch"):
            loader.check_batch(labels, of_side.ids, side=name, is_first=False)
        elif labels is not None and of_side.ids is not None and name is None:
            _warn_of_ids(module, finest(labels), of_side.ids, is_first=False)


def _side_names(rows: Sequence[GlobalRows]) -> Sequence[Side | None]:
    """The names of the sides of a batch; of a batch without sides, None."""
    if len(rows) == 1:
        return [None]
    return SIDES


def _are_integers(rows: GlobalRows) -> bool:
    if not is_integer(rows.labels) or rows.labels.ndim not in (1, 2):
        return False
    return rows.ids is None or (is_integer(rows.ids) and rows.ids.shape == rows.labels.shape[:1])


def _check_parts(unpacked: Sequence[Unpacked], counts: Sequence[int], loaders: Sequence[Any]) -> None:
    """Raise if processes have the same rows, or parts of different global batches.

    Random transforms may have changed the inputs of equal images. So equal labels without ids cause a warning, unless
    the loaders are known to give each process other images.

    Args:
        unpacked: as for `check_first_batch`.
        counts: number of rows of each process.
        loaders: the loaders of training batches.
    """
    samplers = [getattr(loader, "sampler", None) for loader in loaders]
    drawn = [getattr(sampler, "global_batch", None) for sampler in samplers]
    labels_sum, rows_sum = 0, 0
    for inputs, labels, ids in unpacked:
        labels_sum = _checksum(labels, labels_sum)
        rows_sum = _checksum(labels, rows_sum)
        rows_sum = _checksum(inputs if ids is None else ids, rows_sum)
    own = [[zlib.crc32(repr(drawn).encode()), labels_sum, rows_sum]]
    processes = to_host(gather_rows(torch.tensor(own, device=labels.device), [1] * world_size()))
    different_draws, different_labels, different_rows = [len(column.unique()) for column in processes.unbind(1)]
    if None not in drawn:  # each process takes its part of what RetrievalDataLoader draws
        if different_draws > 1:
            rule = "all processes must draw the same global batches, of which each takes its part"
            cure = "give the sampler the same labels and the same `seed` in all processes"
            raise InvalidValue(rule, "RetrievalDataLoader", got="different first batches", cure=cure)
        return
    rule = "each process must have its own part of a batch"
    cure = (
        "use RetrievalDataLoader(dataset, PKSampler(...)), or let the data set return the index of each image as its id"
    )
    if min(counts) >= LEAST_ROWS and different_rows < world_size():
        got = "the same rows on several ranks, so that each image would be a positive of its own copy"
        raise InvalidValue(rule, got=got, cure=cure)
    labels_may_repeat = ids is not None or all(isinstance(sampler, DistributedSampler) for sampler in samplers)
    if not labels_may_repeat and different_labels < world_size() and len(labels.unique()) >= LEAST_LABELS:
        rank_zero_warn(
            f"RetrievalModule: {rule}, got the same labels on several ranks; if their images are the same but for "
            f"random transforms, each would be a positive of its own copy: {cure}."
        )


def _checksum(values: Tensor, before: int) -> int:
    """The checksum of a tensor that follows others, which have the checksum `before`."""
    return zlib.crc32(to_host(values).contiguous().flatten().view(torch.uint8).numpy().data, before)


def _warn_of_ids(module: Any, labels: Tensor, ids: Tensor, *, is_first: bool) -> None:
    """Warn if an id has two labels, or if ids repeat more often than the sampler draws their images.

    If the sampler draws each image once, no id may repeat. Else, unless it is known to draw with replacement, the first
    batch, which is full, must have more different ids than half of its rows.
    """
    loader = module.trainer.train_dataloader
    sampler = getattr(loader, "sampler", None)
    replacement = getattr(sampler, "replacement", None)
    draws_images = getattr(loader, "batch_size", None) is not None  # else another sampler draws whole batches
    draws_once = draws_images and (replacement is False or isinstance(sampler, SequentialSampler))
    different, pairs = len(ids.unique()), len(torch.stack([ids, labels], 1).unique(dim=0))
    too_few = len(ids) / 2 if is_first and replacement is not True else 0
    if draws_once:
        too_few = len(ids) - 1
    if different < pairs or different <= too_few:
        rank_zero_warn(
            f"{type(module).__name__}: each image must have an id of its own, but images of a batch have the same id; "
            "images with the same id are not in each other's lists: let the data set return the index of each image as "
            "its id, or no ids."
        )


def warn_of_epoch(module: Any) -> None:
    """Warn if a sampler inside of a user's own loader or sampler was not told the epoch, so that it repeats batches.

    The samplers of this library count the epochs themselves, and need to be told that of a resumed run.

    Args:
        module: a `RetrievalModule` in a run whose epoch begins.
    """
    parts: list[Any] = CombinedLoader(module.trainer.train_dataloader, "sequential").flattened
    for _ in range(3):  # a sampler may be in a sampler in a batch sampler of the loader
        parts = [value for part in parts for value in (part, *getattr(part, "__dict__", {}).values())]
    samplers = [part for part in parts if isinstance(part, Sampler) and hasattr(part, "epoch")]
    if any(getattr(part, "next_epoch", part.epoch) < module.current_epoch for part in samplers):
        rank_zero_warn(
            f"{type(module).__name__}: a sampler was not told the epoch, so that it draws the batches of an earlier "
            "one again; give the loader or the sampler around it a method `set_epoch` that passes the epoch on."
        )


def warn_of_batch_norm(module: Any, rows: Sequence[int], chunk_sizes: Sequence[int]) -> None:
    """Warn if BatchNorm layers, which mix the images of a batch, see the batch in chunks.

    Args:
        module: a `RetrievalModule` in a run.
        rows: number of rows of each side, of all processes.
        chunk_sizes: number of rows of each side that a process embeds at a time.
    """
    networks = [module] * len(rows)
    if len(rows) > 1 and module.query_embedder is not None:
        networks = [module.query_embedder, module.embedder]
    for network, count, chunk_size in zip(networks, rows, chunk_sizes):
        if chunk_size < count and any(map(_mixes_rows, network.modules())) and trainable_parameters(network):
            rank_zero_warn(
                f"{type(module).__name__}: BatchNorm sees {chunk_size} images at a time, not the batch of {count}, so "
                "the gradient is not that of the whole batch; with pretrained weights, freeze_batch_norm=True of "
                "Embedder, or such layers in eval mode, make it exact."
            )
            return


def _mixes_rows(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and layer.training and not isinstance(layer, nn.SyncBatchNorm)


def warn_of_lists_without_positives(module: Any, rows: Sequence[GlobalRows], embeddings: Sequence[Tensor]) -> None:
    """Warn if many queries of the first batch have no positive. If no query has a positive, the loss warns.

    There is no warning with a memory, which may have the positives in later steps, or with a rule of relevance, for
    which samplers draw no positives. The losses of other libraries may learn without positives.

    Args:
        module: a `RetrievalModule` in a run.
        rows: labels and ids of each side.
        embeddings: the embeddings of these rows.
    """
    losses = [loss for loss in module.loss.modules() if isinstance(loss, RetrievalLoss)]
    if module.memory is not None or module.relevance is not None or not losses:
        return
    queries, *candidates = [of_side.detach() for of_side in embeddings]
    batch = ranked_batch(queries, rows[0].labels, ids=rows[0].ids)
    if candidates:
        batch = ranked_batch(queries, rows[0].labels, candidates[0], rows[1].labels)
    without = max(loss.queries_without_value(batch) for loss in losses)
    if MANY * len(queries) <= without < len(queries):
        rank_zero_warn(
            f"{type(module).__name__}: {without} of {len(queries)} queries of the first batch have no relevant image "
            "in their list, and such a list teaches nothing; draw several images of each class, as "
            "RetrievalDataLoader(dataset, PKSampler(labels, classes_per_batch=32, samples_per_class=4)) does."
        )
