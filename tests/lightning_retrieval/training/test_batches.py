"""The forms of a batch, in a training step."""

import pytest
import torch

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training.small_training import ROWS, SGD, assert_same, batches, fit, net


@pytest.mark.parametrize("form", ["pair", "list", "ids", "dict", "dict with ids"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_forms_of_a_batch(form, chunk_size):
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
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=SGD)
    fit(module, [batch])
    assert_same(module.embedder, after["ids" not in form])
    assert not torch.allclose(after[True][0].weight, after[False][0].weight)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("batch", "came"),
    [
        ((1, 2, 3, 4), "4 items"),
        ((1,), "1 items"),
        ({"images": 1, "target": 2}, r"a dict with the keys \['images', 'target'\]"),
        (torch.zeros(2), "Tensor"),
    ],
)
def test_other_batches_raise(batch, came):
    with pytest.raises(TypeError, match=rf"^RetrievalModule: a batch must be .*, got {came}; override unpack_batch"):
        RetrievalModule(net(), SmoothAPLoss()).unpack_batch(batch)
