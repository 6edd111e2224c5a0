"""The base class of data modules: its arguments, the sampler of the training batches, the loaders, and `check`."""

import inspect
import re
import typing

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_retrieval import datamodules
from lightning_retrieval.datamodules import (
    AllClassesSampler,
    Glyphs,
    GlyphScenes,
    ImageFolder,
    PascalVOC,
    PKSampler,
    RetrievalDataModule,
)
from lightning_retrieval.datamodules.base import RetrievalSettings
from lightning_retrieval.datamodules.detection.boxes import BoxDataModule, DetectionDataModule, DetectionSettings
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from tests.datamodules.trees_more import QUICK, fit_and_validate, write_folders


def test_the_default_sampler_is_a_pk_sampler():
    data = Glyphs(classes_per_batch=5, samples_per_class=3, seed=7)
    sampler = data.train_sampler()
    assert type(sampler) is PKSampler
    assert (sampler.classes_per_batch, sampler.samples_per_class, sampler.seed) == (5, 3, 7)
    assert data.train_dataloader().batch_sampler.batch_sampler.class_sizes.tolist() == sampler.class_sizes.tolist()


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
    data = ImageFolder(tmp_path, sampler=sampler, **QUICK)
    assert data.train_sampler() is sampler
    assert next(iter(data.train_dataloader()))["ids"].tolist() == [0, 1, 3, 4]
    assert 0 < fit_and_validate(data)["val/mAP"] <= 1


@pytest.mark.refusal
def test_a_sampler_made_with_other_labels_raises(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    sampler = PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)
    with pytest.raises(ValueError, match=r"^ImageFolder: `sampler` must .* the 6 training images, got one made with 4"):
        ImageFolder(tmp_path, sampler=sampler, **QUICK).train_dataloader()


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


# --- signatures and unknown arguments


MODULES = [
    thing
    for thing in (getattr(datamodules, name) for name in datamodules.__all__)
    if isinstance(thing, type) and issubclass(thing, (RetrievalDataModule, DetectionDataModule))
]


class Photos(ImageFolder):
    """A data module of a user."""

    def __init__(self, root, tidy=True, **settings):
        super().__init__(root, **settings)
        self.tidy = tidy


@pytest.mark.parametrize("kind", [*MODULES, Photos])
def test_a_signature_shows_every_argument(kind):
    shown = inspect.signature(kind).parameters
    kinds = {parameter.kind for parameter in shown.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    for base, settings in ((ImageDataModule, ImageSettings), (BoxDataModule, DetectionSettings)):
        if issubclass(kind, base):
            assert settings.__annotations__.keys() <= shown.keys()


def test_the_arguments_that_a_signature_shows_have_their_defaults(tmp_path):
    data = Photos(tmp_path)
    shown = inspect.signature(Photos).parameters
    assert list(shown)[:3] == ["root", "tidy", "test_fraction"]
    assert len(shown) == 29
    for name, parameter in shown.items():
        if name not in ("root", "train_transform", "eval_transform", "seed"):
            assert getattr(data, name) == parameter.default, name


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (RetrievalSettings, RetrievalDataModule),
        (ImageSettings, ImageDataModule),
        (DetectionSettings, DetectionDataModule),
    ],
)
def test_type_checkers_see_the_arguments_of_the_constructor(settings, kind):
    shown = inspect.signature(kind).parameters.values()
    expected = {each.name: each.annotation for each in shown if each.kind is each.KEYWORD_ONLY}
    assert typing.get_type_hints(settings, include_extras=True) == expected


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("kind", "name", "nearest"),
    [
        (Photos, "val_share", "val_fraction"),
        (Photos, "tidied", "tidy"),
        (PascalVOC, "batchsize", "batch_size"),
        (Glyphs, "clases_per_batch", "classes_per_batch"),
    ],
)
def test_an_unknown_argument_names_the_class_and_the_nearest_argument(kind, name, nearest):
    arguments = ["data"] * (not issubclass(kind, (Glyphs, GlyphScenes)))
    with pytest.raises(TypeError, match=rf"^{kind.__name__}: has no argument `{name}`; did you mean `{nearest}`\?$"):
        kind(*arguments, **{name: 1})


@pytest.mark.refusal
def test_an_unknown_argument_without_a_near_one_lists_all():
    with pytest.raises(TypeError, match=r"^Glyphs: has no argument `xyz`; it has classes_per_batch, .*, cache_dir\.$"):
        Glyphs(xyz=1)


# --- the constructors of the readers


READERS = {
    name: getattr(datamodules, name)
    for name in datamodules.__all__
    if ".readers." in getattr(datamodules, name).__module__
}


def named_parameters(kind):
    """The parameters of a constructor, without `self` and `**settings`."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]


def settings_in_the_docstring(kind):
    """{class: names} of the sentence about `settings`."""
    entry = re.search(r"^ +settings: (.*?)\n\n", kind.__doc__, re.DOTALL | re.MULTILINE).group(1)
    groups = re.findall(r"`(\w+)` \((.*?)\)", entry, re.DOTALL)
    return {owner: re.findall(r"`(\w+)`", names) for owner, names in groups}


@pytest.mark.parametrize("name", READERS)
def test_the_docstring_names_all_settings(name):
    own = named_parameters(READERS[name])
    expected = {
        base.__name__: [parameter for parameter in named_parameters(base) if parameter not in own]
        for base in (ImageDataModule, RetrievalDataModule)
    }
    assert settings_in_the_docstring(READERS[name]) == expected


@pytest.mark.parametrize("name", READERS)
def test_only_the_root_is_positional(name):
    parameters = inspect.signature(READERS[name]).parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == ["root"]
