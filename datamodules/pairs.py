"""Queries and candidates from two data modules, such as texts and images, or street and shop photos.

`PairSet` joins the data sets of both sides: all queries, then all candidates. Each side numbers its classes by itself,
so the labels are renumbered by the names of the classes: equal labels then mean the same class on both sides.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from lightning_retrieval.arguments import PositiveInt, Seed, checked
from lightning_retrieval.datamodules.base import (
    RetrievalDataModule,
    RetrievalSettings,
    all_arguments,
    check_no_unknown_arguments,
)
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.item_seeds import SeededIndex
from lightning_retrieval.datamodules.loader import collate_images
from lightning_retrieval.datamodules.samplers.pairs import PairSampler
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.models.sides import SIDES, Side
from lightning_retrieval.ranking.relevance import NO_TAG

# Arguments of the data modules of the sides that have no effect, because `Pairs` makes batches and loaders.
WITHOUT_EFFECT = RetrievalSettings.__annotations__.keys() - {"seed"}
DISTRACTORS: dict[Side, int] = {"queries": -1, "candidates": -2}  # labels of rows without a class
NO_TAGS: dict[Side, int] = dict.fromkeys(SIDES, NO_TAG)


def shared_numbers(
    what: str, attribute: str, datasets: Mapping[Side, Any], last: Mapping[Side, int]
) -> dict[Side, Tensor]:
    """Number the classes or the tags of both sides by their names.

    Args:
        what: what has the names, for error messages.
        attribute: attribute of a data set with the names, in the order of the data set's own numbers 0, 1, ...
        datasets: the data set of each side.
        last: a number that is appended for each side, which the data set's own number -1 selects.

    Returns:
        For each side, the new number of each of its own numbers. Empty if neither side has names: numbers are then used
            as they are.

    Raises:
        ValueError: if only one side has names.
    """
    number_of_name: dict[str, int] = {}
    numbers: dict[Side, Tensor] = {}
    for side, dataset in datasets.items():
        names = getattr(dataset, attribute, None)
        if names is None:
            continue
        of_side = [number_of_name.setdefault(name, len(number_of_name)) for name in names]
        numbers[side] = torch.tensor([*of_side, last[side]])
    if len(numbers) == 1:
        rule = f"the {what} must have names on both sides, by which they are matched, or on none"
        got = f"names of the {next(iter(numbers))} only"
        raise InvalidValue(rule, "Pairs", got=got, cure="give both sides names, or both the same numbers")
    return numbers


@dataclass(frozen=True)
class MatchedSet:
    """The data set of one side of a `PairSet`, whose classes and tags are numbered as on the other side.

    Args:
        dataset: a map-style data set of dicts.
        classes: the new number of each class, and at the end that of distractors; None if numbers stay as they are.
        tags: the new number of each tag, and at the end `NO_TAG`; None if numbers stay as they are.
        tags_of_item: least number of columns of `tags`.
        entries_of_other: names of the optional entries of items on the other side.
    """

    dataset: Any
    classes: Tensor | None = None
    tags: Tensor | None = None
    tags_of_item: int = 0
    entries_of_other: Sequence[str] = ()

    @property
    def labels(self) -> Int[Tensor, " item"]:
        """The label of each item."""
        return self._relabelled(torch.as_tensor(self.dataset.labels), ndim=1)

    def items(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The items with these indices, with the labels and tags of both sides."""
        if len(indices) == 0:
            return
        if hasattr(self.dataset, "__getitems__"):
            found = self.dataset.__getitems__(list(indices))
        else:
            found = map(self.dataset.__getitem__, indices)
        yield from map(self._matched, found)

    def collate(self, items: list[dict[str, Any]]) -> Any:
        """Make a batch of items, as the data set of the side does."""
        collate = getattr(self.dataset, "collate", collate_images)
        return collate(items)

    def _matched(self, item: dict[str, Any]) -> dict[str, Any]:
        """The item in the form of both sides. Items of skipped training images have no labels."""
        matched = dict(item)
        if "labels" in item:
            matched["labels"] = self._relabelled(torch.as_tensor(item["labels"]), ndim=0)
        if "tags" in item:
            matched["tags"] = self._retagged(item["tags"])
        if "cameras" in getattr(self.dataset, "entries", ()) and "cameras" not in self.entries_of_other:
            matched.pop("cameras", None)
        if "instances" in self.entries_of_other and "ids" in item:
            matched.setdefault("instances", item["ids"])
        return matched

    def _relabelled(self, labels: Tensor, ndim: int) -> Tensor:
        """The labels of both sides. Classes of coarser levels have no names by which they could be matched."""
        if self.classes is None:
            return labels
        if labels.ndim != ndim:
            rule = "classes that are matched by name must have one level"
            raise InvalidValue(rule, "Pairs", got=f"{labels.shape[-1]} levels", cure="leave out `levels`")
        return self.classes[labels]  # the label -1 of distractors is the last

    def _retagged(self, tags: Tensor) -> Tensor:
        if self.tags is not None:
            tags = self.tags[tags]
        return pad(tags, (0, max(0, self.tags_of_item - tags.shape[-1])), value=NO_TAG)


class PairSet(Dataset[tuple[Side, dict[str, Any]]]):
    """The data sets of both sides as one: all queries, then all candidates.

    `collate` makes batches `{"queries": batch, "candidates": batch}`; a side without rows is missing. The classes of
    both sides are matched by name if the data sets have `class_names`, as an `ImageSet` has; else labels are used as
    they are. Tags are matched by `tag_names` in the same way. A class may be on one side only.

    Args:
        queries: a map-style data set of dicts with `images`, `labels` and `ids`.
        candidates: the same for the candidates.

    Raises:
        ValueError: if only one side has names of classes or of tags.

    Example:
        >>> import torch
        >>> from lightning_retrieval.datamodules import ImageIndex, ImageSet
        >>> from lightning_retrieval.datamodules.pairs import PairSet
        >>> sketches = ImageSet(ImageIndex(["a.png", "b.png"], [0, 1], names=["cat", "dog"]), ".", torch.as_tensor)
        >>> photos = ImageSet(ImageIndex(["c.jpg", "d.jpg"], [0, 1], names=["dog", "owl"]), ".", torch.as_tensor)
        >>> PairSet(sketches, photos).labels
        tensor([0, 1, 1, 2])
    """

    two_sided: ClassVar[bool] = True  # `RetrievalEvaluation` then also ranks the queries for each candidate

    def __init__(self, queries: Any, candidates: Any) -> None:
        self.sides = matched_sets({"queries": queries, "candidates": candidates})

    @property
    def num_queries(self) -> int:
        """Number of queries, which is the index of the first candidate."""
        return len(self.sides["queries"].dataset)

    @property
    def labels(self) -> Int[Tensor, " item"]:
        """The class of each item, queries first."""
        return torch.cat([self.sides["queries"].labels, self.sides["candidates"].labels])

    def __len__(self) -> int:
        return self.num_queries + len(self.sides["candidates"].dataset)

    def __getitem__(self, index: int) -> tuple[Side, dict[str, Any]]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Side, dict[str, Any]]]:
        """The items of a batch, each with its side: the queries, then the candidates. Data loaders call this method."""
        of_side: dict[Side, list[int]] = {"queries": [], "candidates": []}
        for index in indices:
            position = range(len(self))[index]
            if position < self.num_queries:
                of_side["queries"].append(_moved(index, position))
            else:
                of_side["candidates"].append(_moved(index, position - self.num_queries))
        items = []
        for side, own_indices in of_side.items():
            for item in self.sides[side].items(own_indices):
                items.append((side, item))
        return items

    def collate(self, items: Sequence[tuple[Side, dict[str, Any]]]) -> dict[Side, Any]:
        """Make the batch of each side that has items."""
        of_side: dict[Side, list[dict[str, Any]]] = {}
        for side, item in items:
            of_side.setdefault(side, []).append(item)
        return {side: self.sides[side].collate(own_items) for side, own_items in of_side.items()}

    def map_sides(self, change: Callable[[Side, Any], Any]) -> "PairSet":
        """The same set with another form of the data sets, such as images in uint8.

        Args:
            change: maps a side and its data set to a data set of the same items.
        """
        other = copy.copy(self)
        other.sides = {side: replace(found, dataset=change(side, found.dataset)) for side, found in self.sides.items()}
        return other


def _moved(index: int, position: int) -> int:
    """A position with the random seed of an index, if it has one."""
    if isinstance(index, SeededIndex):
        return SeededIndex(position, index.seed)
    return position


def matched_sets(datasets: Mapping[Side, Any]) -> dict[Side, MatchedSet]:
    """Both sides of a `PairSet`, with common numbers of classes and tags.

    Cameras count only if both sides have them. If only one side has instances, such as videos, each item of the other
    is an instance.

    Args:
        datasets: the data set of each side.
    """
    classes = shared_numbers("classes", "class_names", datasets, DISTRACTORS)
    tags = shared_numbers("tags", "tag_names", datasets, NO_TAGS)
    tags_of_item = 0
    for dataset in datasets.values():
        if getattr(dataset, "tags", None) is not None:
            tags_of_item = max(tags_of_item, dataset.tags.shape[1])
    matched: dict[Side, MatchedSet] = {}
    for side, other in zip(SIDES, reversed(SIDES)):
        of_other = getattr(datasets[other], "entries", ())
        matched[side] = MatchedSet(datasets[side], classes.get(side), tags.get(side), tags_of_item, of_other)
    return matched


def used_names(part: Any) -> set[str]:
    """The names of the classes that have items in a data set or in a split; empty if classes have no names."""
    names = getattr(part, "class_names", None) or getattr(part, "names", None)
    if names is None:
        return set()
    labels = torch.as_tensor(part.labels)
    return set(map(names.__getitem__, labels[labels >= 0].unique().tolist()))


class Pairs(RetrievalDataModule):
    """Queries and candidates from two data modules, for training and evaluating two sides.

    A training batch holds P classes with queries and candidates of each, drawn by `PairSampler`. In evaluation, each
    query of the queries' validation or test set is ranked against the candidates' set, and `RetrievalEvaluation` also
    ranks the queries for each candidate. If there are several evaluation sets, both sides must have the same names of
    sets; a side with a single set is paired with each set of the other.

    Classes are the same if they have the same name, or the same number if neither side has names. Classes on one side
    only are skipped in training. In evaluation they stay: their candidates are distractors, and their queries are
    skipped and counted. Roles that a data set gives its images, such as query or gallery, do not count.

    Each data module transforms, collates and normalises the images of its side, with the preparation for the network
    of its side.

    Args:
        queries: the data module of the queries. Its arguments `classes_per_batch`, `samples_per_class`,
            `eval_batch_size`, `num_workers`, `sampler`, `pin_memory` and `persistent_workers` have no effect, with a
            warning; give them here.
        candidates: the data module of the candidates, another object. The same arguments have no effect.
        classes_per_batch: P, the number of classes in a global batch.
        queries_per_class: number of queries of each class in a batch, >= 1.
        samples_per_class: number of candidates of each class in a batch, >= 1.
        eval_batch_size: number of queries or candidates that are embedded at a time in evaluation, >= 1.
        num_workers: number of processes that load both sides, >= 0.
        seed: determines the batches and the augmentation, together with the epoch. None means the seed of
            `seed_everything`, or 0 if `seed_everything` was not called.
        pin_memory: as in `RetrievalDataModule`.
        persistent_workers: as in `RetrievalDataModule`.

    Raises:
        ValueError: if a number is out of its range, or `queries` and `candidates` are the same object; later, if a
            class is in training on one side and in evaluation on the other, only one side has names of classes, or the
            evaluation sets have different names.
        TypeError: if a number is not an integer, or a side is not a `RetrievalDataModule` or is a `Pairs` itself.

    Example:
        >>> from lightning_retrieval.datamodules import Glyphs, Pairs
        >>> data = Pairs(Glyphs(augment=False), Glyphs(), classes_per_batch=8, queries_per_class=1, samples_per_class=3)
        >>> data.prepare_data()
        >>> batch = next(iter(data.train_dataloader()))
        >>> batch["queries"]["labels"].shape, batch["candidates"]["labels"].shape
        (torch.Size([8]), torch.Size([24]))

    Relations:
        With `TwoNetworks`, `RetrievalModule` embeds queries and candidates by a network for each.
    """

    def __init__(
        self,
        queries: RetrievalDataModule,
        candidates: RetrievalDataModule,
        *,
        classes_per_batch: int = 32,
        queries_per_class: PositiveInt = 1,
        samples_per_class: PositiveInt = 1,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        seed: Seed | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        **unknown: Any,
    ) -> None:
        check_no_unknown_arguments(type(self), unknown)
        super().__init__(
            classes_per_batch=classes_per_batch,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
        )
        self.queries_per_class = checked(self, queries_per_class=queries_per_class)
        self.samples_per_class = checked(self, samples_per_class=samples_per_class)
        if queries is candidates:
            rule = "`queries` and `candidates` must be two data modules"
            raise InvalidValue(rule, "Pairs", got=f"one {type(queries).__name__} for both", cure="create it twice")
        self.queries = _check_side("queries", queries)
        self.candidates = _check_side("candidates", candidates)

    @property
    def modules(self) -> dict[Side, RetrievalDataModule]:
        """The data module of each side."""
        return {"queries": self.queries, "candidates": self.candidates}

    @property
    def serialised_preparation(self) -> dict[str, Any] | None:
        """The evaluation transform of candidates as plain data; None if they have none."""
        return getattr(self.candidates, "serialised_preparation", None)

    @property
    def serialised_query_preparation(self) -> dict[str, Any] | None:
        """The evaluation transform of queries as plain data; None if they have none."""
        return getattr(self.queries, "serialised_preparation", None)

    def prepare_data(self) -> None:
        """Prepare the data of both sides."""
        self._share_trainer()
        for data in self.modules.values():
            data.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up both sides, and check that no class is in training on one side and in evaluation on the other."""
        self._share_trainer()
        for data in self.modules.values():
            data.setup(stage)
        if stage == "fit":
            self.train_set  # noqa: B018

    def teardown(self, stage: str) -> None:
        """Tear down both sides."""
        for data in self.modules.values():
            data.teardown(stage)

    @cached_property
    def train_set(self) -> PairSet:
        """The training sets of both sides."""
        for side, other in zip(SIDES, reversed(SIDES)):
            _check_same_split(side, self.modules[side], other, self.modules[other])
        return PairSet(self.queries.train_set, self.candidates.train_set)

    @cached_property
    def val_set(self) -> PairSet | dict[str, PairSet]:
        """The validation sets of both sides."""
        return _paired("val_set", self.queries.val_set, self.candidates.val_set)

    @cached_property
    def test_set(self) -> PairSet | dict[str, PairSet]:
        """The test sets of both sides."""
        return _paired("test_set", self.queries.test_set, self.candidates.test_set)

    def train_sampler(self) -> PairSampler:
        """Return the sampler of the training batches."""
        sides = self.train_set.sides
        for side, found in sides.items():
            _check_has_classes(side, found.dataset)
        return PairSampler(
            sides["queries"].labels,
            sides["candidates"].labels,
            classes_per_batch=self.classes_per_batch,
            queries_per_class=self.queries_per_class,
            samples_per_class=self.samples_per_class,
            seed=self.seed,
        )

    def val_dataloader(self) -> Any:
        """A loader of the validation set in order; no loader if a side has none."""
        if [] in (self.queries.val_dataloader(), self.candidates.val_dataloader()):
            return []
        return super().val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch of each side to the device with the hook of its data module."""
        moved = {}
        for side, part in batch.items():
            moved[side] = self.modules[side].transfer_batch_to_device(part, device, dataloader_idx)
        return moved

    def check(self) -> DataReport:
        """Check the data of both sides; the names of splits and the sentences begin with the side."""
        report = DataReport()
        for side, data in self.modules.items():
            report.add(side, data.check())
        return report

    def _share_trainer(self) -> None:
        for data in self.modules.values():
            data.trainer = self.trainer

    def _follow_module(self) -> None:
        for data in self.modules.values():
            data._follow_module()

    def _set_of_loader(self, dataset: PairSet) -> PairSet:
        return dataset.map_sides(lambda side, of_side: self.modules[side]._set_of_loader(of_side))

    def _training_images(self) -> dict[str, Any]:
        queries, candidates = self.queries._training_images(), self.candidates._training_images()
        count = queries["count"] + candidates["count"]
        return {"count": count, "queries": queries, "candidates": candidates}


def _check_side(side: Side, data: Any) -> RetrievalDataModule:
    """Check and mark the data module of a side, and warn of its arguments that have no effect."""
    if not isinstance(data, RetrievalDataModule) or isinstance(data, Pairs):
        rule = "must be a data module of one side, such as ImageFolder"
        raise InvalidType(rule, "Pairs", side, got=type(data).__name__)
    ignored = []
    for name, argument in all_arguments(type(data)).items():
        if name in WITHOUT_EFFECT and getattr(data, name) != argument.default:
            ignored.append(f"`{name}`")
    if ignored:
        warnings.warn(
            f"Pairs: {', '.join(ignored)} of the data module of `{side}` have no effect; give them to Pairs.",
            stacklevel=3,
        )
    data.side = side
    return data


def _check_has_classes(side: Side, dataset: Any) -> None:
    """Raise if a training set has only tags, so that its labels are the numbers of its rows."""
    has_tags = getattr(dataset, "tags", None) is not None
    if has_tags and getattr(dataset, "class_names", ()) is None:
        rule = "training batches are drawn by class"
        got = f"{side} with tags and without classes"
        raise InvalidValue(rule, "Pairs", got=got, cure="add a column `label` to the table")


def _check_same_split(side: Side, data: RetrievalDataModule, other: Side, other_data: RetrievalDataModule) -> None:
    """Raise if a class that is in training on one side is only in evaluation on the other."""
    if getattr(data, "shared_classes", False) or getattr(other_data, "shared_classes", False):
        return
    of_other = set[str]().union(*map(used_names, getattr(other_data, "splits", {}).values()))
    evaluated = of_other - used_names(other_data.train_set)
    wrong = sorted(used_names(data.train_set) & evaluated)
    if wrong:
        rule = "a class must be in training on both sides or in evaluation on both"
        got = f"{len(wrong)} in training of the {side} and in evaluation of the {other}, such as {wrong[0]!r}"
        cure = "give both data sets a column `split`, or folders for each split"
        raise InvalidValue(rule, "Pairs", got=got, cure=cure)


def _paired(name: str, queries: Any, candidates: Any) -> PairSet | dict[str, PairSet]:
    """Pair the evaluation sets of both sides.

    Args:
        name: name of the attribute, for error messages.
        queries: a data set, or several by name.
        candidates: the same for the candidates.
    """
    if not isinstance(queries, Mapping) and not isinstance(candidates, Mapping):
        return PairSet(queries, candidates)
    if not isinstance(queries, Mapping):
        queries = dict.fromkeys(candidates, queries)
    if not isinstance(candidates, Mapping):
        candidates = dict.fromkeys(queries, candidates)
    if queries.keys() != candidates.keys():
        got = f"`{name}` with {', '.join(queries)} of the queries and {', '.join(candidates)} of the candidates"
        raise InvalidValue("the evaluation sets of both sides must have the same names", "Pairs", got=got)
    return {name_of_set: PairSet(queries[name_of_set], candidates[name_of_set]) for name_of_set in queries}
