"""The ranked lists of a score matrix: its rows, with masks for what is relevant and what is in the list."""

import torch
from torch import Tensor

from lightning_retrieval.checks import check_device, check_float, check_tensor
from lightning_retrieval.losses.positives import levels_in
from lightning_retrieval.losses.ranked_lists import RankedLists


class ScoreLists(RankedLists):
    """The rows of a score matrix, one list for each.

    Args:
        owner: name of the loss, the prefix of error messages.
        scores: (queries, references), higher is nearer.
        relevant: which references are relevant to each query, or their levels of relevance if `graded`.
        candidate: which references are in each query's list; None for all.
        graded: whether `relevant` holds levels, 0 for not relevant.
        mask_name: what error messages call `relevant`.
    """

    def __init__(
        self,
        owner: str,
        scores: Tensor,
        relevant: Tensor,
        *,
        candidate: Tensor | None = None,
        graded: bool = False,
        mask_name: str = "relevant",
    ) -> None:
        _check_scores(owner, scores)
        check_device(owner, mask_name, relevant, scores.device, "scores")
        check_tensor(owner, mask_name, relevant)
        if graded:
            _check_relevance_levels(owner, relevant)
        else:
            _check_bool(owner, mask_name, relevant)
        _check_shape(owner, mask_name, relevant, scores)
        if candidate is not None:
            check_device(owner, "candidate", candidate, scores.device, "scores")
            check_tensor(owner, "candidate", candidate)
            _check_bool(owner, "candidate", candidate)
            _check_shape(owner, "candidate", candidate, scores)
        self.owner, self.given = owner, {"scores": scores}
        self.relevant, self.candidate = relevant, candidate
        self.levels = (1,)
        if graded:
            self.levels = levels_in(relevant)
        self.tensors = (scores.to(torch.promote_types(scores.dtype, torch.float32)),)
        self.gallery = scores.shape[1]
        self._scores = self.tensors[0].detach()

    def scores(self, rows: Tensor) -> Tensor:
        return self._scores[rows]

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        relevant = self.relevant[rows]
        if self.candidate is None:
            return relevant, torch.ones_like(relevant, dtype=torch.bool)
        candidate = self.candidate[rows]
        return relevant * candidate, candidate

    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        if gradients[0] is not None:
            gradients[0].index_add_(0, rows, gradient)

    def class_weights(self, valid: Tensor) -> Tensor:
        raise NotImplementedError("a score matrix has no classes")  # from_scores has raised before


def _check_scores(owner: str, scores: Tensor) -> None:
    check_float(owner, "scores", scores)
    if scores.ndim != 2 or len(scores) == 0:
        raise ValueError(f"{owner}: `scores` must have shape (Q, R) with Q > 0, got {tuple(scores.shape)}.")


def _check_relevance_levels(owner: str, relevant: Tensor) -> None:
    if relevant.is_floating_point() or relevant.is_complex():
        raise TypeError(f"{owner}: `relevant` must be integer levels, 0 for not relevant, got {relevant.dtype}.")
    if bool((relevant < 0).any()):
        raise ValueError(f"{owner}: `relevant` must be levels >= 0, got {int(relevant.min())}.")


def _check_bool(owner: str, name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"{owner}: `{name}` must be bool, got {mask.dtype}.")


def _check_shape(owner: str, name: str, mask: Tensor, scores: Tensor) -> None:
    if mask.shape != scores.shape:
        raise ValueError(
            f"{owner}: `{name}` must have the shape of `scores` {tuple(scores.shape)}, got {tuple(mask.shape)}."
        )
