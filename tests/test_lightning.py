"""Flags and callbacks of Lightning: a RetrievalModule trains as without them, or an error says why it cannot."""

import csv
import functools
import os
import pickle
import warnings
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, XLAStrategy
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.utils import prune
from torch.optim.lr_scheduler import ExponentialLR

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import RetrievalDataModule
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.training.first_steps import check_trainer
from tests.lightning_retrieval.training import small_training
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer
from tests.refusals import refusal_test

BATCHES, EPOCHS = 3, 3
STEPS = EPOCHS * BATCHES


class PointData(RetrievalDataModule):
    """Three batches of three classes; six batches in evaluation."""

    train_set, val_set, test_set = Points(1), Points(2), Points(3, 29)

    def __init__(self):
        super().__init__(classes_per_batch=3, samples_per_class=3, eval_batch_size=5, seed=1)


class Record(pl.Callback):
    """Keeps the weights after each step, the steps at which a validation ended, and the number of its batches."""

    def __init__(self):
        self.weights, self.validations, self.val_batches = {}, [], 0

    def on_train_batch_end(self, trainer, module, *_):
        self.weights[trainer.global_step] = flat(module)

    def on_validation_epoch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)

    def on_validation_batch_end(self, trainer, *_):
        self.val_batches += not trainer.sanity_checking


@dataclass
class Run:
    """A run and what was recorded of it."""

    trainer: pl.Trainer
    module: RetrievalModule
    record: Record

    @property
    def metrics(self):
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


def flat(module):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def make_module(dropout=0.2, **settings):
    """A module whose training depends on the order of things: dropout, chunks and a memory."""
    torch.manual_seed(4)
    network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4))
    defaults = {
        "chunk_size": 4,
        "memory": CrossBatchMemory(12),
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.05),
    }
    return RetrievalModule(network, SmoothAPLoss(tau=0.1), **{**defaults, **settings})


def make_run(callbacks=(), module=None, **flags):
    """A run that has not begun; `flags` are those of the Trainer."""
    record = Record()
    callbacks = [RetrievalEvaluation((1,)), record, *callbacks]
    trainer = quiet_trainer(**{"max_epochs": EPOCHS, **flags}, callbacks=callbacks)
    return Run(trainer, module or make_module(), record)


def fit(callbacks=(), module=None, ckpt_path=None, **flags):
    """A run that has ended."""
    run = make_run(callbacks, module, **flags)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RetrievalEvaluation: val metrics cover")
        run.trainer.fit(run.module, PointData(), ckpt_path=ckpt_path)
    return run


@functools.cache
def plain():
    """The run without any further callback or flag."""
    return fit()


def assert_step(run, step):
    """The run has stopped after a step of the plain run, with its weights."""
    assert run.trainer.global_step == step
    assert torch.equal(flat(run.module), plain().record.weights[step])


def assert_unchanged(run):
    """The run has trained and validated as the plain run."""
    assert_step(run, STEPS)
    expected = plain().metrics
    expected.pop("train/images/s", None)
    assert {name: run.metrics[name] for name in expected} == expected


def assert_saved(path, run, step):
    saved = torch.load(path, weights_only=True)
    weights = [saved["state_dict"][name].double().flatten() for name, _ in run.module.named_parameters()]
    assert saved["global_step"] == step
    assert torch.equal(torch.cat(weights), run.record.weights[step])


def column(logger, name):
    """The values of a metric in the file of a logger."""
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.parametrize(
    "flags",
    [
        {"inference_mode": False},
        {"num_sanity_val_steps": -1},
        {"reload_dataloaders_every_n_epochs": 1},
        {"sync_batchnorm": True},
        {"use_distributed_sampler": False},
        {"enable_progress_bar": True},
    ],
    ids=str,
)
def test_a_flag_that_does_not_change_the_training(flags):
    run = fit(**flags)
    assert_unchanged(run)
    assert run.record.validations == [BATCHES, 2 * BATCHES, STEPS]


def test_deterministic_algorithms_do_not_change_the_training():
    try:
        assert_unchanged(fit(deterministic=True))
    finally:
        torch.use_deterministic_algorithms(False)


def stop_training(trainer, *_):
    trainer.should_stop = True


AT_ONCE = callbacks.LambdaCallback(on_train_batch_end=stop_training)


@pytest.mark.parametrize(
    ("stops_by", "flags", "step"),
    [
        ([], {"max_epochs": 2}, 6),
        ([], {"max_steps": 5}, 5),
        ([], {"fast_dev_run": 2}, 2),
        ([], {"limit_train_batches": 0.7, "max_epochs": 1}, 2),
        ([AT_ONCE], {"min_epochs": 2}, 6),
        ([AT_ONCE], {"min_steps": 5}, 5),
        ([callbacks.EarlyStopping("val/mAP", mode="max", patience=1, min_delta=1e9)], {"max_epochs": 9}, 6),
    ],
)
def test_a_run_that_ends_early_has_the_weights_of_that_step(stops_by, flags, step):
    assert_step(fit(stops_by, **flags), step)


@pytest.mark.parametrize(
    ("flags", "validations", "batches"),
    [
        ({"val_check_interval": 2}, [2, 5, 8], 18),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None}, [2, 4, 6, 8], 24),
        ({"check_val_every_n_epoch": 2}, [6], 6),
        ({"limit_val_batches": 0.5}, [3, 6, 9], 9),
        ({"limit_val_batches": 0}, [], 0),
    ],
    ids=str,
)
def test_validations_at_other_steps_change_no_step(flags, validations, batches):
    run = fit(**flags)
    assert_step(run, STEPS)
    assert (run.record.validations, run.record.val_batches) == (validations, batches)


# On the CPU, "16-mixed" is "bf16-mixed"; float16 with a loss scale is tested by the tests with the marker `gpu`.
@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("32-true", torch.float32, False),
        ("64-true", torch.float64, False),
        ("16-true", torch.float16, False),
        ("bf16-true", torch.bfloat16, False),
        ("bf16-mixed", torch.float32, True),
    ],
)
def test_precision_is_that_of_the_network_and_the_loss_has_float32_or_better(precision, dtype, autocast):
    batches = [(images.float(), labels) for images, labels in small_training.batches()]
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
    small_training.fit(module, batches, precision=precision)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    torch.testing.assert_close(flat(module), flat(expected), rtol=0, atol=1e-6)


def test_logs_have_the_losses_and_the_learning_rates_of_their_steps(tmp_path):
    every_step, every_fourth = CSVLogger(tmp_path / "1"), CSVLogger(tmp_path / "4")
    schedule = {"lr_scheduler": functools.partial(ExponentialLR, gamma=0.5), "lr_scheduler_interval": "step"}
    for logger, steps in ((every_step, 1), (every_fourth, 4)):
        monitor = callbacks.LearningRateMonitor("step")
        run = fit([monitor], make_module(**schedule), logger=logger, log_every_n_steps=steps)
    losses = column(every_step, "train/loss")
    assert len(losses) == STEPS
    assert losses[-1] == pytest.approx(run.metrics["train/loss"])
    assert column(every_fourth, "train/loss") == losses[3::4]
    assert column(every_step, "lr-AdamW") == pytest.approx([0.05 * 0.5**step for step in range(STEPS)])


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


class WithBackbone(RetrievalModule):
    @property
    def backbone(self):
        return self.embedder[0]


WITH_BACKBONE = callbacks.BackboneFinetuning(1, lambda_func=lambda _: 2.0, backbone_initial_ratio_lr=0.1)


@pytest.mark.parametrize(
    ("callback", "kind", "rates"),
    [
        (small_training.Unfreeze(), RetrievalModule, [0.125, 0.125, 0.125]),
        (WITH_BACKBONE, WithBackbone, [0.05, 0.1, 0.1]),  # 0.5 x 0.1 in epoch 1, twice that in epoch 2
    ],
)
def test_a_layer_that_begins_to_train_is_trained_as_in_a_loop(callback, kind, rates):
    def unfreeze_first_layer(network, optimizer, epoch):
        if epoch == 0:
            optimizer.add_param_group({"params": list(network[0].parameters())})
        optimizer.param_groups[1]["lr"] = rates[epoch]

    expected = loop(unfreeze_first_layer, lambda network: network[3].parameters())
    small_training.assert_same(small_run(callback, kind), expected)


def test_pruned_weights_are_those_of_a_loop():
    def prune_a_quarter(network, *_):
        layers = [(network[0], "weight"), (network[3], "weight")]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.25)

    expected = loop(prune_a_quarter, nn.Module.parameters)
    for layer in (expected[0], expected[3]):
        prune.remove(layer, "weight")
    settings = {"parameter_names": ["weight"], "amount": 0.25, "use_lottery_ticket_hypothesis": False}
    found = dict(small_run(callbacks.ModelPruning("l1_unstructured", **settings)).named_parameters())
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


class Writer(callbacks.BasePredictionWriter):
    def __init__(self):
        super().__init__("epoch")

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        assert [prediction["ids"].tolist() for prediction in predictions] == batch_indices[0]
        self.written = torch.cat([prediction["embeddings"] for prediction in predictions])


def test_a_writer_of_predictions_gets_the_embeddings_of_each_image():
    writer = Writer()
    run = make_run([writer])
    run.trainer.predict(run.module, PointData())
    with torch.no_grad():
        torch.testing.assert_close(writer.written, run.module.eval()(PointData.test_set.images))


def test_checkpoints_of_steps_and_of_the_best_metric_have_the_weights_of_their_steps(tmp_path):
    """The best one is that of the largest metric, also if there are others between the validations."""
    best = callbacks.ModelCheckpoint(tmp_path / "best", monitor="val/mAP", mode="max")
    steps = callbacks.ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=2, save_top_k=-1)
    loss = callbacks.ModelCheckpoint(tmp_path / "loss", "{step}", monitor="train/loss", every_n_train_steps=1)
    values, losses = {}, {}

    def note(found, name):
        return lambda trainer, *_: found.update({trainer.global_step: float(trainer.callback_metrics[name])})

    notes = callbacks.LambdaCallback(
        on_validation_end=note(values, "val/mAP"), on_train_batch_end=note(losses, "train/loss")
    )
    run = fit([best, steps, loss, notes], enable_checkpointing=True, num_sanity_val_steps=0)
    assert_unchanged(run)
    assert_saved(best.best_model_path, run, max(values, key=values.get))
    assert_saved(loss.best_model_path, run, min(losses, key=losses.get))
    for step in range(2, STEPS, 2):
        assert_saved(tmp_path / f"steps/step={step}.ckpt", run, step)


def test_checkpoints_that_a_thread_writes_have_the_weights_of_their_steps(tmp_path):
    save = callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = fit([save], plugins=[AsyncCheckpointIO()], enable_checkpointing=True)
    for step in range(1, STEPS + 1):
        assert_saved(tmp_path / f"step={step}.ckpt", run, step)
    assert_unchanged(fit(ckpt_path=tmp_path / "step=4.ckpt", plugins=[AsyncCheckpointIO()]))


class FailOnce(callbacks.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 4:
            raise RuntimeError("a failure")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_a_run_that_continues_after_an_exception_ends_as_if_nothing_had_happened(tmp_path):
    with pytest.raises(RuntimeError, match="a failure"):
        fit([callbacks.OnExceptionCheckpoint(tmp_path), FailOnce()], ckpt_path="last", enable_checkpointing=True)
    assert_unchanged(fit(ckpt_path=tmp_path / "on_exception.ckpt"))


class SaveEachEpoch(callbacks.Checkpoint):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize("average", ["moving", "equal"])
def test_averaged_weights_are_validated_and_kept_also_after_a_resume(average, tmp_path):
    """Training goes on with the weights that are not averaged."""
    weights = plain().record.weights
    if average == "moving":
        make = functools.partial(callbacks.EMAWeightAveraging, decay=0.75)
        expected = weights[1]
        for step in range(2, STEPS + 1):
            expected = 0.75 * expected + 0.25 * weights[step]
    else:
        make = callbacks.WeightAveraging
        expected = sum(weights[step] for step in range(1, STEPS + 1)) / STEPS
    run = fit([make()])
    torch.testing.assert_close(flat(run.module), expected, rtol=0, atol=1e-6)
    assert torch.equal(run.record.weights[STEPS], weights[STEPS])
    fit([make(), SaveEachEpoch(tmp_path)], max_epochs=EPOCHS - 1, enable_checkpointing=True)
    resumed = fit([make()], ckpt_path=tmp_path / f"{EPOCHS - 2}.ckpt")
    assert torch.equal(resumed.record.weights[STEPS], weights[STEPS])
    assert torch.equal(flat(resumed.module), flat(run.module))
    assert resumed.metrics["val/mAP"] == run.metrics["val/mAP"]


def fit_with(*callbacks, **flags):
    return lambda: fit(callbacks, enable_checkpointing=True, **flags)


def tune(method):
    run = make_run()
    return getattr(Tuner(run.trainer), method)(run.module, PointData())


@owned_by("RetrievalModule")
def check_strategy(kind, **settings):
    """Ask without a run, since the packages and the devices of some strategies need not be there."""
    strategy = kind(**settings) if settings else object.__new__(kind)
    state = SimpleNamespace(fn="fit")
    flags = {"overfit_batches": 0, "gradient_clip_val": None, "accumulate_grad_batches": 1}
    trainer = SimpleNamespace(strategy=strategy, callbacks=[], state=state, **flags)
    check_trainer(SimpleNamespace(trainer=trainer))


HOOK = {"ddp_comm_hook": fp16_compress_hook}
EVERY_SECOND = callbacks.ModelCheckpoint(train_time_interval=timedelta(seconds=1))
BETWEEN_VALIDATIONS = callbacks.ModelCheckpoint(monitor="val/mAP", every_n_train_steps=2)
TABLE = {
    "RetrievalModule": [
        (fit_with(overfit_batches=2), InvalidValue, "", "limit_train_batches"),
        (fit_with(gradient_clip_val=0.5), InvalidValue, "", "updates=Updates(gradient_clip_val=0.5)"),
        (fit_with(accumulate_grad_batches=2), InvalidValue, "", "larger batches"),
        (fit_with(callbacks.BatchSizeFinder()), InvalidValue, "", "chunk_size='auto'"),
        (fit_with(callbacks.LearningRateFinder()), InvalidValue, "", "LearningRateFinder"),
        (fit_with(callbacks.StochasticWeightAveraging(swa_lrs=0.1)), InvalidValue, "", "EMAWeightAveraging"),
        (fit_with(EVERY_SECOND), InvalidValue, "", "every_n_train_steps"),
        (fit_with(BETWEEN_VALIDATIONS), InvalidValue, "", "another ModelCheckpoint"),
        (lambda: check_strategy(DDPStrategy, static_graph=True), InvalidValue, "", "static_graph"),
        (lambda: check_strategy(DDPStrategy, **HOOK), InvalidValue, "", "ddp_comm_hook"),
        (lambda: check_strategy(DDPStrategy, model_averaging_period=4), InvalidValue, "", "model_averaging_period"),
        (lambda: check_strategy(FSDPStrategy), InvalidValue, "", "FSDPStrategy"),
        (lambda: check_strategy(XLAStrategy), InvalidValue, "", "XLAStrategy"),
        (lambda: check_strategy(DeepSpeedStrategy), InvalidValue, "", "DeepSpeedStrategy"),
        (lambda: tune("lr_find"), InvalidValue, "", "LearningRateFinder"),
        (lambda: tune("scale_batch_size"), InvalidValue, "", "chunk_size='auto'"),
    ]
}
test_invalid_arguments_raise = refusal_test(TABLE)


def without_dropout(**flags):
    """The weights and the metric of a run that any number of processes should train: it draws no random numbers."""
    module = make_module(dropout=0.0, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    run = fit(module=module, **flags)
    return flat(run.module), run.metrics["val/mAP"]


def by_launcher(rank, world_size):
    """Runs of processes that somebody else has started."""
    cases = [{"use_distributed_sampler": False}, {"reload_dataloaders_every_n_epochs": 1}]
    return [without_dropout(devices=world_size, strategy="ddp", **flags) for flags in cases]


def on_two_nodes(rank, world_size):
    """Each process is a node of its own."""
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    return [without_dropout(devices=1, num_nodes=world_size, strategy="ddp_find_unused_parameters_true")]


def by_trainer(rank, world_size):
    """One process, whose Trainer starts the others."""
    return [without_dropout(devices=2, strategy="ddp_fork")]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "processes"), [(by_launcher, 2), (on_two_nodes, 2), (by_trainer, 1)])
def test_several_processes_train_the_same(function, processes, run_processes):
    weights, metric = without_dropout()
    for of_rank in run_processes(function, processes, backend=None):
        for found, found_metric in of_rank:
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)
            assert found_metric == pytest.approx(metric, abs=1e-5)


def test_a_run_can_be_sent_to_a_process_that_is_spawned():
    """As "ddp_spawn" does: the Trainer with its callbacks, the module and the data are pickled."""
    run = make_run()
    trainer, module, data = pickle.loads(pickle.dumps((run.trainer, run.module, PointData())))
    trainer.fit(module, data)
    assert torch.equal(flat(module), flat(plain().module))
