"""The forms of a batch, in a training step, and the labels and ids of the first batch of a run."""

import warnings

import pytest
import torch
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
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


CLASSES = torch.arange(24) // 6
INDEX = torch.arange(24)


def warnings_of_a_step(labels, ids, memory=None, **loader) -> list[str]:
    """What a first step says of its batch, from a loader that is not of this library."""
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), labels, ids)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), memory=memory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, DataLoader(data, **{"batch_size": 24, **loader}), max_steps=1)
    return [str(warning.message) for warning in caught if "first batch" in str(warning.message)]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (
            INDEX * 0,
            "RetrievalModule: an image must have one label, but in the first batch the id 0 has the labels 0 and 1,",
        ),
        (
            INDEX % 6,
            "RetrievalModule: an image must have one label, but in the first batch the id 0 has the labels 0 and 1,",
        ),
        (INDEX // 2, "RetrievalModule: in the first batch 24 of 24 images share their id with others"),
        (CLASSES, "RetrievalModule: in the first batch 24 of 24 images share their id with others"),
        (INDEX.clamp(min=1), "RetrievalModule: in the first batch 2 of 24 images share their id with others"),
        (INDEX, None),
    ],
)
def test_ids_that_repeat_warn_with_a_sampler_of_others(ids, expected):
    messages = warnings_of_a_step(CLASSES, ids)
    assert [message[: len(expected or "")] for message in messages] == [expected] * (expected is not None)
    assert all("give each image a different id, such as its index" in message for message in messages)


def test_images_that_another_sampler_draws_several_times_do_not_warn():
    few = torch.arange(24).clamp(min=1, max=21) // 7  # one class has 3 images, fewer than are drawn of it
    torch.manual_seed(0)
    for sampler in (RandomSampler(INDEX, replacement=True, num_samples=24), MPerClassSampler(few, 6, 24, 24)):
        drawn = list(sampler)
        assert len(set(drawn)) < len(drawn)
        torch.manual_seed(2)
        assert warnings_of_a_step(CLASSES, INDEX, sampler=sampler) == []


def test_a_first_batch_of_one_label_warns_without_a_memory():
    labels = torch.full((24,), 7)
    (message,) = warnings_of_a_step(labels, INDEX)
    assert message.startswith(
        "RetrievalModule: all 24 images of the first batch have the label 7, so that no list has a"
    )
    assert warnings_of_a_step(labels, INDEX, memory=CrossBatchMemory(24, start_step=2)) == []
