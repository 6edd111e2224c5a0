"""Runs of `run.py` from a pretrained network, whose frozen part is applied to each image once for all runs.

The network is EfficientNet-Lite0 with the ImageNet weights that the extra `offline-weights` installs. A run trains a
head on its features, or its last two stages.
"""

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_retrieval import Embedder
from lightning_retrieval.preparation.prepare import open_image

SIZE = 96  # of the images in pixels
FROZEN_STAGES = 5  # of the seven
FEATURE_DIM = 1280
BATCH_SIZE = 100

Table = dict[str, Tensor]  # by the path of an image in the folder of its data set


def pretrained() -> Embedder:
    """Return the pretrained network, with its own pooling."""
    return Embedder(
        "timm/tf_efficientnet_lite0",
        weights="efficientnet-lite0",
        pooling="avg",
        image_size=SIZE,
        preparation={"resize": SIZE},
        freeze_batch_norm=True,
    ).eval()


def frozen_stages(network: Any) -> nn.Sequential:
    """Return the part that maps images to the input of the last two stages, (N, 112, 6, 6)."""
    return nn.Sequential(network.conv_stem, network.bn1, network.blocks[:FROZEN_STAGES])


def last_stages(network: Any) -> nn.Sequential:
    """Return the part behind the frozen stages, which ends with the feature map (N, 1280, 3, 3)."""
    return nn.Sequential(network.blocks[FROZEN_STAGES:], network.conv_head, network.bn2)


def stored_inputs(network: str, root: Path, file: Path) -> Table:
    """Return what the trained part of a network gets for each image; the first call computes and stores it.

    Args:
        network: `"head"` or `"last stages"`.
        root: the folder that emoji.py or photographs.py wrote.
        file: where the table is stored.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        torch.save(compute_inputs(network, root), part)
        os.replace(part, file)
    return load_table(file)


@functools.cache
def load_table(file: Path) -> Table:
    """Return a stored table, which is read once for all runs of a process."""
    names, rows = torch.load(file, weights_only=True, mmap=True).values()
    return dict(zip(names, rows))


@torch.no_grad()
def compute_inputs(network: str, root: Path) -> dict[str, Any]:
    """Apply the frozen part of a network to each image of a folder."""
    embedder = pretrained()
    frozen = frozen_stages(embedder.backbone.model)
    if network == "head":
        frozen = nn.Sequential(frozen, last_stages(embedder.backbone.model), embedder.pool)
    files = sorted(file for file in root.rglob("*") if file.is_file())
    rows = []
    for start in tqdm(range(0, len(files), BATCH_SIZE), desc=f"Frozen part before the {network}"):
        images = [embedder.preparation(open_image(file)) for file in files[start : start + BATCH_SIZE]]
        rows.append(frozen(torch.stack(images)))
    return {"names": [file.relative_to(root).as_posix() for file in files], "rows": torch.cat(rows)}


def trained_part(network: str) -> tuple[nn.Module, int]:
    """Return the backbone of an embedder that gets stored inputs, and the dimension of its features."""
    if network == "head":
        return nn.Identity(), FEATURE_DIM
    return last_stages(pretrained().backbone.model), FEATURE_DIM
