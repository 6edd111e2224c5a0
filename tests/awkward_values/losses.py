"""Valid calls of the losses."""

import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from lightning_retrieval import GalleryOnly, OtherCamera, SharedTags
from lightning_retrieval.losses import (
    After,
    Before,
    BlackboxAPLoss,
    BlackboxMAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    LogRankLoss,
    NestedLoss,
    PairLoss,
    QuantizedAPLoss,
    Ramp,
    RecallAtKLoss,
    RetrievalLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
    blackbox_rank,
)
from lightning_retrieval.losses.batch_loss import QueryRange
from lightning_retrieval.losses.third_party import ThirdPartyLoss
from tests.awkward_values.calls import Call
from tests.lightning_retrieval.relevance_rules import Coarse


class OwnLoss(RetrievalLoss):
    """A user's own loss: the mean score of the positives."""

    def query_losses(self, block):
        return (block.scores * block.relevant).sum(1) / block.relevant.sum(1)


class OwnPairLoss(PairLoss):
    """A user's own mean over pairs."""

    def pair_sums(self, block):
        scores, relevant = block.scores, block.relevant
        return (scores * relevant).sum(1, keepdim=True), relevant.sum(1, keepdim=True).to(scores.dtype)


def batch():
    """Four queries and six references."""
    embeddings = torch.tensor([[1.0, 0.1], [0.8, 0.6], [0.1, 1.0], [0.6, 0.8]])
    references = torch.tensor([[0.9, 0.3], [0.7, 0.6], [0.2, 1.0], [0.5, 0.8], [0.3, 0.3], [1.0, 0.0]])
    return {
        "embeddings": embeddings.requires_grad_(),
        "labels": torch.tensor([7, 7, 3, 3]),
        "ref_emb": references,
        "ref_labels": torch.tensor([7, 3, 3, 7, 7, 3]),
        "ids": torch.arange(4),
        "ref_ids": torch.arange(4, 10),
        "queries": None,
        "relevance": None,
    }


def batch_with_cameras():
    """The batch itself is ranked, by class and camera."""
    columns = torch.tensor([[7, 1], [7, 2], [3, 1], [3, 2]])
    return {
        **batch(),
        "labels": columns,
        "ref_emb": None,
        "ref_labels": None,
        "ref_ids": None,
        "relevance": OtherCamera(),
    }


def columns():
    """What a rule is given of four images."""
    entries = {"cameras": torch.tensor([1, 2, 1, 2]), "roles": torch.tensor([1, 2, 3, 3])}
    return {
        "labels": torch.tensor([7, 7, 3, 3]),
        "batch": {**entries, "tags": torch.tensor([[0, 1], [1, -1], [2, 0], [2, 2]])},
    }


def part_of_batch():
    """The batch itself is ranked, for two of its queries."""
    queries = QueryRange(1, 3, total=lambda values: values)
    return {**batch(), "ref_emb": None, "ref_labels": None, "ref_ids": None, "queries": queries}


def scores():
    return torch.tensor([[0.9, 0.3, 0.5], [0.7, 0.6, 0.1]], requires_grad=True)


def lists():
    """Two queries, each with three scores."""
    return {
        "scores": scores(),
        "relevant": torch.tensor([[True, False, True], [False, True, False]]),
        "candidate": torch.tensor([[True, True, True], [True, True, False]]),
    }


def lists_with_levels():
    return {**lists(), "relevant": torch.tensor([[2, 0, 1], [0, 1, 0]])}


def value_of_batch(loss):
    return loss(**batch())


def value_of_scores(loss):
    return loss(scores(), scores() > 0.5)


def weights_of(schedule):
    return torch.tensor([schedule(fraction) for fraction in (0.0, 0.4, 1.0)])


def constructor(cls, **settings):
    return Call(cls.__name__, cls, lambda: settings, use=value_of_batch)


def calls(loss, relevant=lists, **settings):
    """The calls of a loss over ranked lists: constructor, batch, part of a batch, scores."""
    name, made = loss.__name__, loss(**settings)
    return [
        constructor(loss, **settings),
        Call(name, made, batch, signature=loss.forward),
        Call(name, made, part_of_batch, signature=loss.forward),
        Call(name, made.from_scores, relevant),
    ]


def rule_calls(cls, **settings):
    """The calls of a rule of relevance: constructor, and what it reads of a batch."""
    rule = cls(**settings)
    return [
        Call(cls.__name__, cls, lambda: settings, use=lambda made: made.columns(**columns())),
        Call(cls.__name__, rule.columns, columns),
    ]


def terms():
    return {"ap": (1.0, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())}


# They take their batches as `RetrievalLoss` and `PairLoss` do.
FORMULAS = (
    *(BlackboxAPLoss, BlackboxRecallLoss, CalibrationLoss, FastAPLoss, LogRankLoss, QuantizedAPLoss, RecallAtKLoss),
    SmoothAPLoss,
)
CALLS = {
    **{loss.__name__: [constructor(loss)] for loss in FORMULAS},
    "RetrievalLoss": [
        *calls(OwnLoss),
        Call("OwnLoss", OwnLoss(), batch_with_cameras, signature=OwnLoss.forward),
    ],
    "Relevance": [Call("Coarse", Coarse().columns, columns)],
    **{rule.__name__: rule_calls(rule) for rule in (GalleryOnly, OtherCamera)},
    "SharedTags": rule_calls(SharedTags, at_least=2),
    "PairLoss": calls(OwnPairLoss, pair_mean="query", reduction="mean", class_balanced=False, include_self=False),
    "SupAPLoss": [constructor(SupAPLoss, offset=1.44)],
    "HAPLoss": calls(HAPLoss, lists_with_levels, offset=1.44, hrank_slopes=(25.0, 0.5, 10.0)),
    "ROADMAPLoss": [constructor(ROADMAPLoss, sup_ap=None, calibration=None)],
    "WeightedSum": [
        constructor(WeightedSum, losses=terms()),
        Call("WeightedSum or SmoothAPLoss", WeightedSum(terms()), batch, signature=WeightedSum.forward),
        Call("SmoothAPLoss", WeightedSum(terms()).from_scores, lists),
    ],
    "After": [Call("After", After, lambda: {"start": 0.2, "value": 1.0}, use=weights_of)],
    "Before": [Call("Before", Before, lambda: {"end": 0.2, "value": 1.0}, use=weights_of)],
    "Ramp": [
        Call(
            "Ramp",
            Ramp,
            lambda: {"first": 1.0, "last": 0.5, "start": 0.2, "end": 0.6, "geometric": True},
            use=weights_of,
        )
    ],
    "NestedLoss": [
        constructor(NestedLoss, loss=SmoothAPLoss(), dims=(1, 2), weights=(1.0, 0.5)),
        Call("NestedLoss or SmoothAPLoss", NestedLoss(SmoothAPLoss(), (1, 2)), batch, signature=NestedLoss.forward),
    ],
    "ThirdPartyLoss": [
        constructor(ThirdPartyLoss, loss=ContrastiveLoss()),
        Call(
            "ThirdPartyLoss or ContrastiveLoss",
            ThirdPartyLoss(ContrastiveLoss()),
            batch,
            signature=ThirdPartyLoss.forward,
        ),
    ],
    "BlackboxMAPLoss": [
        Call("BlackboxMAPLoss", BlackboxMAPLoss, use=value_of_scores),
        Call(
            "BlackboxMAPLoss",
            BlackboxMAPLoss(batch_memory=1),
            lambda: {"scores": scores(), "targets": scores() > 0.5},
            signature=BlackboxMAPLoss.forward,
        ),
    ],
    "blackbox_rank": [Call("blackbox_rank", blackbox_rank, lambda: {"scores": scores(), "lambda_": 4.0})],
}
