"""RetrievalModule in one process: the steps of plain PyTorch with any loss, scales and whitening in evaluation."""

import dataclasses
import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_metric_learning.losses import ContrastiveLoss, ProxyAnchorLoss, TripletMarginLoss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import (
    CalibrationLoss,
    Embedder,
    HAPLoss,
    PCAWhitening,
    RetrievalModule,
    SmoothAPLoss,
    SupervisedWhitening,
    WeightedSum,
    multi_scale,
)
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.losses import Schedule
from lightning_retrieval.losses.third_party import original_loss
from lightning_retrieval.preparation.serialised import serialise_transform
from tests.csv_logs import logged
from tests.lightning_retrieval.training.small_training import (
    ROWS,
    SGD,
    LearnedTau,
    Log,
    assert_same,
    batches,
    fit,
    net,
    train_plainly,
    trainer,
    warnings_with,
)


@pytest.mark.parametrize(("chunk_size", "dropout"), [(None, 0.5), (3, 0.0), (3, 0.5), (7, 0.5)])
def test_steps_are_those_of_plain_pytorch(chunk_size, dropout):
    """Adam's also; with dropout, the random state of a step is the function of (seed, step, rank) written out here."""
    plain, loss, seed = net(dropout), SmoothAPLoss(tau=0.1), 3
    optimizer, values = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for step, (images, labels) in enumerate(batches()):
        optimizer.zero_grad()
        torch.manual_seed((seed * 1_000_003 + step) * 65_537)
        value = loss(torch.cat([plain(chunk) for chunk in images.split(chunk_size or ROWS)]), labels)
        value.backward()
        optimizer.step()
        values.append(value.item())

    adam, log = functools.partial(torch.optim.AdamW, lr=0.01), Log()
    module = RetrievalModule(net(dropout), SmoothAPLoss(tau=0.1), chunk_size=chunk_size, optimizer=adam, seed=seed)
    torch.manual_seed(99)  # the state outside counts for nothing
    run = fit(module, batches(), callbacks=[log])
    assert_same(module.embedder, plain)
    assert log.losses == pytest.approx(values, abs=1e-6)  # logged in float32
    assert run.global_step == 3  # one for each batch, whatever the number of chunks


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "41")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 41
    assert RetrievalModule(net(), SmoothAPLoss(), seed=2).seed == 2
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert RetrievalModule(net(), SmoothAPLoss()).seed == 0


def proxies() -> ProxyAnchorLoss:
    torch.manual_seed(8)
    return ProxyAnchorLoss(num_classes=3, embedding_size=4).double()


@pytest.mark.parametrize("make", [TripletMarginLoss, proxies, LearnedTau])
def test_other_losses_and_losses_that_learn(make):
    plain, loss, sgd = net(), make(), functools.partial(torch.optim.SGD, lr=0.01)
    train_plainly(plain, sgd([*plain.parameters(), *loss.parameters()]), batches(), loss)
    module = RetrievalModule(net(), make(), chunk_size=3, optimizer=sgd)
    fit(module, batches())
    assert_same(module.embedder, plain)
    if list(loss.parameters()):
        assert_same(original_loss(module.loss), loss)
        assert not torch.equal(next(module.loss.parameters()), next(make().parameters()))


def test_a_subclass_may_leave_hooks_out():
    class Own(RetrievalModule):
        def on_fit_start(self):
            pass

    own, expected = Own(net(), SmoothAPLoss()), RetrievalModule(net(), SmoothAPLoss())
    fit(own, batches())
    fit(expected, batches())
    assert_same(own, expected)


def test_predict_returns_embeddings():
    module, ((images, labels), _) = RetrievalModule(net(), SmoothAPLoss()), batches(2)
    run = trainer()
    (batch,) = run.predict(module, DataLoader(TensorDataset(images, labels, torch.arange(ROWS)), batch_size=ROWS))
    expected = net()(images).detach()
    assert {name: value.tolist() for name, value in batch.items()} == {
        "embeddings": expected.tolist(),
        "labels": labels.tolist(),
        "ids": list(range(ROWS)),
    }
    (batch,) = run.predict(module, DataLoader(images, batch_size=ROWS))
    assert torch.equal(batch["embeddings"], expected)


def test_each_term_of_a_sum_is_logged():
    terms = {"ap": (1.0, SmoothAPLoss(tau=0.1)), "calibration": (0.5, CalibrationLoss())}
    module, (images, labels) = RetrievalModule(net(), WeightedSum(terms), optimizer=SGD), batches(1)[0]
    expected = {name: loss(module(images), labels).item() for name, (_, loss) in terms.items()}
    run = fit(module, [(images, labels)])
    logged = {name: float(run.callback_metrics[f"train/loss/{name}"]) for name in terms}
    assert logged == pytest.approx(expected)
    assert float(run.callback_metrics["train/loss"]) == pytest.approx(expected["ap"] + 0.5 * expected["calibration"])


class TwoOptimizers(RetrievalModule):
    """An optimizer for each layer; Lightning counts the steps of both."""

    def configure_optimizers(self):
        return [SGD(self.embedder[0].parameters()), SGD(self.embedder[3].parameters())]


class LoggedWeights(pl.Callback):
    """Keeps the weights of the terms of the loss that each step logs."""

    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, *_):
        names = ("train/weight/pairs", "train/weight/ap")
        self.weights.append(tuple(float(trainer.callback_metrics[name]) for name in names))


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        (RetrievalModule, {"max_epochs": 2}),
        (RetrievalModule, {"max_epochs": -1, "max_steps": 6}),
        (TwoOptimizers, {"max_epochs": -1, "max_steps": 12}),
    ],
)
def test_the_loss_changes_at_a_fraction_of_the_steps(kind, limits):
    """A third of the six steps, of two epochs, with a loss of pairs; in plain PyTorch, and with a module."""
    plain, data = net(), [*batches(), *batches()]
    optimizer = SGD(plain.parameters())
    train_plainly(plain, optimizer, data[:2], TripletMarginLoss())
    train_plainly(plain, optimizer, data[2:], SmoothAPLoss(tau=0.1))
    terms = {
        "pairs": (Schedule([(0, 1), (1 / 3, 0)]), TripletMarginLoss()),
        "ap": (Schedule([(0, 0), (1 / 3, 1)]), SmoothAPLoss(tau=0.1)),
    }
    module, found = kind(net(), WeightedSum(terms), chunk_size=3, optimizer=SGD), LoggedWeights()
    fit(module, batches(), callbacks=[found], **limits)
    assert_same(module.embedder, plain)
    assert found.weights == [(1.0, 0.0)] * 2 + [(0.0, 1.0)] * 4


def test_a_term_that_is_not_computed_is_not_logged(tmp_path):
    """In the middle of an epoch, the first term ends, and Lightning would go on with its last value."""
    terms = {
        "pairs": (Schedule([(0, 1), (0.5, 0)]), ContrastiveLoss()),
        "ap": (Schedule([(0, 0), (0.5, 1)]), SmoothAPLoss(tau=0.1)),
    }
    module = RetrievalModule(net(), WeightedSum(terms), optimizer=SGD)
    fit(module, batches(4), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    found = [{name for name in row if name.startswith("train/loss/")} for row in logged(tmp_path).values()]
    assert found == [{"train/loss/pairs"}] * 2 + [{"train/loss/ap"}] * 2


def test_labels_with_levels_train_and_their_finest_is_evaluated():
    fine = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    images, labels = batches(1)[0][0], torch.stack([fine, fine // 2], 1)
    run = fit(
        RetrievalModule(net(), HAPLoss(), optimizer=SGD),
        [(images, labels)],
        [(images, labels)],
        callbacks=[RetrievalEvaluation(ks=(1,))],
    )
    assert 0 < float(run.callback_metrics["train/loss"]) < 1
    assert float(run.callback_metrics["val/skipped_queries"]) == 0
    contrastive = fit(RetrievalModule(net(), ContrastiveLoss(), optimizer=SGD), [(images, labels)])
    assert float(contrastive.callback_metrics["train/loss"]) == pytest.approx(
        ContrastiveLoss()(net()(images), fine).item()
    )


def test_images_of_uint8_are_normalised_as_in_evaluation():
    module = RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss(), eval_scales=(1, 0.5)).eval()
    pixels = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module.embed(pixels), module.embed(module.embedder.preparation.normalize(pixels)))
    evaluated = dataclasses.replace(module.embedder.preparation, mean=[0.3], std=[0.2])
    module.preparation = serialise_transform(evaluated)
    wanted = module.embed(evaluated.normalize(pixels))
    assert torch.equal(module.embed(pixels), wanted)
    assert torch.equal(module.predict_step(pixels, 0)["embeddings"], wanted)
    assert torch.equal(module.predict_step((pixels, torch.zeros(2)), 0)["embeddings"], wanted)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_images_of_uint8_are_embedded_in_the_precision_of_the_module(precision):
    module = RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss())
    pixels = torch.randint(0, 256, (4, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    predicted = []
    for images in (pixels, module.embedder.preparation.normalize(pixels)):
        (batch,) = trainer(precision=precision).predict(module, DataLoader(images, batch_size=4))
        predicted.append(batch["embeddings"])
    assert torch.equal(*predicted)


# --- several scales and whitening


class Dots(nn.Module):
    """A small network that takes images of any size; described by its one argument."""

    def __init__(self, dim=4):
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(24, dim)

    def forward(self, images):
        return self.head(self.layers(images))


IMAGES = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) // 3
TWO_BATCHES = list(zip(IMAGES.split(6), LABELS.split(6)))
SCALES = (1.0, 0.5**0.5)


def with_dots(**settings) -> RetrievalModule:
    torch.manual_seed(3)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return RetrievalModule(Dots(), SmoothAPLoss(tau=0.1), optimizer=sgd, **settings)


def predicted(model):
    batches = trainer().predict(model, DataLoader(TWO_BATCHES, batch_size=None))
    return torch.cat([batch["embeddings"] for batch in batches])


def test_evaluation_and_prediction_take_scales_and_whitening():
    model = with_dots(eval_scales=SCALES, whitening=PCAWhitening(dim=3))
    with torch.no_grad():
        plain = multi_scale(model.embedder.eval(), IMAGES, SCALES)
    with pytest.warns(UserWarning, match="nothing has been learned yet"):
        torch.testing.assert_close(predicted(model), plain)  # not yet whitened
    model.whitening.fit(plain)
    expected = model.whitening(plain)
    torch.testing.assert_close(predicted(model), expected)
    with torch.no_grad():
        batch = {"images": IMAGES, "labels": LABELS}
        for step in (model.validation_step, model.test_step):
            torch.testing.assert_close(step(batch, 0)["embeddings"], expected)
        torch.testing.assert_close(model.predict_step(IMAGES, 0)["embeddings"], expected)
        torch.testing.assert_close(model.embed(IMAGES, whiten=False), plain)
        model = with_dots()
        assert torch.equal(model.embed(IMAGES), model(IMAGES))


def test_embeddings_that_a_declared_whitening_does_not_change_are_warned_of():
    """In the validation of a fit, and in an evaluation."""
    model = with_dots(whitening=SupervisedWhitening(dim=3))
    words, evaluation = "nothing has been learned yet", [RetrievalEvaluation(ks=(1,))]
    assert warnings_with(words, fit, model, TWO_BATCHES, TWO_BATCHES, callbacks=evaluation)
    run = trainer(callbacks=evaluation)
    assert warnings_with(words, run.validate, model, DataLoader(TWO_BATCHES, batch_size=None), verbose=False)
    model.whitening.fit(model.embedder(IMAGES).detach(), LABELS)
    assert not warnings_with(words, model.embed, IMAGES)


def test_training_is_the_same_with_scales_and_whitening():
    whitening = PCAWhitening().fit(torch.randn(20, 4))
    plain, evaluated = with_dots(), with_dots(eval_scales=SCALES, whitening=whitening)
    for model in (plain, evaluated):
        fit(model, TWO_BATCHES)
    assert all(map(torch.equal, plain.embedder.parameters(), evaluated.embedder.parameters()))


def test_the_checkpoint_holds_scales_their_pooling_and_whitening(tmp_path):
    whitening = PCAWhitening(dim=3, power=0.25)
    model = with_dots(eval_scales=SCALES, eval_scales_pooling="gem", whitening=whitening)
    with torch.no_grad():
        gem = multi_scale(model.embedder.eval(), IMAGES, SCALES, p=3.0, eps=1e-6)
        assert torch.equal(model.embed(IMAGES, whiten=False), gem)
    assert not torch.allclose(gem, multi_scale(model.embedder, IMAGES, SCALES), atol=1e-3)
    model.whitening.fit(gem)
    fit(model, TWO_BATCHES).save_checkpoint(tmp_path / "model.ckpt")
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True, strict=True)
    assert (loaded.eval_scales, loaded.eval_scales_pooling) == (SCALES, "gem")
    assert (loaded.whitening.dim, loaded.whitening.power) == (3, 0.25)
    with torch.no_grad():
        assert torch.equal(loaded.eval().embed(IMAGES), model.eval().embed(IMAGES))


def test_a_checkpoint_without_whitening_gets_one(tmp_path):
    fit(with_dots(), TWO_BATCHES).save_checkpoint(tmp_path / "model.ckpt")
    settings = {"whitening": PCAWhitening(), "eval_scales": (1.0, 2.0)}
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True, **settings)
    assert loaded.whitening.learned is None
    assert loaded.eval_scales == (1.0, 2.0)
