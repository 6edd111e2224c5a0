"""Train by the rules of evaluation and without them, with three seeds each: one table with intervals.

python examples/relevance.py
python examples/relevance.py --emoji emoji

**Cameras** (no download). Characters take the place of persons, and the families of matplotlib's fonts that of
cameras: a bold letter resembles the plain letter of its family as the next frame of a video does. Evaluation follows
Market-1501, so images of a query's character and family are not in its list. Training ranks by equal labels, or by
`OtherCamera`.

**Tags** (with the folder that `emoji.py` wrote). The tags of an emoji are its group and the words of its Unicode name.
Evaluation asks for images that share a tag with the query, among emoji that training has not seen. Training is by equal
labels, where only other makers' images of the same emoji are relevant, or by `SharedTags`.

Both settings of an experiment have the same network, loss, number of steps and size of batches, and the same training
and test images. Runs with the same seed are compared with each other: a column has the mean difference to the first row
with its 95 % t-interval. Pictures, tables and results are written to the output folder; runs that are in
`results.jsonl` are not repeated.
"""

import argparse
import csv
import statistics
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from intervals import interval
from PIL import Image
from results_file import read_results, write_file, write_results

from lightning_retrieval import Embedder, LogRankLoss, OtherCamera, Relevance, RetrievalModule, SharedTags, Updates
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.command_line import CommandParser
from lightning_retrieval.datamodules import ImageTable
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
from lightning_retrieval.models import GlyphNet, Preparation
from lightning_retrieval.training.run_report import quiet_trainer

TAGS_PER_BATCH, IMAGES_PER_TAG = 32, 4  # or classes
WIDTH, DIM, LEARNING_RATE = 16, 64, 0.003
METRICS = ("mAP", "R@1")  # the differences are those of the first
SCRIPTS = ("LATIN", "GREEK", "CYRILLIC")
FAMILIES = ("DejaVuSansMono", "DejaVuSans", "DejaVuSerif", "STIX", "cm")  # a longer name comes before its beginning
NO_KEYWORDS = {"AND", "FOR", "INDICATOR", "LETTER", "REGIONAL", "SIGN", "SYMBOL", "THE", "WITH"}
EXPECTED_WARNINGS = ("PKSampler: skipped ", "TagSampler: skipped ", "RetrievalModule: the batches have ")

# The rule of evaluation of each experiment, and for each setting the rule and the sampler of training.
RULES: dict[str, Relevance] = {"cameras": OtherCamera(), "tags": SharedTags()}
SETTINGS: dict[str, dict[str, tuple[Relevance | None, str]]] = {
    "cameras": {"equal labels": (None, "pk"), "OtherCamera": (OtherCamera(), "pk")},
    "tags": {"equal labels": (None, "pk"), "SharedTags": (SharedTags(), "tags")},
}


def write_table(file: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as CSV."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)


def write_glyphs(folder: Path, classes: int) -> None:
    """Write the characters as pictures, and a table in which the family of a font is the camera.

    Args:
        folder: receives the pictures and `glyphs.csv`.
        classes: largest number of classes in training and in the test.
    """
    glyphs = load_glyph_images()
    rows: list[Sequence[Any]] = [("image", "label", "split", "camera")]
    found: dict[str, set[int]] = {"train": set(), "test": set()}
    columns = zip(glyphs.images, glyphs.labels, glyphs.fonts, glyphs.splits)
    for number, (pixels, label, font, split) in enumerate(columns):
        if split not in found or glyphs.categories[label] not in SCRIPTS:
            continue
        if label not in found[split] and len(found[split]) == classes:
            continue
        found[split].add(label)
        name = glyphs.font_names[font]
        family = next(family for family in FAMILIES if name.startswith(family))
        file = folder / "glyphs" / str(label) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        rows.append((file.relative_to(folder), label, split, family))
    write_table(folder / "glyphs.csv", rows)


def keywords(code: str) -> list[str]:
    """Return the words of the Unicode names of an emoji's characters, without those that most names have.

    Args:
        code: the characters in hexadecimal, such as `1f468-200d-1f52c`.
    """
    characters = [chr(int(number, 16)) for number in code.split("-")]
    # Joiners and variation selectors, of the categories C and M, are no part of the picture.
    names = [unicodedata.name(one, "") for one in characters if unicodedata.category(one)[0] not in "CM"]
    words = " ".join(names).replace("-", " ").split()
    return sorted({word.lower() for word in words if len(word) > 2} - {word.lower() for word in NO_KEYWORDS})


def write_emoji_table(emoji: Path, folder: Path) -> None:
    """Write `emoji.csv`, without skin tones: each emoji is a class, and its tags are its group and its keywords."""
    rows: list[Sequence[Any]] = [("image", "label", "tags")]
    for file in sorted(emoji.glob("*/*/*.png")):
        group, code = file.parts[-3:-1]
        words = keywords(code)
        if "fitzpatrick" not in words:
            rows.append((file.relative_to(emoji), code, ";".join([group, *words])))
    write_table(folder / "emoji.csv", rows)


def make_data(experiment: str, sampler: str, options: argparse.Namespace) -> ImageTable:
    """Create the data module of an experiment."""
    preparation = Preparation.named("glyphs")
    root, table = options.output, "glyphs.csv"
    if experiment == "tags":
        preparation = Preparation(32, resize=32, mean=(0, 0, 0), std=(1, 1, 1))
        root, table = options.emoji, (options.output / "emoji.csv").absolute()
    return ImageTable(
        root,
        table,
        train_transform=preparation,
        eval_transform=preparation,
        sampler=sampler,
        classes_per_batch=options.tags,
        samples_per_class=IMAGES_PER_TAG,
    )


def make_module(experiment: str, relevance: Relevance | None, steps: int) -> RetrievalModule:
    """Create the module, whose learning rate falls to 0 over the steps."""
    channels = {"cameras": 1, "tags": 3}[experiment]
    return RetrievalModule(
        Embedder(GlyphNet(WIDTH, channels), DIM),
        LogRankLoss(),
        optimizer=partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
        lr_scheduler_interval="step",
        updates=Updates(gradient_clip_val=1.0),
        relevance=relevance,
    )


def train(experiment: str, setting: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one setting with one seed, evaluate it by the rule of the experiment, and return a line of the results."""
    start = time.process_time()
    relevance, sampler = SETTINGS[experiment][setting]
    pl.seed_everything(seed, verbose=False)
    data = make_data(experiment, sampler, options)
    module = make_module(experiment, relevance, options.steps)
    evaluation = RetrievalEvaluation(ks=(1,))
    trainer = pl.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        limit_val_batches=0,
        callbacks=[evaluation],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    module.relevance = RULES[experiment]
    trainer.test(module, data, verbose=False)
    return {
        "key": key_of(experiment, setting, seed, options.steps),
        "seed": seed,
        "metrics": {name: round(evaluation.results["test"][f"test/{name}"], 6) for name in METRICS},
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def key_of(experiment: str, setting: str, seed: int, steps: int) -> str:
    """Return the key of a run in the file of results."""
    return f"{experiment}, {setting}, seed {seed}, {steps} steps"


def markdown(experiment: str, results: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> str:
    """Return the table of an experiment, whose runs are complete."""
    lines = [
        f"| training by | {' | '.join(METRICS)} | {METRICS[0]} minus that of the first (95 % interval) | CPU time |",
        "| --- " * (len(METRICS) + 3) + "|",
    ]
    first: list[float] = []
    for setting in SETTINGS[experiment]:
        runs = [results[key_of(experiment, setting, seed, options.steps)] for seed in options.seeds]
        cells = [setting]
        for metric in METRICS:
            cells.append(f"{statistics.fmean(run['metrics'][metric] for run in runs):.4f}")
        values = [run["metrics"][METRICS[0]] for run in runs]
        difference = ""
        if first and len(values) > 1:
            mean, low, high = interval([value - base for value, base in zip(values, first)])
            difference = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
        first = first or values
        seconds = statistics.median(run["cpu_seconds"] for run in runs)
        lines.append(f"| {' | '.join([*cells, difference, f'{seconds:.0f} s'])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emoji", type=Path, help="the folder that emoji.py wrote; without it, only the cameras")
    parser.add_argument("--output", type=Path, default=Path("logs/relevance"), help="folder of pictures and results")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tags", type=int, default=TAGS_PER_BATCH, help="tags or classes in a batch, of 4 images each")
    parser.add_argument("--classes", type=int, default=sys.maxsize, help="largest number of characters in a split")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    experiments = ["cameras"]
    write_glyphs(options.output, options.classes)
    if options.emoji is not None:
        experiments.append("tags")
        write_emoji_table(options.emoji, options.output)

    file = options.output / "results.jsonl"
    results = read_results(file)
    for experiment in experiments:
        for seed in options.seeds:
            for setting in SETTINGS[experiment]:
                key = key_of(experiment, setting, seed, options.steps)
                if key not in results:
                    print(key, flush=True)
                    results[key] = train(experiment, setting, seed, options)
                    write_results(file, results)
        table = markdown(experiment, results, options)
        write_file(options.output / f"{experiment}.md", table)
        print(f"\n{experiment}, {len(options.seeds)} seeds, evaluated by {RULES[experiment]!r}\n\n{table}", flush=True)


if __name__ == "__main__":
    with quiet_trainer(*EXPECTED_WARNINGS):
        main()
