"""Each loss against its formula as loops over Python floats, and what is the same for all of them."""

import functools
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torch import nn

from lightning_retrieval import losses
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    blockwise,
)

LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=12).filter(lambda labels: len(set(labels)) < len(labels))


# The formulas: one list (scores, level of relevance of each, 0 for none) without what is no candidate -> its value.


def sigma(x):
    """Without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def upper_step(t, tau, rho, delta, offset, start):
    if t > delta:
        return rho * (t - delta) + (sigma(delta / tau) + start if offset is None else offset)
    return sigma(t / tau) + (start if t > 0 else 0)


def smooth_ap(s, level, tau):
    positives = [i for i in range(len(s)) if level[i]]
    total = 0.0
    for i in positives:
        rank = 1 + sum(sigma((s[j] - s[i]) / tau) for j in range(len(s)) if j != i)
        total += (1 + sum(sigma((s[j] - s[i]) / tau) for j in positives if j != i)) / rank
    return 1 - total / len(positives)


def sup_ap(s, level, tau=0.01, rho=100.0, delta=0.05, offset=None, start=0.5):
    positives = [i for i in range(len(s)) if level[i]]
    total = 0.0
    for i in positives:
        among = sum(s[j] >= s[i] for j in positives)
        negatives = sum(upper_step(s[j] - s[i], tau, rho, delta, offset, start) for j in range(len(s)) if not level[j])
        total += among / (among + negatives)
    return 1 - total / len(positives)


def hap(s, level, alpha=1.0, tau=0.01, rho=100.0, delta=0.05, offset=None, start=0.5, slopes=None):
    rel = [(grade**alpha / level.count(grade) if grade else 0.0) for grade in level]
    total = 0.0
    for i in range(len(s)):
        if not level[i]:
            continue
        rank = hrank = 0.0
        for j in range(len(s)):
            t = s[j] - s[i]
            step = float(t >= 0)
            rank += upper_step(t, tau, rho, delta, offset, start) if rel[j] < rel[i] else step
            if slopes and rel[j] > rel[i]:
                step = min(slopes[0] * t + slopes[1], 1) if t > 0 else slopes[2] * t
            hrank += min(rel[i], rel[j]) * step
        total += hrank / rank
    return 1 - total / sum(rel)


def histogram(values, bins, low, high):
    width, h = (high - low) / (bins - 1), [0.0] * bins
    for value in values:
        value = min(max(value, low), high)
        for m in range(bins):
            h[m] += max(0.0, 1 - abs(value - (high - m * width)) / width)
    return h


def quantized_ap(s, level, bins, low=-1.0, high=1.0, tie_aware=False):
    h = histogram(s, bins, low, high)
    h_pos = histogram([value for value, grade in zip(s, level) if grade], bins, low, high)
    total = 0.0
    for m in range(bins):
        before, before_pos, c, c_pos = sum(h[:m]), sum(h_pos[:m]), h[m], h_pos[m]
        if c < 1e-12:
            continue
        if tie_aware == "simplified":
            total += c_pos * (2 * before_pos + c_pos + 1) / (2 * before + c + 1)
        elif tie_aware == "full":
            r = max(c_pos - 1, 0) / (c - 1) if c > 1 else 0.0
            logarithm = math.log((before + c + 1) / (before + 1))
            total += c_pos * (c * r + (before_pos + 1 - r * (before + 1)) * logarithm) / c
        else:
            total += c_pos * (before_pos + c_pos) / (before + c)
    return 1 - total / sum(h_pos)


def fast_ap(s, level, num_bins):
    """On squared distances, as the paper has it: bins of 4 / L around 0, 4 / L, ..., 4."""
    distances, width = [2 - 2 * value for value in s], 4 / num_bins
    h, h_pos = [0.0] * (num_bins + 1), [0.0] * (num_bins + 1)
    for d, grade in zip(distances, level):
        for m in range(num_bins + 1):
            weight = max(0.0, 1 - abs(d - m * width) / width)
            h[m] += weight
            h_pos[m] += weight * bool(grade)
    terms = [sum(h_pos[: m + 1]) * h_pos[m] / sum(h[: m + 1]) for m in range(num_bins + 1) if sum(h[: m + 1]) > 0]
    return 1 - sum(terms) / sum(map(bool, level))


def negatives_above(s, level, margin):
    """Of each positive; ties count against it."""
    s = [value - margin / 2 if grade else value + margin / 2 for value, grade in zip(s, level)]
    return [sum(s[j] >= s[i] for j in range(len(s)) if not level[j]) for i in range(len(s)) if level[i]]


def blackbox_ap(s, level, margin):
    positives = [value for value, grade in zip(s, level) if grade]
    among = [sum(other >= value for other in positives) for value in positives]
    return 1 - sum(a / (a + n) for a, n in zip(among, negatives_above(s, level, margin))) / len(positives)


def blackbox_recall(s, level, margin, weighting="log"):
    logs = [math.log(1 + n) for n in negatives_above(s, level, margin)]
    return sum(logs if weighting == "log" else [math.log(1 + x) for x in logs]) / len(logs)


def calibration(s, level, alpha=0.9, beta=0.6):
    near = [max(alpha - value, 0) for value, grade in zip(s, level) if grade]
    far = [max(value - beta, 0) for value, grade in zip(s, level) if not grade]
    return sum(near) / len(near) + (sum(far) / len(far) if far else 0)


def recall_at_k(s, level, ks, tau_rank, tau_k, rows):
    """`rows`: the length of the matrix's rows, which caps k as in the official code."""
    positives = [i for i in range(len(s)) if level[i]]
    ranks = [1 + sum(sigma((s[j] - s[i]) / tau_rank) for j in range(len(s)) if j != i) for i in positives]
    recalls = []
    for k, tau in zip(ks, tau_k):
        k = min(k, rows)
        recalls.append(min(sum(sigma((k - rank) / tau) for rank in ranks), k) / min(k, len(positives)))
    return 1 - sum(recalls) / len(recalls)


# name: how the loss is made, its formula, whether it is smooth, whether its value lies in [0, 1].
TABLE = {
    "smooth_ap": (functools.partial(SmoothAPLoss, 0.05), functools.partial(smooth_ap, tau=0.05), True, True),
    "sup_ap": (SupAPLoss, sup_ap, True, True),
    "sup_ap official": (
        functools.partial(SupAPLoss, 0.1, 20.0, 0.2, 1.44, 0.0),
        functools.partial(sup_ap, tau=0.1, rho=20.0, delta=0.2, offset=1.44, start=0.0),
        True,
        True,
    ),
    "hap": (HAPLoss, hap, True, True),
    "hap alpha 2": (functools.partial(HAPLoss, 2.0, 0.1), functools.partial(hap, alpha=2.0, tau=0.1), True, True),
    "hap slopes": (
        functools.partial(HAPLoss, hrank_slopes=(25.0, 0.5, 10.0)),
        functools.partial(hap, slopes=(25.0, 0.5, 10.0)),
        True,
        False,
    ),
    "fast_ap": (functools.partial(FastAPLoss, 7), functools.partial(fast_ap, num_bins=7), True, True),
    "quantized_ap": (functools.partial(QuantizedAPLoss, 13), functools.partial(quantized_ap, bins=13), True, True),
    "quantized_ap narrow": (
        functools.partial(QuantizedAPLoss, 5, 0.0, 0.5),
        functools.partial(quantized_ap, bins=5, low=0.0, high=0.5),
        True,
        True,
    ),
    "quantized_ap simplified": (
        functools.partial(QuantizedAPLoss, tie_aware="simplified"),
        functools.partial(quantized_ap, bins=20, tie_aware="simplified"),
        True,
        True,
    ),
    "quantized_ap full": (
        functools.partial(QuantizedAPLoss, 4, tie_aware="full"),
        functools.partial(quantized_ap, bins=4, tie_aware="full"),
        True,
        False,
    ),
    "blackbox_ap": (BlackboxAPLoss, functools.partial(blackbox_ap, margin=0.02), False, True),
    "blackbox_ap margin": (
        functools.partial(BlackboxAPLoss, margin=0.3),
        functools.partial(blackbox_ap, margin=0.3),
        False,
        True,
    ),
    "blackbox_recall": (BlackboxRecallLoss, functools.partial(blackbox_recall, margin=0.02), False, False),
    "blackbox_recall loglog": (
        functools.partial(BlackboxRecallLoss, margin=0.0, weighting="loglog"),
        functools.partial(blackbox_recall, margin=0.0, weighting="loglog"),
        False,
        False,
    ),
    "calibration": (CalibrationLoss, calibration, True, False),
    "recall_at_k": (
        functools.partial(RecallAtKLoss, (1, 2, 30), 0.05, (1.0, 0.5, 2.0)),
        functools.partial(recall_at_k, ks=(1, 2, 30), tau_rank=0.05, tau_k=(1.0, 0.5, 2.0)),
        True,
        True,
    ),
}
ALL = pytest.mark.parametrize("name", TABLE)
SMOOTH = pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row[2]])


def make(name, **keywords):
    return TABLE[name][0](**keywords)


def formula(name, s, level, candidate):
    """The value of each list; NaN without a positive."""
    values = []
    for row, levels, listed in zip(s, level, candidate):
        kept = [j for j in range(len(row)) if listed[j]]
        extra = {"rows": len(row)} if name == "recall_at_k" else {}
        of = [levels[j] for j in kept]
        values.append(TABLE[name][1]([row[j] for j in kept], of, **extra) if any(of) else math.nan)
    return torch.tensor(values, dtype=torch.float64)


def labels_for(name, labels):
    """With two levels where the loss takes them: classes 0 and 1 are one on the coarse level, 2 and 3 another."""
    return torch.stack([labels, labels // 2], 1) if name.startswith("hap") else labels


def batch(sizes, dim=6, dtype=torch.float64):
    """Random embeddings of classes of these sizes, in random order."""
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    return torch.randn(len(labels), dim, dtype=dtype), labels[torch.randperm(len(labels))]


def scores_and_masks(queries, gallery, name, scale=0.4):
    scores = (torch.randn(queries, gallery, dtype=torch.float64) * scale).clamp(-1, 1)
    level = torch.randint(0, 3 if name.startswith("hap") else 2, (queries, gallery))
    candidate = torch.rand(queries, gallery) < 0.8
    relevant = level if name.startswith("hap") else level > 0
    return scores, relevant, candidate


def value_and_gradient(loss, x, *args, **kwargs):
    x = x.detach().requires_grad_()
    value = loss(x, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad


def check_lists(name, scores, relevant, candidate):
    each = make(name, reduction="none").from_scores(scores, relevant, candidate)
    expected = formula(name, scores.tolist(), relevant.int().tolist(), candidate.tolist())
    torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-7 if "full" in name else 1e-10, equal_nan=True)
    known = expected[~expected.isnan()]
    value = make(name).from_scores(scores, relevant, candidate)
    assert value.item() == pytest.approx(known.mean().item(), abs=1e-7)


def test_the_table_has_every_loss():
    made = {type(make(name)).__name__ for name in TABLE}
    other = {"BlackboxMAPLoss", "PairLoss", "RetrievalLoss", "ROADMAPLoss", "WeightedSum", "blackbox_rank"}
    assert made | other == set(losses.__all__)


@ALL
def test_scores_against_loops(name):
    for _ in range(4):
        check_lists(name, *scores_and_masks(7, 11, name))


@ALL
def test_awkward_lists(name):
    """All negative scores, one positive, positives only, none, and ties that binary fractions make exact."""
    scores, relevant, candidate = scores_and_masks(6, 9, name)
    scores[1] = -scores[1].abs() - 0.01
    relevant[2] = 0
    relevant[2, 3] = 1
    candidate[2, 3] = True
    relevant[3] = 1
    relevant[4] = 0
    # Between a positive and a negative, SupAP counts a tie one half.
    scores[5] = torch.tensor([0.25, 0.25, 0.25, -0.5, -0.5, 0.0, 0.0, 0.75, 0.75])
    check_lists(name, scores, relevant, candidate)


@ALL
def test_embeddings_against_loops(name):
    """Unequal classes and a singleton, in the batch and against references, each query's own copy left out."""
    x, labels = batch([1, 2, 4, 3])
    r, ref_labels = batch([2, 0, 3, 5])
    ids, ref_ids = torch.arange(10), torch.tensor([3, 20, 1, 0, 21, 22, 9, 9, 23, 24])
    y, z = labels_for(name, labels), labels_for(name, ref_labels)
    for others, ref, ref_y, keywords, known in (
        ((), x, labels, {}, ~torch.eye(10, dtype=torch.bool)),
        ((r, z), r, ref_labels, {"ids": ids, "ref_ids": ref_ids}, ids[:, None] != ref_ids),
    ):
        fine = labels[:, None] == ref_y
        level = fine.int() + (labels[:, None] // 2 == ref_y // 2) if name.startswith("hap") else fine.int()
        level = level * known
        scores = nn.functional.normalize(x) @ nn.functional.normalize(ref).T
        expected = formula(name, scores.tolist(), level.tolist(), known.tolist())
        each = make(name, reduction="none")(x, y, *others, **keywords)
        torch.testing.assert_close(each, expected, rtol=1e-8, atol=1e-7 if "full" in name else 1e-9, equal_nan=True)
        # And the same from the score matrix.
        relevant = level if name.startswith("hap") else level > 0
        from_scores = make(name, reduction="none").from_scores(scores, relevant, known)
        torch.testing.assert_close(from_scores, each, rtol=1e-9, atol=1e-9, equal_nan=True)
        valid = ~expected.isnan()
        for reduction, wanted in (("mean", expected[valid].mean()), ("sum", expected[valid].sum())):
            value = make(name, reduction=reduction)(x, y, *others, **keywords)
            assert value.item() == pytest.approx(wanted.item(), abs=1e-6)
        # Balanced: the mean over classes of the mean over each one's queries.
        classes = [expected[valid & (labels == label)] for label in labels.unique()]
        balanced = torch.stack([values.mean() for values in classes if len(values)]).mean()
        value = make(name, class_balanced=True)(x, y, *others, **keywords)
        assert value.item() == pytest.approx(balanced.item(), abs=1e-6)


@SMOOTH
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(name, reduction):
    x, labels = batch([1, 2, 4], dim=4)
    loss, y = make(name, reduction=reduction, class_balanced=reduction != "none"), labels_for(name, labels)
    level = y.ndim == 2
    known = torch.ones(7, dtype=torch.bool) if level else labels != 0
    if level:
        known = torch.tensor([(labels // 2 == label // 2).sum() > 1 for label in labels])

    def function(x):
        value = loss(x, y)
        return value[known] if reduction == "none" else value

    # SupAP's function has steps and slopes of 1 / tau: a small step of the difference stays on one side of most.
    assert torch.autograd.gradcheck(function, x.requires_grad_(), eps=1e-7, atol=1e-5, rtol=1e-4)


@SMOOTH
def test_gradcheck_with_references(name):
    x, labels = batch([2, 3], dim=4)
    r, ref_labels = batch([3, 4, 1], dim=4)
    arguments = (labels_for(name, labels), labels_for(name, ref_labels))
    ids, ref_ids = torch.arange(5), torch.tensor([9, 1, 8, 0, 7, 3, 6, 5])
    loss = make(name)
    inputs = (x.requires_grad_(), r.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x, r: loss(x, arguments[0], r, arguments[1], ids=ids, ref_ids=ref_ids),
        inputs,
        eps=1e-7,
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("pair_mean", ["all", "nonzero"])
def test_gradcheck_of_means_over_all_pairs(pair_mean):
    x, labels = batch([1, 2, 4], dim=4)
    loss = CalibrationLoss(pair_mean=pair_mean)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), x.requires_grad_())


@pytest.mark.parametrize("elements", [1, 30, 1 << 21])
def test_means_over_all_pairs(elements, monkeypatch):
    """Queries without a positive belong to them too, whatever the blocks."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    x, labels = batch([1, 2, 4, 1])
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    same = labels[:, None] == labels
    near, far = (0.9 - s[pairs & same]).clamp(min=0), (s[pairs & ~same] - 0.6).clamp(min=0)
    value = CalibrationLoss(pair_mean="all")(x, labels)
    assert value.item() == pytest.approx((near.mean() + far.mean()).item(), abs=1e-12)
    value = CalibrationLoss(pair_mean="nonzero")(x, labels)
    assert value.item() == pytest.approx((near[near > 0].mean() + far[far > 0].mean()).item(), abs=1e-12)
    above = torch.tensor([float((s[q, pairs[q] & ~same[q]] >= s[q, i]).sum()) for q, i in (pairs & same).nonzero()])
    value = BlackboxRecallLoss(margin=0.0, pair_mean="all")(x, labels)
    assert value.item() == pytest.approx(above.log1p().mean().item(), abs=1e-6)


def gentle(name):
    """With temperatures at which rounding of the scores shows as itself, not multiplied by 1 / tau = 100."""
    return {
        "sup_ap": SupAPLoss(tau=0.1, rho=10.0),
        "hap": HAPLoss(tau=0.1, rho=10.0),
        "hap slopes": HAPLoss(tau=0.1, rho=10.0, hrank_slopes=(2.0, 0.5, 1.0)),
    }.get(name) or make(name)


@ALL
def test_float32_is_near_float64(name):
    x, labels = batch([3, 4, 2, 5, 1, 4], dim=8)
    x = x.float()
    y = labels_for(name, labels)
    value, gradient = value_and_gradient(make(name), x.double(), y)
    single, single_gradient = value_and_gradient(make(name), x, y)
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(value.item(), abs=1e-5)
    torch.testing.assert_close(single_gradient.double(), gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_autocast(name, dtype):
    x, labels = batch([4] * 8, dim=32, dtype=torch.float32)
    x = x + 2 * torch.randn(8, 32)[labels]  # classes that can be told apart, as in training
    y = labels_for(name, labels)
    net = nn.Linear(32, 16)
    loss = gentle(name)
    expected = loss(net(x), y)
    with torch.autocast("cpu", dtype=dtype):
        value = loss(net(x), y)
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(net.weight.grad).all()
    assert value.item() == pytest.approx(expected.item(), abs=1e-2)


@ALL
@settings(deadline=None, max_examples=15)
@given(labels=LABELS, data=st.data())
def test_order_and_names_do_not_matter(name, labels, data):
    order = torch.tensor(data.draw(st.permutations(range(len(labels)))))
    names = torch.tensor(data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=5, max_size=5, unique=True)))
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    y = labels_for(name, labels)
    renamed = torch.stack([names[y[:, 0]], names[y[:, 1]]], 1) if y.ndim == 2 else names[y]
    for loss in (make(name), make(name, class_balanced=True)):
        value, gradient = value_and_gradient(loss, x, y)
        moved, moved_gradient = value_and_gradient(loss, x[order], renamed[order])
        torch.testing.assert_close(moved, value, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(moved_gradient, gradient[order], rtol=1e-6, atol=1e-8)


@ALL
@settings(deadline=None, max_examples=15)
@given(labels=LABELS, elements=st.integers(1, 300), reduction=st.sampled_from(["mean", "sum", "none"]))
def test_blocks_do_not_matter(name, labels, elements, reduction):
    x, y = torch.randn(len(labels), 4, dtype=torch.float64), labels_for(name, torch.tensor(labels))
    value, gradient = value_and_gradient(make(name, reduction=reduction), x, y)
    with patch.object(blockwise, "BLOCK_ELEMENTS", elements):
        cut, cut_gradient = value_and_gradient(make(name, reduction=reduction), x, y)
    torch.testing.assert_close(cut, value, equal_nan=True)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row[3]])
@settings(deadline=None, max_examples=25)
@given(labels=LABELS, seed=st.integers(0, 10**6))
def test_value_lies_between_0_and_1(name, labels, seed):
    x = torch.randn(len(labels), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    each = make(name, reduction="none")(x, labels_for(name, torch.tensor(labels)))
    each = each[~each.isnan()]
    assert ((each >= -1e-12) & (each <= 1 + 1e-12)).all()


# The full tie-aware form is not 0 for a perfect ranking: a logarithm stands for a harmonic sum.
@pytest.mark.parametrize("name", [name for name in TABLE if name != "quantized_ap full"])
@settings(deadline=None, max_examples=15)
@given(order=st.permutations(range(8)), positives=st.integers(1, 7))
def test_perfect_ranking_has_the_least_value(name, order, positives):
    """Scores on bin centres, far apart for temperature and margin; no other order of them is better."""
    bins = {"fast_ap": 8, "quantized_ap": 13, "quantized_ap narrow": 5}.get(name, 20)
    low, high = (0.0, 0.5) if "narrow" in name else (-1.0, 1.0)
    centres = torch.linspace(high, low, bins, dtype=torch.float64)
    s = centres[torch.linspace(0, bins - 1, 8).round().long()]
    level = torch.arange(8) < positives
    relevant = level.int()[None] if name.startswith("hap") else level[None]
    loss = BlackboxAPLoss(margin=0.0) if name == "blackbox_ap margin" else make(name)
    if name == "calibration":  # a perfect one has its positives above alpha and its negatives below beta
        s = torch.where(level, 0.95, 0.1).double()
    perfect = loss.from_scores(s[None], relevant).item()
    assert perfect <= loss.from_scores(s[torch.tensor(order)][None], relevant).item() + 1e-9
    # 0 but for temperatures near the scores' distance of 0.3, bins that hold several scores, and sigma(0) at rank k.
    if name not in ("smooth_ap", "sup_ap official", "hap alpha 2", "quantized_ap narrow", "fast_ap", "recall_at_k"):
        assert perfect == pytest.approx(0.0, abs=1e-6)


def average_precisions(scores, labels):
    """1 - AP of each query by scikit-learn."""
    values = []
    for q in range(len(labels)):
        others = torch.arange(len(labels)) != q
        relevant = labels[others] == labels[q]
        values.append(1 - average_precision_score(relevant, scores[q, others]) if relevant.any() else math.nan)
    return torch.tensor(values, dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(labels=LABELS, seed=st.integers(0, 10**6), ties=st.booleans())
def test_blackbox_ap_is_ap_and_sup_ap_never_below(labels, seed, ties):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(labels), len(labels), dtype=torch.float64, generator=generator) * 2 - 1
    if ties:
        scores = (scores * 4).round() / 4
    labels = torch.tensor(labels)
    relevant, candidate = labels[:, None] == labels, ~torch.eye(len(labels), dtype=torch.bool)
    expected = average_precisions(scores, labels)
    each = BlackboxAPLoss(margin=0.0, reduction="none").from_scores(scores, relevant, candidate)
    torch.testing.assert_close(each, expected, rtol=0, atol=1e-12, equal_nan=True)
    if not ties:  # sigma(0) is one half, the step at 0 one
        bound = SupAPLoss(reduction="none").from_scores(scores, relevant, candidate)
        assert (bound >= expected - 1e-12)[~expected.isnan()].all()


@settings(deadline=None, max_examples=20)
@given(labels=LABELS, bins=st.integers(2, 30))
def test_relations(labels, bins):
    x, labels = torch.randn(len(labels), 4, dtype=torch.float64), torch.tensor(labels)
    for one, other, y in (
        (FastAPLoss(bins), QuantizedAPLoss(bins + 1, -1, 1), labels),
        (HAPLoss(), SupAPLoss(), labels[:, None]),
        (HAPLoss(0.7, 0.05, 20.0, 0.1, 1.44, 0.2), SupAPLoss(0.05, 20.0, 0.1, 1.44, 0.2), labels[:, None]),
    ):
        value, gradient = value_and_gradient(one, x, y)
        expected, expected_gradient = value_and_gradient(other, x, y)  # levels of one: column 0
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in TABLE if not name.startswith("hap")])
def test_labels_with_levels(name):
    """A loss without levels takes the finest."""
    x, labels = batch([3, 4, 2, 1])
    r, ref_labels = batch([2, 2, 2])
    for keywords in ({}, {"class_balanced": True}):
        loss = make(name, **keywords)
        levels, ref_levels = (torch.stack([y, y * 0, y * 0], 1) for y in (labels, ref_labels))
        assert torch.equal(loss(x, levels), loss(x, labels))
        assert torch.equal(loss(x, levels, r, ref_levels), loss(x, labels, r, ref_labels))


def test_hap_by_hand():
    """One list: a negative at .9, level 2 at .8, level 1 at .7, another level 1 at .2; relevances 2, 1 / 2, 1 / 2."""
    s, levels = torch.tensor([[0.9, 0.8, 0.7, 0.2]], dtype=torch.float64), torch.tensor([[0, 2, 1, 1]])
    beyond = 1 / (1 + math.exp(-5.0)) + 0.5  # H^- at delta; from there on a slope of 100
    rank = [
        1 + (100 * 0.05 + beyond) + 1 / (1 + math.exp(10)) + 1 / (1 + math.exp(60)),
        2 + (100 * 0.15 + beyond),
        3 + (100 * 0.65 + beyond),
    ]
    hrank = [2.0, 0.5 + 0.5, 0.5 + 0.5 + 0.5]
    expected = 1 - sum(h / r for h, r in zip(hrank, rank)) / 3
    assert HAPLoss().from_scores(s, levels).item() == pytest.approx(expected, abs=1e-12)


def test_three_levels():
    labels = torch.tensor([[0, 10, 5], [0, 10, 5], [1, 10, 5], [2, 11, 5], [3, 12, 6], [3, 12, 6]])
    x = torch.randn(6, 4, dtype=torch.float64)
    level = (labels[:, None] == labels[None]).sum(2)
    candidate = ~torch.eye(6, dtype=torch.bool)
    scores = nn.functional.normalize(x) @ nn.functional.normalize(x).T
    expected = formula("hap", scores.tolist(), level.tolist(), candidate.tolist())
    torch.testing.assert_close(HAPLoss(reduction="none")(x, labels), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [*TABLE, "roadmap"])
@pytest.mark.parametrize("how", ["embeddings", "scores"])
def test_nothing_to_learn(name, how):
    """A zero that backward goes through, with one warning."""
    loss = ROADMAPLoss() if name == "roadmap" else make(name)
    x = torch.randn(5, 3, requires_grad=True)
    y = torch.stack([torch.arange(5)] * 2, 1) if name.startswith("hap") else torch.arange(5)
    nothing = torch.zeros(5, 3, dtype=torch.int64 if name.startswith("hap") else torch.bool)
    call, given = (loss, y) if how == "embeddings" else (loss.from_scores, nothing)
    with pytest.warns(UserWarning, match="no row of the batch has a positive, so the loss is 0"):
        value = call(x, given)
    assert value.item() == 0.0
    value.backward()
    assert x.grad.tolist() == torch.zeros(5, 3).tolist()


class Learned(SupAPLoss):
    """A subclass with a parameter of its own, which stretches the scores."""

    def __init__(self, **keywords):
        super().__init__(tau=0.2, **keywords)
        self.stretch = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def query_losses(self, scores, relevant, candidate):
        return super().query_losses(scores * self.stretch, relevant, candidate)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_parameter_of_a_subclass_learns(reduction):
    x, labels = batch([3, 4])
    weights = torch.arange(1.0, 8.0, dtype=torch.float64) if reduction == "none" else 1.0
    loss = Learned(reduction=reduction)
    (loss(x, labels) * weights).sum().backward()
    step, values = 1e-6, []
    for sign in (1, -1):
        moved = Learned(reduction=reduction)
        moved.stretch.data += sign * step
        values.append((moved(x, labels) * weights).sum().item())
    assert loss.stretch.grad.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)
