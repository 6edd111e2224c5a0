"""A loss at several lengths: equal to the weighted sum of calls with shortened embeddings, for every loss."""

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import nn
from torch.nn.functional import normalize

from lightning_retrieval import CrossBatchMemory, NestedLoss, RetrievalModule, SmoothAPLoss, WeightedSum
from lightning_retrieval.losses import BlackboxAPLoss, CalibrationLoss, HAPLoss, RecallAtKLoss, ROADMAPLoss
from lightning_retrieval.losses.batch_loss import QueryRange
from tests.lightning_retrieval.losses.oracles import TABLE, batch, labels_for, make

DIMS, WEIGHTS = (2, 5, 8), (1.0, 0.5, 2.0)


def own_losses():
    """Every loss of the library by name, and sums of losses."""
    made = {name: lambda name=name: make(name) for name in TABLE}
    made["roadmap"] = ROADMAPLoss
    made["all pairs"] = lambda: CalibrationLoss(pair_mean="all")
    made["sum"] = lambda: WeightedSum({"ap": (1.0, SmoothAPLoss()), "pairs": (0.5, CalibrationLoss())})
    made["sum with a third-party loss"] = lambda: WeightedSum(
        {"a": (1.0, SmoothAPLoss()), "b": (1.0, pml.SupConLoss())}
    )
    return made


OWN = own_losses()
THIRD_PARTY = {"ContrastiveLoss": pml.ContrastiveLoss, "MultiSimilarityLoss": pml.MultiSimilarityLoss}
NAMES = ["smooth_ap", "fast_ap", "hap", "blackbox_ap", "recall_at_k", *list(OWN)[len(TABLE) :]]


def loss_of(name):
    return (OWN | THIRD_PARTY)[name]()


def expected(loss, x, labels, **keywords):
    """The sum by its definition; references are shortened as the batch is."""
    total = 0.0
    for dim, weight in zip(DIMS, WEIGHTS):
        shortened = dict(keywords)
        if "ref_emb" in keywords:
            shortened["ref_emb"] = normalize(keywords["ref_emb"][:, :dim])
        total = total + weight * loss(normalize(x[:, :dim]), labels, **shortened)
    return total


def value_and_gradient(value, x):
    (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


@pytest.mark.parametrize("references", [False, True])
@pytest.mark.parametrize("name", [*NAMES, *THIRD_PARTY])
def test_the_sum_by_its_definition(name, references):
    x, labels = batch([2, 3, 1, 4], dim=8)
    r, ref_labels = batch([3, 1, 2], dim=8)
    x.requires_grad_()
    given = {}
    if references and "third-party" not in name and name not in THIRD_PARTY:
        given = {"ref_emb": r, "ref_labels": labels_for(name, ref_labels)}
        given |= {"ids": torch.arange(10), "ref_ids": torch.tensor([50, 3, 51, 0, 52, 53])}
    y = labels_for(name, labels)
    wanted = value_and_gradient(expected(loss_of(name), x, y, **given), x)
    found = value_and_gradient(NestedLoss(loss_of(name), DIMS, weights=WEIGHTS)(x, y, **given), x)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["smooth_ap", "hap", "all pairs", "sum"])
def test_ranges_of_queries_add_up(name):
    x, labels = batch([2, 3, 1, 4], dim=8)
    y, loss = labels_for(name, labels), NestedLoss(loss_of(name), DIMS, weights=WEIGHTS)
    assert loss.splits_by_query
    recorded = {}
    for begin, end in ((0, 3), (3, 10)):  # what an all-reduce of both would sum
        sums = recorded[begin] = []
        loss(x, y, queries=QueryRange(begin, end, lambda values, sums=sums: sums.append(values) or values))
    totals = [sum(parts) for parts in zip(*recorded.values())]
    parts = 0.0
    for begin, end in ((0, 3), (3, 10)):
        answers = iter(totals)
        parts += loss(x, y, queries=QueryRange(begin, end, lambda values, answers=answers: next(answers)))
    torch.testing.assert_close(parts, loss(x, y))


def test_first_dimensions_only_get_no_gradient_beyond():
    x, labels = batch([2, 3, 4], dim=8)
    NestedLoss(SmoothAPLoss(0.1), (2, 3))(x.requires_grad_(), labels).backward()
    assert (x.grad[:, :3] != 0).all()
    assert x.grad[:, 3:].abs().sum() == 0


def test_terms_are_the_unweighted_values():
    x, labels = batch([2, 3, 4], dim=8)
    loss = NestedLoss(SmoothAPLoss(), DIMS, weights=WEIGHTS)
    loss(x, labels)
    assert list(loss.terms) == ["2d", "5d", "8d"]
    for dim in DIMS:
        torch.testing.assert_close(loss.terms[f"{dim}d"], SmoothAPLoss()(x[:, :dim], labels))


def test_third_party_properties_are_those_of_the_loss():
    loss = NestedLoss(pml.LiftedStructureLoss(), (2, 4))
    assert not loss.splits_by_query
    assert loss.terms_without_references == ["LiftedStructureLoss"]
    assert isinstance(loss.loss, pml.LiftedStructureLoss)


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
def test_it_is_described_and_made_again_for_checkpoints():
    module = RetrievalModule(nn.Linear(6, 8), NestedLoss(WeightedSum({"ap": (1.0, SmoothAPLoss(0.2))}), (2, 8)))
    again = RetrievalModule(nn.Linear(6, 8), module.hparams["loss"])
    assert repr(again.loss) == repr(module.loss)


def test_a_memory_is_shortened_too():
    """The step passes the memory as references."""
    memory = CrossBatchMemory(4)
    memory.update(torch.randn(4, 8), torch.tensor([0, 0, 1, 1]), torch.arange(4))
    x, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
    references = memory.references(x, labels, torch.arange(4, 8))
    loss = NestedLoss(BlackboxAPLoss(), DIMS, weights=WEIGHTS)
    names = ("ref_emb", "ref_labels", "ids", "ref_ids")
    wanted = expected(BlackboxAPLoss(), x, labels, **{name: getattr(references, name) for name in names})
    torch.testing.assert_close(loss.of_batch(references), wanted)


@pytest.mark.parametrize(("loss", "reads"), [(SmoothAPLoss, 1), (ROADMAPLoss, 1), (HAPLoss, 2)])
def test_what_follows_from_the_labels_is_read_once(loss, reads, monkeypatch):
    from lightning_retrieval.losses import lists

    found = []
    monkeypatch.setattr(lists, "to_host", lambda values: found.append(1) or values.detach())
    x, labels = batch([2, 3, 4], dim=8)
    y = torch.stack([labels, labels // 2], 1) if loss is HAPLoss else labels
    NestedLoss(loss(), (1, 2, 3, 4, 5, 6, 7, 8))(x, y)
    assert len(found) == reads


def test_a_second_batch_is_read_again():
    loss = NestedLoss(SmoothAPLoss(), (2, 8))
    for sizes in ([2, 3, 4], [5, 4], [1, 8]):
        x, labels = batch(sizes, dim=8)
        torch.testing.assert_close(loss(x, labels), SmoothAPLoss()(x, labels) + SmoothAPLoss()(x[:, :2], labels))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "settings"),
    [
        (ValueError, r"`dims` must hold integers >= 1, such as \(1, 10\), got \(\)", {"dims": ()}),
        (ValueError, r"`dims` must be different numbers in ascending order, got \(4, 2\)", {"dims": (4, 2)}),
        (ValueError, r"`dims` must be different numbers in ascending order, got \(2, 2\)", {"dims": (2, 2)}),
        (ValueError, r"`weights` must hold one weight for each of the 2 dims, got \(1.0,\)",
         {"dims": (2, 4), "weights": (1.0,)}),
        (TypeError, "`loss` must not learn proxies, which have one dimension, got ArcFaceLoss; use a loss that",
         {"loss": pml.ArcFaceLoss(3, 8)}),
    ],
)  # fmt: skip
def test_bad_settings(error, match, settings):
    with pytest.raises(error, match=f"^NestedLoss: {match}"):
        NestedLoss(**{"loss": SmoothAPLoss(), **settings})


@pytest.mark.refusal
def test_dims_larger_than_the_embeddings():
    x, labels = batch([2, 3], dim=4)
    with pytest.raises(
        ValueError, match=r"^NestedLoss: `dims` must be at most the dimension of the embeddings, 4, got 8;"
    ):
        NestedLoss(SmoothAPLoss(), (2, 8))(x, labels)


@pytest.mark.refusal
def test_scores_have_no_dimensions():
    with pytest.raises(TypeError, match=r"^NestedLoss: a nested loss cannot be computed from a score matrix"):
        NestedLoss(SmoothAPLoss(), (2,)).from_scores(torch.rand(2, 3), torch.rand(2, 3) > 0.5)


@pytest.mark.refusal
@pytest.mark.parametrize("row", [0, 6])
def test_an_infinite_number_in_any_dimension_raises(row):
    x, labels = batch([2, 3], dim=8)
    x[1, row] = torch.inf
    with pytest.raises(ValueError, match=r"^SmoothAPLoss: `embeddings` must hold finite numbers"):
        NestedLoss(SmoothAPLoss(), (2, 8))(x, labels)


def test_losses_that_count_different_positives_do_not_share_their_reads():
    """With `include_self` a query is its own positive for Smooth-AP, and is none for Recall@k."""
    x, labels = batch([1, 1, 2, 3], dim=8)

    def loss():
        return WeightedSum(
            {"ap": (1.0, SmoothAPLoss(include_self=True)), "recall": (1.0, RecallAtKLoss((1,), include_self=True))}
        )

    torch.testing.assert_close(NestedLoss(loss(), DIMS, weights=WEIGHTS)(x, labels), expected(loss(), x, labels))
