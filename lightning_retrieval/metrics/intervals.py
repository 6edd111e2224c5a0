"""Confidence intervals of means over queries, by bootstrap over classes.

The queries of a class are not independent: they share their positives, and a class is easy or hard as a whole. So whole
classes are drawn with replacement, as many as there are, and a mean is computed over all queries of the drawn classes
(cluster bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, 1993). The interval lies between the 2.5 %
and the 97.5 % quantile of the means of 1,000 draws. The draws depend only on the number of classes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_DRAWS, _SEED = 1000, 0
_QUANTILES = (0.025, 0.975)
_NUMBERS = 1 << 22  # number of drawn classes that are held in memory at a time


def bootstrap_intervals(
    values: Float[Tensor, "metric query"], groups: Int[Tensor, " query"]
) -> Float[Tensor, "metric 2"]:
    """The lower and the upper end of the 95 % interval of each mean over queries; NaN if fewer than 2 groups count.

    Args:
        values: the values of each metric, NaN for a query without a value.
        groups: the group of each query, such as its class.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics.intervals import bootstrap_intervals
        >>> values = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
        >>> bootstrap_intervals(values, torch.tensor([3, 3, 5, 5]))
        tensor([[0., 1.]], dtype=torch.float64)

    Cost:
        The sums of each group are computed once; a draw then takes one product of a vector with them.
    """
    values, groups = values.double().cpu(), groups.cpu()
    has_value = ~values.isnan()
    counted = has_value.any(0)
    unique, group = groups[counted].unique(return_inverse=True)
    if len(unique) == 0:
        return values.new_full((len(values), 2), torch.nan)
    sums = values.new_zeros(len(values), len(unique)).index_add_(1, group, values.nan_to_num()[:, counted])
    counts = values.new_zeros(len(values), len(unique)).index_add_(1, group, has_value[:, counted].double())
    generator = torch.Generator().manual_seed(_SEED)
    means = []
    for draws in torch.arange(_DRAWS).split(max(1, _NUMBERS // len(unique))):
        drawn = torch.randint(len(unique), (len(draws), len(unique)), generator=generator)
        times = values.new_zeros(drawn.shape).scatter_add_(1, drawn, values.new_ones(drawn.shape))  # (draw, group)
        means.append((times @ sums.T) / (times @ counts.T))
    quantiles = torch.tensor(_QUANTILES, dtype=values.dtype)
    has_several = (counts > 0).sum(1, keepdim=True) > 1
    return torch.where(has_several, torch.cat(means).nanquantile(quantiles, dim=0).T, torch.nan)
