"""A network that FSDP2 shards over two processes trains as in one; tests/test_full_sharding.py has longer runs."""

import copy
import functools
import pickle
import shutil

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import OnExceptionCheckpoint
from pytorch_lightning.plugins import DoublePrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_retrieval import CrossBatchMemory, FSDP2Strategy, PCAWhitening, RetrievalModule, Updates
from lightning_retrieval.callbacks import LearnWhitening, RetrievalEvaluation
from lightning_retrieval.checkpoints import torch_writes_shards, write_sharded_checkpoint
from tests.lightning_retrieval.training.small_training import LearnedTau, Log
from tests.quiet_trainer import quiet_trainer

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not torch_writes_shards(), reason="needs torch 2.9")

ROWS = 12  # of which each process has half, and each chunk two or three


class Scaled(nn.Tanh):
    """A layer with a single number as its parameter, which cannot be sharded, and with a buffer of bools."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("is_used", torch.tensor([True, False]))

    def forward(self, x):
        return self.factor * self.is_used.sum() * super().forward(x)


class Net(nn.Module):
    """Two blocks, one of them frozen in part, which share a number, and a rest; sizes that cannot be halved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(5, 403), Scaled(), nn.Linear(403, 251))]
        blocks.append(nn.Sequential(nn.Linear(251, 403), Scaled(), nn.Linear(403, 9)))
        blocks[0][2].bias.requires_grad_(False)
        self.blocks = nn.ModuleList(blocks)
        self.rest = nn.Linear(9, 3)
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.rest(x)


def numbers_of(network):
    return {parameter for parameter in network.parameters() if parameter.ndim == 0}


class KeepsGathered(RetrievalModule):
    """What a user may write: without `reshard_after_forward` a validation leaves the parameters gathered."""

    def shard_network(self, mesh):
        fsdp.fully_shard(self.embedder, mesh=mesh, ignored_params=numbers_of(self.embedder))


class Batches(IterableDataset):
    """The rows of each process; the whole batches for one process."""

    def __init__(self, world):
        self.world = world

    def __iter__(self):
        images = torch.randn(20, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        rows = slice(None)
        if self.world > 1:
            rows = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
        for ids in (torch.arange(ROWS), torch.arange(ROWS) + 8):
            yield images[ids[rows]], ids[rows] % 3, ids[rows]


ONE_FILE = {"tensor_parallel_size": 1, "save_distributed_checkpoint": False}
CASES = {
    "norm": {"updates": Updates(gradient_clip_val=0.5), "keep_graphs": 2},
    "value": {"updates": Updates(gradient_clip_val=1e-3, gradient_clip_algorithm="value", loss_lr_factor=4)},
    "memory": {"memory": CrossBatchMemory(16)},
    "kept gathered": {"kind": KeepsGathered},
}


def fit(
    world,
    *,
    kind=RetrievalModule,
    network=None,
    epochs=2,
    path=None,
    strategy=None,
    callbacks=(),
    saves=False,
    **settings,
):
    """A run whose module and Trainer are returned."""
    if world > 1 and strategy is None:
        strategy = ModelParallelStrategy(world, **ONE_FILE)
    run = quiet_trainer(
        devices=world,
        strategy=strategy or "auto",
        plugins=[DoublePrecision()],  # Lightning refuses precision="64-true" with this strategy
        max_epochs=epochs,
        callbacks=[*callbacks, RetrievalEvaluation(ks=(1,))],
        enable_checkpointing=saves,
    )
    module = kind(network or Net(), LearnedTau(), **{"chunk_size": 2, **copy.deepcopy(settings)})
    if world > 1 and dist.is_initialized() and dist.get_rank() == 1 and network is None:
        with torch.no_grad():  # what the second process begins with does not count
            for value in (*module.parameters(), *module.buffers()):
                value.copy_(value + 1)
    run.fit(module, *(DataLoader(Batches(world), batch_size=None) for _ in range(2)), ckpt_path=path)
    return module, run


def full(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class Ends(pl.Callback):
    """Keeps the full weights of the end of a run, and which part of the network this process has."""

    def on_train_end(self, trainer, module):
        network = list(module.embedder.parameters())
        own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in network)
        self.part = own / sum(parameter.numel() for parameter in network)
        self.weights = [full(parameter.detach()).clone() for parameter in module.parameters()]


def run_of(world, **settings):
    log, ends = Log(), Ends()
    module, run = fit(world, callbacks=[log, ends], **settings)
    memory = 0 if module.memory is None else len(module.memory)
    return {"losses": log.losses, "weights": ends.weights, "part": ends.part, "memory": memory}, run


def saved_runs(world, folder):
    """Runs that are cut after an epoch, with a checkpoint in one file or in shards, and go on from it."""
    found = {}
    for name in ("one file", "shards"):
        settings = CASES["memory"]
        if name == "shards" and world > 1:
            settings = {**settings, "strategy": FSDP2Strategy(sharded_checkpoints=True)}
        _, run = run_of(world, epochs=1, **settings)
        run.save_checkpoint(folder / name)
        if name == "shards" and world > 1:
            settings["strategy"] = FSDP2Strategy(sharded_checkpoints=True)
        found[name], _ = run_of(world, path=folder / name, **settings)
    return found


def with_shared_weight():
    """A weight of a block that is in the rest, too."""
    network = Net()
    network.tied = nn.Linear(251, 403)
    network.tied.weight = network.blocks[1][0].weight
    return network


def with_shared_number():
    network = Net()
    network.blocks[1][1].factor = network.blocks[0][1].factor
    return network


def without_memory():
    """A network on the meta device with a buffer that no checkpoint has."""
    with torch.device("meta"):
        network = Net()
        network.register_buffer("grid", torch.ones(3), persistent=False)
    return network


def predict():
    run = quiet_trainer(devices=2, strategy=ModelParallelStrategy(2, **ONE_FILE))
    run.predict(RetrievalModule(Net(), LearnedTau()), DataLoader(Batches(2), batch_size=None))


def wrong_runs(rank, folder):
    """The message of each run that must not begin, in this process."""
    auto = {"strategy": FSDP2Strategy(), "chunk_size": "auto"}
    runs = {
        "shared": {"network": with_shared_weight()},
        "auto": auto,
        "exception": {"callbacks": [OnExceptionCheckpoint(folder)], "saves": True},
        "whitening": {"callbacks": [LearnWhitening()], "whitening": PCAWhitening(2)},
        "without memory": {"network": without_memory(), "path": folder / "one file", **CASES["memory"]},
    }
    runs = {name: functools.partial(fit, 2, **settings) for name, settings in runs.items()}
    messages = {}
    for name, run in {**runs, "predict": predict}.items():
        try:
            run()
        except ValueError as error:
            messages[name] = str(error)
    return messages


class RunsCode:
    def __reduce__(self):
        return (print, ("this ran",))


def in_each_process(rank, world, folder):
    found = {name: run_of(world, **settings)[0] for name, settings in CASES.items()}
    found["shared number"], _ = run_of(world, network=with_shared_number())
    results = {"runs": found, "saved": saved_runs(world, folder), "wrong": wrong_runs(rank, folder)}
    write_sharded_checkpoint(folder / "code.ckpt", {"state_dict": {}, "epoch": RunsCode()})
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(run_processes, folder):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, 2, folder, backend=None, timeout=300)


def assert_same_run(found, expected):
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=1e-10)
    assert found["losses"] == pytest.approx(expected["losses"][-len(found["losses"]) :], abs=1e-6)
    assert found["memory"] == expected["memory"]


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize("case", [*CASES, "shared number"])
def test_two_processes_train_as_one(ranks, case):
    """Each of them with about a half of the network."""
    settings = CASES.get(case) or {"network": with_shared_number()}
    expected, _ = run_of(1, **settings)
    for result in ranks:
        assert_same_run(result["runs"][case], expected)
        assert result["runs"][case]["part"] < 0.6 or case == "kept gathered"


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor the description of a memory
@pytest.mark.parametrize("name", ["one file", "shards"])
def test_a_run_goes_on_from_its_checkpoint(ranks, folder, name):
    """In two processes and in one, which reads the files of two."""
    expected, _ = run_of(1, **CASES["memory"])
    for result in ranks:
        assert_same_run(result["saved"][name], expected)
    assert (folder / name).is_dir() == (name == "shards")
    found, _ = run_of(1, path=folder / name, **CASES["memory"])
    assert_same_run(found, expected)
    loaded = RetrievalModule.load_from_checkpoint(folder / name, embedder=Net(), loss=LearnedTau())
    assert len(loaded.memory) == 16


def test_each_process_writes_its_shards_only(ranks, folder):
    sizes = [path.stat().st_size for path in (folder / "shards").rglob("*") if path.is_file()]
    assert max(sizes) < 0.6 * (folder / "one file").stat().st_size


@pytest.mark.refusal
@pytest.mark.parametrize("shard", [1, 2])
def test_a_missing_shard_is_damage(ranks, folder, tmp_path, shard):
    shutil.copytree(folder / "shards", tmp_path / "damaged")
    next((tmp_path / "damaged").glob(f"shard-0000{shard}-*")).unlink()
    with pytest.raises(ValueError, match="damaged is damaged"):
        RetrievalModule.load_from_checkpoint(tmp_path / "damaged", embedder=Net(), loss=LearnedTau())


@pytest.mark.refusal
def test_what_cannot_be_sharded_raises_in_all_processes(ranks):
    words = {
        "shared": "in several",
        "auto": "chunk_size='auto'",
        "exception": "OnExceptionCheckpoint",
        "whitening": "LearnWhitening",
        "without memory": "got no values for embedder.grid",
        "predict": "in predict",
    }
    for result in ranks:
        assert list(result["wrong"]) == list(words)
        for name, message in result["wrong"].items():
            assert words[name] in message


@pytest.mark.hostile
def test_shards_are_read_without_running_code(ranks, folder, capfd):
    with pytest.raises(pickle.UnpicklingError):
        RetrievalModule.load_from_checkpoint(folder / "code.ckpt", embedder=Net())
    assert "this ran" not in capfd.readouterr().out
