"""Roles of an image in evaluation: it is a query, it is in the gallery, or both."""

from enum import IntFlag

from jaxtyping import Bool, Integer
from torch import Tensor


class Role(IntFlag):
    """What an image is in an evaluation set.

    Roles are stored as integers in tensors and arrays: 1 is a query, 2 an image of the gallery, 3 is both. An image
    without a role, 0, is junk: it is in no list, neither as a query nor as a candidate.

    Example:
        >>> from lightning_retrieval.ranking.roles import Role
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
    """Whether each row has this role, alone or with another one. With `Role.BOTH`: whether it has any role."""
    found: Tensor = (roles & int(role)) > 0
    return found
