"""Gradients are summed over real processes as by a plain loop, most of them while the last backward pass runs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_retrieval.training.chunked import chunked_backward
from lightning_retrieval.training.gradient_sum import GradientSum

LAYERS, WIDTH = 5, 8
WORLD = 2
ROWS = [7, 4]  # of each process
BUCKET = 2 * 8 * WIDTH * WIDTH  # bytes: two weights of float64


class Net(nn.Module):
    """Layers without a bias, one that is never used, one that only the first process uses, and a frozen one."""

    def __init__(self, this=0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.this = this
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, WIDTH, bias=False)
        self.of_first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.double()
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / WIDTH**0.5

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.this == 0:
            x = self.of_first(x)
        return self.frozen(x)


class Loss(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, y):
        return (self.scale * y).square().sum() + self.scale


def rows_of(this):
    generator = torch.Generator().manual_seed(1 + this)
    return torch.randn(ROWS[this], WIDTH, generator=generator, dtype=torch.float64)


def sum_of_a_step(this, chunk_size=3, bucket_bytes=BUCKET, keep_graphs=1):
    """The gradients by name after a step of one process, and the sum of its values."""
    net, loss = Net(this), Loss()
    module = nn.ModuleDict({"net": net, "loss": loss})
    gradients = GradientSum(module.parameters(), loss.parameters(), bucket_bytes=bucket_bytes)
    value = chunked_backward(
        net, rows_of(this), loss, chunk_size, keep_graphs=keep_graphs, last_backward=gradients.overlapped
    )
    total = gradients.finish(torch.stack([value, value.new_tensor(this)]))
    return {name: parameter.grad for name, parameter in module.named_parameters()}, total


def events_of_a_step(this):
    """The elements of each sum, when it starts, and the backward passes that reach the first layer."""
    events, original = [], dist.all_reduce

    def recorded(tensor, **keywords):
        events.append(tensor.numel())
        return original(tensor, **keywords)

    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).double()
    net[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    gradients = GradientSum(net.parameters(), bucket_bytes=BUCKET)
    dist.all_reduce = recorded
    try:
        chunked_backward(net, rows_of(this)[:4], Loss(), 3, last_backward=gradients.overlapped)
        gradients.finish(torch.zeros(1, dtype=torch.float64))
    finally:
        dist.all_reduce = original
    return events


def sum_in_half_precision(this):
    """The gradient of a parameter in bfloat16, and values in float64, which are summed with it."""
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    half.grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    values = GradientSum([half]).finish(torch.tensor([1.0, this], dtype=torch.float64))
    return half.grad, values


def sum_with_channels_last(this):
    """The gradient of a convolution whose channels are last, and the order of its memory."""
    weight = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    weight.grad = (1 + this) * torch.arange(120.0).view(2, 3, 4, 5)  # in another order
    GradientSum([weight]).finish(torch.zeros(1))
    return weight.grad, weight.grad.stride() == weight.stride()


def message_of_a_shared_layer(this):
    """The error where two reentrant checkpoints share a layer, whose gradient then comes in two parts."""
    layer = nn.Linear(2, 2, bias=False)
    gradients = GradientSum(layer.parameters(), bucket_bytes=1)
    x = torch.ones(1, 2, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    try:
        with gradients.overlapped():
            y.sum().backward()
    except ValueError as error:
        return str(error)
    finally:
        gradients.finish(torch.zeros(1))  # else the process would end while a thread still sums
    return "no error"


CASES = {
    "whole batch": {"chunk_size": None},
    "chunks": {},
    "kept graphs": {"keep_graphs": 2},
    "one bucket a layer": {"bucket_bytes": 1},
    "no full bucket": {"bucket_bytes": 2**30},
}


def in_each_process(this, world):
    return {
        "steps": {name: sum_of_a_step(this, **settings) for name, settings in CASES.items()},
        "half": sum_in_half_precision(this),
        "channels last": sum_with_channels_last(this),
        "events": events_of_a_step(this),
        "shared": message_of_a_shared_layer(this),
    }


@pytest.fixture(scope="module")
def ranks(run_processes):
    """The results of each process, in rank order."""
    return run_processes(in_each_process, WORLD)


def plain_sum():
    """The gradients of the sum of the processes' losses, in one process, and the sum."""
    module, value = nn.ModuleDict({"net": Net(), "loss": Loss()}), 0.0
    for this in range(WORLD):
        module["net"].this = this
        value += module["loss"](module["net"](rows_of(this)))
    value.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}, value.detach()


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_plain_sum(ranks, case):
    """The same bits in both processes and with any buckets: a sum of two numbers does not depend on their order."""
    expected, value = plain_sum()
    of_first, _ = ranks[0]["steps"]["chunks" if "bucket" in case else case]
    for result in ranks:
        gradients, total = result["steps"][case]
        assert set(gradients) == set(expected)
        for name, gradient in gradients.items():
            if expected[name] is None:
                assert gradient is None, name
            else:
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)
                assert torch.equal(gradient, of_first[name])
        assert total.tolist() == pytest.approx([value.item(), 1], abs=1e-12)


def test_full_buckets_are_summed_while_the_last_backward_pass_runs(ranks):
    """Two layers each, then the first layer with five flags and a value."""
    layer = WIDTH * WIDTH
    for result in ranks:
        assert result["events"] == ["first layer", 2 * layer, 2 * layer, "first layer", layer + LAYERS + 1]


def test_each_sum_keeps_its_dtype(ranks):
    for result in ranks:
        gradient, values = result["half"]
        assert (gradient.dtype, gradient.tolist()) == (torch.bfloat16, [2.0, 4.0])
        assert (values.dtype, values.tolist()) == (torch.float64, [2.0, 1.0])


def test_a_sum_has_the_memory_order_of_its_parameter(ranks):
    for result in ranks:
        gradient, has_order = result["channels last"]
        assert has_order
        assert torch.equal(gradient, 3 * torch.arange(120.0).view(2, 3, 4, 5))


@pytest.mark.refusal
def test_a_gradient_in_two_parts_raises_on_all_processes(ranks):
    for result in ranks:
        message = result["shared"]
        assert message.startswith("GradientSum: the gradient of a parameter of shape (2, 2) was computed in two parts")
        assert message.endswith("use torch.utils.checkpoint with use_reentrant=False.")


def test_one_process_sums_nothing():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    values = torch.ones(2)
    assert torch.equal(GradientSum([parameter]).finish(values), values)
    assert parameter.grad.tolist() == [1.0, 1.0]
