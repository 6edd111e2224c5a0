"""What all metrics of embeddings share: updates, `forward`, and what remains after an error."""

import math

import pytest
import torch

from lightning_retrieval.metrics import RetrievalMetrics
from tests.lightning_retrieval.metrics.helpers import compute, numbers

KS = (1, 2, 4, 8)


@pytest.mark.parametrize("with_ids", [False, True])
def test_forward_gives_the_batch_and_keeps_it(with_ids):
    x, labels = torch.randn(30, 4), torch.randint(0, 4, (30,))
    metrics = RetrievalMetrics(ks=KS)
    for part in torch.arange(30).split(11):
        found = metrics(x[part], labels[part], part if with_ids else None)
        assert found["mAP"].item() == compute(x[part], labels[part])["mAP"]
    assert numbers(metrics.compute()) == compute(x, labels)


def test_embeddings_lose_their_graph():
    x = torch.randn(4, 3, requires_grad=True)
    metrics = RetrievalMetrics(ks=(1,))
    metrics.update(x, torch.tensor([0, 0, 1, 1]))
    assert not any(rows.requires_grad for rows in metrics.metric_state["embeddings"])
    assert not metrics.compute()["mAP"].requires_grad


def test_an_empty_or_an_invalid_batch_changes_nothing():
    x, labels = torch.randn(10, 4), torch.arange(10) % 2
    metrics = RetrievalMetrics(ks=KS)
    metrics.update(x[:0], labels[:0])
    metrics.update(x, labels, ids=torch.arange(10))
    metrics.update(x[:0], labels[:0])
    with pytest.raises(ValueError, match="embeddings"):
        metrics.update(x * math.nan, labels, ids=torch.arange(10, 20))
    assert numbers(metrics.compute()) == compute(x, labels)
