"""Log rank: numbers of 50 digits, a case worked by hand, the bound, its limits, and its softplus."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from lightning_retrieval.losses import BlackboxRecallLoss, LogRankLoss, SmoothAPLoss
from tests.lightning_retrieval.losses.oracles import LABELS, log_rank

SCORES = [[0.9, 0.8, 0.7, -0.2, 0.65], [0.1, 0.55, 0.5, 0.5, -0.9]]
RELEVANT = [[True, False, True, False, False], [False, True, False, False, True]]
# tau, lambda, c, value and gradient of `SCORES`: the formula in mpmath with 50 digits, and its central differences.
GOLDEN = [
    (
        0.01,
        1.0,
        1.0,
        2.953627800682967,
        [
            [-0.251637275265731, 2.33799990719323, -2.60200026914766, 1.91450546580941e-39, 0.0156376372201603],
            [0.0656696874770448, -0.723610279705027, 0.302474827329559, 0.302474827329559, -0.447009062431134],
        ],
    ),
    (
        0.1,
        0.0,
        1.0,
        1.65357199992654,
        [
            [-0.79427679118648, 1.35627387721187, -1.11738944778997, 0.000162830501522211, 0.555229531263056],
            [0.0812311308574699, -1.15905951085125, 0.635828938113591, 0.635828938113591, -0.193829496233404],
        ],
    ),
    (
        0.03,
        3.0,
        1.0,
        3.931977196895455,
        [
            [-1.1468012735871, 2.29420851595051, -2.96280167626345, 1.85515012472995e-13, 0.315394433899855],
            [0.065433872032217, -3.29803123377629, 1.33944580925112, 1.33944580925112, -0.946294256758168],
        ],
    ),
    (
        0.02,
        1.0,
        10.0,
        4.063691154021264,
        [
            [-1.35092126186526, 3.50894730712641, -2.84258477921233, 6.96259486230338e-20, 0.184558733951176],
            [0.0657654908085034, -8.60096014249926, 4.241245548089, 4.241245548089, -0.447296444487247],
        ],
    ),
]


@pytest.mark.parametrize(("tau", "lambda_", "c", "value", "gradient"), GOLDEN)
def test_golden(tau, lambda_, c, value, gradient):
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    loss = LogRankLoss(tau, lambda_=lambda_, negative_weight=c).from_scores(scores, torch.tensor(RELEVANT))
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-14)
    torch.testing.assert_close(scores.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-11, atol=1e-15)


def test_by_hand():
    # A positive of score .5 and negatives of .5, which counts 1, and of .7: x = 2, ln(1 + e^2) / ln 2 = 3.068508.
    # So the loss is ln(1 + 1 + 3.068508) + 2 (1 - .5).
    scores, relevant = torch.tensor([[0.5, 0.5, 0.7, 0.9]]), torch.tensor([[True, False, False, False]])
    candidate = torch.tensor([[True, True, True, False]])
    value = LogRankLoss(tau=0.1, lambda_=2.0).from_scores(scores, relevant, candidate)
    assert value.item() == pytest.approx(math.log(5.068508) + 1, abs=1e-6)


@settings(deadline=None, max_examples=10)
@given(
    labels=LABELS,
    seed=st.integers(0, 10**6),
    tau=st.sampled_from([0.001, 0.01, 0.1, 1.0]),
    c=st.sampled_from([1.0, 10.0]),
)
def test_is_an_upper_bound_of_minus_log_ap(labels, seed, tau, c):
    x = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    labels = torch.tensor(labels)
    x = torch.nn.functional.normalize(x)
    values = LogRankLoss(tau, lambda_=0.0, negative_weight=c, reduction="none")(x, labels)
    for q in values.isfinite().nonzero().flatten().tolist():
        others = torch.arange(len(x)) != q
        ap = average_precision_score(labels[others] == labels[q], (x @ x[q])[others])
        assert values[q].item() >= -math.log(ap) - 1e-12


def test_ties_count_one():
    """softplus(0) / ln 2 is 1: negatives that tie with the positive are counted exactly, however many there are."""
    scores, relevant = torch.full((1, 2000), 0.3), torch.arange(2000)[None] == 0
    exact = BlackboxRecallLoss(margin=0.0).from_scores(scores, relevant)
    assert LogRankLoss(lambda_=0.0).from_scores(scores, relevant).item() == pytest.approx(exact.item())


def test_a_positive_is_pulled_by_its_distance_whatever_its_rank():
    """The gradient is close to -1 / d for 10 and for 1,000 negatives that are above by d; Smooth-AP has none."""
    for negatives in (10, 1000):
        scores = torch.full((1, negatives + 1), 0.7, dtype=torch.float64)
        scores[0, 0] = 0.5
        relevant = torch.arange(negatives + 1)[None] == 0
        pulls = []
        for loss in (LogRankLoss(lambda_=0.0), SmoothAPLoss()):
            leaf = scores.clone().requires_grad_()
            loss.from_scores(leaf, relevant).backward()
            pulls.append(-leaf.grad[0, 0].item())
        assert pulls[0] == pytest.approx(1 / 0.2, rel=0.01)
        assert pulls[1] < 1e-6


def test_diverges_slowly_for_small_tau():
    """Dividing tau by 1,000 adds log(1,000) if negatives are far above the only positive."""
    scores, relevant = torch.tensor([[0.2, 0.9, 0.8]]), torch.tensor([[True, False, False]])
    values = [LogRankLoss(tau).from_scores(scores, relevant).item() for tau in (1e-4, 1e-7)]
    assert values[1] - values[0] == pytest.approx(math.log(1000), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores(dtype):
    scores, relevant = torch.tensor(SCORES).to(dtype), torch.tensor(RELEVANT)
    leaf, exact = scores.clone().requires_grad_(), scores.double().requires_grad_()
    for x in (leaf, exact):
        LogRankLoss().from_scores(x, relevant).backward()
    value, expected = LogRankLoss().from_scores(leaf, relevant), LogRankLoss().from_scores(exact, relevant)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("length", [2, 3, 5, 32, 33, 34, 100])
def test_lists_of_any_length_against_loops(length):
    scores = torch.randn(4, length, dtype=torch.float64) / 10
    relevant = torch.zeros(4, length, dtype=torch.bool)
    relevant[:, 0] = True
    scores[0, 1] = scores[0, 0]
    scores[1, 1] = scores[1, 0] - 100
    expected = [log_rank(of_query, [1] + [0] * (length - 1), 0.01) for of_query in scores.tolist()]
    found = LogRankLoss(0.01, reduction="none").from_scores(scores, relevant)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("negatives", [5, 4096])
def test_a_large_weight_of_negatives_far_below_is_exact_in_float32(negatives):
    """Each of them counts 2e-8, which is less than the rounding of 1."""
    scores, relevant = torch.full((1, 1 + negatives), 0.725), torch.arange(1 + negatives)[None] == 0
    scores[0, 0] = 0.9
    values, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        leaf = scores.detach().to(dtype, copy=True).requires_grad_()
        value = LogRankLoss(lambda_=0.0, negative_weight=1e6).from_scores(leaf, relevant)
        value.backward()
        values.append(value.item())
        gradients.append(leaf.grad.double())
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=0)


def test_gradient_of_softplus_counts():
    scores = torch.randn(3, 40, dtype=torch.float64)
    relevant = torch.rand(3, 40) < 0.3
    relevant[:, 0] = True
    loss = LogRankLoss(0.5, reduction="none")
    assert torch.autograd.gradcheck(lambda s: loss.from_scores(s, relevant), scores.requires_grad_())
