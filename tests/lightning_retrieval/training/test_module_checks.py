"""Settings of a RetrievalModule that are validated at construction."""

import pytest

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.losses import BlackboxMAPLoss
from tests.lightning_retrieval.training.small_training import net


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "41")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 41
    assert RetrievalModule(net(), SmoothAPLoss(), seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 0


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"chunk_size": 0}, ValueError, r"`chunk_size` must be an integer >= 1, got 0\."),
        ({"chunk_size": 2.0}, TypeError, r"`chunk_size` must be an integer >= 1, got 2\.0"),
        ({"gather": None}, TypeError, r"`gather` must be True or False, got None\."),
        ({"loss": BlackboxMAPLoss()}, TypeError, r"BlackboxMAPLoss takes scores of images for classes, not embeddings"),
        ({"chunk_size": "all"}, TypeError, r"`chunk_size` must be an integer >= 1 or 'auto', got 'all'"),
        ({"lr_scheduler_interval": "batch"}, ValueError, r"must be one of 'epoch', 'step', got 'batch'\."),
        ({"lr_scheduler_frequency": 0}, ValueError, r"`lr_scheduler_frequency` must be an integer >= 1, got 0\."),
        ({"gradient_clip_val": 0.0}, ValueError, r"`gradient_clip_val` must be a finite number > 0, got 0\.0\."),
        ({"gradient_clip_algorithm": "max"}, ValueError, r"must be one of 'norm', 'value', got 'max'\."),
        ({"head_lr_factor": -1.0}, ValueError, r"`head_lr_factor` must be a finite number > 0, got -1\.0\."),
        ({"embedder": 3}, TypeError, r"`embedder` must be a torch\..*\.Module, got int\."),
        ({"loss": abs}, TypeError, r"`loss` must be a torch\..*\.Module, got builtin_function_or_method\."),
        ({"optimizer": 0.1}, TypeError, r"`optimizer` must be callable, such as .*, got 0\.1\."),
    ],
)
def test_settings_are_checked(settings, error, sentence):
    with pytest.raises(error, match=rf"^RetrievalModule: .*{sentence}"):
        RetrievalModule(**{"embedder": net(), "loss": SmoothAPLoss(), **settings})
