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


class WithBackbone(nn.Module):
    """An embedder whose backbone has three layers with parameters, and whose pooling has one too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 5)).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.head = nn.Linear(5, 4).double()

    def forward(self, x):
        return self.head(self.scale * self.backbone(x))


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_layer_decay(chunk_size):
    plain, log = WithBackbone(), Log()
    layers = [plain.backbone[0], plain.backbone[2], plain.backbone[3]]
    groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, (0.125, 0.25, 0.5))]
    groups += [{"params": [plain.scale], "lr": 0.5}, {"params": plain.head.parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    for images, labels in batches():
        optimizer.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        optimizer.step()
    settings = {"layer_decay": 0.5, "head_lr_factor": 2, "chunk_size": chunk_size}
    module = RetrievalModule(WithBackbone(), SmoothAPLoss(tau=0.1), optimizer=SGD, **settings)
    fit(module, batches(), callbacks=[log])
    assert log.rates == [[0.125, 0.25, 0.5, 0.5, 1.0]] * 3
    assert_same(module.embedder, plain)


@pytest.mark.refusal
def test_layer_decay_without_a_backbone_raises():
    module = RetrievalModule(net(), SmoothAPLoss(), layer_decay=0.5)
    with pytest.raises(ValueError, match=r"`layer_decay` needs an embedder with a `backbone`, .*got Sequential"):
        module.configure_optimizers()
    with pytest.raises(ValueError, match=r"`layer_decay` must be .*, got 2"):
        RetrievalModule(net(), SmoothAPLoss(), layer_decay=2)
