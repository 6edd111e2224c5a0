"""Retrieval metrics of whole evaluation sets, logged under names that checkpoints and early stopping can monitor."""

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_retrieval.checks import is_integer
from lightning_retrieval.distributed import world_size
from lightning_retrieval.metrics import EmbeddingMetric, RetrievalMetrics
from lightning_retrieval.metrics.store import GALLERY, QUERY
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion


class RetrievalEvaluation(pl.Callback):
    """Computes `RetrievalMetrics` over each validation and test set, and logs `val/mAP`, `test/R@1` and so on.

    It takes up what the module's `validation_step` and `test_step` return: a dict with `embeddings`, `labels` and,
    where the batches have them, `ids`, `roles` (1 for a query, 2 for an image of the gallery, 3 for both) and
    `instances` (the images of one are averaged). Every process ends with the same numbers and logs them, so that
    `ModelCheckpoint(monitor="val/mAP", mode="max")` and early stopping work. Several evaluation sets are logged as
    `val/0/mAP`, `val/1/mAP`, or by the names of a dict of loaders, `val/small/mAP`. The sanity check is skipped: it
    sees a piece of the set only.

    A data set with a protocol of its own has a method `metrics(ks, **settings)` that gives another `EmbeddingMetric`.

    Args:
        ks: the k of R@k, each >= 1.
        before_fit: evaluate the test set with the untrained model before training, logged as `test/...` at step 0;
            skipped where a run is resumed.
        map_ks: the k of mAP@k, each >= 1; none where empty. Not for sets with metrics of their own.
        query_expansion: put before ranking, such as `QueryExpansion(alpha=2, k=10)`; none where None.
        database_augmentation: the same for the gallery, such as `DatabaseAugmentation()`; none where None.
        embeddings_on_cpu: keep embeddings in the main memory until they are ranked, and bring them to the device in
            pieces.

    Raises:
        ValueError: if a k is below 1, or `before_fit` is asked for without a test set.
        TypeError: if the module's step does not return `embeddings` and `labels`.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation
        >>> trainer = pl.Trainer(callbacks=[RetrievalEvaluation(ks=(1, 10))], logger=False, enable_checkpointing=False)

    Relations:
        `RetrievalGallery` draws what this callback collects. The highest value of each metric of a training run goes
        into `hparams.yaml` of `CSVLogger`, to TensorBoard and to the summary of Weights & Biases as `best/val/mAP` and
        so on.
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 10, 100),
        before_fit: bool = False,
        map_ks: Sequence[int] = (),
        query_expansion: QueryExpansion | None = None,
        database_augmentation: DatabaseAugmentation | None = None,
        embeddings_on_cpu: bool = False,
    ) -> None:
        checked = RetrievalMetrics(ks, map_ks)  # which refuses now what it would refuse after the first epoch
        self.ks, self.map_ks = checked.ks, checked.map_ks
        self.before_fit = before_fit
        self.query_expansion = query_expansion
        self.database_augmentation = database_augmentation
        self.embeddings_on_cpu = embeddings_on_cpu
        self.metrics: dict[int, EmbeddingMetric] = {}
        self.table: dict[str, dict[str, float]] = {}
        self.best: dict[str, float] = {}
        self._positions: dict[int, Iterator[list[int]]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.before_fit or trainer.global_step > 0:
            return
        results = {}
        sets = _test_loaders(trainer, pl_module)
        names = _names(sets)
        for index, loader in enumerate(_listed(sets)):
            metrics = self._evaluate(trainer, pl_module, loader, index)
            results.update(_named("test", names[index], metrics.compute()))
        self.table["untrained"] = {name: float(value) for name, value in results.items()}
        for logger in trainer.loggers:
            logger.log_metrics(self.table["untrained"], step=0)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.val_dataloaders, pl_module.device)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer.test_dataloaders, pl_module.device)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._collect(pl_module, outputs, dataloader_idx)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, "val", trainer.num_val_batches, trainer.val_dataloaders)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer, "test", trainer.num_test_batches, trainer.test_dataloaders)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics = {}  # the embeddings go, now that all callbacks have seen them
        if trainer.state.fn == "validate":
            self._print(trainer, "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.metrics = {}
        self._print(trainer, "test")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # a run that is resumed gets its own back after this
            self.best = {}

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_best(trainer)
        self._print(trainer, "val")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._log_best(trainer)

    def _log_best(self, trainer: pl.Trainer) -> None:
        best = {f"best/{name}": value for name, value in self.best.items()}
        for logger in trainer.loggers if best else ():
            if isinstance(logger, TensorBoardLogger):  # whose table of hyperparameters has the column hp_metric
                chosen = getattr(trainer.checkpoint_callback, "best_model_score", None)
                logger.log_metrics(
                    best if chosen is None else {**best, "hp_metric": float(chosen)}, trainer.global_step
                )
            elif isinstance(logger, CSVLogger):
                logger.log_hyperparams({"best": self.best})
                logger.save()
            elif isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.summary.update(best)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict.get("best", {}))

    def _start(self, loaders: Any, device: torch.device, sync_on_compute: bool = True) -> None:
        self.metrics = {}
        self._positions = {}
        for index, loader in enumerate(_listed(loaders)):
            self.metrics[index] = self._metrics(loader, sync_on_compute).to(device)
            positions = _positions(loader)
            if positions is not None:
                self._positions[index] = positions

    def _metrics(self, loader: Any, sync_on_compute: bool) -> EmbeddingMetric:
        """A set's own metric if it has one, else `RetrievalMetrics`."""
        settings: dict[str, Any] = {
            "query_expansion": self.query_expansion,
            "database_augmentation": self.database_augmentation,
            "embeddings_on_cpu": self.embeddings_on_cpu,
            "sync_on_compute": sync_on_compute,
        }
        own = getattr(getattr(loader, "dataset", None), "metrics", None)
        metrics: EmbeddingMetric = (
            own(self.ks, **settings) if own else RetrievalMetrics(self.ks, self.map_ks, **settings)
        )
        return metrics

    def _collect(self, pl_module: pl.LightningModule, outputs: Any, index: int) -> None:
        metrics = self.metrics[index]
        positions = next(self._positions[index]) if index in self._positions else None
        try:
            embeddings, labels = _checked(pl_module, outputs)
        except TypeError as error:
            if world_size() == 1 or not metrics.sync_on_compute:
                raise
            metrics.refuse(str(error))
            return
        ids = outputs.get("ids")
        if positions is not None and ids is None:
            ids = torch.tensor(positions, device=embeddings.device)
        roles = outputs.get("roles")
        masks = {} if roles is None else {"is_query": roles & QUERY > 0, "is_gallery": roles & GALLERY > 0}
        metrics.update(embeddings, labels, ids, **masks, instances=outputs.get("instances"))

    def _log(self, trainer: pl.Trainer, stage: str, batches: Sequence[float], loaders: Any) -> None:
        for index, loader in enumerate(_listed(loaders)):
            if batches[index] < len(loader):
                warnings.warn(
                    f"RetrievalEvaluation: {stage} metrics are those of {batches[index]} of {len(loader)} batches "
                    f"(limit_{stage}_batches): the gallery is a part of the set only, so they are too high.",
                    stacklevel=2,
                )
        results: dict[str, Tensor] = {}
        for index, name in enumerate(_names(loaders)):
            metrics = self.metrics[index]
            with warnings.catch_warnings():  # a rank without any batch of this set takes part in its computation
                warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
                results.update(_named(stage, name, metrics.compute()))
            if isinstance(metrics, RetrievalMetrics) and metrics.ranked_images < max(metrics.ks):
                beyond = ", ".join(f"R@{k}" for k in metrics.ks if k > metrics.ranked_images)
                rank_zero_warn(
                    f"RetrievalEvaluation: {stage}/{name}{beyond} look at more images than the "
                    f"{metrics.ranked_images} that are ranked, so they are 1; give smaller `ks`."
                )
        self.table[stage] = {name: float(value) for name, value in results.items()}
        if trainer.state.fn == "fit":
            for name, value in self.table[stage].items():
                if not (math.isnan(value) or name.rpartition("/")[2] == "skipped_queries"):
                    self.best[name] = max(value, self.best.get(name, value))
        log_alike(self, results)

    def _evaluate(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Any, index: int) -> EmbeddingMetric:
        """The test set outside of the Trainer's test loop, with the module as it is."""
        shared = isinstance(loader.sampler, DistributedSampler)  # else each process goes through the whole set
        self._start([None] * index + [loader], pl_module.device, sync_on_compute=shared)
        modes = {module: module.training for module in pl_module.modules()}
        pl_module.eval()
        silent = trainer.progress_bar_callback is None or not trainer.is_global_zero
        batches = itertools.islice(loader, _limit(loader, trainer.limit_test_batches))
        with torch.no_grad(), trainer.precision_plugin.test_step_context():
            for batch_idx, batch in enumerate(Tqdm(batches, desc="Untrained test", disable=silent, leave=False)):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = trainer.strategy.batch_to_device(batch)
                outputs = pl_module.test_step(batch, batch_idx)
                self._collect(pl_module, outputs, index)
        for module, training in modes.items():
            module.training = training
        return self.metrics.pop(index)

    def _print(self, trainer: pl.Trainer, stage: str) -> None:
        if not trainer.is_global_zero or stage not in self.table:
            return
        columns = {"": self.table[stage]}
        if stage == "test" and "untrained" in self.table:
            columns = {"untrained": self.table["untrained"], "trained": self.table[stage]}
        width = max(map(len, self.table[stage]))
        lines = [" " * width + "".join(f"{title:>12}" for title in columns)] if len(columns) > 1 else []
        for name in self.table[stage]:
            digits = 0 if "skipped_queries" in name else 4
            values = (column.get(name, float("nan")) for column in columns.values())
            lines.append(f"{name:<{width}}" + "".join(f"{value:>12.{digits}f}" for value in values))
        print("\n" + "\n".join(lines), flush=True)


def _checked(pl_module: pl.LightningModule, outputs: Any) -> tuple[Tensor, Tensor]:
    """The embeddings and labels of what a step has returned, and integers for roles."""
    if not isinstance(outputs, Mapping) or not {"embeddings", "labels"} <= set(outputs):
        came = f"the keys {sorted(outputs)}" if isinstance(outputs, Mapping) else type(outputs).__name__
        raise TypeError(
            f"RetrievalEvaluation: {type(pl_module).__name__}'s validation and test steps must return a dict with "
            f"embeddings, labels and maybe ids, got {came}; RetrievalModule's do."
        )
    roles = outputs.get("roles")
    if roles is not None and not (isinstance(roles, Tensor) and is_integer(roles)):
        came = str(roles.dtype) if isinstance(roles, Tensor) else type(roles).__name__
        raise TypeError(
            f"RetrievalEvaluation: the `roles` that {type(pl_module).__name__}'s steps return must be a tensor of "
            f"integers (1 query, 2 gallery, 3 both), got {came}."
        )
    return outputs["embeddings"], outputs["labels"]


def log_alike(callback: pl.Callback, results: Mapping[str, Tensor]) -> None:
    """Log what every rank has the same value of: reducing it again would change its last digits."""
    for name in results:
        warnings.filterwarnings("ignore", rf".*self\.log\('{re.escape(name)}', \.\.\., sync_dist=True")
    # Lightning gives every callback the module's log_dict.
    callback.log_dict(results, rank_zero_only=False, sync_dist=False)  # type: ignore[attr-defined]


def _named(stage: str, of_set: str, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{stage}/{of_set}{name}": value for name, value in results.items()}


def _names(loaders: Any) -> list[str]:
    """What stands before the names of each set's metrics."""
    if isinstance(loaders, Mapping):
        return [f"{name}/" for name in loaders]
    count = len(_listed(loaders))
    return [""] if count == 1 else [f"{index}/" for index in range(count)]


def _listed(loaders: Any) -> list[Any]:
    """The loaders in the order in which Lightning numbers them."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def _limit(loader: Any, limit: float) -> int | None:
    """How many batches of a loader `Trainer(limit_test_batches=limit)` lets through; all of them where None."""
    if isinstance(limit, int):
        return limit
    return None if limit == 1 else int(len(loader) * limit)


def _positions(loader: Any) -> Iterator[list[int]] | None:
    """The dataset indices of each batch that this process gets, where they can be known beforehand."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None  # a batch sampler of one's own may give other batches each time it is asked
    sampler = loader.sampler
    in_order = isinstance(sampler, SequentialSampler)
    if in_order or (isinstance(sampler, DistributedSampler) and not sampler.shuffle):
        return iter(loader.batch_sampler)
    return None


def _test_loaders(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        datamodule.setup("test")
    source = pl_module if datamodule is None else datamodule
    if getattr(type(source), "test_dataloader", None) in (
        pl.LightningModule.test_dataloader,
        pl.LightningDataModule.test_dataloader,
    ):
        raise ValueError(
            f"RetrievalEvaluation: `before_fit` needs a test set, which {type(source).__name__} does not have; define "
            "test_dataloader there, or set before_fit=False."
        )
    return source.test_dataloader()
