"""Labels and roles of images, and the numbers of dimensions of shortened embeddings.

Labels with several levels have shape (rows, levels), finest level first; each label belongs to one label of the next
level.
"""

from collections.abc import Sequence
from enum import IntFlag

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from lightning_retrieval.checks import check_counts, short_repr
from lightning_retrieval.invalid import InvalidValue


class Role(IntFlag):
    """The role of an image in an evaluation set.

    Roles are stored as integers in tensors and arrays: 1 query, 2 gallery, 3 both. An image without a role, 0, is junk:
    it is neither a query nor a candidate.

    Example:
        >>> from lightning_retrieval.ranking.labels import Role
        >>> Role.QUERY | Role.GALLERY == Role.BOTH
        True
        >>> int(Role.BOTH)
        3
    """

    JUNK = 0
    QUERY = 1
    GALLERY = 2
    BOTH = 3


def has_role(roles: Integer[Tensor, " row"], role: Role) -> Bool[Tensor, " row"]:
    """Whether each row has this role, alone or with the other role. `Role.BOTH` stands for any role."""
    found: Tensor = (roles & int(role)) > 0
    return found


def check_roles(roles: Integer[Tensor, " row"]) -> None:
    """Raise unless all roles are from 0 to 3."""
    if bool(((roles < Role.JUNK) | (roles > Role.BOTH)).any()):
        rule = "must be from 0 to 3 (1 query, 2 gallery, 3 both, 0 neither)"
        raise InvalidValue(rule, argument="roles", got=f"{int(roles.min())} to {int(roles.max())}")


def check_dims(dims: Sequence[int], *, may_be_empty: bool = False) -> tuple[int, ...]:
    """The numbers of dimensions as a tuple; raise unless they are integers >= 1 in ascending order.

    Args:
        dims: numbers of dimensions to which embeddings are shortened.
        may_be_empty: whether there may be none.
    """
    checked = check_counts("dims", dims, may_be_empty=may_be_empty)
    if list(checked) != sorted(set(checked)):
        raise InvalidValue("must be different numbers in ascending order", argument="dims", got=short_repr(dims))
    return checked


def check_dims_fit(dims: tuple[int, ...], embeddings: Float[Tensor, "batch dim"]) -> None:
    """Raise if one of `dims` is larger than the dimension of the embeddings.

    Args:
        dims: in ascending order; may be empty.
        embeddings: one row for each item.
    """
    dim = embeddings.shape[-1]
    if dims and dims[-1] > dim:
        rule = f"must be at most the dimension of the embeddings, {dim}"
        cure = "give smaller `dims`, or train embeddings of more dimensions"
        raise InvalidValue(rule, argument="dims", got=dims[-1], cure=cure)


def finest(labels: Int[Tensor, "row ..."]) -> Int[Tensor, " row"]:
    """The labels of the finest level; labels without levels are returned unchanged."""
    if labels.ndim == 1:
        return labels
    return labels[:, 0]


def check_nesting(labels: Int[Tensor, "row level"]) -> None:
    """Raise an error if a label occurs with two different labels of the next coarser level."""
    if labels.shape[1] == 1:
        return
    unique = torch.unique(labels, dim=0)
    for level in range(labels.shape[1] - 1):
        pairs = torch.unique(unique[:, level : level + 2], dim=0)
        fine, coarse = pairs.unbind(1)
        repeated = fine[1:][fine[1:] == fine[:-1]]
        if len(repeated) > 0:
            cure = "; if the columns are not levels, give the rule of `relevance` that reads them"
            if bool(((unique == 0) | (unique == 1)).all()):
                cure = "; give one-hot labels as labels.argmax(1), and multi-hot labels as tags with SharedTags"
            rule = f"label levels must nest, each label of level {level} within one of level {level + 1}"
            got = f"label {int(repeated[0])} within {coarse[fine == repeated[0]].tolist()}{cure}"
            raise InvalidValue(rule, got=got)
