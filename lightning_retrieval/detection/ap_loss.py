"""RaMBO's loss for detectors: Average Precision instead of the cross entropy (Rolinek et al., CVPR 2020, section 5.2).

Faster R-CNN classifies regions of interest (RoIs): class 0 is background. Each foreground class ranks all RoIs of the
batch by their scores, and the loss is RaMBO's mAP loss of these lists; see `losses/blackbox_map.py`.

Lambda = 0.5, the ratio 2 : 1 of L_mAP and L_APC, and the memory of tau = 7 batches are from the paper. The paper states
neither the scores nor the weight of the loss relative to the losses of the boxes and of the region proposals. Here, the
scores are the softmax over all classes, without the score of the background. The default margin is 0; in the paper, it
is 0.15. At the start of training, softmax scores lie closer together than 0.15, so the gradient would be zero for
nearly all RoIs.
"""

import warnings
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lightning_retrieval.arguments import Fraction, NotNegativeInt, Positive, checked, numbers
from lightning_retrieval.checks import check_finite, check_integers, check_matrix
from lightning_retrieval.detection.targets import check_class_labels
from lightning_retrieval.distributed import gather_rows, rank, world_size
from lightning_retrieval.invalid import owned
from lightning_retrieval.losses.blackbox import LARGEST_MARGIN
from lightning_retrieval.losses.blackbox_map import BlackboxMAPLoss
from lightning_retrieval.training.batch import gather_embeddings

# Below this value of 1 - mAP, a zero gradient is normal: lambda may be too small to correct the few remaining errors.
LARGE_LOSS = 0.1


def foreground_lists(
    class_logits: Float[Tensor, "roi level"], labels: Int[Tensor, " roi"]
) -> tuple[Float[Tensor, "roi class"], Bool[Tensor, "roi class"]]:
    """The score of each RoI for each foreground class, and which RoIs show an object of the class.

    Args:
        class_logits: logits of the background and of classes 1 to C.
        labels: label of each RoI, from 0 (background) to C.
    """
    scores = class_logits.to(torch.promote_types(class_logits.dtype, torch.float32)).softmax(1)
    targets = one_hot(labels, class_logits.shape[1]).bool()
    return scores[:, 1:], targets[:, 1:]


class DetectionAPLoss(nn.Module):
    """The loss `weight` x (1 - mAP) over the RoIs of a batch, for the classifier of a detector.

    With several processes, lists rank the global batch: each process gathers the logits and labels of all processes,
    and computes the same loss. The gradient of its local RoIs is multiplied by the number of processes, since
    `DistributedDataParallel` averages gradients over processes.

    Args:
        lambda_: length of the interpolation, > 0, on ranks divided by the list's length.
        margin: alpha, from 0 to 100: an object is ranked above a negative only if it scores more than alpha higher. The
            scores are probabilities.
        interclass_coef: weight, from 0 to 1, of L_APC, which ranks the scores of all classes in one list.
        batch_memory: number of past batches whose scores extend the lists, >= 0.
        weight: weight of the loss, > 0, relative to the losses of the boxes and of the region proposals.
        gather: False restricts the lists and the memory to the shard of each process.

    Raises:
        ValueError: if a number is out of its range; when called, if a label is not from 0 to C, shapes do not match, or
            a logit is not finite.
        TypeError: if an argument has the wrong type; when called, if logits are not floating point or labels are not
            integers.

    Example:
        >>> import torch
        >>> from lightning_retrieval.detection import DetectionAPLoss
        >>> logits = torch.tensor([[0.0, 2.0, 0.0], [0.0, 1.0, 3.0], [1.0, 0.0, 0.0]], requires_grad=True)
        >>> loss = DetectionAPLoss()
        >>> loss(logits, torch.tensor([1, 2, 0])).item()  # both objects rank first
        0.0

    Cost:
        The scores are sorted twice, and the sorted scores of the memory are searched.

    Relations:
        `RankedRoIHeads` adds this loss to a detector. `BlackboxMAPLoss` is the same loss for any score matrix.
    """

    def __init__(
        self,
        lambda_: Positive = 0.5,
        margin: Annotated[float, numbers(0, LARGEST_MARGIN)] = 0.0,
        *,
        interclass_coef: Fraction = 1 / 3,
        batch_memory: NotNegativeInt = 7,
        weight: Positive = 5.0,
        gather: bool = True,
    ) -> None:
        super().__init__()
        self.weight = checked(self, weight=weight)
        self.gather = gather
        self.lambda_ = checked(self, lambda_=lambda_)
        self.margin = checked(self, margin=margin)
        self.interclass_coef = checked(self, interclass_coef=interclass_coef)
        self.batch_memory = checked(self, batch_memory=batch_memory)
        self.map_loss = BlackboxMAPLoss(lambda_, margin, interclass_coef=interclass_coef, batch_memory=batch_memory)
        self._warned = False

    @owned
    def forward(self, class_logits: Float[Tensor, "roi level"], labels: Int[Tensor, " roi"]) -> Float[Tensor, ""]:
        """The loss of a batch. The scores are then added to the memory.

        If no RoI of the batch shows an object, the batch consists of negatives for the objects in the memory; without
        such objects, the loss is 0.

        Args:
            class_logits: logits of each RoI, for the background and classes 1 to C.
            labels: label of each RoI, from 0 (background) to C.
        """
        check_matrix("class_logits", class_logits)
        check_integers("labels", labels, len(class_logits), "class_logits")
        check_class_labels(labels, 0, class_logits.shape[1] - 1)
        check_finite("class_logits", class_logits)
        if self.gather:
            local = torch.tensor([len(labels)], device=labels.device)
            counts = gather_rows(local, [1] * world_size()).tolist()
            labels = gather_rows(labels, counts)
            class_logits = gather_embeddings(class_logits, counts, local_queries=False)
        scores, targets = foreground_lists(class_logits, labels)
        if len(scores) == 0:
            return 0 * scores.sum()
        value = self.map_loss(scores, targets)
        # There is no warning for a batch without objects, because its gradient should be zero if the batch is ranked
        # below the objects in the memory.
        if scores.requires_grad and not self._warned and bool((value > LARGE_LOSS) & targets.any()):
            scores.register_hook(self._warn_of_zero_gradient)
        loss: Tensor = self.weight * value
        return loss

    def reset(self) -> None:
        """Remove all past scores."""
        self.map_loss.reset()

    def extra_repr(self) -> str:
        return f"weight={self.weight}, gather={self.gather}"

    def _warn_of_zero_gradient(self, gradient: Tensor) -> None:
        """Warn once if the gradient of a whole batch with a large loss is exactly zero."""
        if self._warned or bool(gradient.any()):
            return
        self._warned = True
        if rank() == 0:
            warnings.warn(
                f"DetectionAPLoss: the gradient of a whole batch is exactly zero with margin={self.margin} and "
                f"lambda_={self.lambda_}: the scores lie closer together than the margin, and no step of lambda x "
                "gradient changes a rank, so the classifier learns nothing; use margin=0, or a larger lambda_.",
                stacklevel=2,
            )
