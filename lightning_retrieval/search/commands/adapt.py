"""`lightning-retrieval adapt`: train a head on embeddings that `embed` wrote, and write a checkpoint with it."""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_retrieval import losses
from lightning_retrieval.backend import pl
from lightning_retrieval.checks import check_integer, check_positive, first_line
from lightning_retrieval.datamodules.image_table import check_values
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by, reported_as
from lightning_retrieval.losses.third_party import as_batch_loss
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models.adapted import AdaptedEmbedder, Head
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data import describe, rebuild
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.commands.embedding import (
    LoadedModel,
    check_table_given,
    recorded_model,
    shown_model,
)
from lightning_retrieval.search.commands.index import read_image_rows
from lightning_retrieval.search.commands.of_checkpoint import print_guess
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, labelled_rows
from lightning_retrieval.training.checkpointed_module import VerifiedCheckpoints
from lightning_retrieval.training.module import RetrievalModule
from lightning_retrieval.training.run_report import quiet_trainer

OWNER = "adapt_head"
LARGEST_LIST = 16_384
LONGEST_GRADIENT = 1.0  # norm to which gradients are clipped, as log rank needs
MOST_OF_A_CLASS = 16  # images of a class in a list
HELD_OUT = 0.2  # fraction of the classes that are held out
FEWEST_CLASSES = 4  # two to train on, and two that are held out
PATIENCE = 5  # epochs without a better mAP after which training stops
NORMAL_QUANTILE = 1.96  # for a 95 % interval


@dataclass(frozen=True)
class AdaptedHead:
    """The result of `adapt_head`.

    Args:
        before: mAP of the held-out classes with the stored embeddings.
        after: mAP of the held-out classes with the head.
        interval: 95 % interval of the mean difference of a held-out class.
        classes: number of held-out classes.
        epochs: number of epochs until training stopped.
    """

    before: float
    after: float
    interval: tuple[float, float]
    classes: int
    epochs: int


class LabelledSet(NamedTuple):
    """Embeddings and their labels."""

    embeddings: Float[Tensor, "rows dim"]
    labels: Int[Tensor, " rows"]


def summary(done: AdaptedHead) -> str:
    """What was found."""
    low, high = done.interval
    text = (
        f"mAP of {done.classes} held-out classes {done.after:.4f}, of the features {done.before:.4f} (mean difference "
        f"of a class {(low + high) / 2:+.4f}, {low:+.4f} to {high:+.4f} with 95 % confidence), {done.epochs} epochs"
    )
    if low <= 0:
        text += (
            "\nnot shown to be better than the features: adapt embeddings of more classes, or use the model that "
            "made the embeddings"
        )
    return text


@owned_by(OWNER)
def named_loss(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The loss that the user names.

    Args:
        name: name of a loss of this library or of pytorch-metric-learning, or the dotted path of a class.
        arguments: arguments of the loss.

    Raises:
        ValueError: if there is no such loss, or the arguments are invalid.
    """
    path = name
    if "." not in name:
        path = f"pytorch_metric_learning.losses.{name}"
        if name in losses.__all__:
            path = f"lightning_retrieval.{name}"
    try:
        return rebuild("loss", {"class_path": path, "init_args": dict(arguments)}, nn.Module)
    except InvalidType as error:  # for a command, whose options are texts, each is a value
        raise InvalidValue(error.rule, argument="loss", got=error.got) from None


@owned_by(OWNER)
def adapt_head(
    embeddings: Path,
    output: Path,
    *,
    loss: nn.Module,
    labels: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    checkpoint: Path | PretrainedBackbone | None = None,
    embedding_dim: int | None = None,
    hidden_dim: int | None = None,
    batch_size: int = 2048,
    lr: float = 1e-3,
    max_epochs: int = 100,
    seed: int = 0,
    overwrite: bool = False,
) -> AdaptedHead:
    """Train a head on stored embeddings, and write a checkpoint with the frozen model and its head.

    A fifth of the classes is held out. Training stops when their mAP has not risen for 5 epochs, and the checkpoint
    gets the best head. It is the checkpoint of a `RetrievalModule` whose embedder is an `AdaptedEmbedder`.

    Args:
        embeddings: folder written by `embed_images`.
        output: file of the new checkpoint.
        loss: loss of this library or of pytorch-metric-learning.
        labels: CSV or Parquet table with the columns `image` and `label`; if None, the labels in the folder are used.
        columns: the names of the columns of `labels`, if they differ, as for `ImageTable`.
        delimiter: the character that separates the fields of `labels`, if it is a CSV file.
        checkpoint: checkpoint or pretrained backbone that the embeddings were made with; if None, the one that the
            folder records. Weights of a backbone are downloaded only if it is given.
        embedding_dim: dimension of the new embeddings; if None, the dimension of the stored embeddings.
        hidden_dim: number of hidden units of the head; None for a linear head.
        batch_size: number of embeddings in a list, from 4 to 16,384, with at most 16 of each class.
        lr: learning rate of AdamW, > 0.
        max_epochs: maximum number of epochs, >= 1.
        seed: seed of the held-out classes and of the lists, >= 0.
        overwrite: replace `output` if it exists.

    Raises:
        FileNotFoundError: if the embeddings, the table or the checkpoint do not exist.
        ValueError: if `output` exists and `overwrite` is False, an image has no label, there are too few classes, the
            embeddings were not made by this model's network alone, or an argument is out of range.
        OSError: if the checkpoint cannot be written; an earlier file at `output` is unchanged.

    Cost:
        Memory for all embeddings and for the scores of one list.
    """
    check_integer("batch_size", batch_size, least=4, most=LARGEST_LIST)
    check_positive("lr", lr)
    check_integer("max_epochs", max_epochs, least=1)
    generator = torch.Generator().manual_seed(check_integer("seed", seed, least=0))
    output = check_path("output", output)
    if not output.parent.is_dir() or output.is_dir():
        raise InvalidValue("must be a file in an existing folder", argument="output", got=output)
    folder = EmbeddingFolder.load(embeddings)
    module = _embedding_module(folder.manifest, checkpoint, output, overwrite)
    if embedding_dim is None:
        embedding_dim = folder.manifest.dim
    with reported_as(OWNER):
        embedder = AdaptedEmbedder(module.embedder, folder.manifest.dim, embedding_dim, hidden_dim=hidden_dim)
    labels_by_path = _labels_of_table(labels, TableFormat.checked(columns, delimiter))
    rows, numbers = map(torch.from_numpy, labelled_rows(folder, "embeddings", labels_by_path))
    is_held_out = _held_out(numbers, generator)
    trained = LabelledSet(rows[~is_held_out], numbers[~is_held_out])
    held_out = LabelledSet(rows[is_held_out], numbers[is_held_out])
    lists = partial(lists_of_epoch, trained.labels, batch_size, generator)
    epochs = _fit(embedder.head, loss, trained, held_out, lists=lists, lr=lr, max_epochs=max_epochs)
    preparation = _preparation(folder.manifest, module)
    _save(embedder, loss, preparation, output)
    return _compare(embedder.head, held_out, epochs)


def _embedding_module(
    manifest: EmbeddingManifest, given: Path | PretrainedBackbone | None, output: Path, overwrite: bool
) -> Any:
    """The network that made the embeddings; raises unless a head can follow it in another file."""
    loaded = recorded_model(manifest.about, given, made="embeddings were")
    if output.exists() and _is_of(output, loaded):
        rule = "must not be the checkpoint that made the embeddings"
        raise InvalidValue(rule, argument="output", got=output, cure="give another file")
    if output.exists() and not overwrite:
        cure = "give `overwrite` to replace it, or another path"
        raise InvalidValue("must be a new file", argument="output", got=f"{output}, which exists", cure=cure)
    module = loaded.module
    if module.query_embedder is not None:
        rule = "must be of a model with one network"
        cure = "train the network of queries with a FrozenEmbedder of the candidates instead"
        got = f"{shown_model(loaded.about)}, which has a `query_embedder`"
        raise InvalidValue(rule, argument="checkpoint", got=got, cure=cure)
    is_whitened = module.whitening is not None and module.whitening.learned is not None
    if is_whitened or tuple(module.eval_scales) != (1,):
        rule = "must be of a model without whitening and with the scale 1 alone"
        raise InvalidValue(rule, argument="embeddings", got="another", cure="embed the images with such a model")
    return module


def _is_of(output: Path, loaded: LoadedModel) -> bool:
    """Whether a file is the checkpoint of a model."""
    checkpoint = loaded.about.get("checkpoint")
    return checkpoint is not None and output.samefile(checkpoint)


def _labels_of_table(table: Path | None, table_format: TableFormat) -> Mapping[str, str] | None:
    """The label of each path in a table; None without a table."""
    if table is None:
        check_table_given(None, "labels", table_format)
        return None
    table_of_labels, row_of = read_image_rows("labels", table, ("image", "label"), table_format=table_format)
    if "label" not in table_of_labels:
        rule = "must be a table with the column label"
        raise InvalidValue(rule, argument="labels", got=f"{table} with tags", cure="add labels")
    check_values(table_of_labels, "label")
    texts = table_of_labels["label"]
    return {image: texts[row] for image, row in row_of.items() if texts[row]}


def _held_out(labels: Int[Tensor, " rows"], generator: torch.Generator) -> Bool[Tensor, " rows"]:
    """Whether each row is of a held-out class; only classes with several images are held out."""
    classes, counts = labels.unique(return_counts=True)
    several = classes[counts > 1]
    if len(several) < FEWEST_CLASSES:
        rule = f"must be of at least {FEWEST_CLASSES} classes with several images, since some classes are held out"
        raise InvalidValue(rule, argument="embeddings", got=f"{len(several)} of {len(classes)}", cure="add images")
    number = max(2, round(HELD_OUT * len(several)))
    return torch.isin(labels, several[torch.randperm(len(several), generator=generator)[:number]])


def _fit(
    head: Head,
    loss: nn.Module,
    trained: LabelledSet,
    held_out: LabelledSet,
    *,
    lists: Callable[[], Iterator[Int[Tensor, " batch"]]],
    lr: float,
    max_epochs: int,
) -> int:
    """Train until the mAP of the held-out classes stops rising, load the best head, and return the number of epochs."""
    _start_with_principal_directions(head, trained.embeddings)
    batch_loss = as_batch_loss(loss)
    parameters = [*head.parameters(), *batch_loss.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0)
    best, best_epoch, best_state = _mean_ap(head, held_out), 0, copy.deepcopy(head.state_dict())
    steps = 0
    with Progress("Training", total=max_epochs, units="epochs") as progress:
        for epoch in range(1, max_epochs + 1):
            for chosen in lists():
                value = _value(batch_loss, head(trained.embeddings[chosen]), trained.labels[chosen], chosen)
                _check_loss(value, steps)
                steps += 1
                optimizer.zero_grad()
                value.backward()
                nn.utils.clip_grad_norm_(parameters, LONGEST_GRADIENT)
                optimizer.step()
            progress.update(1)
            found = _mean_ap(head, held_out)
            if found > best:
                best, best_epoch, best_state = found, epoch, copy.deepcopy(head.state_dict())
            if epoch - best_epoch >= PATIENCE:
                break
    head.load_state_dict(best_state)
    return epoch


def _check_loss(value: Tensor, steps: int) -> None:
    """Raise unless the value of the loss after a number of steps is finite."""
    if not value.isfinite():
        got = f"{value.item()} after {steps} steps"
        raise InvalidValue("must be finite", argument="loss", got=got, cure="give other `loss_args`, or a lower `lr`")


def _value(
    loss: nn.Module, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"], ids: Int[Tensor, " batch"]
) -> Tensor:
    """The loss of a list. A loss with a parameter for each class fails if it has too few, or of another dimension."""
    try:
        value: Tensor = loss(embeddings, labels, ids=ids)
    except (IndexError, RuntimeError) as error:
        raise InvalidValue(
            f"must accept embeddings of {embeddings.shape[1]} numbers and labels up to {int(labels.max())}, but "
            f"failed ({first_line(error)})",
            argument="loss",
            cure="give other `loss_args`",
        ) from error
    return value


def _start_with_principal_directions(head: Head, embeddings: Float[Tensor, "rows dim"]) -> None:
    """Let the linear map project onto the principal directions, so that training starts with the features' ranking."""
    dim = min(head.linear.weight.shape)
    rows = embeddings.double()
    _, directions = torch.linalg.eigh(rows.T @ rows)  # in ascending order
    with torch.no_grad():
        nn.init.zeros_(head.linear.weight)
        head.linear.weight[:dim] = directions.flip(1).T[:dim].float()


def lists_of_epoch(
    labels: Int[Tensor, " rows"], size: int, generator: torch.Generator
) -> Iterator[Int[Tensor, " batch"]]:
    """The lists of an epoch: the classes in random order, each with at most 16 random rows, cut into lists."""
    _, classes = labels.unique(return_inverse=True)
    shuffled = torch.randperm(len(labels), generator=generator)
    order = torch.randperm(int(classes.max()) + 1, generator=generator)
    by_class = order[classes[shuffled]].sort(stable=True)
    _, counts = by_class.values.unique_consecutive(return_counts=True)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    is_kept = torch.arange(len(labels)) - starts < MOST_OF_A_CLASS
    lists = shuffled[by_class.indices][is_kept].split(size)
    if len(lists) > 1 and len(lists[-1]) < size // 2:  # a short list may lack positives or negatives
        lists = lists[:-1]
    yield from lists


@torch.no_grad()
def _metrics(head: Head | None, rows: LabelledSet) -> RetrievalMetrics:
    """Metrics of the embeddings, or of the head on them."""
    metrics = RetrievalMetrics(ks=(1,))
    embeddings = rows.embeddings
    if head is not None:
        embeddings = head(embeddings)
    metrics.update(embeddings, rows.labels, torch.arange(len(rows.labels)))
    return metrics


def _mean_ap(head: Head, rows: LabelledSet) -> float:
    return float(_metrics(head, rows).compute()["mAP"])


def _compare(head: Head, held_out: LabelledSet, epochs: int) -> AdaptedHead:
    """Compare the head with the stored embeddings, class by class."""
    before, after = (_metrics(used, held_out).per_query()["AP"] for used in (None, head))
    differences = []
    for label in held_out.labels.unique():
        differences.append(float((after - before)[held_out.labels == label].mean()))
    mean = statistics.fmean(differences)
    spread = NORMAL_QUANTILE * statistics.stdev(differences) / len(differences) ** 0.5
    interval = (mean - spread, mean + spread)
    return AdaptedHead(float(before.mean()), float(after.mean()), interval, len(differences), epochs)


def _preparation(manifest: EmbeddingManifest, source: Any) -> dict[str, Any] | None:
    """The preparation of images for the head: that of the embeddings; with a warning if it was a guess."""
    if source.preparation is not None:
        return dict(source.preparation)
    print_guess(manifest.about, made="embeddings")
    return dict(manifest.preparation or {}) or None


def _save(embedder: AdaptedEmbedder, loss: nn.Module, preparation: dict[str, Any] | None, output: Path) -> None:
    """Write the checkpoint. A loss that cannot be rebuilt from it is replaced: only further training needs the loss."""
    try:
        loss = rebuild("loss", describe(loss), nn.Module)
    except ValueError:
        loss = losses.SmoothAPLoss()
    module = RetrievalModule(embedder, loss)
    module.preparation = preparation
    with quiet_trainer():
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        trainer.strategy.connect(module)
        trainer.strategy.checkpoint_io = VerifiedCheckpoints(trainer.strategy.checkpoint_io)
        trainer.save_checkpoint(output, weights_only=True)
