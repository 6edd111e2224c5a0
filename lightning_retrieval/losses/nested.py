"""Nested embeddings: a loss at several lengths of the same embeddings (Kusupati et al., "Matryoshka Representation
Learning", NeurIPS 2022).

    L = sum over m in M of c_m L(z_1:m)                       (equation 1)

z_1:m are the first m dimensions of an embedding, normalised again; M is `dims` and c_m are `weights`, all 1 in the
paper. The first dimensions then work as an embedding by themselves, so one model serves several lengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_finite_number, check_instance, check_sequence, short_repr
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.embedding_lists import check_batch
from lightning_retrieval.losses.ranked_batch import RankedBatch
from lightning_retrieval.losses.shared_reads import shared_reads
from lightning_retrieval.losses.third_party import as_batch_loss, has_class_vectors, original_loss
from lightning_retrieval.ranking.dims import check_dims, check_dims_fit
from lightning_retrieval.ranking.similarity import normalize


class NestedLoss(BatchLoss):
    """The sum of a loss over the first dimensions of the embeddings, for several numbers of them.

    Args:
        loss: of this library or of another, computed at each length.
        dims: numbers of dimensions, in ascending order; the last is usually that of the embeddings.
        weights: weight of each length; all 1 if None.

    Raises:
        ValueError: if `dims` is empty or does not ascend, or there is not one weight from -1e12 to 1e12 for each; when
            called, if the embeddings have fewer dimensions than the last of `dims`.
        TypeError: if `loss` is not a module, or is one of pytorch-metric-learning that learns class vectors; if a
            number has another type.

    Example:
        >>> import torch
        >>> from lightning_retrieval.losses import NestedLoss, SmoothAPLoss
        >>> loss = NestedLoss(SmoothAPLoss(), dims=(1, 2))
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.4, 0.9], [0.6, 0.8]], requires_grad=True)
        >>> value = loss(embeddings, torch.tensor([7, 7, 3, 3]))
        >>> {name: round(term.item(), 2) for name, term in loss.terms.items()}
        {'1d': 0.5, '2d': 0.21}

    Cost:
        That of the loss at each length, one after another. The network, which takes most of a step, runs once.

    Relations:
        `RetrievalEvaluation(dims=...)` logs the metrics at each length. `PCAWhitening` shortens the embeddings of a
        model that was trained without this loss: compare both. `terms` holds the unweighted value at each length,
        which `RetrievalModule` logs as `train/loss/64d` and so on.
    """

    def __init__(
        self, loss: nn.Module, dims: Sequence[int] = (64, 128, 256, 512), *, weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_instance(owner, "loss", loss, nn.Module)
        self.dims = check_dims(owner, dims)
        self.weights: tuple[float, ...] | None = None
        if weights is not None:
            self.weights = _checked_weights(owner, weights, self.dims)
        self.part = as_batch_loss(loss)
        for module in self.part.modules():
            if has_class_vectors(module):
                raise TypeError(
                    f"{owner}: `loss` must not learn class vectors, which have one length, got "
                    f"{type(module).__name__}; use a loss that compares embeddings with each other."
                )

    @property
    def loss(self) -> nn.Module:
        """The loss as it was given."""
        return original_loss(self.part)

    @property
    def splits_by_query(self) -> bool:
        """Whether the loss is a sum over queries."""
        return self.part.splits_by_query

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references."""
        return self.part.terms_without_references

    def of_batch(self, batch: RankedBatch) -> Tensor:
        """The weighted sum over the lengths."""
        check_batch(type(self.loss).__name__, batch)
        check_dims_fit(type(self).__name__, self.dims, batch.embeddings)
        with shared_reads():
            # The largest first: only the first call checks that all numbers are finite, as part of the shared reads.
            values = [self.part(**shortened.keywords()) for shortened in self._shortened(batch)]
        values.reverse()
        self.terms = {f"{dim}d": value.detach() for dim, value in zip(self.dims, values)}
        weights = self.weights or (1.0,) * len(self.dims)
        weighted = [weight * value for weight, value in zip(weights, values)]
        return torch.stack(weighted).sum(0)

    def from_scores(self, scores: Tensor, relevant: Tensor, candidate: Tensor | None = None) -> Tensor:
        """Raises TypeError: a score matrix has no dimensions to leave out."""
        raise TypeError(
            f"{type(self).__name__}: a nested loss cannot be computed from a score matrix, which has no dimensions; "
            "call it with embeddings and labels."
        )

    def extra_repr(self) -> str:
        return f"dims={self.dims}, weights={self.weights}"

    def _shortened(self, batch: RankedBatch) -> Iterator[RankedBatch]:
        """The batch at each length, in descending order."""
        for dim in reversed(self.dims):
            ref_emb = batch.ref_emb
            if ref_emb is not None:
                ref_emb = normalize(ref_emb[:, :dim])
            yield replace(batch, embeddings=normalize(batch.embeddings[:, :dim]), ref_emb=ref_emb)


def _checked_weights(owner: str, weights: Sequence[float], dims: tuple[int, ...]) -> tuple[float, ...]:
    check_sequence(owner, "weights", weights)
    if len(weights) != len(dims):
        raise ValueError(
            f"{owner}: `weights` must hold one weight for each of the {len(dims)} dims, got {short_repr(weights)}."
        )
    return tuple(check_finite_number(owner, "weights", weight) for weight in weights)
