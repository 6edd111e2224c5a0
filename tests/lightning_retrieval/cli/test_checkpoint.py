"""A checkpoint is loaded with what evaluation did to an image, and without running code that it names."""

import io

import pytest
import torch
from torch import nn

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.embedding import load_checkpoint
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import Preparation
from tests.lightning_retrieval.cli.glyph_commands import save_checkpoint

NET = {"class_path": "planted_module.Net", "init_args": {"in_features": 4, "out_features": 2}}
LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 2}}
LOSS = {"class_path": "lightning_retrieval.SmoothAPLoss", "init_args": {"tau": 0.1}}
WEIGHTED = {"class_path": "lightning_retrieval.WeightedSum", "init_args": {"losses": {"ap": [1.0, NET]}}}
COMMAND_LINE = {
    "_instantiator": "pytorch_lightning.cli.instantiate_module",
    "_class_path": "lightning_retrieval.RetrievalModule",
    "embedder": LINEAR,
    "loss": LOSS,
}
STRANGE = {
    "described": {"embedder": NET, "loss": LOSS},
    "nested": {"embedder": LINEAR, "loss": WEIGHTED},
    "command_line": {**COMMAND_LINE, "embedder": NET},
    "yaml": {**COMMAND_LINE, "optimizer": "{class_path: planted_module.Net}"},
    "callable": {**COMMAND_LINE, "optimizer": "planted_module.Net"},
    "instantiator": {**COMMAND_LINE, "_instantiator": "planted_module.Net"},
}


def write_checkpoint(path, hyperparameters):
    """A checkpoint of a linear layer with other hyperparameters."""
    save_checkpoint(path, RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": hyperparameters}, path)
    return path


def test_what_evaluation_did_to_an_image_is_loaded(tmp_path):
    path = save_checkpoint(tmp_path / "model.ckpt", RetrievalModule(Embedder("glyph_net"), SmoothAPLoss()))
    assert load_checkpoint("index", path).preparation is None
    described = {"preparation": Preparation(64).as_dict()}
    torch.save({**torch.load(path, weights_only=True), "preparation": described}, path)
    assert load_checkpoint("index", path).preparation == described


@pytest.mark.refusal
@pytest.mark.parametrize("name", STRANGE)
def test_checkpoint_imports_no_module_of_its_own(planted, tmp_path, name):
    path = write_checkpoint(tmp_path / "model.ckpt", STRANGE[name])
    with pytest.raises(ValueError, match=r"^RetrievalModule: .*planted_module"):
        RetrievalModule.load_from_checkpoint(io.BytesIO(path.read_bytes()))
    with pytest.raises(ValueError, match=r"^index: `checkpoint` must be .* \(RetrievalModule: .*planted_module"):
        load_checkpoint("index", path)
    assert not planted[1].exists()


@pytest.mark.parametrize("name", ["described", "command_line"])
def test_an_object_or_a_module_that_the_user_has_imported_replaces_a_strange_class(planted, tmp_path, name):
    path = write_checkpoint(tmp_path / "model.ckpt", STRANGE[name])
    module = RetrievalModule.load_from_checkpoint(path, embedder=nn.Linear(4, 2), loss=SmoothAPLoss(), strict=True)
    assert type(module.embedder) is nn.Linear
    assert not planted[1].exists()
    net = __import__(planted[0]).Net
    assert type(RetrievalModule.load_from_checkpoint(path).embedder) is net
    assert type(load_checkpoint("index", path).embedder) is net


def test_command_imports_the_modules_that_the_user_names(planted, tmp_path, capsys):
    path = write_checkpoint(tmp_path / "model.ckpt", STRANGE["command_line"])
    arguments = ["index", f"--checkpoint={path}", f"--images={tmp_path / 'none'}", f"--output={tmp_path / 'index'}"]
    for option in ([], [f"--import_module={planted[0]}"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*arguments, *option])
        assert planted[1].exists() == bool(option)
