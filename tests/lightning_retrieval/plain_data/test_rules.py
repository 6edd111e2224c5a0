"""Which classes and settings a file may name, and by which path: that of jsonargparse and LightningCLI."""

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable as Callable  # a class of another module, for the tests below

import jsonargparse
import pytest
import torch
from torch import nn

import lightning_retrieval
from lightning_retrieval import RetrievalModule, callbacks, datamodules, detection, losses, metrics, models
from lightning_retrieval.plain_data import (
    add_named_packages,
    arguments_of_file,
    class_path,
    import_named_module,
    named_by_user,
    rebuild,
    rebuild_factory,
)
from lightning_retrieval.plain_data.rules import find_class

NOT_ALLOWED = "a file may name classes only of"
LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 3}}


class Outer:
    class Inner:
        pass


def test_a_class_has_the_shortest_public_path_which_is_that_of_jsonargparse():
    shortest = {
        "lightning_retrieval.SmoothAPLoss": losses.SmoothAPLoss,
        "lightning_retrieval.losses.BlackboxMAPLoss": losses.BlackboxMAPLoss,
        "lightning_retrieval.PKSampler": datamodules.PKSampler,
        "torch.optim.lr_scheduler.StepLR": torch.optim.lr_scheduler.StepLR,
        "builtins.int": int,
        f"{__name__}.Outer.Inner": Outer.Inner,
    }
    assert {path: class_path(cls) for path, cls in shortest.items()} == {path: path for path in shortest}
    for package in (lightning_retrieval, callbacks, datamodules, losses, metrics, models):
        for cls in filter(inspect.isclass, (getattr(package, name) for name in package.__all__)):
            assert class_path(cls) == jsonargparse._util.get_import_path(cls)


def test_a_file_names_the_parts_of_modules_and_of_data_modules():
    for package in (datamodules, detection, losses, models):
        for cls in filter(inspect.isclass, (getattr(package, name) for name in package.__all__)):
            assert find_class("thing", class_path(cls)) is cls
            assert find_class("thing", f"{package.__name__}.{cls.__name__}") is cls


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.parametrize(
    "path",
    [
        "lightning_retrieval.cli.fit.RetrievalCLI",  # would run what its argument says
        "lightning_retrieval.callbacks.EmbeddingWriter",  # writes
        "lightning_retrieval.callbacks.RetrievalWandbLogger",  # writes and connects
    ],
)
def test_a_class_of_this_library_that_runs_writes_or_connects_is_not_built(path):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), type)
    with pytest.raises(ValueError, match=NOT_ALLOWED):
        rebuild("thing", {"class_path": path}, object)


@pytest.mark.hostile
@pytest.mark.refusal
def test_only_modules_that_the_user_has_imported_are_looked_in(planted):
    module, written = planted
    with pytest.raises(ValueError, match=NOT_ALLOWED):
        rebuild("net", {"class_path": f"{module}.Net"}, nn.Module)
    assert not written.exists()
    imported = importlib.import_module(module)
    assert written.exists()  # so the file shows an import
    assert find_class("net", f"{module}.Net", (nn.Module,)) is imported.Net


def test_a_module_that_the_user_names_is_imported(planted):
    module, written = planted
    import_named_module("--import_module", module)
    assert written.exists()
    assert find_class("net", f"{module}.Net").__name__ == "Net"


def test_a_class_of_the_users_script_is_found(monkeypatch):
    net = type("Net", (nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Net", net, raising=False)
    assert find_class("net", "__main__.Net") is net


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.parametrize(
    "path",
    [
        "torchmetrics.classification.BinaryAccuracy",
        "torch.nn.parallel.DistributedDataParallel",
        "timm.data.readers.reader_tfds.ReaderTfds",
        "unittest.TestCase",
        "numpy.random.Generator",
        "yaml.Loader",
        "fsspec.AbstractFileSystem",
        f"{__name__}.Callable",
        f"{__name__}.jsonargparse.ArgumentParser",
        "lightning_retrieval.training.module.torch.classes.evil.Net",
    ],
)
def test_imported_libraries_and_what_modules_import_are_not_the_users(path):
    for module in ("torchmetrics.classification", "unittest", "numpy", "yaml", "fsspec"):
        importlib.import_module(module)
    with pytest.raises((ValueError, TypeError), match=r"^`thing` names "):
        find_class("thing", path)


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.parametrize("module", ["lightning", "lightning.pytorch.demos", "lightning_sdk", "pytorch_lightning"])
def test_no_lightning_is_a_module_of_the_user(module, monkeypatch):
    """Whichever of its packages is installed and imported."""
    for name in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    net = type("Net", (nn.Module,), {"__module__": module})
    monkeypatch.setattr(sys.modules[module], "Net", net, raising=False)
    with pytest.raises(ValueError, match=NOT_ALLOWED):
        find_class("net", f"{module}.Net", (nn.Module,))


@pytest.fixture(params=["site-packages", "target"])
def installed(request, tmp_path, monkeypatch):
    """A package with a network that is imported, in site-packages or in the folder of `pip install --target`."""
    folder = tmp_path / request.param / "acme_models" / "nets"
    folder.mkdir(parents=True)
    if request.param == "target":
        (tmp_path / "target" / "other-1.0.dist-info").mkdir()
    (folder.parent / "__init__.py").write_text("from acme_models.nets import Net\n")
    (folder / "__init__.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    pass\nclass Plain:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / request.param)
    importlib.import_module("acme_models.nets")
    yield "acme_models.nets.Net"
    for name in ("acme_models", "acme_models.nets"):
        sys.modules.pop(name, None)
        named_by_user.discard(name)


@pytest.mark.hostile
@pytest.mark.refusal
def test_an_installed_package_is_the_users_only_if_the_user_names_it(installed):
    """Libraries import each other, so an import alone does not say that the user knows the package."""
    plain = installed.replace("Net", "Plain")
    with pytest.raises(ValueError, match="--import_module"):
        find_class("net", installed)
    import_named_module("--import_module", "acme_models")
    assert find_class("net", installed).__name__ == "Net"
    assert find_class("thing", plain).__name__ == "Plain"


@pytest.mark.hostile
@pytest.mark.refusal
def test_of_a_module_that_is_only_imported_parts_of_modules_are_built():
    """The user's program has other classes, too, such as one that deletes a folder."""
    assert find_class("net", f"{__name__}.Wide") is Wide
    with pytest.raises(ValueError, match=NOT_ALLOWED):
        find_class("thing", f"{__name__}.Outer")


def test_the_package_of_a_class_that_the_user_loads_is_the_users(installed):
    """Such as that of a module whose `load_from_checkpoint` is called, or of a config that is given to `fit`."""
    add_named_packages({"class_path": "lightning_retrieval.RetrievalModule", "init_args": {"loss": [LINEAR]}})
    with pytest.raises(ValueError, match=NOT_ALLOWED):
        find_class("net", installed)
    add_named_packages([{"init_args": {"embedder": {"class_path": "acme_models.nets.Net"}}}])
    assert find_class("net", installed).__name__ == "Net"
    assert not named_by_user & {"lightning_retrieval", "torch"}


@pytest.mark.hostile
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("auto_map", {"AutoModel": "evil--net.Net"}),
        ("pretrained_cfg", {"url": "x"}),
        ("pretrained_cfg_overlay", {"file": "x.bin"}),
        ("checkpoint_path", "x.bin"),
        ("cache_dir", "x"),
        ("attn_implementation", "evil/kernels"),
        ("attn_implementation", {"": "evil/kernels"}),
        ("_experts_implementation_internal", "evil/kernels"),
        ("weights", "https://example.org/x.pth"),
        ("backbone", "timm/hf-hub:evil/net"),
        ("model_name", "local-dir:net"),
        ("architecture", "HF-Hub:evil/net"),
    ],
)
def test_settings_that_a_file_may_not_make(name, value):
    """Unless they are empty, as jsonargparse writes them."""
    loss = {"class_path": "lightning_retrieval.SmoothAPLoss"}
    arguments = {"backbone": "timm/resnet18", "embedding_dim": 2, "backbone_args": {name: value}}
    embedder = {"class_path": "lightning_retrieval.Embedder", "init_args": arguments}
    with pytest.raises(ValueError, match=rf"^`embedder\.backbone_args\.{name}[.\w]*` must "):
        arguments_of_file(RetrievalModule, {"embedder": embedder, "loss": loss})
    arguments["backbone_args"] = {name: type(value)()}
    arguments_of_file(RetrievalModule, {"embedder": embedder, "loss": loss})


@pytest.mark.hostile
def test_networks_of_builders_get_no_pretrained_weights(monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **kwargs: pytest.fail("downloads"))
    settings = {"model_name": "resnet18.a1_in1k", "pretrained": True, "pretrained_cfg": None, "checkpoint_path": ""}
    description = {"class_path": "timm.create_model", "init_args": settings, "dict_kwargs": {"num_classes": 0}}
    assert type(rebuild("net", description, nn.Module)).__name__ == "ResNet"
    arguments = {"weights": "DEFAULT", "pretrained": True}
    description = {"class_path": "torchvision.models.resnet18", "init_args": arguments}
    assert type(rebuild("net", description, nn.Module)).__name__ == "ResNet"


@pytest.mark.hostile
@pytest.mark.refusal
def test_builders_make_listed_networks_and_nothing_else():
    for description in (
        {"class_path": "timm.create_model", "init_args": {"model_name": "no_such_model"}},
        {"class_path": "torchvision.models.get_model", "init_args": {"name": "resnet18", "weights": "DEFAULT"}},
    ):
        with pytest.raises((ValueError, TypeError), match=r"^`net` "):
            rebuild("net", description, nn.Module)
    with pytest.raises(TypeError, match=r"^`optimizer` must "):
        rebuild_factory("optimizer", {"class_path": "torchvision.models.resnet18"}, (torch.optim.Optimizer,))


class Wide(nn.Module):
    def __init__(self, layers=(), width=1):
        super().__init__()
        self.layers = nn.ModuleList(layers)


def test_an_error_of_a_constructor_names_the_part_of_the_file():
    wrong = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2}}
    description = {"class_path": f"{__name__}.Wide", "init_args": {"layers": [LINEAR, LINEAR], "width": 3}}
    assert len(rebuild("net", description, nn.Module).layers) == 2
    description["init_args"]["layers"] = [LINEAR, wrong]
    with pytest.raises(ValueError, match=r"^`net\.layers\[1\]` .*out_features"):
        rebuild("net", description, nn.Module)
    terms = {"ap": [1.0, {"class_path": "lightning_retrieval.SmoothAPLoss", "init_args": {"tau": 0}}]}
    loss = {"class_path": "lightning_retrieval.WeightedSum", "init_args": {"losses": terms}}
    with pytest.raises(ValueError, match=r"^`loss\.losses\.ap\[1\]` .*`tau` must"):
        rebuild("loss", loss, nn.Module)


class OfUser(RetrievalModule):
    def __init__(self, dim=4, optimizer=torch.optim.AdamW):
        super().__init__(nn.Linear(4, dim), losses.SmoothAPLoss(), optimizer=optimizer)


def test_a_constructor_gets_only_what_it_accepts():
    module = OfUser(optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    found = arguments_of_file(OfUser, dict(module.hparams), given=["dim"])
    assert found == {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}}


@pytest.mark.hostile
@pytest.mark.refusal
def test_a_string_is_never_called():
    linear, smooth = nn.Linear(4, 2), losses.SmoothAPLoss()
    for name in ("optimizer", "lr_scheduler"):
        with pytest.raises(TypeError, match=rf"`{name}` must be callable"):
            RetrievalModule(linear, smooth, **{name: "builtins.print"})
    schedule = {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": {"lr_lambda": ["builtins.print"]}}
    module = RetrievalModule(linear, smooth, lr_scheduler=schedule)
    with pytest.raises(TypeError, match="not callable"):
        module.configure_optimizers()
