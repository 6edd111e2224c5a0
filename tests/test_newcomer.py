"""What a newcomer has to write to add something to the library, done in a copy of the source tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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

NEW_ENTRY = '    QueryMetric(definitions.precision_of_the_last, "P@last", "mP@last"),\n'

USE_OF_THE_METRIC = """
import torch
from lightning_retrieval import RetrievalMetrics

angle = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
embeddings = torch.stack([angle.cos(), angle.sin()], 1)
is_query = torch.tensor([True, False, False, False, False])
metrics = RetrievalMetrics(ks=(1,))
metrics.update(embeddings, torch.tensor([1, 1, 2, 1, 2]), None, is_query, ~is_query)
print(metrics.compute()["mP@last"].item(), metrics.per_query()["P@last"].tolist())
"""


def test_metric_in_one_function_and_one_table_entry(tmp_path):
    package = copy_of_the_tree(tmp_path)
    with (package / "metrics" / "definitions.py").open("a", encoding="utf-8") as file:
        file.write(NEW_METRIC)
    table = package / "metrics" / "table.py"
    first_entry = '    QueryMetric(definitions.average_precision, "AP", "mAP"),\n'
    replace_once(table, first_entry, first_entry + NEW_ENTRY)
    # The query's list is: relevant, irrelevant, relevant, irrelevant. The last positive has rank 3.
    assert run_in_the_copy(package, USE_OF_THE_METRIC) == f"{2 / 3} [{2 / 3}]\n"
