"""The base class of all metrics of embeddings: it collects the rows of an evaluation set on any number of processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_retrieval.checks import (
    as_int64,
    check_finite,
    check_integers,
    check_matrix,
)
from lightning_retrieval.distributed import Shard, kept_integers, kept_rows, world_size
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.metrics.gathering import (
    Images,
    gather_over_processes,
    given_only_sometimes,
    merge_duplicates,
    nothing_to_compute,
    unit_rows,
)
from lightning_retrieval.metrics.ranked_lists import (
    RankedLists,
    post_processed,
    post_processing,
    queries_and_gallery,
)
from lightning_retrieval.ranking.labels import Role, check_roles
from lightning_retrieval.ranking.relevance import Relevance

Results = Mapping[str, Tensor]  # what `compute` returns
_COLUMNS = ("ids", "roles", "instances", "cameras")  # integers of each image beside its labels


class EmbeddingMetric(Metric):
    """Base class of metrics of embeddings. A subclass implements `compute` with the lists of `ranked_lists`.

    With several processes, each process holds a shard of about equal size, and gathers other rows block by block.

    Subclasses and callbacks may use `gather`, `ranked_lists`, `must_defer_errors` and `defer_error`. A subclass whose
    lists follow another rule may override `ranked_lists`.

    Args:
        query_expansion: maps (queries, gallery, self_index) to new queries, such as
            `lightning_retrieval.QueryExpansion()`; None for no expansion.
        database_augmentation: maps a gallery to a new gallery before `query_expansion`, such as
            `lightning_retrieval.DatabaseAugmentation()`; None for no augmentation. With several processes, each applies
            these two classes to its shard of the rows. For any other function or class, each process gathers all
            embeddings and computes the same result.
        embeddings_on_cpu: keep embeddings in main memory, and copy them to the device in blocks.
        relevance: the rule that says which images are relevant to a query and which are in its list, such as
            `lightning_retrieval.SharedTags()`; None if images with the same label are relevant.
        kwargs: arguments of `torchmetrics.Metric`, such as `sync_on_compute` and `process_group`.

    Raises:
        ValueError: if shapes do not match, an embedding is not finite, an id has two labels or two cameras, there are
            cameras beside a rule, or there are several processes and no ids. With several processes, the error is
            raised on all of them in `compute`.
        TypeError: if embeddings are not floating point, labels, ids, instances or cameras are not integers.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    embeddings: list[Tensor]
    labels: list[Tensor]
    ids: list[Tensor]
    roles: list[Tensor]
    instances: list[Tensor]
    cameras: list[Tensor]

    def __init__(
        self,
        *,
        query_expansion: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        database_augmentation: Callable[[Tensor], Tensor] | None = None,
        embeddings_on_cpu: bool = False,
        relevance: Relevance | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.query_expansion = query_expansion
        self.database_augmentation = database_augmentation
        self.embeddings_on_cpu = embeddings_on_cpu
        self.relevance = relevance
        self._error: Exception | None = None
        self._over_processes: bool | None = None  # whether `compute` gathers over processes; None outside of `compute`
        # The values of each query in the last `compute`, by the prefix of their direction, until the next `update`.
        self._cached_values: dict[str, dict[str, Tensor]] = {}
        self._updates_of_values = 0  # number of updates before that `compute`: torchmetrics also sets states itself
        for name in (
            "embeddings",
            "labels",
            *_COLUMNS,
        ):  # `ids`, `instances` and `cameras` stay empty unless they are given
            self.add_state(name, default=[], dist_reduce_fx="cat")

    @owned
    def update(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None = None,
        roles: Integer[Tensor, " batch"] | None = None,
        instances: Int[Tensor, " batch"] | None = None,
        cameras: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Add a batch.

        Args:
            embeddings: one row for each image. The rows are normalised later; float64 stays float64.
            labels: any integers; images with the same label are relevant for each other. Labels of several levels have
                shape (batch, L), finest level first, and must nest. With `relevance`, the columns that the rule reads,
                as its method `columns` returns them.
            ids: dataset index of each image. Images with the same id are the same image and are counted once. Required
                with several processes.
            roles: role of each image: 1 query, 2 gallery, 3 both, 0 neither; 3 if None.
            instances: the instance of each image, any integers. The images of an instance, such as the frames of a
                video, are averaged and count as one image with the smallest of their ids. If None, each image is an
                instance.
            cameras: the camera or the sequence of each image, any integers. Images with the query's (finest) label and
                camera are excluded from its list, as in Market-1501. If None, only the query itself is excluded. None
                with `relevance`, which alone decides which images are in a list.
        """
        self._cached_values = {}
        optional = {"ids": ids, "roles": roles, "instances": instances, "cameras": cameras}
        given = {name: values for name, values in optional.items() if values is not None}
        try:
            self._append(embeddings, labels, given)
        except (TypeError, ValueError) as error:
            if not self.must_defer_errors:
                raise
            self.defer_error(error)

    def reset(self) -> None:
        """Remove all rows."""
        super().reset()
        self._error = None
        self._over_processes = None
        self._cached_values = {}

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[..., Any] | None = None,
    ) -> None:
        """Decide whether `gather` returns the rows of all processes. torchmetrics calls this before `compute`.

        Unlike torchmetrics' own method, this does not replace the states. `gather` communicates, for any number of rows
        per process, and does not change the rows of this process.
        """
        is_available = distributed_available or self.distributed_available_fn
        self._over_processes = should_sync and is_available() and dist.get_world_size(self.process_group) > 1

    def unsync(self, should_unsync: bool = True) -> None:
        """Undo `sync`. torchmetrics calls this after `compute`."""
        self._over_processes = None

    @owned
    def plot(self, val: Results | Sequence[Results] | None = None, ax: Any = None) -> Any:
        """Plot results, and return the figure and its axes, as the metrics of torchmetrics do.

        Args:
            val: a result of `compute`, drawn as points, or a list of results, drawn as lines; if None, calls `compute`.
                Numbers of skipped queries are not drawn.
            ax: the axes of matplotlib to draw on; None for a new figure.
        """
        if val is None:
            val = self.compute()
        if isinstance(val, Mapping):
            return self._plot(_without_counts(val), ax)
        return self._plot([_without_counts(results) for results in val], ax)

    @owned
    def ranked_lists(self, images: Images | None = None) -> RankedLists:
        """The ranked lists of an evaluation: queries, gallery and the list of each query, after the post-processing.

        With several processes, this is a collective operation, as `gather`.

        Args:
            images: the images of an evaluation set; None for those of all updates.
        """
        if images is None:
            images = self.gather()
        return post_processed(queries_and_gallery(images), self.query_expansion, self.database_augmentation)

    @owned
    def gather(self) -> Images:
        """The images of all processes, each once, in the order of their ids.

        Labels, ids, roles and cameras are those of all images. Embeddings stay on their processes until `ranked_lists`
        distributes them.

        With several processes, this is a collective operation, like `compute`. Outside of `compute`, it may be called
        only if `sync_on_compute` is True or there is one process.
        """
        return merge_duplicates(self._gather_collected())

    def _gather_collected(self) -> Images:
        """The rows of all processes as they were collected."""
        if self._over_processes is None:
            with self.sync_context(should_sync=self.sync_on_compute):
                return self._gather_collected()
        collected, error = self._collected(), self._error or self._missing_column()
        if self._over_processes:
            group = self.process_group
            shard = Shard(dist.get_rank(group), dist.get_world_size(group), group, self.device)
            kept_on = torch.device("cpu") if self.embeddings_on_cpu else self.device
            settings = self._settings()
            images = gather_over_processes(collected, error, settings, shard=shard, embeddings_device=kept_on)
            return replace(images, relevance=self.relevance)
        if error is not None:
            raise error
        if collected is None:
            raise nothing_to_compute()
        return collected

    @property
    def must_defer_errors(self) -> bool:
        """Whether other processes would wait in `compute` if this process raised an error now."""
        return self.sync_on_compute and world_size(self.process_group) > 1

    def defer_error(self, error: Exception) -> None:
        """Store an error of this process; `compute` then raises it on all processes."""
        self._error = self._error or error.with_traceback(None)  # whose frames would keep the tensors

    def _append(self, embeddings: Tensor, labels: Tensor, given: Mapping[str, Tensor]) -> None:
        """Add a batch.

        Args:
            embeddings: as for `update`.
            labels: as for `update`.
            given: the other arguments of `update` that are not None, by name.
        """
        check_matrix("embeddings", embeddings)
        rows = len(embeddings)
        columns = {name: as_int64(name, values) for name, values in {"labels": labels, **given}.items()}
        for name, values in columns.items():
            check_integers(name, values, rows, "embeddings", levels=name == "labels")
        if self.relevance is not None:
            self.relevance.check_columns("labels", columns["labels"])
            _check_no_cameras(self.relevance, given.get("cameras"))
        check_finite("embeddings", embeddings, columns.get("ids"))
        if "roles" in columns:
            check_roles(columns["roles"])
        else:
            columns["roles"] = torch.full((rows,), int(Role.BOTH), device=embeddings.device)
        if rows == 0:
            return
        if self.embeddings:
            self._check_like_earlier_updates(embeddings, columns)
        elif self.relevance is not None:
            first = columns["labels"][:1]
            self.relevance.lists(first, first)  # raises now, and not in `compute`, if its masks are invalid
        kept = kept_rows(embeddings)
        if self.embeddings_on_cpu:
            kept = kept.cpu()
        self.embeddings.append(kept)
        for name, values in columns.items():
            getattr(self, name).append(kept_integers(values))

    def _check_like_earlier_updates(self, embeddings: Tensor, columns: Mapping[str, Tensor]) -> None:
        dtype = self.embeddings[0].dtype
        if embeddings.dtype != dtype:
            rule = f"must have the dtype of earlier updates, {dtype}"
            raise InvalidValue(rule, argument="embeddings", got=embeddings.dtype)
        for name, values in {"embeddings": embeddings, "labels": columns["labels"]}.items():
            earlier = getattr(self, name)[0].shape[1:]
            if values.shape[1:] != earlier:
                shape = ", ".join(["rows", *map(str, earlier)])
                rule = f"must have shape ({shape}) as in earlier updates"
                raise InvalidValue(rule, argument=name, got=tuple(values.shape))
        for name in _COLUMNS:
            if (name in columns) != bool(getattr(self, name)):
                raise given_only_sometimes(name)

    def _missing_column(self) -> InvalidValue | None:
        """An error if there are several processes and no ids, or if a column was given for only some rows.

        `update` raises for such rows, but `forward` of torchmetrics merges rows without a check.
        """
        if self._over_processes and self.embeddings and not self.ids:
            rule = "must be given if there are several processes"
            cure = "update with the dataset index of each image, so that images that a sampler repeats are counted once"
            return InvalidValue(rule, argument="ids", got="none", cure=cure)
        rows = sum(map(len, self.embeddings))
        for name in _COLUMNS:
            if sum(map(len, getattr(self, name))) not in (0, rows):
                return given_only_sometimes(name)
        return None

    def _collected(self) -> Images | None:
        """All rows of this process, None if there are none."""
        if len(self.embeddings) == 0:
            return None
        given = {name: getattr(self, name) for name in _COLUMNS}
        columns = {name: dim_zero_cat(batches) for name, batches in given.items() if batches}
        labels = dim_zero_cat(self.labels)
        ids = columns.pop("ids", torch.arange(len(labels), device=labels.device))
        labels = labels.reshape(len(labels), -1)
        embeddings = unit_rows(self.embeddings)
        return Images(labels=labels, ids=ids, columns=columns, embeddings=embeddings, relevance=self.relevance)

    def _settings(self) -> str:
        """The settings that must be equal on all processes, as text. If they differed, processes could wait forever."""
        processing = post_processing(self.query_expansion, self.database_augmentation)
        return f"{self.extra_repr()}, {processing}, relevance: {self.relevance}"


def _check_no_cameras(relevance: Relevance, cameras: Tensor | None) -> None:
    if cameras is not None:
        rule = "must be None with a rule of relevance"
        cure = f"{relevance.name} alone decides which images are in a list, and may read them"
        raise InvalidValue(rule, argument="cameras", got=f"{tuple(cameras.shape)} of them", cure=cure)


def _without_counts(results: Results) -> dict[str, Tensor]:
    """The results without the numbers of skipped queries, as tensors."""
    return {name: torch.as_tensor(value) for name, value in results.items() if "skipped_queries" not in name.split("/")}
