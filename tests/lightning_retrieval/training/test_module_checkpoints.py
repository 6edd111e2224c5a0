"""Checkpoints of a RetrievalModule: runs that continue as they would have, modules that are rebuilt."""

import copy
import functools
import itertools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

from lightning_retrieval import (
    CrossBatchMemory,
    Embedder,
    PCAWhitening,
    RetrievalModule,
    SmoothAPLoss,
    TwoNetworks,
    Updates,
)
from lightning_retrieval.losses import FastAPLoss, Schedule, WeightedSum
from lightning_retrieval.training.checkpoint_files import network_digest, restored_network
from tests.lightning_retrieval.training.small_training import (
    SGD,
    Gives,
    Log,
    PointData,
    assert_same,
    fit,
    net,
    trainer,
)


def resumable() -> RetrievalModule:
    """Dropout, Adam's moments and a schedule of each step: everything that a resumed run could lose."""
    return RetrievalModule(
        net(dropout=0.3),
        SmoothAPLoss(tau=0.1),
        chunk_size=4,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.02),
        lr_scheduler=functools.partial(OneCycleLR, max_lr=0.02, total_steps=12),
        lr_scheduler_interval="step",
    )


def run_from(checkpoint, module, folder=None, **settings):
    """Train to the end, with a checkpoint in the folder after each step; the loss and rate of each step."""
    log, callbacks = Log(), []
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    settings = {"limit_val_batches": 0, "enable_checkpointing": bool(callbacks), **settings}
    run = trainer(callbacks=[*callbacks, log], **settings)
    run.fit(module, datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    return log, run.global_step


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 6}], ids=["epochs", "steps"])
def test_a_run_goes_on_from_a_checkpoint_that_was_saved_after_it(tmp_path, limit):
    """Two epochs of three batches, of which the second has other images than the first."""
    whole, half, resumed = (resumable() for _ in range(3))
    run_from(None, whole, max_epochs=2)
    run = trainer(limit_val_batches=0, max_epochs=1)
    run.fit(half, datamodule=PointData())
    run.save_checkpoint(tmp_path / "half.ckpt")
    _, steps = run_from(tmp_path / "half.ckpt", resumed, **limit)
    assert steps == 6
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_run_resumed_between_or_in_epochs_continues_as_it_would_have(tmp_path):
    """Four epochs of three batches; the last run is resumed at the end of an epoch and again in the next one.

    Lightning does not count the epoch after the first resume, so that the second one would begin it again.
    """
    whole = resumable()
    log, _ = run_from(None, whole, tmp_path / "whole", max_epochs=4)
    assert len(log.rates) == len({rate for (rate,) in log.rates}) == 12
    for folder, step in (("whole", 6), ("whole", 4), ("whole", 11), ("6 of whole", 7)):
        part = resumable()
        path = tmp_path / folder / f"step={step}.ckpt"
        rest, steps = run_from(path, part, tmp_path / f"{step} of {folder}", max_epochs=4)
        assert (rest.rates, steps) == (log.rates[step:], 12)
        assert rest.losses == log.losses[step:]
        assert_same(part, whole)


class LoggedWeights(pl.Callback):
    """Keeps the scheduled weights that each step logs."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, *_):
        self.weights.append(tuple(float(trainer.callback_metrics[f"train/weight/{name}"]) for name in ("a", "b")))


def in_phases() -> RetrievalModule:
    terms = {
        "a": (Schedule([(0, 1), (0.5, 0)]), FastAPLoss()),
        "b": (Schedule([(0, 0), (0.5, 1)]), SmoothAPLoss(tau=0.1)),
    }
    return RetrievalModule(net(), WeightedSum(terms), optimizer=SGD)


def weights_of(module, run, checkpoint=None):
    seen = LoggedWeights()
    run.callbacks.append(seen)
    run.fit(module, datamodule=PointData(), ckpt_path=checkpoint, weights_only=True)
    run.callbacks.remove(seen)
    return seen.weights


def test_a_run_resumed_with_more_epochs_begins_no_phase_again(tmp_path, monkeypatch):
    """Two epochs of three batches with the phases a and b, then four epochs in all."""
    monkeypatch.chdir(tmp_path)  # where a Trainer saves that is given no folder
    a, b = (1.0, 0.0), (0.0, 1.0)
    flags = {"limit_val_batches": 0, "enable_checkpointing": True}
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module, run = in_phases(), trainer(callbacks=[saving], max_epochs=2, **flags)
    assert weights_of(module, run) == [a] * 3 + [b] * 3
    assert weights_of(in_phases(), trainer(max_epochs=4, **flags), tmp_path / "step=6.ckpt") == [b] * 6
    # In the middle of the first phase, which goes on; and in the second one, which does not end.
    assert weights_of(in_phases(), trainer(max_epochs=4, **flags), tmp_path / "step=1.ckpt") == [a] * 5 + [b] * 6
    resumed = trainer(max_epochs=4, callbacks=[ModelCheckpoint(tmp_path / "second", every_n_train_steps=1)], **flags)
    assert weights_of(in_phases(), resumed, tmp_path / "step=4.ckpt") == [b] * 8
    # The number survives a second checkpoint, a longer run of the same objects, and no new run.
    (second,) = (tmp_path / "second").glob("*.ckpt")
    assert weights_of(in_phases(), trainer(max_epochs=8, **flags), second) == [b] * 12
    run.fit_loop.max_epochs = 3
    assert weights_of(module, run) == [b] * 3
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "step=6.ckpt", weights_only=True, embedder=net())
    assert weights_of(loaded, trainer(max_epochs=2, **flags)) == [a] * 3 + [b] * 3


def test_a_run_in_double_precision_is_resumed_bit_by_bit(tmp_path):
    """Lightning restores the weights before it has made the module double."""
    whole, second = (RetrievalModule(net(0.2).float(), SmoothAPLoss(tau=0.1), optimizer=SGD) for _ in range(2))
    run_from(None, whole, tmp_path, precision="64-true")
    run_from(tmp_path / "step=2.ckpt", second, precision="64-true")
    assert next(second.parameters()).dtype == torch.float64
    for found, expected in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def saved(module, path):
    data = [(torch.rand(8, 1, 32, 32), torch.arange(8) // 2)]
    fit(module, data).save_checkpoint(path)
    assert torch.load(path, weights_only=True)["global_step"] == 1
    return path


def test_a_checkpoint_rebuilds_the_module(tmp_path):
    module = RetrievalModule(
        Embedder("glyph_net", 8, pooling="avg"),
        SmoothAPLoss(tau=0.05, class_balanced=True),
        optimizer=functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5),
        lr_scheduler=functools.partial(ExponentialLR, gamma=0.5),
        updates=Updates(gradient_clip_val=2.0),
        seed=12,
    )
    path = saved(module, tmp_path / "m.ckpt")
    again = RetrievalModule.load_from_checkpoint(path, weights_only=True)
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in module.state_dict().items())
    assert repr(again.embedder) == repr(module.embedder)
    assert repr(again.loss) == repr(module.loss)
    assert (again.optimizer.func, again.optimizer.keywords) == (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5})
    assert (again.lr_scheduler.func, again.lr_scheduler.keywords) == (ExponentialLR, {"gamma": 0.5})
    assert (again.updates.gradient_clip_val, again.seed) == (2.0, 12)
    assert dict(again.hparams) == dict(module.hparams)


MEMORY = {"memory": CrossBatchMemory(16)}
QUERIES = {"sides": TwoNetworks(Embedder("glyph_net", 8)), "whitening": PCAWhitening()}
SCALES = {"eval_scales": [1.0, 0.5], "eval_scales_pooling": "gem", "whitening": PCAWhitening()}


def evaluated(**settings) -> RetrievalModule:
    """A module whose whitening, if it has one, is fitted, and that has prepared queries in their own way."""
    torch.manual_seed(3)
    module = RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss(), **copy.deepcopy(settings)).eval()
    if module.whitening is not None:
        module.whitening.fit(torch.randn(64, 8))
    module.preparation = {"preparation": {"channels": 1, "mean": [0.5], "std": [0.25]}}
    module.query_preparation = {"preparation": {"channels": 1, "mean": [0.25], "std": [0.5]}}
    return module


@pytest.mark.parametrize("settings", [MEMORY, QUERIES, SCALES])
def test_the_network_of_a_checkpoint_embeds_as_the_module(tmp_path, settings):
    """Also the network that the commands index, search, embed and export read, and recognise by its digest."""
    module, run = evaluated(**settings), trainer()
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "m.ckpt", weights_only=True)
    whole = RetrievalModule.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True).eval()
    network = restored_network(torch.load(tmp_path / "m.ckpt", weights_only=True)).eval()
    images = torch.randint(256, (3, 1, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        for loaded, inputs in itertools.product((whole, network), (images, images.float() / 255)):
            assert torch.equal(loaded.embed(inputs), module.embed(inputs))
            assert torch.equal(loaded.embed_queries(inputs), module.embed_queries(inputs))
    assert network_digest(network) == network_digest(module)
    next(network.embedder.parameters()).data.add_(1)
    assert network_digest(network) != network_digest(module)


def test_a_query_network_without_layers_is_used():
    x = torch.randn(3, 4)
    module = RetrievalModule(nn.Linear(4, 2), SmoothAPLoss(), sides=TwoNetworks(nn.Sequential()))
    assert torch.equal(module.embed_queries(x), x)


class Tagged(RetrievalModule):
    """A subclass of one's own: another argument, another form of batch, another forward."""

    def __init__(self, embedder: nn.Module, loss: nn.Module, factor: float = 1.0, **kwargs):
        super().__init__(embedder, loss, **kwargs)
        self.factor = factor

    def forward(self, images):
        return self.factor * self.embedder(images)

    def unpack_batch(self, batch):
        return batch["x"], batch["y"], None


def test_a_short_subclass_with_an_argument_of_its_own(tmp_path):
    module = Tagged(Embedder("glyph_net", 8), SmoothAPLoss(), factor=3.0, chunk_size=None, seed=4)
    fit(module, [{"x": torch.rand(8, 1, 32, 32), "y": torch.arange(8) // 2}]).save_checkpoint(tmp_path / "t.ckpt")
    again = Tagged.load_from_checkpoint(tmp_path / "t.ckpt", weights_only=True)
    assert (again.factor, again.seed) == (3.0, 4)
    images = torch.rand(3, 1, 32, 32)
    assert torch.equal(again.eval()(images), module.eval()(images))


class OwnParts(RetrievalModule):
    """Builds its own embedder and loss, and passes all other arguments on."""

    def __init__(self, dim=8, **kwargs):
        super().__init__(Embedder("glyph_net", dim), SmoothAPLoss(tau=0.1), **kwargs)


class OwnDimension(OwnParts):
    """Also gives an argument of `OwnParts` itself."""

    def __init__(self, factor=1.0, **kwargs):
        super().__init__(4, **kwargs)
        self.factor = factor


class AnyArguments(RetrievalModule):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


GIVEN = {"chunk_size": 8, "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)}


@pytest.mark.parametrize(
    "module",
    [
        OwnParts(),
        OwnParts(16, **GIVEN),
        OwnDimension(factor=2.0, **GIVEN),
        AnyArguments(Embedder("glyph_net", 8), SmoothAPLoss(), **GIVEN),
    ],
    ids=["nothing", "some", "a subclass of it", "positional"],
)
def test_a_subclass_gets_the_arguments_again_that_it_has_passed_on(tmp_path, module):
    """Also a second time, and with other ones."""
    images, path = torch.rand(3, 1, 32, 32), saved(copy.deepcopy(module), tmp_path / "first.ckpt")
    again = type(module).load_from_checkpoint(path, weights_only=True)
    assert dict(again.hparams) == dict(module.hparams)
    assert (again.chunk_size, getattr(again, "factor", 1)) == (module.chunk_size, getattr(module, "factor", 1))
    assert getattr(again.optimizer, "keywords", {}) == getattr(module.optimizer, "keywords", {})
    second = type(module).load_from_checkpoint(saved(again, tmp_path / "second.ckpt"), keep_graphs=2, weights_only=True)
    assert (second.chunk_size, second.keep_graphs) == (module.chunk_size, 2)
    assert torch.equal(second.eval()(images), again.eval()(images))
    assert restored_network(torch.load(path, weights_only=True)) is not None  # for the commands


def test_what_cannot_be_described_is_passed_again(tmp_path):
    settings = {"embedder": net(), "loss": Gives(), "optimizer": lambda groups: torch.optim.SGD(groups, lr=0.5)}
    module, run = RetrievalModule(**copy.deepcopy(settings)), trainer()
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "m.ckpt")
    with torch.no_grad():
        settings["embedder"][0].weight.zero_()
    assert_same(RetrievalModule.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True, **settings), module)


class Saves(RetrievalModule):
    """Calls Lightning's save_hyperparameters by itself, with an argument that is not plain."""

    def __init__(self, embedder: nn.Module, loss: nn.Module, extra: object = None) -> None:
        super().__init__(embedder, loss)
        self.save_hyperparameters(ignore=["embedder", "loss"])


@pytest.mark.refusal
def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    path = saved(OwnParts(), tmp_path / "m.ckpt")
    torch.save({**torch.load(path, weights_only=True), "lightning_retrieval_format": 7}, path)
    with pytest.raises(ValueError, match=r"format 1, .* got 7"):
        OwnParts.load_from_checkpoint(path)
    with pytest.raises(ValueError, match=r"format 1, .* got 7"):
        restored_network(torch.load(path, weights_only=True))
    with pytest.raises(ValueError, match=r"format 1, .* got 7"):
        run_from(path, OwnParts())


def test_a_subclass_that_saves_its_hyperparameters_itself_writes_plain_checkpoints(tmp_path):
    path = saved(Saves(Embedder("glyph_net", 8), SmoothAPLoss(), extra=torch.ones(2)), tmp_path / "m.ckpt")
    assert torch.load(path, weights_only=True)["hyper_parameters"]["extra"]["class_path"] == "torch.Tensor"
