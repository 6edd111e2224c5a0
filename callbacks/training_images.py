"""The training set as a callback embeds it: its images are read as in evaluation, and the training does not change."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.evaluation_sets import batches_on_device
from lightning_retrieval.distributed import kept_integers, kept_rows, to_host
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.preparation.of_run import data_module_of
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.sides import is_two_sided


def training_images(trainer: pl.Trainer) -> Any:
    """A copy of the training set that reads its images as in evaluation."""
    datamodule = data_module_of(trainer.fit_loop)
    dataset: Any = getattr(datamodule, "train_set", None)
    loader: Any = trainer.train_dataloader
    if dataset is None and getattr(loader, "batch_sampler", None) is not None:  # else the items may be batches
        dataset = loader.dataset
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        unknown = loader if dataset is None else dataset
        raise InvalidValue(
            "the training images must be known, as the data module's `train_set` or, in a fit, as the map-style "
            "dataset, with a length, of whose items the train_dataloader makes batches",
            got=type(unknown).__name__,
            cure="pass the Trainer a RetrievalDataModule, or fit first",
        )
    if getattr(dataset, "two_sided", False):
        modules = getattr(datamodule, "modules", {})
        return dataset.map_sides(lambda side, of_side: _as_evaluated(of_side, modules.get(side)))
    return _as_evaluated(dataset, datamodule)


def _as_evaluated(dataset: Any, datamodule: Any) -> Any:
    """Return a copy of a training set that reads its images as in evaluation."""
    evaluated: Any = copy.copy(dataset)
    if hasattr(datamodule, "eval_transform") and hasattr(evaluated, "transform"):
        evaluated.transform = datamodule.eval_transform
    if hasattr(evaluated, "augment"):
        evaluated.augment = False
    return evaluated


def candidates_of(dataset: Any) -> range:
    """The indices of the images of a training set; of a set with two sides, those of the candidates."""
    return range(getattr(dataset, "num_queries", 0), len(dataset))


def labels_of(dataset: Any) -> Int[Tensor, " image"] | None:
    """The finest label of each image, from the data set's `labels`; None if these are no integers for each image."""
    labels = getattr(dataset, "labels", None)
    if isinstance(labels, Tensor):
        labels = to_host(labels)
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError):  # a tensor that no array can hold, or rows of unequal length
        return None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or len(array) != len(dataset):
        return None
    return finest(torch.from_numpy(array.astype(np.int64)))


def batches_of(dataset: Any, batches: Sequence[Int[Tensor, " image"]], like: Any) -> DataLoader[Any]:
    """Create a loader of the images at some indices, with the workers and the `collate_fn` of another loader.

    Args:
        dataset: the data set.
        batches: the indices of each batch.
        like: the other loader.
    """
    return DataLoader(
        dataset,
        batch_sampler=list(map(Tensor.tolist, batches)),
        num_workers=getattr(like, "num_workers", 0),
        collate_fn=getattr(like, "collate_fn", None),
        generator=torch.Generator(),  # its own generator leaves the global random state unchanged
    )


def embedded(
    trainer: pl.Trainer, pl_module: Any, loader: Any, embed: Callable[[Tensor], Tensor], description: str
) -> Iterator[tuple[Float[Tensor, "row dim"], Int[Tensor, "row ..."]]]:
    """The embeddings of each batch of a loader, in float32 or float64, and their labels; both are copies.

    Args:
        trainer: the Trainer of the run.
        pl_module: the module.
        loader: yields batches; of batches with two sides, candidates are embedded.
        embed: maps images to embeddings.
        description: the work, shown with its progress.
    """
    with trainer.precision_plugin.val_step_context():
        for batch in batches_on_device(trainer, loader, description):
            if is_two_sided(batch):
                batch = batch["candidates"]
            images, labels, _ = pl_module.unpack_batch(batch)
            rows = embed(images)
            if isinstance(batch, dict) and "roles" in batch:
                is_image = batch["roles"] > 0  # placeholders for unreadable images have role 0
                rows, labels = rows[is_image], labels[is_image]
            yield kept_rows(rows.to(torch.promote_types(rows.dtype, torch.float32))), kept_integers(labels)
