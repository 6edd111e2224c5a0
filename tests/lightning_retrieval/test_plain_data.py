"""Class paths are the shortest public ones, the same as jsonargparse and LightningCLI write."""

import collections
import functools
import importlib
import inspect

import jsonargparse
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import nn

import lightning_retrieval
from lightning_retrieval import callbacks, datamodules, losses, metrics, models
from lightning_retrieval.training import class_paths
from lightning_retrieval.training.class_paths import check_config_paths, class_path, import_named_module, load_class
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

    # By names that no other library uses; jsonargparse writes a path that it is given as it is.
    arguments = ["--model=RetrievalModule", "--model.embedder=Embedder", "--model.embedder.backbone=glyph_net"]
    arguments += ["--model.loss=SupAPLoss", "--model.optimizer=AdamW", "--data=Glyphs"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", *arguments, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    written = config["model"]["init_args"]

    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    assert config["data"]["class_path"] == class_path(datamodules.Glyphs)
    module = lightning_retrieval.RetrievalModule(
        lightning_retrieval.Embedder("glyph_net", 8), lightning_retrieval.SupAPLoss(), optimizer=optimizer
    )
    assert isinstance(module, pl.LightningModule)
    assert config["model"]["class_path"] == describe(lightning_retrieval.RetrievalModule)["class_path"]
    for name in ("embedder", "loss", "optimizer"):
        assert module.hparams[name]["class_path"] == written[name]["class_path"]


NOT_IMPORTED = (
    r"names planted_module\.Net, whose module is not imported, and loading a checkpoint imports only "
    r"lightning_retrieval, pytorch_metric_learning, timm, torch, torchvision; import planted_module first"
)


@pytest.mark.refusal
def test_a_module_that_is_not_imported_is_not_imported_for_a_class(planted):
    module, written = planted
    with pytest.raises(ValueError, match=rf"^Test: `net` {NOT_IMPORTED}"):
        load_class("Test", "net", f"{module}.Net", nn.Module)
    assert not written.exists()
    imported = importlib.import_module(module)
    assert written.exists()  # so the file shows an import
    assert load_class("Test", "net", f"{module}.Net", nn.Module) is imported.Net


def test_modules_of_trusted_packages_are_imported_for_a_class(planted, monkeypatch):
    module, written = planted
    monkeypatch.setattr(class_paths, "TRUSTED_PACKAGES", (module,))
    assert load_class("Test", "net", f"{module}.Net", nn.Module).__module__ == module
    assert written.exists()


def test_a_class_within_a_class_of_an_imported_module_is_found():
    assert load_class("Test", "thing", f"{__name__}.Outer.Inner", object) is Outer.Inner


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("planted_module.Net", "net"),
        ({"class_path": "planted_module.Net"}, "net"),
        ({"class_path": "Embedder", "init_args": {"backbone": {"class_path": "planted_module.Net"}}}, "backbone"),
        ({"class_path": "Embedder", "dict_kwargs": {"head": ["planted_module.Net"]}}, "head"),
        ([{"layers": [1, {"class_path": "planted_module.Net"}]}], "layers"),
        ("{class_path: planted_module.Net}", "class_path"),
        ("'planted_module.Net'", "net"),
        (" planted_module.Net", "net"),
        ({"embedder.class_path": "planted_module.Net"}, "embedder.class_path"),
    ],
)
def test_config_names_no_module_that_is_not_imported(planted, config, name):
    name = name.replace("class_path", "net") if isinstance(config, str) else name
    with pytest.raises(ValueError, match=rf"^Test: `{name}` {NOT_IMPORTED}"):
        check_config_paths("Test", "net", config)
    assert not planted[1].exists()


def test_config_of_known_classes_and_plain_values_is_accepted():
    config = {"class_path": "torch.nn.Linear", "init_args": {"weights": "resnet50.a1_in1k", "x": [1, 0.5, None, True]}}
    check_config_paths("Test", "net", [config, "Embedder", "val/mAP", "{", "a: b", "", ".", "no_such_module.Thing"])


def test_module_that_the_user_names_is_imported(planted):
    module, written = planted
    import_named_module("Test", "--import_module", module)
    assert written.exists()
    check_config_paths("Test", "net", f"{module}.Net")


@pytest.mark.refusal
@pytest.mark.parametrize("module", ["no_such_module", "", "torch.no_such_module"])
def test_module_that_cannot_be_imported(module):
    with pytest.raises(ValueError, match=rf"Test: `module` must name a module that can be imported, got {module} \("):
        import_named_module("Test", "module", module)
