"""Settings and flags of the Trainer that raise; tests/test_lightning.py goes through all flags."""

import pytest
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.losses import BlackboxMAPLoss
from lightning_retrieval.training.trainer_checks import check_processes
from tests.lightning_retrieval.training.small_training import net


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


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "41")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 41
    assert RetrievalModule(net(), SmoothAPLoss(), seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 0


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": BlackboxMAPLoss()}, "BlackboxMAPLoss takes scores of images for classes, not embeddings"),
        ({"chunk_size": "all"}, "`chunk_size` must be an integer >= 1 or 'auto', got 'all'"),
    ],
)
def test_settings_that_no_table_has(settings, sentence):
    with pytest.raises(TypeError, match=f"^RetrievalModule: {sentence}"):
        RetrievalModule(**{"embedder": net(), "loss": SmoothAPLoss(), **settings})
