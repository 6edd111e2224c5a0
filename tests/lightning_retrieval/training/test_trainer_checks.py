"""Settings and flags of the Trainer that raise; tests/test_lightning.py and tests/test_full_sharding.py have runs."""

import pytest
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, OnExceptionCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.distributed import fsdp
from torch.utils.data import DataLoader, IterableDataset

from lightning_retrieval import (
    CrossBatchMemory,
    FSDP2Strategy,
    OtherCamera,
    PCAWhitening,
    RetrievalModule,
    SmoothAPLoss,
)
from lightning_retrieval.callbacks import LearnWhitening, RetrievalEvaluation
from lightning_retrieval.losses import After, Before, BlackboxMAPLoss, CalibrationLoss, WeightedSum
from lightning_retrieval.training.trainer_checks import check_processes, check_trainer
from tests.lightning_retrieval.training.small_training import (
    SGD,
    Unfreeze,
    assert_same,
    batches,
    fit,
    net,
    warnings_with,
)
from tests.quiet_trainer import quiet_trainer

FILE = {"tensor_parallel_size": 1, "save_distributed_checkpoint": False}
needs_sums = pytest.mark.skipif(
    not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"), reason="needs a newer torch"
)


def trainer(devices=2, callbacks=(), **settings):
    strategy = ModelParallelStrategy(**{**FILE, **settings})
    settings = {"strategy": strategy, "callbacks": list(callbacks), "enable_checkpointing": True}
    return quiet_trainer(devices=devices, **settings)


@needs_sums
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2, save_distributed_checkpoint=False"),
        ({"save_distributed_checkpoint": True}, "tensor_parallel_size=1, save_distributed_checkpoint=True"),
    ],
)
def test_other_arguments_raise_with_those_to_use(settings, got):
    use = r"data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False\), or FSDP2Strategy\("
    sentence = rf"^.* got ModelParallelStrategy\({got}\); use ModelParallelStrategy\({use}"
    with pytest.raises(ValueError, match=sentence):
        check_trainer(trainer(**settings))


@pytest.mark.refusal
def test_copies_that_cannot_have_the_same_number_of_processes_raise():
    run = quiet_trainer(devices=4, strategy=FSDP2Strategy(shard_size=3))
    sentence = r"^FSDP2Strategy: `shard_size` must divide the number of processes, 4, got 3; use "
    with pytest.raises(ValueError, match=sentence):
        run.strategy.setup_environment()


@needs_sums
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (Unfreeze(), "needs full parameters"),
        (EMAWeightAveraging(), "needs full parameters"),
        (ModelPruning("l1_unstructured"), "needs full parameters"),
        (OnExceptionCheckpoint("folder"), "saves with all processes, but one of them may have failed alone"),
    ],
)
def test_callbacks_that_cannot_work_raise(callback, reason):
    name = type(callback).__name__
    with pytest.raises(ValueError, match=rf"^the callback {name} of Lightning {reason}"):
        check_trainer(trainer(callbacks=[callback]))


@needs_sums
@pytest.mark.refusal
def test_predict_with_several_processes_raises():
    run = trainer()
    run.state.fn = TrainerFn.PREDICTING
    with pytest.raises(ValueError, match=r"^in predict the processes may have unequal numbers of bat"):
        check_trainer(run)


@pytest.mark.refusal
def test_an_old_torch_raises(monkeypatch):
    monkeypatch.delattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms", raising=False)
    with pytest.raises(ValueError, match=r"^ModelParallelStrategy needs a newer torch, .* torch \d"):
        check_trainer(trainer())


@pytest.mark.refusal
def test_whitening_with_several_processes_raises():
    module = RetrievalModule(nn.Linear(8, 4), SmoothAPLoss(), whitening=PCAWhitening(dim=2))
    with pytest.raises(ValueError, match=r"^LearnWhitening: the processes may embed unequal numbers of batches"):
        LearnWhitening().setup(trainer(), module, "fit")
    LearnWhitening().setup(trainer(devices=1), module, "fit")


@pytest.mark.refusal
def test_a_chunk_size_that_each_process_finds_for_itself_raises(monkeypatch):
    module = RetrievalModule(net(), SmoothAPLoss(), chunk_size="auto")
    for name in ("world_size", "has_sharded_parameters"):
        monkeypatch.setattr(f"lightning_retrieval.training.trainer_checks.{name}", lambda *_: 2)
    with pytest.raises(ValueError, match=r"^chunk_size='auto' is found by each .* chunk_size=32\.$"):
        check_processes(module)


@pytest.mark.parametrize("chunk_size", [None, 3, "auto", {"queries": 3, "candidates": None}])
def test_chunks_and_sync_batch_norm_do_not_go_together(chunk_size, monkeypatch):
    """The layer works on GPUs only, so the module is asked without a run, as if on two processes."""
    module = RetrievalModule(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)), SmoothAPLoss(), chunk_size=chunk_size)
    check_processes(module)
    monkeypatch.setattr("lightning_retrieval.training.trainer_checks.world_size", lambda: 2)
    if chunk_size is None:
        check_processes(module)
    else:
        with pytest.raises(ValueError, match=r"^SyncBatchNorm waits for all processes at each chunk"):
            check_processes(module)


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "41")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 41
    assert RetrievalModule(net(), SmoothAPLoss(), seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 0


@pytest.mark.refusal
@pytest.mark.parametrize("settings", [{}, {"gather": False}, {"memory": CrossBatchMemory(16)}])
@pytest.mark.parametrize(
    ("name", "value"),
    [("labels", None), ("labels", 3), ("labels", torch.tensor(3)), ("inputs", None), ("inputs", ["a.png"] * 10)],
)
def test_a_batch_without_rows_raises_one_sentence(name, value, settings):
    batch = {"inputs": batches(1)[0][0], "labels": torch.arange(10) // 2} | {name: value}
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, **settings)
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: `{name}` must "):
        fit(module, [(batch["inputs"], batch["labels"], torch.arange(10))])


@pytest.mark.refusal
@pytest.mark.parametrize(
    "settings", [{}, {"gather": False}, {"memory": CrossBatchMemory(16)}, {"relevance": OtherCamera()}]
)
@pytest.mark.parametrize("name", ["labels", "ids", "cameras"])
def test_texts_instead_of_numbers_raise_with_the_same_sentence_in_fit_and_validate(name, settings):
    if name == "cameras" and "relevance" not in settings:
        pytest.skip("only the rule of relevance reads cameras in training")
    images, labels, ids = batches(1)[0][0], torch.arange(10) // 2, torch.arange(10)
    batch = {"images": images, "labels": labels, "ids": ids, "cameras": ids % 2}
    batch[name] = [f"{number}.jpg" for number in range(10)]
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, **settings)
    sentence = rf": `{name}` must be integers, got texts such as '0.jpg'; number them in the data set"
    with pytest.raises(TypeError, match=sentence):
        fit(module, [batch])
    run = quiet_trainer(callbacks=[RetrievalEvaluation(ks=(1,))])
    with pytest.raises(TypeError, match=sentence):
        run.validate(module, DataLoader([batch], batch_size=None), verbose=False)


@pytest.mark.parametrize(
    ("filename", "settings", "warned"),
    [
        ("{val/mAP:.3f}", {}, True),
        ("{epoch}-{val/R@1}", {}, True),
        ("{epoch}-mAP={val/mAP:.3f}", {"auto_insert_metric_name": False}, False),
        ("best/{epoch}", {}, False),
        (None, {}, False),
    ],
)
def test_a_metric_name_that_would_make_folders_of_checkpoints_is_warned_of(filename, settings, warned, tmp_path):
    saving = ModelCheckpoint(tmp_path, filename=filename, monitor="val/mAP", mode="max", **settings)
    module, data = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD), batches(1)
    evaluation = {"callbacks": [saving, RetrievalEvaluation(ks=(1,))], "enable_checkpointing": True}
    found = warnings_with("would write each checkpoint into a folder", fit, module, data, data, **evaluation)
    assert len(found) == warned
    for text in found:
        assert "auto_insert_metric_name=False" in text
    made_folders = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "best"]
    assert bool(made_folders) == warned


@pytest.mark.refusal
def test_a_loss_of_scores_raises():
    with pytest.raises(TypeError, match=r"^RetrievalModule: BlackboxMAPLoss takes scores of images for classes"):
        RetrievalModule(net(), BlackboxMAPLoss())


class Endless(IterableDataset):
    """Batches of a number that is not known."""

    def __iter__(self):
        while True:
            yield from batches()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("data", "limits", "got"),
    [
        (batches(), {"max_epochs": -1}, r"max_epochs=-1, max_steps=-1\) with 3 batches"),
        (batches(), {"max_epochs": None, "max_time": "00:00:01:00"}, r"max_epochs=-1, max_steps=-1\) with 3 batches"),
        (DataLoader(Endless(), batch_size=None), {"max_epochs": 2}, r"max_epochs=2, max_steps=-1\) with inf batches"),
    ],
    ids=["no limit", "a time", "no number of batches"],
)
def test_weights_that_change_need_a_number_of_steps(data, limits, got):
    terms = {"pairs": (Before(0.2), CalibrationLoss()), "ap": (After(0.2), SmoothAPLoss())}
    module = RetrievalModule(net(), WeightedSum(terms), optimizer=SGD)
    with pytest.raises(ValueError, match=rf"^RetrievalModule: the weights of pairs, ap in `loss` .* got .*{got}"):
        fit(module, data, **limits)
    assert_same(module.embedder, net())
    fit(module, data, **{**limits, "max_steps": 2})
    assert module.trainer.global_step == 2


@pytest.mark.refusal
@pytest.mark.parametrize("gather", [None, 1, "float32"])
def test_gather_is_a_bool_or_a_type(gather):
    with pytest.raises(ValueError, match=rf"^RetrievalModule: `gather` must be one of True, .* got {gather!r}"):
        RetrievalModule(net(), SmoothAPLoss(), gather=gather)


@pytest.mark.parametrize(
    ("dtype", "precision", "count"),
    [
        (torch.bfloat16, "bf16-mixed", 1),
        (torch.bfloat16, "bf16-true", 0),
        (torch.float32, "bf16-true", 0),
        (torch.float32, "bf16-mixed", 0),
    ],
)
def test_warns_of_parameters_of_16_bits_that_the_trainer_has_not_converted(dtype, precision, count):
    """Such as those of a model that transformers has loaded in the type of its file."""
    module = RetrievalModule(nn.Sequential(nn.Linear(6, 4).to(dtype)), SmoothAPLoss())
    data = [(torch.randn(6, 6), torch.tensor([0, 0, 1, 1, 2, 2]))]
    words = "RetrievalModule: parameters that learn should be float32"
    assert len(warnings_with(words, fit, module, data, precision=precision)) == count
