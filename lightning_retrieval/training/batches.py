"""The forms of a batch of a DataLoader, and what the first batch of a run tells about labels and ids."""

from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import SequentialSampler

from lightning_retrieval.checks import is_integer
from lightning_retrieval.host import to_host
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.global_batch import GlobalBatch

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


def check_first_batch(module: Any, batch: GlobalBatch) -> None:
    """Compare labels and ids of a run's first batch with what the sampler drew, as far as that is known.

    It says nothing about labels and ids of a wrong type, which the loss refuses.

    Args:
        module: a `RetrievalModule` in a run.
        batch: of all processes or, if the module does not gather, of this one.

    Raises:
        ValueError: if they contradict the sampler of a `RetrievalDataLoader`; for other loaders there is a warning.
    """
    if not is_integer(batch.labels) or batch.labels.ndim not in (1, 2):
        return
    labels, ids = to_host(batch.labels), None
    if batch.ids is not None:
        if not is_integer(batch.ids) or batch.ids.shape != labels.shape[:1]:
            return
        ids = to_host(batch.ids)
    owner, loader = type(module).__name__, module.trainer.train_dataloader
    if hasattr(loader, "check_first_batch"):
        loader.check_first_batch(labels, ids, gathered=module.gather)
    elif ids is not None:
        _warn_of_ids(owner, loader, finest(labels), ids)
    if module.memory is None:
        _warn_of_one_label(owner, finest(labels))


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
