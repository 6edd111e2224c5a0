"""RaMBO's mAP loss for score matrices (Rolinek et al., CVPR 2020, sections 4.3 and 5.2), with which the paper trains
detectors.

Each column of a score matrix (images, classes) is a class that ranks the images:

    L_mAP = mean over classes of 1 - AP(class)                                                        (eq. 22)
    L_APC = 1 - AP of all scores in one list, whatever their class                                    (eq. 23)
    loss  = (1 - interclass_coef) L_mAP + interclass_coef L_APC

Section 4.3: the scores of past batches, which have no gradient, make the lists longer. As in the official code, they
are added to the lists of L_mAP only.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_retrieval.checks import (
    check_finite,
    check_finite_number,
    check_integer,
    check_not_negative,
    check_positive,
)
from lightning_retrieval.losses.blackbox_ap import BlackboxAPLoss
from lightning_retrieval.losses.score_lists import ScoreLists


def weighted_map_loss(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"],
    *,
    weight: float,
    lambda_: float,
    margin: float,
) -> Float[Tensor, ""]:
    """weight x (1 - mAP over the rows), 0 if the weight is 0.

    In backward, lambda acts on the gradient of the whole loss, which contains the weight.
    """
    if weight == 0:
        return scores.new_zeros(())
    return weight * BlackboxAPLoss(lambda_ * weight, margin).from_scores(scores, relevant)


class BlackboxMAPLoss(nn.Module):
    """1 - mAP over classes that rank images, with exact ranks and a memory of past scores.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length.
        margin: alpha, >= 0: a positive counts as above the others only if it scores this much higher.
        interclass_coef: weight of L_APC, from 0 to 1.
        batch_memory: number of past batches whose scores make the lists longer, >= 0.

    Raises:
        ValueError: if a number is out of its range; when called, if shapes differ or a score is not finite.
        TypeError: if an argument has another type; when called, if the targets are not bool.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxMAPLoss
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.3]], requires_grad=True)
        >>> targets = torch.tensor([[True, False], [False, True], [False, True]])
        >>> loss = BlackboxMAPLoss(margin=0.0, batch_memory=1)
        >>> loss(scores, targets).item(), len(loss.memory)
        (0.0, 1)

    Relations:
        `BlackboxAPLoss.from_scores` with the matrix transposed is this loss without a memory. If images are ranked by
        images, use `CrossBatchMemory`, which keeps embeddings, for longer lists.
    """

    def __init__(
        self,
        lambda_: float = 4.0,
        margin: float = 0.02,
        *,
        interclass_coef: float = 0.0,
        batch_memory: int = 0,
    ) -> None:
        super().__init__()
        self.lambda_ = check_positive("BlackboxMAPLoss", "lambda_", lambda_)
        self.margin = check_not_negative("BlackboxMAPLoss", "margin", margin)
        self.interclass_coef = check_finite_number("BlackboxMAPLoss", "interclass_coef", interclass_coef)
        if not 0 <= interclass_coef <= 1:
            raise ValueError(f"BlackboxMAPLoss: `interclass_coef` must be from 0 to 1, got {interclass_coef}.")
        self.batch_memory = check_integer("BlackboxMAPLoss", "batch_memory", batch_memory, least=0)
        self.memory: list[tuple[Tensor, Tensor]] = []

    def forward(self, scores: Float[Tensor, "image level"], targets: Bool[Tensor, "image level"]) -> Float[Tensor, ""]:
        """The loss of a batch, whose scores then enter the memory.

        Args:
            scores: the score of each image for each class.
            targets: which images belong to which classes.
        """
        self._check(scores, targets)
        past_scores = [past.to(scores) for past, _ in self.memory]
        past_targets = [past.to(targets.device) for _, past in self.memory]
        all_scores = torch.cat([*past_scores, scores])  # (past and present images, classes)
        all_targets = torch.cat([*past_targets, targets])
        settings = {"lambda_": self.lambda_, "margin": self.margin}
        L_mAP = weighted_map_loss(all_scores.T, all_targets.T, weight=1 - self.interclass_coef, **settings)
        one_list, one_target_list = scores.reshape(1, -1), targets.reshape(1, -1)
        L_APC = weighted_map_loss(one_list, one_target_list, weight=self.interclass_coef, **settings)
        self._remember(scores.detach(), targets)
        return L_mAP + L_APC

    def reset(self) -> None:
        """Forget all past scores."""
        self.memory = []

    def get_extra_state(self) -> Any:
        """The memory, for checkpoints."""
        return {"memory": self.memory}

    def set_extra_state(self, state: Any) -> None:
        """Restore the memory from a checkpoint."""
        for scores, _ in state["memory"]:
            check_finite("BlackboxMAPLoss", "state", scores)
        self.memory = [(scores, targets) for scores, targets in state["memory"]]

    def extra_repr(self) -> str:
        return (
            f"lambda_={self.lambda_}, margin={self.margin}, interclass_coef={self.interclass_coef}, "
            f"batch_memory={self.batch_memory}"
        )

    def _remember(self, scores: Tensor, targets: Tensor) -> None:
        """Add a batch to the memory and drop the oldest ones, so that `batch_memory` remain."""
        batches = [*self.memory, (scores, targets)]
        self.memory = batches[max(0, len(batches) - self.batch_memory) :]

    def _check(self, scores: Tensor, targets: Tensor) -> None:
        """Raise if the scores or the targets are invalid, or do not fit those in memory."""
        ScoreLists("BlackboxMAPLoss", scores, targets, mask_name="targets")  # validates shapes and types
        if not self.memory:
            return
        classes = self.memory[-1][0].shape[1]
        if scores.shape[1] != classes:
            raise ValueError(
                f"BlackboxMAPLoss: `scores` must have as many classes as those in memory, {classes}, got shape "
                f"{tuple(scores.shape)}; call reset() before using another data set."
            )
