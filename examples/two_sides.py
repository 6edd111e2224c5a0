"""Train queries of one kind against candidates of another: six losses, tuned alike, with three seeds each.

python examples/two_sides.py
python examples/two_sides.py --emoji emoji

**Fonts** (no download). The queries are characters in the styles of DejaVu Sans, and the candidates are characters in
those of DejaVu Serif. One network embeds both, or each side has its own. The test has characters that are not in the
training set.

**Names** (with the folder that `emoji.py` wrote). The queries are the Unicode names of emoji, and the candidates are
the pictures that four makers drew. The test has emoji that are not in the training set. A batch has 128 pictures: one
of each emoji, or four.

**Keywords** (with the same folder). The queries are words, and the candidates are pictures of emoji whose names have
the word, so a query has many positives. The test has other emoji than the training set, with the same words.

All losses rank the candidates for each query and the queries for each candidate. For each loss, three learning rates
are tried with the first value of its own parameter, and then two more values of this parameter; one seed, half of the
steps and the validation classes choose. The table has the test set and three seeds. Runs with the same seed are
compared with each other: a column has the mean difference to InfoNCE with its 95 % t-interval. Tables and results are
written to the output folder; runs that are in `results.jsonl` are not repeated. InfoNCE needs pytorch-metric-learning.
"""

import argparse
import csv
import hashlib
import math
import statistics
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from intervals import interval
from pytorch_metric_learning.losses import SupConLoss
from results_file import read_results, write_file, write_results
from torch import nn

from lightning_retrieval import (
    Embedder,
    LogRankLoss,
    RetrievalModule,
    SmoothAPLoss,
    TwoNetworks,
    TwoSides,
    Updates,
    WeightedSum,
)
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.command_line import CommandParser
from lightning_retrieval.datamodules import Glyphs, ImageIndex, ImageSet, ImageTable, Pairs, TextTable
from lightning_retrieval.losses import RetrievalLoss, ROADMAPLoss
from lightning_retrieval.models import GlyphNet, Preparation, TextEmbedder
from lightning_retrieval.training.run_report import quiet_trainer

WIDTH, DIM, BUCKETS = 8, 64, 4096
METRICS = ("mAP", "R@1", "reverse/mAP", "reverse/R@1")  # the differences are those of the first
FONT_RATES = (0.004, 0.002, 0.008)
SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-BoldOblique", "DejaVuSans-Oblique")
SERIF = ("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic", "DejaVuSerif-Italic")
LEAST_EMOJI = 6  # that have a keyword
NO_KEYWORDS = {"and", "for", "indicator", "letter", "regional", "sign", "symbol", "the", "with"}
EXPECTED_WARNINGS = ("PairSampler: ", "Pairs: ", "RetrievalModule: the batches have ")


class SigmoidLoss(RetrievalLoss):
    """The sigmoid loss: Zhai et al., "Sigmoid Loss for Language Image Pre-Training", ICCV 2023, algorithm 1.

    The loss of a query is the sum over all candidates j of softplus(-z_j (t s_j + b)), where z_j is 1 for positives
    and -1 for negatives. t and b are trained, and t is kept as its logarithm t'.

    Args:
        t: the factor of the similarities at the start, > 0.
        b: the bias at the start.
    """

    def __init__(self, t: float = 10.0, b: float = -10.0) -> None:
        super().__init__()
        self.t, self.b = t, b
        self.t_prime = nn.Parameter(torch.tensor(math.log(t)))
        self.bias = nn.Parameter(torch.tensor(b))

    def query_losses(self, block: Any) -> torch.Tensor:
        logits = self.t_prime.exp() * block.scores + self.bias
        z = torch.where(block.relevant, 1, -1)
        losses = nn.functional.softplus(-z * logits)
        return losses.masked_fill(~block.candidate, 0).sum(1)


def ap_and_info_nce(tau: float) -> WeightedSum:
    """Create the sum of Smooth-AP and InfoNCE, which has the first temperature of the other settings."""
    return WeightedSum({"ap": (1.0, SmoothAPLoss(tau)), "info_nce": (1.0, SupConLoss(0.07))})


# For each loss, what creates it from the value of one parameter, and the values that are tried.
LOSSES: dict[str, tuple[Callable[[float], nn.Module], tuple[float, ...]]] = {
    "InfoNCE": (SupConLoss, (0.07, 0.03, 0.15)),
    "sigmoid": (SigmoidLoss, (10.0, 20.0, 40.0)),
    "Smooth-AP": (SmoothAPLoss, (0.05, 0.02, 0.01)),
    "ROADMAP": (ROADMAPLoss, (0.5, 0.2, 0.8)),
    "log rank": (LogRankLoss, (0.01, 0.03, 0.1)),
    "Smooth-AP + InfoNCE": (ap_and_info_nce, (0.05, 0.02, 0.01)),
}
FIRST_LOSS = "InfoNCE"
PARAMETERS = {"InfoNCE": "temperature", "sigmoid": "t at the start", "ROADMAP": "lambda"}  # of the others: tau


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        sides: the two kinds of inputs.
        classes: the number of classes in a batch.
        queries: the number of queries of each class.
        samples: the number of candidates of each class.
        rates: the learning rates that are tried.
        two_networks: whether the queries have a network of their own.
    """

    sides: str
    classes: int
    queries: int
    samples: int
    rates: Sequence[float] = (0.002, 0.001, 0.004)
    two_networks: bool = True


TASKS = {
    "fonts, one network": Task("fonts", 32, 2, 4, FONT_RATES, two_networks=False),
    "fonts, two networks": Task("fonts", 32, 2, 4, FONT_RATES),
    "names, one picture": Task("names", 128, 1, 1),
    "names, four pictures": Task("names", 32, 1, 4),
    "keywords, four pictures": Task("keywords", 32, 1, 4),
}


@dataclass(frozen=True)
class Run:
    """One training: a task and a loss with its learning rate and the value of its parameter, and a seed.

    `split` is `"val"` for a run that chooses these values, and `"test"` for a run of the table.
    """

    task: str
    loss: str
    rate: float
    value: float
    seed: int
    steps: int
    split: str

    @property
    def key(self) -> str:
        """The key of the run in the file of results."""
        settings = f"learning rate {self.rate:g}, {PARAMETERS.get(self.loss, 'tau')} {self.value:g}"
        return f"{self.task}, {self.loss}, {settings}, seed {self.seed}, {self.steps} steps, {self.split}"


class SmallImages(ImageSet):
    """Images that are read and prepared once for all runs; they are not augmented."""

    prepared: ClassVar[dict[Any, torch.Tensor]] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        file = self.file(index)
        if file not in self.prepared:
            self.prepared[file] = self.transform(self.read(index))
        return {"images": self.prepared[file], "labels": self.labels[index], "ids": torch.tensor(int(index))}


class SmallImageTable(ImageTable):
    """`ImageTable` of `SmallImages`."""

    def image_set(self, index: ImageIndex, transform: Any) -> SmallImages:
        return SmallImages(index, self.root, transform)


def name_of(code: str) -> str:
    """Return the Unicode names of an emoji's characters in lower case, or "" if they say nothing of its picture.

    Args:
        code: the characters in hexadecimal, such as `1f468-200d-1f52c`.
    """
    characters = [chr(int(number, 16)) for number in code.split("-")]
    # Joiners and variation selectors, of the categories C and M, are no part of the picture.
    names = [unicodedata.name(one, "") for one in characters if unicodedata.category(one)[0] not in "CM"]
    name = " ".join(names).lower()
    # The name of a flag is that of two letters, and a skin tone is as small as a picture's difference from another.
    if "regional indicator" in name or "fitzpatrick" in name:
        return ""
    return name


def split_of(code: str) -> str:
    """Return the split of an emoji, which depends on its characters only."""
    position = int.from_bytes(hashlib.sha256(code.encode()).digest()[:8], "big") / 2**64
    if position < 0.6:
        return "train"
    return "val" if position < 0.75 else "test"


def keywords_of(names: Mapping[str, str]) -> dict[str, str]:
    """Return the keyword of each emoji: of the words that enough names have, the rarest word of its own name.

    Args:
        names: the name of each emoji.
    """
    words_of = {}
    for code, name in names.items():
        words_of[code] = {word for word in name.replace("-", " ").split() if len(word) > 2} - NO_KEYWORDS
    counts = Counter(word for words in words_of.values() for word in sorted(words))
    keywords = {}
    for code, words in words_of.items():
        shared = sorted((counts[word], word) for word in words if counts[word] >= LEAST_EMOJI)
        if shared:
            keywords[code] = shared[0][1]
    return keywords


def write_table(file: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as CSV."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)


def write_emoji_tables(emoji: Path, folder: Path) -> None:
    """Write a table of the texts and a table of the pictures, for the names and for the keywords.

    Args:
        emoji: the folder that `emoji.py` wrote.
        folder: receives the tables.
    """
    files = sorted(emoji.glob("*/*/*.png"))
    names = {file.parent.name: name_of(file.parent.name) for file in files}
    names = {code: name for code, name in names.items() if name}
    # A keyword is in all splits with different emoji, and a class is in one split only.
    keywords = {code: f"{word} ({split_of(code)})" for code, word in keywords_of(names).items()}
    for task, labels in {"names": {code: code for code in names}, "keywords": keywords}.items():
        texts, pictures = {}, []
        for file in files:
            code = file.parent.name
            if code not in labels:
                continue
            pictures.append((file.relative_to(emoji), labels[code], split_of(code)))
            text = names[code]
            if task == "keywords":
                text = labels[code].partition(" (")[0]
            texts[labels[code]] = (text, labels[code], split_of(code))
        write_table(folder / f"{task}.csv", [("text", "label", "split"), *texts.values()])
        write_table(folder / f"{task} of pictures.csv", [("image", "label", "split"), *pictures])


def make_data(task: Task, options: argparse.Namespace) -> Pairs:
    """Create the data module of a task."""
    batch = {"classes_per_batch": task.classes, "queries_per_class": task.queries, "samples_per_class": task.samples}
    if options.classes is not None:
        batch["classes_per_batch"] = options.classes
    if task.sides == "fonts":
        return Pairs(Glyphs(fonts=SANS), Glyphs(fonts=SERIF), **batch)
    preparation = Preparation(32, resize=32, mean=(0, 0, 0), std=(1, 1, 1))
    pictures = (options.output / f"{task.sides} of pictures.csv").absolute()
    candidates = SmallImageTable(options.emoji, pictures, train_transform=preparation, eval_transform=preparation)
    return Pairs(TextTable(options.output / f"{task.sides}.csv"), candidates, **batch)


def make_module(run: Run) -> RetrievalModule:
    """Create the module of a run, whose learning rate falls to 0 over the steps."""
    task = TASKS[run.task]
    channels = 1 if task.sides == "fonts" else 3
    embedder = Embedder(GlyphNet(WIDTH, channels), DIM)
    sides = TwoSides(directions="both")
    if task.two_networks:
        query_embedder: nn.Module = TextEmbedder("ngram_net", DIM, backbone_args={"buckets": BUCKETS})
        if task.sides == "fonts":
            query_embedder = Embedder(GlyphNet(WIDTH, channels), DIM)
        sides = TwoNetworks(query_embedder, directions="both")
    create, _ = LOSSES[run.loss]
    return RetrievalModule(
        embedder,
        create(run.value),
        sides=sides,
        optimizer=partial(torch.optim.AdamW, lr=run.rate, fused=True),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=run.steps),
        lr_scheduler_interval="step",
        updates=Updates(gradient_clip_val=1.0),
    )


def train(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate, and return a line of the results."""
    start = time.process_time()
    pl.seed_everything(run.seed, verbose=False)
    data, module = make_data(TASKS[run.task], options), make_module(run)
    evaluation = RetrievalEvaluation(ks=(1,))
    trainer = pl.Trainer(
        max_steps=run.steps,
        accelerator="cpu",
        limit_val_batches=0,
        callbacks=[evaluation],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trainer.limit_val_batches = 1.0
    evaluate = {"val": trainer.validate, "test": trainer.test}[run.split]
    evaluate(module, data, verbose=False)
    results = evaluation.results[run.split]
    return {
        "key": run.key,
        "metrics": {name: round(results[f"{run.split}/{name}"], 6) for name in METRICS},
        "cpu_seconds": round(time.process_time() - start, 1),
    }


class Study:
    """The runs of a study and their results.

    Args:
        options: of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = options.output / "results.jsonl"
        self.results = read_results(self.file)

    def metric(self, run: Run, name: str = METRICS[0]) -> float:
        """Return a metric of a run, which is done if it has no result yet."""
        if run.key not in self.results:
            print(run.key, flush=True)
            self.results[run.key] = train(run, self.options)
            write_results(self.file, self.results)
        value: float = self.results[run.key]["metrics"][name]
        return value

    def choose(self, task: str, loss: str) -> Run:
        """Return the run with the highest mAP of the validation classes."""
        _, (value, *values) = LOSSES[loss]
        seed, steps = self.options.seeds[0], max(self.options.steps // 2, 1)
        tried = [Run(task, loss, rate, value, seed, steps, "val") for rate in TASKS[task].rates]
        best = max(tried, key=self.metric)
        return max([best, *(replace(best, value=value) for value in values)], key=self.metric)

    def compare(self, task: str) -> str:
        """Return the table of a task."""
        head = ["loss", *METRICS, f"{METRICS[0]} minus that of {FIRST_LOSS} (95 % interval)", "chosen", "CPU time"]
        lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
        first: list[float] = []
        for loss in LOSSES:
            chosen = self.choose(task, loss)
            final = replace(chosen, split="test", steps=self.options.steps)
            runs = [replace(final, seed=seed) for seed in self.options.seeds]
            values = [self.metric(run) for run in runs]
            first = first or values
            cells = [loss]
            cells += [f"{statistics.fmean(self.metric(run, name) for run in runs):.4f}" for name in METRICS]
            cells.append(difference(values, first))
            cells.append(f"{chosen.rate:g}, {PARAMETERS.get(loss, 'tau')} {chosen.value:g}")
            seconds = statistics.median(self.results[run.key]["cpu_seconds"] for run in runs)
            lines.append(f"| {' | '.join([*cells, f'{seconds:.0f} s'])} |")
        return "\n".join(lines) + "\n"


def difference(values: Sequence[float], first: Sequence[float]) -> str:
    """Return the mean of the paired differences with its interval; "" for those to itself or of one pair."""
    if values == first or len(values) == 1:
        return ""
    mean, low, high = interval([value - base for value, base in zip(values, first)])
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emoji", type=Path, help="the folder that emoji.py wrote; without it, only the fonts")
    parser.add_argument("--output", type=Path, default=Path("logs/two_sides"), help="folder of tables and results")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one also chooses settings")
    parser.add_argument("--classes", type=int, help="classes in a batch, in place of those of the task")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if options.emoji is not None:
        write_emoji_tables(options.emoji, options.output)
    study = Study(options)
    for task in options.tasks:
        if options.emoji is None and TASKS[task].sides != "fonts":
            continue
        table = study.compare(task)
        write_file(options.output / f"{task}.md", table)
        print(f"\n{task}, {len(options.seeds)} seeds, {options.steps} steps\n\n{table}", flush=True)


if __name__ == "__main__":
    with quiet_trainer(*EXPECTED_WARNINGS):
        main()
