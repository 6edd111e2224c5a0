"""RetrievalModule on two processes with unequal shares (5 and 4 rows of 9) does what one does with the whole batch.

Run as a program, this file is one rank: it goes through all scenarios and writes what it saw to a file.
"""

import functools
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_metric_learning.losses import ProxyAnchorLoss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
from lightning_retrieval.datamodules import PKSampler, RetrievalDataModule
from lightning_retrieval.training import run_report

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '(train|val|test)_dataloader' does not have many workers:UserWarning",
    "ignore:GPU available but not used:UserWarning",
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

STEPS = 3
TRAINED = ["smooth-ap", "smooth-ap in chunks", "proxies", "proxies in chunks", "learned tau", "learned tau in chunks"]
# Of equal batch norms the ranks' shares differ, so that only the agreement of the ranks can be asked for.
ALL = [*TRAINED, "batch norm", "batch norm in chunks"]


class Points(torch.utils.data.Dataset):
    """Small images in classes of four; an odd number of them."""

    def __init__(self, seed: int, size: int = 27):
        self.images = torch.randn(size, 1, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.labels = torch.arange(size) // 4

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index], "ids": torch.tensor(int(index))}


class PointData(RetrievalDataModule):
    def __init__(self):
        super().__init__(classes_per_batch=3, samples_per_class=3, eval_batch_size=5, seed=1)

    train_set, val_set, test_set = Points(1), Points(2), Points(3, 29)


class LearnedTau(SmoothAPLoss):
    def __init__(self):
        super().__init__()
        del self.tau
        self.tau = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))


class Watch(pl.Callback):
    """Losses and collectives of each step, and the buffers that validation ran with."""

    def __init__(self):
        self.losses, self.calls, self.buffers, self.counts = [], 0, [], []

    def on_fit_start(self, trainer, module):
        if isinstance(trainer.model, nn.parallel.DistributedDataParallel):
            trainer.model.register_comm_hook(None, self.reduced_by_ddp)

    def reduced_by_ddp(self, _, bucket):
        self.calls += 1
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    def on_train_batch_start(self, *_):
        self.real, self.calls = dist.all_reduce, 0
        dist.all_reduce = self.counted

    def counted(self, *args, **kwargs):
        self.calls += 1
        return self.real(*args, **kwargs)

    def on_train_batch_end(self, trainer, *_):
        dist.all_reduce = self.real
        self.counts.append(self.calls)
        self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_validation_batch_end(self, trainer, module, *_):
        if not trainer.sanity_checking:
            self.buffers.append(flat(module.buffers()))


def flat(tensors) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.detach().double().flatten() for t in tensors)])


def module(name: str) -> RetrievalModule:
    torch.manual_seed(4)
    norm = [nn.BatchNorm2d(1)] if "batch norm" in name else []
    embedder = nn.Sequential(*norm, nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    loss = {"proxies": lambda: ProxyAnchorLoss(7, 4).double(), "learned tau": LearnedTau}.get(
        name.removesuffix(" in chunks"), functools.partial(SmoothAPLoss, tau=0.1)
    )()
    adam = functools.partial(torch.optim.AdamW, lr=0.05)
    return RetrievalModule(embedder, loss, chunk_size=2 if "chunks" in name else None, optimizer=adam)


def trainer(world: int, folder: Path, *callbacks, **kwargs) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if world == 1 else "ddp",
        max_epochs=1,
        callbacks=list(callbacks),
        default_root_dir=folder,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **kwargs},
    )


def scenarios(world: int, folder: Path) -> dict:
    """All that is compared, as one rank of `world` sees it."""
    seen = {}
    warnings.filterwarnings("ignore", "RetrievalModule: BatchNorm sees")
    for name in ALL:
        model, watch = module(name), Watch()
        trainer(world, folder, watch, RetrievalEvaluation(ks=(1, 5))).fit(model, datamodule=PointData())
        seen[name] = {
            "parameters": flat(model.parameters()),
            "losses": watch.losses,
            "calls": watch.counts,
            "buffers": watch.buffers[0],
        }

    said, real = [], run_report.rank_zero_info
    run_report.rank_zero_info = said.append
    for settings in ({"memory": CrossBatchMemory(50)}, {"gather": False} if world == 1 else {}):
        embedder = module("smooth-ap").embedder
        trainer(world, folder, max_steps=2).fit(
            RetrievalModule(embedder, SmoothAPLoss(), **settings), datamodule=PointData()
        )
    run_report.rank_zero_info = real
    seen["said"] = said

    evaluation, best = RetrievalEvaluation(ks=(1, 5), before_fit=True), ModelCheckpoint(monitor="val/mAP", mode="max")
    run = trainer(
        world,
        folder,
        evaluation,
        RetrievalGallery(queries=3, k=4),
        best,
        enable_checkpointing=True,
        logger=CSVLogger(folder, "logs", version=0),
    )
    run.fit(module("smooth-ap"), datamodule=PointData())
    seen["tables"] = evaluation.results
    seen["best"] = float(best.best_model_score)
    validated, points = module("smooth-ap"), PointData.val_set
    for form, dataset in {"ids": points, "pairs": TensorDataset(points.images, points.labels)}.items():
        seen[form] = trainer(world, folder, RetrievalEvaluation(ks=(1, 5))).validate(
            validated, DataLoader(dataset, batch_size=5), verbose=False
        )
    if world > 1:
        settings = {"memory": CrossBatchMemory(50), "gather": False}
        try:
            alone = RetrievalModule(module("smooth-ap").embedder, SmoothAPLoss(), **settings)
            trainer(world, folder, max_steps=1).fit(alone, datamodule=PointData())
        except ValueError as error:
            seen["refused"] = str(error)
    loader = PointData().train_dataloader()
    batch = next(iter(PKSampler(loader.dataset.labels, classes_per_batch=3, samples_per_class=3, seed=1)))
    broken = loader.dataset.images[batch[-1]]  # of rank 1
    healthy = broken.clone()
    broken.fill_(torch.nan)
    model = module("smooth-ap")
    try:
        trainer(world, folder).fit(model, loader)
    except ValueError as error:
        seen["nan"] = str(error)
    finally:
        broken.copy_(healthy)
    seen["after nan"] = flat(model.parameters())
    return seen


def one_rank(folder: Path) -> None:
    for message in QUIET:
        action, text, _ = message.split(":")
        warnings.filterwarnings(action, text)
    seen = scenarios(2, folder)
    torch.save(seen, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {**scenarios(1, folder), "folder": folder}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Both ranks' results."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**os.environ, **common, "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return [{**torch.load(folder / f"rank{rank}.pt"), "folder": folder} for rank in (0, 1)]


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_and_losses_are_those_of_one_process(one, two, name):
    start = flat(module(name).parameters())
    assert (one[name]["parameters"] - start).abs().min() > 1e-6  # all of them have learned
    for rank in two:
        torch.testing.assert_close(rank[name]["parameters"], one[name]["parameters"], rtol=0, atol=1e-10)
        assert rank[name]["losses"] == pytest.approx(one[name]["losses"], abs=1e-6)
        assert len(rank[name]["losses"]) == STEPS


@pytest.mark.parametrize("name", ALL)
def test_ranks_agree_and_gradients_are_summed_once_a_step(two, name):
    first, second = two
    assert torch.equal(first[name]["parameters"], second[name]["parameters"])
    assert first[name]["losses"] == second[name]["losses"]
    assert first[name]["calls"] == second[name]["calls"] == [1] * STEPS


@pytest.mark.parametrize("name", ["batch norm", "batch norm in chunks"])
def test_validation_runs_with_the_same_buffers_on_both_ranks(two, name):
    first, second = (rank[name]["buffers"] for rank in two)
    assert len(first) == 3  # running mean, running variance, batches seen
    assert first.abs().min() > 0
    assert torch.equal(first, second)


def test_metrics_are_those_of_one_process(one, two):
    """To the last bit, of 27 and 29 images: the sampler shows one of them twice."""
    assert {"val", "untrained"} <= set(one["tables"])
    assert 0 < one["ids"][0]["val/mAP"] < 1
    for rank in two:
        assert rank["ids"] == rank["pairs"] == one["ids"] == one["pairs"]
        assert rank["tables"] == one["tables"]
        assert rank["best"] == one["best"] == pytest.approx(one["tables"]["val"]["val/mAP"])


def test_the_gallery_is_that_of_one_process(one, two):
    (expected,) = one["folder"].rglob("*.png")
    (found,) = two[0]["folder"].rglob("*.png")
    assert found.read_bytes() == expected.read_bytes()


def test_a_fit_says_once_what_its_lists_are_and_what_a_step_sends(one, two):
    """Nine rows of four doubles with label and id, and 92 parameters, of which a process sends half."""
    lists = "RetrievalModule: batches of P = 3 classes with K = 3 images, lists of 8 images"
    assert one["said"] == [f"{lists} and up to 50 of the memory.", f"{lists}."]
    sent = 9 * (4 * 8 + 16) / 2, 9 * 4 * 8 / 2, 92 * 8
    what = ", ".join(f"{name} {size / 1e6:.3g}" for name, size in zip(("gather", "exchange", "all-reduce"), sent))
    sends = f", over 2 processes; each process sends {sum(sent) / 1e6:.3g} MB a step ({what})."
    for rank in two:
        assert rank["said"] == [f"{lists} and up to 50 of the memory{sends}", f"{lists}{sends}"]


def test_what_processes_cannot_do_together_is_refused_on_both(two):
    for rank in two:
        assert rank["refused"] == (
            "RetrievalModule: a memory must be the same on all 2 processes, which gather=False does not provide; leave "
            "gather at True."
        )


def test_nan_on_one_rank_stops_both(one, two):
    first, second = (rank["nan"] for rank in two)
    assert "NaN or inf in 1 of 9 rows at step 0 (seen on rank 0), the first for ids [" in first
    assert first == one["nan"]
    assert second == first.replace("seen on rank 0", "seen on rank 1")
    for rank in two:
        assert torch.equal(rank["after nan"], flat(module("smooth-ap").parameters()))


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
