"""The ranked lists of a batch: who is ranked for whom, who is relevant, who is left out - a block of rows at a time.

Two sources, one interface: embeddings with labels (`EmbeddingLists`) and a score matrix with masks (`ScoreLists`).
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightning_retrieval.checks import check_embeddings, check_finite, check_integers, check_labels, check_tensor
from lightning_retrieval.ranking.labels import check_nesting
from lightning_retrieval.ranking.similarity import normalize


def at(
    matrix: Float[Tensor, "query gallery"], rows: Int[Tensor, " pair"], columns: Int[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """`matrix[rows, columns]`, with a backward pass that adds up without sorting the places first."""
    return matrix.flatten().index_select(0, rows * matrix.shape[1] + columns)


class RankedLists(ABC):
    """One ranked list for each query, reachable a block of queries at a time.

    `tensors` are what gradients are wanted for; `gallery` is the number of references.
    """

    tensors: tuple[Tensor, ...]
    gallery: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @abstractmethod
    def scores(self, rows: Int[Tensor, " query"]) -> Float[Tensor, "query gallery"]:
        """A fresh tensor with the scores of these queries, without a graph."""

    @abstractmethod
    def masks(self, rows: Int[Tensor, " query"]) -> tuple[Bool[Tensor, "query gallery"], Bool[Tensor, "query gallery"]]:
        """The relevant candidates, and the candidates."""

    @abstractmethod
    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        """Add what the gradient of these queries' scores means for each of `tensors`."""

    @abstractmethod
    def class_weights(self, valid: Bool[Tensor, " query"]) -> Float[Tensor, " query"]:
        """1 / (valid queries of the query's class), rescaled to mean 1 over the valid; 0 elsewhere."""

    def count_positives(self) -> Int[Tensor, " query"]:
        """How many relevant candidates each query has."""
        rows = torch.arange(len(self.tensors[0]), device=self.device)
        blocks = rows.split(max(1, (1 << 22) // max(1, self.gallery)))
        return torch.cat([(self.masks(block)[0] > 0).sum(1) for block in blocks])


class EmbeddingLists(RankedLists):
    """Every query against the references, or against the batch itself where no references are given."""

    def __init__(
        self,
        who: str,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        ids: Tensor | None,
        ref_ids: Tensor | None,
        *,
        include_self: bool,
        self_is_positive: bool = True,
        graded: bool = False,
    ) -> None:
        check_embeddings(who, "embeddings", embeddings)
        if len(embeddings) == 0:
            raise ValueError(f"{who}: `embeddings` must hold at least one row, got shape {tuple(embeddings.shape)}.")
        check_labels(who, "labels", labels, len(embeddings), "embeddings")
        if ids is not None:
            check_integers(who, "ids", ids, len(embeddings), "embeddings")
        _check_references(who, embeddings, ref_emb, ref_labels, ids, ref_ids)
        self.in_batch = ref_emb is None
        ref_labels = labels if ref_labels is None else ref_labels
        if graded:
            self._level_labels = tuple(x[:, None] if x.ndim == 1 else x for x in (labels, ref_labels))
            _check_levels(who, *self._level_labels)
        self.graded, self.ids, self.include_self, self.self_is_positive = graded, ids, include_self, self_is_positive
        self.labels, self.ref_labels = (x if x.ndim == 1 else x[:, 0] for x in (labels, ref_labels))
        self.ref_ids = ids if self.in_batch else ref_ids
        x = normalize(embeddings)
        r = x if ref_emb is None else normalize(ref_emb).to(x.dtype)
        self.tensors = (x, r)
        self.gallery = len(r)
        self._x, self._r = x.detach(), r.detach()

    def scores(self, rows: Tensor) -> Tensor:
        return self._x[rows] @ self._r.T

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        relevant = self._levels(rows) if self.graded else self.labels[rows, None] == self.ref_labels
        candidate = torch.ones_like(relevant, dtype=torch.bool)
        own = (torch.arange(len(rows), device=rows.device), rows)
        if self.include_self:
            if not self.self_is_positive:
                if self.in_batch:
                    relevant[own] = False
                if self.ids is not None and self.ref_ids is not None:
                    relevant *= self.ids[rows, None] != self.ref_ids
            return relevant, candidate
        if self.in_batch:
            candidate[own] = False
        if self.ids is not None and self.ref_ids is not None:
            candidate &= self.ids[rows, None] != self.ref_ids
        return relevant * candidate, candidate

    def _levels(self, rows: Tensor) -> Tensor:
        """How many label levels each reference shares with the query; they nest, so these are the coarsest ones."""
        labels, ref_labels = self._level_labels
        levels = torch.zeros(len(rows), len(ref_labels), dtype=torch.uint8, device=rows.device)
        for own, other in zip(labels.unbind(1), ref_labels.unbind(1)):
            levels += own[rows, None] == other
        return levels

    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        if gradients[0] is not None:
            gradients[0].index_add_(0, rows, gradient @ self._r)
        if gradients[1] is not None:
            gradients[1].addmm_(gradient.T, self._x[rows])

    def class_weights(self, valid: Tensor) -> Tensor:
        _, classes = torch.unique(self.labels, return_inverse=True)
        sizes = torch.bincount(classes[valid], minlength=len(self.labels))[classes]
        weights = torch.where(valid, 1.0 / sizes.clamp(min=1).to(self.dtype), torch.zeros((), dtype=self.dtype))
        return weights * (valid.sum() / weights.sum().clamp(min=torch.finfo(self.dtype).tiny))


class ScoreLists(RankedLists):
    """The rows of a score matrix."""

    def __init__(
        self,
        who: str,
        scores: Tensor,
        relevant: Tensor,
        candidate: Tensor | None,
        *,
        graded: bool = False,
        mask_name: str = "relevant",
    ) -> None:
        check_tensor(who, "scores", scores)
        if scores.ndim != 2 or len(scores) == 0:
            raise ValueError(f"{who}: `scores` must have shape (Q, R) with Q > 0, got {tuple(scores.shape)}.")
        if not scores.is_floating_point():
            raise TypeError(f"{who}: `scores` must be floating point, got {scores.dtype}.")
        masks = {mask_name: relevant} if candidate is None else {mask_name: relevant, "candidate": candidate}
        for name, mask in masks.items():
            check_tensor(who, name, mask)
            if graded and name == mask_name:
                if mask.is_floating_point() or mask.is_complex():
                    raise TypeError(f"{who}: `relevant` must be integer levels, 0 for not relevant, got {mask.dtype}.")
                if bool((mask < 0).any()):
                    raise ValueError(f"{who}: `relevant` must be levels >= 0, got {int(mask.min())}.")
            elif mask.dtype != torch.bool:
                raise TypeError(f"{who}: `{name}` must be bool, got {mask.dtype}.")
            if mask.shape != scores.shape:
                raise ValueError(
                    f"{who}: `{name}` must have the shape of `scores` {tuple(scores.shape)}, got {tuple(mask.shape)}."
                )
        check_finite(who, "scores", scores)
        self.relevant, self.candidate = relevant, candidate
        self.tensors = (scores.to(torch.promote_types(scores.dtype, torch.float32)),)
        self.gallery = scores.shape[1]
        self._scores = self.tensors[0].detach()

    def scores(self, rows: Tensor) -> Tensor:
        return self._scores[rows]

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        relevant = self.relevant[rows]
        candidate = torch.ones_like(relevant, dtype=torch.bool) if self.candidate is None else self.candidate[rows]
        return relevant * candidate, candidate

    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        if gradients[0] is not None:
            gradients[0].index_add_(0, rows, gradient)

    def class_weights(self, valid: Tensor) -> Tensor:
        raise NotImplementedError("a score matrix has no classes")  # refused in from_scores


def _check_levels(who: str, labels: Tensor, ref_labels: Tensor) -> None:
    if labels.ndim != 2 or ref_labels.ndim != 2 or labels.shape[1] != ref_labels.shape[1]:
        raise ValueError(
            f"{who}: labels must have shape (rows, levels), finest level first, got `labels` {tuple(labels.shape)} and "
            f"`ref_labels` {tuple(ref_labels.shape)}."
        )
    check_nesting(who, torch.cat([labels, ref_labels]))


def _check_references(
    who: str,
    embeddings: Tensor,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    ids: Tensor | None,
    ref_ids: Tensor | None,
) -> None:
    if ref_emb is None:
        for name, value in (("ref_labels", ref_labels), ("ref_ids", ref_ids)):
            if value is not None:
                raise ValueError(f"{who}: `{name}` came without `ref_emb`; give both or neither.")
        return
    if ref_labels is None:
        raise ValueError(f"{who}: `ref_emb` came without `ref_labels`; give both or neither.")
    check_embeddings(who, "ref_emb", ref_emb)
    if ref_emb.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"{who}: `ref_emb` must have the dimension of `embeddings`, got {tuple(ref_emb.shape)} "
            f"against {tuple(embeddings.shape)}."
        )
    check_labels(who, "ref_labels", ref_labels, len(ref_emb), "ref_emb")
    if (ids is None) != (ref_ids is None):
        missing, given = ("ids", "ref_ids") if ids is None else ("ref_ids", "ids")
        raise ValueError(f"{who}: `{given}` came without `{missing}`; with `ref_emb` give both or neither.")
    if ref_ids is not None:
        check_integers(who, "ref_ids", ref_ids, len(ref_emb), "ref_emb")
