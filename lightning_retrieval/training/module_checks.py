"""Settings of a `RetrievalModule` that are validated at construction."""

from typing import Any, get_args

from torch import nn

from lightning_retrieval.checks import check_choice, check_finite_number, check_integer, check_positive
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.blackbox_map import BlackboxMAPLoss
from lightning_retrieval.losses.third_party import USE_OTHER_LOSS, as_batch_loss
from lightning_retrieval.training.memory import CrossBatchMemory, MemoryMode


def check_chunk_size(owner: str, chunk_size: Any) -> Any:
    """Return `chunk_size`; raise unless it is an integer >= 1, `"auto"` or None.

    Args:
        owner: prefix of error messages.
        chunk_size: the setting.
    """
    if chunk_size is None:
        return chunk_size
    if isinstance(chunk_size, str):
        if chunk_size != "auto":
            raise TypeError(f"{owner}: `chunk_size` must be an integer >= 1 or 'auto', got {chunk_size!r}.")
        return chunk_size
    return check_integer(owner, "chunk_size", chunk_size, least=1)


def adapt_loss(owner: str, loss: nn.Module) -> BatchLoss:
    """The loss with the interface of this library; raise if it does not rank embeddings.

    Args:
        owner: prefix of error messages.
        loss: a loss of this or of another library.
    """
    if isinstance(loss, BlackboxMAPLoss):
        raise TypeError(
            f"{owner}: BlackboxMAPLoss takes scores of images for classes, not embeddings and labels; call it in a "
            "training loop of your own, or rank images by images with BlackboxAPLoss and a `memory`."
        )
    return as_batch_loss(loss)


def check_memory(
    owner: str, loss: BatchLoss, memory: CrossBatchMemory | None, mode: MemoryMode, weight: float | None
) -> float:
    """Return the weight of the term with the memory, 1 by default; raise if the settings do not fit each other.

    Args:
        owner: prefix of error messages.
        loss: the loss.
        memory: past batches, or None.
        mode: how the memory is ranked.
        weight: of a second term with the memory, or None.
    """
    check_choice(owner, "memory_mode", mode, get_args(MemoryMode))
    if mode != "one_list" and memory is None:
        raise ValueError(f"{owner}: `memory_mode` {mode!r} was given without `memory`; give both or neither.")
    if weight is not None:
        weight = check_finite_number(owner, "memory_weight", weight)
        if mode != "two_terms":
            raise ValueError(
                f"{owner}: `memory_weight` must be None unless `memory_mode` is 'two_terms', got {weight} for "
                f"{mode!r}, whose loss is a single term; give memory_mode='two_terms' or no weight."
            )
    if memory is not None and loss.terms_without_references:
        raise TypeError(
            f"{owner}: with a `memory` the loss must rank references without the query's own copy, which "
            f"{', '.join(loss.terms_without_references)} cannot do; {USE_OTHER_LOSS}."
        )
    if weight is None:
        return 1.0
    return weight


def check_clip_value(owner: str, gradient_clip_val: float | None) -> float | None:
    """Return `gradient_clip_val`; raise unless it is a finite number > 0 or None.

    Args:
        owner: prefix of error messages.
        gradient_clip_val: the setting.
    """
    if gradient_clip_val is None:
        return None
    return check_positive(owner, "gradient_clip_val", gradient_clip_val)
