"""Class paths are the shortest public ones, the same as jsonargparse and LightningCLI write."""

import collections
import functools
import inspect

import jsonargparse
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import nn

import lightning_retrieval
from lightning_retrieval import callbacks, datamodules, losses, metrics, models
from lightning_retrieval.training.class_paths import class_path, load_class
from lightning_retrieval.training.hyperparameters import describe

PUBLIC_CLASSES = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (lightning_retrieval, callbacks, datamodules, losses, metrics, models)
    for name in package.__all__
    if inspect.isclass(getattr(package, name))
}
KNOWN = {
    "lightning_retrieval.SmoothAPLoss": losses.SmoothAPLoss,
    "lightning_retrieval.losses.BlackboxMAPLoss": losses.BlackboxMAPLoss,
    "lightning_retrieval.RetrievalModule": lightning_retrieval.RetrievalModule,
    "lightning_retrieval.PKSampler": datamodules.PKSampler,
    "lightning_retrieval.RetrievalEvaluation": callbacks.RetrievalEvaluation,
    "lightning_retrieval.datamodules.Glyphs": datamodules.Glyphs,
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.optim.lr_scheduler.StepLR": torch.optim.lr_scheduler.StepLR,
    "torch.nn.Linear": nn.Linear,
    "torch.Tensor": torch.Tensor,
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.int": int,
}


class Outer:
    class Inner:
        pass


@pytest.mark.parametrize("path", KNOWN)
def test_shortest_path(path):
    assert class_path(KNOWN[path]) == path


@pytest.mark.parametrize("path", PUBLIC_CLASSES)
def test_public_class_has_a_public_path_that_leads_back_to_it(path):
    cls = PUBLIC_CLASSES[path]
    shortest = class_path(cls)
    assert len(shortest) <= len(path)
    assert load_class("Test", "thing", shortest, object) is cls


@pytest.mark.parametrize("path", [*KNOWN, *PUBLIC_CLASSES])
def test_path_is_the_one_of_jsonargparse(path):
    cls = {**PUBLIC_CLASSES, **KNOWN}[path]
    assert class_path(cls) == jsonargparse._util.get_import_path(cls)


def test_class_within_another_keeps_its_qualified_name():
    assert class_path(Outer.Inner) == f"{__name__}.Outer.Inner"


def test_class_within_a_function_has_a_name_that_cannot_be_imported():
    class Local:
        pass

    assert "<locals>" in class_path(Local)


def test_hyperparameters_have_the_class_paths_that_lightning_cli_writes(capsys):
    from lightning_retrieval.cli.main import main

    # By name only: jsonargparse writes a path that it is given as it is.
    arguments = ["--model=RetrievalModule", "--model.embedder=Embedder", "--model.embedder.backbone=glyph_net"]
    arguments += ["--model.loss=FastAPLoss", "--model.optimizer=AdamW", "--data=Glyphs"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", *arguments, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    written = config["model"]["init_args"]

    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    assert config["data"]["class_path"] == class_path(datamodules.Glyphs)
    module = lightning_retrieval.RetrievalModule(
        lightning_retrieval.Embedder("glyph_net", 8), lightning_retrieval.FastAPLoss(), optimizer=optimizer
    )
    assert isinstance(module, pl.LightningModule)
    assert config["model"]["class_path"] == describe(lightning_retrieval.RetrievalModule)["class_path"]
    for name in ("embedder", "loss", "optimizer"):
        assert module.hparams[name]["class_path"] == written[name]["class_path"]
