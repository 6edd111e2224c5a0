"""Valid calls of the losses."""

import torch
from pytorch_metric_learning.losses import ContrastiveLoss

from lightning_retrieval.losses import (
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

COMMON = {"reduction": "mean", "class_balanced": False, "include_self": False}
H_MINUS = {"tau": 0.01, "rho": 100.0, "delta": 0.05, "offset": 1.44, "start": 0.5}


class OwnLoss(RetrievalLoss):
    """A user's own loss: the mean score of the positives."""

    def query_losses(self, lists):
        return (lists.scores * lists.relevant).sum(1) / lists.relevant.sum(1)


class OwnPairLoss(PairLoss):
    """A user's own mean over pairs."""

    def pair_sums(self, lists):
        scores, relevant = lists.scores, lists.relevant
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


def constructor(loss, settings):
    return Call(loss.__name__, loss, lambda: dict(settings), use=value_of_batch)


def calls(loss, settings, relevant=lists):
    """The calls of a loss over ranked lists: constructor, batch, part of a batch, scores."""
    name, made = loss.__name__, loss(**settings)
    return [
        constructor(loss, settings),
        Call(name, made, batch, signature=loss.forward),
        Call(name, made, part_of_batch, signature=loss.forward),
        Call(name, made.from_scores, relevant),
    ]


def terms():
    return {"ap": (1.0, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())}


CALLS = {
    "RetrievalLoss": calls(OwnLoss, COMMON),
    "PairLoss": calls(OwnPairLoss, {"pair_mean": "query", **COMMON}),
    "SmoothAPLoss": calls(SmoothAPLoss, {"tau": 0.01, **COMMON}),
    "FastAPLoss": calls(FastAPLoss, {"num_bins": 10, **COMMON}),
    "QuantizedAPLoss": calls(
        QuantizedAPLoss, {"num_bins": 10, "low": -1.0, "high": 1.0, "tie_aware": "full", **COMMON}
    ),
    "BlackboxAPLoss": calls(BlackboxAPLoss, {"lambda_": 4.0, "margin": 0.02, **COMMON}),
    "BlackboxRecallLoss": calls(
        BlackboxRecallLoss,
        {"lambda_": 4.0, "margin": 0.02, "weighting": "log", "batch_memory": 1, "pair_mean": "query", **COMMON},
    ),
    "SupAPLoss": calls(SupAPLoss, {**H_MINUS, **COMMON}),
    "CalibrationLoss": calls(CalibrationLoss, {"alpha": 0.9, "beta": 0.6, "pair_mean": "query", **COMMON}),
    "HAPLoss": calls(
        HAPLoss, {"alpha": 1.0, **H_MINUS, "hrank_slopes": (25.0, 0.5, 10.0), **COMMON}, lists_with_levels
    ),
    "LogRankLoss": calls(LogRankLoss, {"tau": 0.01, "lambda_": 1.0, **COMMON}),
    "RecallAtKLoss": calls(RecallAtKLoss, {"ks": (1, 2), "tau_rank": 0.01, "tau_k": 1.0, **COMMON}),
    "ROADMAPLoss": [
        constructor(ROADMAPLoss, {"lambda_": 0.5, "sup_ap": None, "calibration": None, **COMMON}),
        Call("SupAPLoss", ROADMAPLoss(), batch, signature=ROADMAPLoss.forward),  # its first term
        Call("SupAPLoss", ROADMAPLoss().from_scores, lists),
    ],
    "WeightedSum": [
        Call("WeightedSum", WeightedSum, lambda: {"losses": terms()}, use=value_of_batch),
        Call("SmoothAPLoss", WeightedSum(terms()), batch, signature=WeightedSum.forward),
        Call("SmoothAPLoss", WeightedSum(terms()).from_scores, lists),
    ],
    "NestedLoss": [
        Call(
            "NestedLoss",
            NestedLoss,
            lambda: {"loss": SmoothAPLoss(), "dims": (1, 2), "weights": (1.0, 0.5)},
            use=value_of_batch,
        ),
        Call("SmoothAPLoss", NestedLoss(SmoothAPLoss(), (1, 2)), batch, signature=NestedLoss.forward),
    ],
    "ThirdPartyLoss": [
        Call("ThirdPartyLoss", ThirdPartyLoss, lambda: {"loss": ContrastiveLoss()}, use=value_of_batch),
        Call("ContrastiveLoss", ThirdPartyLoss(ContrastiveLoss()), batch, signature=ThirdPartyLoss.forward),
    ],
    "BlackboxMAPLoss": [
        Call(
            "BlackboxMAPLoss",
            BlackboxMAPLoss,
            lambda: {"lambda_": 4.0, "margin": 0.02, "interclass_coef": 0.5, "batch_memory": 1},
            use=value_of_scores,
        ),
        Call(
            "BlackboxMAPLoss",
            BlackboxMAPLoss(batch_memory=1),
            lambda: {"scores": scores(), "targets": scores() > 0.5},
            signature=BlackboxMAPLoss.forward,
        ),
    ],
    "blackbox_rank": [Call("blackbox_rank", blackbox_rank, lambda: {"scores": scores(), "lambda_": 4.0})],
}
