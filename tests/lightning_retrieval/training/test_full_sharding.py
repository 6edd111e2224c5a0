"""The gradients and checkpoints of a network that processes share; tests/test_full_sharding.py has whole runs."""

import copy
import json
import pickle
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn

from lightning_retrieval import CrossBatchMemory, RetrievalModule, SmoothAPLoss, checkpoints
from lightning_retrieval.checkpoints import check_checkpoint, find_damage, read_checkpoint, torch_writes_shards
from lightning_retrieval.models import GlyphNet
from lightning_retrieval.training import full_sharding
from lightning_retrieval.training.checkpoint_files import ShardedRunCheckpoints
from lightning_retrieval.training.checkpointed_module import VerifiedCheckpoints
from lightning_retrieval.training.chunked import chunked_backward
from lightning_retrieval.training.full_sharding import (
    ShardedParts,
    blocks_of,
    broadcast_buffers,
    check_placements,
    clip_sharded_gradients,
    full_tensor,
    has_sharded_parameters,
    is_sharded,
    local_shard,
    shard_blocks,
    sharding_mesh,
    start_sharded,
)
from lightning_retrieval.training.gradient_sum import GradientSum
from lightning_retrieval.training.trainer_checks import check_filled
from tests.test_resume import assert_same

fsdp = pytest.importorskip("torch.distributed.fsdp")
needs_sums = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"), reason="needs a newer torch"
)
needs_shards = pytest.mark.skipif(not torch_writes_shards(), reason="needs torch 2.9")
ROWS, CHUNK = [7, 3, 2, 5], 2  # of each process: four, two, one and three chunks
KEPT = [1, 3]  # graphs
COPIES = [1, 2]  # of the network, each held by two processes
CLIPPED = [("norm", 0.5), ("norm", 1e6), ("value", 0.01)]


class Loss(nn.Module):
    """A loss with a parameter, which is not divided."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, y):
        return (self.scale * y).square().sum()


class KeepsGathered(RetrievalModule):
    """What a user may write: without `reshard_after_forward` an evaluation leaves the parameters gathered."""

    def shard_network(self, mesh):
        fsdp.fully_shard(self.embedder, mesh=mesh)


class Scaled(nn.Tanh):
    """A layer with a single number as its parameter, which cannot be divided."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.factor * super().forward(x)


def network():
    """Two blocks, one of which is frozen in part, and a rest; sizes that cannot be divided by two."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 7), Scaled(), nn.Linear(7, 5))
    net = nn.ModuleDict({"net": nn.Sequential(block, nn.Tanh(), nn.Linear(5, 3)), "loss": Loss()})
    net["net"][0][2].bias.requires_grad_(False)
    return net


def rows_of(this):
    return torch.randn(ROWS[this], 5, generator=torch.Generator().manual_seed(this), dtype=torch.float64)


def divided_step(this, keep_graphs, mesh):
    """The gradients of a step of one process, its slices, and the gradients after each kind of clipping."""
    module = network().double()
    shard_blocks(module["net"], mesh)
    sharded = ShardedParts(module)
    gradients = GradientSum(module.parameters(), module["loss"].parameters(), sharded=sharded)
    x = rows_of(this)
    least = sharded.least_chunks(-(-len(x) // CHUNK), x.device)
    value = chunked_backward(
        module["net"],
        x,
        module["loss"],
        CHUNK,
        keep_graphs=keep_graphs,
        least_chunks=least,
        last_backward=gradients.overlapped,
    )
    total = gradients.finish(value[None])
    found = {"total": total.item(), "least": least, "blocks": len(sharded.parts)}
    found["summed"] = whole_gradients(module)
    for algorithm, limit in CLIPPED:
        clipped = copy_of_gradients(module)
        clip_sharded_gradients(clipped, limit, algorithm)
        found[algorithm, limit] = [full_tensor(parameter.grad) for parameter in clipped if parameter.grad is not None]
    return found


def whole_gradients(module):
    return {name: full_tensor(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def copy_of_gradients(module):
    """Parameters as far as clipping sees them."""
    return [SimpleNamespace(grad=None if p.grad is None else p.grad.clone()) for p in module.parameters()]


def after_an_evaluation(this):
    """Whether an evaluation has left the parameters gathered, and whether they are divided again for a step."""
    net = KeepsGathered(nn.Linear(5, 3), SmoothAPLoss())
    names = ("data_parallel", "tensor_parallel")
    net._device_mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)
    net.shard_network(net.device_mesh["data_parallel"])
    net(rows_of(this).float())
    gathered = not has_sharded_parameters(net)
    net.configure_model()  # of the next run; it divides nothing twice
    ShardedParts(net)
    return gathered, has_sharded_parameters(net)


class Wrapped(nn.Module):
    """What a user may put around a layer when it is sharded; it renames the parameters."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer


def state_of_the_first(this):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("flags", torch.tensor([True, False]))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(tensor + this)
    module[1].running_mean += this
    start_sharded(module, lambda: module.__setitem__(0, Wrapped(module[0])), torch.device("cpu"))
    module[0] = module[0].layer
    first = copy.deepcopy(module.state_dict())
    module[1].running_mean += this
    module[1].num_batches_tracked += this
    module.flags[1] = this == 0
    broadcast_buffers(module)
    return first, module.state_dict()


def layers(device):
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(24)))


def peaks(this, world):
    """Peaks of the memory of a process, as multiples of a network that the second one builds on both devices."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    start_with(nn.Linear(3, 3), mesh)  # imports what is needed
    before = peak_of_process()
    found = []
    for device in ("meta", "cpu"):
        start_with(layers("cpu" if this == 0 else device), mesh)
        found.append((peak_of_process() - before) / (24 * 4 * 1000**2))
    return found


def shared_parameter(this, world):
    """Whether two layers, of which only the first process has values, still share a parameter; and its value."""
    with torch.device("cpu" if this == 0 else "meta"):
        net = nn.Sequential(Scaled(), nn.Linear(3, 3), Scaled())
        net[2].factor = net[0].factor
    start_with(net, dist.device_mesh.init_device_mesh("cpu", (world,)))
    return net[2].factor is net[0].factor, net[2].factor.item()


def message_of_networks_that_differ(this, world):
    """Two layers share a parameter, but no longer where they were moved to the meta device."""
    net = nn.Sequential(Scaled(), nn.Linear(3, 3), Scaled())
    net[2].factor = net[0].factor
    if this > 0:
        net.to("meta")
    return message_of(start_with, net, dist.device_mesh.init_device_mesh("cpu", (world,)))


def start_with(network, mesh):
    start_sharded(network, lambda: shard_blocks(network, mesh), torch.device("cpu"))


def peak_of_process():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def message_of(function, *arguments):
    """The message of the error that a call raises for its arguments, for files or in pickle, or None."""
    try:
        function(*arguments)
    except (AttributeError, OSError, ValueError, pickle.PicklingError) as error:
        return str(error)
    return None


def message_of_a_part():
    """The error for a network that is divided over some processes, while the others train another copy."""
    layer = nn.Linear(2, 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "slices"))
    fsdp.fully_shard(layer, mesh=mesh["slices"])
    return message_of(check_placements, list(layer.parameters()))


SHARED = {
    "block": None,
    "layer of two blocks": "layers.0.linear.weight",
    "weight of a block and the rest": "layers.1.linear.weight",
}


class Part(nn.ModuleDict):
    """FSDP2 divides only what can be called."""

    def forward(self, x):
        return x


def message_of_shared(shared):
    """What is raised for two blocks and a rest that share a layer, or only its weight."""
    first, second = (Part({"linear": nn.Linear(400, 400)}) for _ in range(2))
    net = Part({"layers": nn.ModuleList([first, second]), "rest": nn.Linear(400, 400)})
    if shared == "layer of two blocks":
        second["linear"] = first["linear"]
    elif shared == "weight of a block and the rest":
        net["rest"].weight = second["linear"].weight
    else:
        net["layers"].append(first)
        net["rest"] = first
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return message_of(shard_blocks, net, mesh)


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


def strategy_with(module, optimizer, sharded_checkpoints=False):
    strategy = SimpleNamespace(lightning_module=module, optimizers=[optimizer], sharded_checkpoints=sharded_checkpoints)
    ShardedRunCheckpoints(strategy).install()
    return strategy


def checkpoint_of(strategy):
    state = strategy.optimizer_state(strategy.optimizers[0])
    return {"state_dict": strategy.lightning_module_state_dict(), "optimizer_states": [state], "epoch": 3}


def slices(module, optimizer):
    """All that this process keeps."""
    found = [local_shard(value).clone() for value in module.state_dict().values() if isinstance(value, torch.Tensor)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found += [local_shard(value).clone() for value in optimizer.state[parameter].values()]
    return found


def checkpoints_of(this, world, folder):
    """What two processes save, load and refuse."""
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
    factored = strategy_with(*start(mesh, optimizer=Factored))
    return {
        "saved": slices(module, optimizer),
        "loaded": loaded,
        "from one": slices(from_one, from_one_optimizer),
        "epoch": epoch,
        "divided": divided,
        "memory": len(other.memory),
        "folder": message_of(strategy.load_checkpoint, folder),
        "damaged": message_of(strategy.load_checkpoint, folder / "damaged.ckpt"),
        "factored": message_of(factored.load_checkpoint, folder / "factored.ckpt"),
    }


def fails(*_):
    raise OSError("no space left")


def sharded_checkpoints_of(this, world, folder):
    """What two processes save in shards, also twice and in vain, and what they read of it."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    module, optimizer = start(mesh)
    train(module, optimizer)
    strategy = strategy_with(module, optimizer, sharded_checkpoints=True)
    row = dist.tensor.distribute_tensor(torch.arange(4.0).view(1, 4), mesh, [dist.tensor.Shard(0)])  # of one process
    path = folder / "shards.ckpt"
    path.write_text("an earlier checkpoint that is one file")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if this == 0:
            patch.setattr(checkpoints, "_replace", fails)
        over_file = message_of(strategy.save_checkpoint, checkpoint_of(strategy), path)
    assert path.read_text() == "an earlier checkpoint that is one file"
    strategy.save_checkpoint({**checkpoint_of(strategy), "epoch": 2}, path)
    strategy.save_checkpoint({**checkpoint_of(strategy), "row": [row]}, path)

    other, other_optimizer = start(mesh, seed=1)
    loaded = strategy_with(other, other_optimizer).load_checkpoint(path)
    assert torch.equal(loaded["row"][0], torch.arange(4.0).view(1, 4))
    divided = [is_sharded(value) for state in other_optimizer.state.values() for value in state.values()]

    with pytest.MonkeyPatch.context() as patch:
        if this == 1:
            patch.setattr(dist.checkpoint.HuggingFaceStorageWriter, "write_data", fails)
        full = message_of(strategy.save_checkpoint, checkpoint_of(strategy), path)
    local = {**checkpoint_of(strategy), "local": lambda: None}
    return {
        "saved": slices(module, optimizer),
        "loaded": slices(other, other_optimizer),
        "divided": divided,
        "epoch": loaded["epoch"],
        "full": full,
        "over file": over_file,
        "local": message_of(strategy.save_checkpoint, local, path),
        "no folder": message_of(strategy.save_checkpoint, {}, folder / "one.ckpt" / "below a file"),
    }


def steps_of(this, world, shard_size):
    """A step in groups of processes that share a copy of the network each."""
    full_sharding.SMALLEST_BLOCK = 40
    named = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("data_parallel",))
    mesh = sharding_mesh(SimpleNamespace(device_mesh=named, shard_size=shard_size))
    return {keep_graphs: divided_step(this, keep_graphs, mesh) for keep_graphs in KEPT}


def filled_from_a_checkpoint(world, folder):
    """A module that no process gives memory: what it lacks, before and after a checkpoint, and what it then keeps."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    module, _ = start(seed=1)
    module.embedder.register_buffer("grid", torch.zeros(2), persistent=False)
    module.embedder.to("meta")
    module.unfilled = start_sharded(module, lambda: shard_blocks(module.embedder, mesh), torch.device("cpu"))
    before = module.unfilled
    empty = [bool(local_shard(parameter).isnan().all()) for parameter in module.embedder.parameters()]
    strategy = strategy_with(module, None)
    strategy.optimizers = []
    strategy.load_checkpoint(folder / "one.ckpt")
    state = {name: full_tensor(value) for name, value in module.embedder.state_dict().items()}
    return {"before": before, "empty": empty, "state": state, "message": message_of(check_filled, module)}


def in_each_process(this, world, folder):
    return {
        "steps": steps_of(this, world, None),
        "evaluation": after_an_evaluation(this),
        "state": state_of_the_first(this),
        "peaks": peaks(this, world),
        "shared parameter": shared_parameter(this, world),
        "networks that differ": message_of_networks_that_differ(this, world),
        "part": message_of_a_part(),
        "shared": {name: message_of_shared(name) for name in SHARED},
        "checkpoints": checkpoints_of(this, world, folder),
        "shards": sharded_checkpoints_of(this, world, folder) if torch_writes_shards() else None,
        "filled": filled_from_a_checkpoint(world, folder),
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


@pytest.fixture(scope="module")
def steps(ranks, run_processes):
    """The steps of each process, by the number of copies of the network; the copies are of two processes each."""
    return {1: [result["steps"] for result in ranks], 2: run_processes(steps_of, 4, 2)}


def plain_sum(processes):
    """The module after the sum of the processes' losses has been propagated, in one process and one graph, and it."""
    module = network().double()
    value = sum(module["loss"](module["net"](rows_of(this))) for this in range(processes))
    value.backward()
    return module, value.item()


@needs_sums
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("keep_graphs", KEPT)
def test_gradients_are_those_of_a_plain_sum(steps, copies, keep_graphs):
    module, value = plain_sum(2 * copies)
    expected = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    for result in steps[copies]:
        found = result[keep_graphs]
        assert found["least"] == 4
        assert found["blocks"] == 3
        assert found["total"] == pytest.approx(value, abs=1e-12)
        assert set(found["summed"]) == set(expected)
        for name, gradient in found["summed"].items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


@needs_sums
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(("algorithm", "limit"), CLIPPED)
def test_gradients_are_clipped_as_in_one_process(steps, copies, algorithm, limit):
    module, _ = plain_sum(2 * copies)
    if algorithm == "norm":
        norm = nn.utils.clip_grad_norm_(module.parameters(), limit)
        assert 0.5 < norm < 1e6
    else:
        nn.utils.clip_grad_value_(module.parameters(), limit)
    expected = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for result in steps[copies]:
        found = result[1][algorithm, limit]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@needs_sums
def test_parameters_that_an_evaluation_has_gathered_are_divided_again(ranks):
    for result in ranks:
        assert result["evaluation"] == (True, True)


@needs_sums
def test_all_processes_get_the_state_of_the_first(ranks):
    (first, later), (other_first, other_later) = (result["state"] for result in ranks)
    assert first["1.running_mean"].tolist() == [0, 0]
    assert later["flags"].tolist() == [True, True]
    for name, value in first.items():
        assert torch.equal(other_first[name], value)
        assert torch.equal(other_later[name], later[name])


@needs_sums
def test_layers_without_memory_share_their_parameter_when_they_get_it(ranks):
    assert [result["shared parameter"] for result in ranks] == [(True, 2.0)] * 2


@needs_sums
def test_only_the_first_process_needs_memory_for_the_whole_network(ranks):
    (first, _), (on_meta, on_cpu) = (result["peaks"] for result in ranks)
    assert on_meta < 1  # half of the network, and a layer that is sent
    assert min(first, on_cpu) > 1, "the peak is not measured"


@needs_sums
@pytest.mark.refusal
def test_networks_that_differ_raise_on_every_process(ranks):
    for result in ranks:
        message = result["networks that differ"]
        assert message.startswith("Sequential: all processes must build the same network, got `2.factor` of shape None")


def test_a_network_that_is_not_divided_over_all_processes_raises(ranks):
    for result in ranks:
        assert re.match("a parameter must be sharded .* 2 processes, .*Shard", result["part"])


def test_blocks_are_the_elements_of_the_outermost_lists(monkeypatch):
    monkeypatch.setattr(full_sharding, "SMALLEST_BLOCK", 100)
    net = GlyphNet(width=4)
    assert blocks_of(net) == [net.layers[number] for number in (0, 3, 6, 9, 12, 15)][1:]  # the first has 36 parameters
    block = nn.Sequential(nn.Linear(50, 2), nn.ReLU())
    residual = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(50, 2))})
    nested = nn.Sequential(block, residual, nn.Linear(2, 2))
    assert blocks_of(nested) == [block[0], residual]
    assert blocks_of(nn.Linear(50, 50)) == []
    assert blocks_of(nn.ModuleDict({"a": nn.Sequential(residual), "b": nn.Sequential(residual)})) == [residual] * 2


def test_nothing_is_divided_in_one_process():
    module = network()
    sharded = ShardedParts(module)
    with sharded.summed():
        pass
    assert sharded.parts == []
    assert sharded.least_chunks(5, torch.device("cpu")) == 1
    assert not has_sharded_parameters(module)
    assert full_tensor(module["loss"].scale) is module["loss"].scale
    assert local_shard(module["loss"].scale) is module["loss"].scale


@needs_sums
@pytest.mark.refusal
def test_a_parameter_in_several_blocks_is_named(ranks):
    found, other = (result["shared"] for result in ranks)
    assert found == other
    assert found["block"] is None  # it is divided once
    for shared, name in list(SHARED.items())[1:]:
        assert found[shared].startswith("Part: FSDP2 must find each parameter in one block of ")
        assert f"got `{name}` in several; train with strategy='ddp'" in found[shared]


@needs_sums
def test_each_process_gets_its_slices_again(ranks):
    for result in (rank["checkpoints"] for rank in ranks):
        assert result["epoch"] == 3
        assert result["memory"] == 4
        assert_equal(result["loaded"], result["saved"])
        assert_equal(result["from one"], result["saved"])
        assert any(value.numel() for value in result["saved"])
        assert sum(result["divided"]) == 2 * 3  # two averages of each of three parameters; not the number of steps


@needs_sums
@pytest.mark.refusal
def test_a_network_without_memory_is_filled_from_a_checkpoint(ranks, one_process):
    module, _ = one_process
    for result in (rank["filled"] for rank in ranks):
        assert result["before"] == {f"embedder.{name}" for name in [*module.embedder.state_dict(), "grid"]}
        assert all(result["empty"])
        assert_equal([*result["state"].values()], [*module.embedder.state_dict().values()])
        assert re.match("RetrievalModule: a network .* got no values for embedder.grid; build", result["message"])


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for value, other in zip(found, expected):
        assert torch.equal(value, other)


@needs_sums
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("folder", "`ckpt_path` must be the path of a checkpoint, got the folder "),
        ("damaged", "the checkpoint .* is damaged"),
        ("factored", r"the optimizer's state of a sharded parameter .*, \(3, 7\), got \(2,\) for 'rows'"),
    ],
)
def test_checkpoints_that_cannot_be_loaded_raise(ranks, name, sentence):
    for result in ranks:
        assert re.match(f"RetrievalModule: {sentence}", result["checkpoints"][name])


@needs_shards
def test_each_process_writes_and_reads_its_shards(ranks, folder):
    whole = read_checkpoint(folder / "two.ckpt")
    found = read_checkpoint(folder / "shards.ckpt")
    assert torch.equal(found.pop("row")[0], torch.arange(4.0).view(1, 4))
    assert_same(found, whole, "checkpoint")
    for result in (rank["shards"] for rank in ranks):
        assert_equal(result["saved"], result["loaded"])
        assert result["epoch"] == 3
        assert any(result["divided"])
    (saved,) = (path for path in (folder / "shards.ckpt").iterdir() if path.is_dir())
    safetensors = pytest.importorskip("safetensors.torch")
    for this, path in enumerate(sorted(saved.glob("*.safetensors"))):
        shards = safetensors.load_file(path)
        assert shards["state_dict/embedder.0.weight"].shape == ((4, 5), (3, 5))[this]
        assert shards["optimizer_states/0/state/0/exp_avg"].shape == ((2, 7), (1, 7))[this]
    rest = torch.load(saved / "rest.pt", weights_only=True)
    assert rest["state_dict"]["embedder.0.weight"].is_meta
    assert torch.equal(rest["state_dict"]["embedder.1.running_mean"], whole["state_dict"]["embedder.1.running_mean"])


@needs_shards
@pytest.mark.refusal
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(ranks, folder):
    for result in (rank["shards"] for rank in ranks):
        assert "(no space left)" in result["over file"]
        assert re.match(
            r"RetrievalModule: the checkpoint .*shards.ckpt cannot be written \(no space left\); what was saved there "
            "before is unchanged",
            result["full"],
        )
        assert re.match("RetrievalModule: the checkpoint .*below a file cannot be written", result["no folder"])
        assert "pickle" in result["local"]
    assert find_damage(folder / "shards.ckpt") is None
    assert len(list((folder / "shards.ckpt").iterdir())) == 2  # the manifest, and the folder that it names


@needs_shards
def test_a_file_takes_the_place_of_shards(ranks, folder, tmp_path):
    path = tmp_path / "last.ckpt"
    shutil.copytree(folder / "shards.ckpt", path)
    VerifiedCheckpoints(TorchCheckpointIO()).save_checkpoint({"epoch": 4}, path)
    assert read_checkpoint(path) == {"epoch": 4}
    assert list(tmp_path.iterdir()) == [path]


class RunsCode:
    def __reduce__(self):
        return (print, ("this ran",))


def manifest_with(path, **changes):
    """Write changed values into a manifest, with a valid checksum."""
    values = checkpoints.MANIFEST.read(path)
    (path / "checkpoint.json").write_bytes(checkpoints.MANIFEST.encode({**values, **changes}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def with_files(change):
    """A damage of the names or checksums in the manifest."""

    def damage(path, saved):
        files = json.loads((path / "checkpoint.json").read_text())["files"]
        manifest_with(path, files=change(files))

    return damage


DAMAGES = {
    "no manifest": (lambda path, _: (path / "checkpoint.json").unlink(), "it is a folder without checkpoint.json"),
    "changed manifest": (lambda path, _: flip(path / "checkpoint.json"), "its checkpoint.json is not as it was"),
    "flipped bit": (lambda _, saved: flip(min(saved.glob("*.safetensors"))), "the checksum of its file .*shard-00001"),
    "shards of another run": (
        lambda _, saved: shutil.copy(min(saved.glob("*.safetensors")), max(saved.glob("*.safetensors"))),
        "the checksum of its file .*shard-00002",
    ),
    "missing shards": (lambda _, saved: max(saved.glob("*.safetensors")).unlink(), "it has no file .*shard-00002"),
    "flipped bit of the rest": (lambda _, saved: flip(saved / "rest.pt"), "the checksum of its file .*rest.pt"),
    "another folder": (with_files(lambda files: {**files, "../x": ""}), "its checkpoint.json is not as it was"),
    "no names": (with_files(lambda files: 3), "its checkpoint.json is not as it was"),
    "no rest": (
        with_files(lambda files: {name: value for name, value in files.items() if "rest" not in name}),
        "its checkpoint.json is not as it was",
    ),
}


@needs_shards
@pytest.mark.refusal
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_shards_are_refused(ranks, folder, tmp_path, name):
    path = tmp_path / "damaged.ckpt"
    shutil.copytree(folder / "shards.ckpt", path)
    (saved,) = (inner for inner in path.iterdir() if inner.is_dir())
    damage, sentence = DAMAGES[name]
    damage(path, saved)
    with pytest.raises(ValueError, match=f"^the checkpoint .*damaged.ckpt is damaged, {sentence}"):
        check_checkpoint(path)


@needs_shards
@pytest.mark.refusal
def test_files_that_are_not_those_of_the_tensors_are_refused(ranks, folder, tmp_path, capfd):
    """Whoever writes a checkpoint can also write matching checksums."""
    path = tmp_path / "made.ckpt"
    shutil.copytree(folder / "shards.ckpt", path)
    (saved,) = (inner for inner in path.iterdir() if inner.is_dir())
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    of_second = f"{saved.name}/shard-00002-model-00001-of-00001.safetensors"
    manifest_with(path, files={name: value for name, value in files.items() if name != of_second})
    (path / of_second).unlink()
    assert find_damage(path) is None
    with pytest.raises(ValueError, match=r"are not those of its tensors \(state_dict/.* does not have the shape"):
        read_checkpoint(path)
    torch.save(RunsCode(), saved / "rest.pt")
    with pytest.raises(pickle.UnpicklingError):
        read_checkpoint(path)
    assert "this ran" not in capfd.readouterr().out
