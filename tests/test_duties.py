"""What everything public owes its user, by a table: a new public name without an entry fails.

Executed examples are run by test_docs.py; here it is checked that each has one.
"""

import copy
import importlib
import inspect
import io
import json
import pickle
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import Metric

from lightning_retrieval.datamodules import ImageIndex, reference_transform
from lightning_retrieval.datamodules.glyphs.glyph_images import load_glyph_images
from lightning_retrieval.datamodules.samplers.pk import PKSampler
from lightning_retrieval.losses import RetrievalLoss, SmoothAPLoss, SupAPLoss

TRANSFORM = reference_transform("plain", train=False)
PACKAGES = json.loads(Path(__file__).with_name("api_surface.json").read_text())


@dataclass
class Duties:
    """One public name: how it is made, and which duties it does not have, each with the reason.

    Args:
        settings: keyword arguments, with values other than the defaults where there are any.
        shown: settings that `repr` shows; all plain ones where not given.
        without: {duty: reason}.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] | None = None
    without: dict[str, str] = field(default_factory=dict)


ABSTRACT = "an abstract base: what is made and run is its subclasses"
FUNCTION = "a function"
NEVER_MADE = {"make": ABSTRACT, "example": ABSTRACT}
ONLY_CALLED = {"make": FUNCTION}

TABLE = {
    # lightning_retrieval and lightning_retrieval.losses
    "RetrievalLoss": Duties(without=NEVER_MADE),
    "PairLoss": Duties(without=NEVER_MADE),
    "SmoothAPLoss": Duties({"tau": 0.1, "reduction": "sum", "class_balanced": True, "include_self": False}),
    "FastAPLoss": Duties({"num_bins": 7, "reduction": "sum", "class_balanced": True}),
    "QuantizedAPLoss": Duties({"num_bins": 7, "low": 0.0, "high": 0.9, "tie_aware": "full", "class_balanced": True}),
    "BlackboxAPLoss": Duties({"lambda_": 2.0, "margin": 0.1, "class_balanced": True}),
    "BlackboxRecallLoss": Duties({"lambda_": 2.0, "margin": 0.1, "weighting": "loglog", "reduction": "sum"}),
    "BlackboxMAPLoss": Duties({"lambda_": 2.0, "margin": 0.1, "interclass_coef": 0.3, "batch_memory": 2}),
    "SupAPLoss": Duties({"tau": 0.1, "rho": 50.0, "delta": 0.1, "offset": 1.44, "start": 0.4}),
    "CalibrationLoss": Duties({"alpha": 0.8, "beta": 0.5, "reduction": "sum"}),
    "ROADMAPLoss": Duties({"lambda_": 0.3, "sup_ap": SupAPLoss(tau=0.1), "calibration": None}, shown=()),  # the weights
    "HAPLoss": Duties({"alpha": 2.0, "tau": 0.1, "offset": 1.44, "hrank_slopes": (25.0, 0.5, 10.0)}),
    "RecallAtKLoss": Duties({"ks": (1, 3), "tau_rank": 0.1, "tau_k": (0.5, 2.0)}),
    "WeightedSum": Duties({"losses": {"ap": (1.0, SmoothAPLoss()), "recall": (0.5, SupAPLoss())}}, shown=()),
    "blackbox_rank": Duties(without=ONLY_CALLED),
    "chunked_backward": Duties(without=ONLY_CALLED),
    "largest_chunk_size": Duties(without=ONLY_CALLED),
    "CrossBatchMemory": Duties({"size": 12, "start_step": 3}),
    "RetrievalModule": Duties(
        {"embedder": nn.Linear(8, 4), "loss": SmoothAPLoss(tau=0.1), "chunk_size": 16, "seed": 3},
        shown=(),  # its repr is Lightning's: the parts; `hparams` holds the settings
    ),
    # lightning_retrieval.ranking.expansion
    "PCAWhitening": Duties({"dim": 3, "power": 0.25}),
    "QueryExpansion": Duties({"alpha": 3.0, "k": 5}),
    "DatabaseAugmentation": Duties({"alpha": 3.0, "k": 5}),
    "query_expansion": Duties(without=ONLY_CALLED),
    "database_augmentation": Duties(without=ONLY_CALLED),
    "multi_scale": Duties(without=ONLY_CALLED),
    "RetrievalIndex": Duties(
        {"dim": 8, "factory": "HNSW8", "parameters": "efSearch=20", "shards": 2},
        without={"copy": "faiss' objects do not compare; test_index.py copies an index and searches in both"},
    ),
    # lightning_retrieval.metrics
    "EmbeddingMetric": Duties(without=NEVER_MADE),
    "RetrievalMetrics": Duties({"ks": (1, 7), "map_ks": (5,), "alpha": 2.0}),
    "RandomGalleryMetrics": Duties({"ks": (1, 7), "draws": 3, "seed": 4}),
    "RevisitedMetrics": Duties(
        {
            "easy": {0: [1], 1: [0], 2: [3], 3: [2]},
            "hard": {0: [2], 1: [3], 2: [0], 3: [0]},
            "junk": {0: [3], 1: [], 2: [], 3: [1]},
            "ks": (1, 3),
        }
    ),
    # lightning_retrieval.models
    "Embedder": Duties(
        {"backbone": "glyph_net", "embedding_dim": 12, "pooling": "avg", "layer_norm": True, "freeze_batch_norm": True},
        shown=("embedding_dim", "pooling", "layer_norm", "freeze_batch_norm"),  # and backbone_name='glyph_net'
    ),
    "GeM": Duties({"p": 2.5, "eps": 1e-3, "learnable": False}),
    "GlobalAvgPool": Duties(),
    "GlobalMaxPool": Duties(),
    "GlyphNet": Duties({"width": 4, "in_channels": 3}, shown=()),  # its repr is its layers
    "gem": Duties(without=ONLY_CALLED),
    # lightning_retrieval.callbacks
    "LearnWhitening": Duties({"images": 50}),
    "RetrievalEvaluation": Duties({"ks": (1, 7), "before_fit": True}),
    "RetrievalGallery": Duties({"queries": 3, "k": 5, "every_n_epochs": 2, "order": "hardest"}),
    "RetrievalWandbLogger": Duties(
        {"project": "products", "id": "a1", "artifact": False},
        without={"copy": "to copy it Lightning begins the run"},
    ),
    "APMonitor": Duties(),
    "PrecisionRecallCurve": Duties({"every_n_epochs": 2}),
    "ScoreHistogram": Duties({"bins": 50, "every_n_epochs": 2}),
    "TrainingCurve": Duties({"metric": "val/R@1"}),
    # lightning_retrieval.datamodules
    "GlobalBatchSampler": Duties(without=NEVER_MADE),
    "PKSampler": Duties({"labels": [0, 0, 1, 1, 1], "classes_per_batch": 2, "samples_per_class": 2, "seed": 5}),
    "AllClassesSampler": Duties({"labels": [0, 0, 1, 1, 1], "batch_size": 4, "seed": 5}),
    "CategorySampler": Duties(
        {
            "labels": [0, 0, 1, 1, 1],
            "categories": [4, 4, 7, 7, 7],
            "classes_per_batch": 2,
            "samples_per_class": 2,
            "seed": 5,
        }
    ),
    "RetrievalDataLoader": Duties(
        {
            "dataset": range(4),
            "batch_sampler": PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2),
            "epoch": 2,
        }
    ),
    "ImageDataModule": Duties(without=NEVER_MADE),
    "ImageIndex": Duties({"paths": ["a.jpg", "é.jpg"], "labels": [0, 1], "roles": [1, 2], "names": ["x", "y"]}),
    "ImageSet": Duties(
        {"index": ImageIndex(["a.jpg"], [0]), "root": ".", "transform": TRANSFORM, "on_error": "skip"},
    ),
    "DataReport": Duties({"splits": {"train": ((2, 1), ())}, "missing_files": ["a.jpg"], "problems": ["a sentence"]}),
    "reference_transform": Duties(without=ONLY_CALLED),
    "CUB200": Duties({"root": "CUB_200_2011", "boxes": True, "val_fraction": 0.1}),
    "IJBC": Duties({"root": "IJB-C", "least_instances": 2, "cache_dir": "cache"}),
    "INaturalist": Duties({"root": "inat", "levels": ("species", "genus"), "transform": "smooth_ap"}),
    "ImageFolder": Duties({"root": "images", "test_fraction": 0.3, "categories": True, "split_seed": 2}),
    "ImageTable": Duties({"root": "images", "table": "table.csv", "on_error": "skip"}),
    "InShop": Duties({"root": "In-shop", "high_res": True, "samples_per_class": 3}),
    "LandmarksClean": Duties({"root": "landmarks"}),
    "RevisitedOxford": Duties({"root": "data/roxford5k", "distractors": "data/revisitop1m", "crop_queries": False}),
    "RevisitedParis": Duties({"root": "data", "image_size": 512, "transform": "plain", "eval_batch_size": 8}),
    "StanfordOnlineProducts": Duties({"root": "sop", "sampler": "category", "num_workers": 2}),
    "VGGFace2": Duties({"root": "vggface2", "cache_dir": "cache"}),
    "VehicleID": Duties({"root": "VehicleID_V1.0", "protocol": "reid", "select_by_vid": True}),
    "item_generator": Duties(without=ONLY_CALLED),
    "resume_position": Duties(without=ONLY_CALLED),
    "RetrievalDataModule": Duties(without=NEVER_MADE),
    "Glyphs": Duties({"classes_per_batch": 8, "samples_per_class": 2, "num_workers": 1, "augment": False}),
    "GlyphDataset": Duties({"glyphs": load_glyph_images, "split": "val", "augment": True, "channels": 3}),
}


def public():
    """{name: object} of all packages; a name that two of them give is one object."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            assert found.setdefault(name, getattr(module, name)) is getattr(module, name), name
    return found


PUBLIC = public()


def make(name):
    settings = {key: value() if value is load_glyph_images else value for key, value in TABLE[name].settings.items()}
    return PUBLIC[name](**copy.deepcopy(settings))


def with_duty(duty, kind=object):
    """The names that have this duty: all that are made, where it is not `example`, and of this kind."""

    def has(name):
        excused = {duty} if duty in ("docstring", "example") else {duty, "make"}
        entry, thing = TABLE.get(name, Duties()), PUBLIC[name]
        return not excused & entry.without.keys() and (
            kind is object or (isinstance(thing, type) and (kind is type or issubclass(thing, kind)))
        )

    return pytest.mark.parametrize("name", sorted(filter(has, PUBLIC)))


def plain(value):
    return isinstance(value, (bool, int, float, str, type(None), list, tuple))


def state(thing):
    """What has to be the same in a copy: state dict, or plain attributes."""
    if isinstance(thing, nn.Module):
        values = thing.state_dict().items()  # tensors, and what a module adds of its own
        return {key: getattr(value, "tolist", lambda v=value: v)() for key, value in values} | {"repr": repr(thing)}
    attributes = getattr(thing, "__dict__", {})
    return {"value": int(thing) if isinstance(thing, int) else None} | {
        key: value for key, value in attributes.items() if plain(value)
    }


def tensors(module):
    return [value for value in module.state_dict().values() if isinstance(value, torch.Tensor)]


def sections(docstring):
    """{title: text} of a Google docstring."""
    parts = re.split(r"^(\w+):\n(?=    |\n)", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_every_public_name_has_an_entry():
    missing, gone = PUBLIC.keys() - TABLE.keys(), TABLE.keys() - PUBLIC.keys()
    assert not missing, f"write an entry in TABLE for {sorted(missing)}"
    assert not gone, f"no longer public: {sorted(gone)}"


@with_duty("docstring")
def test_docstring(name):
    docstring = PUBLIC[name].__doc__
    assert docstring
    assert docstring.strip().splitlines()[0].rstrip().endswith((".", ":", ";", ","))
    wanted = [p for p in inspect.signature(PUBLIC[name]).parameters if p not in ("args", "kwargs")]
    documented = re.findall(r"^    (\w+): ", sections(docstring).get("Args", ""), flags=re.MULTILINE)
    assert [argument for argument in documented if argument != "kwargs"] == wanted


@with_duty("docstring", type)
def test_docstrings_of_methods(name):
    for method_name, method in inspect.getmembers(PUBLIC[name], inspect.isfunction):
        ours = method.__module__.startswith("lightning_retrieval")
        if method_name.startswith("_") or not ours or "Args" not in sections(method.__doc__ or ""):
            continue
        wanted = [p for p in inspect.signature(method).parameters if p not in ("self", "kwargs")]
        documented = re.findall(r"^    (\w+): ", sections(method.__doc__)["Args"], flags=re.MULTILINE)
        assert documented == wanted, method_name


@with_duty("example")
def test_has_an_example(name):
    assert ">>> " in sections(PUBLIC[name].__doc__).get("Example", "")


@with_duty("keywords")
def test_made_from_keywords(name):
    made = make(name)
    for key, value in TABLE[name].settings.items():
        stored = getattr(made, key, value)
        if plain(value) and plain(stored):  # else it became something else: a parameter, a backbone, an array
            assert stored == value


@with_duty("repr", nn.Module)
def test_repr_shows_the_settings(name):
    shown = TABLE[name].shown
    settings = {key: value for key, value in TABLE[name].settings.items() if plain(value)}
    text = repr(make(name))
    assert text.startswith(name)
    for key in settings if shown is None else shown:
        assert f"{key}={settings[key]!r}" in text


@with_duty("copy")
def test_pickles_and_copies(name):
    made = make(name)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(other) is type(made)
        assert state(other) == state(made)


@with_duty("move", nn.Module)
def test_moves_to_another_dtype_and_device(name):
    made = make(name).double()
    if not isinstance(made, Metric):  # a metric keeps the dtype of what it is given
        assert {t.dtype for t in tensors(made) if t.is_floating_point()} <= {torch.float64}
    assert {t.device.type for t in tensors(made.to("meta"))} <= {"meta"}


@with_duty("reset", Metric)
def test_metric_resets(name):
    metric, fresh = make(name), make(name)
    labels = torch.tensor([0, 0, 1, 1])
    metric.update(torch.randn(4, 3), labels, ids=torch.arange(4))
    metric.compute()
    metric.reset()
    embeddings = torch.randn(4, 3)
    for each in (metric, fresh):
        each.update(embeddings, labels)  # without ids this time: nothing of before is remembered
    assert metric.compute() == fresh.compute()
    assert metric.metric_state.keys() == fresh.metric_state.keys()


@with_duty("zero", RetrievalLoss)
def test_loss_of_a_batch_with_nothing_to_learn(name):
    loss = make(name)
    embeddings = torch.randn(4, 3, requires_grad=True)
    with pytest.warns(UserWarning, match=f"{name}: no row of the batch has a positive"):
        value = loss(embeddings, torch.arange(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(embeddings, torch.arange(4))  # said once
    assert value.item() == 0
    value.backward()
    assert embeddings.grad.tolist() == [[0.0] * 3] * 4


@with_duty("resume", pl.Callback)
def test_callback_resumes(name):
    callback, other = make(name), make(name)
    filled = {key: [[1, 0.5]] if value == [] else value for key, value in callback.state_dict().items()}
    callback.load_state_dict(copy.deepcopy(filled))
    file = io.BytesIO()
    torch.save(callback.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state_dict() == callback.state_dict() == filled
