"""The report on the first step of a run."""

import warnings

import pytest
import torch
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.training.run_report import step_traffic
from tests.lightning_retrieval.training.small_training import batches, fit, net


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_batch_norm_in_chunks_warns_once_and_names_the_cure(chunk_size):
    def warnings_of(evaluated=False, size=chunk_size):
        class Own(RetrievalModule):
            def __init__(self, *args, **settings):
                super().__init__(*args, **settings)
                self.norm = nn.BatchNorm1d(4).double()
                self.train()

            def train(self, mode=True):
                super().train(mode)
                self.norm.train(mode and not evaluated)
                return self

            def forward(self, images):
                return self.norm(self.embedder(images))

        data = [(images[:9], labels[:9]) for images, labels in batches()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Own(net(), SmoothAPLoss(), chunk_size=size), data)
        return [str(w.message) for w in caught if "BatchNorm" in str(w.message)]

    expected = "Own: BatchNorm sees 3 images at a time, not the batch of 9, so"
    assert [message[: len(expected)] for message in warnings_of()] == ([] if chunk_size is None else [expected])
    assert all("freeze_batch_norm=True of Embedder" in message for message in warnings_of())
    assert warnings_of(evaluated=True) == warnings_of(size=9) == []


def test_the_report_at_the_start_has_p_and_k_and_the_length(caplog):
    images, _ = batches(1)[0]
    data = [(images, torch.tensor([7, 7, 7, 1, 1, 1, 5, 5, 5, 5]))] * 2
    with caplog.at_level("INFO"):
        run = fit(RetrievalModule(net(), SmoothAPLoss()), data)
    reports = [record.getMessage() for record in caplog.records if "RetrievalModule" in record.getMessage()]
    assert reports == ["RetrievalModule: batches of P = 3 classes with K = 3 to 4 images, lists of 9 images."]
    assert run.global_step == 2


def test_traffic_by_hand():
    """Four processes with 8 rows each of 5 numbers, 100 parameters, single precision; each sends to three others."""
    gathered = 3 * 8 * (5 * 4 + 16)  # its own rows, labels and ids
    exchanged = 3 * 8 * 5 * 4  # the gradients of the others' rows
    reduced = 2 * 3 * 100 / 4 * 4  # a ring: a quarter of the sum at a time, first added up, then passed on
    assert step_traffic(32, 5, 100, 4) == {"gather": gathered, "exchange": exchanged, "all-reduce": reduced}
    assert step_traffic(32, 5, 100, 4, local_queries=False)["exchange"] == 0
    assert list(step_traffic(32, 5, 100, 4, gather=False).values()) == [0, 0, reduced]
    divided = step_traffic(32, 5, 100, 4, weights=700)  # seven passes of a network that gathers all its parameters
    slices = {"weights": 3 * 700 / 4 * 4, "reduce-scatter": 3 * 100 / 4 * 4}
    assert divided == {"gather": gathered, "exchange": exchanged, **slices}
    assert sum(step_traffic(32, 5, 100, 1, weights=700).values()) == 0
    assert sum(step_traffic(32, 5, 100, 1).values()) == 0
