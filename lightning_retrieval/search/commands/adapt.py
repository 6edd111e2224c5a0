"""`lightning-retrieval adapt`: train a head on embeddings that `embed` wrote, and write a checkpoint with it."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from lightning_retrieval import losses
from lightning_retrieval.backend import pl
from lightning_retrieval.checks import check_integer, check_positive
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.invalid import InvalidValue, owned_by, reported_as
from lightning_retrieval.models.adapted import AdaptedEmbedder, Head
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data import describe, rebuild
from lightning_retrieval.search.commands.embedding import recorded_model, shown_model
from lightning_retrieval.search.commands.head_training import (
    LARGEST_LIST,
    LabelledSet,
    read_labelled_set,
    shuffled_classes,
    train_head,
)
from lightning_retrieval.search.commands.of_checkpoint import print_guess
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest
from lightning_retrieval.training.checkpointed_module import VerifiedCheckpoints
from lightning_retrieval.training.module import RetrievalModule
from lightning_retrieval.training.run_report import quiet_trainer

OWNER = "adapt_head"
HELD_OUT = 0.2  # fraction of the classes that are held out
FEWEST_CLASSES = 4  # two to train on, and two that are held out
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
        labels: CSV or Parquet table with the columns `image` and `label`; if None, the labels in the folder, or
            else the folders of the images, are used.
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
    given = read_labelled_set(folder, labels, TableFormat.checked(columns, delimiter))
    is_held_out = _held_out(given.labels, generator)
    held_out = given.where(is_held_out)
    epochs = train_head(
        embedder.head,
        loss,
        given.where(~is_held_out),
        held_out,
        batch_size=batch_size,
        lr=lr,
        max_epochs=max_epochs,
        generator=generator,
    )
    _save(embedder, loss, _preparation(folder.manifest, module), output)
    return _compare(held_out, embedder.head, epochs)


def _embedding_module(
    manifest: EmbeddingManifest, given: Path | PretrainedBackbone | None, output: Path, overwrite: bool
) -> Any:
    """The network that made the embeddings; raises unless a head can follow it in another file."""
    loaded = recorded_model(manifest.about, given, made="embeddings were")
    checkpoint = loaded.about.get("checkpoint")
    if output.exists() and checkpoint is not None and output.samefile(checkpoint):
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


def _held_out(labels: Int[Tensor, " rows"], generator: torch.Generator) -> Bool[Tensor, " rows"]:
    """Whether each row is of a held-out class; only classes with several images are held out."""
    shuffled = shuffled_classes(labels, FEWEST_CLASSES, generator)
    return torch.isin(labels, shuffled[: max(2, round(HELD_OUT * len(shuffled)))])


def _compare(held_out: LabelledSet, head: Head, epochs: int) -> AdaptedHead:
    """Compare the head with the stored embeddings, class by class."""
    before, after = held_out.of_classes(None), held_out.of_classes(head)
    differences = (after.ap - before.ap).tolist()
    mean = statistics.fmean(differences)
    spread = NORMAL_QUANTILE * statistics.stdev(differences) / len(differences) ** 0.5
    interval = (mean - spread, mean + spread)
    return AdaptedHead(before.mean_ap, after.mean_ap, interval, len(differences), epochs)


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
