"""What a newcomer has to write to add a metric, a loss and a data set, done in one copy of the source tree."""

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


def add_metric(package):
    """One function and one table entry."""
    with (package / "metrics" / "definitions.py").open("a", encoding="utf-8") as file:
        file.write(NEW_METRIC)
    first_entry = '        QueryMetric(definitions.average_precision, "AP", "mAP"),\n'
    replace_once(package / "metrics" / "retrieval.py", first_entry, first_entry + NEW_ENTRY)


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


def add_loss(package):
    """One file and two lines."""
    losses = package / "losses"
    (losses / "first_hit.py").write_text(NEW_LOSS, encoding="utf-8")
    before = "from lightning_retrieval.losses.hap import HAPLoss\n"
    new_line = "from lightning_retrieval.losses.first_hit import FirstHitLoss\n"
    replace_once(losses / "__init__.py", before, new_line + before)
    replace_once(losses / "__init__.py", '    "HAPLoss",\n', '    "FirstHitLoss",\n    "HAPLoss",\n')


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


def add_data_set(package):
    """One file and one line."""
    datamodules = package / "datamodules"
    (datamodules / "readers" / "named_images.py").write_text(NEW_SET, encoding="utf-8")
    before = '    "PKSampler": '
    replace_once(
        datamodules / "__init__.py", before, '    "NamedImages": "datamodules.readers.named_images",\n' + before
    )


CONFIG = """
seed_everything: 0
model:
  class_path: lightning_retrieval.RetrievalModule
  init_args:
    embedder:
      class_path: lightning_retrieval.Embedder
      init_args: {backbone: squeezenet1_1, weights: null, embedding_dim: 8, image_size: 64}
    loss: {class_path: lightning_retrieval.losses.FirstHitLoss, init_args: {tau: 0.5}}
    chunk_size: 3
data:
  class_path: lightning_retrieval.datamodules.NamedImages
  init_args: {root: images, classes_per_batch: 2, samples_per_class: 2}
trainer:
  accelerator: cpu
  max_steps: 1
  limit_val_batches: 0
  log_every_n_steps: 1
  logger: {class_path: pytorch_lightning.loggers.CSVLogger, init_args: {save_dir: logs}}
"""
# The query's list is: relevant, irrelevant, relevant, irrelevant. The last positive has rank 3.
PROGRAM = """
import sys
import torch
import lightning_retrieval
from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.cli.main import main

assert lightning_retrieval.__file__.startswith(sys.argv[1])
angle = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
embeddings = torch.stack([angle.cos(), angle.sin()], 1)
roles = torch.tensor([1, 2, 2, 2, 2])
metrics = RetrievalMetrics(ks=(1,))
metrics.update(embeddings, torch.tensor([1, 1, 2, 1, 2]), None, roles)
print("mP@last", metrics.compute()["mP@last"].item(), metrics.per_query()["P@last"].tolist())
main(["fit", "--config", "config.yaml"])
main(["check", "--data", "NamedImages", "--root", "images"])
"""


def test_a_metric_a_loss_and_a_data_set(tmp_path):
    package = copy_of_the_tree(tmp_path)
    for add in (add_metric, add_loss, add_data_set):
        add(package)
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "images").mkdir()
    for name in ("cup", "mug", "jug", "pot"):
        for number in range(3):
            Image.effect_noise((40, 30), 50).convert("RGB").save(tmp_path / "images" / f"{name}_{number}.png")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(package)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"mP@last {2 / 3} [{2 / 3}]\n" in done.stdout
    assert "train       6        2" in done.stdout
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert 0 < float(row["train/loss"]) < 1
