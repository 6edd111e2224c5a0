"""Rules of relevance: which images are relevant to a query, and which images are in its list.

Losses and metrics share these rules, so that training and evaluation cannot disagree. A rule reads some integers of
each image, its columns, and is evaluated for a block of queries at a time. Losses and metrics that are given no rule
follow `SameLabel`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int, Integer, UInt8
from torch import Tensor

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.checks import as_int64, check_integers, short_repr
from lightning_retrieval.distributed import to_host
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned
from lightning_retrieval.ranking.labels import Role, check_nesting, check_roles, finest, has_role

NO_TAG = -1  # fills the rows of images that have fewer tags than others
_FEWEST_MULTI_HOT = 3  # with fewer columns, 0 and 1 may be the numbers of an image's tags
_TABLE_ELEMENTS = 1 << 25  # largest number of elements of the table of `SharedTags`, unless one query needs more


class Relevance(ABC):
    """Base class of the rules of relevance.

    A subclass implements `masks`. If it reads more than the labels, it names the entries of a batch that it reads in
    `reads`. A rule may take plain arguments, such as numbers, and keeps each in an attribute of the same name. It
    depends on nothing but the columns, so that it gives the same lists on each process.

    A rule need not exclude the query from its own list, because losses and metrics do this by the ids of the images.

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
    # Whether each entry is a single integer of each image. Otherwise an entry may have several columns.
    reads_single: ClassVar[bool] = False

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        reads: Any = cls.reads
        if isinstance(reads, str) or not (reads or cls.has_classes):
            rule = "must be a tuple of the names of entries, and not empty if `has_classes` is False"
            raise InvalidType(rule, cls.__name__, "reads", got=repr(reads))

    def __init__(self) -> None:
        """A rule without arguments; the constructor of `object` would accept any."""
        super().__init__()

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{self.name}({settings})"

    @owned
    def columns(self, labels: Int[Tensor, "row ..."], batch: Any) -> Int[Tensor, "row column"]:
        """What the rule reads of each image: its finest label, if the rule has classes, and the entries `reads`.

        Args:
            labels: the labels of a batch.
            batch: the batch, a dict whose entries have one row for each image. It may have any form if the rule reads
                no entry.

        Raises:
            ValueError: if the batch lacks an entry, or an entry has another number of rows than `labels`.
            TypeError: if labels or an entry are not integers, or the batch is not a dict.
        """
        rows = 0
        labels = as_int64("labels", labels, owner=self.name)
        if isinstance(labels, Tensor):
            rows = labels[..., None].shape[0]  # 1 of a scalar, which is not valid
        check_integers("labels", labels, rows, "labels", levels=True, owner=self.name)
        parts = []
        if self.has_classes:
            if labels.ndim == 2:
                check_nesting(to_host(labels))
            parts.append(finest(labels)[:, None].long())
        for name in self.reads:
            values = as_int64(name, self._entry(batch, name), owner=self.name)
            levels = not self.reads_single
            check_integers(name, values, rows, "labels", levels=levels, owner=self.name)
            parts.append(values.reshape(rows, -1).long())
        return torch.cat(parts, 1)

    def check_columns(self, name: str, columns: Tensor) -> None:
        """Raise unless `columns` has the form that the method `columns` returns.

        A subclass may also check the values. Losses and metrics call this once, not for each block.

        Args:
            name: the argument that the columns were given for.
            columns: integers, one row for each image.
        """
        names = list(self.reads)
        if self.has_classes:
            names.insert(0, "labels")
        wanted = str(len(names))
        if not self.reads_single:
            wanted += " or more"
        has_excess = self.reads_single and columns.shape[1:] > (len(names),)
        if columns.ndim != 2 or columns.shape[1] < len(names) or has_excess:
            raise InvalidValue(
                f"must be the columns that {self.name} reads, of shape (rows, {wanted}) for "
                f"{', '.join(names) or 'any entries'}",
                argument=name,
                got=tuple(columns.shape),
                cure=f"pass {self.name}.columns(labels, batch)",
            )

    def lists(
        self, queries: Int[Tensor, "query column"], references: Int[Tensor, "gallery column"]
    ) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"]]:
        """The relevant candidates of each query, and all its candidates, as new tensors: `masks`, checked.

        Args:
            queries: as for `masks`.
            references: as for `masks`.

        Raises:
            ValueError: if a mask has a wrong shape.
            TypeError: if `masks` does not return two masks of bool, of which the second may be None.
        """
        masks = self.masks(queries, references)
        self._check_masks(masks, (len(queries), len(references)))
        relevant, candidate = masks
        if candidate is None:
            return relevant.clone(), torch.ones_like(relevant)
        return relevant & candidate, candidate.clone()

    @abstractmethod
    def masks(
        self, queries: Int[Tensor, "query column"], references: Int[Tensor, "gallery column"]
    ) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"] | None]:
        """Which references are relevant to each query, and which are in its list; None if all of them are.

        Args:
            queries: the columns of a block of queries.
            references: the columns of the references.
        """

    def at_most(
        self, queries: Int[Tensor, "query column"], references: Int[Tensor, "gallery column"]
    ) -> Int[Tensor, " query"]:
        """For each query, an upper bound of the number of references that are relevant or not in its list.

        Metrics need less memory and fewer exchanges between processes if a rule knows a lower bound than all of them.

        Args:
            queries: as for `masks`.
            references: as for `masks`.
        """
        return torch.full((len(queries),), len(references), device=queries.device)

    @property
    def name(self) -> str:
        """The class name, the prefix of error messages."""
        return type(self).__name__

    def _entry(self, batch: Any, name: str) -> Any:
        if not isinstance(batch, Mapping):
            rule = f"must be a dict with the entry {name!r}"
            cure = "let the data set return a dict for each image"
            raise InvalidType(rule, self.name, "batch", got=type(batch).__name__, cure=cure)
        if name not in batch:
            rule = f"must have the entry {name!r}"
            cure = "let the data set return it for each image, or choose another rule of relevance"
            raise InvalidValue(rule, self.name, "batch", got=", ".join(map(repr, batch)) or "none", cure=cure)
        return batch[name]

    def _check_masks(self, masks: Any, shape: tuple[int, int]) -> None:
        """Raise unless these are two masks of bool and of this shape, or one and None."""
        rule = f"must return two bool tensors of shape {shape}, of which the second may be None"
        if not isinstance(masks, tuple) or len(masks) != 2:
            raise InvalidType(rule, self.name, "masks", got=short_repr(masks))
        relevant, candidate = masks
        given = [relevant]
        if candidate is not None:
            given.append(candidate)
        for mask in given:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise InvalidType(rule, self.name, "masks", got=short_repr(mask))
            if mask.shape != shape:
                raise InvalidValue(rule, self.name, "masks", got=f"the shape {tuple(mask.shape)}")


def shared_levels(
    queries: Int[Tensor, "*query level"], references: Int[Tensor, "*reference level"]
) -> Bool[Tensor, "..."] | UInt8[Tensor, "..."]:
    """The number of label levels that pairs of images share; a bool for labels of one level.

    All dimensions but the last are broadcast.
    """
    of_each_level = zip(queries.unbind(-1), references.unbind(-1))
    of_queries, of_references = next(of_each_level)
    shared = of_queries == of_references
    if queries.shape[-1] == 1:
        return shared
    level = shared.to(torch.uint8)
    for of_queries, of_references in of_each_level:
        level += of_queries == of_references
    return level


class LabelRule(Relevance):
    """Base of the rules by which relevant images share labels, so that sorting by label finds them.

    Labels may have several levels, finest first, each of which lies within one label of the next. The first mask then
    is the number of shared levels, instead of a bool.
    """

    @abstractmethod
    def labels(self, columns: Int[Tensor, "row column"]) -> Int[Tensor, "row level"]:
        """The columns that are label levels."""

    @abstractmethod
    def of_pairs(
        self, queries: Int[Tensor, "*query column"], references: Int[Tensor, "*reference column"]
    ) -> tuple[Integer[Tensor, "..."] | Bool[Tensor, "..."], Bool[Tensor, "..."] | None]:
        """`masks` of any pairs of images: all dimensions but the last are broadcast."""

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.of_pairs(queries[:, None], references)


class SameLabel(LabelRule):
    """Relevant are images of the same label; all images are in each list."""

    def labels(self, columns: Tensor) -> Tensor:
        return columns

    def of_pairs(self, queries: Tensor, references: Tensor) -> tuple[Tensor, None]:
        return shared_levels(queries, references), None


def label_rule_of(rule: Relevance) -> LabelRule | None:
    """The rule itself if relevant images share labels; None otherwise, since a subclass may define other masks."""
    if isinstance(rule, LabelRule) and type(rule) in (SameLabel, OtherCamera):
        return rule
    return None


class OtherCamera(LabelRule):
    """Relevant are images of the same class from other cameras; those from the same camera are not in the list.

    This is the rule by which Market-1501 and other data sets for re-identification are evaluated. An image of the
    query's class and camera, such as the next frame of a video, is neither a positive nor a negative.

    Reads the entry `cameras` of a batch: the camera or the sequence of each image.

    Source:
        Zheng et al., Scalable Person Re-identification: A Benchmark, ICCV 2015.

    Example:
        >>> import torch
        >>> from lightning_retrieval import OtherCamera
        >>> rule = OtherCamera()
        >>> columns = rule.columns(torch.tensor([7, 7, 7, 5]), {"cameras": torch.tensor([1, 1, 2, 1])})
        >>> relevant, candidate = rule.masks(columns[:1], columns)
        >>> relevant.tolist(), candidate.tolist()
        ([[False, False, True, False]], [[False, False, True, True]])
    """

    reads = ("cameras",)
    reads_single = True

    def labels(self, columns: Tensor) -> Tensor:
        return columns[:, :-1]

    def of_pairs(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        other_label = queries[..., 0] != references[..., 0]
        other_camera = queries[..., -1] != references[..., -1]
        candidate = other_label | other_camera
        return shared_levels(queries[..., :-1], references[..., :-1]) * candidate, candidate


class GalleryOnly(Relevance):
    """Only gallery images are candidates, and only queries have lists; relevant are images of the same class.

    Reads the entry `roles` of a batch: 1 query, 2 gallery, 3 both, 0 neither.

    Example:
        >>> import torch
        >>> from lightning_retrieval import GalleryOnly
        >>> rule = GalleryOnly()
        >>> columns = rule.columns(torch.tensor([7, 7, 7, 5]), {"roles": torch.tensor([1, 2, 1, 3])})
        >>> relevant, candidate = rule.masks(columns[:1], columns)
        >>> relevant.tolist(), candidate.tolist()
        ([[False, True, False, False]], [[False, True, False, True]])
    """

    reads = ("roles",)
    reads_single = True

    def check_columns(self, name: str, columns: Tensor) -> None:
        super().check_columns(name, columns)
        check_roles(columns[:, 1])

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        is_query, is_gallery = has_role(queries[:, 1], Role.QUERY), has_role(references[:, 1], Role.GALLERY)
        candidate = is_query[:, None] & is_gallery
        return (queries[:, None, 0] == references[:, 0]) & candidate, candidate


class SharedTags(Relevance):
    """Relevant are images that share at least some number of tags with the query.

    Reads the entry `tags` of a batch: (batch, T) integers >= 0, in any order; -1 fills rows with fewer than T tags.
    A tag that occurs twice in a row counts once. T must be the same in all batches of a memory or of an evaluation.
    Multi-hot labels are accepted as they are: (batch, T) of bool, or 0 and 1 for at least three tags.

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

    def __init__(self, at_least: PositiveInt = 1) -> None:
        self.at_least = checked(self, at_least=at_least)

    def columns(self, labels: Int[Tensor, "row ..."], batch: Any) -> Int[Tensor, "row tag"]:
        tags = self._entry(batch, "tags")
        if isinstance(tags, Tensor) and tags.dtype == torch.bool and tags.ndim == 2:
            batch = {"tags": tags_of_multi_hot(tags)}
        return super().columns(labels, batch)

    def check_columns(self, name: str, columns: Tensor) -> None:
        super().check_columns(name, columns)
        if bool((columns.long() < NO_TAG).any()):  # uint8 has no NO_TAG
            rule = f"must be tags >= 0, or {NO_TAG} in rows with fewer tags"
            raise InvalidValue(rule, argument=name, got=int(columns.min()))

    def masks(self, queries: Tensor, references: Tensor) -> tuple[Tensor, None]:
        if is_multi_hot(queries, references):
            return queries.float() @ references.float().T >= self.at_least, None
        shared = torch.zeros(len(queries), len(references), dtype=torch.int16, device=queries.device)
        rows = max(1, _TABLE_ELEMENTS // max(1, queries.shape[1] * len(references)))
        for begin in range(0, len(queries), rows):
            part = slice(begin, begin + rows)
            tags, position = without_repeated(queries[part]).unique(return_inverse=True)
            has_tag, shared_of_part = _has_tag(tags, references), shared[part]
            for of_queries in position.unbind(1):
                shared_of_part += has_tag.index_select(0, of_queries)
        return shared >= min(self.at_least, queries.shape[1] + 1), None

    def at_most(self, queries: Tensor, references: Tensor) -> Tensor:
        if type(self) is not SharedTags:  # whose masks may be others
            return super().at_most(queries, references)
        if is_multi_hot(queries, references):
            queries, references = tags_of_multi_hot(queries), tags_of_multi_hot(references)
        tags, numbers = references[references != NO_TAG].unique(return_counts=True)
        if len(tags) == 0:
            return queries.new_zeros(len(queries))
        found = torch.searchsorted(tags, queries.contiguous()).clamp(max=len(tags) - 1)
        bound: Tensor = (numbers[found] * (tags[found] == queries)).sum(1)
        return bound


def is_multi_hot(*tables: Int[Tensor, "_ tag"]) -> bool:
    """Whether all these tables hold 0 and 1 for each of at least three tags, instead of the numbers of tags."""
    for rows in tables:
        if rows.shape[1] < _FEWEST_MULTI_HOT or bool(((rows != 0) & (rows != 1)).any()):
            return False
    return True


def tags_of_multi_hot(rows: Integer[Tensor, "row tag"] | Bool[Tensor, "row tag"]) -> Int[Tensor, "row tag"]:
    """The numbers of the tags of multi-hot rows; `NO_TAG` for the tags that a row does not have."""
    numbers = torch.arange(rows.shape[1], device=rows.device)
    return numbers.where(rows.bool(), NO_TAG)


def without_repeated(rows: Int[Tensor, "row tag"]) -> Int[Tensor, "row tag"]:
    """The tags of each row in ascending order; a tag that occurs again in its row is replaced by `NO_TAG`."""
    ordered = rows.sort(1).values
    ordered[:, 1:].masked_fill_(ordered[:, 1:] == ordered[:, :-1], NO_TAG)
    return ordered


def _has_tag(tags: Int[Tensor, " n"], rows: Int[Tensor, "row tag"]) -> UInt8[Tensor, "m row"]:
    """1 where a row has a tag, else 0, for each of these tags, in ascending order; 0 for `NO_TAG`.

    The result has one line more than there are tags. The last line collects all other tags of the rows.
    """
    position = torch.searchsorted(tags, rows.contiguous()).clamp(max=len(tags) - 1)
    is_found = (tags[position] == rows) & (rows != NO_TAG)
    position = position.where(is_found, len(tags))
    table = torch.zeros(len(tags) + 1, len(rows), dtype=torch.uint8, device=rows.device)
    return table.scatter_(0, position.T, 1)


def rule_of_evaluation(relevance: Relevance | None) -> Relevance | None:
    """The rule by which metrics evaluate a module with this rule, or None if they need none.

    Metrics need no rule for `OtherCamera` and `GalleryOnly`, since they get the cameras and the roles of all images.
    """
    if type(relevance) in (OtherCamera, GalleryOnly):
        return None
    return relevance
