"""What raises with `ModelParallelStrategy`, with the sentence; the runs are in tests/test_full_sharding.py."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import BaseFinetuning, EMAWeightAveraging, ModelPruning, OnExceptionCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import fsdp

from lightning_retrieval import PCAWhitening, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import LearnWhitening
from lightning_retrieval.training.trainer_checks import check_processes, check_trainer
from tests.lightning_retrieval.training.small_training import net

FILE = {"tensor_parallel_size": 1, "save_distributed_checkpoint": False}
pytestmark = pytest.mark.refusal
needs_sums = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"), reason="needs a newer torch"
)


class FreezesAll(BaseFinetuning):
    """A callback of the user."""


def trainer(devices=2, callbacks=(), **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    strategy = ModelParallelStrategy(**{**FILE, **settings})
    return pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, callbacks=list(callbacks), **quiet
    )


@needs_sums
@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size='auto', save_distributed_checkpoint=False"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2, save_distributed_checkpoint=False"),
        ({"save_distributed_checkpoint": True}, "tensor_parallel_size=1, save_distributed_checkpoint=True"),
    ],
)
def test_other_arguments_raise_with_those_to_use(settings, got):
    with pytest.raises(ValueError, match=r"^RetrievalModule") as raised:
        check_trainer("RetrievalModule", trainer(**settings))
    assert str(raised.value) == (
        "RetrievalModule: all processes must share the data, and a checkpoint must be one file, got "
        f"ModelParallelStrategy({got}); use ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, "
        "save_distributed_checkpoint=False)."
    )


@needs_sums
def test_the_right_arguments_raise_nothing():
    check_trainer("RetrievalModule", trainer())
    check_trainer("RetrievalModule", trainer(devices=1, tensor_parallel_size="auto"))


@needs_sums
@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (FreezesAll(), "needs full parameters"),
        (EMAWeightAveraging(), "needs full parameters"),
        (ModelPruning("l1_unstructured"), "needs full parameters"),
        (OnExceptionCheckpoint("folder"), "saves with all processes, but one of them may have failed alone; leave it"),
    ],
)
def test_callbacks_that_cannot_work_raise(callback, reason):
    name = type(callback).__name__
    with pytest.raises(ValueError, match=rf"^RetrievalModule: the callback {name} of Lightning {reason}"):
        check_trainer("RetrievalModule", trainer(callbacks=[callback]))


@needs_sums
def test_predict_with_several_processes_raises():
    run = trainer()
    run.state.fn = pl.trainer.states.TrainerFn.PREDICTING
    with pytest.raises(ValueError, match=r"^RetrievalModule: in predict the processes may have unequal numbers of bat"):
        check_trainer("RetrievalModule", run)


def test_an_old_torch_raises(monkeypatch):
    monkeypatch.delattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms", raising=False)
    with pytest.raises(
        ValueError, match=r"^RetrievalModule: ModelParallelStrategy needs a newer torch, .* got torch \d"
    ):
        check_trainer("RetrievalModule", trainer())


def test_a_chunk_size_that_each_process_finds_for_itself_raises(monkeypatch):
    module = RetrievalModule(net(), SmoothAPLoss(), chunk_size="auto")
    for name in ("world_size", "has_sharded_parameters"):
        monkeypatch.setattr(f"lightning_retrieval.training.trainer_checks.{name}", lambda *_: 2)
    with pytest.raises(ValueError, match=r"^RetrievalModule: chunk_size='auto' is found by each .* chunk_size=32\.$"):
        check_processes(module)


def test_whitening_with_several_processes_raises():
    module = RetrievalModule(nn.Linear(8, 4), SmoothAPLoss(), whitening=PCAWhitening(dim=2))
    with pytest.raises(ValueError, match=r"^LearnWhitening: the processes may embed unequal numbers of batches"):
        LearnWhitening().setup(trainer(), module, "fit")
    LearnWhitening().setup(trainer(devices=1), module, "fit")
