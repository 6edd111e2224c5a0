"""The forms of a batch of a DataLoader, and what the first batch of a run tells about labels and ids."""

from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import SequentialSampler

from lightning_retrieval.checks import is_integer
from lightning_retrieval.distributed import gather_objects
from lightning_retrieval.host import to_host
from lightning_retrieval.ranking.labels import finest

Unpacked = tuple[Tensor, Tensor, Tensor | None]


def unpack(owner: str, batch: Any) -> Unpacked:
    """Images, labels, and ids or None, of `(images, labels)`, `(images, labels, ids)` or a dict with these keys.

    Args:
        owner: prefix of error messages.
        batch: what the DataLoader yields.

    Raises:
        TypeError: if the batch has another form.
    """
    if isinstance(batch, dict):
        if "images" in batch and "labels" in batch:
            return batch["images"], batch["labels"], batch.get("ids")
        came = f"a dict with the keys {sorted(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1], None
        if len(batch) == 3:
            return batch[0], batch[1], batch[2]
        came = f"{len(batch)} items"
    else:
        came = type(batch).__name__
    raise TypeError(
        f"{owner}: a batch must be (images, labels), (images, labels, ids) or a dict with the keys images, labels and "
        f"optionally ids, got {came}; override unpack_batch for another form."
    )


def check_first_batch(module: Any, labels: Any, ids: Any) -> None:
    """Compare labels and ids of a run's first global batch with what the sampler drew, as far as that is known.

    All processes must call it. It says nothing about labels and ids of a wrong type, which the step refuses.

    Args:
        module: a `RetrievalModule` in a run.
        labels: of this process.
        ids: of this process, or None.

    Raises:
        ValueError: if they contradict the sampler of a `RetrievalDataLoader`; for other loaders there is a warning.
    """
    shards = gather_objects(_on_host(labels, ids))
    if None in shards or len({shard[0].shape[1:] for shard in shards}) > 1:
        return
    all_labels = torch.cat([shard[0] for shard in shards])
    all_ids = None
    if all(shard[1] is not None for shard in shards):
        all_ids = torch.cat([shard[1] for shard in shards])
    owner, loader = type(module).__name__, module.trainer.train_dataloader
    if hasattr(loader, "check_first_batch"):
        loader.check_first_batch(all_labels, all_ids)
    elif all_ids is not None:
        _warn_of_ids(owner, loader, finest(all_labels), all_ids)
    if module.memory is None:
        _warn_of_one_label(owner, finest(all_labels))


def _on_host(labels: Any, ids: Any) -> tuple[Tensor, Tensor | None] | None:
    """Copies on the CPU; None if labels or ids are not integers of the shapes that a step expects."""
    if not isinstance(labels, Tensor) or not is_integer(labels) or labels.ndim not in (1, 2):
        return None
    if ids is None:
        return to_host(labels), None
    if not isinstance(ids, Tensor) or not is_integer(ids) or ids.shape != labels.shape[:1]:
        return None
    return to_host(labels), to_host(ids)


def _warn_of_ids(owner: str, loader: Any, labels: Tensor, ids: Tensor) -> None:
    """Warn if one id has two labels, or ids repeat although the loader seems to draw different images."""
    unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    repeated = int((counts[inverse] > 1).sum())
    if not repeated:
        return
    cure = "give each image an id of its own, such as its index in the data set, or no ids"
    first = torch.full_like(unique, len(ids)).scatter_reduce(0, inverse, torch.arange(len(ids)), "amin")
    differs = (labels != labels[first][inverse]).nonzero()[:, 0]
    if len(differs):
        row = int(differs[0])
        labels_of_id = f"{int(labels[first[inverse[row]]])} and {int(labels[row])}"
        rank_zero_warn(
            f"{owner}: an image must have one label, but in the first batch the id {int(ids[row])} has the labels "
            f"{labels_of_id}, and {len(ids)} images have {len(unique)} different ids; images with the same id are not "
            f"in each other's lists: {cure}."
        )
    elif _repeats_are_unexpected(loader, share_of_ids=len(unique) / len(ids)):
        rank_zero_warn(
            f"{owner}: in the first batch {repeated} of {len(ids)} images share their id with others, which leaves "
            f"them out of each other's lists; unless the sampler draws images several times, {cure}."
        )


def _repeats_are_unexpected(loader: Any, share_of_ids: float) -> bool:
    """Whether ids that repeat in a batch are probably wrong, as far as the sampler of a loader is known.

    Args:
        loader: of the training batches.
        share_of_ids: number of different ids for each row.
    """
    sampler = getattr(loader, "sampler", None)
    replacement = getattr(sampler, "replacement", None)
    draws_images = getattr(loader, "batch_size", None) is not None  # else the sampler may draw whole batches
    if draws_images and (replacement is False or isinstance(sampler, SequentialSampler)):
        return True
    return replacement is not True and share_of_ids <= 0.5


def _warn_of_one_label(owner: str, labels: Tensor) -> None:
    if len(labels) > 1 and bool((labels == labels[0]).all()):
        rank_zero_warn(
            f"{owner}: all {len(labels)} images of the first batch have the label {int(labels[0])}, so that no list "
            "has a negative and nothing is learned; check the labels, and that the sampler draws several classes."
        )
