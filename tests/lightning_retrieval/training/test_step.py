"""The way from `training_step` to the formula of a paper: how many functions of the library it passes through."""

import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import CalibrationLoss, CrossBatchMemory, RetrievalModule, SmoothAPLoss
from lightning_retrieval.losses import calibration, smooth_ap

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
    frames = frames_to_the_formula(monkeypatch, calibration, "calibration_sums", CalibrationLoss())
    assert len(frames) <= MOST_FRAMES, frames
