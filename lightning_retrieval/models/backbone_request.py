"""The input and output of the builders of backbones, and the names of backbones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from lightning_retrieval.checks import check_choice
from lightning_retrieval.invalid import InvalidValue

GLYPH_NET = "glyph_net"
MAP_POOLINGS = ("gem", "avg", "max")  # for feature maps and patch tokens
OWN, CLASS_TOKEN = "own", "class_token"
ALL_POOLINGS = (*MAP_POOLINGS, CLASS_TOKEN, OWN)


def poolings_of_network(has_class_token: bool) -> tuple[str, ...]:
    """The possible poolings of a network of timm or Hugging Face, which also has its own pooling."""
    if has_class_token:
        return ALL_POOLINGS
    return (*MAP_POOLINGS, OWN)


def unknown_name(name: str) -> ValueError:
    """The error for an unknown name.

    Args:
        name: the argument `backbone`.
    """
    return InvalidValue(
        "must be the name of a torchvision classification model, 'timm/' and the name of a timm model, 'hf/' and a "
        "Hugging Face hub id or a local folder (hf/facebook/dinov2-small), 'glyph_net' or a module",
        "Embedder",
        "backbone",
        got=repr(name),
    )


@dataclass(frozen=True)
class BackboneRequest:
    """The arguments of an `Embedder` that define its backbone.

    Args:
        name: the argument `backbone`.
        weights: the argument `weights`.
        pooling: the argument `pooling`, which is not yet checked.
        image_size: image size for which the backbone is built; None for the default size of the backbone.
        arguments: further keyword arguments of the constructor of the network.
    """

    name: str
    weights: str | None
    pooling: Any
    image_size: int | tuple[int, int] | None
    arguments: Mapping[str, Any]

    def checked_pooling(self, default: str = "gem", allowed: tuple[str, ...] = MAP_POOLINGS) -> str:
        """The requested pooling, or `default` if no pooling was requested; raises unless the pooling is allowed.

        Args:
            default: default pooling of the backbone.
            allowed: the poolings that the backbone supports; by default those of feature maps.
        """
        if self.pooling is None:
            return default
        pooling: str = check_choice("pooling", self.pooling, allowed, owner="Embedder")
        return pooling


class BuiltBackbone(NamedTuple):
    """A backbone, with the values that an `Embedder` stores about it."""

    module: nn.Module
    pooling: str
    preparation: dict[str, Any]  # arguments of `Preparation` for the weights
    arguments: dict[str, Any]  # arguments that build the backbone again without a network connection
