"""`lightning-retrieval adapt --compare`: which loss trains the best head on a user's own embeddings.

The classes are divided into three parts, in three ways: a head is trained on the first part, the number of epochs and
the setting of the loss are chosen on the second, and the third is measured. All losses get the same lists.
"""

import hashlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_retrieval.checks import check_integer
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.invalid import InvalidValue, owned_by, reported_as
from lightning_retrieval.losses.third_party import as_batch_loss
from lightning_retrieval.models.adapted import Head
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.commands.head_training import (
    LARGEST_LIST,
    LabelledSet,
    loss_class,
    named_loss,
    path_of_loss,
    read_labelled_set,
    shuffled_classes,
    train_head,
)
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.version import __version__

OWNER = "compare_losses"
RESULTS = "comparison.jsonl"  # in the folder of the embeddings
SPLITS = 3  # ways to divide the classes
TRAINED, CHOSEN_ON = 0.4, 0.2  # fractions of the classes; the others are tested
FEWEST_CLASSES = 6  # two in each part
ENOUGH_CLASSES = 20  # in the test part
SEEDS = (0, 1, 2)
LEARNING_RATES = (1e-3, 3e-4, 3e-3)  # all are tried with a loss that has no settings here
MAX_EPOCHS = 100
BATCH_SIZE = 256
EMBEDDING_DIM = 128
ERROR = 0.05  # probability that an interval does not contain the true value
UNTRAINED = "no head"
ANGLES = 1_000_000  # of the integral for a quantile


class InfoNCELoss(nn.Module):
    """NTXentLoss of pytorch-metric-learning, without its copies of all negatives for each pair.

    Args:
        temperature: of the similarities.
    """

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"]) -> Tensor:
        """The mean over all pairs of a query and a positive."""
        logits = embeddings @ embeddings.T / self.temperature
        same = labels[:, None] == labels
        negatives = logits.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
        is_pair = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        return softplus(negatives - logits)[is_pair].sum() / is_pair.sum().clamp(min=1)


class Setting(NamedTuple):
    """A loss with its arguments, and the learning rate of the head.

    Args:
        loss: name of the loss, as for `named_loss`.
        arguments: its arguments. Losses among them are described by their class paths.
        lr: learning rate.
    """

    loss: str
    arguments: Mapping[str, Any] = {}
    lr: float = LEARNING_RATES[0]

    def built(self, classes: int, dim: int) -> nn.Module:
        """The loss; one with proxies gets the number of classes and the dimension of the embeddings."""
        if self.loss == "NTXentLoss":
            return InfoNCELoss(**self.arguments)
        arguments = dict(self.arguments)
        if self.has_proxies:
            arguments |= {"num_classes": classes, "embedding_size": dim}
        return named_loss(self.loss, arguments)

    @property
    def has_proxies(self) -> bool:
        """Whether the loss learns vectors for each class, whose number it must be told."""
        bases = loss_class(self.loss).__mro__
        return any("num_classes" in inspect.signature(base).parameters for base in bases if base is not object)

    def typed(self) -> str:
        """The loss as it is written in Python."""
        if self.loss == UNTRAINED:
            return ""
        arguments = dict(self.arguments)
        if self.has_proxies:
            arguments |= {"num_classes": ..., "embedding_size": ...}
        return _typed({"class_path": self.loss, "init_args": arguments}).replace("Ellipsis", "...")


def source_digest(loss: str) -> str:
    """A digest of the file that defines a loss, which may change between two comparisons."""
    source = inspect.getsource(sys.modules[loss_class(loss).__module__])
    return hashlib.sha256(source.encode()).hexdigest()


def _typed(value: Any) -> str:
    """A description as it is written in Python."""
    if isinstance(value, Mapping) and "class_path" in value:
        name = value["class_path"].rpartition(".")[2]
        return f"{name}({', '.join(f'{key}={_typed(of_key)}' for key, of_key in value['init_args'].items())})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_typed(of_key)}' for key, of_key in value.items())}}}"
    if isinstance(value, list):
        return f"({', '.join(map(_typed, value))})"
    return repr(value)


def _summed(weight: float) -> Setting:
    """Log rank of longer lists with a weight of multi-similarity."""
    rank, pairs = SETTINGS["log rank of longer lists"][1], SETTINGS["multi-similarity"][0]
    terms = {}
    for name, of_term, setting in (("rank", 1.0, rank), ("pairs", weight, pairs)):
        terms[name] = [of_term, {"class_path": path_of_loss(setting.loss), "init_args": setting.arguments}]
    return Setting("WeightedSum", {"losses": terms})


# What is tried with each loss: settings that were the best ones of a head in the study.
OF_RANKS = ({"tau": 0.01}, {"tau": 0.03}, {"tau": 0.03, "lambda_": 3.0})
OF_PAIRS = (
    {"alpha": 1.0, "beta": 25.0, "base": 0.5},
    {"alpha": 1.0, "beta": 25.0, "base": 0.7},
    {"alpha": 1.0, "beta": 50.0, "base": 0.5},
)
SETTINGS = {
    "log rank": [Setting("LogRankLoss", arguments) for arguments in OF_RANKS],
    "log rank of longer lists": [
        Setting("LogRankLoss", {**arguments, "negative_weight": 10.0}) for arguments in OF_RANKS
    ],
    "multi-similarity": [Setting("MultiSimilarityLoss", arguments) for arguments in OF_PAIRS],
}
SETTINGS["log rank + multi-similarity"] = [_summed(weight) for weight in (3.0, 10.0, 30.0)]
SETTINGS["InfoNCE"] = [Setting("NTXentLoss", {"temperature": value}) for value in (0.05, 0.1, 0.2)]


class Cell(NamedTuple):
    """A division of the classes, and the seed of the lists."""

    split: int
    seed: int


class Measured(NamedTuple):
    """What was measured of a head.

    Args:
        chosen_on: mAP of the classes that the settings are chosen on.
        ap: mean AP of the queries of each tested class.
        r_at_1: mean R@1 of the queries of each tested class.
        seconds: CPU time of the training.
    """

    chosen_on: float
    ap: list[float]
    r_at_1: list[float]
    seconds: float


class Parts(NamedTuple):
    """The parts of a division of the classes."""

    trained: LabelledSet
    chosen_on: LabelledSet
    tested: LabelledSet


class Results(dict[str, Measured]):
    """What was measured of heads, in a file of JSON lines, which is written after each of them.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._read()

    def _read(self) -> None:
        """Add what is in the file, also what another process has written."""
        try:
            for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
                key, measured = json.loads(line)
                super().__setitem__(key, Measured(*measured))
        except (ValueError, TypeError) as error:
            cure = "delete it, and the heads are trained again"
            raise InvalidValue(f"{self._path} is damaged ({error})", cure=cure) from None

    def __setitem__(self, key: str, measured: Measured) -> None:
        self._read()
        super().__setitem__(key, measured)
        lines = [json.dumps(entry) + "\n" for entry in self.items()]
        with writing(self._path), new_file(self._path) as file:
            file.write("".join(lines).encode())


@dataclass(frozen=True)
class ComparedLoss:
    """A row of the comparison.

    Args:
        name: the loss.
        typed: the loss as it is written in Python, with the setting that was chosen most often.
        mean_ap: mAP of the test part.
        r_at_1: R@1 of the test part.
        difference: mAP minus that of the best loss.
        interval: 95 % interval of the difference, for all losses together.
        seconds: mean CPU time of a training.
    """

    name: str
    typed: str
    mean_ap: float
    r_at_1: float
    difference: float
    interval: tuple[float, float]
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_losses`.

    Args:
        losses: the losses, the best one first.
        untrained: the embeddings themselves, without a head.
        classes: number of classes in the test part of a split.
        cells: how many of the `wanted` heads of each loss are compared.
        wanted: number of splits times number of seeds.
    """

    losses: Sequence[ComparedLoss]
    untrained: ComparedLoss
    classes: int
    cells: int
    wanted: int

    @property
    def rows(self) -> list[ComparedLoss]:
        """The rows of the table."""
        return [*self.losses, self.untrained]

    def about(self) -> str:
        """What was compared."""
        heads = f"{self.cells} of {self.wanted} heads of each loss"
        return f"{heads}; the test part of a division of the classes has {self.classes} classes"

    def conclusion(self) -> str:
        """What the comparison shows."""
        best, *others = self.losses
        equal = [row.name for row in others if row.interval[1] >= 0]
        if self.classes < ENOUGH_CLASSES:
            return (
                f"Too few classes to tell: the test part of a division has {self.classes}, and at least "
                f"{ENOUGH_CLASSES} are needed."
            )
        if self.cells < self.wanted:
            return "Not complete, so nothing is shown yet."
        if self.untrained.interval[1] >= 0:
            return "No head is shown to be better than the embeddings themselves."
        said = f"{best.name} has the highest mAP"
        if equal:
            said += f", and is not shown to be different from {', '.join(equal)}"
        elif others:
            said += ", and is shown to be better than every other loss"
        return f"{said}.\nTo train the network with it: {self.typed()}"

    def typed(self) -> str:
        """What to type to train the network with the best loss."""
        return f"RetrievalModule(embedder, {self.losses[0].typed}, updates=Updates(gradient_clip_val=1.0))"

    def __str__(self) -> str:
        """The table, and what it shows."""
        lines = [["loss", "mAP", "R@1", "minus the best (95 % interval)", "CPU s"]]
        for row in self.rows:
            difference = ""
            if row is not self.losses[0]:
                difference = f"{row.difference:+.4f} ({row.interval[0]:+.4f} to {row.interval[1]:+.4f})"
            lines.append([row.name, f"{row.mean_ap:.4f}", f"{row.r_at_1:.4f}", difference, f"{row.seconds:.1f}"])
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return f"{table}\n{self.about()}.\n{self.conclusion()}"


@owned_by(OWNER)
def compare_losses(
    embeddings: Path,
    *,
    losses: Sequence[str] = tuple(SETTINGS),
    seeds: Sequence[int] = SEEDS,
    labels: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    embedding_dim: int = EMBEDDING_DIM,
    batch_size: int = BATCH_SIZE,
) -> Comparison:
    """Compare losses by the heads that they train on stored embeddings.

    The results of all heads are kept in the file `comparison.jsonl` in the folder of the embeddings, so that the same
    call goes on after an interrupt.

    Args:
        embeddings: folder written by `embed_images`.
        losses: names: those of the default have settings that are tried; other losses of this library and of
            pytorch-metric-learning are tried with three learning rates.
        seeds: seeds of the lists, for each of three divisions of the classes.
        labels: CSV or Parquet table with the columns `image` and `label`; if None, the labels in the folder, or
            else the folders of the images, are used.
        columns: the names of the columns of `labels`, if they differ, as for `ImageTable`.
        delimiter: the character that separates the fields of `labels`, if it is a CSV file.
        embedding_dim: dimension of the heads' embeddings; at most that of the stored embeddings is used.
        batch_size: number of embeddings in a list, from 4 to 16,384, with at most 16 of each class.

    Raises:
        FileNotFoundError: if the embeddings or the table do not exist.
        ValueError: if there is no such loss, an image has no label, or fewer than 6 classes have several images.
        OSError: if the results cannot be written.

    Cost:
        Memory for all embeddings and for the scores of one list. With five losses, 75 heads are trained.

    Relations:
        The intervals are for all losses together. They do not contain the choice of the training classes, which
        is made three times.

    Source:
        The interval is that of errors that are correlated within classes and within heads: Cameron, Gelbach and Miller,
        "Robust Inference With Multiway Clustering", 2011, equation 2.13.
    """
    tournament = Tournament(
        embeddings,
        losses=losses,
        seeds=seeds,
        labels=labels,
        columns=columns,
        delimiter=delimiter,
        embedding_dim=embedding_dim,
        batch_size=batch_size,
    )
    tournament.run()
    return tournament.result()


class Tournament:
    """The heads of a comparison, and a file with what was measured of those that are trained.

    The arguments are those of `compare_losses`.
    """

    @owned_by(OWNER)
    def __init__(
        self,
        embeddings: Path,
        *,
        losses: Sequence[str],
        seeds: Sequence[int] = SEEDS,
        labels: Path | None = None,
        columns: ColumnNames = None,
        delimiter: str = ",",
        embedding_dim: int = EMBEDDING_DIM,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        for name, values in {"losses": losses, "seeds": seeds}.items():
            if isinstance(values, str) or not values or len(set(values)) < len(values):
                raise InvalidValue("must be a list of different values", argument=name, got=values)
        self.seeds = [check_integer("seeds", seed, least=0) for seed in seeds]
        self.batch_size = check_integer("batch_size", batch_size, least=4, most=LARGEST_LIST)
        folder = EmbeddingFolder.load(embeddings)
        self.data = read_labelled_set(folder, labels, TableFormat.checked(columns, delimiter))
        self.embedding_dim = min(check_integer("embedding_dim", embedding_dim, least=1), folder.manifest.dim)
        self.losses: dict[str, list[Setting]] = {}
        self._sources = {UNTRAINED: ""}
        for name in losses:
            settings = SETTINGS.get(name, [Setting(name, lr=lr) for lr in LEARNING_RATES])
            with reported_as(OWNER, loss="losses"):  # before anything is trained
                as_batch_loss(self.loss_of(settings[0]))
                self._sources[settings[0].loss] = source_digest(settings[0].loss)
            self.losses[name] = settings
        self.losses[UNTRAINED] = [Setting(UNTRAINED)]
        self.splits = [self._divided(split) for split in range(SPLITS)]
        self.cells = [Cell(*cell) for cell in product(range(SPLITS), self.seeds)]
        self._results = Results(folder.path / RESULTS)
        digest = hashlib.sha256(self.data.embeddings.numpy().tobytes())
        digest.update(self.data.labels.numpy().tobytes())
        self._about = [__version__, digest.hexdigest(), self.embedding_dim, self.batch_size]

    def run(self) -> None:
        """Train the heads that are not yet measured."""
        trained = sum(len(settings) + len(self.seeds) - 1 for settings in self.losses.values())
        with Progress("Comparing losses", total=SPLITS * trained, units="heads") as progress, one_thread():
            for cell, name in product(self.cells, self.losses):
                for setting in self._tried(cell, name):
                    key = self._key(cell, setting)
                    if key not in self._results:
                        self._results[key] = self._measure(cell, setting)
                    progress.update(1)

    def complete_cells(self) -> list[Cell]:
        """The cells in which all losses are measured."""
        return [cell for cell in self.cells if self._is_complete(cell)]

    def result(self) -> Comparison:
        """The comparison of the heads in complete cells, of which there must be one."""
        cells = self.complete_cells()
        ap, r_at_1, weights, seconds = self._values(cells)
        means, means_at_1 = ((weights * values).sum((1, 2)).tolist() for values in (ap, r_at_1))
        best = max(range(len(self.losses) - 1), key=means.__getitem__)  # the last one is without a head
        rows = []
        for number, name in enumerate(self.losses):
            interval = clustered_interval(ap[number] - ap[best], weights, compared=len(self.losses) - 1)
            difference = means[number] - means[best]
            typed = statistics.mode(self.chosen(cell.split, name).typed() for cell in cells)
            numbers = (means[number], means_at_1[number], difference, interval, seconds[number].mean().item())
            rows.append(ComparedLoss(name, typed, *numbers))
        *losses, untrained = rows
        losses.sort(key=lambda row: row.difference, reverse=True)
        fewest = min(len(self.splits[cell.split].tested.labels.unique()) for cell in cells)
        return Comparison(losses, untrained, fewest, len(cells), len(self.cells))

    def _values(self, cells: Sequence[Cell]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """AP and R@1 of each loss, cell and class, weights of cells and classes, and seconds of losses and cells."""
        weights = torch.zeros(len(cells), int(self.data.labels.max()) + 1, dtype=torch.double)
        ap, r_at_1 = (torch.zeros(len(self.losses), *weights.shape, dtype=torch.double) for _ in range(2))
        seconds = torch.zeros(len(self.losses), len(cells))
        for row, cell in enumerate(cells):
            classes, queries = self.splits[cell.split].tested.labels.unique(return_counts=True)
            weights[row, classes] = queries.double()
            for number, name in enumerate(self.losses):
                measured = self._results[self._key(cell, self.chosen(cell.split, name))]
                ap[number, row, classes] = torch.tensor(measured.ap).double()
                r_at_1[number, row, classes] = torch.tensor(measured.r_at_1).double()
                seconds[number, row] = measured.seconds
        return ap, r_at_1, weights / weights.sum(), seconds

    def _divided(self, split: int) -> Parts:
        """The three parts of a division of the classes; the images of classes with one image are trained on."""
        labels = self.data.labels
        classes = shuffled_classes(labels, FEWEST_CLASSES, torch.Generator().manual_seed(split))
        first = round(TRAINED * len(classes))
        second = max(first + 2, round((TRAINED + CHOSEN_ON) * len(classes)))
        is_chosen_on, is_tested = torch.isin(labels, classes[first:second]), torch.isin(labels, classes[second:])
        return Parts(*map(self.data.where, (~(is_chosen_on | is_tested), is_chosen_on, is_tested)))

    def _tried(self, cell: Cell, name: str) -> list[Setting]:
        """The settings of a loss that are measured: with the first seed all of them, and then the chosen one."""
        if cell.seed == self.seeds[0]:
            return self.losses[name]
        return [self.chosen(cell.split, name)]

    def chosen(self, split: int, name: str) -> Setting:
        """The setting with the highest mAP of the classes that it is chosen on."""
        cell = Cell(split, self.seeds[0])
        return max(self.losses[name], key=lambda setting: self._results[self._key(cell, setting)].chosen_on)

    def _is_complete(self, cell: Cell) -> bool:
        """Whether all heads of a cell are measured."""
        with suppress(KeyError):  # of settings that cannot be chosen yet
            tried = (setting for name in self.losses for setting in self._tried(cell, name))
            return all(self._key(cell, setting) in self._results for setting in tried)
        return False

    def _key(self, cell: Cell, setting: Setting) -> str:
        """What the result of a head depends on."""
        return json.dumps([*self._about, *cell, *setting, self._sources[setting.loss]])

    def loss_of(self, setting: Setting) -> nn.Module:
        """A new loss for the labels and the dimension of the heads."""
        return setting.built(int(self.data.labels.max()) + 1, self.embedding_dim)

    def _measure(self, cell: Cell, setting: Setting) -> Measured:
        """Train a head, and measure it on the test part."""
        parts = self.splits[cell.split]
        if setting.loss == UNTRAINED:
            found = parts.tested.of_classes(None)
            return Measured(0.0, found.ap.tolist(), found.r_at_1.tolist(), 0.0)
        begun = time.process_time()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(cell.seed)  # proxies begin at random
            head, loss = Head(self.data.embeddings.shape[1], self.embedding_dim), self.loss_of(setting)
            generator = torch.Generator().manual_seed(cell.seed)
            try:
                train_head(
                    head,
                    loss,
                    parts.trained,
                    parts.chosen_on,
                    batch_size=self.batch_size,
                    lr=setting.lr,
                    max_epochs=MAX_EPOCHS,
                    generator=generator,
                    hidden=True,
                )
            except InvalidValue as error:
                rule = f"{setting.typed()} cannot train a head with the learning rate {setting.lr:g} ({error})"
                raise InvalidValue(rule, argument="losses", cure="compare other losses") from error
        seconds = time.process_time() - begun
        found = parts.tested.of_classes(head)
        return Measured(parts.chosen_on.mean_ap(head), found.ap.tolist(), found.r_at_1.tolist(), seconds)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread: for matrices this small, others would mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def clustered_interval(
    differences: Float[Tensor, "heads classes"], weights: Float[Tensor, "heads classes"], *, compared: int = 1
) -> tuple[float, float]:
    """The 95 % interval of a weighted mean of differences, which are correlated within a head and within a class.

    Args:
        differences: difference of each head and class.
        weights: their weights, with a sum of 1; 0 for a class that a head is not tested on.
        compared: number of such intervals that are right together with 95 % confidence (Bonferroni).
    """
    mean = float((weights * differences).sum())
    errors = weights * (differences - mean)
    groups = [errors.sum(0)[weights.sum(0) > 0]]
    if len(errors) > 1:
        groups.append(errors.sum(1))
    variances = [float(len(sums) / (len(sums) - 1) * sums.square().sum()) for sums in groups]
    variance = max(sum(variances) - float(errors.square().sum()) * (len(groups) - 1), *variances, 0.0)
    half = t_quantile(min(map(len, groups)) - 1, 1 - ERROR / (2 * max(compared, 1))) * variance**0.5
    return mean - half, mean + half


def t_quantile(freedom: int, probability: float) -> float:
    """A quantile above the median of Student's t distribution.

    The angle whose tangent is t / sqrt(freedom) has a density proportional to cos(angle) ** (freedom - 1).
    """
    angles = torch.linspace(0, torch.pi / 2, ANGLES, dtype=torch.double)
    masses = angles.cos().pow(freedom - 1).cumsum(0)
    found = torch.searchsorted(masses, (2 * probability - 1) * masses[-1])
    return float(freedom**0.5 * angles[found].tan())
