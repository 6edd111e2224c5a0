"""Retrieval metrics, all from the ranks of the positives (`lightning_retrieval.ranks`).

Conventions. With r_1 <= r_2 <= ... the ranks of a query's R positives and p_i the number of positives that score at
least as high as positive i (so p_i = i without ties):

    AP           mean over i of p_i / r_i                      (all positives, divided by R)
    AP@R         sum over i with r_i <= R of p_i / r_i, / R    (Musgrave et al., ECCV 2020)
    R-Precision  number of i with r_i <= R, / R
    RR           1 / h,   R@k  [h <= k],   with h = 1 + (candidates not relevant that score at least as high as the best
                 positive), the rank of the first hit

Ties count against the model, as in scikit-learn. The query itself is not in its list. Queries without a positive have
no value: they are left out of every mean and counted.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_retrieval.checks import check_embeddings, check_integer, check_integers, check_tensor
from lightning_retrieval.ranks import PositiveRanks, positive_ranks
from lightning_retrieval.similarity import normalize

__all__ = ["RetrievalMetrics"]

QUERY, GALLERY = 1, 2
_VALUES = ("mAP", "mAP@R", "R-Precision", "MRR")


class RetrievalMetrics(Metric):
    """mAP, mAP@R, R-Precision, MRR and R@k of a set of embeddings, the same for any number of processes.

    Update with the embeddings of each batch, compute once at the end. Each row is a query, part of the gallery, or both
    (then it is ranked against all others but itself).

    Args:
        ks: the k of R@k, each >= 1.

    Raises:
        ValueError: if `ks` is empty or holds a number below 1, if shapes do not fit, an embedding is not finite, one id
            comes with two labels, or rows come without ids where there are several processes.
        TypeError: if a k is not an integer, embeddings are not floating point or labels not integers.

    Example:
        >>> import torch
        >>> from lightning_retrieval.metrics import RetrievalMetrics
        >>> metrics = RetrievalMetrics(ks=(1, 2))
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.7, 0.3], [0.0, 1.0]])
        >>> metrics.update(embeddings, torch.tensor([5, 5, 2, 2]), ids=torch.arange(4))
        >>> {name: round(value.item(), 3) for name, value in metrics.compute().items()}
        {'mAP': 0.833, 'mAP@R': 0.75, 'R-Precision': 0.75, 'MRR': 0.833, 'R@1': 0.75, 'R@2': 0.75, 'left_out': 0.0}

    Cost:
        The embeddings are kept until `reset`. `compute` holds one block of scores, never all of them, and takes little
        more time than their product; processes share the queries out among them.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    embeddings: list[Tensor]
    labels: list[Tensor]
    ids: list[Tensor]
    roles: list[Tensor]

    def __init__(self, ks: Sequence[int] = (1, 10, 100), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if isinstance(ks, int) or len(ks) == 0:
            raise ValueError(f"RetrievalMetrics: `ks` must hold at least one k, such as (1, 10), got {ks!r}.")
        self.ks = tuple(check_integer("RetrievalMetrics", "ks", k, least=1) for k in ks)
        for name in ("embeddings", "labels", "ids", "roles"):  # `ids` stays empty where none are given
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(
        self,
        embeddings: Float[Tensor, "batch dim"],
        labels: Int[Tensor, " batch"],
        ids: Int[Tensor, " batch"] | None = None,
        is_query: Bool[Tensor, " batch"] | None = None,
        is_gallery: Bool[Tensor, " batch"] | None = None,
    ) -> None:
        """Add a batch.

        Args:
            embeddings: one row an image, normalised later; float64 stays float64.
            labels: any integers; the same label means relevant.
            ids: dataset index of each image: the same id again is the same image, kept once. Needed where there are
                several processes.
            is_query: which rows are queries; all where not given.
            is_gallery: which rows are ranked; all where not given.
        """
        who = type(self).__name__
        check_embeddings(who, "embeddings", embeddings)
        rows = len(embeddings)
        check_integers(who, "labels", labels, rows, "embeddings")
        if ids is not None:
            check_integers(who, "ids", ids, rows, "embeddings")
        roles = torch.zeros(rows, dtype=torch.int64, device=embeddings.device)
        for name, role, flag in (("is_query", is_query, QUERY), ("is_gallery", is_gallery, GALLERY)):
            roles += flag if role is None else flag * _check_role(who, name, role, rows)
        if rows == 0:
            return
        if self.embeddings:
            self._check_like_the_rows_before(embeddings, ids)
        self.embeddings.append(embeddings.detach())
        self.labels.append(labels.detach().long())
        if ids is not None:
            self.ids.append(ids.detach().long())
        self.roles.append(roles)

    def compute(self) -> dict[str, Tensor]:
        """All metrics at once.

        Returns:
            `"mAP"`, `"mAP@R"`, `"R-Precision"`, `"MRR"`, `"R@k"` for each k, each a float64 scalar in [0, 1], and
            `"left_out"`, the number of queries without any relevant candidate. NaN, with a warning, where all are.
        """
        try:
            values = self._per_query()
        except ValueError:
            if self._is_synced:
                self.unsync()  # torchmetrics would leave all ranks' rows here, and could not reset
            raise
        counted = values[~values[:, 0].isnan()]
        if len(counted) == 0:
            warnings.warn(
                f"{type(self).__name__}: none of the {len(values)} queries has a relevant candidate, so the metrics "
                "are NaN; give at least two images of a label.",
                stacklevel=2,
            )
        results = dict(zip(_VALUES, counted[:, : len(_VALUES)].mean(0).unbind()))
        for k in self.ks:
            results[f"R@{k}"] = (counted[:, -1] <= k).double().mean()
        results["left_out"] = torch.tensor(float(len(values) - len(counted)), dtype=torch.float64, device=self.device)
        return results

    def extra_repr(self) -> str:
        return f"ks={self.ks}"

    def _check_like_the_rows_before(self, embeddings: Tensor, ids: Tensor | None) -> None:
        who, dim = type(self).__name__, self.embeddings[0].shape[1]
        if embeddings.shape[1] != dim:
            raise ValueError(
                f"{who}: `embeddings` must have the dimension of the updates before, {dim}, got shape "
                f"{tuple(embeddings.shape)}."
            )
        if (ids is not None) != bool(self.ids):
            raise ValueError(f"{who}: `ids` must come with every update or with none, got both.")

    def _per_query(self) -> Float[Tensor, "query 5"]:
        """AP, AP@R, R-Precision, RR and first hit's rank of each query, NaN where it has no positive."""
        embeddings, labels, ids, roles = self._images()
        order = labels.argsort(stable=True)  # the positives of a query stand side by side
        embeddings, labels, ids, roles = normalize(embeddings[order]), labels[order], ids[order], roles[order]
        in_gallery = (roles & GALLERY) > 0
        is_query = (roles & QUERY) > 0
        own = torch.where(in_gallery, in_gallery.cumsum(0) - 1, -1)[is_query]
        queries, gallery = embeddings[is_query], embeddings[in_gallery]
        values = torch.zeros(len(queries), len(_VALUES) + 1, dtype=torch.float64, device=embeddings.device)
        if len(queries) == 0 or len(gallery) == 0:
            return torch.full_like(values, torch.nan)
        part, parts = 0, 1
        if self._is_synced:  # every rank has all rows: share the queries out
            part, parts = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        blocks = positive_ranks(queries, labels[is_query], gallery, labels[in_gallery], own, part=part, parts=parts)
        for ranks in blocks:
            values[ranks.queries] = _query_values(ranks)
        if parts > 1:
            dist.all_reduce(values, group=self.process_group)  # each row is another rank's zero: the sum is exact
        return values

    def _images(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All rows in the order of their ids, each id once, with the roles of all its rows."""
        who = type(self).__name__
        if len(self.embeddings) == 0:
            raise ValueError(f"{who}: there is nothing to compute; call update with at least one row first.")
        embeddings, labels, roles = map(dim_zero_cat, (self.embeddings, self.labels, self.roles))
        ids = dim_zero_cat(self.ids) if len(self.ids) else torch.arange(len(labels), device=labels.device)
        if len(ids) != len(labels):  # forward puts updates together without comparing them
            raise ValueError(f"{who}: `ids` must come with every update or with none, got both.")
        unique, inverse = torch.unique(ids, return_inverse=True)
        first = torch.full_like(unique, len(ids)).scatter_reduce(
            0, inverse, torch.arange(len(ids), device=ids.device), "amin"
        )
        if not torch.equal(labels, labels[first][inverse]):
            wrong = int(ids[(labels != labels[first][inverse]).nonzero()[0, 0]])
            raise ValueError(f"{who}: `ids` must name one image each, got id {wrong} with two different labels.")
        merged = torch.zeros_like(unique)
        for flag in (QUERY, GALLERY):
            merged += torch.zeros_like(unique).scatter_reduce(0, inverse, roles & flag, "amax")
        return embeddings[first], labels[first], unique, merged

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        """Gather the rows; a rank without any brings empty tensors of the others' dimension and type."""
        who = type(self).__name__
        own = (self.embeddings[0].shape[1], str(self.embeddings[0].dtype), bool(self.ids)) if self.embeddings else None
        shapes: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(shapes, own, group=self.process_group)
        kinds = {shape for shape in shapes if shape is not None}
        if not kinds:
            raise ValueError(f"{who}: there is nothing to compute; call update with at least one row first.")
        if len(kinds) > 1:
            raise ValueError(f"{who}: ranks must bring rows alike, got (D, dtype, with ids) of {sorted(kinds)}.")
        dim, dtype, has_ids = kinds.pop()
        if not has_ids:
            raise ValueError(
                f"{who}: `ids` are needed where there are {len(shapes)} processes, so that images that a sampler "
                "repeats are counted once; update with the dataset index of each image."
            )
        if own is None:
            self.embeddings.append(torch.empty(0, dim, dtype=getattr(torch, dtype.split(".")[1]), device=self.device))
            for state in (self.labels, self.ids, self.roles):
                state.append(torch.empty(0, dtype=torch.int64, device=self.device))
        super()._sync_dist(*args, **kwargs)


def _query_values(ranks: PositiveRanks) -> Float[Tensor, "query 5"]:
    real = ranks.real
    count = real.sum(1)
    rank = ranks.rank.clamp(min=1)
    precision = torch.where(real, ranks.rank_among_positives.double() / rank, 0.0)
    within = real & (rank <= count[:, None])
    best = (count - 1).clamp(min=0)[:, None]  # ascending scores: the best positive is the last real one
    first_hit = 1 + (ranks.rank - ranks.rank_among_positives).gather(1, best)[:, 0].double()
    total = count.double()
    values = [precision.sum(1) / total, (precision * within).sum(1) / total, within.sum(1) / total, 1 / first_hit]
    return torch.stack([*values, first_hit], 1).masked_fill((count == 0)[:, None], torch.nan)


def _check_role(who: str, name: str, role: Tensor, rows: int) -> Tensor:
    check_tensor(who, name, role)
    if role.dtype != torch.bool or role.shape != (rows,):
        raise ValueError(
            f"{who}: `{name}` must be bool of shape ({rows},), got {role.dtype} of shape {tuple(role.shape)}."
        )
    return role
