"""Class paths are the shortest public ones, the same as jsonargparse and LightningCLI write."""

import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import types
from collections.abc import Callable

import jsonargparse
import pytest
import torch
from torch import nn

import lightning_retrieval
from lightning_retrieval import RetrievalModule, callbacks, datamodules, losses, metrics, models
from lightning_retrieval.plain_data import (
    add_named_packages,
    check_plain_data,
    checked_settings,
    class_path,
    find_class,
    import_named_module,
    named_by_user,
    rebuild,
    rebuild_factory,
    rules,
)

PUBLIC_CLASSES = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (lightning_retrieval, callbacks, datamodules, losses, metrics, models)
    for name in package.__all__
    if inspect.isclass(getattr(package, name))
}


KNOWN = {
    "lightning_retrieval.SmoothAPLoss": losses.SmoothAPLoss,
    "lightning_retrieval.losses.BlackboxMAPLoss": losses.BlackboxMAPLoss,
    "lightning_retrieval.PKSampler": datamodules.PKSampler,
    "lightning_retrieval.datamodules.Glyphs": datamodules.Glyphs,
    "torch.optim.lr_scheduler.StepLR": torch.optim.lr_scheduler.StepLR,
    "torch.Tensor": torch.Tensor,
    "builtins.int": int,
}


class Outer:
    class Inner:
        pass


def test_shortest_path():
    assert {path: class_path(cls) for path, cls in KNOWN.items()} == {path: path for path in KNOWN}
    inner = f"{__name__}.Outer.Inner"
    assert class_path(Outer.Inner) == inner
    assert find_class("thing", inner) is Outer.Inner


@pytest.mark.parametrize("path", PUBLIC_CLASSES)
def test_public_class_has_a_public_path_that_leads_back_to_it(path):
    cls = PUBLIC_CLASSES[path]
    assert find_class("thing", path) is cls
    assert find_class("thing", class_path(cls)) is cls


@pytest.mark.parametrize("path", [*KNOWN, *PUBLIC_CLASSES])
def test_path_is_the_one_of_jsonargparse(path):
    cls = {**PUBLIC_CLASSES, **KNOWN}[path]
    assert class_path(cls) == jsonargparse._util.get_import_path(cls)


NOT_ALLOWED = (
    r"names planted_module\.Net, and a file may name classes only of lightning_retrieval, .* if you trust it, import "
)


@pytest.mark.refusal
def test_only_modules_that_the_user_has_imported_are_looked_in(planted):
    module, written = planted
    with pytest.raises(ValueError, match=rf"^`net` {NOT_ALLOWED}planted_module first"):
        rebuild("net", {"class_path": f"{module}.Net"}, nn.Module)
    assert not written.exists()
    imported = importlib.import_module(module)
    assert written.exists()  # so the file shows an import
    assert find_class("net", f"{module}.Net", (nn.Module,)) is imported.Net


def test_module_that_the_user_names_is_imported(planted):
    module, written = planted
    import_named_module("--import_module", module)
    assert written.exists()
    assert find_class("net", f"{module}.Net").__name__ == "Net"


def test_a_class_of_the_users_script_is_found(monkeypatch):
    net = type("Net", (nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Net", net, raising=False)
    assert find_class("net", "__main__.Net") is net


@pytest.mark.refusal
def test_a_library_that_the_user_has_not_named_is_no_module_of_the_user(monkeypatch):
    importlib.import_module("torchmetrics.classification")
    for path in ("torchmetrics.classification.BinaryAccuracy", "unittest.TestCase", f"{__name__}.Callable"):
        with pytest.raises(ValueError, match=r"^`thing` names .*, and a file may name classes only of"):
            find_class("thing", path)
    with pytest.raises(ValueError, match=r"^`thing` names the class .*, which cannot be imported"):
        find_class("thing", f"{__name__}.jsonargparse.ArgumentParser")


@pytest.mark.refusal
def test_without_known_requirements_no_installed_library_is_a_module_of_the_user(monkeypatch):
    def requires(_):
        raise importlib.metadata.PackageNotFoundError

    importlib.import_module("torchmetrics.classification")
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    monkeypatch.setattr(rules, "_required_modules", rules._required_modules.__wrapped__)  # not the cache
    assert find_class("thing", f"{__name__}.Outer") is Outer
    with pytest.raises(ValueError, match=r"^`thing` names .*, and a file may name classes only of"):
        find_class("thing", "torchmetrics.classification.BinaryAccuracy")


@pytest.mark.refusal
@pytest.mark.parametrize("value", [{"a": [object()]}, {"a": b"x"}, {"a": {"class_path": 3, "init_args": nn.Linear}}])
def test_plain_data_hold_nothing_else(value):
    with pytest.raises(TypeError, match=r"^`(a|init_args)` must be plain data, got"):
        check_plain_data("settings", value)


@pytest.mark.refusal
def test_plain_data_are_not_nested_too_deeply():
    """Neither lists, nor one list that holds itself twice at each level, nor descriptions."""
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    doubled: list = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    nested = LINEAR
    for _ in range(150):
        nested = {"class_path": "torch.nn.ModuleList", "init_args": {"modules": [nested]}}
    sentence = r"^`\w+` must be plain data, got lists or dicts that are nested"
    with pytest.raises(ValueError, match=sentence):
        check_plain_data("settings", deep)
    with pytest.raises(ValueError, match=sentence.removesuffix(" nested")):
        checked_settings(RetrievalModule, {"embedder": LINEAR, "loss": doubled})
    with pytest.raises(ValueError, match=sentence):
        rebuild("net", nested, nn.Module)


@pytest.mark.refusal
def test_a_path_does_not_lead_through_modules_of_others():
    """Neither by an import of a module beside the classes, nor by asking a module that makes what it is asked for."""
    for path in ("torch.nn.parallel.DistributedDataParallel", "timm.data.readers.reader_tfds.ReaderTfds"):
        with pytest.raises(ValueError, match=rf"^`net` names {path}, and a file may name classes only of"):
            find_class("net", path)
    path = "lightning_retrieval.training.module.torch.classes.evil.Net"
    with pytest.raises(ValueError, match=r"^`net` names the class .*, which cannot be imported"):
        find_class("net", path)


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
        ("megatron_config", {"a": 1}),
        ("attn_implementation", "evil/kernels"),
        ("attn_implementation", {"": "evil/kernels"}),
        ("_experts_implementation_internal", "evil/kernels"),
        ("weights", "https://example.org/x.pth"),
        ("backbone", "timm/hf-hub:evil/net"),
        ("model_name", "local-dir:net"),
        ("architecture", "HF-Hub:evil/net"),
    ],
)
@pytest.mark.hostile
def test_settings_that_a_file_may_not_make(name, value):
    description = {"class_path": "lightning_retrieval.Embedder", "init_args": {"backbone_args": [{name: value}]}}
    with pytest.raises(ValueError, match=rf"^`({name}|url)` must "):
        check_plain_data("embedder", {"embedder": description})
    description["init_args"]["backbone_args"] = [{name: type(value)()}]  # empty, as jsonargparse writes it
    check_plain_data("embedder", {"embedder": description})


@pytest.mark.hostile
def test_networks_of_builders_get_no_pretrained_weights(monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **kwargs: pytest.fail("downloads"))
    settings = {"model_name": "resnet18.a1_in1k", "pretrained": True, "pretrained_cfg": None, "checkpoint_path": ""}
    description = {"class_path": "timm.create_model", "init_args": settings, "dict_kwargs": {"num_classes": 0}}
    assert type(rebuild("net", description, nn.Module)).__name__ == "ResNet"
    for path in ("torchvision.models.resnet18", "torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn"):
        description = {"class_path": path, "init_args": {"weights": "DEFAULT", "weights_backbone": "DEFAULT"}}
        description["init_args"] = {"weights": "DEFAULT", "pretrained": True}
        assert type(rebuild("net", description, nn.Module)).__name__ in ("ResNet", "FasterRCNN")


@pytest.mark.refusal
@pytest.mark.parametrize("model", ["no_such_model", "hf-hub:timm/resnet18", 3, None])
def test_networks_of_timm_are_those_that_it_lists(model):
    with pytest.raises(ValueError, match=r"^`(net|model_name)` must "):
        rebuild("net", {"class_path": "timm.create_model", "init_args": {"model_name": model}}, nn.Module)


@pytest.mark.refusal
@pytest.mark.parametrize("path", ["timm.create_model", "torchvision.models.resnet18"])
def test_builders_of_networks_make_nothing_else(path):
    with pytest.raises((ValueError, TypeError), match=r"^`optimizer` names"):
        rebuild_factory("optimizer", {"class_path": path}, (torch.optim.Optimizer,))


class Wide(nn.Module):
    """Takes an object, a callable, and a number."""

    def __init__(self, layer: nn.Module | None = None, norm: Callable[..., nn.Module] = nn.Identity, width: int = 1):
        super().__init__()
        self.layer, self.norm, self.width = layer, norm, width


LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 3}}


def test_arguments_are_what_their_annotations_say():
    path = f"{__name__}.Wide"
    description = {"class_path": path, "init_args": {"layer": LINEAR, "norm": LINEAR, "width": 3}}
    made = rebuild("net", description, nn.Module)
    assert type(made.layer) is nn.Linear
    assert (made.norm.func, made.norm.keywords) == (nn.Linear, LINEAR["init_args"])
    with pytest.raises(TypeError, match=r"^`width` names torch.nn.Linear, which is not a class of the kind"):
        rebuild("net", {"class_path": path, "init_args": {"width": LINEAR}}, nn.Module)


class OfUser(RetrievalModule):
    def __init__(self, dim=4, optimizer=torch.optim.AdamW):
        super().__init__(nn.Linear(4, dim), losses.SmoothAPLoss(), optimizer=optimizer)


def test_an_argument_without_annotation_accepts_what_it_does_in_the_base_class():
    module = OfUser(optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    checked = checked_settings(OfUser, dict(module.hparams))
    assert checked.arguments()["optimizer"].keywords["lr"] == 0.1
    assert checked_settings(OfUser, {"optimizer": "a word"}).checked == {"optimizer": "a word"}
    with pytest.raises(TypeError, match=r"^`dim` names torch.optim.SGD, which is not a class of the kind"):
        checked_settings(OfUser, {"dim": module.hparams["optimizer"]})


@pytest.mark.refusal
@pytest.mark.hostile
def test_a_string_is_never_called():
    path = f"{__name__}.Wide"
    with pytest.raises(ValueError, match=r"^`norm` must be passed again, .* got 'torch.nn.Linear'"):
        rebuild("net", {"class_path": path, "init_args": {"norm": "torch.nn.Linear"}}, nn.Module)
    scheduler = {"class_path": "torch.optim.lr_scheduler.LambdaLR", "init_args": {"lr_lambda": ["builtins.print"]}}
    with pytest.raises(ValueError, match=r"^`lr_lambda` must be passed again, .* got 'builtins.print'"):
        rebuild_factory("lr_scheduler", scheduler, (torch.optim.lr_scheduler.LRScheduler,))


def test_settings_are_checked_before_anything_is_built(monkeypatch):
    """The first argument is good; nothing is built of it, since the second one is not."""
    monkeypatch.setattr(nn.Linear, "__init__", lambda *args, **kwargs: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"^`loss` names the class torch.nn.NoSuchLoss"):
        checked_settings(RetrievalModule, {"embedder": LINEAR, "loss": {"class_path": "torch.nn.NoSuchLoss"}})


@pytest.mark.refusal
@pytest.mark.parametrize("module", ["no_such_module", "", "torch.no_such_module"])
def test_module_that_cannot_be_imported(module):
    with pytest.raises(ValueError, match=rf"`module` must name a module that can be imported, got {module} \("):
        import_named_module("module", module)


LIGHTNING = (
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.demos",
    "lightning_fabric",
    "lightning_sdk",
    "lightning_utilities",
    "litlogger",
    "litmodels",
    "pytorch_lightning",
)


@pytest.mark.refusal
@pytest.mark.parametrize("module", LIGHTNING)
@pytest.mark.hostile
def test_no_lightning_is_a_module_of_the_user(module, monkeypatch):
    """Whichever of its packages is installed and imported."""
    for name in (module, module.partition(".")[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    net = type("Net", (nn.Module,), {"__module__": module})
    monkeypatch.setattr(sys.modules[module], "Net", net, raising=False)
    with pytest.raises(ValueError, match=rf"^`net` names {re.escape(module)}\.Net, and a file may name classes"):
        find_class("net", f"{module}.Net", (nn.Module,))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with a network that is installed in site-packages, and imported; the path of its network."""
    folder = tmp_path / "site-packages" / "acme_models" / "nets"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("from acme_models.nets import Net\n")
    (folder / "__init__.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    importlib.import_module("acme_models.nets")
    yield "acme_models.nets.Net"
    for name in ("acme_models", "acme_models.nets"):
        sys.modules.pop(name, None)
        named_by_user.discard(name)


@pytest.mark.refusal
@pytest.mark.hostile
def test_an_installed_package_is_the_users_only_if_the_user_names_it(installed):
    """Libraries import each other, so an import alone does not say that the user knows the package."""
    with pytest.raises(ValueError, match=rf"^`net` names {installed}, .* \(in the commands: --import_module"):
        find_class("net", installed)
    import_named_module("--import_module", "acme_models")
    assert find_class("net", installed).__name__ == "Net"


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["numpy.random.Generator", "fsspec.AbstractFileSystem", "sympy.Symbol", "yaml.Loader"])
def test_no_library_of_this_environment_is_the_users(name):
    """Also those that are no requirement, but only those of requirements."""
    importlib.import_module(name.partition(".")[0])
    with pytest.raises(ValueError, match=rf"^`thing` names {name}, and a file may name classes only of"):
        find_class("thing", name)


def test_the_package_of_a_class_that_the_user_loads_is_the_users(installed):
    """Such as that of a module whose `load_from_checkpoint` is called, or of a config that is given to `fit`."""
    add_named_packages({"class_path": "lightning_retrieval.RetrievalModule", "init_args": {"loss": [LINEAR]}})
    with pytest.raises(ValueError, match=r"^`net` names acme_models"):
        find_class("net", installed)
    add_named_packages([{"init_args": {"embedder": {"class_path": "acme_models.nets.Net"}}}])
    assert find_class("net", installed).__name__ == "Net"
    assert not named_by_user & {"lightning_retrieval", "torch"}
