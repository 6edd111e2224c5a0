"""Runs with chunk_size="auto", on a device whose memory holds few images."""

import pytest
import torch
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.training.small_training import SGD, assert_same, batches, fit, net


class Small(nn.Module):
    """A network on a device whose memory holds so many images and no more; it counts what it was asked to embed."""

    def __init__(self, holds: int) -> None:
        super().__init__()
        self.net, self.holds, self.asked = net(0.3), holds, []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(images))
        if len(images) > self.holds:
            raise torch.OutOfMemoryError(f"{len(images)} images")
        return self.net(images)


def test_auto_takes_the_largest_chunk_that_fits():
    """Of 10 rows: 10, 5, 3 and 4 are tried; a longer batch makes it look again, a shorter one does not."""
    data = batches(2)
    longer = [torch.cat(pair) for pair in zip(*batches(2))]
    auto, fixed = (
        RetrievalModule(Small(4), SmoothAPLoss(tau=0.1), chunk_size=size, optimizer=SGD, seed=3) for size in ("auto", 4)
    )
    fit(auto, [*data, longer, data[0]])
    fit(fixed, [*data, longer, data[0]])
    assert (auto._chunk_size_search.chunk_size, auto._chunk_size_search.rows) == (4, 20)
    tried = [rows for rows in auto.embedder.asked if rows > 4]
    assert tried == [10, 5, 20, 10, 5]
    assert_same(auto, fixed)


def test_auto_raises_if_not_one_image_fits():
    with pytest.raises(torch.OutOfMemoryError, match=r"not even one input of shape \(6,\) fits the memory of cpu"):
        fit(RetrievalModule(Small(0), SmoothAPLoss(), chunk_size="auto"), batches())
