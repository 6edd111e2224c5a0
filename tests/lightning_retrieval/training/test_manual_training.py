"""What Lightning leaves to a module in manual optimization: clipping of gradients, and epochs of resumed runs."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.lightning_retrieval.training.small_training import SGD, assert_same, batches, fit, net
from tests.point_set import Points


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


class FewPoints(RetrievalDataModule):
    """Three batches an epoch."""

    train_set, val_set, test_set = Points(1), Points(2), Points(3)

    def __init__(self):
        super().__init__(classes_per_batch=2, samples_per_class=4, seed=1)


def run_from(checkpoint, folder, epochs=3):
    """Train to the end, with a checkpoint after each step; the weights and the number of steps."""
    torch.manual_seed(0)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), optimizer=SGD, seed=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, FewPoints(), ckpt_path=checkpoint)
    return module.embedder.weight.detach().clone(), trainer.global_step


def test_a_run_that_is_resumed_at_the_end_of_an_epoch_and_again_in_the_next_one(tmp_path):
    """Lightning does not count the epoch after the first resume, so that the second one would begin it again."""
    whole, steps = run_from(None, tmp_path / "whole")
    per_epoch = steps // 3
    assert per_epoch > 1
    once = run_from(tmp_path / f"whole/step={per_epoch}.ckpt", tmp_path / "once")
    twice = run_from(tmp_path / f"once/step={per_epoch + 1}.ckpt", tmp_path / "twice")
    for weights, found in (once, twice):
        assert found == steps
        assert torch.equal(weights, whole)
