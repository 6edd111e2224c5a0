"""A network that FSDP2 shards over two or four processes is trained as in one process, also after a kill."""

import functools
import os
import signal
import time

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import DoublePrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch.distributed.tensor import DTensor

from lightning_retrieval import CrossBatchMemory, FSDP2Strategy, RetrievalModule, SmoothAPLoss, Updates
from lightning_retrieval.callbacks import MemoryMonitor, ProxiesAtClassMeans, RetrievalEvaluation
from lightning_retrieval.checkpoints import is_sharded_checkpoint, read_checkpoint, torch_writes_shards
from lightning_retrieval.training import full_sharding
from tests.processes import start_processes
from tests.quiet_trainer import quiet_trainer
from tests.test_resume import assert_same
from tests.test_same_run import CLASSES, FewGlyphs, all_glyphs, flat, retrieval_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch_writes_shards(), reason="needs torch 2.9"),
]

STEPS, CUT = 14, 7
START_DRIFT = 0.35  # which MemoryMonitor finds after step 4


def ranked():
    """Batches of 44 images, so that two and four processes have equally many."""
    return {
        "loss": SmoothAPLoss(tau=0.01),
        "chunk_size": 11,
        "keep_graphs": 2,
        "memory": CrossBatchMemory(150, start_step=2),
        "updates": Updates(gradient_clip_val=0.5),
    }


def proxies():
    """A loss with parameters, which every process keeps whole."""
    updates = Updates(gradient_clip_val=1.0, loss_lr_factor=4)
    return {"loss": ProxyAnchorLoss(CLASSES, 16), "chunk_size": 11, "updates": updates}


def begins():
    """A memory that begins by itself."""
    return {**ranked(), "memory": CrossBatchMemory(150, start_step="auto")}


# A network that is divided over processes is compiled in "compiled", and compared with a plain one.
SCENARIOS = {"ranked": ranked, "proxies": proxies, "begins": begins, "compiled": ranked}
CASES = [*((name, 2) for name in SCENARIOS), ("ranked", 4)]


def untrained_module(scenario):
    """The same weights each time, those of the loss included."""
    torch.manual_seed(1)
    return retrieval_module(**SCENARIOS[scenario]())


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Watch(pl.Callback):
    """Keeps the losses, the norms of the gradients before clipping, and the full weights at the end."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [full(p.grad) for p in module.parameters() if p.grad is not None]
        self.norms.append(float(flat(gradients).norm()))

    def on_train_batch_end(self, trainer, *_):
        self.losses.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/loss")})

    def on_train_end(self, trainer, module):
        self.weights = flat(full(parameter) for parameter in module.parameters())
        self.sharded = {name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)}
        network = list(module.embedder.parameters())
        own = sum(parameter.to_local().numel() for parameter in network if isinstance(parameter, DTensor))
        self.part = own / sum(parameter.numel() for parameter in network)


class Pace(pl.Callback):
    """Says which step begins, slowly enough that a kill meets a run that still goes on."""

    def on_train_batch_start(self, trainer, *_):
        print(f"step {trainer.global_step}", flush=True)
        time.sleep(0.1)


def strategy_of(world):
    """One process has none, two share the network, and of four each two share a copy."""
    if world == 1:
        return "auto"
    if world == 2:
        return ModelParallelStrategy(world, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return FSDP2Strategy(shard_size=2, sharded_checkpoints=True)


def fit(world, scenario, folder, *, ckpt_path=None, steps=STEPS, callbacks=(), has_weights=True):
    """A run in one or several processes.

    Promise 1: the numbers do not depend on how many blocks are sharded by themselves. The size from which they are is
    set, because this network has only small ones, and gathering a large network would take long.
    """
    full_sharding.SMALLEST_BLOCK = 100
    watch, evaluation = Watch(), RetrievalEvaluation(ks=(1, 5))
    monitors = []
    if scenario == "begins":
        monitors.append(MemoryMonitor(start_drift=START_DRIFT))
    if scenario == "proxies":
        monitors.append(ProxiesAtClassMeans(images_per_class=3))
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=CUT, save_top_k=-1, save_last=True)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy_of(world),
        plugins=[DoublePrecision()],  # Lightning refuses precision="64-true" with this strategy
        max_epochs=-1,
        max_steps=steps,
        val_check_interval=CUT,
        check_val_every_n_epoch=None,
        callbacks=[*monitors, watch, evaluation, keep, *callbacks],
        log_every_n_steps=1,
        enable_checkpointing=True,
    )
    module = untrained_module(scenario)
    # As the default optimizer, which is fused unless the network is sharded.
    module.optimizer = functools.partial(torch.optim.AdamW, lr=0.003, fused=world == 1)
    if scenario == "compiled" and world > 1:
        module.embedder.compile(backend="eager")
    is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if not has_weights or (world == 4 and (ckpt_path is not None or not is_first)):
        module.embedder.to("meta")  # the weights come from the checkpoint or from the first process
    elif not is_first:  # these weights are replaced by those of the first process
        for parameter in module.parameters():
            parameter.data.add_(1)
    trainer.fit(module, datamodule=FewGlyphs(classes_per_batch=11, samples_per_class=4), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "end.ckpt")
    return {
        **{name: getattr(watch, name) for name in ("weights", "losses", "norms", "sharded", "part")},
        "metrics": evaluation.results["val"],
        "rows": 0 if module.memory is None else len(module.memory),
    }


def runs(rank, world, folder):
    names = dict.fromkeys(name for name, processes in CASES if world in (1, processes))
    found = {name: fit(world, name, folder / name) for name in names}
    if world == 2:
        with pytest.raises(ValueError, match="no values for embedder"):
            fit(world, "ranked", folder / "no weights", has_weights=False)
    return found


def one_start(rank, world, folder):
    """Train from the last checkpoint, or from scratch if there is none, to the end."""
    return fit(world, "ranked", folder, ckpt_path="last", callbacks=[Pace()])


def continued(rank, world, folder, checkpoint):
    """Train from a checkpoint to the next one."""
    return fit(world, "ranked", folder, ckpt_path=checkpoint, steps=2 * CUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def seen(run_processes, folder):
    """Results of all processes, by world size. A network without any weights does not begin to train."""
    all_glyphs()  # into the cache, before two processes look there
    return {world: run_processes(runs, world, folder / str(world), backend=None, timeout=300) for world in (1, 2, 4)}


@pytest.mark.parametrize(("name", "world"), CASES)
def test_weights_losses_and_metrics_are_those_of_one_process(seen, name, world):
    one = seen[1][0][name]
    untrained = untrained_module(name)
    assert (one["weights"] - flat(untrained.parameters())).abs().max() > 0.01  # it has learned
    assert len(one["losses"]) == len({step["train/loss"] for step in one["losses"]}) == STEPS
    assert 0.01 < one["metrics"]["val/mAP"] < 0.99
    assert max(one["norms"]) > SCENARIOS[name]()["updates"].gradient_clip_val
    of_loss = {f"loss.{parameter}" for parameter, _ in untrained.loss.named_parameters()}
    for process in seen[world]:
        found = process[name]
        torch.testing.assert_close(found["weights"], one["weights"], rtol=0, atol=1e-9)
        assert found["losses"] == [pytest.approx(step, rel=0, abs=1e-9) for step in one["losses"]]
        assert found["metrics"] == pytest.approx(one["metrics"], rel=0, abs=1e-9)
        assert found["norms"] == pytest.approx(one["norms"], rel=0, abs=1e-9)
        assert found["sharded"] == {parameter for parameter, _ in untrained.named_parameters()} - of_loss
        assert found["part"] == pytest.approx(0.5, abs=0.05)
        assert torch.equal(found["weights"], seen[world][0][name]["weights"])


def test_a_memory_begins_by_itself_in_all_processes(seen):
    for process in [*seen[1], *seen[2]]:
        assert process["begins"]["rows"] == 150
        differs = [a != b for a, b in zip(process["begins"]["losses"], process["ranked"]["losses"], strict=True)]
        assert differs == [False] * 3 + [True] * (STEPS - 3)  # the other memory is first ranked in step 3


@pytest.mark.parametrize("world", ["2", "4"])
def test_a_checkpoint_has_the_content_of_one_process(seen, folder, world):
    one, several = (read_checkpoint(folder / processes / "ranked" / "end.ckpt") for processes in ("1", world))
    assert is_sharded_checkpoint(folder / world / "ranked" / "end.ckpt") == (world == "4")
    assert set(several) == set(one)
    assert several["hyper_parameters"] == one["hyper_parameters"]
    for key in ("state_dict", "optimizer_states"):
        assert_close(several[key], one[key])
    embedder = retrieval_module(**ranked()).embedder
    module = RetrievalModule.load_from_checkpoint(folder / world / "ranked" / "end.ckpt", embedder=embedder)
    assert len(module.memory) == 150


@pytest.mark.parametrize(("source", "world"), [("1", 2), ("2", 4), ("4", 1)])
def test_any_number_of_processes_continues_from_a_checkpoint(seen, folder, run_processes, tmp_path, source, world):
    checkpoint = folder / source / "ranked" / f"step={CUT}.ckpt"
    run_processes(continued, world, tmp_path / "continued", checkpoint, backend=None, timeout=300)
    found = read_checkpoint(tmp_path / "continued" / "end.ckpt")
    whole = read_checkpoint(folder / "1" / "ranked" / f"step={2 * CUT}.ckpt")
    assert found["global_step"] == whole["global_step"] == 2 * CUT
    assert_close(found["state_dict"], whole["state_dict"])
    assert_close(found["optimizer_states"], whole["optimizer_states"])


def assert_close(found, expected):
    """Equal to rounding, however deep, but for the setting `fused`, with which counts of steps are in float32."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, check_dtype=False)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected.keys() - {"fused"}:
            assert_close(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_close(*pair)
    else:
        assert found == expected


def test_a_killed_run_ends_as_the_run_that_was_not_killed(seen, folder, run_processes, tmp_path):
    """Both processes are killed three steps after a checkpoint; bit by bit, with the memory and the optimizer."""
    files = tmp_path / "files"
    files.mkdir()
    both = start_processes(one_start, 2, tmp_path / "run", folder=files)
    deadline = time.monotonic() + 300
    try:
        while time.monotonic() < deadline and f"step {CUT + 3}\n" not in both[0].output():
            time.sleep(0.02)
    finally:
        for started in both:
            started.end()
    first, second = (started.exit_code for started in both)
    assert first == -signal.SIGKILL, both[0].output()[-3000:]
    assert second in (-signal.SIGKILL, 1)  # 1 if it has noticed the end of the first before it was killed itself
    resumed = run_processes(one_start, 2, tmp_path / "run", backend=None, timeout=300)
    for process in resumed:
        assert process["losses"] == seen[2][0]["ranked"]["losses"][CUT:]
        assert process["metrics"] == seen[2][0]["ranked"]["metrics"]
    found = torch.load(tmp_path / "run" / "end.ckpt", weights_only=True)
    whole = torch.load(folder / "2" / "ranked" / "end.ckpt", weights_only=True)
    assert whole["global_step"] == found["global_step"] == STEPS
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch"):
        assert_same(found[key], whole[key], key)
