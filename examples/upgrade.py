"""Train a new network that searches the index of an old one: a table of three seeds, with intervals.

python examples/upgrade.py

The old network is narrow. The new one is three times as wide and is trained for twice as long. It embeds queries only:
the candidates of its training are embedded by the old network, which is frozen, so the index of the old network stays
valid. As the old network does not change, the embeddings in the memory do not age, and make long lists.

The test ranks characters that are not in the training set: the images in the styles of DejaVu Sans are the queries, and
those in the styles of DejaVu Serif are the index. Rows with the same seed are compared with each other: a column has
the mean difference to the old network with its 95 % t-interval. The last row is what embedding the index again would
bring: the new network, trained by itself. Table and results are written to the output folder; seeds that are in
`results.jsonl` are not repeated.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from intervals import interval
from results_file import read_results, write_file, write_results
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, LogRankLoss, RetrievalModule, TwoNetworks, Updates
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.command_line import CommandParser
from lightning_retrieval.datamodules import Glyphs, Pairs
from lightning_retrieval.models import GlyphNet
from lightning_retrieval.training.run_report import quiet_trainer

OLD_WIDTH, NEW_WIDTH, DIM = 8, 24, 64
LEARNING_RATE, BATCH, MEMORY = 0.003, {"classes_per_batch": 32, "samples_per_class": 4}, 4096
METRICS = ("mAP", "R@1")  # the differences are those of the first
QUERY_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSans-Oblique")
INDEX_FONTS = ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic", "DejaVuSerif-Italic")
OLD = "old queries, old index"
EXPECTED_WARNINGS = ("PKSampler: skipped ", "PairSampler: skipped ")


def make_embedder(width: int) -> nn.Module:
    """Create a network."""
    return Embedder(GlyphNet(width), DIM)


def make_trainer(steps: int, **settings: Any) -> pl.Trainer:
    """Create a trainer that logs and saves nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(max_steps=steps, accelerator="cpu", enable_model_summary=False, **quiet, **settings)


def train(data: pl.LightningDataModule, steps: int, embedder: nn.Module, **settings: Any) -> None:
    """Train the networks of a module, with a learning rate that falls to 0 over the steps."""
    module = RetrievalModule(
        embedder,
        LogRankLoss(),
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        lr_scheduler_interval="step",
        updates=Updates(gradient_clip_val=1.0),
        **settings,
    )
    make_trainer(steps, limit_val_batches=0).fit(module, data)


def evaluate(queries: nn.Module, index: nn.Module) -> dict[str, float]:
    """Rank the index for each query, and return the metrics of the test characters.

    Args:
        queries: the network that embeds the queries.
        index: the network that embedded the index.
    """
    data = Pairs(Glyphs(fonts=QUERY_FONTS), Glyphs(fonts=INDEX_FONTS))
    sides = TwoNetworks(queries) if queries is not index else None
    evaluation = RetrievalEvaluation(ks=(1,))
    module = RetrievalModule(index, LogRankLoss(), sides=sides)
    make_trainer(0, callbacks=[evaluation]).test(module, data, verbose=False)
    return {name: round(evaluation.results["test"][f"test/{name}"], 6) for name in METRICS}


def run(seed: int, steps: int) -> dict[str, dict[str, float]]:
    """Train all networks with one seed, and return the metrics of each row of the table."""
    pl.seed_everything(seed, verbose=False)
    old, new, alone = make_embedder(OLD_WIDTH), make_embedder(NEW_WIDTH), make_embedder(NEW_WIDTH)
    train(Glyphs(**BATCH), steps, old)
    old.requires_grad_(False)
    pairs = Pairs(Glyphs(), Glyphs(), queries_per_class=BATCH["samples_per_class"], **BATCH)
    train(pairs, 2 * steps, old, sides=TwoNetworks(new), memory=CrossBatchMemory(MEMORY))
    train(Glyphs(**BATCH), 2 * steps, alone)
    return {
        OLD: evaluate(old, old),
        "new queries, old index": evaluate(new, old),
        "new queries, new index": evaluate(new, new),
        "new network trained alone, its own index": evaluate(alone, alone),
    }


def markdown(runs: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """Return the table.

    Args:
        runs: for each seed, the metrics of each row.
    """
    head = ["", *METRICS, f"{METRICS[0]} minus that of the first (95 % interval)"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row in runs[0]:
        cells = [row]
        cells += [f"{statistics.fmean(of_seed[row][metric] for of_seed in runs):.4f}" for metric in METRICS]
        difference = ""
        if row != OLD and len(runs) > 1:
            mean, low, high = interval([of_seed[row][METRICS[0]] - of_seed[OLD][METRICS[0]] for of_seed in runs])
            difference = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
        lines.append(f"| {' | '.join([*cells, difference])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("logs/upgrade"), help="folder of the table and the results")
    parser.add_argument("--steps", type=int, default=200, help="steps of the old network, half of those of the new one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "results.jsonl"
    results = read_results(file)
    keys = [f"seed {seed}, {options.steps} steps" for seed in options.seeds]
    for key, seed in zip(keys, options.seeds):
        if key not in results:
            print(key, flush=True)
            results[key] = {"key": key, "rows": run(seed, options.steps)}
            write_results(file, results)
    table = markdown([results[key]["rows"] for key in keys])
    write_file(options.output / "upgrade.md", table)
    print(f"\n{len(keys)} seeds\n\n{table}", flush=True)


if __name__ == "__main__":
    with quiet_trainer(*EXPECTED_WARNINGS):
        main()
