"""The contracts of everything public, checked from a table: a new public name without an entry fails.

Each contract is a test with a row for each public name that has it. `Entry.without` names the contracts that a public
name does not have, with the reason. tests/examples/test_docs.py runs the examples of the docstrings; this file checks
that each public name has one.
"""

import copy
import dataclasses
import functools
import inspect
import io
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
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import BoxIndex, ImageIndex
from lightning_retrieval.datamodules.base import UNKNOWN, ShownArguments
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
from lightning_retrieval.datamodules.glyphs.glyphs import Glyphs
from lightning_retrieval.datamodules.samplers.pk import PKSampler
from lightning_retrieval.detection import (
    COCOMetrics,
    DetectionAPLoss,
    DetectionModule,
    PyramidFasterRCNN,
    RankedRoIHeads,
    TinyFasterRCNN,
)
from lightning_retrieval.losses import RetrievalLoss, SmoothAPLoss, SupAPLoss
from lightning_retrieval.metrics import EmbeddingMetric
from lightning_retrieval.models import Preparation
from lightning_retrieval.models.whitening import PCAWhitening, Whitening
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer
from tests.test_surface import public_objects

TRANSFORM = Preparation()
TABLE_FORMAT = {"columns": {"label": "class"}, "delimiter": ";"}
OBJECTS = [([[1.0, 2.0, 3.0, 4.0]], [1], [False])]


@dataclass
class Entry:
    """One public name: how it is constructed, and where its contracts have exceptions, each with the reason.

    Args:
        settings: keyword arguments, with values other than the defaults where there are any.
        shown: settings that `repr` shows; if None, all plain ones.
        without: {contract: reason} of the contracts that it does not have.
        not_attributes: {setting: reason} of constructor settings that are not attributes of the same name.
        not_moved: {attribute: reason} of attributes whose tensors `to` and `double` leave as they are.
        not_resumed: {attribute: reason} of attributes that a training run changes and that its state does not contain.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] | None = None
    without: dict[str, str] = field(default_factory=dict)
    not_attributes: dict[str, str] = field(default_factory=dict)
    not_moved: dict[str, str] = field(default_factory=dict)
    not_resumed: dict[str, str] = field(default_factory=dict)


ABSTRACT = "an abstract base class: only its subclasses are constructed"
NEVER_MADE = {"make": ABSTRACT, "example": ABSTRACT}
ONLY_CALLED = {"make": "a function"}
LABELS = {"labels": "kept as the indices of each class's images"}
LAST_TERMS = {"terms": "the values of the last call"}
LAST_TABLE = {"_cached_values": "the metrics of each query, of the last call"}
NO_TENSOR = {"move": "holds no tensor"}  # which is tested
FOLLOWS_INPUT = "is converted to the dtype and the device of the next input"  # which is tested
FOLLOWS_FEATURES = "torchvision converts them to the dtype and the device of the features"
STATELESS = {"resume": "keeps nothing from a run"}  # which is tested
TABLE = {
    # lightning_retrieval and lightning_retrieval.losses
    "RetrievalLoss": Entry(without=NEVER_MADE),
    "PairLoss": Entry(without=NEVER_MADE),
    "SmoothAPLoss": Entry(
        {"tau": 0.1, "reduction": "sum", "class_balanced": True, "include_self": False}, without=NO_TENSOR
    ),
    "FastAPLoss": Entry({"num_bins": 7, "reduction": "sum", "class_balanced": True}, without=NO_TENSOR),
    "QuantizedAPLoss": Entry(
        {"num_bins": 7, "low": 0.0, "high": 0.9, "tie_aware": "full", "class_balanced": True}, without=NO_TENSOR
    ),
    "BlackboxAPLoss": Entry({"lambda_": 2.0, "margin": 0.1, "class_balanced": True}, without=NO_TENSOR),
    "BlackboxRecallLoss": Entry(
        {"lambda_": 2.0, "margin": 0.1, "weighting": "loglog", "batch_memory": 2, "reduction": "sum"}, without=NO_TENSOR
    ),
    "BlackboxMAPLoss": Entry(
        {"lambda_": 2.0, "margin": 0.1, "interclass_coef": 0.3, "batch_memory": 2},
        not_moved={"memory": FOLLOWS_INPUT, "_sorted_memory": FOLLOWS_INPUT},
    ),
    "SupAPLoss": Entry({"tau": 0.1, "rho": 50.0, "delta": 0.1, "offset": 1.44, "start": 0.4}, without=NO_TENSOR),
    "CalibrationLoss": Entry({"alpha": 0.8, "beta": 0.5, "reduction": "sum"}, without=NO_TENSOR),
    "ROADMAPLoss": Entry(
        {"lambda_": 0.3, "sup_ap": SupAPLoss(tau=0.1), "calibration": None}, shown=(), not_moved=LAST_TERMS
    ),  # the weights
    "HAPLoss": Entry({"alpha": 2.0, "tau": 0.1, "offset": 1.44, "hrank_slopes": (25.0, 0.5, 10.0)}, without=NO_TENSOR),
    "LogRankLoss": Entry(
        {"tau": 0.1, "lambda_": 0.5, "negative_weight": 10.0, "reduction": "sum", "class_balanced": True},
        without=NO_TENSOR,
    ),
    "RecallAtKLoss": Entry({"ks": (1, 3), "tau_rank": 0.1, "tau_k": (0.5, 2.0)}, without=NO_TENSOR),
    "WeightedSum": Entry(
        {"losses": {"ap": (1.0, SmoothAPLoss()), "recall": (0.5, SupAPLoss())}}, shown=(), not_moved=LAST_TERMS
    ),
    "After": Entry({"start": 0.2, "value": 2.0}),
    "Before": Entry({"end": 0.2, "value": 2.0}),
    "Ramp": Entry({"first": 1.0, "last": 0.5, "start": 0.1, "end": 0.6, "geometric": True}),
    "NestedLoss": Entry({"loss": SmoothAPLoss(tau=0.1), "dims": (2, 4), "weights": (1.0, 0.5)}, not_moved=LAST_TERMS),
    "blackbox_rank": Entry(without=ONLY_CALLED),
    "chunked_backward": Entry(without=ONLY_CALLED),
    "largest_chunk_size": Entry(without=ONLY_CALLED),
    "CrossBatchMemory": Entry(
        {"size": 12, "start_step": 3, "mode": "two_terms", "weight": 0.5}, not_moved={"_rows": FOLLOWS_INPUT}
    ),
    "RetrievalModule": Entry(
        {"embedder": nn.Linear(8, 4), "loss": SmoothAPLoss(tau=0.1), "chunk_size": 16, "seed": 3},
        shown=(),  # its repr is Lightning's: the parts; `hparams` holds the settings
    ),
    "TwoSides": Entry({"directions": "both"}),
    "TwoNetworks": Entry(
        {
            "query_embedder": nn.Linear(8, 4),
            "directions": "both",
            "query_lr_factor": 2.0,
            "frozen_side": "candidates",
        }
    ),
    "Updates": Entry(
        {
            "gradient_clip_val": 0.5,
            "gradient_clip_algorithm": "value",
            "head_lr_factor": 10.0,
            "layer_decay": 0.5,
            "freeze_backbone_epochs": 1,
            "loss_lr_factor": 10.0,
        }
    ),
    "FSDP2Strategy": Entry({"shard_size": 4}, not_attributes={"timeout": "Lightning keeps it as _timeout"}),
    # lightning_retrieval.ranking
    "Relevance": Entry(without=NEVER_MADE),
    "OtherCamera": Entry(),
    "GalleryOnly": Entry(),
    "SharedTags": Entry({"at_least": 2}),
    "PCAWhitening": Entry({"dim": 3, "power": 0.25}, not_moved={"learned": FOLLOWS_INPUT}),
    "SupervisedWhitening": Entry({"dim": 3, "pairs_per_image": 2}, not_moved={"learned": FOLLOWS_INPUT}),
    "QueryExpansion": Entry({"alpha": 3.0, "k": 5}),
    "DatabaseAugmentation": Entry({"alpha": 3.0, "k": 5}),
    "multi_scale": Entry(without=ONLY_CALLED),
    "RetrievalIndex": Entry(
        {"dim": 8, "factory": "HNSW8", "parameters": "efSearch=20", "shards": 2},
        without={"copy": "faiss' objects do not compare; test_index.py copies an index and searches in both"},
    ),
    "MilvusStore": Entry(without={"make": "opens an index that exists; test_milvus_store.py creates some"}),
    # lightning_retrieval.metrics
    "EmbeddingMetric": Entry(without=NEVER_MADE),
    "RetrievalMetrics": Entry(
        {"ks": (1, 7), "map_ks": (5,), "map_divisor": "hits", "extra_metrics": ("mINP", "NDCG@3")}
        | {"alpha": 2.0, "dims": (1, 3), "reverse": True},
        not_moved=LAST_TABLE,
    ),
    "RandomGalleryMetrics": Entry({"ks": (1, 7), "draws": 3, "seed": 4}, not_moved=LAST_TABLE),
    "RevisitedMetrics": Entry(
        {
            "easy": {0: [1], 1: [0], 2: [3], 3: [2]},
            "hard": {0: [2], 1: [3], 2: [0], 3: [0]},
            "junk": {0: [3], 1: [], 2: [], 3: [1]},
            "ks": (1, 3),
        }
    ),
    "nearest_scores": Entry(without=ONLY_CALLED),
    # lightning_retrieval.models
    "AdaptedEmbedder": Entry(
        {"embedder": nn.Flatten(), "from_dim": 3 * 32 * 32, "embedding_dim": 4, "hidden_dim": 3},
        shown=("from_dim", "embedding_dim", "hidden_dim"),
    ),
    "Embedder": Entry(
        {"backbone": "glyph_net", "embedding_dim": 12, "pooling": "avg", "layer_norm": True, "freeze_batch_norm": True},
        shown=("embedding_dim", "pooling", "layer_norm", "freeze_batch_norm"),  # and backbone_name='glyph_net'
        not_attributes={
            "feature_dim": "only needed to construct the head",
            "image_size": "if None, that of the weights",
        },
    ),
    "FrozenEmbedder": Entry(
        {"embedder": nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))},
        shown=(),  # its repr is its embedder
        not_attributes={"checkpoint": "the weights and the description are kept, not the path"},
    ),
    "TextEmbedder": Entry(
        {"backbone": "ngram_net", "embedding_dim": 4, "max_length": 7, "backbone_args": {"buckets": 50, "dim": 3}},
        shown=("embedding_dim", "max_length"),  # and backbone_name='ngram_net'
    ),
    "NgramTokenizer": Entry({"buckets": 100, "min_n": 2, "max_n": 4, "max_length": 30}),
    "GeM": Entry({"p": 2.5, "eps": 1e-3, "learnable": False}),
    "GlobalAvgPool": Entry(without=NO_TENSOR),
    "GlobalMaxPool": Entry(without=NO_TENSOR),
    "Preparation": Entry({"image_size": 64, "resize": "fit", "interpolation": "bicubic", "fill": "black"}),
    "GlyphNet": Entry({"width": 4, "in_channels": 3}, shown=()),  # its repr is its layers
    "gem": Entry(without=ONLY_CALLED),
    # lightning_retrieval.detection
    "VOCMetrics": Entry({"classes": 3, "iou_threshold": 0.7, "eleven_points": False}),
    "DetectionAPLoss": Entry(
        {"lambda_": 2.0, "margin": 0.1, "interclass_coef": 0.3, "batch_memory": 2, "weight": 3.0, "gather": False},
        not_moved={"map_loss.memory": FOLLOWS_INPUT, "map_loss._sorted_memory": FOLLOWS_INPUT},
    ),
    "COCOMetrics": Entry({"classes": 3}, without={"reset": "takes boxes; test_coco_metrics.py resets it"}),
    "DetectionModule": Entry(
        {"detector": TinyFasterRCNN(2, width=2), "loss": DetectionAPLoss(), "seed": 3},
        shown=(),  # its repr is Lightning's: the parts; `hparams` holds the settings
        not_moved={"detector.rpn.anchor_generator.cell_anchors": FOLLOWS_FEATURES},
    ),
    "PyramidFasterRCNN": Entry(
        {"num_classes": 3, "backbone_name": "test_resnet", "pretrained": False, "min_size": 64, "max_size": 64}
        | {"pyramid_channels": 8, "head_features": 8},
        shown=(),
        not_moved={"rpn.anchor_generator.cell_anchors": FOLLOWS_FEATURES},
    ),
    "RankedRoIHeads": Entry(
        {"roi_heads": TinyFasterRCNN(2, width=2).roi_heads, "loss": DetectionAPLoss()},
        shown=(),
        not_attributes={"roi_heads": "takes over its attributes"},
    ),
    "TinyFasterRCNN": Entry(
        {"num_classes": 3, "width": 2, "rois_per_image": 8},
        shown=(),
        not_moved={"rpn.anchor_generator.cell_anchors": FOLLOWS_FEATURES},
    ),
    # lightning_retrieval.callbacks
    "LearnWhitening": Entry({"images": 50}, without=STATELESS),
    "ProxiesAtClassMeans": Entry({"images_per_class": 20}, without=STATELESS),
    "RetrievalEvaluation": Entry(
        {"ks": (1, 7), "before_fit": True, "map_divisor": "R", "extra_metrics": ("mINP", "recall@3"), "dims": (2,)},
        not_resumed={"results": "the metrics of the last evaluation"},
    ),
    "EmbeddingWriter": Entry(
        {"output": "embeddings", "file_format": "npy", "shard_size": 7, "dtype": "float16"}, without=STATELESS
    ),
    "RetrievalReport": Entry({"output": "report.html", "false_match_rate": 0.1}, without=STATELESS),
    "RetrievalGallery": Entry({"queries": 3, "k": 5, "every_n_epochs": 2, "order": "hardest"}, without=STATELESS),
    "RetrievalWandbLogger": Entry(
        {"project": "products", "id": "a1", "artifact": False},
        without={"copy": "Lightning starts the run in order to copy it"},
        not_attributes=dict.fromkeys(("name", "project", "id", "offline"), "Lightning's logger keeps it"),
    ),
    "ResumableCSVLogger": Entry(
        {"folder": "runs/a", "prefix": "p"},
        without=STATELESS,
        not_attributes=dict.fromkeys(("folder", "prefix"), "Lightning's logger keeps it"),
    ),
    "APMonitor": Entry(
        without=STATELESS, not_resumed=dict.fromkeys(("_classes", "_samples"), "seen in the first batch of each fit")
    ),
    "CheckpointOnInterrupt": Entry({"option": "--resume"}, without=STATELESS),
    # It keeps its probe while a memory with start_step="auto" waits, which its own test resumes.
    "MemoryMonitor": Entry({"probe": 8, "start_drift": 0.1}, without=STATELESS),
    "PrecisionRecallCurve": Entry({"every_n_epochs": 2}, without=STATELESS),
    "ScoreHistogram": Entry({"bins": 50, "every_n_epochs": 2}, without=STATELESS),
    "TrainingCurve": Entry({"metric": "val/R@1"}),
    "PublishedResults": Entry(
        {"source": "a table", "results": {"R@1": 0.8, "mAP": 0.7}}, not_resumed={"last": "the last evaluation"}
    ),
    "DetectionPicture": Entry({"images": 3, "detections": 2}, without=STATELESS),
    # lightning_retrieval.datamodules
    "GlobalBatchSampler": Entry(without=NEVER_MADE),
    "PKSampler": Entry(
        {"labels": [0, 0, 1, 1, 1], "classes_per_batch": 2, "samples_per_class": 2, "seed": 5}, not_attributes=LABELS
    ),
    "AllClassesSampler": Entry({"labels": [0, 0, 1, 1, 1], "batch_size": 4, "seed": 5}, not_attributes=LABELS),
    "CategorySampler": Entry(
        {"labels": [0, 0, 1, 1, 2, 2], "categories": [4, 4, 4, 4, 7, 7], "classes_per_batch": 2, "seed": 5}
        | {"samples_per_class": 2, "categories_per_batch": 2},
        not_attributes={**LABELS, "categories": "kept as the indices of each category's classes"},
    ),
    "TagSampler": Entry(
        {"tags": [[0, 2], [0, -1], [1, 2], [1, -1]], "tags_per_batch": 2, "samples_per_tag": 2, "seed": 5},
        not_attributes={"tags": "kept as the images of each tag"},
    ),
    "RetrievalDataLoader": Entry(
        {"dataset": range(4), "epoch": 2, "start": 0}
        | {"batch_sampler": PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)},
        not_attributes={"epoch": "`state_dict` holds where to start", "start": "`state_dict` holds where to start"},
    ),
    "ImageDataModule": Entry(without=NEVER_MADE),
    "ImageIndex": Entry({"paths": ["a.jpg", "é.jpg"], "labels": [0, 1], "roles": [1, 2], "names": ["x", "y"]}),
    "ImageSet": Entry(
        {"index": ImageIndex(["a.jpg"], [0]), "root": ".", "transform": TRANSFORM, "on_error": "skip"},
    ),
    "DataReport": Entry(
        {"splits": {"train": ((2, 1), ())}, "missing_files": ["a.jpg"], "problems": ["a sentence"]}
        | {"unreadable_files": ["b.jpg (truncated)"], "notes": ["a sentence"]}
    ),
    "training_transform": Entry(without=ONLY_CALLED),
    "CUB200": Entry({"root": "CUB_200_2011", "boxes": True, "val_fraction": 0.1}),
    "IJBC": Entry({"root": "IJB-C", "least_instances": 2, "cache_dir": "cache"}),
    "INaturalist": Entry({"root": "inat", "levels": ("species", "genus"), "transform": "smooth_ap"}),
    "ImageFolder": Entry({"root": "images", "test_fraction": 0.3, "classes": 2, "categories": True, "split_seed": 2}),
    "TextTable": Entry({"table": "captions.csv", "test_fraction": 0.4, "split_seed": 2} | TABLE_FORMAT),
    "ImageTable": Entry({"root": "images", "table": "table.csv", "on_error": "skip"} | TABLE_FORMAT),
    "HuggingFaceImages": Entry(
        {"path": "pets", "label_column": "kind", "split_names": {"train": "train"}, "test_fraction": 0.3}
        | {"split_seed": 2}
    ),
    "InShop": Entry({"root": "In-shop", "high_res": True, "samples_per_class": 3}),
    "LandmarksClean": Entry({"root": "landmarks"}),
    "RevisitedOxford": Entry(
        {"root": "data/roxford5k", "distractors": "data/revisitop1m", "crop_queries": False},
        not_attributes={"root": "the folder that also holds the distractors", "distractors": "an absolute path"},
    ),
    "RevisitedParis": Entry({"root": "data", "image_size": 512, "transform": "plain", "eval_batch_size": 8}),
    "StanfordOnlineProducts": Entry({"root": "sop", "sampler": "category", "num_workers": 2}),
    "VGGFace2": Entry({"root": "vggface2", "cache_dir": "cache"}),
    "VehicleID": Entry({"root": "VehicleID_V1.0", "protocol": "reid", "select_by_vid": True}),
    "BoxDataModule": Entry(without=NEVER_MADE),
    "BoxIndex": Entry({"paths": ["a.jpg"], "objects": OBJECTS, "class_names": ["cat"]}),
    "BoxSet": Entry({"index": BoxIndex(["a.jpg"], OBJECTS, class_names=["cat"]), "root": ".", "train": True}),
    "CocoDetection": Entry(
        {"root": "images", "train": "train.json", "test": "test.json", "batch_size": 4},
        not_attributes={"train": "in `files`", "test": "in `files`", "val": "in `files`"},
    ),
    "DetectionDataModule": Entry(without=NEVER_MADE),
    "PascalVOC": Entry({"root": "VOCdevkit", "train_sets": ("VOC2007", "VOC2012"), "eval_batch_size": 4}),
    "PairSampler": Entry(
        {"query_labels": [0, 1, 1], "candidate_labels": [1, 0, 0], "classes_per_batch": 2, "samples_per_class": 2},
        not_attributes={f"{side}_labels": LABELS["labels"] for side in ("query", "candidate")},
    ),
    "Pairs": Entry(
        {"queries": Glyphs(), "candidates": Glyphs(), "classes_per_batch": 8, "queries_per_class": 2, "num_workers": 1},
        not_attributes={"seed": "None stands for the seed of `seed_everything`"},
    ),
    "RandomBatchSampler": Entry({"num_images": 7, "batch_size": 3, "seed": 5}),
    "item_generator": Entry(without=ONLY_CALLED),
    "resume_position": Entry(without=ONLY_CALLED),
    "RetrievalDataModule": Entry(without=NEVER_MADE),
    "GlyphScenes": Entry(
        {"num_classes": 20, "max_objects": 3, "frequency_exponent": 0.0, "max_rotation": 20.0, "train_size": 50},
        not_attributes={"seed": "None stands for the seed of `seed_everything`"},
    ),
    "Glyphs": Entry(
        {"classes_per_batch": 8, "samples_per_class": 2, "num_workers": 1, "augment": False},
        not_attributes={"seed": "None stands for the seed of `seed_everything`"},
    ),
    "GlyphDataset": Entry(
        {"glyphs": load_glyph_images, "split": "val", "augment": True, "channels": 3},
        not_attributes={"glyphs": "only the images of the split are kept", "split": "its images are kept"},
    ),
}


PUBLIC = public_objects()


glyph_images = functools.cache(load_glyph_images)  # reading them takes long, and nothing changes them


def settings_of(name):
    """The settings of a table entry, made anew."""
    settings = {}
    for key, value in TABLE[name].settings.items():
        settings[key] = glyph_images() if value is load_glyph_images else copy.deepcopy(value)
    return settings


def make(name):
    return PUBLIC[name](**settings_of(name))


def of_kind(thing, kind):
    """Whether a public object is a class of this kind. `type` stands for any class, `object` for functions as well."""
    if kind is object:
        return True
    return isinstance(thing, type) and (kind is type or issubclass(thing, kind))


def names_of(kind, contract, *, has):
    """Names of the classes of this kind that are constructed and that have, or do not have, a contract."""
    found = []
    for name, thing in PUBLIC.items():
        without = TABLE.get(name, Entry()).without
        if "make" not in without and of_kind(thing, kind) and (contract not in without) == has:
            found.append(name)
    return sorted(found)


def with_contract(contract, kind=object):
    return pytest.mark.parametrize("name", names_of(kind, contract, has=True))


def without_contract(contract, kind=object):
    return pytest.mark.parametrize("name", names_of(kind, contract, has=False))


def documented(contract, kind=object):
    """The names with a contract on documentation, which those that are not constructed have, too."""
    found = []
    for name, thing in PUBLIC.items():
        if contract not in TABLE.get(name, Entry()).without and of_kind(thing, kind):
            found.append(name)
    return pytest.mark.parametrize("name", sorted(found))


def plain(value):
    return isinstance(value, (bool, int, float, str, type(None), list, tuple))


def sections(docstring):
    """{title: text} of a Google docstring."""
    parts = re.split(r"^(\w+):\n(?=    |\n)", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def own_parameters(thing):
    """The parameters of the signature. A data module's `settings` stand for those of its base class."""
    if isinstance(thing, type) and issubclass(thing, ShownArguments):
        _, *parameters = inspect.signature(thing.__init__).parameters.values()
        return [parameter for parameter in parameters if parameter.name != UNKNOWN]
    return list(inspect.signature(thing).parameters.values())


def documented_arguments(docstring):
    return re.findall(r"^    (\w+): ", sections(docstring).get("Args", ""), flags=re.MULTILINE)


def test_every_public_name_has_an_entry():
    missing, gone = PUBLIC.keys() - TABLE.keys(), TABLE.keys() - PUBLIC.keys()
    assert not missing, f"write an entry in TABLE for {sorted(missing)}"
    assert not gone, f"no longer public: {sorted(gone)}"


# --- documentation


@documented("docstring")
def test_the_docstring_lists_the_arguments_of_the_signature(name):
    docstring = PUBLIC[name].__doc__
    assert docstring
    assert docstring.strip().splitlines()[0].rstrip().endswith((".", ":", ";", ","))
    parameters = [each.name for each in own_parameters(PUBLIC[name]) if each.name not in ("args", "kwargs")]
    assert [name for name in documented_arguments(docstring) if name != "kwargs"] == parameters


@documented("docstring", type)
def test_docstrings_of_methods_list_the_arguments_of_the_signature(name):
    for method_name, method in inspect.getmembers(PUBLIC[name], inspect.isfunction):
        ours = method.__module__.startswith("lightning_retrieval")
        if method_name.startswith("_") or not ours or "Args" not in sections(method.__doc__ or ""):
            continue
        parameters = [name for name in inspect.signature(method).parameters if name not in ("self", "cls", "kwargs")]
        documented = [name for name in documented_arguments(method.__doc__) if name != "kwargs"]
        assert documented == parameters, method_name


@documented("example")
def test_the_docstring_has_an_example(name):
    assert ">>> " in sections(PUBLIC[name].__doc__).get("Example", "")


# --- settings


def settings_that_are_no_attributes(made, settings):
    """Settings that were given, or that have a default, and that the object does not have as they were given."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = own_parameters(type(made))
    expected = {parameter.name: parameter.default for parameter in parameters if parameter.kind not in variable}
    expected |= settings
    return {key for key, value in expected.items() if not has_attribute(made, key, value)}


def has_attribute(made, name, value):
    """Whether there is an attribute of this name, and with this value where both are plain."""
    if not hasattr(made, name):
        return False
    stored = getattr(made, name)
    if isinstance(stored, Path):
        return stored == Path(value)
    if isinstance(stored, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(stored) == list(value)
    # Other settings become a parameter, a network or an array, which the tests of the class compare.
    return not plain(stored) or not plain(value) or stored == value


@with_contract("settings", type)
def test_constructor_settings_are_attributes(name):
    found = settings_that_are_no_attributes(make(name), TABLE[name].settings)
    assert found == TABLE[name].not_attributes.keys()


@with_contract("repr", nn.Module)
def test_repr_shows_the_settings(name):
    shown = TABLE[name].shown
    settings = {key: value for key, value in TABLE[name].settings.items() if plain(value)}
    text = repr(make(name))
    assert text.startswith(name)
    for key in settings if shown is None else shown:
        assert f"{key}={settings[key]!r}" in text


# --- copies


def state(thing):
    """What must be the same in a copy: the state dict, or the plain attributes."""
    if isinstance(thing, nn.Module):
        found = {"repr": repr(thing)}
        for key, value in thing.state_dict().items():  # tensors, and what a module adds itself
            found[key] = value.tolist() if isinstance(value, torch.Tensor) else value
        return found
    found = {key: value for key, value in getattr(thing, "__dict__", {}).items() if plain(value)}
    if isinstance(thing, int):
        found["value"] = int(thing)
    return found


@with_contract("copy", type)
def test_pickles_and_copies(name):
    made = make(name)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(other) is type(made)
        assert state(other) == state(made)


# --- dtypes and devices


def update_metric(metric, embeddings, labels, ids=None):
    """Update a metric of embeddings, or a metric of detections with random boxes at true objects."""
    if isinstance(metric, EmbeddingMetric):
        metric.update(embeddings, labels, ids=ids)
        return
    corner = torch.rand(4, 2, dtype=embeddings.dtype)
    boxes = torch.cat([corner, corner + 1 + torch.rand(4, 2, dtype=embeddings.dtype)], 1)
    detected = {"boxes": boxes + 0.1, "scores": embeddings[:, 0].sigmoid(), "labels": labels + 1}
    metric.update([detected], [{"boxes": boxes, "labels": labels + 1, "image_id": 0}])


def use(module, dtype=torch.float32):
    """Call a module once, so that it holds whatever tensors it makes when it is used; what it returns."""
    embeddings, labels = torch.randn(12, 8, dtype=dtype), torch.arange(12) // 4
    if isinstance(module, COCOMetrics):
        boxes = {"boxes": torch.tensor([[0, 0, 5, 5]], dtype=dtype), "labels": torch.tensor([1])}
        module.update([{**boxes, "scores": torch.ones(1)}], [boxes])
        return module.compute()
    if isinstance(module, RankedRoIHeads):
        return module.box_predictor(torch.rand(2, 128, dtype=dtype))
    if isinstance(module, (DetectionModule, PyramidFasterRCNN, TinyFasterRCNN)):
        return module.eval()([torch.rand(3, 64, 64, dtype=dtype)])
    if isinstance(module, Metric):
        update_metric(module, embeddings[:4], labels[:4], torch.arange(4))
        return module.compute()
    if isinstance(module, CrossBatchMemory):
        while len(module) == 0:  # it stores nothing before `start_step`
            module.update(embeddings, labels, ids=torch.arange(12))
        return module.references(embeddings, labels, ids=torch.arange(12, 24))
    if isinstance(module, Whitening) and module.learned is None:
        module.fit(embeddings, labels)
    first, *others = inspect.signature(module.forward).parameters
    if first == "scores":
        return module(embeddings, embeddings > 0)
    if first == "class_logits":
        return module(embeddings, labels)
    if first == "tokens":
        return module(labels[:, None])
    if "labels" in others:
        return module(embeddings, labels)
    if isinstance(module, (Whitening, RetrievalModule)):
        return module(embeddings)
    channels = 1 if isinstance(module, Embedder) else 3
    return module(torch.rand(2, channels, 32, 32, dtype=dtype))


def tensors_of(thing):
    """All tensors that an object holds: parameters, buffers and plain attributes, also in containers."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    parts = []
    if isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, (list, tuple, set)):
        parts = thing
    elif isinstance(thing, nn.Module) or dataclasses.is_dataclass(thing):
        parts = vars(thing).values()
    found = []
    for part in parts:
        found += tensors_of(part)
    return found


def attributes_with(condition, module):
    """Dotted names of the attributes of a module and its submodules that hold a tensor that meets a condition."""
    found = set()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name != "_modules" and any(map(condition, tensors_of(value))):
                found.add(f"{path}.{name}".removeprefix("."))
    return found


def not_converted(module):
    """Attributes with a tensor that keeps its dtype when the module is converted to float64."""
    return attributes_with(lambda tensor: tensor.dtype in (torch.float16, torch.float32), module.double())


def not_moved(module):
    """Attributes with a tensor that stays behind when the module moves to another device."""
    return attributes_with(lambda tensor: tensor.device.type != "meta", module.to("meta"))


@with_contract("move", nn.Module)
def test_all_tensors_move_to_another_dtype_and_device(name):
    made, exceptions = make(name), TABLE[name].not_moved.keys()
    use(made)
    assert tensors_of(made), "it holds no tensor: its entry must be without the contract `move`"
    if not isinstance(made, Metric):  # a metric keeps the dtype of its input
        assert not_converted(made) == exceptions
    assert not_moved(made) == exceptions


@without_contract("move", nn.Module)
def test_a_module_without_tensors_holds_none_after_use(name):
    made = make(name)
    use(made)
    assert not tensors_of(made)


def names_that_follow_their_input():
    return sorted(name for name, entry in TABLE.items() if FOLLOWS_INPUT in entry.not_moved.values())


@pytest.mark.parametrize("name", names_that_follow_their_input())
def test_what_does_not_move_follows_the_next_input(name):
    made = make(name)
    use(made)
    results = tensors_of(use(made, torch.float64))
    assert {tensor.dtype for tensor in results if tensor.is_floating_point()} == {torch.float64}


def changes_in_double(loss, embeddings, labels):
    """Whether float64 embeddings give a loss or a gradient of another dtype, or another value."""
    values = []
    for dtype in (torch.float32, torch.float64):
        rows = embeddings.to(dtype, copy=True).requires_grad_()
        value = loss(rows, labels)
        value.backward()
        if not value.dtype == rows.grad.dtype == dtype:
            return True
        values.append(value.item())
    return values[0] != pytest.approx(values[1], rel=1e-4)


@with_contract("double", RetrievalLoss)
def test_a_loss_computes_in_the_dtype_of_its_input(name):
    assert not changes_in_double(make(name), torch.randn(12, 8), torch.arange(12) // 4)


# --- metrics and losses


@with_contract("reset", Metric)
def test_a_metric_resets(name):
    metric, fresh = make(name), make(name)
    labels = torch.tensor([0, 0, 1, 1])
    update_metric(metric, torch.randn(4, 3), labels, torch.arange(4))
    metric.compute()
    metric.reset()
    embeddings = torch.randn(4, 3)
    for each in (metric, fresh):
        torch.manual_seed(1)
        update_metric(each, embeddings, labels)  # without ids this time: nothing from before the reset is left
    torch.testing.assert_close(metric.compute(), fresh.compute(), rtol=0, atol=0, equal_nan=True)
    assert metric.metric_state.keys() == fresh.metric_state.keys()


@with_contract("zero", RetrievalLoss)
def test_a_loss_of_a_batch_with_nothing_to_learn_is_a_zero_with_a_gradient(name):
    loss = make(name)
    embeddings = torch.randn(4, 3, requires_grad=True)
    with pytest.warns(UserWarning, match=f"{name}: no row of the batch has a positive"):
        value = loss(embeddings, torch.arange(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(embeddings, torch.arange(4))  # warns only once
    assert value.item() == 0
    value.backward()
    assert embeddings.grad.tolist() == [[0.0] * 3] * 4


# --- callbacks


class NoiseData(pl.LightningDataModule):
    """Images of noise in classes of four."""

    def train_dataloader(self):
        return DataLoader(Points(0, 24, shape=(1, 4, 4)), batch_size=12)

    val_dataloader = test_dataloader = train_dataloader


class WithProxies(SmoothAPLoss):
    """A loss that gets the means of classes."""

    def begin_at(self, means, labels):
        assert means.shape == (len(labels), 4)


def run_training(callback, folder):
    """Two epochs with validation, and a test, with what the callbacks need: an evaluation, a whitening and a memory."""
    module = RetrievalModule(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
        WithProxies(),
        whitening=PCAWhitening(),
        memory=CrossBatchMemory(64),
    )
    evaluation = [] if isinstance(callback, RetrievalEvaluation) else [RetrievalEvaluation(ks=(1,))]
    callbacks = [*evaluation, callback]
    trainer = quiet_trainer(max_epochs=2, callbacks=callbacks, default_root_dir=folder, log_every_n_steps=1)
    trainer.fit(module, datamodule=NoiseData())
    trainer.test(module, datamodule=NoiseData(), verbose=False)


def changed_attributes(callback, other):
    """Names of the attributes in which two callbacks differ, without the methods that Lightning adds to callbacks."""
    ours, theirs = vars(callback), vars(other)
    names = {*ours, *theirs} - {"log", "log_dict"}
    return {name for name in names if not alike(ours.get(name), theirs.get(name))}


def alike(value, other):
    """Whether two values are equal; what cannot be compared is alike only if both are empty."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(alike(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(alike, value, other))
    return value == other


def resumed(callback, fresh):
    """The fresh callback with the state of the other, read as Lightning reads a checkpoint."""
    file = io.BytesIO()
    torch.save(callback.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@pytest.mark.filterwarnings("ignore:PCAWhitening. nothing has been learned yet:UserWarning")
@with_contract("resume", pl.Callback)
def test_a_callback_resumes_with_what_a_run_left_in_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a callback writes to a relative path
    callback = make(name)
    run_training(callback, tmp_path)
    assert callback.state_dict() != make(name).state_dict()
    other = resumed(callback, make(name))
    assert other.state_dict() == callback.state_dict()
    assert changed_attributes(callback, other) == TABLE[name].not_resumed.keys()


@pytest.mark.filterwarnings("ignore:PCAWhitening. nothing has been learned yet:UserWarning")
@without_contract("resume", pl.Callback)
def test_a_callback_without_state_keeps_nothing_from_a_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a callback writes to a relative path
    callback = make(name)
    run_training(callback, tmp_path)
    assert callback.state_dict() == {}
    assert changed_attributes(callback, make(name)) == TABLE[name].not_resumed.keys()
