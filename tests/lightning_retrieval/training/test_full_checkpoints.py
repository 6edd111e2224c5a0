"""Checkpoints of a network that two processes share; tests/test_full_sharding.py has those of runs, and a kill."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.plain_data import describe
from lightning_retrieval.training.checkpoint_files import FullCheckpoints
from lightning_retrieval.training.full_sharding import is_sharded, local_shard, shard_blocks

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


def slices(module, optimizer):
    """All that this process keeps."""
    found = [local_shard(value).clone() for value in module.state_dict().values() if isinstance(value, torch.Tensor)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found += [local_shard(value).clone() for value in optimizer.state[parameter].values()]
    return found


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
    epoch = strategy.load_checkpoint(folder / "two.ckpt")["epoch"]
    loaded = slices(other, other_optimizer)
    divided = [is_sharded(value) for state in other_optimizer.state.values() for value in state.values()]

    from_one, from_one_optimizer = start(mesh, seed=1)
    strategy_with(from_one, from_one_optimizer).load_checkpoint(folder / "one.ckpt")
    factored, factored_optimizer = start(mesh, optimizer=Factored)
    return {
        "saved": slices(module, optimizer),
        "loaded": loaded,
        "from one": slices(from_one, from_one_optimizer),
        "epoch": epoch,
        "divided": divided,
        "memory": len(other.memory),
        "described": describe(module.embedder),
        "folder": message_of(strategy, folder),
        "damaged": message_of(strategy, folder / "damaged.ckpt"),
        "factored": message_of(strategy_with(factored, factored_optimizer), folder / "factored.ckpt"),
    }


@pytest.fixture(scope="module")
def one_process():
    """The module and the optimizer of one process after the same steps."""
    module, optimizer = start()
    train(module, optimizer)
    return module, optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_process):
    path = tmp_path_factory.mktemp("checkpoints")
    for name, make in (("one", torch.optim.AdamW), ("factored", Factored)):
        module, optimizer = start(optimizer=make)
        train(module, optimizer)
        states = [optimizer.state_dict()]
        torch.save({"state_dict": module.state_dict(), "optimizer_states": states, "epoch": 3}, path / f"{name}.ckpt")
    return path


@pytest.fixture(scope="module")
def ranks(run_processes, folder):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, 2, folder)


def test_a_checkpoint_is_that_of_one_process(ranks, folder, one_process):
    module, optimizer = one_process
    found = torch.load(folder / "two.ckpt", weights_only=True)
    assert list(found["state_dict"]) == list(module.state_dict())
    assert found["optimizer_states"][0]["param_groups"] == optimizer.state_dict()["param_groups"]
    other, other_optimizer = start(seed=1)
    other.load_state_dict(found["state_dict"])
    other_optimizer.load_state_dict(found["optimizer_states"][0])
    assert_equal(slices(other, other_optimizer), slices(module, optimizer))
    assert len(other.memory) == 4


def test_each_process_gets_its_slices_again(ranks):
    for result in ranks:
        assert result["epoch"] == 3
        assert result["memory"] == 4
        assert_equal(result["loaded"], result["saved"])
        assert_equal(result["from one"], result["saved"])
        assert any(value.numel() for value in result["saved"])
        assert sum(result["divided"]) == 2 * 3  # two averages of each of three parameters; not the number of steps


def test_a_divided_network_is_described_as_it_was(ranks, one_process):
    """`fully_shard` has replaced the class by one that a checkpoint cannot rebuild."""
    assert [result["described"] for result in ranks] == [describe(one_process[0].embedder)] * 2


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for value, other in zip(found, expected):
        assert torch.equal(value, other)


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
