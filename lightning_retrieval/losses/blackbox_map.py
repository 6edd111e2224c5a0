"""RaMBO's mAP loss for score matrices (Rolinek et al., CVPR 2020, sections 4.3 and 5.2), which trains its detectors.

Each column of a score matrix (images, classes) is a class that ranks the images:

    L_mAP = mean over classes of 1 - AP(class)                                                        (eq. 22)
    L_APC = 1 - AP of all scores in one list, whatever their class                                    (eq. 23)
    loss  = (1 - interclass_coef) L_mAP + interclass_coef L_APC

Section 4.3: a list is made longer by the scores of past batches, which carry no gradient. As in the official code they
lengthen the lists of L_mAP only.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_finite_number, check_integer, check_not_negative, check_positive
from lightning_retrieval.losses.blackbox import BlackboxAPLoss
from lightning_retrieval.losses.score_lists import ScoreLists


class BlackboxMAPLoss(nn.Module):
    """1 - mAP over classes that rank images, with exact ranks and a memory of past scores.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length.
        margin: alpha, >= 0: what positives must score above all others to count as above them.
        interclass_coef: weight of L_APC, from 0 to 1.
        batch_memory: number of past batches whose scores lengthen the lists, >= 0.

    Raises:
        ValueError: if a number is out of its range; at the call, if shapes differ or a score is not finite.
        TypeError: if one is of another type; at the call, if targets are not bool.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import BlackboxMAPLoss
        >>> scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.3]], requires_grad=True)
        >>> targets = torch.tensor([[True, False], [False, True], [False, True]])
        >>> loss = BlackboxMAPLoss(margin=0.0, batch_memory=1)
        >>> loss(scores, targets).item(), len(loss.memory)
        (0.0, 1)

    Relations:
        `BlackboxAPLoss.from_scores` with the matrix transposed is the loss without memory. For images that are ranked
        by images, a memory of embeddings lengthens the lists instead.
    """

    def __init__(
        self, lambda_: float = 4.0, margin: float = 0.02, interclass_coef: float = 0.0, batch_memory: int = 0
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
        """The loss of a batch, whose scores then join the memory.

        Args:
            scores: of each image for each class.
            targets: which images belong to which classes.
        """
        ScoreLists("BlackboxMAPLoss", scores, targets, mask_name="targets")  # the checks
        classes = self.memory[-1][0].shape[1] if self.memory else scores.shape[1]
        if scores.shape[1] != classes:
            raise ValueError(
                f"BlackboxMAPLoss: `scores` must have as many classes as those in memory, {classes}, got shape "
                f"{tuple(scores.shape)}; call reset() before another data set."
            )
        past = [(s.to(scores), t.to(targets.device)) for s, t in self.memory]
        lists, relevant = (torch.cat(parts) for parts in zip(*past, (scores, targets)))
        loss = self._term(1 - self.interclass_coef, lists.T, relevant.T)
        loss = loss + self._term(self.interclass_coef, scores.reshape(1, -1), targets.reshape(1, -1))
        self.memory = ([*self.memory, (scores.detach(), targets)])[-self.batch_memory :] if self.batch_memory else []
        return loss

    def _term(self, weight: float, scores: Tensor, relevant: Tensor) -> Tensor:
        """weight x (1 - AP); the gradient that moves the scores by lambda times itself has the weight in it."""
        if weight == 0:
            return scores.new_zeros(())
        return weight * BlackboxAPLoss(self.lambda_ * weight, self.margin).from_scores(scores, relevant)

    def reset(self) -> None:
        """Forget all past scores."""
        self.memory = []

    def get_extra_state(self) -> Any:
        """The memory, for checkpoints."""
        return {"memory": self.memory}

    def set_extra_state(self, state: Any) -> None:
        """Take the memory back from a checkpoint."""
        self.memory = [(scores, targets) for scores, targets in state["memory"]]

    def extra_repr(self) -> str:
        return (
            f"lambda_={self.lambda_}, margin={self.margin}, interclass_coef={self.interclass_coef}, "
            f"batch_memory={self.batch_memory}"
        )
