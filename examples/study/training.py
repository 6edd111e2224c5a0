"""Trains and evaluates one run of `run.py`: a setting with a seed."""

import importlib
import logging
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from experiments import THIRD_PARTY, Setting
from features import Table, stored_inputs, trained_part
from peers import (
    PROXY_LOSSES,
    InfoNCELoss,
    MinedTripletLoss,
    ProxyLoss,
    ProxyTraining,
    WeightedLogRankLoss,
    adam_with_proxies,
    proxy_losses,
)
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, Updates, losses
from lightning_retrieval.callbacks import MemoryMonitor
from lightning_retrieval.datamodules import (
    CategorySampler,
    GlobalBatchSampler,
    Glyphs,
    ImageFolder,
    ImageIndex,
    ImageSet,
    RetrievalDataModule,
    item_generator,
)
from lightning_retrieval.datamodules.glyphs.glyphs import random_affine
from lightning_retrieval.datamodules.image_index import ROLES
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models import GlyphNet, Preparation

IMAGE_SIZE = 32  # of pictures from a folder, as that of the glyphs
FIRST_STEPS = 0.2  # of all, with the first loss
CLIP = 1.0  # largest norm of gradients
OWN_LOSSES = {loss.__name__: loss for loss in (WeightedLogRankLoss, InfoNCELoss, MinedTripletLoss)}
HELD_OUT = 0.2  # of the training classes of the emoji, where a setting says so; the others always hold some out


@dataclass(frozen=True)
class Place:
    """Where runs are done: the same setting gives the same result in another place, up to rounding."""

    accelerator: str
    folders: Mapping[str, Path]  # the folders that emoji.py and photographs.py wrote, by the names of the data sets
    weights: Path  # folder of the networks from which other runs start, and of what frozen parts of networks give


class DriftRecord(MemoryMonitor):
    """Keeps the drift, and the step at which the memory begins."""

    def __init__(self, setting: Setting) -> None:
        if isinstance(setting.memory_start, float):
            super().__init__(start_drift=setting.memory_start)
        else:
            super().__init__()
        self.begin: int | None = None
        self.drift: dict[int, float] = {}  # by the step before which it was measured

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        memory: Any = pl_module.memory
        step = memory.steps - 1
        drift = trainer.callback_metrics.get("train/memory_drift")
        if drift is not None and step % self._interval == 0:
            self.drift[step] = round(float(drift), 4)
        if self.begin is None and memory.started and len(memory) > 0:
            self.begin = step

    def result(self) -> dict[str, Any]:
        """Return what a line of `results.jsonl` holds of it."""
        return {"memory_begin": self.begin, "drift": {str(step): drift for step, drift in self.drift.items()}}


class ShuffledSampler(GlobalBatchSampler):
    """Fills batches with images in random order, of whatever classes."""

    def __init__(self, labels: torch.Tensor, *, batch_size: int, seed: int = 0) -> None:
        super().__init__(labels, seed=seed)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def draw(self, generator: np.random.Generator) -> list[np.ndarray[Any, Any]]:
        return np.split(self.order(generator)[: len(self) * self.batch_size], len(self))

    def order(self, generator: np.random.Generator) -> np.ndarray[Any, Any]:
        """All images in random order."""
        return generator.permutation(self.images)


class WholeClassesSampler(ShuffledSampler):
    """Fills batches with one class after another, in random order; a class may continue in the next batch."""

    def order(self, generator: np.random.Generator) -> np.ndarray[Any, Any]:
        classes = np.split(self.images, self.class_starts[1:])
        return np.concatenate([classes[i] for i in generator.permutation(len(classes))])


UNBALANCED = {"whole classes": WholeClassesSampler, "shuffled": ShuffledSampler}


class SmallImages(ImageSet):
    """Images that are prepared once for all runs of a process."""

    prepared: ClassVar[dict[Path, torch.Tensor]] = {}
    augment = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """The items of a batch, whose images are changed together."""
        images = torch.stack([self.prepare(index) for index in indices])
        if self.augment:
            random = torch.stack([torch.rand(6, generator=item_generator(index)) for index in indices])
            images = 1 - random_affine(1 - images, random)  # the background is white
        rows = torch.tensor(indices)
        columns = {"images": images, "labels": self.labels[rows], "ids": rows}
        if self.index.roles is not None:
            columns["roles"] = torch.from_numpy(self.index.roles)[rows]
        return [{name: values[row] for name, values in columns.items()} for row in range(len(rows))]

    def prepare(self, index: int) -> torch.Tensor:
        file = self.file(index)
        if file not in self.prepared:
            self.prepared[file] = self.transform(self.read(index))
        return self.prepared[file]


class StoredInputs(SmallImages):
    """What the trained part of a pretrained network gets for each image."""

    table: Table

    def prepare(self, index: int) -> torch.Tensor:
        return self.table[self.index.paths[index]]


class Pictures(ImageFolder):
    """Emoji or photographs, with the augmentation of `Glyphs`; or stored inputs of a pretrained network's trained part.

    Args:
        root: the folder that emoji.py or photographs.py wrote.
        table: the stored inputs.
        arguments: keyword arguments of `ImageFolder`.
    """

    of_folder: ClassVar[dict[Path, dict[str, ImageIndex]]] = {}  # what was read once for all runs of a process

    def __init__(self, root: Path, table: Table | None = None, **arguments: Any) -> None:
        preparation = Preparation(image_size=IMAGE_SIZE, resize=IMAGE_SIZE, mean=(0, 0, 0), std=(1, 1, 1))
        super().__init__(root, categories=True, train_transform=preparation, eval_transform=preparation, **arguments)
        self.table = table

    @property
    def splits(self) -> dict[str, ImageIndex]:
        if self.root not in self.of_folder:
            self.of_folder[self.root] = super().splits
        return self.of_folder[self.root]

    def image_set(self, index: ImageIndex, transform: Any) -> ImageSet:
        images = self.evaluation_set("train", index)
        images.augment = self.table is None
        return images

    def evaluation_set(self, name: str, index: ImageIndex) -> SmallImages:
        if self.table is None:
            return SmallImages(index, self.root, self.eval_transform)
        images = StoredInputs(index, self.root, self.eval_transform)
        images.table = self.table
        return images


class AmongTrained(Pictures):
    """Pictures of which one of each training class is not trained on; these query the others, in place of the test set.

    A class with a single picture is trained on, and has no query.
    """

    @cached_property
    def queries(self) -> np.ndarray[Any, Any]:
        """Whether each picture of the training classes is a query; they are the same for all seeds of runs."""
        labels = self.splits["train"].labels
        order = np.random.default_rng(0).permutation(len(labels))
        _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
        queries = np.zeros(len(labels), dtype=bool)
        queries[order[first[counts > 1]]] = True
        return queries

    @cached_property
    def train_set(self) -> ImageSet:
        return self.image_set(self.splits["train"][~self.queries], self.train_transform)

    @cached_property
    def test_set(self) -> ImageSet:
        index = self.splits["train"][:]
        index.roles = np.where(self.queries, ROLES["query"], ROLES["gallery"]).astype(np.uint8)
        return self.evaluation_set("test", index)


def make_data(setting: Setting, seed: int, place: Place) -> RetrievalDataModule:
    """Create the data module of a setting, with its batch sampler."""
    arguments: dict[str, Any] = {
        "classes_per_batch": setting.classes,
        "samples_per_class": setting.per_class,
        "seed": seed,
    }
    data: RetrievalDataModule
    if setting.data == "glyphs":
        if setting.trained_classes:
            raise ValueError("trained_classes=True must be with data='emoji' or 'photographs', got 'glyphs'")
        data = Glyphs(**arguments)
    else:
        data = make_pictures(setting, place, arguments)
    if setting.sampler in UNBALANCED:
        size = setting.classes * setting.per_class
        data.sampler = UNBALANCED[setting.sampler](data.train_set.labels, batch_size=size, seed=seed)
    elif setting.sampler == "category" and setting.data == "glyphs":
        labels = data.train_set.labels
        neighbours = torch.unique(labels, return_inverse=True)[1] // 32  # labels are in the order of Unicode
        data.sampler = CategorySampler(
            labels, neighbours, classes_per_batch=setting.classes, samples_per_class=setting.per_class, seed=seed
        )
    return data


def make_pictures(setting: Setting, place: Place, arguments: dict[str, Any]) -> Pictures:
    """Create the data module of emoji or photographs."""
    root = place.folders[setting.data]
    if setting.held_out and setting.data == "emoji":
        arguments["val_fraction"] = HELD_OUT
    if setting.sampler == "category":
        arguments["sampler"] = "category"
    if setting.network != "GlyphNet":
        name = f"{setting.data}_{setting.network.replace(' ', '_')}.pt"
        arguments["table"] = stored_inputs(setting.network, root, place.weights / name)
    pictures = AmongTrained if setting.trained_classes else Pictures
    return pictures(root, **arguments)


def make_loss(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a loss of this library, of pytorch-metric-learning or of the study."""
    if name in OWN_LOSSES:
        return OWN_LOSSES[name](**arguments)
    source: Any = losses
    if name in THIRD_PARTY:
        try:
            source = importlib.import_module("pytorch_metric_learning.losses")
        except ImportError:
            raise ImportError(f"{name} is pytorch-metric-learning's: pip install pytorch-metric-learning.") from None
    loss: nn.Module = getattr(source, name)(**arguments)
    return loss


def make_term(name: str, setting: Setting, arguments: Mapping[str, Any], classes: torch.Tensor | None) -> nn.Module:
    """Create a loss of a setting, with proxies of the training classes if it has any that are trained apart."""
    if classes is None or name not in PROXY_LOSSES:
        return make_loss(name, arguments)
    return ProxyLoss(name, classes, {"embedding_size": setting.dim, **arguments})


def scaled(loss: nn.Module, scale: float) -> nn.Module:
    """Multiply a loss."""
    if scale == 1:
        return loss
    return losses.WeightedSum({"scaled": (scale, loss)})


def loss_of_steps(setting: Setting, steps: int, classes: torch.Tensor | None = None) -> nn.Module:
    """Create the loss of a setting, which may begin with another one for the first fifth of the steps.

    Args:
        setting: the setting.
        steps: number of training steps.
        classes: the labels of the training set, if the setting has proxies that are trained apart.
    """
    loss = make_term(setting.loss, setting, setting.loss_args, classes)
    if setting.added_loss is not None:
        added = make_term(setting.added_loss, setting, setting.added_args, classes)
        loss = losses.WeightedSum({"loss": (1.0, loss), "added": (setting.added_weight, added)})
    loss = scaled(loss, setting.loss_scale)
    if setting.first_loss is None:
        return loss
    switch = round(FIRST_STEPS * steps) / steps
    first = scaled(make_loss(setting.first_loss, setting.first_args), setting.loss_scale)
    at_first, then = losses.Schedule([(0, 1), (switch, 0)]), losses.Schedule([(0, 0), (switch, 1)])
    return losses.WeightedSum({"first": (at_first, first), "then": (then, loss)})


def make_embedder(setting: Setting) -> Embedder:
    """Create the network of a setting."""
    arguments: dict[str, Any] = {"freeze_batch_norm": setting.freeze_batch_norm, "pooling": setting.pooling}
    if setting.network != "GlyphNet":
        backbone, feature_dim = trained_part(setting.network)
        return Embedder(backbone, setting.dim, feature_dim=feature_dim, **arguments)
    channels = 1 if setting.data == "glyphs" else 3
    backbone = GlyphNet(setting.width, channels)
    if setting.pooling == "flatten":
        backbone = nn.Sequential(backbone, nn.Flatten())
        arguments["feature_dim"] = 8 * setting.width * (IMAGE_SIZE // 8) ** 2
        arguments["pooling"] = None
    return Embedder(backbone, setting.dim, **arguments)


def make_module(setting: Setting, steps: int, classes: torch.Tensor | None = None) -> RetrievalModule:
    """Create the module of a setting, whose learning rate falls to 0 over the steps."""
    memory = None
    if setting.memory:
        start: Any = setting.memory_start
        if isinstance(start, float):
            start = "auto"
        memory = CrossBatchMemory(setting.memory, start, mode=setting.memory_mode)
    embedder, loss = make_embedder(setting), loss_of_steps(setting, steps, classes)
    optimizer: Any = partial(torch.optim.AdamW, lr=setting.lr, weight_decay=setting.weight_decay, fused=True)
    updates = Updates(gradient_clip_val=CLIP)
    if setting.proxies is not None:
        proxies = [proxy for part in proxy_losses(loss) for proxy in part.parameters()]
        optimizer = partial(
            adam_with_proxies,
            proxies=proxies,
            factor=setting.proxy_rate,
            lr=setting.lr,
            weight_decay=setting.weight_decay,
        )
        updates = Updates()  # ProxyTraining clips
    return RetrievalModule(
        embedder,
        loss,
        chunk_size=setting.chunk_size,
        optimizer=optimizer,
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=max(1, steps)),
        lr_scheduler_interval="step",
        updates=updates,
        memory=memory,
    )


def start_weights(setting: Setting, seed: int, place: Place) -> dict[str, torch.Tensor]:
    """Return the weights of the embedder that a setting trains; they are kept for the runs that start from them."""
    file = place.weights / f"{setting.key(seed)}.pt"
    if not file.exists():
        module, _ = train(setting, seed, place)
        part = file.with_suffix(f".{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(module.embedder.state_dict(), part)
        os.replace(part, file)
    weights: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return weights


def train(setting: Setting, seed: int, place: Place) -> tuple[RetrievalModule, tuple[pl.Trainer, RetrievalDataModule]]:
    """Train one setting with one seed; returns the module, and what its evaluation needs."""
    start = None
    if setting.start is not None:
        start = start_weights(setting.start, seed, place)
    pl.seed_everything(seed, verbose=False)
    steps = setting.images // (setting.classes * setting.per_class)
    data = make_data(setting, seed, place)
    classes = None
    if setting.proxies is not None:
        classes = data.train_set.labels.unique()
    module = make_module(setting, steps, classes)
    if start is not None:
        module.embedder.load_state_dict(start)
    callbacks: list[pl.Callback] = []
    if setting.memory_start:
        callbacks.append(DriftRecord(setting))
    if setting.proxies is not None:
        callbacks.append(ProxyTraining(setting.proxies, CLIP))
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator=place.accelerator,
        devices=1,
        precision=setting.precision,
        limit_val_batches=0,
        limit_predict_batches=setting.test_batches,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if steps:
        trainer.fit(module, datamodule=data)
    return module, (trainer, data)


def evaluate(setting: Setting, module: RetrievalModule, trainer: pl.Trainer, data: RetrievalDataModule) -> Any:
    """Return the metrics of the test set, or of the other classes or images that a setting evaluates instead."""
    metrics = RetrievalMetrics(ks=(1,))
    loader = data.test_dataloader()
    if setting.held_out:
        loader = data.val_dataloader()
    outputs: Any = trainer.predict(module, loader)
    for output in outputs:
        metrics.to(output["embeddings"].device).update(**output)
    return metrics.compute()


def run(setting: Setting, seed: int, place: Place) -> dict[str, Any]:
    """Train and evaluate one setting with one seed, and return the line of `results.jsonl`."""
    start, cpu_start = time.perf_counter(), time.process_time()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # only the study shows its progress
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, (trainer, data) = train(setting, seed, place)
        values = evaluate(setting, module, trainer, data)
    result = {
        "key": setting.key(seed),
        "seed": seed,
        "setting": asdict(setting),
        "metrics": {name: round(float(values[name]), 6) for name in ("mAP", "R@1", "mAP@R")},
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
        "device": trainer.strategy.root_device.type,
        "torch": torch.__version__,
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, DriftRecord):
            result |= callback.result()
    return result
