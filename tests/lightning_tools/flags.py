"""What each flag of the Trainer does with a RetrievalModule, against the run without it."""

import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import SingleDeviceStrategy

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training import small_training
from tests.lightning_tools.callbacks import assert_saved, column
from tests.lightning_tools.runs import BATCHES, EPOCHS, STEPS, assert_step, assert_unchanged, fit, flat, make_run, plain


def unchanged(*settings):
    """The witness of a flag that must not change the training: each of its settings gives the plain run."""

    def witness(folder):
        for flags in settings:
            assert_unchanged(fit(**flags))

    return witness


def stops_after(step, **flags):
    """The witness of a flag that ends the training after a step of the plain run."""

    def witness(folder):
        assert_step(fit(**flags), step)

    return witness


def strategy(folder):
    """DDP is compared by `tests/test_same_run.py`, and by the names that Lightning gives it by `test_lightning.py`."""
    assert_unchanged(fit(strategy=SingleDeviceStrategy("cpu"), accelerator="auto"))
    assert_unchanged(fit(strategy="auto", accelerator=CPUAccelerator()))


# {precision: (dtype of the network, whether autocast to bfloat16)}. On the CPU, "16-mixed" is "bf16-mixed" with a
# warning of Lightning; float16 with a loss scale is tested by the tests with the marker `gpu`.
PRECISIONS = {
    "32-true": (torch.float32, False),
    "64-true": (torch.float64, False),
    "16-true": (torch.float16, False),
    "bf16-true": (torch.bfloat16, False),
    "bf16-mixed": (torch.float32, True),
}


def precision(folder):
    """A plain loop whose network has the same type, and whose loss is computed in float32 or better."""
    batches = [(images.float(), labels) for images, labels in small_training.batches()]
    for name, (dtype, autocast) in PRECISIONS.items():
        expected = small_training.net().to(dtype)
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
        for images, labels in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                embeddings = expected(images.to(dtype))
            in_loss = torch.promote_types(dtype, torch.float32)
            SmoothAPLoss(tau=0.1)(embeddings.to(in_loss), labels).backward()
            optimizer.step()
        network = small_training.net()
        if dtype != torch.float64:
            network.float()
        module = RetrievalModule(network, SmoothAPLoss(tau=0.1), optimizer=small_training.SGD)
        small_training.fit(module, batches, precision=name)
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        torch.testing.assert_close(flat(module), flat(expected), rtol=0, atol=1e-6, msg=f"{name}: {flat(module)}")


def logger(folder):
    """Every step of the plain run is in the log."""
    written = CSVLogger(folder)
    assert_unchanged(fit(logger=written, log_every_n_steps=1))
    losses = column(written, "train/loss")
    assert len(losses) == STEPS
    assert losses[-1] == pytest.approx(plain().metrics["train/loss"])
    assert_unchanged(fit(logger=[CSVLogger(folder / "one"), CSVLogger(folder / "two")]))


def log_every_n_steps(folder):
    every_step, every_fourth = CSVLogger(folder / "1"), CSVLogger(folder / "4")
    assert_unchanged(fit(logger=every_step, log_every_n_steps=1))
    assert_unchanged(fit(logger=every_fourth, log_every_n_steps=4))
    assert column(every_fourth, "train/loss") == column(every_step, "train/loss")[3::4]


def fast_dev_run(folder):
    """Two batches of each kind, and nothing is written."""
    run = fit(fast_dev_run=2, enable_checkpointing=None, default_root_dir=folder)
    assert_step(run, 2)
    assert run.record.batches["val"] == 2
    assert not list(folder.iterdir())


def stops_late(step, **flags):
    """The witness of a flag with which a callback that wants to stop after the first step has to wait."""

    def stop_training(trainer, *_):
        trainer.should_stop = True

    def witness(folder):
        assert_step(fit([callbacks.LambdaCallback(on_train_batch_end=stop_training)], **flags), step)

    return witness


def max_time(folder):
    assert fit(max_time={"seconds": 0}).trainer.global_step <= 1
    assert_unchanged(fit(max_time="00:01:00:00"))


def limit_train_batches(folder):
    """The first batches of each epoch; the schedule of the epochs does not change."""
    assert_step(fit(limit_train_batches=2, max_epochs=1), 2)
    assert_step(fit(limit_train_batches=0.7, max_epochs=1), 2)
    run = fit(limit_train_batches=2)
    assert run.trainer.global_step == 2 * EPOCHS


def limit_val_batches(folder):
    for limit, batches in {2: 2, 0.5: 3, 0: 0}.items():
        run = fit(limit_val_batches=limit, max_epochs=1)
        assert_step(run, BATCHES)
        assert run.record.batches["val"] == batches


def limit_batches(kind):
    """The witness of the flag that limits the batches of `test` or `predict`."""

    def witness(folder):
        for limit, batches in {2: 2, 0.5: 3, 0: 0}.items():
            run = make_run(**{f"limit_{kind}_batches": limit})
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "RetrievalEvaluation: test metrics cover")
                getattr(run.trainer, kind)(run.module, run.data)
            assert run.record.batches[kind] == batches

    return witness


def val_check_interval(folder):
    """Validations in the middle of an epoch, across epochs and by the clock change no step."""
    cases = [
        ({"val_check_interval": 2}, [2, 5, 8]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, [2, 4, 6, 8]),
        ({"val_check_interval": "00:00:00:00"}, list(range(1, STEPS + 1))),
    ]
    for flags, validations in cases:
        run = fit(**flags)
        assert_step(run, STEPS)
        assert run.record.validations == validations


def check_val_every_n_epoch(folder):
    run = fit(check_val_every_n_epoch=2)
    assert_step(run, STEPS)
    assert run.record.validations == [2 * BATCHES]


def num_sanity_val_steps(folder):
    """The check before the training changes no step and no metric, whether it sees no batch or all."""
    for steps in (0, -1):
        run = fit(num_sanity_val_steps=steps)
        assert_unchanged(run)
        assert run.record.validations == [BATCHES, 2 * BATCHES, STEPS]


def enable_checkpointing(folder):
    run = fit(enable_checkpointing=True, default_root_dir=folder)
    assert_unchanged(run)
    (path,) = folder.rglob("*.ckpt")
    assert_saved(path, run, STEPS)


def default_root_dir(folder):
    run = fit(default_root_dir=folder, logger=True)
    assert_unchanged(run)
    assert Path(run.trainer.log_dir).is_relative_to(folder)


def enable_autolog_hparams(folder):
    for enabled in (True, False):
        logger = CSVLogger(folder / str(enabled))
        assert_unchanged(fit(logger=logger, enable_autolog_hparams=enabled))
        written = Path(logger.log_dir, "hparams.yaml").read_text()
        assert ("tau: 0.1" in written) == enabled


def deterministic(folder):
    try:
        assert_unchanged(fit(deterministic=True))
        assert_unchanged(fit(deterministic="warn"))
    finally:
        torch.use_deterministic_algorithms(False)


def detect_anomaly(folder):
    """A gradient that is not a number is found at the function that made it."""
    assert_unchanged(fit(detect_anomaly=True))
    run = make_run(detect_anomaly=True)
    run.module.embedder.append(RootOfZero())
    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="returned nan values"):
        run.trainer.fit(run.module, run.data)


class RootOfZero(torch.nn.Module):
    """Changes nothing, but its gradient is infinite times zero."""

    def forward(self, embeddings):
        return embeddings + (0 * embeddings).sqrt()


def profiler(folder):
    recorded = pl.profilers.SimpleProfiler()
    assert_unchanged(fit(profiler=recorded))
    assert len(recorded.recorded_durations["optimizer_step"]) == STEPS


def barebones(folder):
    """Lightning says that it does not log."""
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"])
    with pytest.warns(UserWarning, match=r"You are trying to `self\.log\(\)`"):
        run = fit(barebones=True, **off)
    assert_step(run, STEPS)


def plugins(folder):
    """Checkpoints that are written by a thread hold the weights of their step, and a run continues from them."""
    save = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = fit([save], plugins=[AsyncCheckpointIO()], enable_checkpointing=True)
    assert_unchanged(run)
    for step in range(1, STEPS + 1):
        assert_saved(folder / f"step={step}.ckpt", run, step)
    assert_unchanged(fit(ckpt_path=folder / "step=4.ckpt", plugins=[AsyncCheckpointIO()]))


def reload_dataloaders_every_n_epochs(folder):
    run = fit(reload_dataloaders_every_n_epochs=1)
    assert_unchanged(run)
    assert run.data.train_loaders == EPOCHS
