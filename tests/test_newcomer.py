"""What a newcomer has to write to add something to the library, done in a copy of the source tree."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


def copy_of_the_tree(tmp_path):
    """Copy the three packages as they are installed, and return the folder of the import package."""
    package = tmp_path / "lightning_retrieval"
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "lightning_retrieval", package, ignore=without_caches)
    for name in ("callbacks", "datamodules"):
        shutil.copytree(REPOSITORY / name, package / name, ignore=without_caches)
    return package


def run_in_the_copy(package, program):
    """Run a program that imports the library from the copy, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    check = f"import lightning_retrieval; assert lightning_retrieval.__file__.startswith({str(package)!r})\n"
    command = [sys.executable, "-c", check + program]
    done = subprocess.run(command, env=environment, cwd=package.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def replace_once(path, old, new):
    source = path.read_text(encoding="utf-8")
    assert source.count(old) == 1
    path.write_text(source.replace(old, new), encoding="utf-8")


NEW_METRIC = '''

def precision_of_the_last(ranks: PositiveRanks) -> Float[Tensor, " query"]:
    """R / r_R: the precision at the rank of the last positive."""
    return ranks.count / ranks.rank.amax(1).double()
'''

NEW_ENTRY = '        QueryMetric(definitions.precision_of_the_last, "P@last", "mP@last"),\n'

USE_OF_THE_METRIC = """
import torch
from lightning_retrieval import RetrievalMetrics

angle = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
embeddings = torch.stack([angle.cos(), angle.sin()], 1)
roles = torch.tensor([1, 2, 2, 2, 2])
metrics = RetrievalMetrics(ks=(1,))
metrics.update(embeddings, torch.tensor([1, 1, 2, 1, 2]), None, roles)
print(metrics.compute()["mP@last"].item(), metrics.per_query()["P@last"].tolist())
"""


def test_metric_in_one_function_and_one_table_entry(tmp_path):
    package = copy_of_the_tree(tmp_path)
    with (package / "metrics" / "definitions.py").open("a", encoding="utf-8") as file:
        file.write(NEW_METRIC)
    table = package / "metrics" / "retrieval.py"
    first_entry = '        QueryMetric(definitions.average_precision, "AP", "mAP"),\n'
    replace_once(table, first_entry, first_entry + NEW_ENTRY)
    # The query's list is: relevant, irrelevant, relevant, irrelevant. The last positive has rank 3.
    assert run_in_the_copy(package, USE_OF_THE_METRIC) == f"{2 / 3} [{2 / 3}]\n"


NEW_LOSS = '''"""The first hit: 1 - 1 / rank of the best positive."""

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.checks import check_positive
from lightning_retrieval.losses.base import RetrievalLoss
from lightning_retrieval.losses.positives import ScoreBlock


def first_hit(lists: ScoreBlock, *, tau: float) -> Float[Tensor, " query"]:
    """1 - 1 / (1 + sum over negatives j of sigma((s_j - s_best) / tau))."""
    best = lists.scores.masked_fill(~lists.relevant, -torch.inf).amax(1, keepdim=True)
    above = torch.sigmoid((lists.scores - best) / tau) * (lists.candidate & ~lists.relevant)
    return 1 - 1 / (1 + above.sum(1))


class FirstHitLoss(RetrievalLoss):
    """1 - 1 / rank of the best positive."""

    def __init__(self, tau: float = 0.05) -> None:
        super().__init__()
        self.tau = check_positive(self.name, "tau", tau)

    def query_losses(self, lists: ScoreBlock) -> Float[Tensor, " query"]:
        return first_hit(lists, tau=self.tau)
'''

CONFIG = """
seed_everything: 0
model:
  class_path: lightning_retrieval.RetrievalModule
  init_args:
    embedder: {class_path: lightning_retrieval.Embedder, init_args: {backbone: BACKBONE, embedding_dim: 8}}
    loss: {class_path: LOSS}
    chunk_size: 3
data:
  class_path: lightning_retrieval.datamodules.DATA
  init_args: {SETTINGS classes_per_batch: 2, samples_per_class: 2}
trainer:
  accelerator: cpu
  max_steps: 1
  limit_val_batches: 0
  log_every_n_steps: 1
  logger: {class_path: pytorch_lightning.loggers.CSVLogger, init_args: {save_dir: logs}}
"""


def train_one_step(package, **values):
    """Train by the command line with the words of the config replaced; return the loss that was logged."""
    config = CONFIG
    for word, value in values.items():
        config = config.replace(word, value)
    (package.parent / "config.yaml").write_text(config, encoding="utf-8")
    run_in_the_copy(package, 'from lightning_retrieval.cli.main import main\nmain(["fit", "--config", "config.yaml"])')
    with (package.parent / "logs/lightning_logs/version_0/metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    return float(row["train/loss"])


def test_loss_in_one_file_and_two_lines(tmp_path):
    package = copy_of_the_tree(tmp_path)
    losses = package / "losses"
    (losses / "first_hit.py").write_text(NEW_LOSS, encoding="utf-8")
    before = "from lightning_retrieval.losses.hap import HAPLoss\n"
    new_line = "from lightning_retrieval.losses.first_hit import FirstHitLoss\n"
    replace_once(losses / "__init__.py", before, new_line + before)
    replace_once(losses / "__init__.py", '    "HAPLoss",\n', '    "FirstHitLoss",\n    "HAPLoss",\n')
    loss = "lightning_retrieval.losses.FirstHitLoss, init_args: {tau: 0.5}"
    assert 0 < train_one_step(package, BACKBONE="glyph_net", LOSS=loss, DATA="Glyphs", SETTINGS="") < 1


NEW_SET = '''"""Images in one folder, whose names begin with their class: mug_1.png."""

from collections.abc import Mapping

from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule

SPLITS = {"train": ("cup", "mug"), "test": ("jug", "pot")}


class NamedImages(ImageDataModule):
    """Images in one folder, whose names begin with their class."""

    def read(self) -> Mapping[str, ImageIndex]:
        splits = {}
        for split, classes in SPLITS.items():
            paths, labels = [], []
            for label, name in enumerate(classes):
                found = sorted(path.name for path in self.root.glob(f"{name}_*.png"))
                paths += found
                labels += [label] * len(found)
            splits[split] = ImageIndex(paths, labels)
        return splits
'''

CHECK_OF_THE_SET = """
from lightning_retrieval.cli.main import main
main(["check", "--data", "NamedImages", "--root", "images"])
"""


def test_data_set_in_one_file_and_one_line(tmp_path):
    package = copy_of_the_tree(tmp_path)
    datamodules = package / "datamodules"
    (datamodules / "readers" / "named_images.py").write_text(NEW_SET, encoding="utf-8")
    before = "from lightning_retrieval.datamodules.readers.online_products import "
    new_line = "from lightning_retrieval.datamodules.readers.named_images import NamedImages as NamedImages\n"
    replace_once(datamodules / "__init__.py", before, new_line + before)
    (tmp_path / "images").mkdir()
    for name in ("cup", "mug", "jug", "pot"):
        for number in range(3):
            Image.effect_noise((40, 30), 50).convert("RGB").save(tmp_path / "images" / f"{name}_{number}.png")
    assert "train       6        2" in run_in_the_copy(package, CHECK_OF_THE_SET)
    loss = train_one_step(
        package,
        BACKBONE="resnet18, weights: null",
        LOSS="lightning_retrieval.SmoothAPLoss",
        DATA="NamedImages",
        SETTINGS="root: images,",
    )
    assert 0 <= loss <= 1
