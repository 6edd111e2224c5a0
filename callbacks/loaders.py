"""What the callbacks read from data loaders, samplers and data sets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import pytorch_lightning as pl
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_retrieval.metrics import EmbeddingMetric


@runtime_checkable
class MetricProvider(Protocol):
    """A data set with an evaluation protocol of its own.

    `RetrievalEvaluation` evaluates such a data set with the metric that `metrics` returns, and any other data set with
    `RetrievalMetrics`. A data set needs no base class for this, only the method.
    """

    def metrics(self, ks: Sequence[int], **settings: Any) -> EmbeddingMetric:
        """Create the metric.

        Args:
            ks: the k of R@k or of a similar metric.
            settings: keyword arguments of `EmbeddingMetric`.
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
    """Return the dataset indices of each batch of this process, or None if they cannot be known in advance."""
    # A custom batch sampler may yield other batches each time it is iterated.
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.sampler
    in_order = isinstance(sampler, SequentialSampler)
    sharded_in_order = isinstance(sampler, DistributedSampler) and not sampler.shuffle
    if in_order or sharded_in_order:
        return iter(loader.batch_sampler)
    return None


def is_sharded(loader: Any) -> bool:
    """Return whether each process reads its own shard of the data set."""
    return isinstance(loader.sampler, DistributedSampler)


def limited_length(loader: Any, limit: float) -> int | None:
    """Return the number of batches that `Trainer(limit_test_batches=limit)` evaluates; None means all of them."""
    if isinstance(limit, int):
        return limit
    if limit == 1:
        return None
    return int(len(loader) * limit)


def find_test_loaders(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
    """Create the test data loaders of the data module, or of the module if there is no data module."""
    source: Any = getattr(trainer, "datamodule", None)
    if source is None:
        source = pl_module
    else:
        source.setup("test")
    undefined = (pl.LightningModule.test_dataloader, pl.LightningDataModule.test_dataloader)
    if getattr(type(source), "test_dataloader", None) in undefined:
        raise ValueError(
            f"RetrievalEvaluation: `before_fit` needs a test set, which {type(source).__name__} does not have; define "
            "test_dataloader there, or set before_fit=False."
        )
    return source.test_dataloader()
