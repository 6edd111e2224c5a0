"""A checkpoint records the transform that its data module evaluated with."""

import pytest
import torch

from lightning_retrieval.cli.checkpoint import recorded_transform


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"Anybodys.Data": {"transform": "ap_gem"}}, "ap_gem"),
        ({"hyper_parameters": {"transform": "plain"}, "state_dict": {"transform": torch.zeros(1)}}, None),
        ({"ImageFolder": {"transform": "own"}, "callbacks": {}}, "own"),
    ],
)
def test_recorded_transform(state, name):
    assert recorded_transform(state) == name
