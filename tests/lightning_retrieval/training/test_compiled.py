"""Networks that torch.compile has compiled: they train as plain networks, and write the same files."""

import copy
import functools
import os
import shutil

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.detection import DetectionAPLoss, DetectionModule, TinyFasterRCNN
from lightning_retrieval.models import AdaptedEmbedder, FrozenEmbedder
from tests.quiet_trainer import quiet_trainer

COMPILE = functools.partial(torch.compile, backend="eager")


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch.compiler.reset()
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)  # the compiler sets it for its own processes


class Backbone(nn.Module):
    """A layer and running averages."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.layer = nn.Linear(6, channels, bias=False)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        return self.norm(self.layer(x))


def plain_module() -> RetrievalModule:
    torch.manual_seed(0)
    embedder = Embedder(Backbone(), 3, feature_dim=4, pooling="avg")
    return RetrievalModule(embedder, SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.Adam, lr=0.1))


def whole_embedder():
    module = plain_module()
    return RetrievalModule(COMPILE(module.embedder), module.loss, optimizer=module.optimizer)


def parts_and_whole_later():
    module = plain_module()
    module.embedder.backbone.layer = COMPILE(module.embedder.backbone.layer)
    module.embedder.backbone = COMPILE(module.embedder.backbone)
    module.embedder = COMPILE(module.embedder)
    return module


def in_place():
    module = plain_module()
    module.embedder.compile(backend="eager")
    return module


WAYS = [whole_embedder, parts_and_whole_later, in_place]


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


@pytest.mark.parametrize("make", [*WAYS, lambda: COMPILE(plain_module())])
def test_a_compiled_network_writes_the_file_of_a_plain_one(make, plain, tmp_path):
    found = saved(make(), tmp_path / "a.ckpt")
    assert_alike(found["state_dict"], plain[1]["state_dict"])
    assert found["hyper_parameters"] == plain[1]["hyper_parameters"]


@pytest.mark.parametrize("make", WAYS[1:])
def test_compiled_and_plain_networks_go_on_from_each_other_s_files(make, plain, tmp_path):
    """In both directions, with the states of the optimizer and of the running averages."""
    module = make()
    fit(module, 2, plain[0])
    assert_alike(module.state_dict(), plain[2]["state_dict"])
    saved(make(), tmp_path / "a.ckpt")
    module = plain_module()
    fit(module, 2, tmp_path / "a.ckpt")
    assert_alike(module.state_dict(), plain[2]["state_dict"])


@pytest.mark.parametrize("make", WAYS[1:])
def test_a_file_with_the_names_of_wrappers_is_loaded(make, plain, tmp_path):
    """Such as one that was saved without a run, by `torch.save`."""
    content = {**plain[1], "state_dict": {}}
    for name, value in plain[1]["state_dict"].items():
        content["state_dict"][name.replace("embedder.", "embedder._orig_mod.")] = value
    torch.save(content, tmp_path / "a.ckpt")
    module = make()
    fit(module, 2, tmp_path / "a.ckpt")
    assert_alike(module.state_dict(), plain[2]["state_dict"])


def test_averaged_weights_of_a_compiled_network(tmp_path):
    def averaging():
        return {"callbacks": [EMAWeightAveraging(decay=0.5)], "enable_checkpointing": False}

    expected = saved(plain_module(), tmp_path / "plain.ckpt", **averaging())
    found = saved(parts_and_whole_later(), tmp_path / "a.ckpt", **averaging())
    for key in ("state_dict", "current_model_state"):
        assert_alike(found[key], expected[key])
    module = parts_and_whole_later()
    fit(module, 2, tmp_path / "plain.ckpt", **averaging())
    again = plain_module()
    fit(again, 2, tmp_path / "a.ckpt", **averaging())
    assert_alike(module.state_dict(), again.state_dict())


@pytest.mark.parametrize("make", [plain_module, *WAYS])
def test_the_network_stays_compiled(make, tmp_path):
    """Calls after a file was written run the compiled code."""
    module = make()
    layer, compiled = next(part for part in module.modules() if isinstance(part, nn.Linear)), []
    layer.register_forward_hook(lambda *_: compiled.append(torch.compiler.is_compiling()))
    saved(module, tmp_path / "a.ckpt")
    compiled.clear()
    module.train()(torch.randn(8, 6))
    assert compiled == [make is not plain_module]


def test_the_class_of_a_compiled_network_is_its_own(tmp_path):
    """In checkpoints, in embedders that wrap it, and in folders."""
    embedder = Embedder("glyph_net", 8)
    module = RetrievalModule(COMPILE(embedder), SmoothAPLoss())
    path = tmp_path / "a.ckpt"
    module.embedder = COMPILE(module.embedder)
    trainer = quiet_trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    for other in (RetrievalModule.load_from_checkpoint(path), FrozenEmbedder(checkpoint=str(path))):
        assert type(other.embedder) is Embedder
        assert_alike(other.embedder.state_dict(), embedder.state_dict())
    assert type(FrozenEmbedder(COMPILE(embedder)).embedder) is Embedder
    assert type(AdaptedEmbedder(COMPILE(embedder), 8, 4).embedder) is Embedder
    changed = copy.deepcopy(embedder)
    changed.backbone = COMPILE(changed.backbone)
    for name, network in (("whole", COMPILE(embedder)), ("part", changed)):
        network.save_pretrained(tmp_path / name)
        assert_alike(Embedder.from_pretrained(tmp_path / name).state_dict(), embedder.state_dict())


@pytest.mark.filterwarnings("ignore:RetrievalModule. BatchNorm sees 4 images")
def test_a_compiled_network_fills_the_memory_of_a_plain_one():
    """Chunks of a compiled network, and a memory of their embeddings."""

    def trained(make_module):
        module = make_module()
        settings = {"optimizer": module.optimizer, "memory": CrossBatchMemory(24), "chunk_size": 4}
        module = RetrievalModule(module.embedder, module.loss, **settings)
        batches = [(images, labels, torch.arange(8) + 8 * number) for number, (images, labels) in enumerate(data())]
        quiet_trainer(max_epochs=2).fit(module, DataLoader(batches, batch_size=None))
        return module.state_dict()

    assert_alike(trained(parts_and_whole_later), trained(plain_module))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.create_unbacked_symint")  # of torch
def test_a_compiled_detector_writes_the_file_of_a_plain_one(tmp_path):
    def trained(is_compiled):
        torch.manual_seed(0)
        detector = TinyFasterRCNN(num_classes=3)
        if is_compiled:
            detector.backbone = COMPILE(detector.backbone)
        module = DetectionModule(detector, DetectionAPLoss(), optimizer=functools.partial(torch.optim.SGD, lr=1e-3))
        images = list(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
        target = {"boxes": torch.tensor([[10.0, 10, 50, 50], [20, 30, 60, 60]]), "labels": torch.tensor([1, 2])}
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(module, DataLoader([(images, [target, target])], batch_size=None))
        trainer.save_checkpoint(tmp_path / "detector.ckpt")
        return torch.load(tmp_path / "detector.ckpt", weights_only=True)

    plain_file, found = trained(False), trained(True)
    assert found["hyper_parameters"] == plain_file["hyper_parameters"]
    assert list(found["state_dict"]) == list(plain_file["state_dict"])
    assert type(DetectionModule.load_from_checkpoint(tmp_path / "detector.ckpt").detector) is TinyFasterRCNN


@pytest.mark.slow
def test_a_compiled_loss_has_the_value_of_a_plain_one():
    """Also without a warning, which would be an error here, of a check that cannot be compiled."""
    loss, rows, labels = SmoothAPLoss(tau=0.1), torch.randn(8, 4), torch.arange(8) // 2
    torch.testing.assert_close(COMPILE(loss)(rows, labels), loss(rows, labels))


VIT = {"image_size": 32, "backbone_args": {"depth": 1, "embed_dim": 24}}
NETWORKS = {
    "vit": lambda: Embedder("timm/vit_tiny_patch16_224", 8, **VIT),
    "adapted": lambda: AdaptedEmbedder(Embedder("glyph_net", 8), 8, 4),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_compiled_network_is_one_graph(make):
    """No check of ours interrupts it, in training or evaluation."""
    network = make()
    channels = 3 if make is NETWORKS["vit"] else 1
    for training in (True, False):
        with torch.set_grad_enabled(training):
            found = torch._dynamo.explain(network.train(training))(torch.rand(4, channels, 32, 32))
        assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:RetrievalModule. BatchNorm sees")
@pytest.mark.parametrize(("chunk_size", "sizes"), [(4, {4}), (5, {5, 2})])
def test_a_size_is_compiled_once_with_and_once_without_a_graph(chunk_size, sizes):
    """Batches of 12 images, after a sanity check with 7 at a time; the compiler then leaves the size open."""
    module, compiled, seen = plain_module(), [], []

    def backend(graph, inputs):
        tensors = [value for value in inputs if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)]
        (shape,) = (tuple(value.shape) for value in tensors if value.shape[1:] == (6,))
        compiled.append((*shape, torch.is_grad_enabled()))
        return graph.forward

    class Count(pl.Callback):
        def on_train_epoch_end(self, *_):
            seen.append(len(compiled))

    module.embedder.compile(backend=backend)
    module = RetrievalModule(module.embedder, module.loss, chunk_size=chunk_size)
    points = TensorDataset(torch.randn(14, 6), torch.arange(14) // 2)
    train, validation = DataLoader(TensorDataset(*points[:12]), batch_size=12), DataLoader(points, batch_size=7)
    quiet_trainer(max_epochs=3, callbacks=[RetrievalEvaluation(ks=(1,)), Count()]).fit(module, train, validation)
    assert len(compiled) == len(set(compiled))
    assert {rows for rows, _, _ in compiled} <= {7, *sizes}
    assert seen == [seen[0]] * 3
    assert seen[0] <= 1 + 2 * len(sizes)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler of C++")
def test_a_network_compiled_to_machine_code(plain, tmp_path):
    from torch._inductor import config

    module = plain_module()
    module.embedder = torch.compile(module.embedder)
    with config.patch(compile_threads=1):  # no processes that would outlive the test
        assert_alike(saved(module, tmp_path / "a.ckpt")["state_dict"], plain[1]["state_dict"])
