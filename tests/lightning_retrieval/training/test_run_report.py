"""Messages of Lightning are hidden only if they are listed, and only within the context."""

import logging
import warnings

import pytest
import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info

from lightning_retrieval.training.run_report import quiet_trainer


def test_messages_of_other_code_appear(caplog):
    caplog.set_level(logging.INFO)
    before = list(warnings.filters)
    with quiet_trainer("expected by the script"):
        warnings.warn("expected by the script: it chose this", stacklevel=1)  # pytest would make this an error
        with pytest.raises(UserWarning, match="LeafSpec"):  # this code is not of Lightning, and pytest raises
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", stacklevel=1)
        for package in ("pytorch_lightning", "lightning.pytorch"):
            of_lightning = {"category": UserWarning, "filename": "a.py", "lineno": 1, "module": f"{package}.trainer.b"}
            warnings.warn_explicit("Using `DistributedSampler` with the dataloaders. During", **of_lightning)
        pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        rank_zero_info("lists of 7 images")
    assert caplog.messages == ["lists of 7 images"]
    assert warnings.filters == before
    pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert any(message.startswith("TPU available: False") for message in caplog.messages)
