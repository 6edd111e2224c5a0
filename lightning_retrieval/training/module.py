"""The LightningModule that trains any embedding network with any loss over the whole batch's ranked lists."""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, ParallelStrategy, SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_retrieval.checks import check_choice, check_finite_number, check_integer, check_positive
from lightning_retrieval.distributed import (
    GlobalBatch,
    gather_batch,
    rank,
    step_traffic,
    sum_gradients,
    sum_over_ranks,
    world_size,
)
from lightning_retrieval.losses.blackbox_map import BlackboxMAPLoss
from lightning_retrieval.losses.ranked_batch import QueryRange
from lightning_retrieval.losses.third_party import USE_OTHER_LOSS, as_batch_loss, original_loss
from lightning_retrieval.models.multi_scale import check_scales, multi_scale
from lightning_retrieval.models.whitening import PCAWhitening
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.chunked import chunked_backward, largest_chunk_size
from lightning_retrieval.training.hyperparameters import describe, rebuild, rebuild_factory, settings
from lightning_retrieval.training.memory import CrossBatchMemory

Unpacked = tuple[Tensor, Tensor, Tensor | None]


class RetrievalModule(pl.LightningModule):
    """Trains an embedder so that each batch's images rank their own class first.

    One batch is one optimizer step and, with several processes, one sum of gradients, whatever `chunk_size` is. The
    lists are those of the global batch: each process embeds its share, the embeddings are gathered in rank order. With
    this library's losses each process then takes the loss of its own queries; with others each takes the whole loss.

    Subclass it freely: `forward`, `unpack_batch` and `configure_optimizers` are the places meant for it. A subclass's
    own constructor arguments reach the checkpoint, from which they come back as plain values: numbers, strings, lists
    and dicts do, others have to be given to `load_from_checkpoint` again.

    Args:
        embedder: maps images to embeddings (batch, D); `lightning_retrieval.Embedder` or any module.
        loss: called as `loss(embeddings, labels)`, and with `ids=` where it is one of this library's; the losses of
            pytorch-metric-learning work as they are.
        chunk_size: images embedded at a time, >= 1; the whole share of the batch at once where None; `"auto"` for the
            most that fit the device's memory, found by trial before the first step.
        optimizer: called with the parameter groups; a class, or `functools.partial(torch.optim.SGD, lr=0.1)`.
        lr_scheduler: called with the optimizer, or None.
        lr_scheduler_interval: what the scheduler is stepped after, `"step"` or `"epoch"`.
        lr_scheduler_frequency: after how many of them, >= 1.
        lr_scheduler_monitor: the logged metric that `ReduceLROnPlateau` looks at.
        gradient_clip_val: largest gradient, > 0; not clipped where None. Unscaled first in half precision.
        gradient_clip_algorithm: `"norm"` of all gradients together, or each `"value"`.
        head_lr_factor: learning rate of `embedder.head` over that of the rest, > 0 (FastAP, CVPR 2019: 10).
        seed: the random state of a step (dropout) is a function of (seed, step, rank); that of `seed_everything`
            where None, and 0 without one.
        memory: embeddings of past batches to rank too; it needs ids in the batches. Losses of pytorch-metric-learning
            must be such as take references.
        memory_weight: where None, the memory makes each query's list longer (RaMBO, XBM); a number makes it a second
            term of that weight, the loss of the batch's queries against memory and batch without gradient (ROADMAP's
            code has 1).
        gather: False keeps lists to each process' own share, and takes the mean of the processes' losses.
        eval_scales: sizes, as factors of the images' own, that are embedded and averaged in evaluation and prediction
            (`multi_scale`); embeddings stay as `forward` gives them where there is only 1.
        whitening: applied in evaluation and prediction once it has learned, by its `fit` or by the callback
            `LearnWhitening`.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `embedder` or `loss` is no module.

    Example:
        >>> import torch
        >>> from lightning_retrieval import RetrievalModule, SmoothAPLoss
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss(tau=0.01), chunk_size=16)
        >>> module(torch.randn(3, 8)).shape
        torch.Size([3, 4])

    Relations:
        Metrics are logged by `lightning_retrieval.callbacks.RetrievalEvaluation`, batches with several images of each
        class are drawn by `lightning_retrieval.datamodules.PKSampler`.
    """

    def __init__(
        self,
        embedder: nn.Module,
        loss: nn.Module,
        chunk_size: int | Literal["auto"] | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] = torch.optim.AdamW,
        lr_scheduler: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_frequency: int = 1,
        lr_scheduler_monitor: str = "val/mAP",
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        head_lr_factor: float = 1.0,
        seed: int | None = None,
        memory: CrossBatchMemory | None = None,
        memory_weight: float | None = None,
        gather: bool = True,
        eval_scales: Sequence[float] = (1.0,),
        whitening: PCAWhitening | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self.save_hyperparameters(ignore=["embedder", "loss", "memory", "whitening", "optimizer", "lr_scheduler"])
        if "_instantiator" in self.hparams:  # under LightningCLI they are the configuration, plain already
            self.save_hyperparameters()
        else:
            modules = {"embedder": embedder, "loss": loss, "memory": memory, "whitening": whitening}
            given = {**modules, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
            self.save_hyperparameters(describe({**self.hparams, **given}))
        self.automatic_optimization = False
        self.embedder = rebuild(who, "embedder", embedder, nn.Module)
        self.loss = as_batch_loss(rebuild(who, "loss", loss, nn.Module))
        self.optimizer = rebuild_factory(who, "optimizer", optimizer, Optimizer)
        self.lr_scheduler = lr_scheduler and rebuild_factory(
            who, "lr_scheduler", lr_scheduler, (LRScheduler, ReduceLROnPlateau)
        )
        if isinstance(chunk_size, str) and chunk_size != "auto":
            raise TypeError(f"{who}: `chunk_size` must be an integer >= 1 or 'auto', got {chunk_size!r}.")
        if chunk_size is not None and chunk_size != "auto":
            check_integer(who, "chunk_size", chunk_size, least=1)
        self.chunk_size = chunk_size
        if isinstance(original_loss(self.loss), BlackboxMAPLoss):
            raise TypeError(
                f"{who}: BlackboxMAPLoss takes scores of images for classes, not embeddings and labels; call it in a "
                "loop of your own, or rank images by images with BlackboxAPLoss and a `memory`."
            )
        self._chunk_found = (0, 0)  # the largest chunk, and the rows it was found for
        self.memory = None if memory is None else rebuild(who, "memory", memory, CrossBatchMemory)
        self.memory_weight = self._check_memory(memory_weight)
        if not isinstance(gather, bool):
            raise TypeError(f"{who}: `gather` must be True or False, got {gather!r}.")
        self.gather = gather
        self.eval_scales = check_scales(who, "eval_scales", eval_scales)
        self.whitening = None if whitening is None else rebuild(who, "whitening", whitening, PCAWhitening)
        self._begun = False
        self._last_step_end: float | None = None
        self.lr_scheduler_interval = check_choice(
            who, "lr_scheduler_interval", lr_scheduler_interval, ("epoch", "step")
        )
        self.lr_scheduler_frequency = check_integer(who, "lr_scheduler_frequency", lr_scheduler_frequency, least=1)
        self.lr_scheduler_monitor = lr_scheduler_monitor
        if gradient_clip_val is not None:
            check_positive(who, "gradient_clip_val", gradient_clip_val)
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = check_choice(
            who, "gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value")
        )
        self.head_lr_factor = check_positive(who, "head_lr_factor", head_lr_factor)
        default = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        self.seed = default if seed is None else check_integer(who, "seed", seed, least=0)

    # What a subclass may want to change.

    def forward(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Embed images, each by itself.

        Override it where embedding is more than one call of `embedder`. Losses and metrics normalise what it returns.
        """
        embeddings: Tensor = self.embedder(images)
        return embeddings

    def unpack_batch(self, batch: Any) -> Unpacked:
        """What a batch of the DataLoader holds: images, labels, and the images' dataset indices or None.

        Labels have shape (batch,), or (batch, levels), finest first, for losses that look at several levels. Here
        `(images, labels)`, `(images, labels, ids)` or a dict with these keys. Override it for any other form.

        Raises:
            TypeError: if the batch has another form.
        """
        if isinstance(batch, dict):
            if "images" in batch and "labels" in batch:
                return batch["images"], batch["labels"], batch.get("ids")
            came = f"a dict with the keys {sorted(map(str, batch))}"
        elif isinstance(batch, (tuple, list)):
            if len(batch) in (2, 3):
                return batch[0], batch[1], batch[2] if len(batch) == 3 else None
            came = f"{len(batch)} items"
        else:
            came = type(batch).__name__
        raise TypeError(
            f"{type(self).__name__}: a batch must be (images, labels), (images, labels, ids) or a dict with the keys "
            f"images, labels and maybe ids, got {came}; override unpack_batch for another form."
        )

    def configure_optimizers(self) -> Any:
        """One optimizer over the embedder's and the loss's parameters, and its scheduler.

        Override it for anything else; whatever Lightning accepts here works. Schedulers are stepped as their
        configuration (`interval`, `frequency`) says; `ReduceLROnPlateau` looks at `lr_scheduler_monitor`, since
        Lightning drops its `monitor` where optimization is manual.
        """
        head = [p for p in _parameters(getattr(self.embedder, "head", None)) if p.requires_grad]
        in_head = set(map(id, head))
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in in_head]
        if not (head or rest):
            raise ValueError(f"{type(self).__name__}: `embedder` and `loss` have no parameter with a gradient.")
        if self.head_lr_factor != 1 and not head:
            raise ValueError(
                f"{type(self).__name__}: `head_lr_factor` is {self.head_lr_factor}, but the embedder has no `head` "
                "with parameters; name its last layers `head`, or leave the factor at 1."
            )
        optimizer = self.optimizer([{"params": group} for group in (rest, head) if group])
        if head:
            optimizer.param_groups[-1]["lr"] *= self.head_lr_factor
        if self.lr_scheduler is None:
            return optimizer
        configuration = {
            "scheduler": self.lr_scheduler(optimizer),
            "interval": self.lr_scheduler_interval,
            "frequency": self.lr_scheduler_frequency,
        }
        return {"optimizer": optimizer, "lr_scheduler": configuration}

    # Training.

    def configure_callbacks(self) -> Any:
        """Refuses Trainer flags that a listwise loss cannot honour, at the first moment the Trainer is known."""
        who, trainer = type(self).__name__, self.trainer
        if trainer.gradient_clip_val:
            raise ValueError(
                f"{who}: Trainer(gradient_clip_val={trainer.gradient_clip_val}) does not work with manual optimization"
                f"; give it to the module: {who}(..., gradient_clip_val={trainer.gradient_clip_val})."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"{who}: Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) would cut the ranked lists "
                "apart; take larger batches and embed them piece by piece with chunk_size."
            )
        overfit = getattr(trainer, "overfit_batches", 0)
        if overfit:
            raise ValueError(
                f"{who}: Trainer(overfit_batches={overfit}) replaces the sampler, so that batches lose "
                "their classes; use limit_train_batches instead."
            )
        strategy = trainer.strategy
        if getattr(strategy, "_ddp_kwargs", {}).get("static_graph"):
            raise ValueError(
                f"{who}: DDPStrategy(static_graph=True) expects one backward pass through DDP a step, which there is "
                "none of here; leave it out."
            )
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) or isinstance(strategy, DeepSpeedStrategy):
            raise ValueError(
                f"{who}: gradients are summed over whole parameters, which {type(strategy).__name__} does not keep; "
                "use Trainer(strategy='auto') or 'ddp'."
            )
        # A step ends with its state complete, so that a checkpoint after it is what a run is resumed from.
        warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization and every_n_train_steps")
        self._begun = False
        return super().configure_callbacks()

    def _refuse_for_several(self) -> None:
        """Refuse what several processes cannot do."""
        who, several = type(self).__name__, world_size() > 1
        if several and self.memory is not None and not self.gather:
            raise ValueError(
                f"{who}: a memory must be the same on all {world_size()} processes, which gather=False does not give; "
                "leave gather at True."
            )
        if several and self.chunk_size is not None and any(isinstance(m, nn.SyncBatchNorm) for m in self.modules()):
            raise ValueError(
                f"{who}: SyncBatchNorm waits for all processes at each chunk, but they may have unequal numbers of "
                "chunks; set chunk_size=None, or leave out sync_batchnorm."
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take on the run's precision before the weights come; Lightning does so after, through the one there was."""
        if self._trainer is not None:
            self.trainer.precision_plugin.convert_module(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the hyperparameters plain, also where a subclass has called `save_hyperparameters` itself."""
        if self.CHECKPOINT_HYPER_PARAMS_KEY in checkpoint:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = describe(dict(checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Embed, gather, take the loss and its gradient, push it through, and step: all state changes are in here."""
        images, labels, ids = self.unpack_batch(batch)
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.zero_grad()
        if not self._begun:
            self._refuse_for_several()
        seen: tuple[GlobalBatch, dict[str, Tensor]]

        def loss(embeddings: Tensor) -> Tensor:
            nonlocal seen
            batch = self._gather(embeddings, labels, ids)
            if not self._begun:
                self._report(batch, len(images) if size is None else min(size, len(images)))
            with self._random_state(0):  # a loss that draws numbers draws the same on all processes
                value, terms = self._loss(batch)
            seen = batch, terms
            return value

        with self._random_state(rank()), self._unsynchronised():
            size = self._largest_chunk(images) if self.chunk_size == "auto" else self.chunk_size
            share = chunked_backward(self, images, loss, size, backward=self.manual_backward)
        everyone, terms = seen
        self._begun = True
        terms = {"train/loss": share, **terms}
        values = sum_gradients(self.parameters(), torch.stack([term.to(share) for term in terms.values()]))
        if not math.isfinite(values[0]):
            raise ValueError(f"{type(self).__name__}: the loss is {values[0].item()} at step {self.global_step}.")
        scale = self._loss_scale()
        for optimizer in optimizers:
            optimizer.step()
        if self.memory is not None:
            self.memory.update(everyone.embeddings, everyone.labels, everyone.ids)
        if self._loss_scale() >= scale:  # else the step was skipped, with infinite half-precision gradients
            self._step_schedulers("step", batch_idx)
        if self.trainer.is_last_batch:
            self._step_schedulers("epoch", self.current_epoch)
        for name, value in zip(terms, values):
            self.log(name, value, prog_bar=name == "train/loss")
        now = time.perf_counter()
        if self._last_step_end is not None:
            self.log("train/images_per_second", self._images(everyone) / (now - self._last_step_end), prog_bar=True)
        self._last_step_end = now

    def on_train_epoch_start(self) -> None:
        """Leave out of the images a second what passes between epochs."""
        self._last_step_end = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let DDP bring rank 0's buffers to all ranks at the next forward."""
        self._synchronise_buffers()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip, here where half-precision gradients have been unscaled and not yet been used."""
        if self.gradient_clip_val is not None:
            self.clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)

    def _gather(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None) -> GlobalBatch:
        """The batch whose lists are ranked; refused where an embedding is not finite."""
        who = type(self).__name__
        if len(labels) != len(embeddings):
            raise ValueError(
                f"{who}: a batch must have one label for each image, got {len(labels)} labels for {len(embeddings)} "
                "images."
            )
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        batch = gather_batch(who, embeddings, labels, ids, gather=self.gather, own_queries=self.loss.splits_by_query)
        finite = torch.isfinite(batch.embeddings).all(1)
        if not bool(finite.all()):  # seen by all ranks alike, so that none is left waiting for another
            rows = (~finite).nonzero()[:, 0]
            which = f"rows {rows[:5].tolist()}" if batch.ids is None else f"ids {batch.ids[rows][:5].tolist()}"
            raise ValueError(
                f"{who}: embeddings must be finite, got NaN or inf in {len(rows)} of {len(finite)} rows at step "
                f"{self.global_step} (seen on rank {rank()}), the first for {which}; a lower learning rate or "
                "gradient_clip_val often helps."
            )
        return batch

    def _loss(self, batch: GlobalBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """This process' share of the loss, and of its terms; the shares of all processes add up to them."""
        embeddings, labels, ids, counts = batch
        own_queries = self.gather and len(counts) > 1 and self.loss.splits_by_query
        begin = sum(counts[: rank()])
        queries = QueryRange(begin, begin + counts[rank()], sum_over_ranks) if own_queries else None
        part = 1.0 if own_queries else 1 / len(counts)
        with torch.autocast(embeddings.device.type, enabled=False):
            longer = self.memory is not None and self.memory_weight is None
            ranked: Mapping[str, Tensor | None] = {"ids": ids}
            if self.memory is not None:  # asked in any case, so that it refuses a batch before anything is changed
                ranked = self.memory.references(embeddings if longer else embeddings.detach(), labels, ids)
            value = self._call_loss(embeddings, labels, **(ranked if longer else {"ids": ids}), queries=queries)
            terms = dict(self.loss.terms)
            if self.memory is not None and self.memory_weight is not None and self.memory.started:
                of_memory = self._call_loss(embeddings, labels, **ranked, queries=queries)
                terms |= {"batch": value.detach(), "memory": of_memory.detach()}
                value = value + self.memory_weight * of_memory
        return part * value, {f"train/loss/{name}": part * term for name, term in terms.items()}

    def _call_loss(self, *arguments: Any, **keywords: Any) -> Tensor:
        value = self.loss(*arguments, **keywords)
        if not isinstance(value, Tensor) or value.ndim:
            raise ValueError(f"{type(self).__name__}: `loss` must return a scalar, got {value!r}; set its reduction.")
        return value

    def _check_memory(self, weight: float | None) -> float | None:
        who = type(self).__name__
        if weight is not None:
            check_finite_number(who, "memory_weight", weight)
            if self.memory is None:
                raise ValueError(f"{who}: `memory_weight` came without `memory`; give both or neither.")
        if self.memory is not None and self.loss.terms_without_references:
            raise TypeError(
                f"{who}: with a `memory` the loss must rank references without the query's own copy, which "
                f"{', '.join(self.loss.terms_without_references)} cannot do; {USE_OTHER_LOSS}."
            )
        return weight

    def _largest_chunk(self, images: Tensor) -> int:
        """The largest chunk that fits, looked for again where a batch is longer than any before."""
        chunk, rows = self._chunk_found
        if len(images) > rows:
            parameters = sum(p.numel() * p.element_size() for p in self.parameters() if p.requires_grad)
            # Adam's two moments do not exist before the first step; several processes sum gradients in one flat copy.
            chunk = largest_chunk_size(self, images, reserve=3 * parameters)
            rank_zero_info(f"{type(self).__name__}: chunks of {chunk} of {len(images)} images fit into memory.")
            self._chunk_found = chunk, len(images)
        return chunk

    def _report(self, batch: GlobalBatch, chunk: int) -> None:
        """Say how long the lists are, what a step communicates and what chunks change, as the first batch shows.

        Loggers get the same among the hyperparameters, TensorBoard as text, with the settings of the data module and of
        the sampler.
        """
        norms = [m for m in self.modules() if isinstance(m, _BatchNorm) and m.training]
        if chunk < len(batch.labels) and any(not isinstance(norm, nn.SyncBatchNorm) for norm in norms):
            rank_zero_warn(
                f"{type(self).__name__}: BatchNorm sees {chunk} images at a time, not the batch of "
                f"{len(batch.labels)}, so the gradient is not that of the whole batch; freeze_batch_norm=True of "
                "Embedder, or such layers in eval mode, make it exact."
            )
        sizes = torch.unique(finest(batch.labels), return_counts=True)[1].tolist()
        each = f"{sizes[0]}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        said = (
            f"{type(self).__name__}: batches of P = {len(sizes)} classes with K = {each} images, lists of "
            f"{len(batch.labels) - 1} images"
        )
        if self.memory is not None:
            apart = "" if self.memory_weight is None else " in a second term"
            said += f" and up to {self.memory.size} of the memory{apart}"
            said += f", from step {self.memory.start_step} on" if self.memory.start_step else ""
        if world_size() > 1:
            numbers = sum(p.numel() for p in self.parameters() if p.requires_grad)
            rows, dim = batch.embeddings.shape
            own_queries = self.loss.splits_by_query
            traffic = step_traffic(
                rows,
                dim,
                numbers,
                world_size(),
                gather=self.gather,
                own_queries=own_queries,
                bytes_=batch.embeddings.element_size(),
            )
            what = ", ".join(f"{name} {size / 1e6:.3g}" for name, size in traffic.items())
            said += f", over {world_size()} processes" if self.gather else f", on each of {world_size()} processes"
            said += f"; each process sends {sum(traffic.values()) / 1e6:.3g} MB a step ({what})"
        rank_zero_info(f"{said}.")
        facts: dict[str, Any] = {
            "batch": {
                "images": self._images(batch),
                "classes": len(sizes),
                "list_length": len(batch.labels) - 1 + (0 if self.memory is None else self.memory.size),
                "chunk_size": chunk,
                "processes": world_size(),
            }
        }
        sampler = getattr(self.trainer.train_dataloader, "batch_sampler", None)
        if sampler is not None:  # of RetrievalDataLoader the one of global batches
            facts["sampler"] = settings(getattr(sampler, "batch_sampler", sampler))
        self._tell(facts)

    def _tell(self, facts: Mapping[str, Any]) -> None:
        """Log facts, and the settings of the data module, where Lightning logs those of the model."""
        data = getattr(self.trainer, "datamodule", None)
        told = dict(facts) if data is None else {**facts, "data": settings(data)}
        for logger in self.trainer.loggers if told else ():
            if isinstance(logger, TensorBoardLogger):  # which shows and writes the first hyperparameters only
                for name, fact in told.items():
                    logger.experiment.add_text(name, f"```json\n{json.dumps(fact, indent=2)}\n```")
            else:
                logger.log_hyperparams(told)

    def _images(self, batch: GlobalBatch) -> int:
        """Of all processes together; their shares are of one size where they are not gathered."""
        return len(batch.labels) * (1 if self.gather else world_size())

    def _unsynchronised(self) -> AbstractContextManager[None]:
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _synchronise_buffers(self) -> None:
        if isinstance(self.trainer.model, DistributedDataParallel):
            self.trainer.model.require_forward_param_sync = True

    def _loss_scale(self) -> float:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 0.0 if scaler is None else float(scaler.get_scale())

    @contextmanager
    def _random_state(self, rank: int) -> Iterator[None]:
        """Random numbers as a function of (seed, step, rank), so that a run goes on as it would have."""
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.manual_seed(((self.seed * 1_000_003 + self.global_step) * 65_537 + rank) % 2**63)
            yield

    def _step_schedulers(self, interval: str, index: int) -> None:
        for config in self.trainer.lr_scheduler_configs:
            plateau = isinstance(config.scheduler, ReduceLROnPlateau)
            if config.interval == interval and (index + 1) % config.frequency == 0 and not plateau:
                self.lr_scheduler_step(config.scheduler, None)

    # Evaluation.

    def on_validation_start(self) -> None:
        """Let DDP bring rank 0's buffers to all ranks at the next forward; leave it out of the images a second."""
        self._synchronise_buffers()
        self._last_step_end = None
        if self.trainer.state.fn == TrainerFn.VALIDATING:
            self._tell({})

    def on_test_start(self) -> None:
        """Tell the loggers on what is tested."""
        if not self._begun:
            self._tell({})

    def on_validation_epoch_end(self) -> None:
        """Step `ReduceLROnPlateau`, before a checkpoint is written."""
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            self._step_plateau_schedulers()

    def on_train_epoch_end(self) -> None:
        """Step `ReduceLROnPlateau` where there is no validation to do it after."""
        if not self.trainer.enable_validation:
            self._step_plateau_schedulers()

    def _step_plateau_schedulers(self) -> None:
        for config in self.trainer.lr_scheduler_configs:
            due = self.trainer.is_last_batch and (self.current_epoch + 1) % config.frequency == 0
            if isinstance(config.scheduler, ReduceLROnPlateau) and (due or config.interval == "step"):
                value = self.trainer.callback_metrics.get(self.lr_scheduler_monitor)
                if value is None:
                    raise ValueError(
                        f"{type(self).__name__}: ReduceLROnPlateau needs `lr_scheduler_monitor`, got "
                        f"{self.lr_scheduler_monitor!r}, which was not logged; logged are "
                        f"{sorted(self.trainer.callback_metrics)}."
                    )
                self.lr_scheduler_step(config.scheduler, value)

    def embed(self, images: Tensor, whiten: bool = True) -> Float[Tensor, "batch dim"]:
        """What evaluation and prediction embed images by: `forward` at each of `eval_scales`, then `whitening`.

        Args:
            images: as for `forward`.
            whiten: False leaves out the whitening, as what it learns from must.
        """
        embeddings: Tensor = self(images) if self.eval_scales == (1,) else multi_scale(self, images, self.eval_scales)
        if whiten and self.whitening is not None and self.whitening.learned is not None:
            embeddings = self.whitening(embeddings)
        return embeddings

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Embeddings, labels and, where the batch has them, ids, roles and instances, for `RetrievalEvaluation`."""
        images, labels, ids = self.unpack_batch(batch)
        output = {"embeddings": self.embed(images), "labels": labels}
        if isinstance(batch, dict):
            output.update({name: batch[name] for name in ("roles", "instances") if name in batch})
        return output if ids is None else {**output, "ids": ids}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As `validation_step`."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """As `validation_step`; a batch of images alone gives embeddings alone."""
        if isinstance(batch, Tensor):
            return {"embeddings": self.embed(batch)}
        return self.validation_step(batch, batch_idx, dataloader_idx)


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())
