"""The signature of a data module shows every argument that it takes, and an error names an unknown one's nearest."""

import inspect
import typing

import pytest

from lightning_retrieval import datamodules
from lightning_retrieval.datamodules import Glyphs, GlyphScenes, ImageFolder, PascalVOC, RetrievalDataModule
from lightning_retrieval.datamodules.base import RetrievalSettings
from lightning_retrieval.datamodules.detection.boxes import BoxDataModule, DetectionDataModule, DetectionSettings
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings

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
    assert len(shown) == 27
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
    assert typing.get_type_hints(settings) == expected


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("kind", "name", "nearest"),
    [
        (ImageFolder, "val_share", "val_fraction"),
        (Photos, "val_share", "val_fraction"),
        (Photos, "tidied", "tidy"),
        (PascalVOC, "batchsize", "batch_size"),
        (type("Scenes", (GlyphScenes,), {}), "batchsize", "batch_size"),
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
