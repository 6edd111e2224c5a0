"""Labels of several levels: shape (rows, levels), finest level first, each label within one of the next level."""

import torch
from jaxtyping import Int
from torch import Tensor


def finest(labels: Int[Tensor, "row ..."]) -> Int[Tensor, " row"]:
    """The labels of the first, finest level, where they have levels."""
    return labels if labels.ndim == 1 else labels[:, 0]


def check_nesting(who: str, labels: Int[Tensor, "row level"]) -> None:
    """Refuse labels (rows, levels), finest first, of which one lies within two of the next level."""
    every = torch.unique(labels, dim=0) if labels.shape[1] > 1 else labels
    for level in range(labels.shape[1] - 1):
        pairs = torch.unique(every[:, level : level + 2], dim=0)
        if len(torch.unique(pairs[:, 0])) < len(pairs):
            fine = pairs[:-1, 0][pairs[1:, 0] == pairs[:-1, 0]][0]
            raise ValueError(
                f"{who}: label levels must nest, one label of level {level} within one of level {level + 1}, got label "
                f"{int(fine)} within {pairs[pairs[:, 0] == fine, 1].tolist()}."
            )
