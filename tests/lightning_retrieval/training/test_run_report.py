"""The report of a run's first step."""

import warnings

import pytest
import torch
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
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
