"""What all losses share, tested on a formula of one line (`Toy`) and on every loss of the package."""

import inspect
import math
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_retrieval import losses
from lightning_retrieval.losses import RetrievalLoss, SmoothAPLoss, blockwise, lists, positives
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.losses.positives import ScoreBlock, joined
from tests.lightning_retrieval.losses.oracles import batch, value_and_gradient

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


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation gives back."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


class Multiplications(TorchDispatchMode):
    """Counts the multiplications in products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:]
            self.count += left.numel() * right.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast(cls, dtype):
    net = nn.Linear(16, 8)
    images, labels = torch.randn(24, 16), torch.arange(24) % 6
    loss = cls()
    expected = loss(net(images), labels)
    expected.backward()
    gradient, net.weight.grad = net.weight.grad, None
    with torch.autocast("cpu", dtype=dtype):
        x = net(images)
        assert x.dtype == dtype
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
        with pytest.warns(UserWarning, match=rf"{cls.__name__}: no row of the batch has a positive"):
            value = loss(x, labels)
        if reduction == "none":
            assert value.isnan().all()
        else:
            assert value.item() == 0.0
        value.sum().backward()
        assert x.grad.tolist() == torch.zeros(5, 3).tolist()


@pytest.mark.parametrize(("elements", "group"), [(1, 1), (25, 50), (60, 1 << 24), (1 << 21, 1 << 24)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_against_the_whole_matrix(reduction, elements, group, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(blockwise, "GROUP_ELEMENTS", group)
    loss = Toy(reduction=reduction).double()
    x, labels = batch([3, 1, 4, 2])
    r, ref_labels = batch([2, 2, 5])
    ids, ref_ids = torch.arange(10), torch.tensor([3, 20, 1, 0, 21, 22, 9, 9, 23])
    repeated = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 7, 0])  # an image twice in one batch
    for keywords in (
        {},
        {"ids": repeated},
        {"ref_emb": r, "ref_labels": ref_labels},
        {"ref_emb": r, "ref_labels": ref_labels, "ids": ids, "ref_ids": ref_ids},
    ):
        results = []
        for compute in (loss, lambda *args, **kwargs: dense(loss, *args, **kwargs)):
            leaf, refs = x.clone().requires_grad_(), r.clone().requires_grad_()
            given_ = {**keywords, "ref_emb": refs} if "ref_emb" in keywords else keywords
            value = compute(leaf, labels, **given_)
            if compute is not loss and reduction == "mean":
                value = value[~value.isnan()].mean()
            if compute is not loss and reduction == "sum":
                value = value[~value.isnan()].sum()
            factor = torch.arange(1.0, 11.0, dtype=torch.float64) if reduction == "none" else 1.0
            known = ~value.isnan()
            wanted = [leaf, refs, loss.a, loss.b, loss.unused] if "ref_emb" in keywords else [leaf, loss.a, loss.b]
            total = (value * factor)[known].sum() if reduction == "none" else value
            results.append((value.detach(), torch.autograd.grad(total, wanted, allow_unused=True)))
        (value, gradients), (expected, expected_gradients) = results
        torch.testing.assert_close(value, expected, equal_nan=True)
        for gradient, wanted_gradient in zip(gradients, expected_gradients):
            if wanted_gradient is None:  # a parameter that the formula does not use
                assert not gradient.any()
            else:
                torch.testing.assert_close(gradient, wanted_gradient)


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
    with pytest.warns(UserWarning, match="no row of the batch has a positive"):
        value = SmoothAPLoss()(x, labels, torch.zeros(0, 3, dtype=x.dtype), torch.zeros(0, dtype=torch.int64))
    assert value.item() == 0.0


def test_zero_embeddings_have_a_finite_gradient():
    value, gradient = value_and_gradient(SmoothAPLoss(), torch.zeros(6, 4), torch.arange(6) % 2)
    # All scores are 0: the two positives of five rank 3, and 1.5 among themselves.
    assert value.item() == pytest.approx(1 - 1.5 / 3)
    assert torch.isfinite(gradient).all()


def test_no_tensor_as_large_as_the_score_matrix_of_a_large_batch():
    x = torch.randn(4352, 8).requires_grad_()
    labels = torch.arange(4352) % 2176
    with Largest() as largest:
        SmoothAPLoss(reduction="none")(x, labels).sum().backward()
    assert largest.elements <= blockwise.GROUP_ELEMENTS < 4352**2


@pytest.mark.parametrize(("group", "products"), [(1 << 24, 2), (64 * 96, 2), (32 * 96, 3)])
def test_the_gradient_of_a_whole_batch_is_one_product(group, products, monkeypatch):
    monkeypatch.setattr(blockwise, "GROUP_ELEMENTS", group)
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 16 * 64)
    x = torch.randn(64, 32).requires_grad_()
    with Multiplications() as multiplications:
        SmoothAPLoss()(x, torch.arange(64) // 2).backward()
    assert multiplications.count == products * 64 * 64 * 32


@pytest.mark.parametrize("size", [1, 3, 8, 21])
def test_a_matrix_is_added_to_its_transpose_tile_by_tile(size, monkeypatch):
    monkeypatch.setattr(lists, "CPU_TILE", 8)
    matrix = torch.randn(size, size)
    expected = matrix + matrix.T
    assert torch.equal(lists.add_transposed(matrix), expected)


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


X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
MASK = torch.tensor([[True, False, False], [False, True, True]])


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "args", "kwargs"),
    [
        (ValueError, r"`embeddings` must have shape .* got \(4,\)", (X[:, 0], Y), {}),
        (ValueError, r"`labels` must have shape \(4,\), .* got \(3,\)", (X, Y[:3]), {}),
        (ValueError, r"`ids` must have shape \(4,\), .* got \(2,\)", (X, Y), {"ids": Y[:2]}),
        (ValueError, "`ref_emb` was given without `ref_labels`", (X, Y, X), {}),
        (ValueError, "`ref_labels` was given without `ref_emb`", (X, Y, None, Y), {}),
        (ValueError, "`ref_ids` was given without `ref_emb`", (X, Y), {"ref_ids": Y}),
        (ValueError, "`ids` was given without `ref_ids`", (X, Y, X, Y), {"ids": Y}),
        (ValueError, r"`ref_emb` must have .* got \(4, 2\) against \(4, 3\)", (X, Y, X[:, :2], Y), {}),
        (ValueError, r"`ref_ids` must have shape \(4,\), .* got \(3,\)", (X, Y, X, Y), {"ids": Y, "ref_ids": Y[:3]}),
        (TypeError, "`ref_emb` must be a tensor, got a tuple of 4, .* no miner", (X, Y, (Y, Y, Y, Y)), {}),
    ],
)
def test_bad_input(error, match, args, kwargs):
    with pytest.raises(error, match=f"^SmoothAPLoss: {match}"):
        SmoothAPLoss()(*args, **kwargs)


@pytest.mark.refusal
def test_bad_scores():
    with pytest.raises(ValueError, match=r"^SmoothAPLoss: `candidate` must have .* \(2, 3\), got \(3, 2\)"):
        SmoothAPLoss().from_scores(torch.randn(2, 3), MASK, MASK.T)
    with pytest.raises(ValueError, match="SmoothAPLoss: `class_balanced` needs labels, which a score matrix does not"):
        SmoothAPLoss(class_balanced=True).from_scores(torch.randn(2, 3), MASK)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("cls", "hint"),
    [(SmoothAPLoss, "pass tau="), (losses.RecallAtKLoss, "pass tau_rank="), (losses.FastAPLoss, "remove the argument")],
)
def test_temperature_gets_a_hint(cls, hint):
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: got `temperature`, .*{hint}\."):
        cls(temperature=0.1)


def test_a_loss_without_a_value_says_what_to_implement():
    class Unfinished(BatchLoss):
        pass

    with pytest.raises(NotImplementedError, match=r"^Unfinished: a loss must implement `of_batch`\.$"):
        Unfinished()(torch.randn(2, 3), torch.tensor([0, 0]))


LEVELS = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8)
LISTED = [(0, 1), (0, 3), (2, 0), (2, 1), (2, 2)]  # query and index of each positive


@pytest.fixture(params=["as on a CPU", "as on an accelerator"])
def kind_of_device(request, monkeypatch):
    on_accelerator = request.param == "as on an accelerator"
    monkeypatch.setattr(positives, "is_accelerator", lambda device: on_accelerator)


def positives_of(mask, counts=None):
    return ScoreBlock(torch.zeros(mask.shape), mask, torch.ones_like(mask, dtype=torch.bool), counts).positives


@pytest.mark.usefixtures("kind_of_device")
@pytest.mark.parametrize("mask", [LEVELS, LEVELS > 0], ids=["levels", "mask"])
@pytest.mark.parametrize("known", [False, True])
def test_positives_come_in_the_order_of_queries_and_references(mask, known):
    found = positives_of(mask, torch.tensor([2, 0, 3]) if known else None)
    assert list(zip(found.query.tolist(), found.index.tolist())) == LISTED
    assert found.counts.tolist() == [2, 0, 3]
    assert found.most == 3
    assert found.column().tolist() == [0, 1, 0, 1, 2]


@pytest.mark.usefixtures("kind_of_device")
def test_pairs_are_all_ordered_pairs_of_positives_of_a_query():
    found = positives_of(LEVELS)
    pairs = [(i, j) for i, (query, _) in enumerate(LISTED) for j, (other, _) in enumerate(LISTED) if query == other]
    assert list(zip(*(part.tolist() for part in found.pairs()))) == pairs


@pytest.mark.usefixtures("kind_of_device")
def test_a_mask_without_positives_has_no_pairs():
    found = positives_of(torch.zeros(2, 3, dtype=torch.bool))
    assert (len(found.query), found.most, len(found.pairs()[0])) == (0, 0, 0)
    assert positives_of(torch.zeros(0, 3, dtype=torch.bool)).most == 0


def test_positives_of_several_lists_are_joined_by_query():
    first, second = positives_of(LEVELS), positives_of(LEVELS.flip(0))
    both, order = joined([first, second])
    assert both.query.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]
    assert order.tolist() == [0, 1, 5, 6, 7, 2, 3, 4, 8, 9]
    assert both.index.tolist() == [1, 3, 0, 1, 2, 0, 1, 2, 1, 3]
    assert both.counts.tolist() == [5, 0, 5]


def test_blocks_are_as_large_as_fits(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 10)
    elements = torch.tensor([4, 4, 4, 20, 1, 9, 1])
    blocks = blockwise.cut_into_blocks(torch.arange(7), elements, elements)
    assert [block.rows.tolist() for block in blocks] == [[0, 1], [2], [3], [4, 5], [6]]
