"""The lists of Revisited Oxford and Paris: which images are easy, hard or junk for each query."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_retrieval.checks import short_repr


class Kind(IntEnum):
    """What an image is for a query. Images in no list are wrong results."""

    EASY = 0
    HARD = 1
    JUNK = 2
    NOT_LISTED = 3


# The kinds that are positives in each setup. All other listed images are removed from the query's list.
SETUPS = {"easy": (Kind.EASY,), "medium": (Kind.EASY, Kind.HARD), "hard": (Kind.HARD,)}


class ListedImages(NamedTuple):
    """The listed images of each query; rows are padded with `Kind.NOT_LISTED`.

    Attributes:
        kind: of each image. An image that the gallery does not have is `Kind.NOT_LISTED`.
        column: index of each image in the gallery; any index where `kind` is `Kind.NOT_LISTED`.
    """

    kind: Int[Tensor, "query listed"]
    column: Int[Tensor, "query listed"]


class QueryLists(NamedTuple):
    """The easy, hard and junk images of each query: three mappings from a query's id to a list of image ids."""

    easy: Mapping[int, Sequence[int]]
    hard: Mapping[int, Sequence[int]]
    junk: Mapping[int, Sequence[int]]

    def check(self, owner: str) -> None:
        """Raise an error unless all lists are of the same queries and hold each image at most once."""
        for name, lists in self._asdict().items():
            _check_mapping(owner, name, lists)
            different = lists.keys() ^ self.easy.keys()
            if different:
                raise ValueError(
                    f"{owner}: `{name}` must have the same queries as `easy`, got a difference at query "
                    f"{min(different)}."
                )
        for query in self.easy:
            images = self.images(query)
            repeated = [image for image in images if images.count(image) > 1]
            if repeated:
                raise ValueError(
                    f"{owner}: `easy`, `hard` and `junk` must list an image only once for a query, and not the query "
                    f"itself, got image {repeated[0]} twice for query {query}."
                )

    def check_queries(self, owner: str, queries: Sequence[int]) -> None:
        """Raise an error unless all queries have lists."""
        missing = [query for query in queries if query not in self.easy]
        if missing:
            raise ValueError(
                f"{owner}: `easy`, `hard` and `junk` must have lists for all queries, got none for {len(missing)} of "
                f"{len(queries)} queries, such as query {missing[0]}; `is_query` says which images are queries."
            )

    def images(self, query: int) -> list[int]:
        """The ids of the easy, hard and junk images, and of the query, which is junk in its own list."""
        return [*self.easy[query], *self.hard[query], *self.junk[query], query]

    def kinds(self, query: int) -> Int[Tensor, " listed"]:
        """The kind of each of `images`."""
        counts = torch.tensor([len(self.easy[query]), len(self.hard[query]), len(self.junk[query]) + 1])
        return torch.tensor([int(Kind.EASY), int(Kind.HARD), int(Kind.JUNK)]).repeat_interleave(counts)

    def positives(self, query: int, kinds: Sequence[Kind]) -> int:
        """The number of images of these kinds, easy or hard, whether the gallery has them or not."""
        total = 0
        if Kind.EASY in kinds:
            total += len(self.easy[query])
        if Kind.HARD in kinds:
            total += len(self.hard[query])
        return total

    def find(self, queries: Sequence[int], gallery_ids: Int[Tensor, " gallery"]) -> ListedImages:
        """Find the listed images of these queries in a gallery."""
        sorted_ids, order = gallery_ids.sort()
        kinds, columns = [], []
        for query in queries:
            ids = torch.tensor(self.images(query), device=gallery_ids.device)
            column = order[torch.searchsorted(sorted_ids, ids).clamp(max=len(sorted_ids) - 1)]
            in_gallery = gallery_ids[column] == ids
            kind = self.kinds(query).to(gallery_ids.device)
            kinds.append(kind.masked_fill(~in_gallery, int(Kind.NOT_LISTED)))
            columns.append(column)
        return ListedImages(
            pad_sequence(kinds, batch_first=True, padding_value=int(Kind.NOT_LISTED)),
            pad_sequence(columns, batch_first=True),
        )


def _check_mapping(owner: str, name: str, lists: Any) -> None:
    if not isinstance(lists, Mapping):
        raise TypeError(f"{owner}: `{name}` must map each query's id to ids of images, got {type(lists).__name__}.")
    for query, images in lists.items():
        if not isinstance(images, Sequence) or not _are_integers([query, *images]):
            raise TypeError(
                f"{owner}: `{name}` must map integers to lists of integers, got {short_repr(images)} for "
                f"{short_repr(query)}."
            )


def _are_integers(numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)
