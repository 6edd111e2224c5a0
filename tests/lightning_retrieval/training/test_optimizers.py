"""Parameter groups: the head's learning rate, frozen parameters."""

import pytest
import torch
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training.small_training import CHUNKS, SGD, Log, assert_same, batches, fit, net


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = net()[:3], net()[3]

    def forward(self, x):
        return self.head(self.body(x))


def test_head_lr_factor():
    plain, log = WithHead(), Log()
    groups = [{"params": plain.body.parameters()}, {"params": plain.head.parameters(), "lr": 5.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    for images, labels in batches():
        optimizer.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        optimizer.step()
    module = RetrievalModule(WithHead(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD, head_lr_factor=10)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.5, 5.0]] * 3
    assert_same(module.embedder, plain)


@pytest.mark.refusal
def test_head_lr_factor_without_a_head_raises():
    module = RetrievalModule(net(), SmoothAPLoss(), head_lr_factor=10.0)
    with pytest.raises(ValueError, match=r"`head_lr_factor` is 10\.0, but the embedder has no `head`"):
        module.configure_optimizers()


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_frozen_parameters_stay_and_the_others_learn(chunk_size):
    plain, module = net(), RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=SGD)
    plain[0].requires_grad_(False)
    module.embedder[0].requires_grad_(False)
    optimizer = torch.optim.SGD(plain[3].parameters(), lr=0.5)
    for images, labels in batches():
        optimizer.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        optimizer.step()
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert torch.equal(module.embedder[0].weight, net()[0].weight)


@pytest.mark.refusal
def test_nothing_to_train_raises():
    module = RetrievalModule(net().requires_grad_(False), SmoothAPLoss())
    with pytest.raises(ValueError, match=r"^RetrievalModule: `embedder` and `loss` must have a parameter to train"):
        module.configure_optimizers()
