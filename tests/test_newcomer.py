"""What a newcomer has to write to add a metric and a data set, done in one copy of the source tree."""

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
    before = "from lightning_retrieval.datamodules.readers.online_products import "
    new_line = "from lightning_retrieval.datamodules.readers.named_images import NamedImages as NamedImages\n"
    replace_once(datamodules / "__init__.py", before, new_line + before)


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
main(["check", "--data", "NamedImages", "--root", "images"])
"""


def test_a_metric_and_a_data_set(tmp_path):
    package = copy_of_the_tree(tmp_path)
    add_metric(package)
    add_data_set(package)
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
