"""Checks that the tests of all data sets run on a small tree of images: a short training, and an unreadable image."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules.image_module import ImageDataModule
from tests.datamodules.trees import truncate
from tests.quiet_trainer import quiet_trainer

SMALL = v2.Compose([v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
SETTINGS: dict[str, Any] = {
    "train_transform": SMALL,
    "eval_transform": SMALL,
    "classes_per_batch": 2,
    "samples_per_class": 2,
    "eval_batch_size": 4,
}


def fit_and_validate(data: ImageDataModule, steps: int = 2) -> dict[str, float]:
    """Train a small network for a few steps, then validate; return the metrics."""
    torch.manual_seed(2)
    embedder = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 8))
    before = embedder[2].weight.detach().clone()
    trainer = quiet_trainer(
        limit_train_batches=steps,
        limit_val_batches=0,
        max_epochs=1,
        callbacks=[RetrievalEvaluation((1,))],
    )
    module = RetrievalModule(embedder, SmoothAPLoss(tau=0.1))
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == steps
    assert not torch.equal(embedder[2].weight, before)
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def raise_then_skip_truncated(kind: type[ImageDataModule], root: Path, path: str, **settings: Any) -> None:
    """Truncate an image of the evaluation set: an error names its path, or it is skipped with a warning and counted."""
    truncate(root / path)
    raising = kind(root, **SETTINGS, **settings)
    with pytest.raises(ValueError, match=re.escape(f"cannot read the image {root / path} (")):
        _ids(raising)
    skipping = kind(root, on_error="skip", **SETTINGS, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sets = _ids(skipping)
    messages = [str(warning.message) for warning in caught]
    assert sum(f"skipped {root / path}," in message for message in messages) == len(sets)
    for dataset, ids in sets:
        assert dataset.skipped == [path]
        assert sorted([*ids, list(dataset.index.paths).index(path)]) == list(range(len(dataset)))


def _ids(data: ImageDataModule) -> list[tuple[Any, list[int]]]:
    """The evaluation sets, and the ids of the images that their loaders return."""
    loaders = data.test_dataloader()
    return [
        (loader.dataset, torch.cat([batch["ids"] for batch in loader]).tolist())
        for loader in (loaders.values() if isinstance(loaders, dict) else [loaders])
    ]


def replace(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence of `old` in a text file."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
