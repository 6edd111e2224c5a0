"""What all losses share, tested on a formula of one line (`Toy`) and on every loss of the package."""

import inspect
import math
import sys

import pytest
import torch
from torch import nn

from lightning_retrieval import losses
from lightning_retrieval.losses import RetrievalLoss, SmoothAPLoss
from tests.lightning_retrieval.blocks import small_blocks
from tests.lightning_retrieval.losses.oracles import batch, value_and_gradient
from tests.lightning_retrieval.metrics.helpers import LargestTensor

LOSSES = [
    loss
    for loss in map(losses.__dict__.get, losses.__all__)
    if isinstance(loss, type) and issubclass(loss, losses.RetrievalLoss) and not inspect.isabstract(loss)
]


class Toy(RetrievalLoss):
    """Mean over the positives of (s - a)^2 plus mean over the candidates of exp(b s): smooth, with two parameters."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.a = nn.Parameter(torch.tensor(0.3))
        self.b = nn.Parameter(torch.tensor([0.7]))
        self.unused = nn.Parameter(torch.tensor(1.0))

    def query_losses(self, block):
        near = ((block.scores - self.a) ** 2 * block.relevant).sum(1) / block.relevant.sum(1)
        return near + ((self.b * block.scores).exp() * block.candidate).sum(1) / block.candidate.sum(1)


def dense(loss, embeddings, labels, ref_emb=None, ref_labels=None, ids=None, ref_ids=None):
    """`Toy` of the whole matrix at once with plain autograd, each query's value; NaN without a positive."""
    x = embeddings / embeddings.norm(dim=1, keepdim=True)
    r = x if ref_emb is None else ref_emb / ref_emb.norm(dim=1, keepdim=True)
    candidate = (
        ~torch.eye(len(x), dtype=torch.bool) if ref_emb is None else torch.ones(len(x), len(r), dtype=torch.bool)
    )
    if ids is not None:
        candidate = candidate & (ids[:, None] != (ids if ref_ids is None else ref_ids))
    relevant = candidate & (labels[:, None] == (labels if ref_labels is None else ref_labels))
    scores = x @ r.T
    near = ((scores - loss.a) ** 2 * relevant).sum(1) / relevant.sum(1).clamp(min=1)
    each = near + ((loss.b * scores).exp() * candidate).sum(1) / candidate.sum(1)
    return torch.where(relevant.any(1), each, math.nan)


@pytest.mark.parametrize("cls", LOSSES)
def test_half_precision_under_autocast(cls):
    net = nn.Linear(16, 8)
    images, labels = torch.randn(24, 16), torch.arange(24) % 6
    loss = cls()
    expected = loss(net(images), labels)
    expected.backward()
    gradient, net.weight.grad = net.weight.grad, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = net(images)
        assert x.dtype == torch.bfloat16
        value = loss(x, labels)
    assert value.dtype == torch.float32
    value.backward()
    # The loss of half-precision embeddings is that of the same numbers in float32, to the last digit.
    assert torch.equal(value, loss(x.detach().float(), labels))
    assert torch.isfinite(net.weight.grad).all()
    # bf16 keeps 8 bits of each coordinate; at tau 0.01 a score's error of 2^-9 moves a sigmoid by about a tenth.
    assert value.item() == pytest.approx(expected.item(), abs=0.05)
    assert torch.cosine_similarity(net.weight.grad.flatten(), gradient.flatten(), dim=0) > 0.8


@pytest.mark.parametrize("cls", LOSSES)
def test_autocast_does_not_narrow(cls):
    x, labels = batch([4, 4, 3], dtype=torch.float32)
    for loss in (cls(), cls(reduction="none")):
        expected = value_and_gradient(loss, x, labels)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # backward too: where "none" computes again
            inside = value_and_gradient(loss, x, labels)
        assert torch.equal(inside[0], expected[0])
        assert torch.equal(inside[1], expected[1])


@pytest.mark.parametrize("cls", LOSSES)
def test_batch_without_any_positive(cls):
    for reduction in ("mean", "sum", "none"):
        loss = cls(reduction=reduction)
        x, labels = torch.randn(5, 3, requires_grad=True), torch.arange(5)
        with pytest.warns(UserWarning, match=cls.__name__):
            value = loss(x, labels)
        if reduction == "none":
            assert value.isnan().all()
        else:
            assert value.item() == 0.0
        value.sum().backward()
        assert x.grad.tolist() == torch.zeros(5, 3).tolist()


@pytest.mark.parametrize("elements", [1, 25, 1 << 20])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_against_the_whole_matrix(reduction, elements):
    loss = Toy(reduction=reduction).double()
    x, labels = batch([3, 1, 4, 2])
    r, ref_labels = batch([2, 2, 5])
    ids, ref_ids = torch.arange(10), torch.tensor([3, 20, 1, 0, 21, 22, 9, 9, 23])
    repeated = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7, 0])  # an image twice in one batch
    factor = torch.arange(1.0, 11.0, dtype=torch.float64) if reduction == "none" else 1.0
    for keywords in (
        {},
        {"ids": repeated},
        {"ref_emb": r, "ref_labels": ref_labels},
        {"ref_emb": r, "ref_labels": ref_labels, "ids": ids, "ref_ids": ref_ids},
    ):
        results = []
        for compute in (loss, lambda *args, **kwargs: dense(loss, *args, **kwargs)):
            leaf, refs = x.clone().requires_grad_(), r.clone().requires_grad_()
            wanted = [leaf, loss.a, loss.b, loss.unused]
            given = dict(keywords)
            if "ref_emb" in keywords:
                given["ref_emb"] = refs
                wanted.append(refs)
            with small_blocks(elements):
                value = compute(leaf, labels, **given)
                if compute is not loss and reduction != "none":
                    value = value.nanmean() if reduction == "mean" else value.nansum()
                total = (value * factor)[~value.isnan()].sum()
                gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
            results.append((value.detach(), *gradients))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_parameters_of_the_loss_learn_also_where_embeddings_do_not():
    loss = Toy()
    x, labels = batch([3, 3], dtype=torch.float32)
    loss(x, labels).backward()
    assert loss.a.grad is not None
    assert loss.b.grad.abs() > 0
    loss.a.requires_grad_(False)
    loss.a.grad = loss.b.grad = None
    loss(x.requires_grad_(), labels).backward()
    assert loss.a.grad is None
    assert loss.b.grad.abs() > 0
    assert x.grad.abs().sum() > 0


def test_only_the_input_that_requires_a_gradient_gets_one():
    (x, labels), (r, ref_labels) = batch([2, 3]), batch([3, 4, 1])
    for leaf, other in ((x, r), (r, x)):
        other.requires_grad_(False)
        leaf.requires_grad_(True)
        SmoothAPLoss(tau=0.3, reduction="none")(x, labels, r, ref_labels).sum().backward()
        assert leaf.grad.abs().sum() > 0
        assert other.grad is None
        leaf.grad = None


def test_none_is_nan_without_a_positive_and_its_gradient_is_not():
    loss = SmoothAPLoss(tau=0.2, reduction="none")
    x, labels = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([1, 1, 2, 3, 1])
    each = loss(x, labels)
    assert each.isnan().tolist() == [False, False, True, True, False]
    known = ~each.isnan()
    # Weights that arrive with the gradient: of the third query a NaN that must not spread.
    weights = torch.tensor([1.0, 2.0, math.nan, 5.0, -0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(each, x, weights)
    (expected,) = torch.autograd.grad((loss(x, labels) * weights)[known].sum(), x)
    torch.testing.assert_close(gradient, expected)
    assert torch.isfinite(gradient).all()


def test_class_balanced_by_hand():
    x, labels = torch.randn(7, 3, dtype=torch.float64), torch.tensor([5, 5, 5, 5, -2, -2, 9])
    each = SmoothAPLoss(tau=0.2, reduction="none")(x, labels)
    # Class 5 has four queries, class -2 two, class 9 none: each of the two weighs one half.
    expected = each[:4].mean() / 2 + each[4:6].mean() / 2
    value = SmoothAPLoss(tau=0.2, class_balanced=True)(x, labels)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    # 1/4 and 1/2, rescaled to mean 1 over the six queries: 3/4 and 3/2.
    balanced = SmoothAPLoss(tau=0.2, class_balanced=True, reduction="none")(x, labels)
    torch.testing.assert_close(balanced[:4], 0.75 * each[:4])
    torch.testing.assert_close(balanced[4:6], 1.5 * each[4:6])
    assert balanced[6].isnan()
    total = SmoothAPLoss(tau=0.2, class_balanced=True, reduction="sum")(x, labels)
    assert total.item() == pytest.approx(6 * value.item(), abs=1e-12)


def test_reference_rows_may_be_none_at_all():
    x, labels = batch([2, 2], dim=3)
    with pytest.warns(UserWarning, match="SmoothAPLoss"):
        value = SmoothAPLoss()(x, labels, torch.zeros(0, 3, dtype=x.dtype), torch.zeros(0, dtype=torch.int64))
    assert value.item() == 0.0


def test_zero_embeddings_have_a_finite_gradient():
    value, gradient = value_and_gradient(SmoothAPLoss(), torch.zeros(6, 4), torch.arange(6) % 2)
    # All scores are 0: the two positives of five rank 3, and 1.5 among themselves.
    assert value.item() == pytest.approx(1 - 1.5 / 3)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e37])
def test_embeddings_whose_squares_overflow_or_vanish(scale):
    x, labels = batch([4, 4, 3], dtype=torch.float32)
    assert SmoothAPLoss(0.1)(x * scale, labels).item() == pytest.approx(SmoothAPLoss(0.1)(x, labels).item(), rel=1e-5)


def test_no_tensor_as_large_as_the_score_matrix_of_a_large_batch():
    x = torch.randn(4352, 8).requires_grad_()
    labels = torch.arange(4352) % 2176
    with LargestTensor() as largest:
        SmoothAPLoss(reduction="none")(x, labels).sum().backward()
    assert largest.elements < 0.9 * 4352**2


def peak_of_a_large_batch(rank, world_size):
    """The bytes by which a step raises the peak of the memory."""
    import resource

    unit = 1024 if sys.platform == "linux" else 1
    x, labels = torch.randn(4096, 512, requires_grad=True), torch.arange(1024).repeat_interleave(4)
    loss = SmoothAPLoss()
    loss(x[:64], labels[:64]).backward()
    x.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss(x, labels).backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


@pytest.mark.slow
def test_memory_of_a_large_batch(run_alone):
    # Measured: 0.11 GB. All queries at once need 1 GB, one (B, B, B) tensor 275 GB.
    assert run_alone(peak_of_a_large_batch) < 0.4e9
