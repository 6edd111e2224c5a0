"""What Lightning leaves to a module: clipping, schedulers, results of a step, and layers that callbacks unfreeze."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss, Updates, chunked_backward
from lightning_retrieval.callbacks import RetrievalEvaluation
from tests.lightning_retrieval.training.small_training import (
    SGD,
    Log,
    Unfreeze,
    assert_same,
    batches,
    fit,
    net,
    train_plainly,
    trainer,
)


def module_with(**settings):
    return RetrievalModule(net(), SmoothAPLoss(tau=0.1), **{"optimizer": SGD, **settings})


def scaled():
    """Half precision with a loss scale, on a CPU; a scale that is too large at first skips a step."""
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))}


@pytest.mark.parametrize("precision", [lambda: {"precision": "bf16-mixed"}, scaled], ids=["bf16", "scaled float16"])
def test_clipping_sees_unscaled_gradients(precision):
    """Plain SGD with rate 1 moves the weights by the clipped gradient, so by just the largest norm."""
    module = RetrievalModule(
        net().float(),
        SmoothAPLoss(tau=0.1),
        chunk_size=3,
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        updates=Updates(gradient_clip_val=0.01),
    )
    moved = []

    class Moves(pl.Callback):
        def on_train_batch_start(self, *_):
            self.before = [p.detach().clone() for p in module.parameters()]

        def on_train_batch_end(self, *_):
            moves = [(p.detach() - b).flatten() for p, b in zip(module.parameters(), self.before)]
            moved.append(torch.cat(moves).norm().item())

    data = [(images.float(), labels) for images, labels in batches(8)]
    fit(module, data, callbacks=[Moves()], **precision())
    stepped = [m for m in moved if m > 0]
    assert len(moved) == 8
    assert len(stepped) == 8 if precision is not scaled else 0 < len(stepped) < 8
    assert stepped == pytest.approx([0.01] * len(stepped), rel=1e-4)


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
    with pytest.raises(ValueError, match="`training_step`"):
        fit(module, batches())
    assert module.trainer.global_step == 1


def test_a_step_returns_the_loss_and_an_override_may_return_detached_values():
    log, twice = Log(), Log()
    fit(module_with(), batches(), callbacks=[log])
    returned = [outputs["loss"].item() for outputs in log.returned]
    assert returned == pytest.approx(log.losses, abs=1e-6)
    doubled = WithExtraLoss(net(), SmoothAPLoss(tau=0.1), lambda loss, extra: 2 * loss + 0 * extra.detach())
    fit(doubled, batches(), callbacks=[twice])
    assert [outputs["loss"].item() for outputs in twice.returned] == pytest.approx([2 * value for value in returned])
    fit(WithExtraLoss(net(), SmoothAPLoss(), lambda loss, extra: None), batches())


class AutomaticModule(RetrievalModule):
    """Lets Lightning back-propagate and step, as a module does that needs no chunks."""

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])


def test_a_subclass_in_automatic_optimization_returns_its_loss():
    module = AutomaticModule(net(), SmoothAPLoss(), optimizer=SGD)
    module.automatic_optimization = True
    fit(module, batches())
    assert not torch.equal(module.embedder[0].weight, net()[0].weight)


class OwnStep(pl.LightningModule):
    """A module of a user with chunks, as docs/training.md shows it."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.embedder, self.loss = net(), SmoothAPLoss(tau=0.1)

    def configure_optimizers(self):
        return SGD(self.parameters())

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.optimizers().zero_grad()
        chunked_backward(self.embedder, images, lambda x: self.loss(x, labels), 3, backward=self.manual_backward)
        self.optimizers().step()


def test_a_step_of_one_s_own_takes_chunks():
    module, plain = OwnStep(), net()
    train_plainly(plain, SGD(plain.parameters()), batches())
    fit(module, batches())
    assert_same(module.embedder, plain)


class OtherManualModule(pl.LightningModule):
    """A module of another library, which may return a loss that it has back-propagated itself."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        loss = (batch[0] * self.weight).square().mean()
        self.manual_backward(loss)
        return loss


def test_a_trainer_that_then_trains_another_module_leaves_its_results_as_they_are():
    run = fit(RetrievalModule(net(), SmoothAPLoss(), optimizer=SGD), batches())
    run.fit_loop.max_epochs = 2
    run.fit(OtherManualModule(), DataLoader(batches(), batch_size=None))
    assert run.state.finished


class OwnOptimizers(RetrievalModule):
    """Configures the same as the constructor's arguments would, by hand."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = {
            "scheduler": ExponentialLR(optimizer, 0.5),
            "interval": self.lr_scheduler_interval,
            "frequency": self.lr_scheduler_frequency,
        }
        return [optimizer], [scheduler]


@pytest.mark.parametrize(
    ("kind", "interval", "frequency", "limit"),
    [
        (RetrievalModule, "step", 1, 3),
        (RetrievalModule, "epoch", 2, 5),
        (OwnOptimizers, "step", 2, 5),
        (OwnOptimizers, "epoch", 1, 3),
    ],
)
def test_schedulers_are_stepped_as_in_a_plain_loop(kind, interval, frequency, limit):
    plain, rates = net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    scheduler = ExponentialLR(optimizer, 0.5)
    for epoch in range(4):
        for number, (images, labels) in enumerate(batches(5)[:limit]):
            rates.append([optimizer.param_groups[0]["lr"]])
            optimizer.zero_grad()
            SmoothAPLoss(tau=0.1)(plain(images), labels).backward()
            optimizer.step()
            if interval == "step" and (number + 1) % frequency == 0:
                scheduler.step()
        if interval == "epoch" and (epoch + 1) % frequency == 0:
            scheduler.step()

    log = Log()
    schedule = {"lr_scheduler_interval": interval, "lr_scheduler_frequency": frequency}
    if kind is RetrievalModule:
        schedule["lr_scheduler"] = functools.partial(ExponentialLR, gamma=0.5)
    module = kind(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, **schedule)
    fit(module, batches(5), max_epochs=4, limit_train_batches=limit, callbacks=[log])
    assert log.rates == rates
    assert_same(module.embedder, plain)


HALVE = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=9.0)
VALIDATED = {"callbacks": [RetrievalEvaluation(ks=(1,))]}


class PlateauByHand(RetrievalModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": HALVE(optimizer)}


@pytest.mark.parametrize(
    ("kind", "monitor"),
    [(RetrievalModule, "train/loss"), (PlateauByHand, "val/mAP")],
)
def test_plateau_looks_at_its_monitor(kind, monitor):
    """Nothing is ten times better than the first value, so each later epoch halves the rate."""
    module = kind(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=HALVE, lr_scheduler_monitor=monitor)
    log, seen = Log(), []

    class Seen(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append((float(trainer.callback_metrics[monitor]), module.lr_schedulers().best))

    validation = None if monitor == "train/loss" else batches(2)
    fit(module, batches(2), validation, max_epochs=4, callbacks=[log, RetrievalEvaluation(ks=(1,)), Seen()])
    assert log.rates[::2] == [[0.5], [0.5], [0.25], [0.125]]
    if validation:
        assert seen[0][1] == pytest.approx(seen[0][0], abs=1e-12)


class PlateauWithKey(RetrievalModule):
    """Names the metric as Lightning's documentation does: in the dict of the scheduler, or beside it, or in lists."""

    form = "scheduler"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = HALVE(optimizer)
        of_scheduler = {"scheduler": scheduler, "monitor": "train/loss", "strict": True}
        if self.form == "scheduler":
            return {"optimizer": optimizer, "lr_scheduler": of_scheduler}
        if self.form == "beside":
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "train/loss"}
        return [optimizer], [of_scheduler]


@pytest.mark.parametrize("form", ["scheduler", "beside", "lists"])
def test_plateau_looks_at_the_metric_that_configure_optimizers_names(form):
    module = PlateauWithKey(net(), SmoothAPLoss(tau=0.1))  # whose own monitor is val/mAP
    module.form = form
    losses = []

    class Losses(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            losses.append(float(trainer.callback_metrics["train/loss"]))

    run = fit(module, batches(2), max_epochs=2, callbacks=[Losses()])
    assert run.lr_scheduler_configs[0].scheduler.best == pytest.approx(losses[0], rel=1e-6)
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 2


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"val_check_interval": 2}, 2),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, 3),
        ({"val_check_interval": "00:00:00:00"}, 6),
    ],
    ids=["within epochs", "across epochs", "by the clock"],
)
def test_plateau_looks_only_at_validations_that_come(flags, steps):
    """Validations that are not at the end of an epoch: the interval 'epoch' raises, 'step' steps after each."""
    settings = {"max_epochs": 2, **VALIDATED, **flags}
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        fit(module_with(lr_scheduler=HALVE), batches(3), batches(2), **settings)
    run = fit(module_with(lr_scheduler=HALVE, lr_scheduler_interval="step"), batches(3), batches(2), **settings)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5 ** (steps - 1)


def test_plateau_needs_a_validation_in_some_epochs_only():
    for flags in ({"check_val_every_n_epoch": 2}, {"val_check_interval": 6, "check_val_every_n_epoch": None}):
        run = fit(module_with(lr_scheduler=HALVE), batches(3), batches(2), max_epochs=6, **VALIDATED, **flags)
        assert run.optimizers[0].param_groups[0]["lr"] == 0.125  # three validations


@pytest.mark.refusal
def test_a_metric_that_was_not_logged_raises():
    """That of the module, and that of a `configure_optimizers` of one's own."""

    class Misspelt(RetrievalModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": HALVE(optimizer), "monitor": "val/map"}}

    module = module_with(lr_scheduler=ReduceLROnPlateau, lr_scheduler_monitor="val/map")
    for wrong in (module, Misspelt(net(), SmoothAPLoss())):
        with pytest.raises(ValueError, match="val/map"):
            fit(wrong, batches(1), batches(1), **VALIDATED)


def with_batch_norm():
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    return nn.Sequential(first, nn.Linear(8, 4)).double()


def train(epochs, **settings):
    module = RetrievalModule(with_batch_norm(), SmoothAPLoss(tau=0.1), optimizer=SGD)
    run = trainer(max_epochs=epochs, callbacks=[Unfreeze()])
    run.fit(module, DataLoader(batches(), batch_size=None), weights_only=True, **settings)
    return module, run


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_run_goes_on_with_the_layers_that_were_trained(epochs, tmp_path):
    """A module that is loaded outside of a run is left as it is."""
    whole, _ = train(3)
    _, part = train(epochs)
    part.save_checkpoint(tmp_path / "part.ckpt")
    resumed, _ = train(3, ckpt_path=tmp_path / "part.ckpt")
    assert resumed.embedder[0][1].track_running_stats
    assert_same(resumed, whole)
    for found, expected in zip(resumed.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    frozen = with_batch_norm().requires_grad_(False)
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "part.ckpt", embedder=frozen, weights_only=True)
    assert not any(parameter.requires_grad for parameter in loaded.embedder.parameters())
