"""RetrievalDataModule: the sampler of the training batches, the settings of the loaders, and the counts of `check`."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules import (
    AllClassesSampler,
    CategorySampler,
    Glyphs,
    ImageFolder,
    PKSampler,
    RetrievalDataModule,
)
from tests.datamodules.trees_more import QUICK, fit_and_validate, write_folders

IGNORED = [
    "ignore:CategorySampler. .* have fewer than the:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in IGNORED]


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


class GlyphsWithAllClasses(Glyphs):
    def train_sampler(self) -> AllClassesSampler:
        return AllClassesSampler(self.train_set.labels, batch_size=2 * len(self.train_set.labels.unique()))


class RecordBatches(pl.Callback):
    """Records the ids of the images in each training batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append(batch["ids"].tolist())


def fit(data, ckpt_path=None, callbacks=(), **kwargs) -> tuple[RetrievalModule, list[list[int]]]:
    torch.manual_seed(2)
    module = RetrievalModule(nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 16)), SmoothAPLoss(tau=0.1))
    recorder = RecordBatches()
    trainer = pl.Trainer(
        **{"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 2, **kwargs},
        accelerator="cpu",
        devices=1,
        callbacks=[recorder, *callbacks],
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, recorder.batches


def first_batches(sampler, epochs: int) -> list[list[int]]:
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = iter(sampler)
        found += [next(batches) for _ in range(2)]
    return found


def test_the_default_sampler_is_a_pk_sampler():
    data = Glyphs(classes_per_batch=5, samples_per_class=3, seed=7)
    sampler = data.train_sampler()
    assert type(sampler) is PKSampler
    assert (sampler.classes_per_batch, sampler.samples_per_class, sampler.seed) == (5, 3, 7)
    assert data.train_dataloader().batch_sampler.batch_sampler.class_sizes.tolist() == sampler.class_sizes.tolist()


def test_a_subclass_can_build_its_sampler_from_the_training_set(tmp_path):
    """Train for two epochs of two steps, then again from the checkpoint after the third step."""
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


@pytest.mark.slow
def test_a_data_module_trains_on_all_classes():
    data = GlyphsWithAllClasses()
    _, (batch,) = fit(data, limit_train_batches=1, max_epochs=1)
    assert data.train_set.labels[batch].unique().tolist() == data.train_set.labels.unique().tolist()


# --- the argument `sampler`


class FixedFirstBatch(PKSampler):
    """Every epoch begins with the first images of the first two classes."""

    def draw(self, generator):
        for number, batch in enumerate(super().draw(generator)):
            yield np.array([0, 1, 3, 4]) if number == 0 else batch


def test_a_data_module_trains_with_a_sampler_object(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d", "e", "f"])
    labels = ImageFolder(tmp_path, **QUICK).train_set.labels
    sampler = FixedFirstBatch(labels, classes_per_batch=2, samples_per_class=2, seed=3)
    data = ImageFolder(tmp_path, sampler=sampler, num_workers=2, **QUICK)
    assert data.train_sampler() is sampler
    assert next(iter(data.train_dataloader()))["ids"].tolist() == [0, 1, 3, 4]
    assert 0 < fit_and_validate(data)["val/mAP"] <= 1


@pytest.mark.refusal
def test_a_sampler_made_with_other_labels_raises(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    sampler = PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)
    message = "ImageFolder: `sampler` must be made with the labels of the 6 training images, got one made with 4"
    with pytest.raises(ValueError, match=f"^{message}"):
        ImageFolder(tmp_path, sampler=sampler, **QUICK).train_dataloader()


@pytest.mark.refusal
@pytest.mark.parametrize(("sampler", "kind"), [("pkk", ValueError), (PKSampler, TypeError), (None, TypeError)])
def test_an_invalid_sampler_raises(tmp_path, sampler, kind):
    message = "`sampler` must be one of 'pk', 'category', 'all_classes', or a GlobalBatchSampler, got "
    with pytest.raises(kind, match=f"^ImageFolder: {message}"):
        ImageFolder(tmp_path, sampler=sampler)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_config_can_choose_the_sampler_by_name_or_by_class(tmp_path, by_name):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    settings = {"labels": [0, 0, 0, 1, 1, 1], "classes_per_batch": 2, "samples_per_class": 2}
    config_of_sampler = {"class_path": "lightning_retrieval.datamodules.PKSampler", "init_args": settings}
    parser = ArgumentParser()
    parser.add_subclass_arguments(RetrievalDataModule, "data")
    init = {"root": str(tmp_path), "sampler": "all_classes" if by_name else config_of_sampler, "classes_per_batch": 1}
    config = {"data": {"class_path": "lightning_retrieval.datamodules.ImageFolder", "init_args": init}}
    sampler = parser.instantiate_classes(parser.parse_object(config)).data.train_sampler()
    assert type(sampler) is (AllClassesSampler if by_name else PKSampler)
    assert by_name or (sampler.classes_per_batch, sampler.samples_per_class) == (2, 2)


# --- loading and counting


@pytest.mark.parametrize(("workers", "cuda"), [(0, False), (2, True)])
def test_memory_is_pinned_if_there_is_a_gpu_and_workers_are_persistent(tmp_path, monkeypatch, workers, cuda):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    data = ImageFolder(tmp_path, num_workers=workers, **QUICK)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()):
        assert (loader.num_workers, loader.persistent_workers, loader.pin_memory) == (workers, workers > 0, cuda)


class TwoTests(Glyphs):
    @property
    def test_set(self):
        return {"small": self.val_set, "large": super().test_set}


def test_check_counts_each_set():
    data = TwoTests()
    counts = {name: found for name, (found, _) in RetrievalDataModule.check(data).splits.items()}
    sets = {"train": data.train_set, "val": data.val_set, **{f"test/{k}": v for k, v in data.test_set.items()}}
    assert counts == {name: (len(part), len(set(part.labels.tolist()))) for name, part in sets.items()}


def test_pin_memory_and_persistent_workers_can_be_set(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for workers, settings, wanted in (
        (0, {}, (False, False)),
        (2, {}, (False, True)),
        (2, {"persistent_workers": False, "pin_memory": True}, (True, False)),
    ):
        data = Loaded(num_workers=workers, **settings)
        for loader in (data.train_dataloader(), data.test_dataloader()):
            assert (loader.pin_memory, loader.persistent_workers) == wanted
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Loaded().test_dataloader().pin_memory
    assert not Loaded(pin_memory=False).test_dataloader().pin_memory


@pytest.mark.refusal
def test_invalid_loader_settings_raise():
    with pytest.raises(ValueError, match=r"^Loaded: `persistent_workers` need workers, got num_workers=0; set it"):
        Loaded(persistent_workers=True)
    with pytest.raises(TypeError, match=r"^Loaded: `pin_memory` must be True, False or None, got 1\."):
        Loaded(pin_memory=1)


class Loaded(RetrievalDataModule):
    """A data module with eight numbers in two classes."""

    def __init__(self, **settings):
        super().__init__(classes_per_batch=2, samples_per_class=2, **settings)

    @property
    def train_set(self):
        return Numbers()

    val_set = test_set = train_set


class Numbers(list):
    labels = torch.arange(8) // 4

    def __init__(self):
        super().__init__(range(8))
