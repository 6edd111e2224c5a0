"""The tasks that Lightning leaves to a module in manual optimization: optimizers, clipping, schedulers, logging."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from functools import wraps
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_retrieval.backend import (
    DDPStrategy,
    ModelParallelStrategy,
    TrainerFn,
    pl,
    to_uncompiled,
)
from lightning_retrieval.checks import check_choice, check_integer, short_repr
from lightning_retrieval.compiled import compile_calls
from lightning_retrieval.distributed import world_size
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.plain_data import rebuild_factory
from lightning_retrieval.training.checkpoint_files import ShardedRunCheckpoints
from lightning_retrieval.training.checkpointed_module import CheckpointedModule
from lightning_retrieval.training.first_steps import (
    check_filled,
    check_start,
    check_trainer,
    keeps_parameters,
    warn_of_epoch,
)
from lightning_retrieval.training.full_sharding import broadcast_buffers, clip_sharded_gradients, is_sharded
from lightning_retrieval.training.missed_validation import MissedValidation
from lightning_retrieval.training.optimizers import (
    Updates,
    check_optimized,
    make_optimizer,
    match_states,
)
from lightning_retrieval.training.restored_states import check_links
from lightning_retrieval.training.run_report import log_settings
from lightning_retrieval.training.schedulers import make_scheduler

# Keys of a scheduler's dict that Lightning drops in manual optimization.
DROPPED_KEYS = ("monitor", "strict", "reduce_on_plateau")


class OptimizedModule(CheckpointedModule):
    """A module with one optimizer over its trainable parameters and an optional learning-rate scheduler.

    At the first step of each epoch, the module raises if a parameter requires a gradient but is in no optimizer. Each
    epoch is checked because callbacks may unfreeze layers between epochs.
    """

    _epoch_of_check: int | None = None  # epoch in which the optimizers were last checked

    def _set_optimizer(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None,
        lr_scheduler: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None,
        *,
        interval: Literal["epoch", "step"],
        frequency: int,
        monitor: str,
    ) -> None:
        """Check these arguments of the constructor and store them as attributes.

        Args:
            optimizer: called with the parameter groups; None for the default optimizer.
            lr_scheduler: called with the optimizer, or None.
            interval: the argument `lr_scheduler_interval`.
            frequency: the argument `lr_scheduler_frequency`.
            monitor: the argument `lr_scheduler_monitor`.
        """
        self.optimizer = optimizer
        if optimizer is not None:
            self.optimizer = rebuild_factory("optimizer", optimizer, (Optimizer,))
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is not None:
            schedulers = (LRScheduler, ReduceLROnPlateau)
            self.lr_scheduler = rebuild_factory("lr_scheduler", lr_scheduler, schedulers)
        self.lr_scheduler_interval = check_choice("lr_scheduler_interval", interval, ("epoch", "step"))
        self.lr_scheduler_frequency = check_integer("lr_scheduler_frequency", frequency, least=1)
        self.lr_scheduler_monitor = monitor

    @owned
    def _make_optimizer(self, scheduler_settings: Mapping[str, Any] = MappingProxyType({}), **rates: Any) -> Any:
        """The return value of `configure_optimizers`: the optimizer and, if there is one, its scheduler.

        Args:
            scheduler_settings: further entries of Lightning's dict of the scheduler.
            rates: arguments of `make_optimizer` that give parts of the network another learning rate.
        """
        has_scaler = self._trainer is not None and getattr(self.trainer.precision_plugin, "scaler", None) is not None
        optimizer, factors = make_optimizer(self, self.optimizer, has_scaler=has_scaler, **rates)
        if self.lr_scheduler is None:
            return optimizer
        scheduler = {
            "scheduler": make_scheduler(self.lr_scheduler, optimizer, factors),
            "interval": self.lr_scheduler_interval,
            "frequency": self.lr_scheduler_frequency,
            **scheduler_settings,
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_callbacks(self) -> Any:
        """Reset the state of an earlier run, and let a resumed run make up for a validation that it lacks."""
        self._epoch_of_check = None
        MissedValidation.install(self.trainer)
        return super().configure_callbacks()

    @owned
    def on_train_start(self) -> None:
        """Adapt the loaded states of the optimizers."""
        if keeps_parameters(self.trainer.strategy):
            for optimizer in self.trainer.optimizers:
                match_states(optimizer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check, once per epoch and after all callbacks' hooks, that each trainable parameter is in an optimizer."""
        if self._epoch_of_check != self.current_epoch and keeps_parameters(self.trainer.strategy):
            check_optimized(self, self.trainer.optimizers)
            self._epoch_of_check = self.current_epoch


class Throughput:
    """Measures the throughput of consecutive steps, in images per second."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self.measured = 0  # number of steps since the last restart whose throughput was measured

    def restart(self) -> None:
        """Leave the next step unmeasured, for example because a validation precedes it."""
        self._last_end = None
        self.measured = 0

    def step(self, images: int) -> float | None:
        """Images per second since the end of the previous step; None for the first step after a restart.

        Args:
            images: number of images of the step that ends now.
        """
        now = time.perf_counter()
        last_end, self._last_end = self._last_end, now
        if last_end is None:
            return None
        self.measured += 1
        return images / (now - last_end)


def release_ddp(strategy: DDPStrategy, module: Any) -> None:
    """Let a strategy train a module itself, instead of the module in DDP's wrapper.

    The wrapper checks that all processes have the same parameters, and copies those of the first process to the others.
    Then it is released: it holds space for all gradients, 4 bytes for each parameter in float32, which a step sums
    itself, see `GradientSum`.

    Args:
        strategy: the strategy of a Trainer.
        module: the LightningModule that is trained. Other modules that the Trainer may train later keep the wrapper.
    """

    def configure_ddp() -> None:
        type(strategy).configure_ddp(strategy)
        if strategy.lightning_module is module:
            strategy.model = module

    strategy.configure_ddp = configure_ddp  # type: ignore[method-assign]


def copy_buffers_of_first_process(trainer: Any) -> None:
    """Copy the buffers of rank 0 to all ranks, as DDP's wrapper does before each forward pass, unless told not to.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    strategy = trainer.strategy
    if world_size() == 1 or not isinstance(strategy, (DDPStrategy, ModelParallelStrategy)):
        return
    if isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("broadcast_buffers", True):
        return
    broadcast_buffers(trainer.lightning_module)


class CheckedSteps:
    """Replaces `training_step` of a strategy and checks the output, for a module in manual optimization.

    Without this check, a loss that a subclass returns, as in automatic optimization, would silently be ignored. No hook
    could check the output, because Lightning detaches the output before it calls the hooks.

    Args:
        strategy: the strategy of a Trainer.
        module: a LightningModule.
    """

    def __init__(self, strategy: Any, module: Any) -> None:
        self.strategy = strategy
        self.module = module

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Run the training step and return its output.

        Raises:
            ValueError: if the module returns a loss with a graph.
        """
        output = type(self.strategy).training_step(self.strategy, *arguments, **settings)
        if self.strategy.lightning_module is not self.module or self.module.automatic_optimization:
            return output  # the Trainer now trains another module, or Lightning back-propagates the output
        loss = output
        if isinstance(output, Mapping):
            loss = output.get("loss")
        if isinstance(loss, Tensor) and loss.requires_grad:
            raise InvalidValue(
                "must not return a loss that requires a gradient, because the step has ended and nothing "
                "back-propagates what it returns",
                type(self.module).__name__,
                "training_step",
                got=short_repr(loss),
                cure="make it a term of `loss`, WeightedSum({'ap': (1.0, SmoothAPLoss()), 'extra': (0.5, "
                "ExtraLoss())}), or return its detach()",
            )
        return output


class ManualTraining(OptimizedModule):
    """Base class of `RetrievalModule`: the hooks of a run that do not depend on what is embedded and ranked."""

    updates: Updates
    unfilled: Set[str] = frozenset()  # names of tensors that had no memory at the start, and were not loaded since

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._is_first_step = True  # whether the next step is the first step of the run
        self._throughput = Throughput()
        self._logged_terms: set[str] = set()  # names of the values that the last step has logged
        self._monitors: dict[int, str] = {}  # the metrics that `configure_optimizers` names, by id of the scheduler

    def __init_subclass__(cls, **settings: Any) -> None:
        """Let the module look at the metrics that its `configure_optimizers` names."""
        super().__init_subclass__(**settings)
        if "configure_optimizers" in vars(cls):
            cls.configure_optimizers = _reading_monitors(cls.configure_optimizers)  # type: ignore[method-assign]

    def _step_optimizers(self) -> bool:
        """Step all optimizers; returns False if half precision skipped the step because a gradient was not finite."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale_before = 0.0 if scaler is None else scaler.get_scale()
        optimizers = self.optimizers()
        if not isinstance(optimizers, list):
            optimizers = [optimizers]
        for optimizer in optimizers:
            optimizer.step()
        return scaler is None or bool(scaler.get_scale() >= scale_before)  # a skipped step decreases the scale

    def _step_due_schedulers(self, batch_idx: int, stepped: bool) -> None:
        """Step the schedulers that are due after a batch; `ReduceLROnPlateau` waits for its metric.

        Args:
            batch_idx: index of the batch in its epoch.
            stepped: whether the optimizers have stepped.
        """
        ended: dict[str, int] = {}  # index of the step or epoch that has just ended, by interval
        if stepped:
            ended["step"] = batch_idx
        if self.trainer.is_last_batch:
            ended["epoch"] = self.current_epoch
        for interval, index in ended.items():
            for config in self.trainer.lr_scheduler_configs:
                is_due = config.interval == interval and (index + 1) % config.frequency == 0
                if is_due and not isinstance(config.scheduler, ReduceLROnPlateau):
                    self.lr_scheduler_step(config.scheduler, None)

    def _step_plateau_schedulers(self) -> None:
        """Step each `ReduceLROnPlateau` that is due with its metric; raise if the metric was not logged."""
        trainer = self.trainer
        for config in trainer.lr_scheduler_configs:
            epoch_is_due = trainer.is_last_batch and (self.current_epoch + 1) % config.frequency == 0
            is_due = epoch_is_due or config.interval == "step"
            if not is_due or not isinstance(config.scheduler, ReduceLROnPlateau):
                continue
            monitor = self._monitors.get(id(config.scheduler), self.lr_scheduler_monitor)
            value = trainer.callback_metrics.get(monitor)
            if value is None:
                raise InvalidValue(
                    f"ReduceLROnPlateau needs the metric {monitor!r}, which `lr_scheduler_monitor` or the `monitor` of "
                    "configure_optimizers names",
                    type(self).__name__,
                    got=f"none of this name; logged are {sorted(trainer.callback_metrics)}",
                )
            self.lr_scheduler_step(config.scheduler, value)

    def _log_step(self, terms: Mapping[str, Tensor], images: int) -> None:
        """Log the loss, its terms and the throughput.

        Args:
            terms: values by the names under which they are logged.
            images: images of all processes in this step.
        """
        trainer: Any = self.trainer
        logged_before, self._logged_terms = self._logged_terms, set(terms)
        for name in logged_before - terms.keys():  # Lightning would log the last value until the epoch ends
            trainer._results.pop(f"training_step.{name}", None)
        for name, value in terms.items():
            if name not in logged_before or not self._log_again(name, value):
                self.log(name, value, prog_bar=name == "train/loss")
        images_per_second = self._throughput.step(images)
        # A call of `log` takes 0.4 ms, so only when loggers write, or if the progress bar has no value yet.
        is_due = self._throughput.measured == 1 or trainer.fast_dev_run or trainer._logger_connector.should_update_logs
        if images_per_second is not None and is_due:
            if images_per_second >= 100:
                images_per_second = round(images_per_second)  # progress bars show more digits as 3.84e+3
            # A tensor on the CPU: a Python number would be copied to the device, and the host would wait for the copy.
            self.log("train/images/s", torch.tensor(float(images_per_second)), prog_bar=True)

    def _log_again(self, name: str, value: Tensor) -> bool:
        """Log a value in the way in which an earlier step of the epoch has logged its name; False if none has.

        A call of `log` checks all its arguments and copies the record of the name, which takes 0.4 ms.
        """
        results, connector, hook = self.trainer._results, self.trainer._logger_connector, self._current_fx_name
        is_overridden = "log" in vars(self) or type(self).log is not pl.LightningModule.log
        if is_overridden or hook is None or not results or value.ndim > 0:
            return False
        key = f"{hook}.{name}"
        if key not in results or connector.should_reset_tensors(hook):
            return False
        results.update_metrics(key, value.detach(), 1)  # such values are not averaged over an epoch
        connector._current_fx = hook
        return True

    @owned
    def configure_callbacks(self) -> Any:
        """Check the flags of the Trainer. This is the first hook in which the Trainer is known."""
        strategy = self.trainer.strategy
        check_trainer(self)
        strategy.training_step = CheckedSteps(strategy, self)
        if isinstance(strategy, ModelParallelStrategy):
            ShardedRunCheckpoints(strategy).install()
        # All state of a step is complete when it ends, so a run can be resumed from a checkpoint after any step.
        warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization and every_n_train_steps")
        # `configure_model` is overridden, but does nothing under the strategies that `WeightAveraging` supports.
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides the")
        self._is_first_step = True
        return super().configure_callbacks()

    @owned
    def on_train_start(self) -> None:
        """Check the run with `check_start`; raise if a plateau gets no validation."""
        super().on_train_start()
        check_start(self, steps_of_run(self.trainer))
        trainer: Any = self.trainer
        check_links(trainer.callbacks)
        if not trainer.enable_validation or _validates_after_last_batch(trainer):
            return
        interval = getattr(trainer, "val_check_interval", "a time")
        for config in trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, ReduceLROnPlateau) and config.interval == "epoch":
                raise InvalidValue(
                    "ReduceLROnPlateau with the interval 'epoch' needs a validation after the last batch of an "
                    f"epoch, but val_check_interval={interval!r} with "
                    f"check_val_every_n_epoch={trainer.check_val_every_n_epoch!r} runs none there",
                    cure="use the interval 'step', which steps it after each validation",
                )

    def on_train_epoch_start(self) -> None:
        """Exclude the time between epochs from the throughput; warn if a sampler was not told the epoch."""
        self._throughput.restart()
        warn_of_epoch(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Check the optimizers, and copy the buffers of rank 0 to all ranks."""
        super().on_train_batch_start(batch, batch_idx)
        copy_buffers_of_first_process(self.trainer)
        _count_begun_epoch(self.trainer)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip gradients: in this hook, half-precision gradients have been unscaled but not yet used."""
        limit, algorithm = self.updates.gradient_clip_val, self.updates.gradient_clip_algorithm
        if limit is None:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(map(is_sharded, parameters)):
            clip_sharded_gradients(parameters, limit, algorithm)
        else:
            self.clip_gradients(optimizer, limit, algorithm)

    def on_validation_start(self) -> None:
        """Copy the buffers of rank 0 to all ranks, and exclude the validation from the throughput."""
        check_filled(self)
        copy_buffers_of_first_process(self.trainer)
        self._throughput.restart()
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            log_settings(self.trainer, {})

    def on_test_start(self) -> None:
        """Log the settings of the test data."""
        check_filled(self)
        log_settings(self.trainer, {})

    def on_validation_epoch_end(self) -> None:
        """Step the `ReduceLROnPlateau` schedulers before a checkpoint is written."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self._step_plateau_schedulers()

    def on_train_epoch_end(self) -> None:
        """Step the `ReduceLROnPlateau` schedulers of a run without validation."""
        if not self.trainer.enable_validation:
            self._step_plateau_schedulers()


def _reading_monitors(configure_optimizers: Callable[[Any], Any]) -> Any:
    """The method `configure_optimizers`, which keeps the metrics that its result names for schedulers.

    In manual optimization, Lightning would drop them, and advise to step schedulers that this library steps.
    """

    @wraps(configure_optimizers)
    def configured(module: Any) -> Any:
        return _read_monitors(configure_optimizers(module), module._monitors)

    return configured


def _read_monitors(found: Any, monitors: dict[int, str], monitor: str | None = None) -> Any:
    """The optimizers and schedulers in nested lists and dicts, without the keys that Lightning drops.

    Args:
        found: a part of the result of `configure_optimizers`.
        monitors: gets the metric of each scheduler that has one, by the id of the scheduler.
        monitor: the metric that an enclosing dict names.
    """
    if isinstance(found, (list, tuple)):
        return type(found)(_read_monitors(part, monitors) for part in found)
    if not isinstance(found, dict):
        if monitor is not None:
            monitors[id(found)] = monitor
        return found
    monitor = found.get("monitor", monitor)
    kept = {name: value for name, value in found.items() if name not in DROPPED_KEYS}
    for name in {"lr_scheduler", "scheduler"} & kept.keys():
        kept[name] = _read_monitors(kept[name], monitors, monitor)
    return kept


def compile_only(module: Any, networks: Iterable[nn.Module]) -> None:
    """If `torch.compile` has compiled a module, compile only its networks instead.

    Args:
        module: the LightningModule.
        networks: the networks that it calls.
    """
    compiled = module._compiler_ctx
    if compiled is None:
        return
    to_uncompiled(module)
    for network in networks:
        compile_calls(network, compiled["dynamo_ctx"])


def steps_of_run(trainer: Any) -> float:
    """The number of optimizer steps after which a run ends, counted as in `trainer.global_step`.

    Each optimizer is stepped once per batch, and Lightning counts the steps of all optimizers. The result is inf if the
    run has no limit of steps or epochs, or if the number of batches of an epoch is unknown.

    Args:
        trainer: a `pytorch_lightning.Trainer` in a run.
    """
    most = math.inf
    if trainer.max_epochs not in (-1, None):  # None before `fit`, where `save_checkpoint` may be called
        most = trainer.max_epochs * trainer.num_training_batches * max(len(trainer.optimizers), 1)
    if trainer.max_steps != -1:
        most = min(most, trainer.max_steps)
    return most


def fraction_of_run(trainer: Any) -> float:
    """The fraction of the optimizer steps of a run that are done, from 0 to 1; 0 if the run has no known end.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    steps = steps_of_run(trainer)
    if steps <= 0:
        return 0.0
    return float(min(trainer.global_step / steps, 1.0))


def _count_begun_epoch(trainer: Any) -> None:
    """Count the current epoch as begun, if Lightning has not, so that the next checkpoint has the right position.

    Lightning does not count the first epoch of a run that is resumed from a checkpoint of the last batch of an epoch. A
    run resumed from a later checkpoint of this first epoch would then begin the epoch again.

    Args:
        trainer: a `pytorch_lightning.Trainer`.
    """
    progress = trainer.fit_loop.epoch_progress
    if progress.current.ready <= progress.current.completed:
        progress.increment_ready()
        progress.increment_started()


def _validates_after_last_batch(trainer: Any) -> bool:
    """Whether every epoch with a validation has one after its last batch."""
    interval, batches = trainer.val_check_batch, trainer.num_training_batches
    if interval is None:  # validations at intervals of time
        return False
    if interval == float("inf") or batches % interval == 0:
        return True
    return trainer.check_val_every_n_epoch is None and interval % batches == 0
