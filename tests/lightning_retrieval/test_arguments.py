"""What a valid argument becomes, and the rules of arguments in a user's own class and in configs."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_retrieval import PKSampler, RetrievalIndex, RetrievalMetrics, SmoothAPLoss


@pytest.mark.refusal  # by the type checker
def test_numbers_of_numpy_become_those_of_python():
    """Which can be written into a config and a checkpoint."""
    assert type(SmoothAPLoss(tau=np.float32(0.5)).tau) is float
    ks = RetrievalMetrics(ks=[1, np.int64(10)]).ks
    assert ks == (1, 10)
    assert [type(k) for k in ks] == [int, int]
    sampler = PKSampler(np.arange(8) // 2, classes_per_batch=np.uint64(2), samples_per_class=np.int32(2))
    assert [len(batch) for batch in sampler] == [4, 4]


def test_a_path_begins_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    index = RetrievalIndex(4)
    index.add(torch.eye(4))
    index.save("~/a")
    assert (tmp_path / "a").is_dir()
    assert len(RetrievalIndex.load(Path("~/a"))) == 4


class OwnLoss(SmoothAPLoss):
    """A user's loss, in which an argument has another type than in the base class."""

    def __init__(self, tau: str = "cold") -> None:
        super().__init__(tau={"cold": 0.01, "hot": 0.0}[tau])


@pytest.mark.refusal
def test_a_users_subclass_has_its_own_arguments_and_the_rules_of_its_base_class():
    assert OwnLoss().tau == 0.01
    with pytest.raises(ValueError, match=r"^OwnLoss: `tau` must be "):
        OwnLoss("hot")


DEFERRED = """
from __future__ import annotations
from typing import Unpack
from lightning_retrieval.arguments import Positive, checked
from lightning_retrieval.losses import LossSettings, SmoothAPLoss

class Deferred(SmoothAPLoss):
    def __init__(self, width: Positive = 2.0, **settings: Unpack[LossSettings]) -> None:
        super().__init__(**settings)
        self.width = checked(self, width=width)
"""


@pytest.mark.refusal
def test_annotations_may_be_strings(tmp_path, monkeypatch):
    """As `from __future__ import annotations` makes all of them."""
    (tmp_path / "deferred_loss.py").write_text(DEFERRED)
    monkeypatch.syspath_prepend(tmp_path)
    loss_class = importlib.import_module("deferred_loss").Deferred
    assert repr(loss_class(3.0, reduction="sum")).startswith("Deferred(width=3.0, reduction='sum'")
    with pytest.raises(ValueError, match=r"^Deferred: `width` must be "):
        loss_class(-1.0)


def test_options_of_the_command_line_have_the_annotated_types():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(SmoothAPLoss, "loss")
    options = ["--loss.tau=2", "--loss.reduction=sum", "--loss.class_balanced=true"]
    loss = parser.instantiate_classes(parser.parse_args(options)).loss
    assert (loss.tau, loss.reduction, loss.class_balanced) == (2.0, "sum", True)
