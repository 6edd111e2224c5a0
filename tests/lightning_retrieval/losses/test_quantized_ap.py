"""AP_Q: its function in all forms; its numbers are tested in test_every_loss.py and test_golden.py."""

import pytest

from lightning_retrieval.losses.quantized_ap import quantized_ap
from tests.lightning_retrieval.losses.oracles import assert_function_is_the_loss, random_lists


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quantized_ap", {"num_bins": 13, "low": -1.0, "high": 1.0}),
        ("quantized_ap narrow", {"num_bins": 5, "low": 0.0, "high": 0.5}),
        ("quantized_ap simplified", {"num_bins": 20, "low": -1.0, "high": 1.0, "tie_aware": "simplified"}),
        ("quantized_ap full", {"num_bins": 4, "low": -1.0, "high": 1.0, "tie_aware": "full"}),
    ],
)
def test_function_is_the_loss(name, settings):
    assert_function_is_the_loss(name, quantized_ap, *random_lists(7, 11, name), **settings)
