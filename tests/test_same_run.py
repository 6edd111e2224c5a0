"""A run in 1, 2 and 4 processes is the same run: real Trainers, real loaders, batches that do not divide evenly."""

import functools
import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from pytorch_metric_learning.losses import MultiSimilarityLoss, ProxyAnchorLoss
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, ROADMAPLoss, SmoothAPLoss, Updates
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import GlyphDataset, Glyphs
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
from lightning_retrieval.losses import WeightedSum
from lightning_retrieval.models import GlyphNet
from tests.processes import start_processes
from tests.quiet_trainer import quiet_trainer

pytestmark = pytest.mark.slow

STEPS, WORLDS = 8, (1, 2, 4)
CLASSES = 40  # of the training set; about six batches an epoch
IN_FLOAT32 = ("chunks", "proxies")
CUT = 4  # the step of a checkpoint
TIMEOUT = 30  # seconds of the process group with a dying process


class FewGlyphs(Glyphs):
    """The first classes of the glyphs, numbered from 0."""

    def __init__(self, classes_per_batch=9, samples_per_class=5):
        super().__init__(
            classes_per_batch=classes_per_batch, samples_per_class=samples_per_class, eval_batch_size=50, seed=3
        )

    @cached_property
    def train_set(self):
        full = GlyphDataset(all_glyphs(), "train", augment=self.augment)
        return cut(full, int((full.labels.unique_consecutive(return_counts=True)[1])[:CLASSES].sum()))

    @cached_property
    def val_set(self):
        return cut(GlyphDataset(all_glyphs(), "val"), 149)


@functools.cache
def all_glyphs():
    return load_glyph_images()


def cut(dataset, size):
    dataset.images = dataset.images[:size]
    dataset.labels = dataset.labels[:size].unique(return_inverse=True)[1]
    return dataset


def mixed():
    return WeightedSum({"ap": (1.0, SmoothAPLoss()), "pairs": (0.1, MultiSimilarityLoss())})


SCENARIOS = {
    "chunks": lambda: {"loss": SmoothAPLoss(tau=0.01), "chunk_size": 11},  # 5 chunks alone, 2 and 1 of 4 processes
    "memory": lambda: {
        "loss": SmoothAPLoss(),
        "chunk_size": 11,
        "keep_graphs": 2,
        "memory": CrossBatchMemory(150, start_step=2),
    },
    "roadmap": lambda: {
        "loss": ROADMAPLoss.official(),
        "memory": CrossBatchMemory(150, mode="two_terms", weight=0.5),
        "updates": Updates(gradient_clip_val=0.1),
    },
    "memory without a gradient": lambda: {
        "loss": SmoothAPLoss(),
        "memory": CrossBatchMemory(150, start_step=1, mode="one_list_detached"),
    },
    "proxies": lambda: {"loss": ProxyAnchorLoss(CLASSES, 16), "chunk_size": 7, "updates": Updates(loss_lr_factor=4)},
    "third-party memory": lambda: {"loss": MultiSimilarityLoss(), "chunk_size": 11, "memory": CrossBatchMemory(150)},
    "mixed": lambda: {"loss": mixed()},
    "rounded": lambda: {"loss": SmoothAPLoss(tau=0.01), "chunk_size": 11, "gather": "float16"},
}
# Four processes run what differs from two: shards of several sizes, and sums of the terms of a loss.
CASES = [(name, 2) for name in SCENARIOS] + [(name, 4) for name in ("chunks", "memory", "roadmap", "proxies")]
TERMS = {"roadmap": {"sup_ap", "calibration", "batch", "memory"}, "mixed": {"ap", "pairs"}}


def retrieval_module(cls=RetrievalModule, **settings):
    torch.manual_seed(1)
    if isinstance(settings["loss"], str):  # a name, whose losses may have random parameters of their own
        settings = SCENARIOS[settings["loss"]]()
    backbone = GlyphNet(width=4)
    # Statistics of real images spread the embeddings. Without them all scores are nearly 1, and a float32 gradient has
    # three digits, whatever the number of processes.
    for norm in backbone.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = 1.0
    backbone(torch.from_numpy(all_glyphs().images[::100, None]) / 255)
    embedder = Embedder(backbone, 16, freeze_batch_norm=True)
    adam = functools.partial(torch.optim.AdamW, lr=0.003)
    decay = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97)
    return cls(embedder, optimizer=adam, lr_scheduler=decay, lr_scheduler_interval="step", **settings)


class Watch(pl.Callback):
    """Losses and the first gradient of a run."""

    def __init__(self):
        self.losses, self.gradient = [], None

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.gradient is None:
            self.gradient = flat(p.grad for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer, *_):
        self.losses.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/loss")})


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def fit(world, module, data, precision="64-true", steps=STEPS, strategy="ddp", keep=(), ckpt_path=None):
    watch, evaluation = Watch(), RetrievalEvaluation(ks=(1, 5))
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy if world > 1 else "auto",
        precision=precision,
        max_epochs=-1,
        max_steps=steps,
        val_check_interval=min(steps, STEPS // 2),
        check_val_every_n_epoch=None,
        callbacks=[watch, evaluation, *keep],
        log_every_n_steps=1,
        enable_checkpointing=bool(keep),
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return {
        "weights": flat(module.parameters()),
        "losses": watch.losses,
        "metrics": evaluation.results["val"],
        "gradient": watch.gradient,
    }


def message_of(world, module, data):
    """The message of the ValueError that a run raises."""
    try:
        fit(world, module, data)
    except ValueError as error:
        return str(error)
    return "no error"


def plain_loop():
    """What two processes without gathering do: the mean of the losses of the two halves of each batch."""
    module, data = retrieval_module(loss=SmoothAPLoss()).double(), FewGlyphs(classes_per_batch=8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.003)
    loader, losses, epoch = data.train_dataloader(), [], 0
    while len(losses) < STEPS:
        loader.set_epoch(epoch)
        for batch in loader:
            parts = zip(batch["images"].double().tensor_split(2), batch["labels"].tensor_split(2))
            loss = sum(module.loss(module(images), labels) for images, labels in parts) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = 0.003 * 0.97 ** len(losses)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
        epoch += 1
    return losses, flat(module.parameters())


def runs(rank, world, folder):
    """Everything that is compared, as one of `world` processes sees it."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # as a launcher does; the group is there already
    names = [name for name in SCENARIOS if world == 1 or (name, world) in CASES]
    seen = {name: fit(world, retrieval_module(loss=name), FewGlyphs()) for name in names}
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=CUT, save_top_k=-1)
    fit(world, retrieval_module(loss="memory"), FewGlyphs(), steps=CUT, keep=[keep])
    path = Path(folder) / f"step={CUT}.ckpt"
    seen["resumed"] = fit(world, retrieval_module(loss="memory"), FewGlyphs(), ckpt_path=path)
    for name in IN_FLOAT32:
        seen[name]["float32"] = fit(world, retrieval_module(loss=name), FewGlyphs(), "32-true", steps=1)["gradient"]
    local = functools.partial(retrieval_module, gather=False)
    if world == 1:
        seen["plain loop"] = plain_loop()
    if world == 2:
        seen["local"] = fit(world, local(loss=SmoothAPLoss(), chunk_size=7), FewGlyphs(classes_per_batch=8))
    if world > 1:
        seen["unequal"] = message_of(world, local(loss=SmoothAPLoss()), FewGlyphs())
        seen["local memory"] = message_of(world, local(loss=SmoothAPLoss(), memory=CrossBatchMemory(99)), FewGlyphs())
    return seen


@pytest.fixture(scope="module")
def seen(run_processes, tmp_path_factory):
    """Results of all processes, by world size; the three groups run at the same time."""
    all_glyphs()  # into the cache, before seven processes look there
    tmp_path_factory.getbasetemp()  # made at its first use, which threads must not have at the same time
    with ThreadPoolExecutor(len(WORLDS)) as pool:
        folders = {world: str(tmp_path_factory.mktemp(f"checkpoints{world}")) for world in WORLDS}
        started = {world: pool.submit(run_processes, runs, world, folders[world], timeout=300) for world in WORLDS}
        return {world: future.result() for world, future in started.items()}


MANY = [world for world in WORLDS if world > 1]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_weights_losses_and_metrics_are_those_of_one_process(seen, name, world):
    one = seen[1][0][name]
    assert (one["weights"] - flat(retrieval_module(loss=name).parameters())).abs().max() > 0.01  # it has learned
    assert len(one["losses"]) == STEPS
    assert len({step["train/loss"] for step in one["losses"]}) == STEPS
    assert set(one["losses"][-1]) == {"train/loss", *(f"train/loss/{term}" for term in TERMS.get(name, ()))}
    assert 0.01 < one["metrics"]["val/mAP"] < 0.99
    for found in (process[name] for process in seen[world]):
        torch.testing.assert_close(found["weights"], one["weights"], rtol=0, atol=1e-9)
        assert found["losses"] == [pytest.approx(step, rel=0, abs=1e-9) for step in one["losses"]]
        assert found["metrics"] == pytest.approx(one["metrics"], rel=0, abs=1e-9)


@pytest.mark.parametrize(("name", "world"), [*CASES, ("local", 2)])
def test_processes_agree_to_the_last_bit(seen, name, world):
    first, *others = (process[name] for process in seen[world])
    for other in others:
        assert torch.equal(other["weights"], first["weights"])
        assert other["losses"] == first["losses"]
        assert other["metrics"] == first["metrics"]


@pytest.mark.parametrize("world", MANY)
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_the_first_gradient_is_that_of_one_process_in_float32(seen, name, world):
    one = seen[1][0][name]["float32"]
    assert one.norm() > 0
    for found in (process[name]["float32"] for process in seen[world]):
        assert (found - one).norm() < 1e-5 * one.norm()


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_run_ends_as_the_whole_run(seen, world):
    """Chunks and memory together, cut in the middle of the first epoch; bit by bit."""
    for process in seen[world]:
        whole, resumed = process["memory"], process["resumed"]
        assert torch.equal(resumed["weights"], whole["weights"])
        assert resumed["losses"] == whole["losses"][CUT:]
        assert resumed["metrics"] == whole["metrics"]


def test_without_gathering_the_loss_is_the_mean_of_the_processes_losses(seen):
    losses, weights = seen[1][0]["plain loop"]
    for process in seen[2]:
        found = process["local"]
        assert [step["train/loss"] for step in found["losses"]] == pytest.approx(losses, rel=0, abs=1e-9)
        torch.testing.assert_close(found["weights"], weights, rtol=0, atol=1e-9)


@pytest.mark.parametrize("world", MANY)
def test_what_several_processes_cannot_do_raises_the_same_error_on_all(seen, world):
    for case, process in itertools.product(("unequal", "local memory"), seen[world]):
        assert "gather=False" in process[case]
        assert process[case] == seen[world][0][case]


class Dying(RetrievalModule):
    """The second process is killed in the middle of its fourth step, before the gradients are summed."""

    def training_step(self, batch, batch_idx):
        print(f"step {batch_idx}", flush=True)
        return super().training_step(batch, batch_idx)

    def manual_backward(self, loss, *args, **kwargs):
        if dist.get_rank() == 1 and self.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().manual_backward(loss, *args, **kwargs)


def train_until_one_dies(rank, world_size):
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    fit(world_size, retrieval_module(Dying, loss=SmoothAPLoss()), FewGlyphs(), strategy=strategy)


def test_a_process_that_dies_stops_the_other(tmp_path):
    both = start_processes(train_until_one_dies, 2, folder=tmp_path)
    survivor, dying = both
    try:
        assert dying.wait(240) == -signal.SIGKILL, dying.output()
        died = time.monotonic()
        assert survivor.wait(TIMEOUT + 10) == 1, survivor.output()
        seconds = time.monotonic() - died
    finally:
        for started in both:
            started.end()
    output = survivor.output()
    assert "step 3" in output
    assert "step 4" not in output
    assert "RuntimeError" in output
    assert seconds < TIMEOUT
