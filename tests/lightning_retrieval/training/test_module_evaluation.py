"""RetrievalModule with several scales and whitening: in evaluation, prediction and checkpoints, not in training."""

import functools

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import PCAWhitening, RetrievalModule, SmoothAPLoss, multi_scale


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
BATCHES = [{"images": x, "labels": y, "ids": torch.tensor(i)} for i, (x, y) in enumerate(zip(IMAGES, LABELS))]
SCALES = (1.0, 0.5**0.5)


def module(**settings) -> RetrievalModule:
    torch.manual_seed(3)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return RetrievalModule(Dots(), SmoothAPLoss(tau=0.1), optimizer=sgd, **settings)


def trainer(folder, **kwargs) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **kwargs},
    )


def loader() -> DataLoader:
    return DataLoader(BATCHES, batch_size=6)


def test_evaluation_and_prediction_take_scales_and_whitening(tmp_path):
    model = module(eval_scales=SCALES, whitening=PCAWhitening(dim=3))
    with torch.no_grad():
        plain = multi_scale(model.embedder.eval(), IMAGES, SCALES)
    predicted = trainer(tmp_path).predict(model, loader())
    torch.testing.assert_close(torch.cat([batch["embeddings"] for batch in predicted]), plain)  # not yet whitened
    model.whitening.fit(plain)
    expected = model.whitening(plain)
    predicted = trainer(tmp_path).predict(model, loader())
    torch.testing.assert_close(torch.cat([batch["embeddings"] for batch in predicted]), expected)
    with torch.no_grad():
        batch = {"images": IMAGES, "labels": LABELS}
        for step in (model.validation_step, model.test_step):
            torch.testing.assert_close(step(batch, 0)["embeddings"], expected)
        torch.testing.assert_close(model.predict_step(IMAGES, 0)["embeddings"], expected)
        torch.testing.assert_close(model.embed(IMAGES, whiten=False), plain)


def test_the_pooling_of_the_scales_is_chosen_and_kept_in_the_checkpoint(tmp_path):
    model = module(eval_scales=SCALES, eval_scales_pooling="gem")
    with torch.no_grad():
        mean = multi_scale(model.embedder.eval(), IMAGES, SCALES)
        gem = multi_scale(model.embedder, IMAGES, SCALES, p=3.0, eps=1e-6)
        assert torch.equal(model.embed(IMAGES), gem)
    assert not torch.allclose(mean, gem, atol=1e-3)
    run = trainer(tmp_path)
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.eval_scales_pooling == "gem"
    assert module().eval_scales_pooling == "mean"


def test_one_scale_leaves_embeddings_as_they_are():
    model = module()
    with torch.no_grad():
        assert torch.equal(model.embed(IMAGES), model(IMAGES))


def test_training_is_the_same_with_and_without(tmp_path):
    whitening = PCAWhitening().fit(torch.randn(20, 4))
    weights = []
    for settings in ({}, {"eval_scales": SCALES, "whitening": whitening}):
        model = module(**settings)
        trainer(tmp_path).fit(model, loader())
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_the_checkpoint_holds_scales_and_whitening(tmp_path):
    model = module(eval_scales=SCALES, whitening=PCAWhitening(dim=3, power=0.25))
    with torch.no_grad():
        model.whitening.fit(model.embed(IMAGES, whiten=False))
    run = trainer(tmp_path)
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True, strict=True)
    assert (loaded.eval_scales, loaded.whitening.dim, loaded.whitening.power) == (SCALES, 3, 0.25)
    with torch.no_grad():
        assert torch.equal(loaded.eval().embed(IMAGES), model.eval().embed(IMAGES))
    assert loaded.embed(IMAGES).shape == (12, 3)


def test_a_checkpoint_from_before_gets_a_whitening(tmp_path):
    run, model = trainer(tmp_path), module()
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "model.ckpt")
    loaded = RetrievalModule.load_from_checkpoint(
        tmp_path / "model.ckpt", weights_only=True, whitening=PCAWhitening(), eval_scales=(1.0, 2.0)
    )
    assert loaded.whitening.learned is None
    assert loaded.eval_scales == (1.0, 2.0)
