"""Rules of relevance: which images are relevant to a query, and which images are in its list.

Losses and metrics share these rules, so that training and evaluation cannot disagree. A rule reads some integers of
each image, its columns, and is evaluated for a block of queries at a time. Without a rule, images with the same label
are relevant, and all other images are candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from lightning_retrieval.checks import check_integer, check_integers
from lightning_retrieval.ranking.labels import Role, check_roles, has_role

NO_TAG = -1  # fills the rows of images that have fewer tags than others
_TAGS_OF_A_PRODUCT = 1024


class Relevance(ABC):
    """Base class of the rules of relevance.

    A subclass implements `masks`. If it reads more than the labels, it names the entries of a batch that it reads in
    `reads`. A rule may take plain arguments, such as numbers, and keeps each in an attribute of the same name.

    A rule never excludes the query from its own list, because losses and metrics do this by the ids of the images.

    Example:
        >>> import torch
        >>> from lightning_retrieval import Relevance, SmoothAPLoss
        >>> class NearInTime(Relevance):
        ...     reads = ("times",)
        ...     def masks(self, queries, references):
        ...         label, time = queries[:, None].unbind(2)
        ...         ref_label, ref_time = references.unbind(1)
        ...         return (label == ref_label) & ((time - ref_time).abs() < 100), None
        >>> labels, times = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 50, 500, 50])
        >>> columns = NearInTime().columns(labels, {"times": times})
        >>> SmoothAPLoss()(torch.eye(4), columns, relevance=NearInTime()).shape
        torch.Size([])
    """

    # Names of the entries of a batch that the rule reads, in the order of the columns; `"labels"` is always the first
    # column of a rule that has classes.
    reads: ClassVar[tuple[str, ...]] = ()
    # Whether the first column is the class of an image, and relevant images are of the same class.
    has_classes: ClassVar[bool] = True

    def columns(self, labels: Int[Tensor, "row ..."], entries: Mapping[str, Tensor]) -> Int[Tensor, "row column"]:
        """What the rule reads of each image: its finest label, if the rule has classes, and the entries `reads`.

        Args:
            labels: the labels of a batch.
            entries: all entries of a batch by name; each has one row for each image.

        Raises:
            ValueError: if the batch lacks an entry.
            TypeError: if an entry does not hold integers.
        """
        parts = []
        if self.has_classes:
            parts.append(labels.reshape(len(labels), -1)[:, :1].long())
        for name in self.reads:
            values = entries.get(name)
            if values is None:
                raise ValueError(
                    f"{self.name}: a batch must have the entry {name!r}, got {', '.join(map(repr, entries)) or 'none'};"
                    " let the data set return it for each image, or choose another rule of relevance."
                )
            check_integers(self.name, name, values, len(labels), "labels", device=labels.device, levels=True)
            parts.append(values.reshape(len(labels), -1).long())
        return torch.cat(parts, 1)

    @abstractmethod
    def masks(
        self, queries: Int[Tensor, "query column"], references: Int[Tensor, "gallery column"]
    ) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"] | None]:
        """Which references are relevant to each query, and which are in its list; None if all of them are.

        Args:
            queries: the columns of a block of queries.
            references: the columns of the references.
        """

    @property
    def name(self) -> str:
        """The class name, the prefix of error messages."""
        return type(self).__name__


class OtherCamera(Relevance):
    """Relevant are images of the same class from other cameras; those from the same camera are not in the list.

    This is the rule by which Market-1501 and other data sets for re-identification are evaluated. An image of the
    query's class and camera, such as the next frame of a video, is neither a positive nor a negative.

    Reads the entry `cameras` of a batch: the camera or the sequence of each image.

    Source:
        Zheng et al., Scalable Person Re-identification: A Benchmark, ICCV 2015.
    """

    reads = ("cameras",)

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        relevant = queries[:, None, 0] == references[:, 0]
        same_camera = queries[:, None, 1] == references[:, 1]
        candidate = ~(relevant & same_camera)
        return relevant & candidate, candidate


class GalleryOnly(Relevance):
    """Only gallery images are candidates, and only queries have lists; relevant are images of the same class.

    Reads the entry `roles` of a batch: 1 query, 2 gallery, 3 both, 0 neither.
    """

    reads = ("roles",)

    def columns(self, labels: Int[Tensor, "row ..."], entries: Mapping[str, Tensor]) -> Int[Tensor, "row column"]:
        columns = super().columns(labels, entries)
        check_roles(self.name, columns[:, 1])
        return columns

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        is_query, is_gallery = has_role(queries[:, 1], Role.QUERY), has_role(references[:, 1], Role.GALLERY)
        candidate = is_query[:, None] & is_gallery
        return (queries[:, None, 0] == references[:, 0]) & candidate, candidate


class SharedTags(Relevance):
    """Relevant are images that share at least some number of tags with the query.

    Reads the entry `tags` of a batch: (batch, T) integers >= 0, in any order; -1 fills rows with fewer than T tags.
    A tag that occurs twice in a row counts once.

    Args:
        at_least: number of tags that relevant images share, >= 1.

    Example:
        >>> import torch
        >>> from lightning_retrieval import SharedTags
        >>> tags = torch.tensor([[7, 2], [2, -1], [7, 2], [5, -1]])
        >>> SharedTags().masks(tags, tags)[0].int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 0],
                [1, 1, 1, 0],
                [0, 0, 0, 1]], dtype=torch.int32)
    """

    reads = ("tags",)
    has_classes = False

    def __init__(self, at_least: int = 1) -> None:
        self.at_least = check_integer(self.name, "at_least", at_least, least=1)

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, None]:
        shared = torch.zeros(len(queries), len(references), device=queries.device)
        tags = queries.unique()
        for part in tags[tags != NO_TAG].split(_TAGS_OF_A_PRODUCT):
            shared += _has_tag(queries, part) @ _has_tag(references, part).T
        return shared >= self.at_least, None


def _has_tag(rows: Integer[Tensor, "row tag"], tags: Int[Tensor, " n"]) -> Tensor:
    """Whether each row has each of these tags, which are in ascending order, as a matrix of 0 and 1."""
    position = torch.searchsorted(tags, rows.contiguous()).clamp(max=len(tags) - 1)
    found = (tags[position] == rows).float()
    return torch.zeros(len(rows), len(tags), device=rows.device).scatter_reduce_(1, position, found, "amax")
