"""What Lightning leaves to a module: clipping, schedulers, results of a step, and layers that callbacks unfreeze."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.lightning_retrieval.training.small_training import SGD, Log, assert_same, batches, fit, net, trainer
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


@pytest.mark.parametrize("limit", [5, 3])
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("own", [False, True], ids=["arguments", "overridden"])
def test_schedulers_are_stepped_as_in_a_plain_loop(own, interval, frequency, limit):
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

    kind, log = OwnOptimizers if own else RetrievalModule, Log()
    module = kind(
        net(),
        SmoothAPLoss(tau=0.1),
        optimizer=SGD,
        lr_scheduler=None if own else functools.partial(ExponentialLR, gamma=0.5),
        lr_scheduler_interval=interval,
        lr_scheduler_frequency=frequency,
    )
    fit(module, batches(5), max_epochs=4, limit_train_batches=limit, callbacks=[log])
    assert log.rates == rates
    assert_same(module.embedder, plain)


class PlateauByHand(RetrievalModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer, "max", 0.5, 0, threshold=9.0)}


@pytest.mark.parametrize("own", [False, True], ids=["arguments", "overridden"])
@pytest.mark.parametrize(
    ("monitor", "validated", "frequency", "rates"),
    [
        ("val/mAP", True, 1, [0.5, 0.5, 0.25, 0.125]),
        ("val/R@1", True, 1, [0.5, 0.5, 0.25, 0.125]),
        ("train/loss", False, 1, [0.5, 0.5, 0.25, 0.125]),
    ],
)
def test_plateau_looks_at_its_monitor(own, monitor, validated, frequency, rates):
    """Nothing is ten times better than the first value, so each later epoch halves the rate."""
    halve = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=9.0)
    module = (PlateauByHand if own else RetrievalModule)(
        net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=halve, lr_scheduler_monitor=monitor
    )
    log, seen = Log(), []

    class Seen(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append((float(trainer.callback_metrics[monitor]), module.lr_schedulers().best))

    validation = batches(2) if validated else None
    fit(module, batches(2), validation, max_epochs=4, callbacks=[log, RetrievalEvaluation(ks=(1,)), Seen()])
    assert log.rates[::2] == [[rate] for rate in rates]
    if validated:
        assert seen[0][1] == pytest.approx(seen[0][0], abs=1e-12)


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

    def make(interval):
        halve = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=9.0)
        return RetrievalModule(
            net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=halve, lr_scheduler_interval=interval
        )

    settings = {"max_epochs": 2, "callbacks": [RetrievalEvaluation(ks=(1,))], **flags}
    with pytest.raises(ValueError, match=r"^RetrievalModule: ReduceLROnPlateau .* val_check_interval=.*'step'"):
        fit(make("epoch"), batches(3), batches(2), **settings)
    run = fit(make("step"), batches(3), batches(2), **settings)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5 ** (steps - 1)


def test_plateau_needs_a_validation_in_some_epochs_only():
    halve = functools.partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0, threshold=9.0)
    for flags in ({"check_val_every_n_epoch": 2}, {"val_check_interval": 6, "check_val_every_n_epoch": None}):
        module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=halve)
        run = fit(module, batches(3), batches(2), max_epochs=6, callbacks=[RetrievalEvaluation(ks=(1,))], **flags)
        assert run.optimizers[0].param_groups[0]["lr"] == 0.125  # three validations


@pytest.mark.refusal
def test_a_missing_monitor_raises():
    module = RetrievalModule(net(), SmoothAPLoss(), lr_scheduler=ReduceLROnPlateau, lr_scheduler_monitor="val/map")
    with pytest.raises(ValueError, match=r"`lr_scheduler_monitor`, got 'val/map', which was not logged; .*'val/mAP'"):
        fit(module, batches(1), batches(1), callbacks=[RetrievalEvaluation((1,))])


def test_an_epoch_schedule_survives_a_resume(tmp_path):
    def make():
        halve = functools.partial(ExponentialLR, gamma=0.5)
        return RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, lr_scheduler=halve)

    whole, part, log, rest = make(), make(), Log(), Log()
    fit(whole, batches(), max_epochs=4, callbacks=[log])
    fit(make(), batches(), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    loader = DataLoader(batches(), batch_size=None)
    trainer(max_epochs=4, callbacks=[rest]).fit(part, loader, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert rest.rates == log.rates[6:] == [[0.125]] * 3 + [[0.0625]] * 3
    assert_same(part, whole)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.embedder[0], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embedder[0], optimizer, lr=0.125)


def train(epochs, **settings):
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    module = RetrievalModule(nn.Sequential(first, nn.Linear(8, 4)).double(), SmoothAPLoss(tau=0.1), optimizer=SGD)
    run = trainer(max_epochs=epochs, callbacks=[Unfreeze()])
    run.fit(module, DataLoader(batches(), batch_size=None), weights_only=True, **settings)
    return module, run


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_run_goes_on_with_the_layers_that_were_trained(epochs, tmp_path):
    whole, _ = train(3)
    _, part = train(epochs)
    part.save_checkpoint(tmp_path / "part.ckpt")
    resumed, _ = train(3, ckpt_path=tmp_path / "part.ckpt")
    assert resumed.embedder[0][1].track_running_stats
    for (name, value), (_, expected) in zip(resumed.state_dict().items(), whole.state_dict().items(), strict=True):
        if torch.is_tensor(value):
            torch.testing.assert_close(
                value, expected, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_module_outside_of_a_run_is_left_as_it_is(tmp_path):
    _, run = train(2)
    run.save_checkpoint(tmp_path / "part.ckpt")
    embedder = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4)).double()
    embedder.requires_grad_(False)
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "part.ckpt", embedder=embedder, weights_only=True)
    assert not any(parameter.requires_grad for parameter in loaded.embedder.parameters())
