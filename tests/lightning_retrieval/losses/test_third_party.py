"""Losses of pytorch-metric-learning with references: which of them exclude the query's own copy, and their calls."""

import copy
import inspect

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.losses import ContrastiveLoss, NCALoss, NTXentLoss, SelfSupervisedLoss
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, NestedLoss, RetrievalModule, SmoothAPLoss, WeightedSum
from lightning_retrieval.losses.third_party import ACCEPT_REFERENCES, CANNOT_TRAIN, ThirdPartyLoss, as_batch_loss

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
KNOWN = sorted(name for name in ACCEPT_REFERENCES if name in CLASSES)
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


@pytest.mark.parametrize("name", CLASSES)
def test_which_losses_take_references(name):
    """Known by one question: is a batch ranked against its copy, without each query's own, the batch itself?"""
    plain, ranked = loss_of_batch(name, references=False), loss_of_batch(name, references=True)
    same = plain is not None and ranked is not None and torch.allclose(plain, ranked, rtol=1e-12, atol=1e-12)
    accepted = same and name not in CANNOT_TRAIN
    assert accepted != bool(ThirdPartyLoss(make(name)).terms_without_references)
    if same:
        assert plain > 0
    assert (ranked is not None and not same) == (name in OTHERWISE)


@pytest.mark.parametrize("name", CLASSES)
def test_which_losses_can_be_trained(name):
    """All but those of `CANNOT_TRAIN`: a loss must take labels, and must not need the graph of the step before."""
    layer, loss = nn.Linear(4, 4).double(), make(name)

    def train():
        for _ in range(3):
            loss(layer(E), Y).backward()

    if name in CANNOT_TRAIN:
        with pytest.raises((RuntimeError, ValueError), match=r"through the graph a second time|labels are"):
            train()
    else:
        train()


@pytest.mark.refusal
@pytest.mark.parametrize("name", sorted(set(CANNOT_TRAIN) & set(CLASSES)))
def test_losses_that_cannot_be_trained_raise_at_construction(name):
    message = rf"^{name}: the loss cannot be trained, because it .*; use a loss of this library, or one of .*\.$"
    with pytest.raises(TypeError, match=message):
        RetrievalModule(Embedder("glyph_net", 8), make(name))
    with pytest.raises(TypeError, match=message):
        WeightedSum({"ap": (1.0, SmoothAPLoss()), "other": (1.0, make(name))})


def test_a_subclass_of_a_loss_that_cannot_be_trained_is_accepted():
    """It may have repaired what its base cannot do."""

    class TakesLabels(pml.ManifoldLoss):
        def forward(self, embeddings, labels):
            return super().forward(embeddings)

    loss = as_batch_loss(TakesLabels(l=4, K=4).double())
    assert isinstance(loss, ThirdPartyLoss)
    loss(E.clone().requires_grad_(), Y).backward()


def test_every_class_was_asked():
    """A new one has to be asked as well, and none of the names is gone."""
    assert BASES | WRAPPERS | set(SETTINGS) <= set(vars(pml))
    assert set(ACCEPT_REFERENCES) <= set(CLASSES)
    for wrapper in (SelfSupervisedLoss(ContrastiveLoss()), pml.MultipleLosses([ContrastiveLoss()])):
        assert ThirdPartyLoss(wrapper).terms_without_references


@pytest.mark.parametrize("name", KNOWN)
def test_the_own_copy_counts_for_nothing(name):
    """One query, whose copy may be anything; another's row may not."""

    def value(ref):
        return ThirdPartyLoss(make(name))(E[:1], Y[:1], ref, Z, ids=IDS[:1], ref_ids=REF_IDS).item()

    moved, other = R.clone(), R.clone()
    moved[0], other[1:] = R[11] * 3, -R[1:]
    assert value(R) == value(moved) != value(other)


@pytest.mark.parametrize("levels", [False, True], ids=["labels", "levels"])
@pytest.mark.parametrize("name", KNOWN)
def test_calls_name_the_pairs(name, levels):
    """Value and gradient; with levels, the finest counts, on which the others would give other pairs."""
    labels, ref_labels = (torch.stack([x, x * 0], 1) if levels else x for x in (Y, Z))
    results = []
    for explicit in (True, False):
        x = E.clone().requires_grad_()
        ref = torch.cat([x, R[9:]])
        loss = make(name)
        if explicit:
            value = loss(x, Y, pairs(Y, Z, IDS, REF_IDS), ref, Z)
        else:
            value = ThirdPartyLoss(loss)(x, labels, ref, ref_labels, ids=IDS, ref_ids=REF_IDS)
        value.backward()
        results.append((value.detach(), x.grad))
    (expected, gradient), (value, of_call) = results
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(of_call, gradient, rtol=1e-12, atol=1e-12)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", ["ContrastiveLoss", "ProxyAnchorLoss", "NCALoss", "FastAPLoss"])
def test_without_references_any_loss_is_called_as_it_is(name):
    levels = torch.stack([Y, Y * 0], 1)
    expected = make(name)(E, Y)
    assert ThirdPartyLoss(make(name))(E, levels, None, None, ids=IDS, ref_ids=None).item() == expected.item()


def test_without_ids_all_references_are_ranked():
    every = pairs(Y, Z, range(9), range(100, 112))
    assert sum(map(len, every)) == 2 * 9 * 12
    expected = NTXentLoss()(E, Y, every, R, Z)
    for ids, ref_ids in ((None, None), (IDS, None), (None, REF_IDS)):
        assert ThirdPartyLoss(NTXentLoss())(E, Y, R, Z, ids=ids, ref_ids=ref_ids).item() == expected.item()
    assert expected.item() != ThirdPartyLoss(NTXentLoss())(E, Y, R, Z, ids=IDS, ref_ids=REF_IDS).item()


def test_nothing_to_rank_is_zero():
    """No positive, no negative, or only one's own copy: the losses say 0 with a gradient of 0."""
    for name in KNOWN:
        x = E[:1].clone().requires_grad_()
        value = ThirdPartyLoss(make(name))(x, Y[:1], R[:1], Z[:1], ids=IDS[:1], ref_ids=REF_IDS[:1])
        value.backward()
        assert value.item() == 0, name
        assert not x.grad.any(), name


def test_subclasses_rank_as_their_bases_and_namesakes_do_not():
    class Mine(ContrastiveLoss):
        pass

    namesake = type("ContrastiveLoss", (nn.Module,), {})
    assert not ThirdPartyLoss(Mine()).terms_without_references
    assert not ThirdPartyLoss(copy.deepcopy(Mine())).terms_without_references
    assert ThirdPartyLoss(namesake()).terms_without_references
    assert ThirdPartyLoss(nn.MSELoss()).terms_without_references


WITH_CLASSES = {
    name: {"num_classes": 3, "embedding_size": 4}
    for name in (
        "ArcFaceLoss",
        "CosFaceLoss",
        "LargeMarginSoftmaxLoss",
        "NormalizedSoftmaxLoss",
        "ProxyAnchorLoss",
        "ProxyNCALoss",
        "SoftTripleLoss",
        "SphereFaceLoss",
        "SubCenterArcFaceLoss",
    )
}
WITH_CLASSES["MarginLoss"] = {"num_classes": 3, "learn_beta": True}
WITH_CLASSES["P2SGradLoss"] = {"num_classes": 3, "descriptors_dim": 4}


@pytest.mark.refusal
@pytest.mark.parametrize("name", WITH_CLASSES)
def test_a_label_that_a_loss_has_no_class_for_raises(name):
    loss = as_batch_loss(getattr(pml, name)(**WITH_CLASSES[name]))
    embeddings, labels = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2])
    loss(embeddings, labels[:, None] if name == "P2SGradLoss" else labels)
    for wrong, found in ((labels + 1, "1 to 3"), (labels - 1, "-1 to 1")):
        rule = (
            rf"^{name}: `labels` must be from 0 to 2, since the loss has num_classes=3, got {found}; number the classes"
        )
        with pytest.raises(ValueError, match=rule):
            loss(embeddings, wrong)


class Derived(pml.SubCenterArcFaceLoss):
    """A loss of a user, derived from one with proxies."""


@pytest.mark.refusal
def test_a_loss_derived_from_one_with_proxies_has_its_rules():
    loss, embeddings = Derived(num_classes=3, embedding_size=4), torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"^Derived: `labels` must be from 0 to 2, .* num_classes=3, got 0 to 3; "):
        as_batch_loss(loss)(embeddings, torch.tensor([0, 0, 1, 1, 3, 3]))
    with pytest.raises(TypeError, match=r"^NestedLoss: `loss` must not learn proxies, .* got Derived"):
        NestedLoss(loss, dims=(2, 4))


@pytest.mark.refusal
@pytest.mark.parametrize("loss", [NCALoss(), SelfSupervisedLoss(NTXentLoss()), nn.MSELoss()])
def test_other_losses_raise(loss):
    sentence = rf"^{type(loss).__name__}: the loss cannot rank references .* AngularLoss, CircleLoss, .*\.$"
    with pytest.raises(TypeError, match=sentence):
        ThirdPartyLoss(loss)(E, Y, R, Z, ids=IDS, ref_ids=REF_IDS)


@pytest.mark.refusal
def test_a_triplet_loss_that_swaps_cannot_rank_references():
    """It would read distances of positives to negatives in the matrix of queries and references."""
    loss, rows, labels = pml.TripletMarginLoss(swap=True), torch.randn(6, 3), torch.arange(6) // 2
    assert as_batch_loss(loss)(rows, labels, ids=torch.arange(6)) == loss(rows, labels)
    with pytest.raises(TypeError, match=r"^TripletMarginLoss\(swap=True\): the loss cannot rank references"):
        as_batch_loss(loss)(rows, labels, torch.randn(9, 3), torch.arange(9) // 3)
    with pytest.raises(TypeError, match=r"TripletMarginLoss\(swap=True\) cannot do"):
        RetrievalModule(nn.Linear(4, 3), loss, memory=CrossBatchMemory(8))
    assert pml.TripletMarginLoss().swap is False
    RetrievalModule(nn.Linear(4, 3), pml.TripletMarginLoss(), memory=CrossBatchMemory(8))
