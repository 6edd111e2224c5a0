"""The way from `training_step` to the formula of a paper, and what stops a step before the weights change."""

import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import CalibrationLoss, CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.losses import roadmap, smooth_ap
from lightning_retrieval.losses.batch_loss import BatchLoss
from tests.lightning_retrieval.training.small_training import ROWS, SGD, Gives, assert_same, batches, fit, net

REPOSITORY = Path(__file__).parents[3]
PACKAGES = tuple(f"{REPOSITORY / name}/" for name in ("lightning_retrieval", "callbacks", "datamodules"))
MOST_FRAMES = 8
BATCH = (torch.randn(12, 6), torch.arange(12) // 3, torch.arange(12))


def frames_of_the_library():
    """Names of the library's functions on the stack, the innermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGES):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def frames_to_the_formula(monkeypatch, module, name, loss, **settings):
    """The library's functions from `training_step` to a formula, which is the function `name` of a module."""
    formula, stacks = getattr(module, name), []

    def recording(*args, **kwargs):
        stacks.append([name, *frames_of_the_library()])  # the formula itself, which this function stands for
        return formula(*args, **kwargs)

    monkeypatch.setattr(module, name, recording)
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(RetrievalModule(nn.Linear(6, 4), loss, **settings), DataLoader([BATCH], batch_size=None))
    in_training = [stack[: stack.index("training_step") + 1] for stack in stacks if "training_step" in stack]
    assert in_training
    return max(in_training, key=len)


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 5}], ids=["whole batch", "chunks"])
def test_a_formula_is_at_most_eight_frames_from_the_training_step(monkeypatch, settings):
    frames = frames_to_the_formula(monkeypatch, smooth_ap, "smooth_ap", SmoothAPLoss(), **settings)
    assert len(frames) <= MOST_FRAMES, frames
    assert frames[0] == "smooth_ap"
    assert frames[-2:] == ["chunked_backward", "training_step"]


def test_a_memory_does_not_make_the_way_longer(monkeypatch):
    frames = frames_to_the_formula(monkeypatch, smooth_ap, "smooth_ap", SmoothAPLoss(), memory=CrossBatchMemory(20))
    assert len(frames) <= MOST_FRAMES, frames


def test_a_mean_over_pairs_is_at_most_eight_frames_away(monkeypatch):
    frames = frames_to_the_formula(monkeypatch, roadmap, "calibration_sums", CalibrationLoss())
    assert len(frames) <= MOST_FRAMES, frames


@pytest.mark.refusal
@pytest.mark.parametrize("ids", [False, True])
def test_nan_embeddings_stop_training_before_the_weights_change(ids):
    first, second = batches(2)
    second[0][[2, 5]] = torch.nan
    data = [(*batch, torch.arange(100, 100 + ROWS)) if ids else batch for batch in (first, second)]
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    which = r"ids \[102, 105\]" if ids else r"rows \[2, 5\]"
    sentence = rf"^RetrievalModule: .* NaN or inf in 2 of 10 rows at step 1 \(seen on rank 0\), the first for {which};"
    with pytest.raises(ValueError, match=sentence):
        fit(module, data)
    plain = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    fit(plain, [first])
    assert_same(module, plain)


class FirstRow(BatchLoss):
    """A loss that does not look at all embeddings."""

    def of_batch(self, batch):
        return batch.embeddings[0].sum()


@pytest.mark.refusal
def test_nan_embeddings_that_a_loss_does_not_notice_stop_training_too():
    ((images, labels),) = batches(1)
    images[[2, 5]] = torch.nan
    module = RetrievalModule(net(), FirstRow(), optimizer=SGD)
    with pytest.raises(
        ValueError, match=r"^RetrievalModule: .* NaN or inf in 2 of 10 rows at step 0 .* rows \[2, 5\];"
    ):
        fit(module, [(images, labels)])
    assert_same(module.embedder, net())


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (Gives(value=float("nan")), r"the loss is nan at step 0\."),
        (Gives(shape=(2,)), r"`loss` must return a scalar, got tensor\(\[1\., 1\.\].*set its reduction"),
        (SmoothAPLoss(reduction="none"), r"`loss` must return a scalar, got tensor\("),
    ],
)
def test_losses_that_are_not_a_finite_scalar_raise(loss, sentence):
    module = RetrievalModule(net(), loss, optimizer=SGD)
    with pytest.raises(ValueError, match=rf"^RetrievalModule: {sentence}"):
        fit(module, batches())
    assert_same(module.embedder, net())


@pytest.mark.refusal
def test_labels_of_another_length_raise():
    images, labels = batches(1)[0]
    with pytest.raises(ValueError, match=r"one label for each image, got 9 labels for 10 images\."):
        fit(RetrievalModule(net(), SmoothAPLoss()), [(images, labels[:9])])
