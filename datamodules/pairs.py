"""Queries and candidates from two data modules, such as texts and images, or street and shop photos.

`PairSet` joins the data sets of both sides: all queries, then all candidates. Each side numbers its classes by itself,
so the labels are renumbered by the names of the classes: equal labels then mean the same class on both sides.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.base import RetrievalDataModule, all_arguments, check_no_unknown_arguments
from lightning_retrieval.datamodules.image_check import DataReport
from lightning_retrieval.datamodules.item_seeds import SeededIndex
from lightning_retrieval.datamodules.loader import collate_images
from lightning_retrieval.datamodules.samplers.pairs import PairSampler
from lightning_retrieval.ranking.relevance import NO_TAG
from lightning_retrieval.training.sides import SIDES, Side

# Arguments of the data modules of the sides that have no effect, because `Pairs` makes batches and loaders.
WITHOUT_EFFECT = (
    "classes_per_batch",
    "samples_per_class",
    "eval_batch_size",
    "num_workers",
    "sampler",
    "pin_memory",
    "persistent_workers",
)
DISTRACTORS = {"queries": -1, "candidates": -2}  # labels of rows without a class, different on both sides


def shared_numbers(owner: str, what: str, names: Mapping[Side, Sequence[str] | None]) -> dict[Side, Tensor | None]:
    """Number classes or tags of both sides by their names.

    Args:
        owner: prefix of error messages.
        what: what has the names, for error messages.
        names: the names on each side, in the order of the side's own numbers; None if it has only numbers.

    Returns:
        For each side, the new number of each of its own numbers; None if both sides have only numbers, which are then
            used as they are.

    Raises:
        ValueError: if only one side has names.
    """
    named = [side for side in SIDES if names[side] is not None]
    if not named:
        return dict.fromkeys(SIDES)
    if len(named) == 1:
        raise ValueError(
            f"{owner}: the {what} of both sides must have names, by which they are matched, or of none, got names of "
            f"the {named[0]} only; give both sides names or both the same numbers."
        )
    number_of_name: dict[str, int] = {}
    numbers: dict[Side, Tensor | None] = {}
    for side in SIDES:
        of_side = [number_of_name.setdefault(name, len(number_of_name)) for name in names[side] or ()]
        numbers[side] = torch.tensor(of_side, dtype=torch.int64)
    return numbers


@dataclass(frozen=True)
class MatchedSet:
    """The data set of one side of a `PairSet`, whose classes and tags are numbered as on the other side.

    Args:
        dataset: a map-style data set of dicts.
        classes: the new number of each class, and at the end that of distractors; None if numbers stay as they are.
        tags: the new number of each tag, and at the end `NO_TAG`; None if numbers stay as they are.
        tags_of_item: least number of columns of `tags`.
        dropped: entries that are removed because the other side does not have them.
        own_instances: whether each item without `instances` is an instance, because the other side has instances.
    """

    dataset: Any
    classes: Tensor | None = None
    tags: Tensor | None = None
    tags_of_item: int = 0
    dropped: tuple[str, ...] = ()
    own_instances: bool = False

    @property
    def labels(self) -> Int[Tensor, " item"]:
        """The label of each item."""
        return self._relabelled(torch.as_tensor(self.dataset.labels))

    def items(self, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The items with these indices, with the labels and tags of both sides."""
        if hasattr(self.dataset, "__getitems__"):
            found = self.dataset.__getitems__(list(indices))
        else:
            found = [self.dataset[index] for index in indices]
        for item in found:
            yield self._matched(item)

    def collate(self, items: list[dict[str, Any]]) -> Any:
        """Make a batch of items, as the data set of the side does."""
        collate = getattr(self.dataset, "collate", collate_images)
        return collate(items)

    def _matched(self, item: dict[str, Any]) -> dict[str, Any]:
        matched = {name: value for name, value in item.items() if name not in self.dropped}
        if "labels" in item:  # not in the items of skipped training images
            matched["labels"] = self._relabelled(torch.as_tensor(item["labels"]))
        if "tags" in item:
            matched["tags"] = self._retagged(item["tags"])
        if self.own_instances and "ids" in item:
            matched["instances"] = item["ids"]
        return matched

    def _relabelled(self, labels: Tensor) -> Tensor:
        if self.classes is None:
            return labels
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
        return torch.cat([side.labels for side in self.sides.values()])

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
                of_side["queries"].append(index)
            else:
                of_side["candidates"].append(_moved(index, position - self.num_queries))
        items = []
        for side, own_indices in of_side.items():
            if own_indices:
                items += [(side, item) for item in self.sides[side].items(own_indices)]
        return items

    def collate(self, items: Sequence[tuple[Side, dict[str, Any]]]) -> dict[Side, Any]:
        """Make the batch of each side that has items."""
        batch: dict[Side, Any] = {}
        for side in SIDES:
            of_side = [item for item_side, item in items if item_side == side]
            if of_side:
                batch[side] = self.sides[side].collate(of_side)
        return batch

    def with_datasets(self, datasets: Mapping[Side, Any]) -> "PairSet":
        """The same set with other data sets of the same items, such as images in uint8."""
        other = PairSet.__new__(PairSet)
        other.sides = {side: replace(found, dataset=datasets[side]) for side, found in self.sides.items()}
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
    classes = _numbers("classes", "class_names", datasets)
    tags = _numbers("tags", "tag_names", datasets)
    entries = {side: getattr(datasets[side], "entries", None) for side in SIDES}
    widths = [datasets[side].tags.shape[1] for side in SIDES if getattr(datasets[side], "tags", None) is not None]
    matched: dict[Side, MatchedSet] = {}
    for side, other in zip(SIDES, reversed(SIDES)):
        of_other = entries[other]
        dropped = ("cameras",) if of_other is not None and "cameras" not in of_other else ()
        has_instances = entries[side] is None or "instances" in entries[side]
        matched[side] = MatchedSet(
            datasets[side],
            _with_last(classes[side], DISTRACTORS[side]),
            _with_last(tags[side], NO_TAG),
            max(widths, default=0),
            dropped,
            own_instances=not has_instances and "instances" in (of_other or ()),
        )
    return matched


def _numbers(what: str, attribute: str, datasets: Mapping[Side, Any]) -> dict[Side, Tensor | None]:
    names = {side: getattr(datasets[side], attribute, None) for side in SIDES}
    return shared_numbers("Pairs", what, names)


def _with_last(numbers: Tensor | None, last: int) -> Tensor | None:
    """Numbers with another at the end, which the index -1 selects."""
    if numbers is None:
        return None
    return torch.cat([numbers, torch.tensor([last])])


def used_names(dataset: Any) -> set[str]:
    """The names of the classes that have items in a data set; empty if classes have no names."""
    names = getattr(dataset, "class_names", None)
    if names is None:
        return set()
    used = torch.as_tensor(dataset.labels).unique().tolist()
    return {names[label] for label in used if label >= 0}


class Pairs(RetrievalDataModule):
    """Queries and candidates from two data modules, for training and evaluating two sides.

    A training batch holds P classes with queries and candidates of each, drawn by `PairSampler`. In evaluation, each
    query of the queries' validation or test set is ranked against the candidates' set, and `RetrievalEvaluation` also
    ranks the queries for each candidate. If there are several evaluation sets, both sides must have the same names of
    sets; a side with a single set is paired with each set of the other.

    Classes are the same if they have the same name, or the same number if neither side has names. Classes on one side
    only are skipped in training. In evaluation they stay: their candidates are distractors, and their queries are
    skipped and counted.

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
        `RetrievalModule` embeds queries by `query_embedder` and candidates by `embedder`.
    """

    def __init__(
        self,
        queries: RetrievalDataModule,
        candidates: RetrievalDataModule,
        *,
        classes_per_batch: int = 32,
        queries_per_class: int = 1,
        samples_per_class: int = 1,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        seed: int | None = None,
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
        self.queries_per_class = check_integer("Pairs", "queries_per_class", queries_per_class, least=1)
        self.samples_per_class = check_integer("Pairs", "samples_per_class", samples_per_class, least=1)
        if queries is candidates:
            raise ValueError(
                f"Pairs: `queries` and `candidates` must be two data modules, got one {type(queries).__name__} for "
                "both; create it twice."
            )
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
        if [] in [data.val_dataloader() for data in self.modules.values()]:
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
            of_side = data.check()
            report.splits |= {f"{side}/{name}": counts for name, counts in of_side.splits.items()}
            report.missing_files += of_side.missing_files
            report.unreadable_files += of_side.unreadable_files
            report.problems += [f"{side}: {problem}" for problem in of_side.problems]
            report.notes += [f"{side}: {note}" for note in of_side.notes]
        return report

    def _share_trainer(self) -> None:
        for data in self.modules.values():
            data.trainer = self.trainer

    def _follow_module(self) -> None:
        for data in self.modules.values():
            data._follow_module()

    def _set_of_loader(self, dataset: PairSet) -> PairSet:
        datasets = {}
        for side, found in dataset.sides.items():
            datasets[side] = self.modules[side]._set_of_loader(found.dataset)
        return dataset.with_datasets(datasets)

    def _training_images(self) -> dict[str, Any]:
        of_side = {side: data._training_images() for side, data in self.modules.items()}
        count = sum(images["count"] for images in of_side.values())
        return {"count": count, **of_side}


def _check_side(side: Side, data: Any) -> RetrievalDataModule:
    """Check and mark the data module of a side, and warn of its arguments that have no effect."""
    if not isinstance(data, RetrievalDataModule) or isinstance(data, Pairs):
        raise TypeError(
            f"Pairs: `{side}` must be a data module of one side, such as ImageFolder, got {type(data).__name__}."
        )
    arguments = all_arguments(type(data))
    ignored = []
    for name in WITHOUT_EFFECT:
        if name in arguments and getattr(data, name) != arguments[name].default:
            ignored.append(f"`{name}`")
    if ignored:
        warnings.warn(
            f"Pairs: {', '.join(ignored)} of the data module of `{side}` have no effect; give them to Pairs.",
            stacklevel=3,
        )
    data.side = side
    return data


def _check_same_split(side: Side, data: RetrievalDataModule, other: Side, other_data: RetrievalDataModule) -> None:
    """Raise if a class that is in training on one side is only in evaluation on the other."""
    shared_classes = [getattr(module, "shared_classes", False) for module in (data, other_data)]
    if any(shared_classes):
        return
    splits = getattr(other_data, "splits", {})
    of_other = set().union(*(set(index.names or ()) for index in splits.values()))
    evaluated = of_other - used_names(other_data.train_set)
    wrong = sorted(used_names(data.train_set) & evaluated)
    if wrong:
        raise ValueError(
            f"Pairs: a class must be in training on both sides or in evaluation on both, got {len(wrong)} in training "
            f"of the {side} and in evaluation of the {other}, such as {wrong[0]!r}; give both data sets a column "
            "`split`, or folders for each split."
        )


def _paired(name: str, queries: Any, candidates: Any) -> PairSet | dict[str, PairSet]:
    """Pair the evaluation sets of both sides.

    Args:
        name: name of the attribute, for error messages.
        queries: a data set, or several by name.
        candidates: the same for the candidates.
    """
    by_name = [sets for sets in (queries, candidates) if isinstance(sets, Mapping)]
    if not by_name:
        return PairSet(queries, candidates)
    if len(by_name) == 2 and queries.keys() != candidates.keys():
        raise ValueError(
            f"Pairs: the evaluation sets of both sides must have the same names, got `{name}` with "
            f"{', '.join(queries)} of the queries and {', '.join(candidates)} of the candidates."
        )
    pairs = {}
    for name_of_set in by_name[0]:
        pairs[name_of_set] = PairSet(_set_named(queries, name_of_set), _set_named(candidates, name_of_set))
    return pairs


def _set_named(sets: Any, name: str) -> Any:
    if isinstance(sets, Mapping):
        return sets[name]
    return sets
