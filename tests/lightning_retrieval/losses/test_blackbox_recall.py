"""RaMBO's recall loss: its function, the mean over all pairs, and the memory of the official code.

The gradients without `batch_memory` are tested in test_blackbox.py.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_retrieval.losses import BlackboxRecallLoss, blackbox_rank, blockwise
from tests.lightning_retrieval.losses.oracles import batch


@pytest.mark.parametrize("elements", [1, 30, 1 << 21])
def test_mean_over_all_pairs(elements, monkeypatch):
    """The mean over the positives of all queries, for any size of the blocks."""
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    x, labels = batch([1, 2, 4, 1])
    unit = nn.functional.normalize(x)
    s = unit @ unit.T
    pairs = ~torch.eye(8, dtype=torch.bool)
    same = labels[:, None] == labels
    above = torch.tensor([float((s[q, pairs[q] & ~same[q]] >= s[q, i]).sum()) for q, i in (pairs & same).nonzero()])
    value = BlackboxRecallLoss(margin=0.0, pair_mean="all")(x, labels)
    assert value.item() == pytest.approx(above.log1p().mean().item(), abs=1e-6)


def official_losses(sequence, batch_memory, weight, lambda_=4.0, margin=0.02):
    """`BatchMemoryRecallLoss` of the official code: the rows of past scores are joined to those of the batch.

    Args:
        sequence: the scores and the targets of each step.
        batch_memory: number of past batches whose rows are kept.
        weight: the weighting l.
    """
    past = []
    for s, relevant in sequence:
        scores = torch.cat([s, *(scores for scores, _ in past)])
        targets = torch.cat([relevant, *(targets for _, targets in past)]).double()
        rank = blackbox_rank(scores - margin * (targets - 0.5), lambda_) / scores.shape[1]
        above_all = scores.detach() - margin * (targets - 0.5) + 1000 * targets
        rank_among_positives = blackbox_rank(above_all) / scores.shape[1]
        negatives_above = len(scores) * (rank - rank_among_positives)[targets > 0]
        yield weight(negatives_above).sum() / targets.sum()
        past = [(s.detach(), relevant), *past][:batch_memory]


def loglog(x):
    return torch.log1p(torch.log1p(x))


GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())["cases"]
MEMORY_CASES = [case for case in GOLDEN if case["id"].startswith("rambo_recall_batchmemory.")]


@pytest.mark.parametrize("case", MEMORY_CASES, ids=lambda case: case["id"])
def test_official_memory_of_this_file_against_golden_numbers(case):
    scores = [torch.tensor(s, dtype=torch.float64).requires_grad_() for s in case["inputs"]["scores_sequence"]]
    targets = [torch.tensor(relevant) > 0 for relevant in case["inputs"]["targets_sequence"]]
    losses = list(official_losses(zip(scores, targets), case["params"]["batch_memory"], torch.log1p))
    for s, loss, value, gradient in zip(scores, losses, *(list(case["expected"].values())[:2])):
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(s.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("weighting", "weight"), [("log", torch.log1p), ("loglog", loglog)])
@pytest.mark.parametrize("batch_memory", [0, 1, 4])
def test_gradient_is_that_of_the_official_memory(batch_memory, weighting, weight):
    """Once the memory is full, for batches of the same numbers of queries and positives; their scores do not matter."""
    labels = torch.arange(12) // 3
    sequence = [(torch.rand(12, 12, dtype=torch.float64) * 2 - 1, labels[:, None] == labels) for _ in range(6)]
    s = sequence[-1][0].requires_grad_()
    *_, official = official_losses(sequence, batch_memory, weight)
    (expected,) = torch.autograd.grad(official, s)

    loss = BlackboxRecallLoss(weighting=weighting, batch_memory=batch_memory, pair_mean="all")
    (gradient,) = torch.autograd.grad(loss.from_scores(s, sequence[-1][1]), s)
    assert expected.any()
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)

    if batch_memory:
        (without,) = torch.autograd.grad(BlackboxRecallLoss(weighting=weighting).from_scores(s, sequence[-1][1]), s)
        assert not torch.allclose(gradient, without)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("batch_memory", "error", "message"),
    [
        (-1, ValueError, r"^BlackboxRecallLoss: `batch_memory` must be an integer >= 0, got -1\.$"),
        (2.0, TypeError, r"^BlackboxRecallLoss: `batch_memory` must be an integer >= 0, got 2\.0 \(float\)\.$"),
    ],
)
def test_invalid_batch_memory(batch_memory, error, message):
    with pytest.raises(error, match=message):
        BlackboxRecallLoss(batch_memory=batch_memory)
