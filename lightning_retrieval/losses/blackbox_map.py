"""RaMBO's mAP loss for score matrices (Rolinek et al., CVPR 2020, sections 4.3 and 5.2). The paper trains detectors
with it.

Each column of a score matrix of shape (images, classes) belongs to a class, which ranks the images:

    L_mAP = mean over classes of 1 - AP(class)                                                        (eq. 22)
    L_APC = 1 - AP of all scores in one list, whatever their class                                    (eq. 23)
    loss  = (1 - interclass_coef) L_mAP + interclass_coef L_APC

The lists are extended by the scores of past batches, which have no gradient (section 4.3). As in the official code,
only the lists of L_mAP are extended. Each batch is sorted once, when it is added; later its sorted scores are searched.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_retrieval.arguments import Fraction, NotNegativeInt, Positive, checked, numbers, settings_repr
from lightning_retrieval.checks import SMALLEST, check_finite
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.losses.blackbox import LARGEST_MARGIN, SortedLists, interpolated_ranks, sort_lists
from lightning_retrieval.losses.score_block import ScoreBlock
from lightning_retrieval.losses.scores import check_score_matrix


def map_loss(
    scores: Float[Tensor, "query gallery"], lists: SortedLists, *, lambda_: float, past: Sequence[SortedLists] = ()
) -> Float[Tensor, ""]:
    """1 - mAP over the rows that have a positive (eq. 22), in lists extended by past batches.

    The gradient is computed in the forward pass, so that lambda acts on the gradient of this loss before any loss
    weight.

    Args:
        scores: higher is nearer.
        lists: `sort_lists` of the same scores, with every item as a candidate.
        lambda_: length of the interpolation, > 0.
        past: lists of the same queries in past batches.
    """
    leaf = scores.detach().requires_grad_()
    with torch.enable_grad():
        query, rank, rank_among_positives = interpolated_ranks(leaf, lists, lambda_=lambda_, past=past)
        count = torch.bincount(query, minlength=len(scores))  # (query,): number of positives
        queries = (count > 0).sum().clamp(min=1)
        weight = 1 / (count * queries)[query].to(rank.dtype)  # (pos,)
        loss = (weight * (1 - rank_among_positives / rank)).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    value: Tensor = _WithGradient.apply(scores, loss.detach(), gradient)
    return value


class _WithGradient(torch.autograd.Function):
    """Return a value whose gradient with respect to the scores has already been computed."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None


class BlackboxMAPLoss(nn.Module):
    """1 - mAP over classes that rank images, with exact ranks and a memory of past scores.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length.
        margin: alpha, from 0 to 100: a positive is ranked above a negative only if it scores more than alpha higher.
        interclass_coef: weight of L_APC, from 0 to 1.
        batch_memory: number of past batches whose scores extend the lists, >= 0.

    Raises:
        ValueError: if a number is out of its range; when called, if shapes differ or a score is not finite.
        TypeError: if an argument has the wrong type; when called, if the targets are not bool.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxMAPLoss
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.3]], requires_grad=True)
        >>> targets = torch.tensor([[True, False], [False, True], [False, True]])
        >>> loss = BlackboxMAPLoss(margin=0.0, batch_memory=1)
        >>> loss(scores, targets).item(), len(loss.memory)
        (0.0, 1)

    Relations:
        Without a memory, this loss equals `BlackboxAPLoss.from_scores` of the transposed matrix. If the queries are
        images, extend the lists with `CrossBatchMemory`, which stores embeddings.
    """

    def __init__(
        self,
        lambda_: Positive = 4.0,
        margin: Annotated[float, numbers(0, LARGEST_MARGIN)] = 0.02,
        *,
        interclass_coef: Fraction = 0.0,
        batch_memory: NotNegativeInt = 0,
    ) -> None:
        super().__init__()
        self.lambda_ = checked(self, lambda_=lambda_)
        self.margin = checked(self, margin=margin)
        self.interclass_coef = checked(self, interclass_coef=interclass_coef)
        self.batch_memory = checked(self, batch_memory=batch_memory)
        self.memory: list[tuple[Tensor, Tensor]] = []
        self._sorted_memory: list[SortedLists] = []

    def forward(self, scores: Float[Tensor, "image level"], targets: Bool[Tensor, "image level"]) -> Float[Tensor, ""]:
        """The loss of a batch. The scores are then added to the memory.

        Args:
            scores: the score of each image for each class.
            targets: which images belong to which classes.
        """
        self._check(scores, targets)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        self._sort_memory(scores)
        class_scores, class_targets = scores.T.contiguous(), targets.T.contiguous()  # (classes, images)
        lists = self._sort(class_scores, class_targets)
        loss = scores.new_zeros(())
        if self.interclass_coef < 1:
            weight = 1 - self.interclass_coef
            lambda_, past = self._lambda_of(weight), self._sorted_memory
            loss = weight * map_loss(class_scores, lists, lambda_=lambda_, past=past)
        if self.interclass_coef > 0:
            one_list, weight = scores.reshape(1, -1), self.interclass_coef
            L_APC = map_loss(one_list, self._sort(one_list, targets.reshape(1, -1)), lambda_=self._lambda_of(weight))
            loss = loss + weight * L_APC
        first = max(0, len(self.memory) + 1 - self.batch_memory)  # index of the oldest batch to keep
        self.memory = [*self.memory, (scores.detach(), targets)][first:]
        self._sorted_memory = [*self._sorted_memory, lists][first:]
        return loss

    def reset(self) -> None:
        """Remove all past scores."""
        self.memory, self._sorted_memory = [], []

    def get_extra_state(self) -> Any:
        """The memory, for checkpoints."""
        return {"memory": self.memory}

    def set_extra_state(self, state: Any) -> None:
        """Restore the memory from a checkpoint."""
        for scores, _ in state["memory"]:
            check_finite("state", scores, owner="BlackboxMAPLoss")
        self.reset()
        self.memory = [(scores, targets) for scores, targets in state["memory"]]

    def extra_repr(self) -> str:
        return settings_repr(self)

    def _lambda_of(self, weight: float) -> float:
        """lambda times the weight of a term, or the smallest lambda allowed if this is larger.

        The smallest lambda changes no rank anyway.
        """
        return max(self.lambda_ * weight, SMALLEST)

    def _sort_memory(self, scores: Tensor) -> None:
        """Sort the memory again after it was loaded, or if the dtype or device of the scores has changed."""
        in_use = [lists.negatives for lists in self._sorted_memory]
        if len(in_use) == len(self.memory) and all(
            x.dtype == scores.dtype and x.device == scores.device for x in in_use
        ):
            return
        self._sorted_memory = []
        for past_scores, past_targets in self.memory:
            past = past_scores.to(scores).T.contiguous(), past_targets.to(scores.device).T.contiguous()
            self._sorted_memory.append(self._sort(*past))

    def _sort(self, scores: Tensor, targets: Tensor) -> SortedLists:
        return sort_lists(ScoreBlock(scores, targets, torch.ones_like(targets)), self.margin)

    def _check(self, scores: Tensor, targets: Tensor) -> None:
        """Raise if the scores or the targets are invalid, or their number of classes differs from the memory's."""
        with reported_as("BlackboxMAPLoss", relevant="targets"):
            check_score_matrix(scores, targets)
            check_finite("scores", scores)
        if not self.memory:
            return
        classes = self.memory[-1][0].shape[1]
        if scores.shape[1] != classes:
            rule = f"must have as many classes as those in memory, {classes}"
            cure = "call reset() before using another data set"
            raise InvalidValue(rule, "BlackboxMAPLoss", "scores", got=f"shape {tuple(scores.shape)}", cure=cure)
