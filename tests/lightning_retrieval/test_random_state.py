"""Random numbers that a chunk draws again: those of the CPU, of GPUs and of an accelerator made of generators."""

import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_retrieval.random_state import has_accelerator
from lightning_retrieval.training.chunked import chunked_backward
from tests.lightning_retrieval.training.small_chunks import chunk_by_chunk, gradients_of, images, net, smooth_ap


class Accelerator:
    """The functions of `torch.cuda` for random states, with a generator of the CPU for each of its two devices."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def is_initialized(self):
        return True

    def get_rng_state(self, device):
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    def draw(self):
        return sum(torch.rand((), generator=generator) for generator in self.generators)


@pytest.fixture
def accelerator(monkeypatch):
    """While it is used, the library looks for an accelerator again."""
    has_accelerator.cache_clear()
    found = Accelerator()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    yield found
    has_accelerator.cache_clear()


def test_the_numbers_of_every_device_are_drawn_again(accelerator):
    layers, x = net(), images()

    def embed(chunk):
        return layers(chunk * accelerator.draw())

    states = [generator.get_state() for generator in accelerator.generators]
    chunk_by_chunk(embed, x, smooth_ap, 4)
    plain, following = gradients_of(layers), accelerator.draw()
    for generator, state in zip(accelerator.generators, states, strict=True):
        generator.set_state(state)
    chunked_backward(embed, x, smooth_ap, 4)
    torch.testing.assert_close(gradients_of(layers), plain)
    assert accelerator.draw() == following


def torch_random():
    return torch.rand(()).item()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, torch_random], ids=["python", "numpy", "torch"])
@pytest.mark.parametrize("keep_graphs", [1, 9])
def test_layers_that_are_skipped_at_random_are_skipped_again(draw, keep_graphs, request):
    """Whatever comes next sees the random numbers that it would have seen after one embedding of the batch."""
    if draw is random.random and request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("beartype itself draws from Python's generator")
    layers, x = net(dropout=0.5), images()

    def embed(chunk):
        return checkpoint(layers, chunk * (draw() < 0.5) + chunk.square() * draw(), use_reentrant=False)

    def seed():
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    chunk_by_chunk(embed, x, smooth_ap, 4)
    plain, following = gradients_of(layers), draw()
    seed()
    chunked_backward(embed, x, smooth_ap, 4, keep_graphs=keep_graphs)
    torch.testing.assert_close(gradients_of(layers), plain)
    assert draw() == following


def test_random_state_is_put_back_when_the_embedder_fails():
    embed, x, calls = net(dropout=0.5), images(), []

    def fails(chunk):
        calls.append(len(chunk))
        if len(calls) == 4:  # the first chunk's second time
            torch.rand(7)
            raise RuntimeError("no more")
        return embed(chunk)

    torch.manual_seed(5)
    for chunk in x.split(4):
        embed(chunk)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="no more"):
        chunked_backward(fails, x, smooth_ap, 4)
    assert torch.equal(torch.get_rng_state(), state)


SEVERAL_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=SEVERAL_GPUS)])
def test_dropout_on_a_gpu_draws_the_same_numbers_again(device, size):
    """The images lie on the CPU, and the network on a GPU that need not be the current one."""
    layers, x = net(dropout=0.5).to(device), images()

    def embed(chunk):
        return layers(chunk.to(device))

    torch.manual_seed(5)
    expected = chunk_by_chunk(embed, x, smooth_ap, size)
    plain, state = gradients_of(layers), torch.cuda.get_rng_state(device)
    torch.manual_seed(5)
    value = chunked_backward(embed, x, smooth_ap, size)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients_of(layers), plain)
    assert torch.equal(torch.cuda.get_rng_state(device), state)
