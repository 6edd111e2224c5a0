"""Clipping of gradients in manual optimization."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training.small_training import SGD, assert_same, batches, fit, net


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(algorithm):
    plain = net()
    for images, labels in batches():
        plain.zero_grad()
        SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
        if algorithm == "norm":
            assert nn.utils.clip_grad_norm_(plain.parameters(), 0.01) > 0.02
        else:
            nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
    module = RetrievalModule(
        net(),
        SmoothAPLoss(tau=0.1),
        chunk_size=3,
        optimizer=SGD,
        gradient_clip_val=0.01,
        gradient_clip_algorithm=algorithm,
    )
    fit(module, batches())
    assert_same(module.embedder, plain)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.gpu)])
def test_clipping_sees_unscaled_gradients(precision, chunk_size):
    """Plain SGD with rate 1 moves the weights by the clipped gradient, so by just the largest norm."""
    on_gpu = precision == "16-mixed"  # float16 autocast with a loss scale needs one
    module = RetrievalModule(
        net().float(),
        SmoothAPLoss(tau=0.1),
        chunk_size=chunk_size,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        gradient_clip_val=0.01,
    )
    moved = []

    class Moves(pl.Callback):
        def on_train_batch_start(self, *_):
            self.before = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, *_):
            moves = [(p.detach() - b).flatten() for p, b in zip(module.parameters(), self.before)]
            moved.append(torch.cat(moves).norm().item())

    data = [(images.float(), labels) for images, labels in batches(8)]
    fit(module, data, precision=precision, accelerator="gpu" if on_gpu else "cpu", callbacks=[Moves()])
    stepped = [m for m in moved if m > 0]  # a loss scale that is too large at first skips a step
    assert len(stepped) == 8 if precision != "16-mixed" else len(stepped) > 0
    assert stepped == pytest.approx([0.01] * len(stepped), rel=1e-4)
