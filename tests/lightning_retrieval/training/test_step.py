"""The forms of a batch, the rounding of embeddings, and what stops a step."""

import pytest
import torch

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.losses.batch_loss import BatchLoss
from tests.lightning_retrieval.training.small_training import ROWS, SGD, Gives, assert_same, batches, fit, net


class FirstRow(BatchLoss):
    """A loss that does not look at all embeddings."""

    def compute(self, batch):
        return batch.embeddings[0].sum()


@pytest.mark.refusal
@pytest.mark.parametrize(("loss", "ids"), [(SmoothAPLoss(tau=0.1), True), (FirstRow(), False)])
def test_nan_embeddings_stop_training_before_the_weights_change(loss, ids):
    """Also behind a finite loss; the error says of which images."""
    first, second = batches(2)
    second[0][[2, 5]] = torch.nan
    data = [(*batch, torch.arange(100, 100 + ROWS)) if ids else batch for batch in (first, second)]
    module, plain = (RetrievalModule(net(), loss, chunk_size=3, optimizer=SGD) for _ in range(2))
    with pytest.raises(ValueError, match=r"ids \[102, 105\]" if ids else r"rows \[2, 5\]"):
        fit(module, data)
    fit(plain, [first])
    assert_same(module, plain)


@pytest.mark.refusal
def test_a_loss_of_nan_stops_training_before_the_weights_change():
    module = RetrievalModule(net(), Gives(value=float("nan")), optimizer=SGD)
    with pytest.raises(ValueError, match="the loss is nan"):
        fit(module, batches())
    assert_same(module.embedder, net())


@pytest.mark.parametrize("form", ["pair", "list", "ids", "dict", "dict with ids"])
def test_forms_of_a_batch(form):
    """And the ids reach the loss: rows 0 and 1 are the same image, which is no positive of itself."""
    images, labels = batches(1)[0]
    labels[:4] = torch.tensor([0, 0, 0, 1])
    ids = torch.tensor([50, 50, *range(2, ROWS)])
    batch = {
        "pair": (images, labels),
        "list": [images, labels],
        "ids": (images, labels, ids),
        "dict": {"images": images, "labels": labels},
        "dict with ids": {"images": images, "labels": labels, "ids": ids},
    }[form]
    after = {}
    for given in (None, ids):
        after[given is None] = plain = net()
        SmoothAPLoss(tau=0.1)(plain(images), labels, ids=given).backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    fit(module, [batch])
    assert_same(module.embedder, after["ids" not in form])
    assert not torch.allclose(after[True][0].weight, after[False][0].weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loss_ranks_rounded_embeddings_and_the_gradient_is_not_rounded(dtype):
    plain = net()
    optimizer = SGD(plain.parameters())
    for images, labels in batches():
        embeddings = plain(images)
        rounded = embeddings.detach().to(getattr(torch, dtype)).double().requires_grad_()
        SmoothAPLoss(tau=0.1)(rounded, labels).backward()
        optimizer.zero_grad()
        embeddings.backward(rounded.grad)
        optimizer.step()
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD, gather=dtype)
    fit(module, batches())
    assert_same(module.embedder, plain)
    exact = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    fit(exact, batches())
    assert not torch.allclose(next(exact.parameters()), next(plain.parameters()), rtol=0, atol=1e-6)
