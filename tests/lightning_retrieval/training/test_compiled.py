"""Networks that torch.compile has compiled: their files are those of plain networks, in both directions."""

import copy
import functools
import os
import shutil

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.cli.main import main
from lightning_retrieval.detection import DetectionAPLoss, DetectionModule, TinyFasterRCNN
from lightning_retrieval.models import AdaptedEmbedder, FrozenEmbedder
from lightning_retrieval.plain_data import describe
from lightning_retrieval.search.commands.stores import opened_index
from lightning_retrieval.search.export.onnx_file import can_write_onnx
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


@pytest.mark.parametrize("make", [whole_embedder, part_of_part_and_whole, in_place])
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


@pytest.mark.filterwarnings("ignore:RetrievalModule. BatchNorm sees 4 images")
@pytest.mark.parametrize("make", [part_of_part_and_whole, in_place])
def test_a_compiled_network_fills_the_memory_of_a_plain_one(make):
    """Chunks of a compiled network, and a memory of their embeddings."""

    def trained(make_module):
        module = make_module()
        settings = {"optimizer": module.optimizer, "memory": CrossBatchMemory(24), "chunk_size": 4}
        module = RetrievalModule(module.embedder, module.loss, **settings)
        batches = [(images, labels, torch.arange(8) + 8 * number) for number, (images, labels) in enumerate(data())]
        quiet_trainer(max_epochs=2).fit(module, DataLoader(batches, batch_size=None))
        return module.state_dict()

    assert_alike(trained(make), trained(plain_module))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.create_unbacked_symint")  # of torch
@pytest.mark.parametrize("compiled", ["detector", "backbone"])
def test_a_compiled_detector_writes_the_file_of_a_plain_one(compiled, tmp_path):
    def trained(is_compiled):
        torch.manual_seed(0)
        detector = TinyFasterRCNN(num_classes=3)
        if is_compiled and compiled == "detector":
            detector = COMPILE(detector)
        elif is_compiled:
            detector.backbone = COMPILE(detector.backbone)
        module = DetectionModule(detector, DetectionAPLoss(), optimizer=functools.partial(torch.optim.SGD, lr=1e-3))
        images = list(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))
        target = {"boxes": torch.tensor([[10.0, 10, 50, 50], [20, 30, 60, 60]]), "labels": torch.tensor([1, 2])}
        epochs = {"detector": 0, "backbone": 1}[compiled]  # compiling the whole detector takes long
        trainer = quiet_trainer(max_epochs=epochs)
        trainer.fit(module, DataLoader([(images, [target, target])], batch_size=None))
        trainer.save_checkpoint(tmp_path / "detector.ckpt")
        return torch.load(tmp_path / "detector.ckpt", weights_only=True)

    plain_file, found = trained(False), trained(True)
    assert found["hyper_parameters"] == plain_file["hyper_parameters"]
    assert list(found["state_dict"]) == list(plain_file["state_dict"])
    assert type(DetectionModule.load_from_checkpoint(tmp_path / "detector.ckpt").detector) is TinyFasterRCNN


@pytest.mark.slow
def test_commands_take_the_checkpoint_of_a_compiled_network(tmp_path, capsys):
    torch.manual_seed(0)
    module = RetrievalModule(COMPILE(Embedder("glyph_net", 8)), SmoothAPLoss())
    images, labels = torch.rand(24, 1, 32, 32), torch.arange(24) // 4
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, DataLoader([(images, labels)], batch_size=None))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    names = [f"{number}.png" for number in range(24)]
    (tmp_path / "images").mkdir()
    for name, pixels in zip(names, images):
        Image.fromarray((255 * pixels[0]).byte().numpy()).save(tmp_path / "images" / name)
    rows = [f"{name},{label}" for name, label in zip(names, labels)]
    (tmp_path / "images" / "labels.csv").write_text("\n".join(["image,label", *rows]))
    model, folder = ["--checkpoint", tmp_path / "a.ckpt"], ["--images", tmp_path / "images"]
    embeddings = ["--embeddings", tmp_path / "embeddings"]
    commands = [
        ["index", *model, *folder, "--output", tmp_path / "index"],
        ["embed", *model, "--images", tmp_path / "images" / "labels.csv", "--output", tmp_path / "embeddings"],
        ["adapt", *embeddings, "--output", tmp_path / "adapted.ckpt", "--max_epochs=1", "--batch_size=8"],
        ["index", "--checkpoint", tmp_path / "adapted.ckpt", *folder, "--output", tmp_path / "of adapted"],
    ]
    if can_write_onnx(torch.__version__):
        pytest.importorskip("onnxruntime")
        commands.append(["export", *model, "--output", tmp_path / "exported"])
    for command in commands:
        main([str(part) for part in command])
    capsys.readouterr()
    with opened_index(tmp_path / "index", None) as index:
        assert len(index) == 24


@pytest.mark.refusal
def test_a_file_that_names_the_wrapper_as_its_class_loads_with_the_network(tmp_path):
    """As files were written when a wrapper was described as the network."""
    embedder = Embedder("glyph_net", 8)
    trainer = quiet_trainer()
    trainer.strategy.connect(RetrievalModule(embedder, SmoothAPLoss()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    content["hyper_parameters"]["embedder"] = {"class_path": "torch._dynamo.OptimizedModule", "init_args": None}
    path = with_names_of_wrappers(content, tmp_path / "old.ckpt")
    with pytest.raises(ValueError, match=r"load_from_checkpoint\(path, embedder="):
        RetrievalModule.load_from_checkpoint(path)
    loaded = RetrievalModule.load_from_checkpoint(path, embedder=Embedder("glyph_net", 8))
    assert_alike(loaded.embedder.state_dict(), embedder.state_dict())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("glyph_net", {}), ("squeezenet1_1", {}), ("timm/vit_tiny_patch16_224", {"depth": 1, "embed_dim": 24})],
)
def test_an_embedder_is_one_graph(name, arguments):
    """No check of ours interrupts it, in training or evaluation."""
    embedder = Embedder(name, 8, image_size=32, freeze_batch_norm=True, backbone_args=arguments)
    images = torch.rand(4, embedder.preparation.channels, 32, 32)
    for mode in (True, False):
        explained = torch._dynamo.explain(embedder.train(mode))(images)
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.slow
def test_a_compiled_loss_has_the_value_of_a_plain_one():
    """Also without a warning, which would be an error here, of a check that cannot be compiled."""
    loss, rows, labels = SmoothAPLoss(tau=0.1), torch.randn(8, 4), torch.arange(8) // 2
    torch.testing.assert_close(COMPILE(loss)(rows, labels), loss(rows, labels))


@pytest.mark.filterwarnings("ignore:RetrievalModule. BatchNorm sees 4 images")
def test_chunks_of_one_size_are_compiled_once():
    """Also the second epoch and the pass without a graph compile nothing again."""
    module = plain_module()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    module.embedder.compile(backend=backend)
    module = RetrievalModule(module.embedder, module.loss, chunk_size=4)
    fit(module, 1)
    first = len(graphs)
    fit(module, 3)
    assert 0 < first == len(graphs)


OWN_NETWORKS = {
    "gem": lambda: Embedder("glyph_net", 8),
    "layer norm": lambda: Embedder("glyph_net", 8, pooling="max", normalize=False, layer_norm=True),
    "frozen statistics": lambda: Embedder("glyph_net", 8, pooling="avg", freeze_batch_norm=True),
    "frozen": lambda: FrozenEmbedder(Embedder("glyph_net", 8)),
    "adapted": lambda: AdaptedEmbedder(Embedder("glyph_net", 8), 8, 4),
}


@pytest.mark.parametrize("make", OWN_NETWORKS.values(), ids=OWN_NETWORKS)
def test_a_compiled_network_is_one_graph(make):
    network, images = make(), torch.rand(4, 1, 32, 32)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            found = torch._dynamo.explain(network.train(training))(images)
        assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:RetrievalModule. BatchNorm sees")
@pytest.mark.parametrize(("chunk_size", "sizes"), [(4, {4}), (5, {5, 2}), (3, {3})])
@pytest.mark.parametrize("before_fit", [False, True])
def test_a_size_is_compiled_once_with_and_once_without_a_graph(chunk_size, sizes, before_fit):
    """Batches of 12 images, after a sanity check with 7 at a time; the compiler then leaves the size open."""
    module, compiled = plain_module(), []

    def backend(graph, inputs):
        shapes = [tuple(image.shape) for image in inputs if isinstance(image, torch.Tensor) and image.shape[1:] == (6,)]
        compiled.append((*shapes[0], torch.is_grad_enabled()))
        return graph.forward

    data = TensorDataset(torch.randn(14, 6), torch.arange(14) // 2)
    module.embedder.compile(backend=backend)
    module = RetrievalModule(module.embedder, module.loss, chunk_size=chunk_size)
    seen = []

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(*data[:12]), batch_size=12)

        def val_dataloader(self):
            return DataLoader(data, batch_size=7)

        test_dataloader = val_dataloader

    class Count(pl.Callback):
        def on_train_epoch_end(self, *_):
            seen.append(len(compiled))

    callbacks = [RetrievalEvaluation(ks=(1,), before_fit=before_fit), Count()]
    run = quiet_trainer(max_epochs=3, callbacks=callbacks)
    run.fit(module, Data())
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
