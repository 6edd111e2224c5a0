"""What is asked of a builder of backbones, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lightning_retrieval.checks import check_choice

MAP_POOLINGS = ("gem", "avg", "max")  # of feature maps and patch tokens
OWN, CLASS_TOKEN = "own", "class_token"
ALL_POOLINGS = (*MAP_POOLINGS, CLASS_TOKEN, OWN)


@dataclass(frozen=True)
class BackboneRequest:
    """The backbone that an `Embedder` needs.

    Args:
        owner: prefix of error messages.
        name: the argument `backbone`.
        weights: the argument `weights`.
        pooling: the argument `pooling`, not yet checked.
        image_size: the size for which the backbone is built; None for its own.
        arguments: further keyword arguments of the constructor of the network.
    """

    owner: str
    name: str
    weights: str | None
    pooling: Any
    image_size: int | tuple[int, int] | None
    arguments: Mapping[str, Any]

    def checked_pooling(self, default: str, allowed: tuple[str, ...]) -> str:
        """The pooling, `default` if none is asked for; raise unless it is allowed.

        Args:
            default: of the backbone.
            allowed: the poolings that the backbone has.
        """
        if self.pooling is None:
            return default
        pooling: str = check_choice(self.owner, "pooling", self.pooling, allowed)
        return pooling


class BuiltBackbone(NamedTuple):
    """A backbone, and what an `Embedder` keeps of it besides."""

    module: nn.Module
    pooling: str
    preparation: dict[str, Any]  # arguments of `Preparation` that its weights want
    arguments: dict[str, Any]  # from which it can be built again without a network
