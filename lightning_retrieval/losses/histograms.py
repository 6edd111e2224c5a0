"""Average Precision of soft histograms, which FastAP and AP_Q share.

Scores are sorted into bins of falling score; each score gives its weight to the two bins that it lies between, by its
distance from their centres. With h_m the weight in bin m and H_m the weight up to it, h+ and H+ those of the positives,

    AP = sum over m of (h+_m / N+) (H+_m / H_m):   precision at bin m times the recall gained there.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_retrieval.losses.indexing import at


def soft_histograms(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"],
    *,
    bins: int,
    low: float,
    high: float,
) -> tuple[Float[Tensor, "query bin"], Float[Tensor, "query bin"]]:
    """Weights of the candidates and of the positives in each bin, with centres from `high` down to `low`.

    A score beyond the ends lies whole in the last bin there, and gets no gradient.
    """
    u = ((high - scores) * ((bins - 1) / (high - low))).clamp(0, bins - 1)  # place among the bins
    h: Tensor = _Histogram.apply(u, candidate, bins)
    query, i = relevant.nonzero(as_tuple=True)
    u_i = at(u, query, i)
    left = u_i.detach().floor().clamp(max=bins - 2)
    share = u_i - left
    place = query * bins + left.long()
    flat = torch.zeros(len(scores) * bins, dtype=u.dtype, device=u.device)
    h_pos = flat.index_add(0, place, 1 - share).index_add(0, place + 1, share).view(len(scores), bins)
    return h, h_pos


def binned_ap(h: Float[Tensor, "query bin"], h_pos: Float[Tensor, "query bin"]) -> Float[Tensor, " query"]:
    """AP from the histograms of all candidates and of the positives."""
    H, H_pos = h.cumsum(1), h_pos.cumsum(1)
    precision = H_pos / H.where(H > 0, 1)  # an empty beginning has no positives either
    return (precision * h_pos).sum(1) / h_pos.sum(1)


class _Histogram(torch.autograd.Function):
    """Histogram of places among the bins; bin by bin, since a pass over a block is quicker than scattering it."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, mask: Tensor, bins: int) -> Tensor:
        ctx.save_for_backward(u, mask)
        u = u.masked_fill(~mask, -2.0)  # out of every bin's reach
        h, buffer = u.new_empty(len(u), bins), torch.empty_like(u)
        for m in range(bins):
            h[:, m] = torch.sub(u, m, out=buffer).abs_().neg_().add_(1).clamp_(min=0).sum(1)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        u, mask = ctx.saved_tensors
        left = u.floor().clamp_(max=grad.shape[1] - 2).long()
        slope = (grad[:, 1:] - grad[:, :-1]).gather(1, left)  # moving right takes from the left bin
        return slope.mul_(mask), None, None
