"""Evaluation sets: their loaders, the outputs of evaluation steps for them, and their metrics."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_retrieval.backend import pl, sized_len
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.metrics import EmbeddingMetric, RetrievalMetrics
from lightning_retrieval.preparation.of_run import data_module_of
from lightning_retrieval.progress import Progress


@runtime_checkable
class MetricProvider(Protocol):
    """A data set with an evaluation protocol other than that of `RetrievalMetrics`.

    `RetrievalEvaluation` evaluates such a data set with the metric that `metrics` returns, and any other data set with
    `RetrievalMetrics`. A data set needs no base class for this, only the method.
    """

    def metrics(self, ks: Sequence[int], **settings: Any) -> EmbeddingMetric:
        """Create the metric.

        Args:
            ks: the k of R@k or of a similar metric.
            settings: keyword arguments of `EmbeddingMetric`. They hold `relevance` only if the module has a rule that
                evaluates neither cameras nor roles; the metric then gets the columns that the rule reads as labels, and
                decides itself which images are relevant.
        """


def loader_list(loaders: Any) -> list[Any]:
    """Return one or several data loaders as a list, in the order in which Lightning numbers them."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return list(loaders)
    return [loaders]


def set_prefixes(stage: str, loaders: Any) -> list[str]:
    """Return the prefix of each evaluation set's metrics, such as `val/`, `val/0/` or `val/small/`."""
    if isinstance(loaders, Mapping):
        return [f"{stage}/{name}/" for name in loaders]
    count = len(loader_list(loaders))
    if count == 1:
        return [f"{stage}/"]
    return [f"{stage}/{index}/" for index in range(count)]


def batch_indices(loader: Any) -> Iterator[list[int]] | None:
    """Return the dataset indices of each batch of this process, or None if the indices are not known in advance."""
    # A custom batch sampler may yield other batches each time it is iterated.
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.sampler
    in_order = isinstance(sampler, SequentialSampler)
    sharded_in_order = isinstance(sampler, DistributedSampler) and not sampler.shuffle
    if in_order or sharded_in_order:
        return iter(loader.batch_sampler)
    return None


def what_is_lost(loader: Any) -> str | None:
    """Return which images a loader leaves out, for a warning: "20 of 23 images (drop_last=True)" are evaluated.

    Returns None if the loader yields each image of its data set, or if its samplers do not tell. A `DistributedSampler`
    repeats some images, which are counted once.
    """
    batches, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    drawing = getattr(batches, "batch_sampler", batches)  # a RetrievalDataLoader wraps the sampler of global batches
    if hasattr(drawing, "draws_classes"):
        return f"the images of batches for training ({type(drawing).__name__})"
    images = sized_len(dataset)
    if type(batches) is not BatchSampler or images is None:
        return None
    sampler, processes, yielded = batches.sampler, 1, sized_len(batches.sampler)
    if isinstance(sampler, DistributedSampler):
        processes, yielded = sampler.num_replicas, min(images, sampler.total_size)
    original = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # Lightning may wrap a sampler
    if getattr(original, "replacement", False):
        return f"images that are drawn with replacement, of {images} images ({type(original).__name__})"
    if original is not sampler:
        yielded = sized_len(original)
    if yielded is None:
        return None
    reasons = []
    if yielded < images:
        reasons.append(type(original).__name__)
    dropped = 0
    if batches.drop_last:
        dropped = processes * ((sized_len(batches.sampler) or 0) % batches.batch_size)
    if dropped > 0:
        reasons.append("drop_last=True")
    if not reasons:
        return None
    return f"{max(0, yielded - dropped)} of {images} images ({', '.join(reasons)})"


def is_sharded(loader: Any) -> bool:
    """Return whether each process reads one shard of the data set."""
    return isinstance(loader.sampler, DistributedSampler)


def limited_length(loader: Any, limit: float) -> int | None:
    """Return the number of batches that `Trainer(limit_test_batches=limit)` evaluates; None means all of them."""
    if isinstance(limit, int):
        return limit
    if limit == 1:
        return None
    return int(len(loader) * limit)


def batches_on_device(trainer: pl.Trainer, loader: Any, description: str, limit: int | None = None) -> Iterator[Any]:
    """Yield batches in the Trainer's precision and on its device, and show the progress if the Trainer does.

    Args:
        trainer: the Trainer of the run.
        loader: a data loader, or another iterable of batches.
        description: the work that is done with the batches.
        limit: the number of batches to yield; None means all of them.
    """
    hidden = trainer.progress_bar_callback is None or not trainer.is_global_zero
    total = sized_len(loader)
    if total is not None and limit is not None:
        total = min(total, limit)
    with Progress(description, total=total, units="batches", hidden=hidden) as progress:
        for batch in itertools.islice(loader, limit):
            converted = trainer.precision_plugin.convert_input(batch)
            yield trainer.strategy.batch_to_device(converted)
            progress.update(1)


def find_test_loaders(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
    """Create the test data loaders of the data module, or of the module if there is no data module."""
    source: Any = data_module_of(trainer.test_loop)
    if source is None:
        source = pl_module
    else:
        source.setup("test")
    undefined = (pl.LightningModule.test_dataloader, pl.LightningDataModule.test_dataloader)
    if getattr(type(source), "test_dataloader", None) in undefined:
        rule = f"needs a test set, which {type(source).__name__} does not have"
        cure = "define test_dataloader there, or set before_fit=False"
        raise InvalidValue(rule, "RetrievalEvaluation", "before_fit", cure=cure)
    return source.test_dataloader()


def check_step_outputs(module_name: str, outputs: Any) -> None:
    """Raise unless an evaluation step has returned embeddings and labels."""
    if not isinstance(outputs, Mapping) or not outputs.keys() >= {"embeddings", "labels"}:
        received = type(outputs).__name__
        if isinstance(outputs, Mapping):
            received = f"the keys {sorted(outputs)}"
        raise InvalidType(
            f"{module_name}'s validation and test steps must return a dict with embeddings and labels, and "
            "optionally ids",
            "RetrievalEvaluation",
            got=received,
            cure="the steps of RetrievalModule do",
        )


class EvaluationSet:
    """An evaluation set with its metric, which collects the embeddings batch by batch.

    Args:
        prefix: prefix of the names of the set's metrics, such as `val/` or `test/small/`.
        loader: the data loader of the set.
        metrics: the metric that collects the embeddings.
    """

    def __init__(self, prefix: str, loader: Any, metrics: EmbeddingMetric) -> None:
        self.prefix = prefix
        self.loader = loader
        self.metrics = metrics
        self._batch_indices = batch_indices(loader)

    @property
    def dataset(self) -> Any:
        """The data set of the loader, or None if the loader has none."""
        return getattr(self.loader, "dataset", None)

    def add(self, module_name: str, outputs: Any) -> None:
        """Add the outputs of an evaluation step for one batch.

        Args:
            module_name: name of the module's class, for error messages.
            outputs: the return value of the step.

        Raises:
            TypeError: if `RetrievalEvaluation` cannot use the outputs. With several processes, the error is raised
                later, on all processes, when the metrics are computed; otherwise the other processes would wait
                forever.
        """
        indices = None
        if self._batch_indices is not None:
            indices = next(self._batch_indices)
        try:
            check_step_outputs(module_name, outputs)
        except TypeError as error:
            if not self.metrics.must_defer_errors:
                raise
            self.metrics.defer_error(error)
            return
        embeddings = outputs["embeddings"]
        ids = outputs.get("ids")
        if ids is None and indices is not None:
            ids = torch.tensor(indices, device=embeddings.device)
        optional = {name: outputs.get(name) for name in ("roles", "instances", "cameras")}
        self.metrics.update(embeddings, outputs["labels"], ids, **optional)

    def compute(self) -> dict[str, Tensor]:
        """Compute the metrics; the prefix is added to their names."""
        with warnings.catch_warnings():
            # A process without a batch of this set still takes part in the computation, so this warning is ignored.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
            values = self.metrics.compute()
        return {f"{self.prefix}{name}": value for name, value in values.items()}

    def values_of_means(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of each query, by the name of their mean without the prefix, of those means that are in `results`.

        Empty for other metrics than `RetrievalMetrics`.
        """
        if not isinstance(self.metrics, RetrievalMetrics):
            return {}
        values = self.metrics.values_of_means()
        return {name: of_queries for name, of_queries in values.items() if f"{self.prefix}{name}" in results}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % intervals of the computed metrics, by their names with the prefix; empty for other metrics."""
        if not isinstance(self.metrics, RetrievalMetrics):
            return {}
        return {f"{self.prefix}{name}": ends for name, ends in self.metrics.intervals().items()}
