"""What all metrics of embeddings share: updates, `forward`, copies, and invalid input."""

import math

import pytest
import torch

from lightning_retrieval.metrics import RetrievalMetrics
from tests.lightning_retrieval.metrics.helpers import compute, numbers

KS = (1, 2, 4, 8)
X, Y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
B = Y.bool()


@pytest.mark.parametrize("with_ids", [False, True])
def test_forward_gives_the_batch_and_keeps_it(with_ids):
    x, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    metrics = RetrievalMetrics(ks=KS)
    for part in torch.arange(30).split(11):
        found = metrics(x[part], labels[part], part if with_ids else None)
        assert found["mAP"].item() == compute(x[part], labels[part])["mAP"]
    assert numbers(metrics.compute()) == compute(x, labels)


def test_embeddings_lose_their_graph():
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(torch.randn(4, 3, requires_grad=True), torch.tensor([0, 0, 1, 1]))
    assert not metrics.embeddings[0].requires_grad
    assert not metrics.compute()["mAP"].requires_grad


def test_an_empty_batch_changes_nothing():
    x, labels = torch.randn(10, 4), torch.arange(10) % 2
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x[:0], labels[:0])
    metrics.update(x, labels, ids=torch.arange(10))
    metrics.update(x[:0], labels[:0])
    assert numbers(metrics.compute()) == compute(x, labels)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (TypeError, "`embeddings` must be floating point, got torch.int64", (X.long(), Y)),
        (ValueError, r"`embeddings` must have shape \(rows, D\) with D > 0, got \(4,\)", (X[:, 0], Y)),
        (ValueError, r"`embeddings` must hold finite .* in 4 of 4 rows \(0, 1, 2, 3\)", (X * math.nan, Y)),
        (TypeError, "`labels` must be integers, got torch.float32", (X, Y.float())),
        (ValueError, r"`labels` must have shape \(4,\), one for each row of `embeddings`, got \(3,\)", (X, Y[:3])),
        (ValueError, r"`ids` must have shape \(4,\), .* got \(2,\)", (X, Y, Y[:2])),
        (TypeError, "`roles` must be integers, got torch.bool", (X, Y, None, B)),
        (ValueError, r"`roles` must have shape \(4,\), .* got \(3,\)", (X, Y, None, Y[:3])),
        (ValueError, r"`roles` must be from 0 to 3 .*, got 0 to 4\.", (X, Y, None, torch.tensor([0, 1, 4, 3]))),
        (ValueError, r"`cameras` must have shape \(4,\), .* got \(3,\)", (X, Y, None, None, None, Y[:3])),
    ],
)  # fmt: skip
def test_invalid_input(error, match, args):
    metrics = RetrievalMetrics()
    with pytest.raises(error, match=f"^RetrievalMetrics: {match}"):
        metrics.update(*args)
    assert metrics.embeddings == metrics.labels == metrics.ids == metrics.roles == []


@pytest.mark.refusal
def test_embeddings_that_are_not_finite_are_named_by_their_ids():
    x = X.clone()
    x[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"`embeddings` must hold finite .* in 1 of 4 rows \(ids 30\)"):
        RetrievalMetrics().update(x, Y, torch.tensor([10, 20, 30, 40]))


@pytest.mark.refusal
def test_a_state_dict_with_rows_that_are_not_finite_raises():
    metrics = RetrievalMetrics()
    metrics.persistent(True)
    metrics.update(X, Y)
    state = metrics.state_dict()
    state["embeddings"][0][3, 0] = math.nan
    sentence = r"^RetrievalMetrics: `state_dict` must hold finite numbers only, got NaN or inf in 1 of 4 rows \(3\)\.$"
    with pytest.raises(ValueError, match=sentence):
        RetrievalMetrics().load_state_dict(state)


@pytest.mark.refusal
@pytest.mark.parametrize("first", [None, torch.arange(4)])
@pytest.mark.parametrize("name", ["ids", "instances", "cameras"])
def test_a_column_with_some_updates_only(name, first):
    match = f"RetrievalMetrics: `{name}` must be given with every update or with none, got both"
    second = torch.arange(4, 8) if first is None else None
    metrics = RetrievalMetrics()
    metrics.update(X, Y, **{name: first})
    with pytest.raises(ValueError, match=match):
        metrics.update(X, Y, **{name: second})
    metrics.reset()
    metrics(X, Y, **{name: first})
    metrics(X, Y, **{name: second})  # which forgets the first while it computes the second
    with pytest.raises(ValueError, match=match):
        metrics.compute()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("match", "given"),
    [
        (r"`embeddings` must have shape \(rows, 3\) as in earlier updates, got \(4, 2\)", (X[:, :2], Y)),
        ("`embeddings` must have the dtype of earlier updates, torch.float32, got torch.float64", (X.double(), Y)),
        (r"`labels` must have shape \(rows\) as in earlier updates, got \(4, 2\)", (X, torch.stack([Y, Y], 1))),
    ],
)
def test_updates_that_differ(match, given):
    metrics = RetrievalMetrics()
    metrics.update(X, Y)
    with pytest.raises(ValueError, match=f"^RetrievalMetrics: {match}"):
        metrics.update(*given)
