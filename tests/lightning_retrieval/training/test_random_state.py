"""Random states of a step and of a chunk: those of the CPU and of all devices, here of an accelerator of generators."""

import pytest
import torch

from lightning_retrieval.training.random_state import RandomState, step_random_state


class Accelerator:
    """The functions of `torch.cuda` for random states, with a generator of the CPU for each of its two devices."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        self.initialized = True

    def is_initialized(self):
        return self.initialized

    def get_rng_state(self, device):
        assert self.initialized, "reading the state would initialise the device"
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    def draw(self):
        return [torch.rand(2), *(torch.rand(2, generator=generator) for generator in self.generators)]


@pytest.fixture
def accelerator(monkeypatch):
    found = Accelerator()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


def test_the_numbers_of_every_device_are_drawn_again(accelerator):
    state = RandomState()
    first, second = accelerator.draw(), accelerator.draw()
    with state.replayed():
        again = accelerator.draw()
    following = accelerator.draw()
    with state.replayed():
        torch.testing.assert_close([accelerator.draw() for _ in range(3)], [first, second, following])
    torch.testing.assert_close(again, first)


def test_a_step_restores_the_state_of_every_device(accelerator):
    state = RandomState()
    expected = accelerator.draw()
    with state.replayed():
        with step_random_state(seed=1, step=2, rank=0):
            accelerator.draw()
        torch.testing.assert_close(accelerator.draw(), expected)


def test_a_device_that_is_not_in_use_is_not_initialised(accelerator):
    accelerator.initialized = False
    state = RandomState()
    assert list(state.states) == [torch.device("cpu")]


def test_the_numbers_of_a_step_depend_on_seed_step_and_rank():
    def drawn(seed, step, rank):
        with step_random_state(seed, step, rank):
            return torch.rand(1).item()

    assert drawn(3, 4, 0) == drawn(3, 4, 0)
    assert len({drawn(3, 4, 0), drawn(4, 4, 0), drawn(3, 5, 0), drawn(3, 4, 1)}) == 4
