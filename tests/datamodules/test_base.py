"""What all data modules share: one method decides about the training batches."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import AllClassesSampler, CategorySampler, Glyphs, PKSampler

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '(train|val)_dataloader' does not have many workers:UserWarning",
    "ignore:GPU available but not used:UserWarning",
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning",
    "ignore:CategorySampler. fewer classes than the 4 that a batch takes of a category:UserWarning",
    "ignore:Using ModelCheckpoint with manual optimization and every_n_train_steps:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]


class GlyphsByCategory(Glyphs):
    def train_sampler(self) -> CategorySampler:
        names = np.array(self.train_set.categories)[self.train_set.labels]
        return CategorySampler(
            self.train_set.labels,
            np.unique(names, return_inverse=True)[1],
            classes_per_batch=self.classes_per_batch,
            samples_per_class=self.samples_per_class,
            seed=self.seed,
        )


class GlyphsOfAllClasses(Glyphs):
    def train_sampler(self) -> AllClassesSampler:
        return AllClassesSampler(self.train_set.labels, batch_size=2 * len(self.train_set.labels.unique()))


class Noting(pl.Callback):
    """Notes the images that arrive."""

    def __init__(self):
        self.arrived = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.arrived.append(batch["ids"].tolist())


def fit(data, ckpt_path=None, callbacks=(), **kwargs) -> tuple[RetrievalModule, list[list[int]]]:
    torch.manual_seed(2)
    module = RetrievalModule(nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 16)), SmoothAPLoss(tau=0.1))
    noting = Noting()
    trainer = pl.Trainer(
        **{"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 2, **kwargs},
        accelerator="cpu",
        devices=1,
        callbacks=[noting, *callbacks],
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, noting.arrived


def first_batches(sampler, epochs: int) -> list[list[int]]:
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = iter(sampler)
        found += [next(batches) for _ in range(2)]
    return found


def test_the_sampler_is_a_pk_sampler_where_nothing_is_said():
    data = Glyphs(classes_per_batch=5, samples_per_class=3, seed=7)
    sampler = data.train_sampler()
    assert type(sampler) is PKSampler
    assert (sampler.classes_per_batch, sampler.samples_per_class, sampler.seed) == (5, 3, 7)
    assert data.train_dataloader().batch_sampler.batch_sampler.class_sizes.tolist() == sampler.class_sizes.tolist()


def test_a_data_module_trains_with_the_sampler_of_its_method(tmp_path):
    """Two epochs of two steps; then again from the checkpoint after the third."""
    data = GlyphsByCategory(classes_per_batch=8, samples_per_class=3, seed=1)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module, arrived = fit(data, callbacks=[save])
    assert arrived == first_batches(data.train_sampler(), 2)
    for batch in arrived:
        labels = data.train_set.labels[batch]
        assert len({data.train_set.categories[label] for label in labels}) == 2
    again = GlyphsByCategory(classes_per_batch=8, samples_per_class=3, seed=1)
    resumed, arrived_again = fit(again, ckpt_path=tmp_path / "step=3.ckpt")
    assert arrived_again == arrived[3:]
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), module.parameters(), strict=True))


def test_a_data_module_trains_on_all_classes():
    data = GlyphsOfAllClasses()
    _, (batch,) = fit(data, limit_train_batches=1, max_epochs=1)
    assert data.train_set.labels[batch].unique().tolist() == data.train_set.labels.unique().tolist()
