"""The official cases of what happens between embedding and ranking, and helpers that their tests share."""

import json
from pathlib import Path

import pytest
import torch

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "official_cases.json").read_text())["cases"]
OFFICIAL = {"rtol": 0, "atol": 1e-10}


def official_cases(prefix):
    """Parametrize a test by the cases whose id starts with `prefix`."""
    cases = [pytest.param(case, id=case["id"]) for case in GOLDEN if case["id"].startswith(prefix)]
    assert cases
    return pytest.mark.parametrize("case", cases)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(count, dim, seed=0, dtype=torch.float64):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
