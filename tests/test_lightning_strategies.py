"""Each name of a strategy of Lightning: it trains the same on two processes as on one, or raises."""

import functools
import os
import pickle

import pytest
import torch
from pytorch_lightning.strategies import StrategyRegistry

from lightning_retrieval.training.trainer_checks import check_trainer
from tests.lightning_tools.runs import fit, flat, make_module, make_run, plain, trainer_with

# The names of strategies that train; all others raise.
STRATEGIES = {
    "single_device",
    "ddp",
    "ddp_find_unused_parameters_false",
    "ddp_find_unused_parameters_true",
    "ddp_fork",
    "ddp_fork_find_unused_parameters_false",
    "ddp_fork_find_unused_parameters_true",
    "ddp_notebook",
    "ddp_notebook_find_unused_parameters_false",
    "ddp_notebook_find_unused_parameters_true",
    "ddp_spawn",
    "ddp_spawn_find_unused_parameters_false",
    "ddp_spawn_find_unused_parameters_true",
}


@pytest.mark.refusal
@pytest.mark.parametrize("name", StrategyRegistry.available_strategies())
def test_names_of_strategies(name):
    trainer = trainer_with(StrategyRegistry[name]["strategy"])
    if name in STRATEGIES:
        check_trainer("RetrievalModule", trainer)
        return
    with pytest.raises(ValueError, match=r"^RetrievalModule: "):
        check_trainer("RetrievalModule", trainer)


def without_dropout(**flags):
    """A run of the weights that any number of processes should train: it draws no random numbers."""
    module = make_module(dropout=0.0, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    run = fit(module=module, **flags)
    return flat(run.module), run.metrics["val/mAP"]


def by_launcher(rank, world_size):
    """Runs of processes that somebody else has started, one after the other."""
    cases = [
        {"strategy": "ddp"},
        {"strategy": "ddp", "use_distributed_sampler": False},
        {"strategy": "ddp_find_unused_parameters_true"},
        {"strategy": "ddp", "reload_dataloaders_every_n_epochs": 1},
    ]
    return [without_dropout(devices=world_size, **flags) for flags in cases]


def on_two_nodes(rank, world_size):
    """Each process is a node of its own."""
    os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    return [without_dropout(devices=1, num_nodes=world_size, strategy="ddp")]


def starting_others(rank, world_size, strategy):
    """One process, whose Trainer starts the others."""
    return [without_dropout(devices=2, strategy=strategy)]


def assert_same_as_one_process(results):
    weights, metric = without_dropout()
    for of_rank in results:
        for found, found_metric in of_rank:
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)
            assert found_metric == pytest.approx(metric, abs=1e-5)


@pytest.mark.slow
def test_two_processes_train_the_same(run_processes):
    assert_same_as_one_process(run_processes(by_launcher, 2, backend=None))


@pytest.mark.slow
def test_two_nodes_train_the_same(run_processes):
    assert_same_as_one_process(run_processes(on_two_nodes, 2, backend=None))


@pytest.mark.slow
def test_processes_that_the_trainer_starts_train_the_same(run_processes):
    assert_same_as_one_process(run_processes(starting_others, 1, "ddp_fork", backend=None))


def test_a_run_can_be_sent_to_a_process_that_is_spawned():
    """As "ddp_spawn" does: the Trainer with its callbacks, the module and the data are pickled."""
    run = make_run()
    trainer, module, data = pickle.loads(pickle.dumps((run.trainer, run.module, run.data)))
    trainer.fit(module, data)
    assert torch.equal(flat(module), flat(plain().module))
