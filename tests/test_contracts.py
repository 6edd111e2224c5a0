"""The contracts of everything public, checked from a table: a new public name without an entry fails.

Each contract is a test with a row for each public class that has it: it is constructed from keywords, shows its
settings, is pickled and copied, moves to another device and dtype, resets, and resumes.
"""

import copy
import dataclasses
import functools
import inspect
import io
import pickle
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import BoxIndex, Glyphs, ImageIndex, PKSampler
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
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
from lightning_retrieval.models import PCAWhitening, Preparation, SupervisedWhitening
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer
from tests.test_surface import public_objects

PUBLIC = public_objects()
TRANSFORM = Preparation()
TABLE_FORMAT = {"columns": {"label": "class"}, "delimiter": ";"}
WHITENINGS = (PCAWhitening, SupervisedWhitening)
OBJECTS = [([[1.0, 2.0, 3.0, 4.0]], [1], [False])]


@dataclass
class Entry:
    """One public class: how it is constructed, and which contracts it does not have.

    Args:
        settings: keyword arguments, with values other than the defaults where there are any.
        shown: settings that `repr` shows; if None, all plain ones. That of a module with parts shows the parts.
        without: contracts that it does not have.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()


# Functions, the type of settings, abstract base classes, and MilvusStore, which opens an index that exists.
NOT_MADE = {
    *(
        "LossSettings",
        "RetrievalLoss",
        "PairLoss",
        "Relevance",
        "EmbeddingMetric",
        "GlobalBatchSampler",
        "ImageDataModule",
    ),
    *("BoxDataModule", "DetectionDataModule", "RetrievalDataModule", "MilvusStore", "blackbox_rank", "gem"),
    *("chunked_backward", "largest_chunk_size", "multi_scale", "nearest_scores", "read_embeddings"),
    "training_transform",
    *("item_generator", "resume_position"),
}
TABLE = {
    # lightning_retrieval and lightning_retrieval.losses
    "SmoothAPLoss": Entry({"tau": 0.1, "reduction": "sum", "class_balanced": True, "include_self": False}),
    "FastAPLoss": Entry({"num_bins": 7, "reduction": "sum", "class_balanced": True}),
    "QuantizedAPLoss": Entry({"num_bins": 7, "low": 0.0, "high": 0.9, "tie_aware": "full", "class_balanced": True}),
    "BlackboxAPLoss": Entry({"lambda_": 2.0, "margin": 0.1, "class_balanced": True}),
    "BlackboxRecallLoss": Entry(
        {"lambda_": 2.0, "margin": 0.1, "weighting": "loglog", "batch_memory": 2, "reduction": "sum"}
    ),
    "BlackboxMAPLoss": Entry(
        {"lambda_": 2.0, "margin": 0.1, "interclass_coef": 0.3, "batch_memory": 2}, without=("move",)
    ),
    "SupAPLoss": Entry({"tau": 0.1, "rho": 50.0, "delta": 0.1, "offset": 1.44, "start": 0.4}),
    "CalibrationLoss": Entry({"alpha": 0.8, "beta": 0.5, "reduction": "sum"}),
    "ROADMAPLoss": Entry({"lambda_": 0.3, "reduction": "sum", "class_balanced": True}, without=("move",)),
    "HAPLoss": Entry({"alpha": 2.0, "tau": 0.1, "offset": 1.44, "hrank_slopes": (25.0, 0.5, 10.0)}),
    "LogRankLoss": Entry(
        {"tau": 0.1, "lambda_": 0.5, "negative_weight": 10.0, "reduction": "sum", "class_balanced": True}
    ),
    "RecallAtKLoss": Entry({"ks": (1, 3), "tau_rank": 0.1, "tau_k": (0.5, 2.0)}),
    "WeightedSum": Entry(
        {"losses": {"ap": (1.0, SmoothAPLoss()), "recall": (0.5, SupAPLoss())}}, shown=(), without=("move",)
    ),
    "Schedule": Entry({"points": ((0.1, 1.0), (0.6, 0.5)), "between": "geometric"}),
    "NestedLoss": Entry({"loss": SmoothAPLoss(tau=0.1), "dims": (2, 4), "weights": (1.0, 0.5)}, without=("move",)),
    "CrossBatchMemory": Entry({"size": 12, "start_step": 3, "mode": "two_terms", "weight": 0.5}, without=("move",)),
    "RetrievalModule": Entry(
        {"embedder": nn.Linear(8, 4), "loss": SmoothAPLoss(tau=0.1), "chunk_size": 16, "seed": 3}, shown=()
    ),
    "TwoSides": Entry({"directions": "both"}),
    "TwoNetworks": Entry(
        {"query_embedder": nn.Linear(8, 4), "directions": "both", "query_lr_factor": 2.0, "frozen_side": "candidates"}
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
    "FSDP2Strategy": Entry({"shard_size": 4}),
    # lightning_retrieval.ranking and lightning_retrieval.search
    "OtherCamera": Entry(),
    "GalleryOnly": Entry(),
    "SharedTags": Entry({"at_least": 2}),
    "PCAWhitening": Entry({"dim": 3, "power": 0.25}, without=("move",)),
    "SupervisedWhitening": Entry({"dim": 3, "pairs_per_image": 2}, without=("move",)),
    "QueryExpansion": Entry({"alpha": 3.0, "k": 5}),
    "DatabaseAugmentation": Entry({"alpha": 3.0, "k": 5}),
    "RetrievalIndex": Entry(
        {"dim": 8, "factory": "HNSW8", "parameters": "efSearch=20", "shards": 2}, without=("copy",)
    ),
    # lightning_retrieval.metrics
    "RetrievalMetrics": Entry(
        {"ks": (1, 7), "map_ks": (5,), "map_divisor": "hits", "extra_metrics": ("mINP", "NDCG@3")}
        | {"alpha": 2.0, "dims": (1, 3), "reverse": True},
        without=("move", "double"),
    ),
    "RandomGalleryMetrics": Entry({"ks": (1, 7), "draws": 3, "seed": 4}, without=("move", "double")),
    "RevisitedMetrics": Entry(
        {
            "easy": {0: [1], 1: [0], 2: [3], 3: [2]},
            "hard": {0: [2], 1: [3], 2: [0], 3: [0]},
            "junk": {0: [3], 1: [], 2: [], 3: [1]},
            "ks": (1, 3),
        },
        without=("double",),
    ),
    # lightning_retrieval.models
    "AdaptedEmbedder": Entry(
        {"embedder": nn.Flatten(), "from_dim": 3 * 32 * 32, "embedding_dim": 4, "hidden_dim": 3},
        shown=("from_dim", "embedding_dim", "hidden_dim"),
    ),
    "Embedder": Entry(
        {"backbone": "glyph_net", "embedding_dim": 12, "pooling": "avg", "layer_norm": True, "normalize": False},
        shown=("embedding_dim", "pooling", "layer_norm", "normalize"),
    ),
    "FrozenEmbedder": Entry({"embedder": nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))}, shown=()),
    "TextEmbedder": Entry(
        {"backbone": "ngram_net", "embedding_dim": 4, "max_length": 7, "backbone_args": {"buckets": 50, "dim": 3}},
        shown=("embedding_dim", "max_length"),
    ),
    "NgramTokenizer": Entry({"buckets": 100, "min_n": 2, "max_n": 4, "max_length": 30}),
    "GeM": Entry({"p": 2.5, "eps": 0.001, "learnable": False}),
    "GlobalAvgPool": Entry(),
    "GlobalMaxPool": Entry(),
    "Preparation": Entry({"image_size": 64, "resize": "fit", "interpolation": "bicubic", "fill": "black"}),
    "GlyphNet": Entry({"width": 4, "in_channels": 3}, shown=()),
    # lightning_retrieval.detection
    "VOCMetrics": Entry({"classes": 3, "iou_threshold": 0.7, "eleven_points": False}, without=("double",)),
    "DetectionAPLoss": Entry(
        {"lambda_": 2.0, "margin": 0.1, "interclass_coef": 0.3, "batch_memory": 2, "weight": 3.0, "gather": False},
        without=("move",),
    ),
    "COCOMetrics": Entry({"classes": 3}, without=("reset", "double")),
    "DetectionModule": Entry(
        {"detector": TinyFasterRCNN(2, width=2), "loss": DetectionAPLoss(), "seed": 3}, shown=(), without=("move",)
    ),
    "PyramidFasterRCNN": Entry(
        {"num_classes": 3, "backbone_name": "test_resnet", "pretrained": False, "min_size": 64, "max_size": 64}
        | {"pyramid_channels": 8, "head_features": 8},
        shown=(),
        without=("move",),
    ),
    "RankedRoIHeads": Entry({"roi_heads": TinyFasterRCNN(2, width=2).roi_heads, "loss": DetectionAPLoss()}, shown=()),
    "TinyFasterRCNN": Entry({"num_classes": 3, "width": 2, "rois_per_image": 8}, shown=(), without=("move",)),
    # lightning_retrieval.callbacks
    "LearnWhitening": Entry({"images": 50}),
    "ProxiesAtClassMeans": Entry({"images_per_class": 20}),
    "RetrievalEvaluation": Entry(
        {"ks": (1, 7), "before_fit": True, "map_divisor": "R", "extra_metrics": ("mINP", "recall@3"), "dims": (2,)}
    ),
    "EmbeddingWriter": Entry({"output": "embeddings", "shard_size": 7, "dtype": "float16"}),
    "RetrievalReport": Entry({"output": "report.html", "false_match_rate": 0.1}),
    "RetrievalGallery": Entry({"queries": 3, "k": 5, "every_n_epochs": 2, "order": "hardest"}),
    "RetrievalWandbLogger": Entry({"project": "products", "id": "a1", "offline": True}, without=("copy",)),
    "ResumableCSVLogger": Entry({"folder": "runs/a", "prefix": "p"}),
    "APMonitor": Entry(),
    "CheckpointOnInterrupt": Entry({"option": "--resume"}),
    "MemoryMonitor": Entry({"probe": 8, "start_drift": 0.1}, without=("resume",)),  # its own test resumes it
    "PrecisionRecallCurve": Entry({"every_n_epochs": 2}),
    "ScoreHistogram": Entry({"bins": 50, "every_n_epochs": 2}),
    "TrainingCurve": Entry({"metric": "val/R@1"}),
    "PublishedResults": Entry({"source": "a table", "results": {"R@1": 0.8, "mAP": 0.7}}),
    "DetectionPicture": Entry({"images": 3, "detections": 2}),
    # lightning_retrieval.datamodules
    "PKSampler": Entry({"labels": [0, 0, 1, 1, 1], "classes_per_batch": 2, "samples_per_class": 2, "seed": 5}),
    "AllClassesSampler": Entry({"labels": [0, 0, 1, 1, 1], "batch_size": 4, "seed": 5}),
    "CategorySampler": Entry(
        {"labels": [0, 0, 1, 1, 2, 2], "categories": [4, 4, 4, 4, 7, 7], "classes_per_batch": 2, "seed": 5}
        | {"samples_per_class": 2, "categories_per_batch": 2}
    ),
    "TagSampler": Entry(
        {"tags": [[0, 2], [0, -1], [1, 2], [1, -1]], "tags_per_batch": 2, "samples_per_tag": 2, "seed": 5}
    ),
    "RetrievalDataLoader": Entry(
        {"dataset": range(4), "epoch": 2, "start": 0}
        | {"batch_sampler": PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)}
    ),
    "ImageIndex": Entry({"paths": ["a.jpg", "é.jpg"], "labels": [0, 1], "roles": [1, 2], "names": ["x", "y"]}),
    "ImageSet": Entry({"index": ImageIndex(["a.jpg"], [0]), "root": ".", "transform": TRANSFORM, "on_error": "skip"}),
    "DataReport": Entry(
        {"splits": {"train": ((2, 1), ())}, "missing_files": ["a.jpg"], "problems": ["a sentence"]}
        | {"unreadable_files": ["b.jpg (truncated)"], "notes": ["a sentence"]}
    ),
    "CUB200": Entry({"root": "CUB_200_2011", "boxes": True, "val_fraction": 0.1}),
    "IJBC": Entry({"root": "IJB-C", "least_instances": 2}),
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
    "RevisitedOxford": Entry({"root": "data/roxford5k", "distractors": "data/revisitop1m", "crop_queries": False}),
    "RevisitedParis": Entry({"root": "data", "image_size": 512, "transform": "plain", "eval_batch_size": 8}),
    "StanfordOnlineProducts": Entry({"root": "sop", "sampler": "category", "num_workers": 2}),
    "VGGFace2": Entry({"root": "vggface2", "boxes": True}),
    "VehicleID": Entry({"root": "VehicleID_V1.0", "protocol": "reid", "select_by_vid": True}),
    "BoxIndex": Entry({"paths": ["a.jpg"], "objects": OBJECTS, "class_names": ["cat"]}),
    "BoxSet": Entry({"index": BoxIndex(["a.jpg"], OBJECTS, class_names=["cat"]), "root": ".", "train": True}),
    "CocoDetection": Entry({"root": "images", "train": "train.json", "test": "test.json", "batch_size": 4}),
    "PascalVOC": Entry({"root": "VOCdevkit", "train_sets": ("VOC2007", "VOC2012"), "eval_batch_size": 4}),
    "PairSampler": Entry(
        {"query_labels": [0, 1, 1], "candidate_labels": [1, 0, 0], "classes_per_batch": 2, "samples_per_class": 2}
    ),
    "Pairs": Entry(
        {"queries": Glyphs(), "candidates": Glyphs(), "classes_per_batch": 8, "queries_per_class": 2, "num_workers": 1}
    ),
    "RandomBatchSampler": Entry({"num_images": 7, "batch_size": 3, "seed": 5}),
    "GlyphScenes": Entry(
        {"num_classes": 20, "max_objects": 3, "frequency_exponent": 0.0, "max_rotation": 20.0, "train_size": 50}
    ),
    "Glyphs": Entry({"classes_per_batch": 8, "samples_per_class": 2, "num_workers": 1, "augment": False}),
    "GlyphDataset": Entry({"glyphs": load_glyph_images, "split": "val", "augment": True, "channels": 3}),
}


glyph_images = functools.cache(load_glyph_images)  # reading them takes long, and nothing changes them


def settings_of(name):
    """The settings of a table entry, made anew."""
    settings = {}
    for key, value in TABLE[name].settings.items():
        settings[key] = glyph_images() if value is load_glyph_images else copy.deepcopy(value)
    return settings


def make(name):
    return PUBLIC[name](**settings_of(name))


def with_contract(contract, kind=object):
    """The classes of a kind that have a contract."""
    names = [name for name, entry in TABLE.items() if contract not in entry.without and issubclass(PUBLIC[name], kind)]
    return pytest.mark.parametrize("name", names)


def plain(value):
    return isinstance(value, (bool, int, float, str, type(None), list, tuple))


def test_every_public_name_has_an_entry():
    missing, gone = PUBLIC.keys() - TABLE.keys() - NOT_MADE, (TABLE.keys() | NOT_MADE) - PUBLIC.keys()
    assert not missing, f"write an entry in TABLE for {sorted(missing)}"
    assert not gone, f"no longer public: {sorted(gone)}"


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if int in map(type, entry.settings.values())])
def test_integers_of_numpy_are_integers(name):
    integers = {key: value for key, value in settings_of(name).items() if type(value) is int}
    made = PUBLIC[name](**{**settings_of(name), **{key: np.int64(value) for key, value in integers.items()}})
    assert all(getattr(made, key, value) == value for key, value in integers.items())


@with_contract("repr", nn.Module)
def test_repr_shows_the_settings(name):
    shown = TABLE[name].shown
    settings = {key: value for key, value in TABLE[name].settings.items() if plain(value)}
    text = repr(make(name))
    assert text.startswith(name)
    for key in settings if shown is None else shown:
        assert f"{key}={settings[key]!r}" in text


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


@with_contract("copy")
def test_pickles_and_copies(name):
    made = make(name)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(other) is type(made)
        assert state(other) == state(made)


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
    if isinstance(module, WHITENINGS) and module.learned is None:
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
    if isinstance(module, (*WHITENINGS, RetrievalModule)):
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


@with_contract("move", nn.Module)
def test_all_tensors_move_to_another_device(name):
    made = make(name)
    use(made)
    assert all(tensor.device.type == "meta" for tensor in tensors_of(made.to("meta")))


@with_contract("double", nn.Module)
def test_a_module_goes_on_in_the_dtype_of_its_input(name):
    """Whatever it holds from a use in float32."""
    made = make(name)
    use(made)
    results = tensors_of(use(made.double(), torch.float64))
    assert {tensor.dtype for tensor in results if tensor.is_floating_point()} <= {torch.float64}


@with_contract("double", RetrievalLoss)
def test_a_loss_in_float64_has_the_value_of_float32(name):
    embeddings, labels, values = torch.randn(12, 8), torch.arange(12) // 4, []
    for dtype in (torch.float32, torch.float64):
        rows = embeddings.to(dtype, copy=True).requires_grad_()
        value = make(name)(rows, labels)
        value.backward()
        assert value.dtype == rows.grad.dtype == dtype
        values.append(value.item())
    assert values[0] == pytest.approx(values[1], rel=1e-4)


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


def alike(value, other):
    """Whether two values are equal; what cannot be compared is alike only if both are empty."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(alike(value[key], other[key]) for key in value)
    return value == other


@pytest.mark.filterwarnings("ignore:PCAWhitening. nothing has been learned yet:UserWarning")
@with_contract("resume", pl.Callback)
def test_a_callback_resumes_with_what_a_run_left_in_it(name, tmp_path, monkeypatch):
    """Its public attributes, but for the results of the last evaluation."""
    monkeypatch.chdir(tmp_path)  # where a callback writes to a relative path
    callback, resumed = make(name), make(name)
    run_training(callback, tmp_path)
    file = io.BytesIO()
    torch.save(callback.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.state_dict() == callback.state_dict()
    for attribute in vars(resumed).keys() - {"results", "last", "log", "log_dict"}:
        if not attribute.startswith("_"):
            assert alike(getattr(resumed, attribute), getattr(callback, attribute)), attribute
