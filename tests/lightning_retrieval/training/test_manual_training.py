"""What Lightning leaves to a module in manual optimization: clipping, epochs of resumed runs, results of a step."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

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


class WithExtraLoss(RetrievalModule):
    """Returns what a function makes of the loss of a step and of a further loss, which nothing back-propagates."""

    def __init__(self, embedder, loss, returned):
        super().__init__(embedder, loss, optimizer=SGD)
        self.returned = returned

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return self.returned(loss, self(batch[0]).square().mean())


@pytest.mark.refusal
@pytest.mark.parametrize(
    "returned",
    [
        lambda loss, extra: loss + extra,
        lambda loss, extra: extra,
        lambda loss, extra: {"loss": extra, "ap": loss},
    ],
)
def test_a_returned_loss_with_a_graph_raises_at_the_first_step(returned):
    module = WithExtraLoss(net(), SmoothAPLoss(), returned)
    message = r"^WithExtraLoss: `training_step` must not return .*grad_fn=.*make it a term of `loss`, WeightedSum\("
    with pytest.raises(ValueError, match=message):
        fit(module, batches())
    assert module.trainer.global_step == 1


def test_a_step_returns_the_loss_and_an_override_may_return_detached_values():
    class Outputs(pl.Callback):
        def __init__(self):
            self.values = []

        def on_train_batch_end(self, trainer, module, outputs, *_):
            self.values.append((outputs["loss"].item(), float(trainer.callback_metrics["train/loss"])))

    seen = Outputs()
    fit(RetrievalModule(net(), SmoothAPLoss(), optimizer=SGD), batches(), callbacks=[seen])
    for returned, logged in seen.values:
        assert returned == pytest.approx(logged, abs=1e-6)
    twice = Outputs()
    fit(
        WithExtraLoss(net(), SmoothAPLoss(), lambda loss, extra: 2 * loss + 0 * extra.detach()),
        batches(),
        callbacks=[twice],
    )
    assert [value for value, _ in twice.values] == pytest.approx([2 * value for value, _ in seen.values])
    fit(WithExtraLoss(net(), SmoothAPLoss(), lambda loss, extra: None), batches())


class AutomaticModule(RetrievalModule):
    """Lets Lightning back-propagate and step, as a module does that needs no chunks."""

    def __init__(self, embedder, loss, optimizer):
        super().__init__(embedder, loss, optimizer=optimizer)
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])


def test_a_subclass_in_automatic_optimization_returns_its_loss():
    module = AutomaticModule(net(), SmoothAPLoss(), SGD)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit(module, batches())
    assert not all(map(torch.equal, before, module.parameters()))


class OtherManualModule(pl.LightningModule):
    """A module of another library, which may return a loss that it has back-propagated itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        loss = (batch[0] * self.weight).square().mean()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


def test_a_trainer_that_then_trains_another_module_leaves_its_results_as_they_are():
    run = fit(RetrievalModule(net(), SmoothAPLoss(), optimizer=SGD), batches())
    run.fit_loop.max_epochs = 2
    run.fit(OtherManualModule(), DataLoader(batches(), batch_size=None))
    assert run.state.finished
