"""Only the listed messages are hidden, and only within the context."""

import logging
import warnings

import pytest
import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from lightning_retrieval.training.quiet_trainer import quiet_trainer


def test_messages_of_other_code_appear(caplog):
    caplog.set_level(logging.INFO)
    before = list(warnings.filters)
    with pytest.warns(UserWarning) as caught, quiet_trainer("expected by the script"):
        warnings.warn("expected by the script: it chose this", stacklevel=1)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", stacklevel=1)  # not issued by Lightning
        pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        rank_zero_info("lists of 7 images")
    assert [str(warning.message) for warning in caught] == ["`isinstance(treespec, LeafSpec)` is deprecated"]
    assert caplog.messages == ["lists of 7 images"]
    assert warnings.filters == before
    pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert any(message.startswith("TPU available: False") for message in caplog.messages)
