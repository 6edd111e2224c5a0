"""Learning rate schedulers, stepped as in a plain loop, also after a resume."""

import functools

import pytest
import pytorch_lightning as pl
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from tests.lightning_retrieval.training.small_training import SGD, Log, assert_same, batches, fit, net, trainer


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
