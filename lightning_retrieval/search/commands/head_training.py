"""What `adapt` and its comparison of losses share: labelled embeddings, losses by name, and the training of a head.

It is a plain loop, since a Trainer takes several times as long for steps that are so small.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lightning_retrieval import losses
from lightning_retrieval.checks import first_line
from lightning_retrieval.datamodules.image_index import class_folders
from lightning_retrieval.datamodules.image_table import check_values
from lightning_retrieval.datamodules.table_format import TableFormat
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses.third_party import as_batch_loss
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models.adapted import Head
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data import rebuild
from lightning_retrieval.plain_data.rules import find_class
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.commands.embedding import check_table_given
from lightning_retrieval.search.commands.index import read_image_rows
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, all_rows, labelled_rows

LARGEST_LIST = 16_384
LONGEST_GRADIENT = 1.0  # norm to which gradients are clipped, as log rank needs
MOST_OF_A_CLASS = 16  # images of a class in a list
PATIENCE = 5  # epochs without a better mAP after which training stops


class ClassMetrics(NamedTuple):
    """Mean metrics of the queries of each class, in ascending order of the labels, and the number of queries."""

    ap: Float[Tensor, " classes"]
    r_at_1: Float[Tensor, " classes"]
    queries: Int[Tensor, " classes"]

    @property
    def mean_ap(self) -> float:
        """The mAP of all queries."""
        return float((self.ap * self.queries).sum() / self.queries.sum())


class LabelledSet(NamedTuple):
    """Embeddings and their labels."""

    embeddings: Float[Tensor, "rows dim"]
    labels: Int[Tensor, " rows"]

    def where(self, chosen: Bool[Tensor, " rows"]) -> "LabelledSet":
        """The chosen rows."""
        return LabelledSet(self.embeddings[chosen], self.labels[chosen])

    def mean_ap(self, head: Head) -> float:
        """The mAP of the head's embeddings."""
        return float(self._metrics(head).compute()["mAP"])

    def of_classes(self, head: Head | None) -> "ClassMetrics":
        """The metrics of each class with the head's embeddings, or with the embeddings themselves without one."""
        per_query = self._metrics(head).per_query()
        _, classes, counts = self.labels.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(2, len(counts), dtype=torch.double)
        sums.index_add_(1, classes, torch.stack([per_query["AP"], per_query["R@1"]]).double())
        ap, r_at_1 = sums / counts
        return ClassMetrics(ap, r_at_1, counts)

    @torch.no_grad()
    def _metrics(self, head: Head | None) -> RetrievalMetrics:
        embeddings = self.embeddings
        if head is not None:
            embeddings = head(embeddings)
        metrics = RetrievalMetrics(ks=(1,))
        metrics.update(embeddings, self.labels, torch.arange(len(self.labels)))
        return metrics


def path_of_loss(name: str) -> str:
    """The dotted path of a loss of this library or of pytorch-metric-learning; a dotted path itself."""
    if "." in name:
        return name
    if name in losses.__all__:
        return f"lightning_retrieval.{name}"
    return f"pytorch_metric_learning.losses.{name}"


def loss_class(name: str) -> type[nn.Module]:
    """The class of a loss that the user names.

    Raises:
        ValueError: if there is no such loss.
    """
    path = path_of_loss(name)
    if path.startswith("pytorch_metric_learning."):
        with optional_import(f"the loss {name} needs pip install pytorch-metric-learning."):
            importlib.import_module("pytorch_metric_learning.losses")
    try:
        return find_class("loss", path, (nn.Module,))
    except InvalidType as error:  # for a command, whose options are texts, each is a value
        raise InvalidValue(error.rule, argument="loss", got=name) from None


def named_loss(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The loss that the user names.

    Args:
        name: name of a loss of this library or of pytorch-metric-learning, or the dotted path of a class.
        arguments: arguments of the loss.

    Raises:
        ValueError: if there is no such loss, or the arguments are invalid.
        ModuleNotFoundError: if pytorch-metric-learning is needed.
    """
    loss_class(name)
    return rebuild("loss", {"class_path": path_of_loss(name), "init_args": dict(arguments)}, nn.Module)


def read_labelled_set(folder: EmbeddingFolder, table: Path | None, table_format: TableFormat) -> LabelledSet:
    """The embeddings of a folder, labelled by a table, else as they were written, else by the folders of the images."""
    labels: Mapping[str, str] | None = None
    if table is None:
        check_table_given(None, "labels", table_format)
    else:
        read, row_of = read_image_rows("labels", table, ("image", "label"), table_format=table_format)
        if "label" not in read:
            rule = "must be a table with the column label"
            raise InvalidValue(rule, argument="labels", got=f"{table} with tags", cure="add labels")
        check_values(read, "label")
        labels = {image: read["label"][row] for image, row in row_of.items() if read["label"][row]}
    stored = all_rows(folder)
    if labels is None and not any(stored.labels):
        folders = dict(zip(stored.paths, class_folders(stored.paths)[0]))
        labels = {path: name for path, name in folders.items() if name != "."} or None
    return LabelledSet(*map(torch.from_numpy, labelled_rows(folder, "embeddings", labels)))


def train_head(
    head: Head,
    loss: nn.Module,
    trained: LabelledSet,
    chosen_on: LabelledSet,
    *,
    batch_size: int,
    lr: float,
    max_epochs: int,
    generator: torch.Generator,
    hidden: bool = False,
) -> int:
    """Train until the mAP of other classes has not risen for 5 epochs, load the best head, and return the epochs.

    Args:
        head: the head, which begins as a projection onto the principal directions of the embeddings.
        loss: loss of this library or another.
        trained: what the head is trained on.
        chosen_on: what the number of epochs is chosen on.
        batch_size: number of embeddings in a list.
        lr: learning rate of AdamW.
        max_epochs: maximum number of epochs.
        generator: of the lists.
        hidden: show no progress.

    Raises:
        ValueError: if the loss is not finite.
    """
    start_with_principal_directions(head, trained.embeddings)
    batch_loss = as_batch_loss(loss)
    parameters = [*head.parameters(), *batch_loss.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0)
    best, best_epoch, best_state = chosen_on.mean_ap(head), 0, copy.deepcopy(head.state_dict())
    with Progress("Training", total=max_epochs, units="epochs", hidden=hidden) as progress:
        for epoch in range(1, max_epochs + 1):
            for rows in lists_of_epoch(trained.labels, batch_size, generator):
                value = _value(batch_loss, head(trained.embeddings[rows]), trained.labels[rows], rows)
                optimizer.zero_grad()
                value.backward()
                nn.utils.clip_grad_norm_(parameters, LONGEST_GRADIENT)
                optimizer.step()
            progress.update(1)
            found = chosen_on.mean_ap(head)
            if found > best:
                best, best_epoch, best_state = found, epoch, copy.deepcopy(head.state_dict())
            if epoch - best_epoch >= PATIENCE:
                break
    head.load_state_dict(best_state)
    return epoch


def _value(
    loss: nn.Module, embeddings: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"], ids: Int[Tensor, " batch"]
) -> Tensor:
    """The loss of a list; raises a ValueError if the settings of the loss do not fit."""
    try:
        value: Tensor = loss(embeddings, labels, ids=ids)
    except (IndexError, RuntimeError) as error:  # proxies of another dimension, or of too few classes
        rule = f"must accept embeddings of {embeddings.shape[1]} numbers and labels up to {int(labels.max())}"
        got = f"an error ({first_line(error)})"
        raise InvalidValue(rule, argument="loss", got=got, cure="give other `loss_args`") from error
    if not value.isfinite():
        cure = "give other `loss_args`, or a lower `lr`"
        raise InvalidValue("must be finite", argument="loss", got=value.item(), cure=cure)
    return value


def shuffled_classes(labels: Int[Tensor, " rows"], fewest: int, generator: torch.Generator) -> Int[Tensor, " classes"]:
    """The classes with several images, shuffled; raises a ValueError if they are too few to hold some out."""
    classes, counts = labels.unique(return_counts=True)
    several = classes[counts > 1]
    if len(several) < fewest:
        rule = f"must be of at least {fewest} classes with several images, since some classes are held out"
        raise InvalidValue(rule, argument="embeddings", got=f"{len(several)} of {len(classes)}", cure="add images")
    shuffled: Tensor = several[torch.randperm(len(several), generator=generator)]
    return shuffled


def start_with_principal_directions(head: Head, embeddings: Float[Tensor, "rows dim"]) -> None:
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
