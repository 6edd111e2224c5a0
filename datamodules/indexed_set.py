"""The base class of the datasets whose rows, images or texts, are those of an `ImageIndex`."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from lightning_retrieval.datamodules.image_index import ImageIndex

_FOR_RELEVANCE = ("roles", "instances", "cameras", "tags")  # columns of the index that items also have


class IndexedSet(Dataset[dict[str, Any]]):
    """A map-style dataset whose items have `labels`, `ids`, and `roles`, `instances`, `cameras` and `tags` if known."""

    index: ImageIndex

    # Tensors of the index are properties instead of attributes, of which each spawned worker would get a copy.
    @property
    def labels(self) -> Int[Tensor, " item"]:
        """The class of each row."""
        return torch.from_numpy(self.index.labels)

    @property
    def categories(self) -> Int[Tensor, " item"] | None:
        """The category of each row, or None."""
        return None if self.index.categories is None else torch.from_numpy(self.index.categories)

    @property
    def tags(self) -> Int[Tensor, "item tag"] | None:
        """The tags of each row, or None."""
        return None if self.index.tags is None else torch.from_numpy(self.index.tags)

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes 0, 1, ..., or None."""
        return self.index.names

    @property
    def tag_names(self) -> Sequence[str] | None:
        """The names of the tags 0, 1, ..., or None."""
        return self.index.tag_names

    @property
    def entries(self) -> tuple[str, ...]:
        """The names of the optional entries that items have."""
        return tuple(name for name in _FOR_RELEVANCE if getattr(self.index, name) is not None)

    def __len__(self) -> int:
        return len(self.index)

    def annotations(self, position: int) -> dict[str, Any]:
        """The entries of the item of a row, but for its image or text."""
        targets = self.index.labels if self.index.levels is None else self.index.levels
        item = {"labels": torch.from_numpy(targets)[position], "ids": torch.tensor(position)}
        for name in self.entries:
            item[name] = torch.from_numpy(getattr(self.index, name))[position]
        return item
