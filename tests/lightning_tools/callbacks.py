"""What each callback of Lightning does with a RetrievalModule, against a loop by hand or the run without it."""

import csv
import functools

import pytest
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import ExponentialLR

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training import small_training
from tests.lightning_tools.runs import (
    BATCHES,
    EPOCHS,
    STEPS,
    assert_step,
    assert_unchanged,
    fit,
    flat,
    make_module,
    make_run,
    plain,
)


def loop(after_epoch, parameters):
    """Train the small network in a plain loop; `after_epoch(network, optimizer, epoch)` changes it between epochs."""
    network = small_training.net()
    optimizer = torch.optim.SGD(parameters(network), lr=0.5)
    for epoch in range(3):
        small_training.train_plainly(network, optimizer, small_training.batches())
        after_epoch(network, optimizer, epoch)
    return network


def small_run(callback, kind=RetrievalModule):
    """The network after three epochs with a callback."""
    module = kind(small_training.net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=small_training.SGD)
    small_training.fit(module, small_training.batches(), max_epochs=3, callbacks=[callback])
    return module.embedder


def last_layer(network):
    return network[3].parameters()


def unfreeze_first_layer(lrs):
    def after_epoch(network, optimizer, epoch):
        if epoch == 0:
            optimizer.add_param_group({"params": list(network[0].parameters())})
        optimizer.param_groups[1]["lr"] = lrs[epoch]

    return after_epoch


def base_finetuning(folder):
    """Runs that are resumed are in tests/lightning_retrieval/training/test_manual_training.py."""
    expected = loop(unfreeze_first_layer([0.125, 0.125, 0.125]), last_layer)
    small_training.assert_same(small_run(small_training.Unfreeze()), expected)


class WithBackbone(RetrievalModule):
    @property
    def backbone(self):
        return self.embedder[0]


def backbone_finetuning(folder):
    """The learning rate of the first layer: 0.5 x 0.1 in epoch 1, twice that in epoch 2."""
    expected = loop(unfreeze_first_layer([0.05, 0.1, 0.1]), last_layer)
    callback = callbacks.BackboneFinetuning(1, lambda_func=lambda _: 2.0, backbone_initial_ratio_lr=0.1)
    small_training.assert_same(small_run(callback, WithBackbone), expected)


def model_pruning(folder):
    """A quarter of the weights that are left, after each epoch."""

    def after_epoch(network, *_):
        layers = [(network[0], "weight"), (network[3], "weight")]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.25)

    expected = loop(after_epoch, nn.Module.parameters)
    for layer in (expected[0], expected[3]):
        prune.remove(layer, "weight")
    settings = {"parameter_names": ["weight"], "amount": 0.25, "use_lottery_ticket_hypothesis": False}
    found = small_run(callbacks.ModelPruning("l1_unstructured", **settings))
    values, wanted = dict(found.named_parameters()), dict(expected.named_parameters())
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12)
    pruned = sum(int((found[index].weight == 0).sum()) for index in (0, 3))
    assert pruned == 46  # of 80 weights: 20, then 15 of 60, then 11 of 45


class Writer(callbacks.BasePredictionWriter):
    def __init__(self, interval):
        super().__init__(interval)
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, *_):
        assert prediction["ids"].tolist() == list(batch_indices)
        self.batches.append(prediction["embeddings"])

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        (batch_indices,) = batch_indices
        assert [prediction["ids"].tolist() for prediction in predictions] == batch_indices
        self.epochs.append([prediction["embeddings"] for prediction in predictions])


def prediction_writer(folder):
    writer = Writer("batch_and_epoch")
    run = make_run([writer])
    run.trainer.predict(run.module, run.data)
    with torch.no_grad():
        expected = run.module.eval()(run.data.test_set.images)
    torch.testing.assert_close(torch.cat(writer.batches), expected)
    torch.testing.assert_close(torch.cat(writer.epochs[0]), expected)


def lambda_callback(folder):
    """One backward pass and one step for each batch, which has three chunks."""
    steps, backward, epochs = [], [], []
    callback = callbacks.LambdaCallback(
        on_before_backward=lambda *_: backward.append(1),
        on_before_zero_grad=lambda *_: pytest.fail("the module sets gradients to zero itself"),
        on_before_optimizer_step=lambda *_: steps.append(1),
        on_train_epoch_end=lambda trainer, _: epochs.append(trainer.current_epoch),
    )
    assert_unchanged(fit([callback]))
    assert (len(backward), len(steps), epochs) == (STEPS, STEPS, [0, 1, 2])


own_callback = lambda_callback


class OwnCheckpoint(callbacks.Checkpoint):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def checkpoint(folder):
    """A checkpoint callback of one's own, and a run that resumes from what it wrote."""
    assert_unchanged(fit([OwnCheckpoint(folder)], enable_checkpointing=True))
    assert_unchanged(fit(ckpt_path=folder / "0.ckpt"))


def model_checkpoint(folder):
    """The best checkpoint is that of the largest metric, also if there are others between the validations."""
    best = callbacks.ModelCheckpoint(folder / "best", monitor="val/mAP", mode="max")
    settings = {"every_n_train_steps": 2, "save_top_k": -1, "save_last": True}
    steps = callbacks.ModelCheckpoint(folder / "steps", filename="{step}", **settings)
    loss = callbacks.ModelCheckpoint(folder / "loss", monitor="train/loss", every_n_train_steps=1, filename="{step}")
    values, losses = {}, {}
    note = callbacks.LambdaCallback(
        on_validation_end=lambda trainer, _: values.update({trainer.global_step: value_of(trainer, "val/mAP")}),
        on_train_batch_end=lambda trainer, *_: losses.update({trainer.global_step: value_of(trainer, "train/loss")}),
    )
    run = fit([best, steps, loss, note], enable_checkpointing=True, num_sanity_val_steps=0)
    assert_unchanged(run)
    assert_saved(best.best_model_path, run, max(values, key=values.get))
    assert_saved(steps.last_model_path, run, STEPS - 1)
    assert_saved(loss.best_model_path, run, min(losses, key=losses.get))
    for step in range(2, STEPS, 2):
        assert_saved(folder / f"steps/step={step}.ckpt", run, step)


def value_of(trainer, name):
    return float(trainer.callback_metrics[name])


def assert_saved(path, run, step):
    saved = torch.load(path, weights_only=True)
    weights = [saved["state_dict"][name].double().flatten() for name, _ in run.module.named_parameters()]
    assert saved["global_step"] == step
    assert torch.equal(torch.cat(weights), run.record.weights[step])


class FailOnce(callbacks.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 4:
            raise RuntimeError("a failure")


def on_exception_checkpoint(folder):
    """The run that continues from it ends as if nothing had happened."""
    failing = [callbacks.OnExceptionCheckpoint(folder), FailOnce()]
    with (
        pytest.warns(UserWarning, match="there is no last checkpoint available"),
        pytest.raises(RuntimeError, match="a failure"),
    ):
        fit(failing, ckpt_path="last", enable_checkpointing=True)
    assert_unchanged(fit(ckpt_path=folder / "on_exception.ckpt"))


def device_stats_monitor(folder):
    pytest.importorskip("psutil")
    assert_unchanged(fit([callbacks.DeviceStatsMonitor()], logger=CSVLogger(folder)))


def throughput_monitor(folder):
    logger = CSVLogger(folder)
    callback = callbacks.ThroughputMonitor(lambda batch: len(batch["labels"]), window_size=2)
    with pytest.warns(UserWarning, match="you need to define a `flops_per_batch` attribute"):
        assert_unchanged(fit([callback], logger=logger, log_every_n_steps=1))
    assert column(logger, "train/samples") == [9.0 * (step + 1) for step in range(STEPS)]
    assert len(column(logger, "train/device/samples_per_sec")) > 0


def column(logger, name):
    """The values of a metric in the file of a logger."""
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def early_stopping(folder):
    run = fit([callbacks.EarlyStopping("val/mAP", mode="max", patience=1, min_delta=1e9)], max_epochs=9)
    assert_step(run, 2 * BATCHES)


def learning_rate_monitor(folder):
    logger = CSVLogger(folder)
    module = make_module(lr_scheduler=functools.partial(ExponentialLR, gamma=0.5), lr_scheduler_interval="step")
    fit([callbacks.LearningRateMonitor("step")], module, logger=logger, log_every_n_steps=1)
    assert column(logger, "lr-AdamW") == pytest.approx([0.05 * 0.5**step for step in range(STEPS)])


def timer(folder):
    run = fit([callbacks.Timer({"seconds": 0}, interval="step")])
    assert run.trainer.global_step <= 1
    elapsed = callbacks.Timer({"hours": 1})
    assert_unchanged(fit([elapsed]))
    assert 0 < elapsed.time_elapsed("train") < 3600


def unchanged(kind, package="pytorch_lightning", **flags):
    """The witness of a callback that shows something and trains nothing."""

    def witness(folder):
        pytest.importorskip(package)
        assert_unchanged(fit([kind()], **flags))

    return witness


class Bar(callbacks.ProgressBar):
    """A progress bar of one's own: what it could show after each step."""

    shown = None

    def on_train_batch_end(self, trainer, pl_module, *_):
        Bar.shown = self.get_metrics(trainer, pl_module)


def progress_bar(folder):
    assert_unchanged(fit([Bar()], enable_progress_bar=True))
    assert Bar.shown["train/loss"] == pytest.approx(plain().metrics["train/loss"], rel=1e-2)


def moving_average(folder):
    """The moving average of the weights after each step, also in a run that was resumed."""
    expected = plain().record.weights[1]
    for step in range(2, STEPS + 1):
        expected = 0.75 * expected + 0.25 * plain().record.weights[step]
    assert_average(lambda: callbacks.EMAWeightAveraging(decay=0.75), expected, folder)


def average(folder):
    weights = [plain().record.weights[step] for step in range(1, STEPS + 1)]
    assert_average(callbacks.WeightAveraging, sum(weights) / STEPS, folder)


def assert_average(make, expected, folder):
    """Validations see the average, training goes on with the weights, and the run ends with the average."""
    run = fit([make()])
    torch.testing.assert_close(flat(run.module), expected, rtol=0, atol=1e-6)
    assert torch.equal(run.record.weights[STEPS], plain().record.weights[STEPS])
    half = fit([make(), OwnCheckpoint(folder)], max_epochs=EPOCHS - 1, enable_checkpointing=True)
    assert half.trainer.global_step == STEPS - BATCHES
    resumed = fit([make()], ckpt_path=folder / f"{EPOCHS - 2}.ckpt")
    assert torch.equal(resumed.record.weights[STEPS], plain().record.weights[STEPS])
    assert torch.equal(flat(resumed.module), flat(run.module))
    assert resumed.metrics["val/mAP"] == run.metrics["val/mAP"]
