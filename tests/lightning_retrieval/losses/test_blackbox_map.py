"""RaMBO's mAP loss against loops, its memory of scores, and its gradient against Alg. 1."""

import io
import math

import pytest
import torch

from lightning_retrieval.losses import BlackboxMAPLoss, blackbox_map
from lightning_retrieval.losses.blackbox import sort_lists
from tests.lightning_retrieval.losses.oracles import blackbox_gradient


def map_by_loops(scores, targets, margin):
    """1 - the mean AP over the columns that have a positive, in loops over lists."""
    losses = []
    for column in range(len(scores[0])):
        s = [row[column] + (-margin / 2 if t[column] else margin / 2) for row, t in zip(scores, targets)]
        positives = [i for i in range(len(s)) if targets[i][column]]
        if positives:
            precisions = [sum(s[j] >= s[i] for j in positives) / sum(o >= s[i] for o in s) for i in positives]
            losses.append(1 - sum(precisions) / len(positives))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("batch_memory", "interclass_coef"), [(0, 0.0), (1, 0.0), (2, 0.3), (3, 1.0)])
def test_memory_of_scores(batch_memory, interclass_coef):
    loss = BlackboxMAPLoss(4.0, 0.1, interclass_coef=interclass_coef, batch_memory=batch_memory)
    past = []
    for step in range(6):
        scores = torch.randn(5 + step % 3, 4, dtype=torch.float64, requires_grad=True)  # batches of different sizes
        targets = torch.rand(scores.shape) < 0.4
        targets[0, 0] = True
        now = (scores.tolist(), targets.tolist())
        lists, marks = ([row for part in [*past, now] for row in part[k]] for k in (0, 1))
        own = [[value] for row in now[0] for value in row], [[value] for row in now[1] for value in row]
        expected = (1 - interclass_coef) * map_by_loops(lists, marks, 0.1) + interclass_coef * map_by_loops(*own, 0.1)
        value = loss(scores, targets)
        assert value.item() == pytest.approx(expected, abs=1e-12)
        value.backward()
        assert scores.grad.shape == scores.shape
        past = [*past, now][-batch_memory:] if batch_memory else []
        assert [entry[0].tolist() for entry in loss.memory] == [entry[0] for entry in past]
        assert not any(entry[0].requires_grad for entry in loss.memory)


def test_gradient_with_a_memory():
    """Alg. 1 on the lists with the memory; only the rows of the batch have a gradient."""
    loss = BlackboxMAPLoss(2.0, 0.05, batch_memory=1)
    first, second = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    marks = torch.rand(10, 3) < 0.5
    marks[0] = True
    loss(first, marks[:6])
    s = second.clone().requires_grad_()
    loss(s, marks[6:]).backward()
    columns, ones = torch.cat([first, second]).T.tolist(), [[True] * 10] * 3
    expected = blackbox_gradient(columns, marks.T.tolist(), ones, 2.0, 0.05, "ap")
    torch.testing.assert_close(s.grad, expected.T[6:], rtol=1e-7, atol=1e-12)


def test_each_batch_is_sorted_once(monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return sort_lists(*arguments)

    monkeypatch.setattr(blackbox_map, "sort_lists", counted)
    loss = BlackboxMAPLoss(batch_memory=3)
    for step in range(5):
        loss(torch.randn(6, 4), torch.rand(6, 4) < 0.5)
        assert len(calls) == step + 1
    loss(torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 4) < 0.5)  # the memory follows the dtype
    assert len(calls) == 5 + 3 + 1


def test_memory_is_part_of_checkpoints_and_can_be_reset():
    loss, loaded = BlackboxMAPLoss(batch_memory=2), BlackboxMAPLoss(batch_memory=2)
    targets = torch.eye(4, dtype=torch.bool)
    for _ in range(3):
        loss(torch.randn(4, 4), targets)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    scores = torch.randn(4, 4)
    fresh = BlackboxMAPLoss(batch_memory=2)(scores, targets)
    values = [loss(scores, targets), loaded(scores, targets)]
    assert torch.equal(*values)
    assert len(loaded.memory) == 2
    assert not torch.equal(values[0], fresh)
    loaded.reset()
    assert loaded.memory == []
    assert torch.equal(loaded(scores, targets), fresh)


@pytest.mark.refusal
def test_a_checkpoint_with_scores_that_are_not_finite_raises():
    loss = BlackboxMAPLoss(batch_memory=2)
    loss(torch.randn(4, 4), torch.eye(4, dtype=torch.bool))
    damaged = loss.state_dict()
    damaged["_extra_state"]["memory"][0][0][2, 1] = float("inf")
    sentence = r"^BlackboxMAPLoss: `state` must hold finite numbers only, got NaN or inf in 1 of 4 rows \(2\)\.$"
    with pytest.raises(ValueError, match=sentence):
        BlackboxMAPLoss(batch_memory=2).load_state_dict(damaged)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "`lambda_` must be a finite number > 0, got -1", {"lambda_": -1}),
        (ValueError, "`margin` must be a finite number >= 0, got -0.1", {"margin": -0.1}),
        (ValueError, r"`interclass_coef` must be from 0 to 1, got 1\.5", {"interclass_coef": 1.5}),
        (ValueError, "`interclass_coef` must be a finite number, got nan", {"interclass_coef": math.nan}),
        (TypeError, "`interclass_coef` must be a number, got None", {"interclass_coef": None}),
        (ValueError, "`batch_memory` must be an integer >= 0, got -1", {"batch_memory": -1}),
        (TypeError, "`batch_memory` must be an integer >= 0, got 1.0", {"batch_memory": 1.0}),
    ],
)
def test_invalid_settings(error, match, arguments):
    with pytest.raises(error, match=f"^BlackboxMAPLoss: {match}"):
        BlackboxMAPLoss(**arguments)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "scores", "targets"),
    [
        (TypeError, "`scores` must be a tensor, got list", [[1.0]], torch.ones(1, 1, dtype=torch.bool)),
        (ValueError, r"`scores` must have shape .* got \(3,\)", torch.ones(3), torch.ones(3, dtype=torch.bool)),
        (TypeError, "`targets` must be bool, got torch.int64", torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64)),
        (ValueError, r"`targets` must have the shape of `scores` \(3, 2\), got \(2, 3\)", torch.ones(3, 2),
         torch.ones(2, 3, dtype=torch.bool)),
        (ValueError, "`scores` must hold finite numbers only", torch.full((3, 2), math.inf),
         torch.ones(3, 2, dtype=torch.bool)),
        (ValueError, r"`scores` must have as many classes as those in memory, 2, got shape \(2, 3\); call reset",
         torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)),
    ],
)  # fmt: skip
def test_invalid_scores_and_targets(error, match, scores, targets):
    loss = BlackboxMAPLoss(batch_memory=1)
    loss(torch.randn(3, 2), torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(error, match=f"^BlackboxMAPLoss: {match}"):
        loss(scores, targets)
    assert len(loss.memory) == 1
    assert loss.memory[0][0].shape == (3, 2)
