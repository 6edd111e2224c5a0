"""Checkpoints of a sharded network that raise; tests/test_full_sharding.py compares runs that continue from one."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.plain_data import describe
from lightning_retrieval.training.checkpoint_files import FullCheckpoints
from lightning_retrieval.training.full_sharding import is_sharded, shard_blocks

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"), reason="needs a newer torch"
)


class Factored(torch.optim.AdamW):
    """An optimizer with state of another shape than the parameter, as Adafactor's."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.ones(2)


def start(mesh=None, seed=0, optimizer=torch.optim.AdamW):
    """A module with a frozen parameter and a memory, and an optimizer whose groups have another order."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    network[0].weight.requires_grad_(False)
    module = RetrievalModule(network, SmoothAPLoss(), memory=CrossBatchMemory(6))
    if mesh is not None:
        shard_blocks(module.embedder, mesh)
    groups = [{"params": list(network[2].parameters()), "lr": 0.1}, {"params": [network[0].bias], "lr": 0.2}]
    return module, optimizer(groups)


def train(module, optimizer, steps=2):
    for step in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * (step + 1)
        optimizer.step()
    rows = torch.arange(12.0).view(4, 3)
    module.memory.update(rows, torch.arange(4), torch.arange(4))


def strategy_with(module, optimizer):
    strategy = SimpleNamespace(lightning_module=module, optimizers=[optimizer])
    FullCheckpoints("RetrievalModule", strategy).install()
    return strategy


def checkpoint_of(strategy):
    state = strategy.optimizer_state(strategy.optimizers[0])
    return {"state_dict": strategy.lightning_module_state_dict(), "optimizer_states": [state], "epoch": 3}


def message_of(strategy, path):
    try:
        strategy.load_checkpoint(path)
    except ValueError as error:
        return str(error)
    return "no error"


def in_each_process(this, world, folder):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    module, optimizer = start(mesh)
    train(module, optimizer)
    checkpoint = checkpoint_of(strategy_with(module, optimizer))
    if this == 0:
        torch.save(checkpoint, folder / "two.ckpt")
        content = bytearray((folder / "two.ckpt").read_bytes())
        content[len(content) // 2] ^= 1
        (folder / "damaged.ckpt").write_bytes(content)
    dist.barrier()

    other, other_optimizer = start(mesh, seed=1)
    strategy = strategy_with(other, other_optimizer)
    strategy.load_checkpoint(folder / "two.ckpt")
    sharded = [is_sharded(value) for state in other_optimizer.state.values() for value in state.values()]
    factored, factored_optimizer = start(mesh, optimizer=Factored)
    return {
        "sharded": sharded,
        "described": describe(module.embedder),
        "folder": message_of(strategy, folder),
        "damaged": message_of(strategy, folder / "damaged.ckpt"),
        "factored": message_of(strategy_with(factored, factored_optimizer), folder / "factored.ckpt"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    module, optimizer = start(optimizer=Factored)
    train(module, optimizer)
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}
    torch.save(state, path / "factored.ckpt")
    return path


@pytest.fixture(scope="module")
def ranks(run_processes, folder):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, 2, folder)


def test_the_averages_of_an_optimizer_are_sharded_again(ranks):
    for result in ranks:
        assert sum(result["sharded"]) == 2 * 3  # two averages of each of three parameters; not the number of steps


def test_a_sharded_network_is_described_as_it_was(ranks):
    """`fully_shard` has replaced the class by one that a checkpoint cannot rebuild."""
    assert [result["described"] for result in ranks] == [describe(start()[0].embedder)] * 2


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("folder", "RetrievalModule: a checkpoint must be one file, got the folder "),
        ("damaged", "RetrievalModule: the checkpoint "),
        (
            "factored",
            "RetrievalModule: the optimizer's state of a sharded parameter must have the shape of the parameter, "
            "(3, 7), got (2,) for 'rows'; use another optimizer, or DDP.",
        ),
    ],
)
def test_checkpoints_that_cannot_be_loaded_raise(ranks, name, sentence):
    for result in ranks:
        assert result[name].startswith(sentence)
    assert "is damaged" in ranks[0]["damaged"]
