"""LearnWhitening: each checkpoint has the whitening that its own weights give on the files of the training set."""

import functools
import os
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_retrieval import (
    PCAWhitening,
    RetrievalMetrics,
    RetrievalModule,
    SmoothAPLoss,
    SupervisedWhitening,
    TwoNetworks,
)
from lightning_retrieval.callbacks import LearnWhitening, RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs, ImageFolder, Pairs
from tests.quiet_trainer import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:RetrievalEvaluation. val metrics cover 2 of:UserWarning")

PIXELS = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
NOISY = v2.Compose([PIXELS, v2.GaussianNoise(sigma=0.5)])


SIZES = {"train": (4, 5, 4, 5, 4, 5), "test": (4, 4, 4)}  # images of each class
LABELS = torch.arange(6).repeat_interleave(torch.tensor(SIZES["train"]))


class Dots(nn.Module):
    """A small network whose embeddings depend on batch norm and, in training, on dropout."""

    def __init__(self, dim=5):
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(6 * 6 * 8, dim)

    def forward(self, images):
        return self.head(self.layers(images))


def module(**settings) -> RetrievalModule:
    torch.manual_seed(3)
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    settings = {"whitening": PCAWhitening(dim=3), **settings}
    return RetrievalModule(Dots(), SmoothAPLoss(tau=0.1), optimizer=sgd, **settings)


def trainer(folder, *callbacks, devices=1, **kwargs) -> pl.Trainer:
    return quiet_trainer(
        devices=devices,
        strategy="auto" if devices == 1 else "ddp",
        callbacks=list(callbacks),
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"logger": False, "max_epochs": 1, "enable_checkpointing": False, **kwargs},
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files of 27 training images of 6 classes and 12 test images of 3."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split, sizes in SIZES.items():
        for label, size in enumerate(sizes):
            folder = root / split / f"{split}{label}"
            folder.mkdir(parents=True)
            middle = random.integers(0, 256, (8, 10, 3))
            for i in range(size):
                noise = random.integers(-60, 60, (8, 10, 3))
                Image.fromarray((middle + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root


def folder_data(root) -> ImageFolder:
    batches = {"classes_per_batch": 4, "samples_per_class": 3, "eval_batch_size": 5, "seed": 1}
    return ImageFolder(root, train_transform=NOISY, eval_transform=PIXELS, **batches)


def by_hand(model, root, split, **settings) -> torch.Tensor:
    """Embeddings of a split from its files, in the order of their names."""
    images = [PIXELS(Image.open(path)) for path in sorted(root.glob(f"{split}/*/*.png"))]
    with torch.no_grad():
        return model.eval().embed(torch.stack(images), **settings)


def assert_same(learned, expected) -> None:
    for part, other in zip(learned, expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-5)


def test_each_checkpoint_contains_the_whitening_of_its_weights(tmp_path, root):
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val/mAP", save_top_k=-1)
    callbacks = [RetrievalEvaluation(ks=(1,)), LearnWhitening(), saving]
    run, model = trainer(tmp_path, *callbacks, max_epochs=3, enable_checkpointing=True), module()
    run.fit(model, datamodule=folder_data(root))
    seen = []
    for epoch in range(3):
        loaded = RetrievalModule.load_from_checkpoint(tmp_path / f"epoch={epoch}.ckpt", weights_only=True, strict=True)
        rows = by_hand(loaded, root, "train", whiten=False)
        fresh = PCAWhitening(dim=3).fit(rows)
        assert_same(loaded.whitening.learned, fresh.learned)
        seen.append(loaded.whitening.learned.mean)
        predicted = trainer(tmp_path).predict(loaded, datamodule=folder_data(root), weights_only=True)
        found = torch.cat([batch["embeddings"] for batch in predicted])
        torch.testing.assert_close(found, fresh(by_hand(loaded, root, "test", whiten=False)), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(seen[0], seen[2], atol=1e-3)
    metrics = RetrievalMetrics()
    metrics.update(by_hand(model, root, "test"), torch.arange(12) // 4)
    assert run.callback_metrics["val/mAP"].item() == pytest.approx(metrics.compute()["mAP"].item())


def test_sanity_check_is_not_whitened(tmp_path, root):
    class Watch(pl.Callback):
        def on_sanity_check_end(self, trainer, pl_module):
            self.learned = pl_module.whitening.learned

    watch = Watch()
    trainer(tmp_path, LearnWhitening(), watch).fit(module(), datamodule=folder_data(root))
    assert watch.learned is None


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_other_stages_learn_only_if_the_checkpoint_has_no_whitening(tmp_path, root, stage):
    model, data = module(), folder_data(root)
    getattr(trainer(tmp_path, LearnWhitening()), stage)(model, datamodule=data)
    learned = model.whitening.learned
    assert_same(learned, PCAWhitening(dim=3).fit(by_hand(model, root, "train", whiten=False)).learned)
    with torch.no_grad():
        model.embedder.head.weight.mul_(2)
    getattr(trainer(tmp_path, LearnWhitening()), stage)(model, datamodule=data)
    assert model.whitening.learned is learned


def test_images_are_spread_evenly_and_embedded_at_the_scales_of_evaluation(tmp_path, root):
    model = module(eval_scales=(1.0, 1.0))
    trainer(tmp_path, LearnWhitening(images=7)).validate(model, datamodule=folder_data(root), verbose=False)
    rows = by_hand(model, root, "train", whiten=False)[[0, 3, 7, 11, 15, 19, 23]]  # of 27
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(7))  # embeddings of several scales are normalised
    assert_same(model.whitening.learned, PCAWhitening(dim=3).fit(rows).learned)


def test_glyphs_are_not_augmented(tmp_path):
    data = Glyphs(classes_per_batch=4, samples_per_class=2, eval_batch_size=64)
    model = RetrievalModule(
        nn.Sequential(nn.Flatten(), nn.Linear(1024, 4)), SmoothAPLoss(), whitening=PCAWhitening(dim=3)
    )
    run = trainer(tmp_path, LearnWhitening(images=100), limit_train_batches=1, limit_val_batches=1)
    run.fit(model, datamodule=data)
    plain = Glyphs(augment=False).train_set
    images = torch.stack([plain[i * len(plain) // 100]["images"] for i in range(100)])
    with torch.no_grad():
        assert_same(model.whitening.learned, PCAWhitening(dim=3).fit(model.eval()(images)).learned)
    assert data.train_set.augment


def test_of_two_sides_the_candidates_are_learned_from_and_both_are_whitened(tmp_path, root):
    sides = [ImageFolder(root, train_transform=NOISY, eval_transform=PIXELS) for _ in range(2)]
    data = Pairs(*sides, classes_per_batch=4, samples_per_class=3, eval_batch_size=5)
    model = module(sides=TwoNetworks(Dots()))
    run = trainer(tmp_path, LearnWhitening(images=20), RetrievalEvaluation(ks=(1,)))
    run.fit(model, datamodule=data)
    rows = by_hand(model, root, "train", whiten=False)[torch.arange(20) * 27 // 20]
    fresh = PCAWhitening(dim=3).fit(rows)
    assert_same(model.whitening.learned, fresh.learned)
    candidates = by_hand(model, root, "test")
    images = [PIXELS(Image.open(path)) for path in sorted(root.glob("test/*/*.png"))]
    with torch.no_grad():
        queries = model.embed_queries(torch.stack(images))
        torch.testing.assert_close(queries, fresh(model.embed_queries(torch.stack(images), whiten=False)))
    metrics = RetrievalMetrics()
    roles = torch.tensor([1, 2]).repeat_interleave(12)
    metrics.update(torch.cat([queries, candidates]), torch.arange(12).repeat(2) // 4, roles=roles)
    assert run.callback_metrics["val/mAP"].item() == pytest.approx(metrics.compute()["mAP"].item())


def test_loaders_without_a_data_module(tmp_path, root):
    data, model = folder_data(root), module()
    images = [{**item, "images": item["images"][:, :, :10]} for item in data.test_set]
    loader = DataLoader(images, batch_size=12)
    trainer(tmp_path, LearnWhitening()).fit(model, loader, DataLoader(images, batch_size=6))
    assert_same(model.whitening.learned, PCAWhitening(dim=3).fit(by_hand(model, root, "test", whiten=False)).learned)


def test_learning_does_not_change_the_training(tmp_path, root):
    weights = []
    for callbacks in ([], [LearnWhitening()]):
        model = module(whitening=PCAWhitening(dim=3) if callbacks else None)
        trainer(tmp_path, *callbacks, max_epochs=2).fit(model, datamodule=folder_data(root))
        weights.append(torch.cat([value.detach().flatten() for value in model.embedder.state_dict().values()]))
    assert torch.equal(*weights)


def test_fit_without_validation_gives_a_warning(tmp_path, root):
    run = trainer(tmp_path, LearnWhitening(), limit_val_batches=0)
    with pytest.warns(UserWarning, match="no whitening was learned"):
        run.fit(module(), datamodule=folder_data(root))


def fit_on_rank(rank, world_size, root, folder):
    """One process of the fits below; returns what each whitening has learned."""
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    learned = {}
    for name, whitening in {"pca": PCAWhitening(dim=3), "pairs": SupervisedWhitening(dim=3)}.items():
        run, model = trainer(folder, LearnWhitening(images=26), devices=world_size), module(whitening=whitening)
        run.fit(model, datamodule=folder_data(root))
        run.save_checkpoint(folder / f"{name}.ckpt", weights_only=True)
        learned[name] = [part.tolist() for part in model.whitening.learned]
    return learned


@pytest.mark.slow
def test_two_processes_learn_the_same(tmp_path, root, run_processes):
    """Their batch norms differ after training; the evaluation, and so the whitening, uses those of rank 0.

    The images of a pair may be on different processes.
    """
    learned = run_processes(fit_on_rank, 2, root, tmp_path)
    assert learned[0] == learned[1]
    chosen = [i * 27 // 26 for i in range(26)]
    for name, fresh in {"pca": PCAWhitening(dim=3), "pairs": SupervisedWhitening(dim=3)}.items():
        path = tmp_path / f"{name}.ckpt"
        loaded = RetrievalModule.load_from_checkpoint(path, embedder=Dots(), weights_only=True)
        rows = by_hand(loaded, root, "train", whiten=False)[chosen]
        assert_same(loaded.whitening.learned, fresh.fit(rows, LABELS[chosen]).learned)
