"""HAP, hierarchical Average Precision (Ramzi, Audebert, Thome, Rambour, Bitot: "Hierarchical Average Precision Training
for Pertinent Image Retrieval" (HAPPIER), ECCV 2022).

With relevance rel(i) instead of yes or no,

    H-rank(i) = rel(i) + sum over j above i of min(rel(i), rel(j))
    HAP = sum over relevant i of H-rank(i) / rank(i)  /  sum over relevant i of rel(i)

Items that share l of the L label levels with the query have rel = (l / L)^alpha / (number of items sharing exactly l).
In rank, items of lower relevance are counted by SupAP's H^-, which is never below the step; all others, and all of
H-rank, by the step, without gradient.

Where we differ: the query is neither in its own list nor in the counts; a query without a relevant item is left out.
`hrank_slopes` is the official code's optional gradient through H-rank.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from lightning_retrieval.checks import check_finite_number, check_positive
from lightning_retrieval.losses.base import Reduction, RetrievalLoss
from lightning_retrieval.losses.indexing import at
from lightning_retrieval.losses.sup_ap import upper_step


class HAPLoss(RetrievalLoss):
    """1 - hierarchical AP of labels with levels.

    Labels have shape (rows, L), finest level first, and nest. `from_scores` takes integer levels of relevance (0 for
    none) in place of the bool.

    Args:
        alpha: how much more a finer level counts, > 0.
        tau: temperature of the sigmoid, > 0.
        rho: slope for items that score more than `delta` above, > 0.
        delta: where the slope begins, > 0.
        offset: value where the slope begins; continuous where None.
        start: added to the sigmoid above 0; an upper bound of the step from 0.5 on.
        hrank_slopes: None, or (beta, gamma, leak): count items of higher relevance in H-rank by min(beta t + gamma, 1)
            above and leak t below, as the official configuration HAPPIER_5_SOP does with (25, 0.5, 10).
        reduction: `"mean"` over the queries that have a relevant item, their `"sum"`, or `"none"` (one value a query).
        class_balanced: each class (of the finest level) of the batch weighs the same.
        include_self: count the query in its own list, as the official code does. For comparison only.

    Raises:
        ValueError: if `alpha`, `tau`, `rho` or `delta` is not a finite number > 0, `offset`, `start` or a slope is not
            finite, or there are not three slopes; at the call, if label levels do not nest.
        TypeError: if one of them is not a number.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import HAPLoss
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]], requires_grad=True)
        >>> labels = torch.tensor([[7, 1], [7, 1], [3, 1], [4, 0]])  # three images of the coarse class 1
        >>> round(HAPLoss()(embeddings, labels).item(), 4)
        0.7373

    Cost:
        Time grows with (queries) x (relevant items of each) x (references); memory stays that of one block.

    Relations:
        With one level it is `SupAPLoss`.
    """

    graded = True

    def __init__(
        self,
        alpha: float = 1.0,
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float = 0.05,
        offset: float | None = None,
        start: float = 0.5,
        hrank_slopes: Sequence[float] | None = None,
        *,
        reduction: Reduction = "mean",
        class_balanced: bool = False,
        include_self: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, class_balanced=class_balanced, include_self=include_self)
        self.alpha = check_positive(self.name, "alpha", alpha)
        self.tau = check_positive(self.name, "tau", tau)
        self.rho = check_positive(self.name, "rho", rho)
        self.delta = check_positive(self.name, "delta", delta)
        self.offset = None if offset is None else check_finite_number(self.name, "offset", offset)
        self.start = check_finite_number(self.name, "start", start)
        if hrank_slopes is not None and len(hrank_slopes) != 3:
            raise ValueError(f"{self.name}: `hrank_slopes` must be (beta, gamma, leak) or None, got {hrank_slopes!r}.")
        self.hrank_slopes = hrank_slopes and tuple(
            check_finite_number(self.name, "hrank_slopes", slope) for slope in hrank_slopes
        )

    def query_losses(
        self,
        scores: Float[Tensor, "query gallery"],
        relevant: Integer[Tensor, "query gallery"],
        candidate: Bool[Tensor, "query gallery"],
    ) -> Float[Tensor, " query"]:
        """1 - HAP of each list; `relevant` holds levels."""
        rel = _relevance(relevant, self.alpha, scores.dtype)
        query, i = (relevant > 0).nonzero(as_tuple=True)
        s_i, rel_i = at(scores, query, i), rel[query, i]
        lower = candidate[query] & (rel[query] < rel_i[:, None])  # (pos, gallery)
        t = scores.index_select(0, query) - s_i[:, None]
        step = (t.detach() >= 0) & candidate[query]  # i itself is one of them
        counted_above = upper_step(t, self.tau, self.rho, self.delta, self.offset, self.start) * lower
        rank = counted_above.sum(1) + (step & ~lower).sum(1)
        shared = torch.minimum(rel[query], rel_i[:, None])
        if self.hrank_slopes is None:
            hrank = (shared * step).sum(1)
        else:
            beta, gamma, leak = self.hrank_slopes
            higher = candidate[query] & (rel[query] > rel_i[:, None])
            soft = torch.where(t > 0, (beta * t + gamma).clamp(max=1), leak * t)
            hrank = (shared * torch.where(higher, soft, step.to(t.dtype))).sum(1)
        hap = torch.zeros_like(scores[:, 0]).index_add(0, query, hrank / rank)
        return 1 - hap / rel.sum(1)

    def elements(self, positives: Int[Tensor, " query"], gallery: int) -> Int[Tensor, " query"]:
        return positives * gallery

    def extra_repr(self) -> str:
        own = f"alpha={self.alpha}, tau={self.tau}, rho={self.rho}, delta={self.delta}, offset={self.offset}"
        return f"{own}, start={self.start}, hrank_slopes={self.hrank_slopes}, {super().extra_repr()}"


def _relevance(
    levels: Integer[Tensor, "query gallery"], alpha: float, dtype: torch.dtype
) -> Float[Tensor, "query gallery"]:
    """(l / L)^alpha / (items of exactly level l) for level l > 0; HAP does not depend on L, which is taken as 1."""
    relevance = torch.zeros(levels.shape, dtype=dtype, device=levels.device)
    for level in levels.unique().tolist():
        if level > 0:
            exact = levels == level
            relevance += exact * (float(level) ** alpha / exact.sum(1, keepdim=True, dtype=dtype).clamp(min=1))
    return relevance
