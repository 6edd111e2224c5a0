"""What all retrieval metrics share: the rows of an evaluation set, collected, gathered over processes, each once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_retrieval.checks import check_embeddings, check_integers, check_labels, check_tensor
from lightning_retrieval.distributed import gather_rows, world_size
from lightning_retrieval.ranking.labels import check_nesting, finest
from lightning_retrieval.ranking.similarity import normalize

QUERY, GALLERY = 1, 2
_STATES = ("embeddings", "labels", "ids", "roles", "instances")
_PIECE = 1 << 16  # rows that are gathered at a time where embeddings are kept on the CPU


class Rows(NamedTuple):
    """The rows of an evaluation set in the order of their ids, each once."""

    embeddings: Float[Tensor, "row dim"]
    labels: Int[Tensor, "row level"]
    ids: Int[Tensor, " row"]
    roles: Int[Tensor, " row"]


class Ranking(NamedTuple):
    """Who is ranked for whom, after post-processing: each sorted by label, the coarsest level first."""

    queries: Float[Tensor, "query dim"]
    gallery: Float[Tensor, "gallery dim"]
    query_rows: Int[Tensor, " query"]  # each query's row
    gallery_rows: Int[Tensor, " gallery"]
    own: Int[Tensor, " query"]  # each query's own place in the gallery, or -1


class EmbeddingMetric(Metric):
    """Base of the metrics of embeddings: a subclass says in `compute` what it makes of the rows.

    Args:
        query_expansion: from (queries, gallery, own) to other queries, such as
            `lightning_retrieval.QueryExpansion()`; none where None.
        database_augmentation: from a gallery to another, such as `lightning_retrieval.DatabaseAugmentation()`, before
            that; none where None.
        embeddings_on_cpu: keep embeddings in the main memory, and bring them to the device in pieces.
        kwargs: those of `torchmetrics.Metric`.

    Raises:
        ValueError: if shapes do not fit, an embedding is not finite, one id comes with two labels, or rows come
            without ids where there are several processes. With several processes all of them raise, at `compute`.
        TypeError: if embeddings are not floating point, or labels, ids or instances are not integers.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    embeddings: list[Tensor]
    labels: list[Tensor]
    ids: list[Tensor]
    roles: list[Tensor]
    instances: list[Tensor]

    def __init__(
        self,
        query_expansion: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        database_augmentation: Callable[[Tensor], Tensor] | None = None,
        embeddings_on_cpu: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.query_expansion = query_expansion
        self.database_augmentation = database_augmentation
        self.embeddings_on_cpu = embeddings_on_cpu
        self._refused: str | None = None
        self._table: dict[str, Tensor] | None = None  # of the queries, from one `compute` until there is another row
        for name in _STATES:  # `ids` and `instances` stay empty where none are given
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, "batch ..."],
        ids: Int[Tensor, " batch"] | None = None,
        is_query: Bool[Tensor, " batch"] | None = None,
        is_gallery: Bool[Tensor, " batch"] | None = None,
        instances: Int[Tensor, " batch"] | None = None,
    ) -> None:
        """Add a batch.

        Args:
            embeddings: one row an image, normalised later; float64 stays float64.
            labels: any integers; the same label means relevant. Or (batch, L), finest level first, nested.
            ids: dataset index of each image: the same id again is the same image, kept once. Needed where there are
                several processes.
            is_query: which rows are queries; all where not given.
            is_gallery: which rows are ranked; all where not given.
            instances: the images of one instance (the frames of a video) are averaged and count as one, by the least
                of their ids; each image by itself where not given.
        """
        self._table = None
        try:
            self._add(embeddings, labels, ids, is_query, is_gallery, instances)
        except (TypeError, ValueError) as error:
            if world_size() == 1 or not self.sync_on_compute:
                raise
            self.refuse(str(error))

    def reset(self) -> None:
        """Forget all rows."""
        super().reset()
        self._refused, self._table = None, None

    def relevant(
        self,
        query_ids: Int[Tensor, " query"],
        query_labels: Int[Tensor, "query ..."],
        ids: Int[Tensor, " row"],
        labels: Int[Tensor, "row ..."],
    ) -> Bool[Tensor, "query row"]:
        """Whether each row is right for each query: whether they have one label, of the finest level."""
        return finest(query_labels)[:, None] == finest(labels)

    def listed(self, query_ids: Int[Tensor, " query"], ids: Int[Tensor, " row"]) -> Bool[Tensor, "query row"]:
        """Whether each row counts for each query at all, right or wrong; the query itself does not."""
        return query_ids[:, None] != ids

    def gathered(self) -> tuple[Rows, tuple[int, int]]:
        """All rows, and which part of how many of the work is this process'. Collective, as `compute` is."""
        with self.sync_context(should_sync=self._to_sync), self._in_order():
            return self._rows(), self._share()

    def ranked(self) -> tuple[Rows, Ranking, tuple[int, int]]:
        """As `gathered`, with who is ranked for whom, after post-processing: what callbacks show is taken from this."""
        rows, share = self.gathered()
        return rows, self._ranking(rows), share

    def refuse(self, message: str) -> None:
        """Say at `compute`, on all processes, that this one has met something wrong: the others wait there."""
        self._refused = self._refused or message

    def _add(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ids: Tensor | None,
        is_query: Tensor | None,
        is_gallery: Tensor | None,
        instances: Tensor | None,
    ) -> None:
        who = type(self).__name__
        known = isinstance(ids, Tensor) and isinstance(embeddings, Tensor) and ids.shape == embeddings.shape[:1]
        check_embeddings(who, "embeddings", embeddings, ids if known else None)
        rows = len(embeddings)
        check_labels(who, "labels", labels, rows, "embeddings")
        for name, values in (("ids", ids), ("instances", instances)):
            if values is not None:
                check_integers(who, name, values, rows, "embeddings")
        roles = torch.zeros(rows, dtype=torch.int64, device=embeddings.device)
        for name, role, flag in (("is_query", is_query, QUERY), ("is_gallery", is_gallery, GALLERY)):
            roles += flag if role is None else flag * _check_role(who, name, role, rows)
        if rows == 0:
            return
        if self.embeddings:
            self._check_like_the_rows_before(embeddings, labels, {"ids": ids, "instances": instances})
        self.embeddings.append(embeddings.detach().cpu() if self.embeddings_on_cpu else embeddings.detach())
        self.labels.append(labels.detach().long())
        self.roles.append(roles)
        if ids is not None:
            self.ids.append(ids.detach().long())
        if instances is not None:
            self.instances.append(instances.detach().long())

    def _check_like_the_rows_before(
        self, embeddings: Tensor, labels: Tensor, optional: dict[str, Tensor | None]
    ) -> None:
        who = type(self).__name__
        if embeddings.dtype != self.embeddings[0].dtype:
            raise ValueError(
                f"{who}: `embeddings` must have the type of the updates before, {self.embeddings[0].dtype}, got "
                f"{embeddings.dtype}."
            )
        for name, rows, before in (("embeddings", embeddings, self.embeddings[0]), ("labels", labels, self.labels[0])):
            if rows.shape[1:] != before.shape[1:]:
                raise ValueError(
                    f"{who}: `{name}` must have the dimension of the updates before, {tuple(before.shape[1:])}, got "
                    f"shape {tuple(rows.shape)}."
                )
        for name, values in optional.items():
            if (values is not None) != bool(getattr(self, name)):
                raise ValueError(f"{who}: `{name}` must come with every update or with none, got both.")

    def _rows(self) -> Rows:
        """All rows in the order of their ids, each id and each instance once, with the roles of all its rows."""
        who = type(self).__name__
        if len(self.embeddings) == 0:
            raise ValueError(f"{who}: there is nothing to compute; call update with at least one row first.")
        labels, roles = dim_zero_cat(self.labels), dim_zero_cat(self.roles)
        labels = labels.reshape(len(labels), -1)
        ids = dim_zero_cat(self.ids) if len(self.ids) else torch.arange(len(labels), device=labels.device)
        if len(ids) != len(labels):  # forward puts updates together without comparing them
            raise ValueError(f"{who}: `ids` must come with every update or with none, got both.")
        check_nesting(who, labels)
        first, roles = _once(who, "id", ids, labels, roles)
        embeddings = dim_zero_cat(self.embeddings)
        embeddings = normalize(embeddings[first.to(embeddings.device)])
        if len(self.instances) == 0:
            return Rows(embeddings, labels[first], ids[first], roles)
        return self._averaged(Rows(embeddings, labels[first], ids[first], roles), first)

    def _averaged(self, rows: Rows, kept: Tensor) -> Rows:
        """The mean of the unit rows of each instance, again of unit length."""
        instances = dim_zero_cat(self.instances)[kept]
        first, roles = _once(type(self).__name__, "instance", instances, rows.labels, rows.roles)
        order = instances.argsort(stable=True)
        sizes = torch.unique(instances, return_counts=True)[1]
        by_instance = first.argsort()  # `_once` is in the order of the instances, here it is that of the ids
        place, counts = rows.embeddings.device, sizes.to(rows.embeddings.device)
        sums = torch.segment_reduce(rows.embeddings[order.to(place)], "sum", lengths=counts)
        embeddings = normalize(sums[by_instance.to(place)])
        first = first[by_instance]
        return Rows(embeddings, rows.labels[first], rows.ids[first], roles[by_instance])

    def _ranking(self, rows: Rows) -> Ranking:
        order = torch.arange(len(rows.ids), device=rows.ids.device)
        for level in range(rows.labels.shape[1]):
            order = order[rows.labels[order, level].argsort(stable=True)]
        query_rows = order[rows.roles[order] & QUERY > 0]
        gallery_rows = order[rows.roles[order] & GALLERY > 0]
        place = torch.full_like(order, -1)
        place[gallery_rows] = torch.arange(len(gallery_rows), device=order.device)
        own, where = place[query_rows], rows.embeddings.device
        gallery = rows.embeddings[gallery_rows.to(where)]
        queries = gallery if torch.equal(query_rows, gallery_rows) else rows.embeddings[query_rows.to(where)]
        if len(queries) and len(gallery):
            if self.database_augmentation is not None:
                gallery = self.database_augmentation(gallery)
            if self.query_expansion is not None:
                queries = self.query_expansion(queries, gallery, own.to(where))
        return Ranking(queries, gallery, query_rows, gallery_rows, own)

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Give this process its own rows back if computing fails; torchmetrics would keep all, and could not reset."""
        try:
            yield
        except (TypeError, ValueError):
            if self._is_synced:
                self.unsync()
            raise

    def _share(self) -> tuple[int, int]:
        """Which part of how many of the work this process does: every process has all rows once they are gathered."""
        if not self._is_synced:
            return 0, 1
        return dist.get_rank(self.process_group), dist.get_world_size(self.process_group)

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        """Gather the rows; a rank without any brings empty tensors of the others' kind."""
        who = type(self).__name__
        own = None
        if self.embeddings:
            embeddings, labels = self.embeddings[0], self.labels[0]
            own = (
                embeddings.shape[1],
                str(embeddings.dtype),
                tuple(labels.shape[1:]),
                bool(self.ids),
                bool(self.instances),
            )
        told: list[Any] = [None] * dist.get_world_size(self.process_group)
        count = sum(map(len, self.labels))
        dist.all_gather_object(told, (own, self._refused, count), group=self.process_group)
        for rank, (_, refused, _) in enumerate(told):
            if refused is not None:
                raise ValueError(f"{refused.removesuffix('.')}, on rank {rank}.")
        kinds = {kind for kind, _, _ in told if kind is not None}
        if not kinds:
            raise ValueError(f"{who}: there is nothing to compute; call update with at least one row first.")
        if len(kinds) > 1:
            raise ValueError(
                f"{who}: ranks must bring rows alike, got (D, dtype, label levels, with ids, with instances) of "
                f"{sorted(kinds)}."
            )
        dim, dtype, levels, has_ids, has_instances = kinds.pop()
        if not has_ids:
            raise ValueError(
                f"{who}: `ids` are needed where there are {len(told)} processes, so that images that a sampler "
                "repeats are counted once; update with the dataset index of each image."
            )
        place = torch.device("cpu") if self.embeddings_on_cpu else self.device
        empty = torch.empty(0, dim, dtype=getattr(torch, dtype.split(".")[1]), device=place)
        integers = torch.empty(0, dtype=torch.int64, device=self.device)
        counts = [count for _, _, count in told]
        gathered = {"embeddings": self._gather(torch.cat([*self.embeddings, empty]), counts)}
        columns = [integers.new_empty(0, *levels), integers, integers, integers]
        for name, none in zip(("labels", "ids", "roles", "instances")[: 3 + has_instances], columns):
            gathered[name] = self._gather(torch.cat([*getattr(self, name), none]), counts)
        for name, values in gathered.items():
            setattr(self, name, [values])

    def _gather(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The rows of all processes in rank order; through the device in pieces if they are kept elsewhere."""
        if rows.device == self.device:
            return gather_rows(rows, counts, self.process_group)
        parts: list[list[Tensor]] = [[] for _ in counts]
        for begin in range(0, max(counts), _PIECE):
            sizes = [min(max(count - begin, 0), _PIECE) for count in counts]
            piece = gather_rows(rows[begin : begin + _PIECE].to(self.device), sizes, self.process_group)
            for part, rest in zip(parts, piece.cpu().split(sizes)):
                part.append(rest)
        return torch.cat([torch.cat(part) for part in parts])


def _once(who: str, what: str, names: Tensor, labels: Tensor, roles: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each name in the names' order, and the roles of all its rows together; labels must agree."""
    unique, inverse = torch.unique(names, return_inverse=True)
    places = torch.arange(len(names), device=names.device)
    first = torch.full_like(unique, len(names)).scatter_reduce(0, inverse, places, "amin")
    differs = (labels != labels[first][inverse]).any(1)
    if bool(differs.any()):
        wrong = int(names[differs.nonzero()[0, 0]])
        raise ValueError(
            f"{who}: `{what}s` must name one {'image' if what == 'id' else 'class'} each, got {what} {wrong} with two "
            "different labels."
        )
    merged = torch.zeros_like(unique)
    for flag in (QUERY, GALLERY):
        merged += torch.zeros_like(unique).scatter_reduce(0, inverse, roles & flag, "amax")
    return first, merged


def _check_role(who: str, name: str, role: Tensor, rows: int) -> Tensor:
    check_tensor(who, name, role)
    if role.dtype != torch.bool or role.shape != (rows,):
        raise ValueError(
            f"{who}: `{name}` must be bool of shape ({rows},), got {role.dtype} of shape {tuple(role.shape)}."
        )
    return role
