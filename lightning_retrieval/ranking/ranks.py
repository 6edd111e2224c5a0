"""Hard ranks of the positives. Every retrieval metric is a function of these ranks.

The rank of a positive is the number of candidates that score at least as high, itself included, so ties count against
the model. `count_at_least` counts these candidates in a tile of scores. The counts of the tiles of a list add up, so a
list may be divided in any way (`lightning_retrieval.ranking.positive_ranks`).

Matrix products that decide an order are computed in IEEE float32, whatever precision training uses (`ieee_products`).
`torch.set_float32_matmul_precision("high")`, which Lightning recommends, lets GPUs compute float32 products in TF32,
with 10 bits of mantissa. That is good enough for a network, but it makes different scores equal, and changes the ranks
of a third of the queries of a large set.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lightning_retrieval.distributed import is_accelerator

# If at most this fraction of the scores reaches the worst positive, only these scores are searched. Otherwise, all
# scores are sorted.
_MAX_COUNTED_FRACTION = 1 / 16
_LEAST_VALUES_OF_NUMPY = 4096  # number of values of a row from which on NumPy searches them faster than torch
_SLOTS_OF_A_ROW = 1 << 10  # number of counts of a row into which an accelerator adds, if there are few positives


def count_at_least(
    scores: Float[Tensor, "query gallery"], positives: Float[Tensor, "query pos"]
) -> Int[Tensor, "query pos"]:
    """For each positive, the number of scores of its row that are at least as high.

    The positives of a row must be in ascending order. `scores` may be sorted in place.
    """
    if is_accelerator(scores.device):
        return _count_without_waiting(scores, positives)
    if scores.dtype == torch.float32:
        reaches_worst = scores >= positives[:, :1]
        if _number_of_true(reaches_worst) <= _MAX_COUNTED_FRACTION * scores.numel():
            return _count_reaching(scores, positives, reaches_worst)
    return scores.shape[1] - _number_below(ascending(scores), positives)


def _number_below(
    ordered: Float[Tensor, "query gallery"], values: Float[Tensor, "query pos"]
) -> Int[Tensor, "query pos"]:
    """For each value, the number of lower elements of its row, on a CPU. All rows are in ascending order.

    NumPy searches many ascending values in half of torch's time, because each search begins where the last one ended.
    """
    if values.shape[1] < _LEAST_VALUES_OF_NUMPY:
        return torch.searchsorted(ordered, values, out_int32=True)
    found = np.empty(values.shape, dtype=np.int32)
    for row, (in_order, searched) in enumerate(zip(ordered.numpy(), values.numpy())):
        found[row] = in_order.searchsorted(searched)
    return torch.from_numpy(found)


def sum_from_here(values: Shaped[Tensor, "query pos"]) -> Shaped[Tensor, "query pos"]:
    """For each column, the sum of the row from this column to the last, in the dtype of the values."""
    return values.flip(1).cumsum(1, dtype=values.dtype).flip(1)


def ascending(scores: Float[Tensor, "query gallery"]) -> Float[Tensor, "query gallery"]:
    """The rows in ascending order. On a CPU, NumPy sorts them in place, in a tenth of torch's time."""
    if scores.device.type != "cpu":
        return scores.sort(1).values
    scores.numpy().sort(axis=1)
    return scores


def first_of_equal(ordered: Float[Tensor, "query pos"]) -> Int[Tensor, "query pos"]:
    """For each element of rows in ascending order, the first column of its row that has an equal element."""
    column = torch.arange(ordered.shape[1], device=ordered.device).repeat(len(ordered), 1)
    column[:, 1:] *= ordered[:, 1:] != ordered[:, :-1]
    return column.cummax(1).values


def _number_of_true(mask: Bool[Tensor, "query gallery"]) -> int:
    """The number of True elements, on a CPU. Eight bytes are added at a time, and few enough that no byte overflows."""
    words_added = 192  # at most 255, the largest value of a byte
    if mask.numel() % (8 * words_added):
        return int(mask.sum())
    words = mask.flatten().view(torch.int64).view(-1, words_added)
    sums_of_bytes = words.sum(1).view(torch.uint8)
    return int(sums_of_bytes.sum())


def _count_without_waiting(
    scores: Float[Tensor, "query gallery"], positives: Float[Tensor, "query pos"]
) -> Int[Tensor, "query pos"]:
    """`count_at_least` without a number that the host has to read: each score is searched in the row of positives.

    Each count is kept in several slots, because an accelerator is slow if many threads add to one number.
    """
    rows, width = positives.shape
    slots = max(1, _SLOTS_OF_A_ROW // (width + 1))
    reached = torch.searchsorted(positives.contiguous(), scores.contiguous(), right=True)  # positives not higher
    slot = torch.arange(scores.shape[1], device=scores.device) % slots
    index = reached.mul_(slots).add_(slot)
    counts = torch.zeros(rows, (width + 1) * slots, dtype=torch.int32, device=scores.device)
    counts.scatter_add_(1, index, counts.new_ones(1, 1).expand_as(index))
    of_each_number = counts.view(rows, width + 1, slots).sum(2)
    return sum_from_here(of_each_number[:, 1:])


def true_positions(mask: Bool[Tensor, "query gallery"]) -> Int[Tensor, " true"]:
    """The positions of True in the flattened mask. On a CPU, NumPy finds them in a tenth of torch's time."""
    if mask.device.type != "cpu":
        return mask.flatten().nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _count_reaching(
    scores: Float[Tensor, "query gallery"],
    positives: Float[Tensor, "query pos"],
    reaches_worst: Bool[Tensor, "query gallery"],
) -> Int[Tensor, "query pos"]:
    """`count_at_least` for few scores: those that reach the worst positive of their row. One search covers all rows.

    The keys of the search have the row in their upper 32 bits and the score in their lower 32 bits, so that the keys of
    all rows are in one order.
    """
    rows, width = positives.shape
    reaching = true_positions(reaches_worst)
    row = reaching // scores.shape[1]
    upper_bits = torch.arange(rows, device=scores.device) << 32
    keys = _sortable_integers(scores.flatten()[reaching]) + upper_bits[row]
    bounds = (_sortable_integers(positives) + upper_bits[:, None]).flatten()
    reached = torch.searchsorted(bounds, keys, right=True) - row * width  # number of positives that are not higher
    counts = torch.bincount(reached + row * (width + 1), minlength=rows * (width + 1)).view(rows, width + 1)
    return sum_from_here(counts[:, 1:])


def _sortable_integers(values: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Map float32 values to 32-bit integers (as int64) in the same order; -0.0 and 0.0 map to the same integer."""
    bits = (values + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


@contextmanager
def ieee_products() -> Iterator[None]:
    """Context in which float32 matrix products are computed in IEEE float32; restores the settings on exit.

    The settings are global, so products of other threads meanwhile also have full precision.

    Example:
        >>> import torch
        >>> torch.set_float32_matmul_precision("high")
        >>> with ieee_products():
        ...     torch.get_float32_matmul_precision()
        'highest'
        >>> torch.get_float32_matmul_precision()
        'high'
        >>> torch.set_float32_matmul_precision("highest")
    """
    with ExitStack() as restored:
        for backend in _backends_with_own_setting():
            restored.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
        previous = _precision_of_all_backends()
        if previous is None:
            for backend in _backends_with_own_setting():
                backend.fp32_precision = "ieee"
        elif previous != "highest":
            restored.callback(torch.set_float32_matmul_precision, previous)  # called before the backends' callbacks
            torch.set_float32_matmul_precision("highest")
        yield


def _backends_with_own_setting() -> list[Any]:
    """The objects that hold torch's precision setting of each backend. Older versions of torch have none."""
    backends = [torch.backends.cuda.matmul]
    if hasattr(torch.backends.mkldnn, "matmul"):
        backends.append(torch.backends.mkldnn.matmul)
    if hasattr(torch.backends.mkldnn, "fp32_precision"):
        return backends
    return []


def _precision_of_all_backends() -> str | None:
    """The setting of `torch.set_float32_matmul_precision`; None if the settings of the backends contradict it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@dataclass(frozen=True)
class PositiveRanks:
    """Ranks of the positives of a block of queries. The worst positive comes first; rows are padded to the longest.

    Attributes:
        queries: index of the query of each row.
        rank: number of candidates that score at least as high as the positive; arbitrary at padding.
        first_tied: the first column of the row whose positive has the same score; arbitrary at padding.
        level: number of label levels that the positive shares with the query, 0 at padding. Among tied positives, the
            one that shares the most levels comes first.
        levels: number of levels of the labels.
    """

    queries: Int[Tensor, " query"]
    rank: Int[Tensor, "query pos"]
    first_tied: Int[Tensor, "query pos"]
    level: Int[Tensor, "query pos"]
    levels: int

    @cached_property
    def is_positive(self) -> Bool[Tensor, "query pos"]:
        """False at padding."""
        return self.level > 0

    @cached_property
    def count(self) -> Int[Tensor, " query"]:
        """Number of positives of each query."""
        return self.is_positive.sum(1)

    @cached_property
    def rank_among_positives(self) -> Int[Tensor, "query pos"]:
        """For each positive, the number of positives that score at least as high; arbitrary at padding."""
        return self._positives_from_here.gather(1, self.first_tied)

    @cached_property
    def precision(self) -> Float[Tensor, "query pos"]:
        """For each positive, the fraction of positives among candidates that score at least as high; 0 at padding."""
        precision = self.rank_among_positives.double().div_(self.rank)  # 0 / 0 is possible at padding
        return torch.where(self.is_positive, precision, 0.0)

    @cached_property
    def position(self) -> Int[Tensor, "query pos"]:
        """Position in the list, from 1, if ties are sorted by the number of shared levels, the fewest first."""
        return self._irrelevant_before + self._positives_from_here

    @cached_property
    def first_hit(self) -> Int[Tensor, " query"]:
        """Position of the first positive, if irrelevant candidates that tie with it come first."""
        irrelevant_before = torch.where(self.is_positive, self._irrelevant_before, self.rank.max())
        return 1 + irrelevant_before.amin(1)

    @cached_property
    def _positives_from_here(self) -> Int[Tensor, "query pos"]:
        """For each column, the number of positives of the row from this column to the last."""
        return sum_from_here(self.is_positive.int())

    @cached_property
    def _irrelevant_before(self) -> Int[Tensor, "query pos"]:
        """For each positive, the number of irrelevant candidates that score at least as high."""
        return self.rank - self.rank_among_positives

    def at_level(self, level: int) -> "PositiveRanks":
        """The same lists if only candidates that share the label of this level are positive; other columns are padding.

        Level 0 is the finest.
        """
        if self.levels == 1:
            return self
        shares_label = (self.level >= self.levels - level).long()
        return PositiveRanks(self.queries, self.rank, self.first_tied, shares_label, levels=1)

    def to(self, device: torch.device) -> "PositiveRanks":
        """The same ranks on this device."""
        return replace(
            self,
            queries=self.queries.to(device),
            rank=self.rank.to(device),
            first_tied=self.first_tied.to(device),
            level=self.level.to(device),
        )

    def sum_at_least(self, weights: Shaped[Tensor, "query pos"]) -> Shaped[Tensor, "query pos"]:
        """For each positive, the sum of the weights of all columns, also padding, that score at least as high as it."""
        return sum_from_here(weights).gather(1, self.first_tied)
