"""The base class of data modules: its arguments, the sampler of the training batches, and the loaders."""

import inspect

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_retrieval import datamodules
from lightning_retrieval.datamodules import (
    AllClassesSampler,
    DetectionDataModule,
    Glyphs,
    ImageFolder,
    PKSampler,
    RetrievalDataModule,
)
from tests.datamodules.trees_more import QUICK, fit_and_validate, write_folders

# --- the argument `sampler`


def test_the_default_sampler_is_a_pk_sampler():
    sampler = Glyphs(classes_per_batch=5, samples_per_class=3, seed=7).train_sampler()
    assert type(sampler) is PKSampler
    assert (sampler.classes_per_batch, sampler.samples_per_class, sampler.seed) == (5, 3, 7)


class FixedFirstBatch(PKSampler):
    """Every epoch begins with the first images of the first two classes."""

    def draw(self, generator):
        for number, batch in enumerate(super().draw(generator)):
            yield np.array([0, 1, 3, 4]) if number == 0 else batch


def test_a_data_module_trains_with_a_sampler_object(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d", "e", "f"])
    labels = ImageFolder(tmp_path, **QUICK).train_set.labels
    sampler = FixedFirstBatch(labels, classes_per_batch=2, samples_per_class=2, seed=3)
    data = ImageFolder(tmp_path, sampler=sampler, **QUICK)
    assert data.train_sampler() is sampler
    assert next(iter(data.train_dataloader()))["ids"].tolist() == [0, 1, 3, 4]
    assert 0 < fit_and_validate(data)["val/mAP"] <= 1


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


class Numbers(list):
    labels = torch.arange(8) // 4

    def __init__(self):
        super().__init__(range(8))


class Loaded(RetrievalDataModule):
    """A data module with eight numbers in two classes, and two test sets."""

    def __init__(self, **settings):
        super().__init__(classes_per_batch=2, samples_per_class=2, **settings)

    @property
    def train_set(self):
        return Numbers()

    val_set = train_set

    @property
    def test_set(self):
        return {"small": Numbers(), "large": Numbers()}


def test_check_counts_each_set():
    counts = {name: found for name, (found, _) in Loaded().check().splits.items()}
    assert counts == dict.fromkeys(["train", "val", "test/small", "test/large"], (8, 2))


def test_pin_memory_and_persistent_workers_can_be_set(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for workers, settings, wanted in (
        (0, {}, (False, False)),
        (2, {}, (False, True)),
        (2, {"persistent_workers": False, "pin_memory": True}, (True, False)),
    ):
        data = Loaded(num_workers=workers, **settings)
        for loader in (data.train_dataloader(), data.test_dataloader()["large"]):
            assert (loader.pin_memory, loader.persistent_workers) == wanted
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Loaded().train_dataloader().pin_memory
    assert not Loaded(pin_memory=False).train_dataloader().pin_memory


# --- signatures


class Photos(ImageFolder):
    """A data module of a user."""

    def __init__(self, root, tidy=True, **settings):
        super().__init__(root, **settings)
        self.tidy = tidy


def test_a_signature_shows_every_argument_with_its_default(tmp_path):
    data, shown = Photos(tmp_path), inspect.signature(Photos).parameters
    assert list(shown)[:3] == ["root", "tidy", "test_fraction"]
    assert {"image_size", "val_fraction", "classes_per_batch", "num_workers"} < shown.keys()
    for name, parameter in shown.items():
        if name not in ("root", "train_transform", "eval_transform", "seed"):
            assert getattr(data, name) == parameter.default, name
    for name in datamodules.__all__:
        kind = getattr(datamodules, name)
        if isinstance(kind, type) and issubclass(kind, (RetrievalDataModule, DetectionDataModule)):
            kinds = {parameter.kind for parameter in inspect.signature(kind).parameters.values()}
            assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}, name
