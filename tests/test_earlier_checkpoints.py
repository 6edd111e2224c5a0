"""Checkpoints that an earlier commit (35fa523) has written can be loaded: `tests/checkpoints`.

`hyperparameters.json` holds those of a checkpoint of each config in examples/, and of three further runs of the command
line; the other files are whole checkpoints that a Python script has written.
"""

import json
from pathlib import Path

import pytest
import torch

from lightning_retrieval import RetrievalModule
from lightning_retrieval.detection import DetectionModule
from lightning_retrieval.loading import module_of_checkpoint

CHECKPOINTS = Path(__file__).parent / "checkpoints"
EXAMPLES = Path(__file__).parents[1] / "examples"
HYPERPARAMETERS = json.loads((CHECKPOINTS / "hyperparameters.json").read_text())

USERS_PACKAGE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.eye(width))
"""


def test_each_config_has_its_hyperparameters_here():
    configs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml")} - {"sweep.yaml"}
    assert configs <= set(HYPERPARAMETERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters_of_the_command_line(name, monkeypatch):
    """The module is rebuilt, keeps the hyperparameters as they are, and downloads nothing."""
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **kwargs: pytest.fail("downloads"))
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: pytest.fail("downloads"))
    saved = HYPERPARAMETERS[name]
    cls = RetrievalModule
    if "DetectionModule" in saved["_class_path"]:
        cls = DetectionModule
    module = module_of_checkpoint(cls, {"hyper_parameters": saved})
    assert type(module).__name__ == saved["_class_path"].rpartition(".")[2]
    assert dict(module.hparams) == saved


@pytest.mark.parametrize("name", ["lora", "memory", "users_package"])
def test_checkpoints_of_python(name, tmp_path, monkeypatch):
    if name == "users_package":
        (tmp_path / "users_package.py").write_text(USERS_PACKAGE)
        monkeypatch.syspath_prepend(tmp_path)
        __import__("users_package")
    saved = torch.load(CHECKPOINTS / f"{name}.ckpt", weights_only=True)
    module = RetrievalModule.load_from_checkpoint(CHECKPOINTS / f"{name}.ckpt")
    state = module.state_dict()
    assert str(dict(state)) == str(dict(saved["state_dict"]))
    for key, value in saved["state_dict"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value), key
    added_later = {"relevance": None, "query_embedder": None, "directions": "queries", "query_lr_factor": 1.0}
    added_later |= {"frozen_side": None, "gather_dtype": None}
    assert dict(module.hparams) == {**saved["hyper_parameters"], **added_later}
