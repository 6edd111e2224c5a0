"""Average Precision of soft histograms, shared by FastAP and AP_Q.

Scores are put into bins of decreasing score. Each score divides its weight between the two bins whose centres enclose
it, in proportion to the distances. With h_m the weight in bin m, H_m the weight up to and including it, and h+ and H+
those of the positives,

    AP = sum over m of (h+_m / N+) (H+_m / H_m):   the precision at bin m times the recall gained there.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.losses.indexing import at
from lightning_retrieval.losses.positives import find_positives

MOST_BINS = 1 << 16  # float32 has at least 8 bits left for the position between two bins
# A position on the bin axis from which no bin is within reach, so that the item has no weight in any.
OUTSIDE = -2.0


def soft_histograms(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    bins: int,
    low: float,
    high: float,
) -> tuple[Float[Tensor, "query bin"], Float[Tensor, "query bin"]]:
    """The weight of the candidates and of the positives in each bin, with bin centres from `high` down to `low`.

    A score outside [low, high] has its whole weight in the nearest bin and gets no gradient.
    """
    u = ((high - scores) * ((bins - 1) / (high - low))).clamp(0, bins - 1)  # position on the bin axis
    h: Tensor = _Histogram.apply(u, candidate, bins)

    # The positives are few, so their weights are scattered.
    positives = find_positives(relevant)
    query, i = positives.query, positives.index  # (pos,), (pos,)
    u_i = at(u, query, i)  # (pos,)
    left = u_i.detach().floor().clamp(max=bins - 2)  # (pos,)
    weight_right = u_i - left
    left_index = query * bins + left.long()  # into the flattened (query, bin)
    h_pos = torch.zeros(len(scores) * bins, dtype=u.dtype, device=u.device)
    h_pos = h_pos.index_add(0, left_index, 1 - weight_right).index_add(0, left_index + 1, weight_right)
    return h, h_pos.view(len(scores), bins)


def binned_ap(h: Float[Tensor, "query bin"], h_pos: Float[Tensor, "query bin"]) -> Float[Tensor, " query"]:
    """AP from the histograms of all candidates and of the positives."""
    H = h.cumsum(1)
    H_pos = h_pos.cumsum(1)
    precision = H_pos / H.where(H > 0, 1)  # where H is 0, so is H_pos
    return (precision * h_pos).sum(1) / h_pos.sum(1)


class _Histogram(torch.autograd.Function):
    """The histogram of positions on the bin axis. It loops over the bins, which is faster than scattering a block."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, mask: Tensor, bins: int) -> Tensor:
        ctx.save_for_backward(u, mask)
        u = u.masked_fill(~mask, OUTSIDE)
        h = u.new_empty(len(u), bins)
        buffer = torch.empty_like(u)
        for m in range(bins):
            # max(1 - |u - m|, 0), in one buffer
            weight = torch.sub(u, m, out=buffer).abs_().neg_().add_(1).clamp_(min=0)
            h[:, m] = weight.sum(1)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        u, mask = ctx.saved_tensors
        left = u.floor().clamp_(max=grad.shape[1] - 2).long()
        # As u grows, weight moves from the left bin to the right one.
        slope = (grad[:, 1:] - grad[:, :-1]).gather(1, left)
        return slope.mul_(mask), None, None
