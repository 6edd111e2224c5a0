"""Invalid settings and batches of the losses."""

import torch
from pytorch_metric_learning import losses as pml

from lightning_retrieval import GalleryOnly, OtherCamera, SharedTags
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxMAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    LogRankLoss,
    NestedLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    Schedule,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
    blackbox_rank,
)
from tests.lightning_retrieval.losses.oracles import value_at
from tests.refusals import refusal_test

X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
R, Z = torch.randn(5, 3), torch.tensor([0, 1, 1, 2, 2])
NAN, INFINITE = torch.full((4, 3), torch.nan), torch.full((4, 3), torch.inf)
SCORES, MASK = torch.randn(2, 3), torch.tensor([[True, False, False], [False, True, True]])
ONE_HOT = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 0]])
PAIRS = torch.tensor([[0, 1], [0, 2], [1, 1], [1, 4]])
TERM = (1.0, SmoothAPLoss())
SCHEDULED = WeightedSum({"a": (Schedule([(0, 1), (0.25, 0)]), SmoothAPLoss()), "b": (1.0, FastAPLoss())})


def smooth_ap(*arguments, **keywords):
    return SmoothAPLoss()(*arguments, **keywords)


def nested(loss=TERM[1], dims=(2, 3), **settings):
    return NestedLoss(loss, dims, **settings)


def term(loss):
    return WeightedSum({"other": (1.0, loss)})


def with_more_classes():
    """Scores of three classes after scores of two, which the memory holds."""
    loss = BlackboxMAPLoss(batch_memory=1)
    loss(torch.randn(3, 2), torch.ones(3, 2, dtype=torch.bool))
    loss(torch.randn(2, 3), MASK)


TABLE = {
    "SmoothAPLoss": [
        (lambda: SmoothAPLoss(tau=0), InvalidValue, "tau"),
        (lambda: SmoothAPLoss(tau=-0.1), InvalidValue, "tau"),
        (lambda: SmoothAPLoss(reduction="min"), InvalidValue, "reduction"),
        (lambda: smooth_ap(X[:, 0], Y), InvalidValue, "embeddings"),
        (lambda: smooth_ap(X.long(), Y), InvalidType, "embeddings"),
        (lambda: smooth_ap(NAN, Y), InvalidValue, "embeddings"),
        (lambda: smooth_ap(X, Y[:3]), InvalidValue, "labels"),
        (lambda: smooth_ap(X, Y.float()), InvalidType, "labels"),
        (lambda: smooth_ap(X, ONE_HOT), InvalidValue, ""),
        (lambda: smooth_ap(X, ONE_HOT.bool()), InvalidType, "labels"),
        (lambda: smooth_ap(X, Y, ids=Y[:2]), InvalidValue, "ids"),
        (lambda: smooth_ap(X, Y, R), InvalidValue, "ref_emb", ""),
        (lambda: smooth_ap(X, Y, None, Y), InvalidValue, "ref_labels", ""),
        (lambda: smooth_ap(X, Y, ref_ids=Y), InvalidValue, "ref_ids", ""),
        (lambda: smooth_ap(X, Y, R, Z, ids=Y), InvalidValue, "ids", ""),
        (lambda: smooth_ap(X, Y, R[:, :2], Z), InvalidValue, "ref_emb"),
        (lambda: smooth_ap(X, Y, INFINITE, Y), InvalidValue, "ref_emb"),
        (lambda: smooth_ap(X, Y, R, Z, ids=Y, ref_ids=Z[:3]), InvalidValue, "ref_ids"),
        (lambda: smooth_ap(X, Y, (Y, Y, Y, Y), Y), InvalidType, "ref_emb"),  # what a miner returns
        (lambda: SmoothAPLoss().from_scores(SCORES, MASK, MASK.T), InvalidValue, "candidate"),
        (lambda: SmoothAPLoss().from_scores(NAN[:2], MASK), InvalidValue, "scores"),
        (lambda: SmoothAPLoss(class_balanced=True).from_scores(SCORES, MASK), InvalidValue, "class_balanced", ""),
        (lambda: smooth_ap(X, PAIRS - 2, relevance=SharedTags()), InvalidValue, "labels", "-2"),
        (lambda: smooth_ap(X, Y, relevance=SharedTags()), InvalidValue, "labels"),
        (lambda: smooth_ap(X, Y[:, None], relevance=OtherCamera()), InvalidValue, "labels"),
        (lambda: smooth_ap(X, PAIRS, relevance=GalleryOnly()), InvalidValue, "roles", "4"),
        (lambda: smooth_ap(X, PAIRS, X, PAIRS[:, :1], relevance=SharedTags()), InvalidValue, "ref_labels"),
        (
            lambda: SmoothAPLoss(class_balanced=True)(X, PAIRS, relevance=SharedTags()),
            InvalidValue,
            "class_balanced",
            "SharedTags",
        ),
    ],
    "SupAPLoss": [
        (lambda: SupAPLoss(tau=0), InvalidValue, "tau"),
        (lambda: SupAPLoss(rho=-1), InvalidValue, "rho"),
        (lambda: SupAPLoss(delta=-1), InvalidValue, "delta"),
    ],
    "HAPLoss": [
        (lambda: HAPLoss(alpha=0), InvalidValue, "alpha"),
        (lambda: HAPLoss(hrank_slopes=(1.0, 2.0)), InvalidValue, "hrank_slopes"),
        (lambda: HAPLoss()(X, ONE_HOT), InvalidValue, ""),
        (lambda: HAPLoss()(X, torch.stack([Y, Y * 0], 1), X, torch.stack([Y, Y * 0 + 5], 1)), InvalidValue, ""),
        (lambda: HAPLoss()(X, torch.stack([Y, Y], 1), R, Z), InvalidValue, "", "(5,)"),
        (lambda: HAPLoss().from_scores(SCORES, MASK.int() - 1), InvalidValue, "relevant"),
        (lambda: HAPLoss()(X, PAIRS, relevance=SharedTags()), InvalidType, "relevance"),
    ],
    "FastAPLoss": [
        (lambda: FastAPLoss(num_bins=1), InvalidValue, "num_bins"),
        (lambda: FastAPLoss(num_bins=10.5), InvalidType, "num_bins"),
    ],
    "QuantizedAPLoss": [
        (lambda: QuantizedAPLoss(num_bins=0), InvalidValue, "num_bins"),
        (lambda: QuantizedAPLoss(low=1.0), InvalidValue, "low"),
        (lambda: QuantizedAPLoss(tie_aware="half"), InvalidValue, "tie_aware"),
    ],
    "BlackboxAPLoss": [
        (lambda: BlackboxAPLoss(lambda_=0), InvalidValue, "lambda_"),
        (lambda: BlackboxAPLoss(margin=-1), InvalidValue, "margin"),
    ],
    "BlackboxRecallLoss": [
        (lambda: BlackboxRecallLoss(pair_mean="all")(X[:0], Y[:0]), InvalidValue, "embeddings"),
        (lambda: BlackboxRecallLoss(weighting="exp"), InvalidValue, "weighting"),
        (lambda: BlackboxRecallLoss(batch_memory=-1), InvalidValue, "batch_memory"),
        (lambda: BlackboxRecallLoss(pair_mean="all", reduction="none"), InvalidValue, "pair_mean", "'none'"),
    ],
    "BlackboxMAPLoss": [
        (lambda: BlackboxMAPLoss(interclass_coef=-0.1), InvalidValue, "interclass_coef"),
        (with_more_classes, InvalidValue, "scores"),
        (lambda: BlackboxMAPLoss()(INFINITE, INFINITE > 0), InvalidValue, "scores"),
        (lambda: BlackboxMAPLoss()(SCORES, MASK.T), InvalidValue, "targets"),
    ],
    "blackbox_rank": [
        (lambda: blackbox_rank(torch.tensor([1, 2])), InvalidType, "scores"),
        (lambda: blackbox_rank(SCORES, lambda_=0), InvalidValue, "lambda_"),
    ],
    "CalibrationLoss": [
        (lambda: CalibrationLoss(pair_mean="class"), InvalidValue, "pair_mean"),
        (lambda: CalibrationLoss(pair_mean="all", class_balanced=True), InvalidValue, "pair_mean"),
    ],
    "RecallAtKLoss": [
        (lambda: RecallAtKLoss(ks=(0,)), InvalidValue, "ks"),
        (lambda: RecallAtKLoss(ks=(1.5,)), InvalidType, "ks"),
        (lambda: RecallAtKLoss(ks=()), InvalidValue, "ks"),
        (lambda: RecallAtKLoss(tau_rank=0), InvalidValue, "tau_rank"),
        (lambda: RecallAtKLoss(ks=(1, 2), tau_k=(1.0, 1.0, 1.0)), InvalidValue, "tau_k"),
    ],
    "LogRankLoss": [
        (lambda: LogRankLoss(tau=0), InvalidValue, "tau"),
        (lambda: LogRankLoss(lambda_=-1), InvalidValue, "lambda_"),
        (lambda: LogRankLoss(negative_weight=0), InvalidValue, "negative_weight"),
    ],
    "ROADMAPLoss": [
        (lambda: ROADMAPLoss(1.5), InvalidValue, "lambda_"),
        (lambda: ROADMAPLoss(reduction="min"), InvalidValue, "reduction"),
    ],
    "WeightedSum": [
        (lambda: WeightedSum({}), InvalidValue, "losses"),
        (lambda: WeightedSum({"a": (torch.nan, SmoothAPLoss())}), InvalidValue, "losses['a']"),
        (lambda: WeightedSum({"a": SmoothAPLoss()}), InvalidType, "losses"),
        (
            lambda: WeightedSum(
                {"a": (Schedule([(0, 1), (0.2, 0)]), TERM[1]), "b": (Schedule([(0, 0), (0.3, 1)]), TERM[1])}
            ),
            InvalidValue,
            "losses",
        ),
        (lambda: term(pml.ContrastiveLoss())(X, ONE_HOT), InvalidValue, ""),
        (lambda: value_at(30, SCHEDULED, X, Y), InvalidValue, "fraction"),
    ],
    "Schedule": [
        (lambda: Schedule([(0, 1), (1.5, 0)]), InvalidValue, "points"),
        (lambda: Schedule([(0.5, 1), (0.5, 0)]), InvalidValue, "points"),
        (lambda: Schedule([]), InvalidValue, "points"),
        (lambda: Schedule([(0, 1), (1, 0)], "geometric"), InvalidValue, "points"),
        (lambda: Schedule([(0, 1)], "cosine"), InvalidValue, "between"),
    ],
    "NestedLoss": [
        (lambda: nested(dims=(4, 2)), InvalidValue, "dims"),
        (lambda: nested(dims=(0, 2)), InvalidValue, "dims"),
        (lambda: nested(weights=(1.0,)), InvalidValue, "weights"),
        (lambda: nested(pml.ArcFaceLoss(3, 8)), InvalidType, "loss"),
        (lambda: nested(dims=(2, 8))(X, Y), InvalidValue, "dims"),
    ],
    "ArcFaceLoss": [
        (lambda: term(pml.ArcFaceLoss(2, 3))(X, Y + 1), InvalidValue, "labels"),
        (lambda: term(pml.ArcFaceLoss(2, 3))(X, Y - 1), InvalidValue, "labels"),
    ],
    "ContrastiveLoss": [
        (lambda: term(pml.ContrastiveLoss())(NAN, Y), InvalidValue, "embeddings"),
        (lambda: term(pml.ContrastiveLoss())(X, PAIRS, relevance=SharedTags()), InvalidType, "", "SharedTags"),
    ],
    "NCALoss": [(lambda: term(pml.NCALoss())(X, Y, R, Z), InvalidType, "", "references")],
    "TripletMarginLoss(swap=True)": [
        (lambda: term(pml.TripletMarginLoss(swap=True))(X, Y, R, Z), InvalidType, "", "references"),
    ],
    "VICRegLoss": [(lambda: term(pml.VICRegLoss()), InvalidType, "", "labels")],
}
test_invalid_arguments_raise = refusal_test(TABLE)
