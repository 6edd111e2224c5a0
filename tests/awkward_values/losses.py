"""Valid calls of the losses."""

import torch

from lightning_retrieval.losses import blackbox_rank
from tests.awkward_values.calls import Call


def scores():
    return torch.tensor([[0.9, 0.3, 0.5], [0.7, 0.6, 0.1]], requires_grad=True)


CALLS = {
    "blackbox_rank": [Call("blackbox_rank", blackbox_rank, lambda: {"scores": scores(), "lambda_": 4.0})],
}
