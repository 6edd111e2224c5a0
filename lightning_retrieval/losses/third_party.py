"""Losses of other libraries: called with what they take, the query's own copy kept out of its list."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.ranking.labels import finest

# The losses of pytorch-metric-learning that rank references, whatever their order, and leave out the pairs that
# `indices_tuple` does not name. NCALoss takes references too, but counts the query's own copy among them whatever is
# named; ThresholdConsistentMarginLoss and LiftedStructureLoss take the places of references for places of queries.
TAKE_REFERENCES = frozenset(
    {
        "AngularLoss",
        "CircleLoss",
        "ContrastiveLoss",
        "DynamicSoftMarginLoss",
        "GeneralizedLiftedStructureLoss",
        "IntraPairVarianceLoss",
        "MarginLoss",
        "MultiSimilarityLoss",
        "NTXentLoss",
        "SignalToNoiseRatioContrastiveLoss",
        "SupConLoss",
        "TripletMarginLoss",
        "TupletMarginLoss",
    }
)


def takes_references(loss: nn.Module) -> bool:
    """Whether a loss of another library can rank references without the query's own copy."""
    return any(
        base.__name__ in TAKE_REFERENCES and base.__module__.startswith("pytorch_metric_learning.")
        for base in type(loss).__mro__
    )


def call_foreign(
    loss: nn.Module,
    embeddings: Tensor,
    labels: Tensor,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    ids: Tensor | None,
    ref_ids: Tensor | None,
) -> Any:
    """Call a loss of another library, with the labels of the finest level.

    Raises:
        TypeError: if there are references, and the loss cannot rank them without the query's own copy.
    """
    labels = finest(labels)
    if ref_emb is None or ref_labels is None:
        return loss(embeddings, labels)
    if not takes_references(loss):
        raise TypeError(
            f"{type(loss).__name__} does not rank references without the query's own copy; take a loss of this "
            f"library, or one of pytorch-metric-learning's {', '.join(sorted(TAKE_REFERENCES))}."
        )
    ref_labels = finest(ref_labels)
    same = labels[:, None] == ref_labels
    other = torch.ones_like(same) if ids is None or ref_ids is None else ids[:, None] != ref_ids
    pairs = *torch.where(same & other), *torch.where(~same & other)
    return loss(embeddings, labels, pairs, ref_emb, ref_labels)
