"""Each loss's formula as loops over Python floats, and the table of losses that the tests of every loss run through.

A formula takes one list, without the non-candidates: the scores `s` and the `level` of relevance of each item (0: not
relevant). It returns the value of the list.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    LogRankLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    SmoothAPLoss,
    SupAPLoss,
)
from lightning_retrieval.losses.batch_loss import ranked_batch
from lightning_retrieval.ranking.lists import QueryRange

# Labels of a batch in which at least one class has two images.
LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=12).filter(lambda labels: len(set(labels)) < len(labels))


def sigma(x):
    """Does not overflow."""
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


def softplus(x):
    """Does not overflow."""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def log_rank(s, level, tau, lambda_=1.0, negative_weight=1.0):
    terms = []
    for i in range(len(s)):
        if level[i]:
            above = sum(softplus((s[j] - s[i]) / tau) for j in range(len(s)) if not level[j]) / math.log(2)
            terms.append(math.log(1 + negative_weight * above) + lambda_ * (1 - s[i]))
    return sum(terms) / len(terms)


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
            rank += upper_step(t, tau, rho, delta, offset, start) if level[j] < level[i] else step
            if slopes and level[j] > level[i]:
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
    """On squared distances, as in the paper: bins of width 4 / L with centres 0, 4 / L, ..., 4."""
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
    """The number of negatives above each positive; ties count against it."""
    s = [value - margin / 2 if grade else value + margin / 2 for value, grade in zip(s, level)]
    return [sum(s[j] >= s[i] for j in range(len(s)) if not level[j]) for i in range(len(s)) if level[i]]


def blackbox_ap(s, level, margin):
    positives = [value for value, grade in zip(s, level) if grade]
    among = [sum(other >= value for other in positives) for value in positives]
    return 1 - sum(a / (a + n) for a, n in zip(among, negatives_above(s, level, margin))) / len(positives)


def blackbox_recall(s, level, margin, weighting="log", batch_memory=0):
    batches = batch_memory + 1
    logs = [math.log(1 + batches * n) for n in negatives_above(s, level, margin)]
    return sum(logs if weighting == "log" else [math.log(1 + x) for x in logs]) / len(logs) / batches


def calibration(s, level, alpha=0.9, beta=0.6):
    near = [max(alpha - value, 0) for value, grade in zip(s, level) if grade]
    far = [max(value - beta, 0) for value, grade in zip(s, level) if not grade]
    return sum(near) / len(near) + (sum(far) / len(far) if far else 0)


def recall_at_k(s, level, ks, tau_rank, tau_k, rows):
    """`rows` is the length of the score matrix's rows, which limits k as in the official code."""
    positives = [i for i in range(len(s)) if level[i]]
    ranks = [1 + sum(sigma((s[j] - s[i]) / tau_rank) for j in range(len(s)) if j != i) for i in positives]
    recalls = []
    for k, tau in zip(ks, tau_k):
        k = min(k, rows)
        recalls.append(min(sum(sigma((k - rank) / tau) for rank in ranks), k) / min(k, len(positives)))
    return 1 - sum(recalls) / len(recalls)


@dataclass(frozen=True)
class LossCase:
    """A loss with some settings: how it is made, its formula, and what is known of it."""

    make: Callable
    formula: Callable
    differentiable: bool = True  # so that gradcheck applies


def case(loss, formula, settings=None, formula_settings=None, **known):
    """`formula_settings` are the settings under the formula's names; those of the loss if None."""
    settings = settings or {}
    formula_settings = settings if formula_settings is None else formula_settings
    return LossCase(functools.partial(loss, **settings), functools.partial(formula, **formula_settings), **known)


OFFICIAL_SUP_AP = {"tau": 0.1, "rho": 20.0, "delta": 0.2, "offset": 1.44, "start": 0.0}
OFFICIAL_SLOPES = (25.0, 0.5, 10.0)
RECALL = {"ks": (1, 2, 30), "tau_rank": 0.05, "tau_k": (1.0, 0.5, 2.0)}
RANKS = {"differentiable": False}

TABLE = {
    "smooth_ap": case(SmoothAPLoss, smooth_ap, {"tau": 0.05}),
    "sup_ap": case(SupAPLoss, sup_ap),
    "sup_ap official": case(SupAPLoss, sup_ap, OFFICIAL_SUP_AP),
    "hap": case(HAPLoss, hap),
    "hap alpha 2": case(HAPLoss, hap, {"alpha": 2.0, "tau": 0.1}),
    "hap slopes": case(HAPLoss, hap, {"hrank_slopes": OFFICIAL_SLOPES}, {"slopes": OFFICIAL_SLOPES}),
    "fast_ap": case(FastAPLoss, fast_ap, {"num_bins": 7}),
    "quantized_ap": case(QuantizedAPLoss, quantized_ap, {"num_bins": 13}, {"bins": 13}),
    "quantized_ap narrow": case(
        QuantizedAPLoss,
        quantized_ap,
        {"num_bins": 5, "low": 0.0, "high": 0.5},
        {"bins": 5, "low": 0.0, "high": 0.5},
    ),
    "quantized_ap simplified": case(
        QuantizedAPLoss, quantized_ap, {"tie_aware": "simplified"}, {"bins": 20, "tie_aware": "simplified"}
    ),
    "quantized_ap full": case(
        QuantizedAPLoss,
        quantized_ap,
        {"num_bins": 4, "tie_aware": "full"},
        {"bins": 4, "tie_aware": "full"},
    ),
    "blackbox_ap": case(BlackboxAPLoss, blackbox_ap, {}, {"margin": 0.02}, **RANKS),
    "blackbox_ap margin": case(BlackboxAPLoss, blackbox_ap, {"margin": 0.3}, **RANKS),
    "blackbox_recall": case(BlackboxRecallLoss, blackbox_recall, {}, {"margin": 0.02}, **RANKS),
    "blackbox_recall loglog": case(
        BlackboxRecallLoss, blackbox_recall, {"margin": 0.0, "weighting": "loglog"}, **RANKS
    ),
    "blackbox_recall memory": case(
        BlackboxRecallLoss, blackbox_recall, {"batch_memory": 4}, {"margin": 0.02, "batch_memory": 4}, **RANKS
    ),
    "calibration": case(CalibrationLoss, calibration),
    "recall_at_k": case(RecallAtKLoss, recall_at_k, RECALL),
    "log_rank": case(LogRankLoss, log_rank, {"tau": 0.05}),
    "log_rank bound": case(LogRankLoss, log_rank, {"tau": 0.01, "lambda_": 0.0, "negative_weight": 10.0}),
}


def make(name, **keywords):
    return TABLE[name].make(**keywords)


def is_graded(name):
    """Whether the loss takes levels of relevance instead of a bool."""
    return name.startswith("hap")


def values_by_loops(name, s, level, candidate):
    """The value of each list by the loss's formula; NaN without a positive."""
    values = []
    for row, levels, listed in zip(s, level, candidate):
        kept = [j for j in range(len(row)) if listed[j]]
        extra = {"rows": len(row)} if name == "recall_at_k" else {}
        kept_levels = [levels[j] for j in kept]
        value = math.nan
        if any(kept_levels):
            value = TABLE[name].formula([row[j] for j in kept], kept_levels, **extra)
        values.append(value)
    return torch.tensor(values, dtype=torch.float64)


def labels_for(name, labels):
    """Two levels if the loss takes them: on the coarse level, classes 0 and 1 are one class, 2 and 3 another."""
    return torch.stack([labels, labels // 2], 1) if is_graded(name) else labels


def batch(sizes, dim=6, dtype=torch.float64):
    """Random embeddings of classes of these sizes, in random order."""
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    return torch.randn(len(labels), dim, dtype=dtype), labels[torch.randperm(len(labels))]


def random_lists(queries, gallery, name, scale=0.4):
    scores = (torch.randn(queries, gallery, dtype=torch.float64) * scale).clamp(-1, 1)
    level = torch.randint(0, 3 if is_graded(name) else 2, (queries, gallery))
    candidate = torch.rand(queries, gallery) < 0.8
    relevant = level if is_graded(name) else level > 0
    return scores, relevant, candidate


def value_and_gradient(loss, x, *args, **kwargs):
    x = x.detach().requires_grad_()
    value = loss(x, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad


def value_at(fraction, loss, x, labels):
    """The value at a fraction of the training, which only a training step gives."""
    return loss.of_batch(ranked_batch(x, labels, fraction=fraction))


def value_of_queries(begin, end, total, loss, *arguments, **keywords):
    """The value of some queries of a batch, as a process computes it; `total` sums a tensor over all processes."""
    return loss(*arguments, queries=QueryRange(begin, end, total), **keywords)


def ranks_by_sorting(scores):
    """The rank of each number of a list, 1 for the highest."""
    order = sorted(range(len(scores)), key=lambda j: -scores[j])
    return [order.index(j) + 1 for j in range(len(scores))]


def blackbox_gradient(scores, relevant, candidate, lambda_, margin, kind):
    """Alg. 1 for the mean over lists: ranks, the gradient at the ranks, and the ranks of the moved scores."""
    gradient = [[0.0] * len(row) for row in scores]
    lists = [q for q in range(len(scores)) if any(r and c for r, c in zip(relevant[q], candidate[q]))]
    for q in lists:
        kept = [j for j in range(len(scores[q])) if candidate[q][j]]
        s = [scores[q][j] + (-margin / 2 if relevant[q][j] else margin / 2) for j in kept]
        positive = [relevant[q][j] for j in kept]
        ranks = ranks_by_sorting(s)
        among = [sum(p and other <= rank for p, other in zip(positive, ranks)) for rank in ranks]
        at_ranks = [0.0] * len(s)
        for i in range(len(s)):
            if positive[i]:
                above = ranks[i] - among[i]
                slope = {
                    "ap": among[i] / ranks[i] ** 2,  # of 1 - among / rank
                    "log": 1 / (1 + above),
                    "loglog": 1 / ((1 + math.log(1 + above)) * (1 + above)),
                }[kind]
                at_ranks[i] = slope / sum(positive) / len(lists)
        # On ranks divided by the length L: the gradient there is L times the one at the ranks.
        moved = ranks_by_sorting([value + lambda_ * len(s) * g for value, g in zip(s, at_ranks)])
        for j, old, new in zip(kept, ranks, moved):
            gradient[q][j] = -(old - new) / (len(s) * lambda_)
    return torch.tensor(gradient, dtype=torch.float64)


def average_precision_losses(scores, labels):
    """1 - AP of each query by scikit-learn."""
    values = []
    for q in range(len(labels)):
        others = torch.arange(len(labels)) != q
        relevant = labels[others] == labels[q]
        values.append(1 - average_precision_score(relevant, scores[q, others]) if relevant.any() else math.nan)
    return torch.tensor(values, dtype=torch.float64)
