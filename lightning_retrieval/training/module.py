"""The LightningModule that trains any embedding network with any loss over the ranked lists of a batch."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_retrieval.backend import DDPStrategy
from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.distributed import kept_rows, rank, to_host_later
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.third_party import as_batch_loss, check_references
from lightning_retrieval.models.multi_scale import SCALE_POOLING, check_scales
from lightning_retrieval.models.retrieval_network import embed_at_scales, normalized_inputs
from lightning_retrieval.models.sides import SIDES, Side, TwoSides
from lightning_retrieval.models.whitening import Whitening
from lightning_retrieval.plain_data import rebuild
from lightning_retrieval.preparation.of_run import record_preparation
from lightning_retrieval.random_state import seed_or_default, step_random_state
from lightning_retrieval.ranking.relevance import Relevance, rule_of_evaluation
from lightning_retrieval.ranking.rows import Rows
from lightning_retrieval.training.batch import GATHER_DTYPES, GatherDtype, GlobalBatch, GlobalRows, gather_labels
from lightning_retrieval.training.chunk_size import ChunkSizeSearch, check_chunk_size
from lightning_retrieval.training.chunked import Embed, sides_backward
from lightning_retrieval.training.first_steps import check_first_batch, check_later_batch
from lightning_retrieval.training.full_sharding import (
    ShardedParts,
    shard_blocks,
    sharded_modules,
    sharding_mesh,
    start_sharded,
)
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.manual_training import (
    ManualTraining,
    compile_only,
    fraction_of_run,
    release_ddp,
)
from lightning_retrieval.training.memory import CrossBatchMemory
from lightning_retrieval.training.optimizers import FrozenBackbone, Updates, check_backbone, trainable_parameters
from lightning_retrieval.training.run_report import report_first_step
from lightning_retrieval.training.sides import (
    Unpacked,
    chunking,
    frozen_in_evaluation_mode,
    is_two_sided,
    joined_rows,
    rows_of_side,
    unpack,
    unpack_sides,
    with_frozen_side,
)

FRACTION = "training_fraction"  # key of a checkpoint: the fraction of the training that is done


class RetrievalModule(ManualTraining):
    """Trains an embedder so that each image of a batch ranks the images of the same class first.

    Each batch leads to one optimizer step and, with several processes, one sum of gradients, whatever `chunk_size` is.
    Lists rank the global batch: each process embeds its shard, and the embeddings are gathered in rank order.

    In a subclass, `forward`, `unpack_batch`, `embed` and `configure_optimizers` may be overridden.
    Checkpoints store the constructor arguments of a subclass as plain values (numbers, strings, lists, dicts); pass any
    other arguments to `load_from_checkpoint` again. For `**kwargs`, a checkpoint records which arguments the caller has
    given, so a subclass can build its own embedder and loss and pass on the rest.

    Args:
        embedder: maps images to embeddings (batch, D); `lightning_retrieval.Embedder` or any module.
        loss: a loss of this library or of pytorch-metric-learning, or any module called as `loss(embeddings, labels)`.
        chunk_size: number of images embedded at a time, >= 1. None embeds the whole shard at once. `"auto"` halves
            the shard, before the first step, until a chunk fits into the memory of the device. For batches with two
            sides, `{"queries": 256, "candidates": 64}` gives each side its own chunk size.
        keep_graphs: number of chunks, >= 1, that keep their graphs and are therefore embedded once instead of twice.
            More such chunks take less time and more memory; gradients do not change. For batches with two sides, the
            candidates keep their graphs first, and queries keep graphs if the candidates have fewer chunks.
        optimizer: class or function that is called with the parameter groups, such as
            `functools.partial(torch.optim.SGD, lr=0.1, fused=True)`. None means `torch.optim.AdamW`, with `fused=True`,
            an update of all parameters in one loop, unless parameters are of 16 bits, sharded or on a device without
            such a loop, gradients are sparse, or the precision is 16-mixed.
        lr_scheduler: class or function that is called with the optimizer, or None. It must keep the factors between the
            learning rates of the groups, so that rates of its own, such as `max_lr`, are a list with one for each group
            if there are factors. A scheduler with an end needs the number of steps as an argument, such as
            `functools.partial(OneCycleLR, max_lr=0.01, total_steps=1000)`.
        lr_scheduler_interval: the scheduler is stepped after each `"step"` or each `"epoch"`.
        lr_scheduler_frequency: number of steps or epochs between two steps of the scheduler, >= 1.
        lr_scheduler_monitor: name of the logged metric for `ReduceLROnPlateau`.
        updates: clipping of gradients, and learning rates of parts of the network and of the loss. None means
            `Updates()`, which clips nothing and trains all parameters with the same learning rate.
        seed: seed of the random numbers of a step (for example, dropout), which depend on (seed, step, rank). None
            means the seed of `seed_everything`, or 0 without such a seed.
        memory: past batches whose embeddings are ranked too; batches must have ids, and losses must accept references.
        relevance: which images are relevant to a query and which are in its list: `OtherCamera()`, `SharedTags()` or
            another rule. Batches must be dicts with the entries that the rule reads. None means equal labels.
        sides: how batches `{"queries": batch, "candidates": batch}` are embedded and ranked: `TwoNetworks` gives the
            queries a network of their own, and `embedder` then maps candidates. None means `TwoSides()`: `embedder`
            embeds both sides, and candidates are ranked for each query.
        gather: False restricts lists to the shard of each process, and averages the losses of the processes.
            `"bfloat16"` or `"float16"` rounds embeddings before they are gathered, so that a process sends half of the
            bytes. The loss ranks the rounded embeddings, also with one process. True does not round.
        eval_scales: factors of the image size. In evaluation and prediction, images are embedded at each of these
            scales, and `multi_scale` combines the embeddings. With the single scale 1, `forward` is called once.
        eval_scales_pooling: how the embeddings of the scales are combined: `"mean"`, or `"gem"` as in AP-GeM's code.
        whitening: a `PCAWhitening` or `SupervisedWhitening`, applied in evaluation and prediction once it has been
            fitted by its method `fit` or by the callback `LearnWhitening`; until then, a warning says that embeddings
            are not whitened.

    Raises:
        ValueError: if a number is out of its range.
        TypeError: if `embedder` or `loss` is not a module, or a loss cannot follow the rule `relevance`.

    Example:
        >>> import torch
        >>> from lightning_retrieval import RetrievalModule, SmoothAPLoss
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss(tau=0.01), chunk_size=16)
        >>> module(torch.randn(3, 8)).shape
        torch.Size([3, 4])

    Relations:
        `RetrievalEvaluation` logs metrics; `PKSampler` draws batches with several images of each class.
    """

    def __init__(
        self,
        embedder: nn.Module,
        loss: nn.Module,
        *,
        chunk_size: int | Literal["auto"] | dict[str, int | Literal["auto"] | None] | None = None,
        keep_graphs: int = 1,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        lr_scheduler: Callable[[Optimizer], LRScheduler | ReduceLROnPlateau] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        lr_scheduler_frequency: int = 1,
        lr_scheduler_monitor: str = "val/mAP",
        updates: Updates | None = None,
        seed: int | None = None,
        memory: CrossBatchMemory | None = None,
        relevance: Relevance | None = None,
        sides: TwoSides | None = None,
        gather: bool | GatherDtype = True,
        eval_scales: Sequence[float] = (1.0,),
        eval_scales_pooling: Literal["mean", "gem"] = "mean",
        whitening: Whitening | None = None,
    ) -> None:
        super().__init__()
        sides = with_frozen_side(sides, embedder)
        objects: dict[str, Any] = {"embedder": embedder, "loss": loss, "optimizer": optimizer}
        objects |= {"lr_scheduler": lr_scheduler, "updates": updates, "memory": memory, "relevance": relevance}
        objects |= {"sides": sides, "whitening": whitening}
        self._keep_hyperparameters(objects, inspect.currentframe())
        with owned_by(type(self).__name__):
            self.embedder = rebuild("embedder", embedder, nn.Module)
            self.loss = as_batch_loss(rebuild("loss", loss, nn.Module))
            self.sides = TwoSides() if sides is None else rebuild("sides", sides, TwoSides)
            self._set_query_embedder()
            self._set_optimizer(
                optimizer,
                lr_scheduler,
                interval=lr_scheduler_interval,
                frequency=lr_scheduler_frequency,
                monitor=lr_scheduler_monitor,
            )
            self.memory = None if memory is None else rebuild("memory", memory, CrossBatchMemory)
            self._check_memory()
            self._set_relevance(relevance)
            self.whitening = None if whitening is None else rebuild("whitening", whitening, Whitening)
            self.eval_scales = check_scales("eval_scales", eval_scales)
            self.eval_scales_pooling = check_choice("eval_scales_pooling", eval_scales_pooling, tuple(SCALE_POOLING))
            self.chunk_size = check_chunk_size(chunk_size)
            self.keep_graphs = check_integer("keep_graphs", keep_graphs, least=1)
            self.gather: bool | GatherDtype = check_choice("gather", gather, tuple(GATHER_DTYPES))
            self.updates = Updates() if updates is None else rebuild("updates", updates, Updates)
            self._set_frozen_backbones()
            self._fraction = 0.0  # fraction of the training that is done
            self.seed = check_integer("seed", seed_or_default(seed), least=0)
        self._sharded: ShardedParts | None = None  # the modules that are sharded over the processes of the run
        self.chunk_size_searches: dict[Side, ChunkSizeSearch] = {side: ChunkSizeSearch() for side in SIDES}

    def _set_query_embedder(self) -> None:
        """Register the network of queries, if there is one, and freeze the network of the frozen side."""
        self.query_embedder = self.sides.query_embedder
        if self.query_embedder is self.embedder:
            cure = "give TwoSides(), and one network embeds both sides"
            raise InvalidValue("must have another network than `embedder`", argument="sides", got="the same", cure=cure)
        if self.query_embedder is not None or self.sides.directions == "both":
            check_references(self.loss, "two sides")
        if self.query_embedder is not None and self.sides.frozen_side is not None:
            networks = {"queries": self.query_embedder, "candidates": self.embedder}
            networks[self.sides.frozen_side].requires_grad_(False)

    def _check_memory(self) -> None:
        """Raise if the loss cannot rank a memory, or the network of candidates is trained without any gradient."""
        if self.memory is None:
            return
        check_references(self.loss, "a `memory`")
        is_detached = self.memory.mode == "one_list_detached" and self.sides.directions == "queries"
        if self.query_embedder is not None and is_detached and trainable_parameters(self.embedder):
            raise InvalidValue(
                "with TwoNetworks and directions='queries', CrossBatchMemory(mode='one_list_detached') leaves "
                "`embedder` without a gradient",
                got="an `embedder` to train",
                cure="give another mode, directions='both' or frozen_side='candidates'",
            )

    def _set_relevance(self, relevance: Any) -> None:
        """Store the rule of relevance; raise if a term of the loss cannot follow it."""
        self.relevance: Relevance | None = None
        if relevance is None:
            return
        self.relevance = rebuild("relevance", relevance, Relevance)  # type: ignore[type-abstract]
        for part in self.loss.modules():
            if isinstance(part, BatchLoss):
                part.check_relevance(self.relevance)

    def _set_frozen_backbones(self) -> None:
        """Prepare to freeze the backbone of each network in the first epochs."""
        epochs = self.updates.freeze_backbone_epochs
        if epochs > 0:
            check_backbone("freeze_backbone_epochs", self._networks())
        self._frozen_backbones = FrozenBackbone(epochs), FrozenBackbone(epochs)

    def _networks(self) -> list[nn.Module]:
        """The network of images and candidates and, if there is one, that of queries."""
        if self.query_embedder is None:
            return [self.embedder]
        return [self.embedder, self.query_embedder]

    def configure_callbacks(self) -> Any:
        """Compile only the networks if `torch.compile` has compiled the module: it cannot compile a training step.

        DDP's wrapper is released, unless a subclass may have a step of its own, whose gradients the wrapper averages.
        """
        compile_only(self, self._networks())
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy) and type(self).training_step is RetrievalModule.training_step:
            release_ddp(strategy, self)
        return super().configure_callbacks()

    def forward(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Embed each image independently. Losses and metrics normalise the returned embeddings.

        Override this method if embedding is more than one call of `embedder`.
        """
        embeddings: Tensor = self.embedder(images)
        return embeddings

    def forward_queries(self, inputs: Tensor) -> Float[Tensor, "batch dim"]:
        """Embed each query of a batch with two sides, by `query_embedder`; without it, by `forward`.

        Override this method if embedding a query is more than one call of `query_embedder`.
        """
        if self.query_embedder is None:
            return self(inputs)  # type: ignore[no-any-return]
        embeddings: Tensor = self.query_embedder(inputs)
        return embeddings

    def embed(self, images: Tensor, whiten: bool = True) -> Float[Tensor, "batch dim"]:
        """Embed images for evaluation and prediction: `forward` at each of `eval_scales`, then `whitening`.

        Args:
            images: as for `forward`. Images of uint8 are first normalised as in the evaluation of the module or, if no
                evaluation is recorded, by the embedder's `preparation`.
            whiten: False skips the whitening, for example to get embeddings from which the whitening is learned.
        """
        return embed_at_scales(self, self, normalized_inputs(self, "candidates", images), whiten)

    def embed_queries(self, inputs: Tensor, whiten: bool = True) -> Float[Tensor, "batch dim"]:
        """Embed queries for evaluation and prediction, as `embed` does, by `forward_queries`.

        Args:
            inputs: as for `forward_queries`. Images of uint8 are first normalised as the queries of the module's
                evaluation were. `eval_scales` apply to images only.
            whiten: as for `embed`; both sides share one whitening.
        """
        inputs = normalized_inputs(self, "queries", inputs)
        is_overridden = type(self).forward_queries is not RetrievalModule.forward_queries
        if self.query_embedder is None and not is_overridden:
            return self.embed(inputs, whiten)
        return embed_at_scales(self, self.forward_queries, inputs, whiten)

    @owned
    def unpack_batch(self, batch: Any) -> Unpacked:
        """Split a batch of the DataLoader into images, labels, and dataset indices of the images (or None).

        Labels have shape (batch,), or (batch, levels), finest first. A batch must be `(images, labels)`,
        `(images, labels, ids)` or a dict with these keys; override this method for any other form.
        """
        return unpack(batch)

    def configure_optimizers(self) -> Any:
        """Create one optimizer for the parameters of embedder and loss, and the scheduler of the optimizer.

        Override this method to return anything that Lightning accepts. Schedulers are stepped according to their
        `interval` and `frequency`. `ReduceLROnPlateau` monitors the metric with the key `monitor`, and
        `lr_scheduler_monitor` if there is no such key.
        """
        return self._make_optimizer(
            head_lr_factor=self.updates.head_lr_factor,
            layer_decay=self.updates.layer_decay,
            query_embedder=self.query_embedder,
            query_lr_factor=self.sides.query_lr_factor,
            loss_lr_factor=self.updates.loss_lr_factor,
        )

    def configure_model(self) -> None:
        """Shard the network over the processes, with `FSDP2Strategy` or Lightning's `ModelParallelStrategy`.

        All processes get the weights of the first process. Tensors on the meta device get memory when they are sharded.
        """
        if self.device_mesh is None or sharded_modules(self):
            return
        mesh = sharding_mesh(self.trainer.strategy)
        shard = functools.partial(self.shard_network, mesh)
        self.unfilled = start_sharded(self, shard, self.trainer.strategy.root_device)

    def shard_network(self, mesh: Any) -> None:
        """Shard each network over the processes of a mesh: each element of its lists of layers, and the rest together.

        Override this method to shard other modules, with `torch.distributed.fsdp.fully_shard(part, mesh=mesh)`.
        Parameters that are not sharded are replicated on all processes, as under DDP.

        Args:
            mesh: all processes, as a `torch.distributed.DeviceMesh` of one dimension or, if several groups of
                processes hold a copy of the network each, of the dimensions `"replicate"` and `"shard"`.
        """
        for network in self._networks():
            shard_blocks(network, mesh)

    def on_train_start(self) -> None:
        """Set what the steps of this run need, and freeze the backbone if `freeze_backbone_epochs` are not over."""
        super().on_train_start()
        if self.global_step == 0:  # a new run, perhaps of a module that was trained before
            self._fraction = 0.0
        self._sharded = ShardedParts(self) if sharded_modules(self) else None
        self._freeze_backbones()

    def on_train_epoch_start(self) -> None:
        """Freeze the backbone in the first `freeze_backbone_epochs`, and unfreeze it afterwards."""
        super().on_train_epoch_start()
        self._freeze_backbones()

    def _freeze_backbones(self) -> None:
        """Freeze or unfreeze the backbones of all networks for this epoch."""
        for network, frozen in zip(self._networks(), self._frozen_backbones):
            frozen.set_epoch(network, self.current_epoch)

    @owned
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute gradients in chunks, sum them over processes, and step. All state of a step changes here.

        Override this method for work before or after the step. Add a further loss as a term of `loss`, not in an
        override: when this method returns, the step has ended, so returning a loss with a graph raises an error.

        Returns:
            The loss of the global batch, without a graph, on the CPU.
        """
        if isinstance(self.trainer.model, DistributedDataParallel):
            self.trainer.model.require_backward_grad_sync = False  # this step sums gradients itself
        batches, unpacked = unpack_sides(self, batch)
        rows = self._rows_of_processes(batches, unpacked)
        is_first = self._is_first_step
        if is_first:
            check_first_batch(self, unpacked, rows)
        if self._sharded is not None:
            self._sharded.reshard()
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()
        ranked = GlobalBatch(self, rows, self._advance_fraction())
        gradients = GradientSum(self.parameters(), self.loss.parameters(), self._sharded)
        embedders: list[Embed] = [self.forward_queries, self]  # without sides, the images are embedded as candidates
        sides = [(embed, inputs) for embed, (inputs, _, _) in zip(embedders[-len(rows) :], unpacked)]
        with step_random_state(self.seed, ranked.step, rank()), frozen_in_evaluation_mode(self):
            chunk_sizes, keep_graphs = chunking(self, sides)
            part = sides_backward(
                sides,
                ranked.loss,
                chunk_sizes,
                keep_graphs,
                backward=self.manual_backward,
                # The first side, which may be the only one, is back-propagated last.
                last_backward=[gradients.overlapped, self._candidates_summed][: len(sides)],
            )
        if is_first:
            self._finish_first_step(ranked, chunk_sizes)
        on_host = [of_side.map(to_host_later) for of_side in rows]  # complete when `finish` has waited
        totals = gradients.finish(ranked.parts(part))
        logged = ranked.logged(totals)
        if not is_first:
            check_later_batch(self, on_host)
        stepped = self._step_optimizers()
        ranked.remember()
        self._step_due_schedulers(batch_idx, stepped)
        self._log_step(logged, ranked.images)
        return logged["train/loss"]

    def _rows_of_processes(self, batches: Sequence[Any], unpacked: Sequence[Unpacked]) -> list[GlobalRows]:
        """Labels, or the columns that the rule of relevance reads, and ids of all processes, for each side of a batch.

        Args:
            batches: the batch of each side, as the loader yields it.
            unpacked: inputs, labels and ids of each side.
        """
        sides = []
        for batch, (_, labels, ids) in zip(batches, unpacked):
            if self.relevance is not None:
                labels = self.relevance.columns(labels, batch)
            sides.append(Rows(labels, ids))
        return gather_labels(sides, gather=self.gather is not False, equal=self._sharded is not None)

    def _finish_first_step(self, ranked: GlobalBatch, chunk_sizes: Sequence[int]) -> None:
        """Report on the first step of a run, and record how its images were prepared."""
        report_first_step(self, ranked, chunk_sizes)
        record_preparation(self)
        self._is_first_step = False

    def _candidates_summed(self) -> AbstractContextManager[None]:
        """Context of the last backward pass of candidates: sums gradients if a sharded network embeds only them."""
        if self._sharded is None or self.query_embedder is None:
            return nullcontext()
        return self._sharded.summed()

    def _advance_fraction(self) -> float:
        """The fraction of the training that is done; it never decreases, also in a run resumed with more steps."""
        self._fraction = max(self._fraction, fraction_of_run(self.trainer))
        return self._fraction

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Complete the checkpoint, with the fraction of the training that is done."""
        super().on_save_checkpoint(checkpoint)
        if self._trainer is not None:
            checkpoint[FRACTION] = self._advance_fraction()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Prepare the module for the weights of a checkpoint, and restore the fraction of the training."""
        super().on_load_checkpoint(checkpoint)
        self._fraction = checkpoint.get(FRACTION, 0.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Return the input of `RetrievalEvaluation`: embeddings, labels and any ids, roles, instances and cameras.

        For a batch with two sides, or one of them, these are the rows of queries, then of candidates. Their roles are 1
        and 2; ids and instances are numbered apart, `2 * id` for queries and `2 * id + 1` for candidates.

        Under a rule `relevance` other than `OtherCamera` and `GalleryOnly`, labels are the columns that the rule reads,
        and there are no cameras, because the rule alone decides which images are in a list.
        """
        rule = rule_of_evaluation(self.relevance)
        if is_two_sided(batch):
            return self._embed_sides(batch, rule)
        return self._embed_batch(batch, self.embed, rule)

    def _embed_sides(self, batch: Any, rule: Relevance | None) -> dict[str, Tensor]:
        """The output for a batch with two sides, or for one of them: the rows of queries, then of candidates."""
        outputs = []
        if "queries" in batch:
            queries = self._embed_batch(batch["queries"], self.embed_queries, rule)
            queries["embeddings"] = kept_rows(queries["embeddings"])  # one network may embed the candidates too
            outputs.append(rows_of_side(queries, "queries"))
        if "candidates" in batch:
            candidates = self._embed_batch(batch["candidates"], self.embed, rule)
            outputs.append(rows_of_side(candidates, "candidates"))
        return joined_rows(outputs)

    def _embed_batch(
        self, batch: Any, embed: Callable[[Tensor], Tensor], rule: Relevance | None = None
    ) -> dict[str, Tensor]:
        """Embeddings, labels or the columns that a rule reads, and any ids, roles, instances and cameras of a batch."""
        images, labels, ids = self.unpack_batch(batch)
        output = {"embeddings": embed(images), "labels": labels}
        if isinstance(batch, dict):
            output |= {name: batch[name] for name in ("roles", "instances", "cameras") if name in batch}
        if ids is not None:
            output["ids"] = ids
        if rule is not None:
            output["labels"] = rule.columns(labels, batch)
            output.pop("cameras", None)
        return output

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Do the same as `validation_step`."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Do the same as `validation_step`; for a batch that is a tensor of images, return only embeddings.

        Labels are those of the batch, also under a rule `relevance`, whose entries a batch may lack here. Outputs
        are copies, because Lightning keeps those of all batches.
        """
        if isinstance(batch, Tensor):
            output = {"embeddings": self.embed(batch)}
        elif is_two_sided(batch):
            output = self._embed_sides(batch, None)
        elif rule_of_evaluation(self.relevance) is not None:
            output = self._embed_batch(batch, self.embed)
        else:
            output = self.validation_step(batch, batch_idx, dataloader_idx)
        return {name: kept_rows(values) for name, values in output.items()}
