"""Fixtures of the tests of callbacks."""

import pytest


@pytest.fixture
def no_key(tmp_path, monkeypatch, end_offline_run):
    """An environment in which Weights & Biases finds no key."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, "")  # so that it is removed at the end of the test if the logger sets it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
