"""The example config of Glyphs in a small run, for the tests of `fit` and its siblings."""

import csv
from pathlib import Path

IGNORED = ["ignore:RetrievalEvaluation. (val|test) metrics cover 2 of:UserWarning"]

EXAMPLE = Path(__file__).parents[3] / "examples" / "glyphs.yaml"

SMALL = [
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=2",
    "--trainer.limit_test_batches=2",
    "--trainer.limit_predict_batches=2",
    "--trainer.enable_progress_bar=false",
    "--data.init_args.eval_batch_size=64",
]

SHORT = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.check_val_every_n_epoch=1",
    "--data.init_args.classes_per_batch=4",
]


def write_example(folder: Path, **changes: str) -> Path:
    """The example with its logs in `folder`, and some of its lines changed."""
    text = EXAMPLE.read_text().replace("save_dir: logs", f"save_dir: {folder}")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "glyphs.yaml").write_text(text)
    return folder / "glyphs.yaml"


def metrics_of(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv without what is measured by a clock."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("train/images/s", None)
    return rows
