"""Flags of the Trainer that raise, with the whole sentence; `tests/test_lightning.py` goes through all of them."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.training.trainer_checks import check_processes
from tests.lightning_retrieval.training.small_training import batches, fit, net


def trainer(**flags):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, **quiet, **flags})


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"gradient_clip_val": 0.5},
            r"Trainer\(gradient_clip_val=0\.5\) does not work .* RetrievalModule\(\.\.\., gradient_clip_val=0\.5\)",
        ),
        (
            {"gradient_clip_algorithm": "value"},
            r"Trainer\(gradient_clip_algorithm='value'\) has no effect .* RetrievalModule\(\.\.\., gradient_clip_algor",
        ),
        ({"accumulate_grad_batches": 4}, r"Trainer\(accumulate_grad_batches=4\) would split .* chunk_size"),
        ({"overfit_batches": 2}, r"Trainer\(overfit_batches=2\) replaces the sampler.* limit_train_batches"),
    ],
)
def test_trainer_flags_that_break_the_lists_raise(flags, sentence):
    with pytest.raises(ValueError, match=rf"^RetrievalModule: {sentence}"):
        fit(RetrievalModule(net(), SmoothAPLoss()), batches(), **flags)


def test_a_static_graph_raises():
    module = RetrievalModule(net(), SmoothAPLoss())
    module.trainer = trainer(strategy=DDPStrategy(static_graph=True))
    with pytest.raises(
        ValueError, match=r"^RetrievalModule: DDPStrategy\(static_graph=True\) expects one backward pass"
    ):
        module.configure_callbacks()


@pytest.mark.parametrize("chunk_size", [None, 3, "auto"])
def test_chunks_and_sync_batch_norm_do_not_go_together(chunk_size, monkeypatch):
    """The layer works on GPUs only, so the module is asked without a run, as if on two processes."""
    module = RetrievalModule(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)), SmoothAPLoss(), chunk_size=chunk_size)
    check_processes(module)
    monkeypatch.setattr("lightning_retrieval.training.trainer_checks.world_size", lambda: 2)
    if chunk_size is None:
        check_processes(module)
    else:
        with pytest.raises(ValueError, match=r"^RetrievalModule: SyncBatchNorm waits for all processes at each chunk"):
            check_processes(module)
