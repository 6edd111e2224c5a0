"""Labels with several levels: shape (rows, levels), finest level first, each label in one label of the next level."""

import torch
from jaxtyping import Int
from torch import Tensor


def finest(labels: Int[Tensor, "row ..."]) -> Int[Tensor, " row"]:
    """The labels of the finest level; labels without levels are returned unchanged."""
    if labels.ndim == 1:
        return labels
    return labels[:, 0]


def check_nesting(owner: str, labels: Int[Tensor, "row level"]) -> None:
    """Raise an error if a label occurs with two different labels of the next coarser level."""
    if labels.shape[1] == 1:
        return
    unique = torch.unique(labels, dim=0)
    for level in range(labels.shape[1] - 1):
        pairs = torch.unique(unique[:, level : level + 2], dim=0)
        fine, coarse = pairs.unbind(1)
        repeated = fine[1:][fine[1:] == fine[:-1]]
        if len(repeated) > 0:
            raise ValueError(
                f"{owner}: label levels must nest, each label of level {level} within one of level {level + 1}, got "
                f"label {int(repeated[0])} within {coarse[fine == repeated[0]].tolist()}."
            )
