"""Networks that torch.compile has compiled: their files are those of plain networks, in both directions."""

import copy
import functools
import os
import shutil

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.models import AdaptedEmbedder, FrozenEmbedder
from lightning_retrieval.plain_data import describe
from lightning_retrieval.training.checkpoint_files import restored_network
from tests.quiet_trainer import quiet_trainer

COMPILE = functools.partial(torch.compile, backend="eager")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch.compiler.reset()
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # the compiler sets it for its own processes


class Calls(nn.Module):
    """A backbone that counts in which ways it is run."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.layer = nn.Linear(6, channels, bias=False)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        return self.norm(self.layer(x))


def plain_module() -> RetrievalModule:
    torch.manual_seed(0)
    embedder = Embedder(Calls(), 3, feature_dim=4, pooling="avg")
    return RetrievalModule(embedder, SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.Adam, lr=0.1))


def whole_embedder():
    module = plain_module()
    return RetrievalModule(COMPILE(module.embedder), module.loss, optimizer=module.optimizer)


def whole_embedder_later():
    module = plain_module()
    module.embedder = COMPILE(module.embedder)
    return module


def part():
    module = plain_module()
    embedder = Embedder(COMPILE(module.embedder.backbone), 3, feature_dim=4, pooling="avg")
    embedder.load_state_dict(module.embedder.state_dict())
    return RetrievalModule(embedder, module.loss, optimizer=module.optimizer)


def part_later():
    module = plain_module()
    module.embedder.backbone = COMPILE(module.embedder.backbone)
    return module


def part_of_part_and_whole():
    module = plain_module()
    module.embedder.backbone.layer = COMPILE(module.embedder.backbone.layer)
    module.embedder = COMPILE(module.embedder)
    return module


def in_place():
    module = plain_module()
    module.embedder.compile(backend="eager")
    return module


WAYS = [plain_module, whole_embedder, whole_embedder_later, part, part_later, part_of_part_and_whole, in_place]


def data(batches: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(8) // 2
    return DataLoader([(torch.randn(8, 6, generator=generator), labels) for _ in range(batches)], batch_size=None)


def fit(module, epochs, path=None, **settings) -> pl.Trainer:
    run = quiet_trainer(max_epochs=epochs, **settings)
    run.fit(module, data(), ckpt_path=path)
    return run


def saved(module, path, epochs=1, **settings):
    fit(module, epochs, **settings).save_checkpoint(path)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The checkpoints of a plain network after one and after two epochs."""
    folder = tmp_path_factory.mktemp("plain")
    first = saved(plain_module(), folder / "1.ckpt")
    return folder / "1.ckpt", first, saved(plain_module(), folder / "2.ckpt", epochs=2)


def assert_alike(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("make", WAYS)
def test_a_compiled_network_writes_the_file_of_a_plain_one(make, plain, tmp_path):
    found = saved(make(), tmp_path / "a.ckpt")
    assert_alike(found["state_dict"], plain[1]["state_dict"])
    assert found["hyper_parameters"] == plain[1]["hyper_parameters"]
    assert not any("_orig_mod" in str(key) for key in found["state_dict"]._metadata)


@pytest.mark.parametrize("make", WAYS)
def test_compiled_and_plain_networks_go_on_from_each_other_s_files(make, plain, tmp_path):
    """In both directions, with the states of the optimizer and of the running averages."""
    module = make()
    fit(module, 2, plain[0])
    assert_alike(module.state_dict(), plain[2]["state_dict"])
    saved(make(), tmp_path / "a.ckpt")
    module = plain_module()
    fit(module, 2, tmp_path / "a.ckpt")
    assert_alike(module.state_dict(), plain[2]["state_dict"])


def with_names_of_wrappers(content, path):
    """A checkpoint as it was written with a wrapper around the embedder and one around its backbone."""

    def renamed(name):
        return name.replace("backbone.", "backbone._orig_mod.").replace("embedder.", "embedder._orig_mod.")

    changed = {**content, "state_dict": {renamed(name): value for name, value in content["state_dict"].items()}}
    torch.save(changed, path)
    return path


@pytest.mark.parametrize("make", [plain_module, part_later, whole_embedder])
def test_files_with_names_of_wrappers_are_loaded(make, plain, tmp_path):
    path = with_names_of_wrappers(plain[1], tmp_path / "old.ckpt")
    module = make()
    fit(module, 2, path)
    assert_alike(module.state_dict(), plain[2]["state_dict"])
    loaded = RetrievalModule.load_from_checkpoint(path, embedder=make().embedder)
    assert_alike(loaded.state_dict(), plain[1]["state_dict"])
    for network in (make().embedder, Embedder(Calls(), 3, feature_dim=4, pooling="avg")):
        state = torch.load(path, weights_only=True)["state_dict"]
        network.load_state_dict({name.removeprefix("embedder."): state[name] for name in state if "embedder" in name})
        assert torch.equal(network.head.linear.weight, loaded.embedder.head.linear.weight)


@pytest.mark.parametrize("make", WAYS)
def test_averaged_weights_of_a_compiled_network(make, tmp_path):
    def averaging():
        return {"callbacks": [EMAWeightAveraging(decay=0.5)], "enable_checkpointing": False}

    expected = saved(plain_module(), tmp_path / "plain.ckpt", **averaging())
    found = saved(make(), tmp_path / "a.ckpt", **averaging())
    for key in ("state_dict", "current_model_state"):
        assert_alike(found[key], expected[key])
    module = make()
    fit(module, 2, tmp_path / "plain.ckpt", **averaging())
    again = plain_module()
    fit(again, 2, tmp_path / "a.ckpt", **averaging())
    assert_alike(module.state_dict(), again.state_dict())


@pytest.mark.parametrize("make", WAYS)
def test_the_network_stays_compiled(make):
    """Calls after a file was written run the compiled code."""
    module = make()
    module.state_dict()
    compiled = []
    module.embedder.backbone.layer.register_forward_hook(lambda *_: compiled.append(torch.compiler.is_compiling()))
    module.train()(torch.randn(8, 6))
    assert compiled == [make is not plain_module]


def named_module() -> RetrievalModule:
    return RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss())


def test_the_class_of_a_compiled_network_is_its_own(tmp_path):
    """In descriptions, checkpoints, embedders that wrap it, and folders."""
    embedder = Embedder("glyph_net", 8)
    expected = describe(embedder)
    assert describe(COMPILE(embedder)) == expected
    module = RetrievalModule(COMPILE(embedder), SmoothAPLoss())
    path = tmp_path / "a.ckpt"
    module.embedder = COMPILE(module.embedder)
    trainer = quiet_trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    loaded = RetrievalModule.load_from_checkpoint(path)
    network = restored_network(torch.load(path, weights_only=True))
    for other in (loaded.embedder, network.embedder, FrozenEmbedder(checkpoint=str(path)).embedder):
        assert type(other) is Embedder
        assert_alike(other.state_dict(), embedder.state_dict())
    assert type(FrozenEmbedder(COMPILE(embedder)).embedder) is Embedder
    assert type(AdaptedEmbedder(COMPILE(embedder), 8, 4).embedder) is Embedder
    changed = copy.deepcopy(embedder)
    changed.backbone = COMPILE(changed.backbone)
    for name, network in (("whole", COMPILE(embedder)), ("part", changed)):
        network.save_pretrained(tmp_path / name)
        assert_alike(Embedder.from_pretrained(tmp_path / name).state_dict(), embedder.state_dict())


def test_a_compiled_module_is_trained_as_a_plain_one(plain, tmp_path):
    module = COMPILE(plain_module())
    fit(module, 1).save_checkpoint(tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_alike(found["state_dict"], plain[1]["state_dict"])
    assert found["hyper_parameters"] == plain[1]["hyper_parameters"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_a_network_compiled_to_machine_code(plain, tmp_path):
    from torch._inductor import config

    module = plain_module()
    module.embedder = torch.compile(module.embedder)
    with config.patch(compile_threads=1):  # no processes that would outlive the test
        assert_alike(saved(module, tmp_path / "a.ckpt")["state_dict"], plain[1]["state_dict"])
