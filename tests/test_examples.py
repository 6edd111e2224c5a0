"""The examples run as they stand, or cut down where they train for long."""

import runpy
from pathlib import Path

import pytest
import pytorch_lightning as pl

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # Lightning's, of a run with two batches
def test_subclass(monkeypatch, capsys):
    script = EXAMPLES / "subclass.py"
    assert len(script.read_text().splitlines()) < 40
    make = pl.Trainer.__init__

    def cut_down(self, **kwargs):
        make(self, **{**kwargs, "limit_train_batches": 2, "limit_val_batches": 2, "enable_checkpointing": False})

    monkeypatch.setattr(pl.Trainer, "__init__", cut_down)
    namespace = runpy.run_path(str(script), run_name="__main__")
    assert namespace["module"].hparams["momentum"] == 0.8
    assert namespace["trainer"].global_step == 2
    assert "val/mAP" in capsys.readouterr().out
