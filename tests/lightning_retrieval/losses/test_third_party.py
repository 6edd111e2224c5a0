"""Losses of pytorch-metric-learning as terms: which of them rank references, without the query's own copy, and how."""

import inspect

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import nn

from lightning_retrieval.losses import WeightedSum

SETTINGS = {
    "ManifoldLoss": {"l": 4},
    "P2SGradLoss": {"descriptors_dim": 4, "num_classes": 4},
    "RankedListLoss": {"margin": 0.5, "Tn": 0.1},
}
CLASSIFIER = {"num_classes": 4, "embedding_size": 4}
# These are base classes, or wrappers that return the value of another loss.
BASES = {"BaseMetricLossFunction", "EmbeddingRegularizerMixin", "GenericPairLoss", "WeightRegularizerMixin"}
WRAPPERS = {"BaseLossWrapper", "CrossBatchMemory", "MultipleLosses", "SelfSupervisedLoss"}
CLASSES = {name: cls for name, cls in vars(pml).items() if inspect.isclass(cls) and name not in BASES | WRAPPERS}
# They accept references, but NCALoss counts the query's own copy, and the others mistake indices of references for
# those of queries.
OTHERWISE = {"NCALoss", "LiftedStructureLoss", "ThresholdConsistentMarginLoss"}

E, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(9) // 3
R = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Z = torch.tensor([*Y, 0, 3, 1])
R[:9] = E
IDS = torch.tensor([40, 41, 42, 43, 44, 45, 46, 47, 48])
REF_IDS = torch.cat([IDS, torch.tensor([48, 61, 62])])  # image 48 once more, under another label


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls = CLASSES[name]
    if name in SETTINGS:
        return cls(**SETTINGS[name]).double()
    try:
        return cls().double()
    except (KeyError, TypeError):
        return cls(**CLASSIFIER).double()


def as_term(loss):
    """The loss with the interface of this library."""
    return WeightedSum({"other": (1.0, loss)})


def is_refused(call):
    try:
        call()
    except TypeError:
        return True
    return False


def ranks_references(name):
    return not is_refused(lambda: as_term(make(name))(E, Y, R, Z, ids=IDS, ref_ids=REF_IDS))


def pairs(labels, ref_labels, ids, ref_ids):
    """Anchors and positives, anchors and negatives, without the query's own copy."""
    every = [(q, r) for q in range(len(ids)) for r in range(len(ref_ids)) if ids[q] != ref_ids[r]]
    positive = [(q, r) for q, r in every if labels[q] == ref_labels[r]]
    negative = [(q, r) for q, r in every if labels[q] != ref_labels[r]]
    return (*torch.tensor(positive).T, *torch.tensor(negative).T)


def loss_of_batch(name, references):
    """The batch alone, or against its copy in another order without each query's own copy; None if it raises."""
    order = torch.tensor([4, 8, 0, 7, 2, 3, 6, 1, 5])
    arguments = (E, Y, pairs(Y, Y[order], IDS, IDS[order]), E[order], Y[order]) if references else (E, Y)
    try:
        return make(name)(*arguments)
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        return None


def can_be_trained(loss):
    """A loss must take labels, and must not need the graph of the step before."""
    layer = nn.Linear(4, 4).double()
    try:
        for _ in range(3):
            loss(layer(E), Y).backward()
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", CLASSES)
def test_losses_that_cannot_be_trained_are_refused(name):
    assert can_be_trained(make(name)) != is_refused(lambda: as_term(make(name)))


@pytest.mark.parametrize("name", CLASSES)
def test_which_losses_take_references(name):
    """Known by one question: is a batch ranked against its copy, without each query's own, the batch itself?"""
    plain, ranked = loss_of_batch(name, references=False), loss_of_batch(name, references=True)
    same = plain is not None and ranked is not None and torch.allclose(plain, ranked, rtol=1e-12, atol=1e-12)
    assert ranks_references(name) == (same and can_be_trained(make(name)))
    assert (ranked is not None and not same) == (name in OTHERWISE)


def test_a_subclass_of_a_loss_that_cannot_be_trained_is_accepted():
    """It may have repaired what its base cannot do."""

    class TakesLabels(pml.ManifoldLoss):
        def forward(self, embeddings, labels):
            return super().forward(embeddings)

    as_term(TakesLabels(l=4, K=4).double())(E.clone().requires_grad_(), Y).backward()


def test_subclasses_rank_as_their_bases_and_namesakes_do_not():
    class Mine(pml.ContrastiveLoss):
        pass

    namesake = type("ContrastiveLoss", (nn.Module,), {"forward": lambda self, embeddings, labels: embeddings.sum()})
    as_term(Mine())(E, Y, R, Z, ids=IDS, ref_ids=REF_IDS)
    assert is_refused(lambda: as_term(namesake())(E, Y, R, Z, ids=IDS, ref_ids=REF_IDS))
    assert as_term(namesake())(E, Y) == E.sum()


@pytest.mark.parametrize("name", [name for name in CLASSES if ranks_references(name)])
def test_the_pairs_of_a_query_and_all_but_its_own_copy_are_ranked(name):
    """Value and gradient; with levels, the finest counts, on which the others would give other pairs."""
    x = E.clone().requires_grad_()
    ref = torch.cat([x, R[9:]])
    expected = make(name)(x, Y, pairs(Y, Z, IDS, REF_IDS), ref, Z)
    (expected_gradient,) = torch.autograd.grad(expected, x, retain_graph=True)
    assert expected_gradient.abs().sum() > 0
    for labels, ref_labels in ((Y, Z), (torch.stack([Y, Y * 0], 1), torch.stack([Z, Z * 0], 1))):
        value = as_term(make(name))(x, labels, ref, ref_labels, ids=IDS, ref_ids=REF_IDS)
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)

    # Nothing to rank is 0: no positive, no negative, only one's own copy.
    x = E[:1].clone().requires_grad_()
    value = as_term(make(name))(x, Y[:1], R[:1], Z[:1], ids=IDS[:1], ref_ids=REF_IDS[:1])
    value.backward()
    assert value.item() == 0
    assert not x.grad.any()


@pytest.mark.parametrize("name", ["ContrastiveLoss", "ProxyAnchorLoss", "NCALoss"])
def test_without_references_any_loss_is_called_as_it_is(name):
    levels = torch.stack([Y, Y * 0], 1)
    assert as_term(make(name))(E, levels, ids=IDS).item() == make(name)(E, Y).item()


def test_without_ids_all_references_are_ranked():
    every = pairs(Y, Z, range(9), range(100, 112))
    assert sum(map(len, every)) == 2 * 9 * 12
    expected = pml.NTXentLoss()(E, Y, every, R, Z)
    assert as_term(pml.NTXentLoss())(E, Y, R, Z).item() == expected.item()
    assert expected.item() != as_term(pml.NTXentLoss())(E, Y, R, Z, ids=IDS, ref_ids=REF_IDS).item()
