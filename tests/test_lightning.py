"""Each callback, strategy, method of the Tuner and flag of the Trainer of Lightning: right, or an error says why not.

The tables below say which, docs/lightning.md says the same to users, and every entry is shown by a run. Another version
of Lightning with a new callback or flag fails the last tests here, until somebody has tried it.
"""

import functools
import inspect
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from pytorch_lightning.plugins import BitsandbytesPrecision, TransformerEnginePrecision
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    StrategyRegistry,
    XLAStrategy,
)
from pytorch_lightning.tuner import Tuner
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_retrieval.invalid import owned_by
from lightning_retrieval.training.trainer_checks import check_trainer
from tests.lightning_tools import callbacks as of_callbacks
from tests.lightning_tools import flags as of_flags
from tests.lightning_tools.runs import fit, flat, make_module, make_run, plain, trainer_with


@dataclass
class Tool:
    """What is known of a callback, a method or a flag.

    Args:
        shown_by: called with an empty folder; fails unless the tool does what it should.
        wrong: {words of the error: callback, or flags of the Trainer}.
    """

    shown_by: Callable[[Path], None] | None = None
    wrong: dict[str, Any] | None = None

    @property
    def verdict(self):
        if self.wrong is None:
            return "right"
        if self.shown_by is None:
            return "raises"
        return "right in part"


CALLBACKS = {
    "BackboneFinetuning": Tool(
        of_callbacks.backbone_finetuning, {"the property `backbone`": callbacks.BackboneFinetuning()}
    ),
    "BaseFinetuning": Tool(of_callbacks.base_finetuning),
    "BasePredictionWriter": Tool(of_callbacks.prediction_writer),
    "BatchSizeFinder": Tool(wrong={"chunk_size='auto'": callbacks.BatchSizeFinder()}),
    "Callback": Tool(of_callbacks.own_callback),
    "Checkpoint": Tool(of_callbacks.checkpoint),
    "DeviceStatsMonitor": Tool(of_callbacks.device_stats_monitor),
    "EMAWeightAveraging": Tool(of_callbacks.moving_average),
    "EarlyStopping": Tool(of_callbacks.early_stopping),
    "GradientAccumulationScheduler": Tool(wrong={"chunk_size": callbacks.GradientAccumulationScheduler({0: 2})}),
    "LambdaCallback": Tool(of_callbacks.lambda_callback),
    "LearningRateFinder": Tool(wrong={"short runs": callbacks.LearningRateFinder()}),
    "LearningRateMonitor": Tool(of_callbacks.learning_rate_monitor),
    "ModelCheckpoint": Tool(
        of_callbacks.model_checkpoint,
        {
            r"train_time_interval=\.\.\.\) .* use every_n_train_steps": callbacks.ModelCheckpoint(
                train_time_interval=timedelta(seconds=1)
            ),
            r"monitor='val/mAP', every_n_train_steps=2\) .* another ModelCheckpoint": callbacks.ModelCheckpoint(
                monitor="val/mAP", every_n_train_steps=2
            ),
        },
    ),
    "ModelPruning": Tool(of_callbacks.model_pruning),
    "ModelSummary": Tool(of_callbacks.unchanged(callbacks.ModelSummary, enable_model_summary=True)),
    "OnExceptionCheckpoint": Tool(of_callbacks.on_exception_checkpoint),
    "ProgressBar": Tool(of_callbacks.progress_bar),
    "RichModelSummary": Tool(of_callbacks.unchanged(callbacks.RichModelSummary, "rich", enable_model_summary=True)),
    "RichProgressBar": Tool(of_callbacks.unchanged(callbacks.RichProgressBar, "rich", enable_progress_bar=True)),
    "SpikeDetection": Tool(wrong={"leave it out": callbacks.SpikeDetection()}),
    "StochasticWeightAveraging": Tool(wrong={"EMAWeightAveraging": callbacks.StochasticWeightAveraging(swa_lrs=0.1)}),
    "TQDMProgressBar": Tool(of_callbacks.unchanged(callbacks.TQDMProgressBar, enable_progress_bar=True)),
    "ThroughputMonitor": Tool(of_callbacks.throughput_monitor),
    "Timer": Tool(of_callbacks.timer),
    "WeightAveraging": Tool(of_callbacks.average),
}


@pytest.mark.parametrize("name", [name for name, tool in CALLBACKS.items() if tool.shown_by])
def test_a_callback_does_what_it_should(name, tmp_path):
    CALLBACKS[name].shown_by(tmp_path)


def wrong(table):
    """Parameters of a test of what raises: the words of the error, and what raises it."""
    return [
        pytest.param(words, value, id=f"{name} {number}")
        for name, tool in table.items()
        for number, (words, value) in enumerate((tool.wrong or {}).items())
    ]


@pytest.mark.refusal
@pytest.mark.parametrize(("words", "callback"), wrong(CALLBACKS))
def test_a_callback_that_cannot_work_raises(words, callback):
    run = make_run([callback], enable_checkpointing=True)
    name = type(callback).__name__
    with pytest.raises(ValueError, match=rf"^RetrievalModule: .*{name}.*{words}"):
        run.trainer.fit(run.module, run.data)


TUNER = {
    "lr_find": Tool(wrong={"LearningRateFinder of Lightning .* short runs": {}}),
    "scale_batch_size": Tool(wrong={"BatchSizeFinder of Lightning .* chunk_size='auto'": {}}),
}


@pytest.mark.refusal
@pytest.mark.parametrize("method", TUNER)
def test_a_method_of_the_tuner_raises(method):
    run = make_run()
    ((words, settings),) = TUNER[method].wrong.items()
    with pytest.raises(ValueError, match=rf"^RetrievalModule: .*{words}"):
        getattr(Tuner(run.trainer), method)(run.module, run.data, **settings)


TRAINER = {
    "accelerator": Tool(of_flags.strategy),
    "accumulate_grad_batches": Tool(wrong={"chunk_size": {"accumulate_grad_batches": 4}}),
    "barebones": Tool(of_flags.barebones),
    "benchmark": Tool(of_flags.unchanged({"benchmark": True})),
    "callbacks": Tool(of_callbacks.own_callback),
    "check_val_every_n_epoch": Tool(of_flags.check_val_every_n_epoch),
    "default_root_dir": Tool(of_flags.default_root_dir),
    "detect_anomaly": Tool(of_flags.detect_anomaly),
    "deterministic": Tool(of_flags.deterministic),
    "devices": Tool(of_flags.unchanged({"devices": "auto"}, {"devices": 1})),
    "enable_autolog_hparams": Tool(of_flags.enable_autolog_hparams),
    "enable_checkpointing": Tool(of_flags.enable_checkpointing),
    "enable_model_summary": Tool(of_flags.unchanged({"enable_model_summary": True})),
    "enable_progress_bar": Tool(of_flags.unchanged({"enable_progress_bar": True})),
    "fast_dev_run": Tool(of_flags.fast_dev_run),
    "gradient_clip_algorithm": Tool(
        wrong={r"updates=Updates\(gradient_clip_algorithm='value'": {"gradient_clip_algorithm": "value"}}
    ),
    "gradient_clip_val": Tool(
        wrong={r"updates=Updates\(gradient_clip_val=0\.5": {"gradient_clip_val": 0.5}},
    ),
    "inference_mode": Tool(of_flags.unchanged({"inference_mode": False})),
    "limit_predict_batches": Tool(of_flags.limit_batches("predict")),
    "limit_test_batches": Tool(of_flags.limit_batches("test")),
    "limit_train_batches": Tool(of_flags.limit_train_batches),
    "limit_val_batches": Tool(of_flags.limit_val_batches),
    "log_every_n_steps": Tool(of_flags.log_every_n_steps),
    "logger": Tool(of_flags.logger),
    "max_epochs": Tool(of_flags.stops_after(6, max_epochs=2)),
    "max_steps": Tool(of_flags.stops_after(5, max_steps=5)),
    "max_time": Tool(of_flags.max_time),
    "min_epochs": Tool(of_flags.stops_late(6, min_epochs=2)),
    "min_steps": Tool(of_flags.stops_late(5, min_steps=5)),
    "model_registry": Tool(of_flags.unchanged({"model_registry": "name"})),
    "num_nodes": Tool(of_flags.unchanged({"num_nodes": 1})),
    "num_sanity_val_steps": Tool(of_flags.num_sanity_val_steps),
    "overfit_batches": Tool(wrong={"limit_train_batches": {"overfit_batches": 2}}),
    "plugins": Tool(of_flags.plugins, {"BitsandbytesPrecision replaces layers": BitsandbytesPrecision}),
    "precision": Tool(of_flags.precision, {"TransformerEnginePrecision replaces layers": TransformerEnginePrecision}),
    "profiler": Tool(of_flags.profiler),
    "reload_dataloaders_every_n_epochs": Tool(of_flags.reload_dataloaders_every_n_epochs),
    "strategy": Tool(
        of_flags.strategy,
        {
            r"DDPStrategy\(static_graph=True\)": {"strategy": DDPStrategy(static_graph=True)},
            r"DDPStrategy\(ddp_comm_hook=\.\.\.\)": {"strategy": DDPStrategy(ddp_comm_hook=fp16_compress_hook)},
            r"DDPStrategy\(model_averaging_period=\.\.\.\)": {"strategy": DDPStrategy(model_averaging_period=4)},
            "FSDPStrategy does not keep": FSDPStrategy,
            "DeepSpeedStrategy does not keep": DeepSpeedStrategy,
            r"ModelParallelStrategy\(tensor_parallel_size='auto', save": {"strategy": ModelParallelStrategy()},
            "SingleDeviceXLAStrategy trains on a TPU": SingleDeviceXLAStrategy,
            "XLAStrategy trains on a TPU": XLAStrategy,
        },
    ),
    "sync_batchnorm": Tool(of_flags.unchanged({"sync_batchnorm": True})),
    "use_distributed_sampler": Tool(of_flags.unchanged({"use_distributed_sampler": False})),
    "val_check_interval": Tool(of_flags.val_check_interval),
}


@pytest.mark.parametrize("name", [name for name, tool in TRAINER.items() if tool.shown_by])
def test_a_flag_does_what_it_should(name, tmp_path):
    TRAINER[name].shown_by(tmp_path)


@pytest.mark.refusal
@pytest.mark.parametrize(("words", "flags"), wrong(TRAINER))
def test_a_flag_that_cannot_work_raises(words, flags):
    """The flags are checked where a run begins, after several processes have met; so this asks without a run."""
    if isinstance(flags, type):
        trainer = trainer_with(flags)
    else:
        trainer = make_run(**flags).trainer
    with pytest.raises(ValueError, match=rf"^RetrievalModule: .*{words}"), owned_by("RetrievalModule"):
        check_trainer(trainer)


def names_of_callbacks():
    return callbacks.__all__


def names_of_the_tuner():
    return [name for name, _ in inspect.getmembers(Tuner, inspect.isfunction) if not name.startswith("_")]


def names_of_the_trainer():
    return list(inspect.signature(pl.Trainer).parameters)


TABLES = {
    "Callbacks": (CALLBACKS, names_of_callbacks),
    "Methods of the Tuner": (TUNER, names_of_the_tuner),
    "Flags of the Trainer": (TRAINER, names_of_the_trainer),
}


@pytest.mark.parametrize("title", TABLES)
def test_the_table_has_whatever_this_version_of_lightning_has(title):
    table, names = TABLES[title]
    new, gone = set(names()) - table.keys(), table.keys() - set(names())
    assert not new, f"{title}: try {sorted(new)} of Lightning {pl.__version__}, and add what you find to the table"
    assert not gone, f"{title}: Lightning {pl.__version__} has no {sorted(gone)}; remove them from the table"


@pytest.mark.parametrize("title", TABLES)
def test_the_documentation_says_the_same(title):
    """A row for each name that raises or has a remark, and a line with all others, in alphabetical order."""
    page = (Path(__file__).parents[1] / "docs" / "lightning.md").read_text(encoding="utf-8")
    (section,) = [part for part in page.split("\n## ") if part.startswith(f"{title}\n")]
    rows = re.findall(r"^\| `(\w+)` \| ([a-z ]+?) \| (.*) ?\|$", section, re.MULTILINE)
    assert [name for name, _, remark in rows if not remark.strip()] == []
    right = re.findall(r"`(\w+)`", section.partition("Right as they are: ")[2])
    found = {**{name: verdict for name, verdict, _ in rows}, **dict.fromkeys(right, "right")}
    table, _ = TABLES[title]
    assert found == {name: tool.verdict for name, tool in table.items()}
    for names in ([name for name, _, _ in rows], right):
        assert names == sorted(set(names), key=str.lower)


# The names of strategies that train; all others raise.
STRATEGIES = {"single_device"}
for ddp in ("ddp", "ddp_fork", "ddp_notebook", "ddp_spawn"):
    STRATEGIES |= {ddp, f"{ddp}_find_unused_parameters_false", f"{ddp}_find_unused_parameters_true"}


@pytest.mark.refusal
@pytest.mark.parametrize("name", StrategyRegistry.available_strategies())
def test_names_of_strategies(name):
    trainer = trainer_with(StrategyRegistry[name]["strategy"])
    if name in STRATEGIES:
        check_trainer(trainer)
        return
    with pytest.raises(ValueError, match=r"^RetrievalModule: "), owned_by("RetrievalModule"):
        check_trainer(trainer)


def without_dropout(**flags):
    """A run of the weights that any number of processes should train: it draws no random numbers."""
    module = make_module(dropout=0.0, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    run = fit(module=module, **flags)
    return flat(run.module), run.metrics["val/mAP"]


def by_launcher(rank, world_size):
    """Runs of processes that somebody else has started, one after the other."""
    cases = [
        {"strategy": "ddp"},
        {"strategy": "ddp", "use_distributed_sampler": False},
        {"strategy": "ddp_find_unused_parameters_true"},
        {"strategy": "ddp", "reload_dataloaders_every_n_epochs": 1},
    ]
    return [without_dropout(devices=world_size, **flags) for flags in cases]


def on_two_nodes(rank, world_size):
    """Each process is a node of its own."""
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    return [without_dropout(devices=1, num_nodes=world_size, strategy="ddp")]


def starting_others(rank, world_size, strategy):
    """One process, whose Trainer starts the others."""
    return [without_dropout(devices=2, strategy=strategy)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "processes", "arguments"),
    [(by_launcher, 2, ()), (on_two_nodes, 2, ()), (starting_others, 1, ("ddp_fork",))],
)
def test_several_processes_train_the_same(function, processes, arguments, run_processes):
    weights, metric = without_dropout()
    for of_rank in run_processes(function, processes, *arguments, backend=None):
        for found, found_metric in of_rank:
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)
            assert found_metric == pytest.approx(metric, abs=1e-5)


def test_a_run_can_be_sent_to_a_process_that_is_spawned():
    """As "ddp_spawn" does: the Trainer with its callbacks, the module and the data are pickled."""
    run = make_run()
    trainer, module, data = pickle.loads(pickle.dumps((run.trainer, run.module, run.data)))
    trainer.fit(module, data)
    assert torch.equal(flat(module), flat(plain().module))
