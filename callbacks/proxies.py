"""Proxies that begin at the means of their classes, the "imprinted weights" of Qi et al. (CVPR 2018).

The means are those of the embeddings that the loss would see in the first step. So BatchNorm layers that are not frozen
normalise by the statistics of each batch: in a network with random weights, the running statistics are not those of
any image, and means of embeddings that they give are no nearer to their classes than to others.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.training_images import (
    batches_of,
    candidates_of,
    embedded,
    labels_of,
    training_images,
)
from lightning_retrieval.compiled import uncompiled
from lightning_retrieval.distributed import gather_rows, rank, sum_over_ranks, to_host, world_size
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.losses.third_party import begin_at, check_classes, losses_that_begin, original_loss
from lightning_retrieval.models.retrieval_network import evaluation_mode, normalized_inputs
from lightning_retrieval.random_state import RandomState, step_random_state
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.training.module import RetrievalModule

BATCH = 64  # images that are embedded at a time, whatever the number of processes
MERGED = 256  # batches whose embeddings are kept, before they are added to the sums of their classes


class ProxiesAtClassMeans(Callback):
    """Sets the proxies of a loss to the mean embeddings of their classes before the first step of a run.

    Each image of the training set is embedded once. It is read as in evaluation, and networks are in evaluation mode,
    except that BatchNorm layers which are not frozen normalise by the statistics of each batch, as in training. The
    buffers of the network and the random states are as before afterwards. The work is distributed over the processes.
    The means are the same on all of them, and do not depend on their number, unless BatchNorm layers are synchronised.
    A resumed run keeps the proxies of its checkpoint.

    The losses of pytorch-metric-learning with proxies are known, within `WeightedSum` or a module of your own too. Any
    other loss gets the means by its own method `begin_at(means, labels)`: one row of length 1 for each class, and the
    label of each class. If a class has several proxies (SubCenterArcFaceLoss, SoftTripleLoss), they begin close to the
    mean, with small random differences. The proxies of a class without images do not change, with a warning.

    Args:
        images_per_class: largest number of images of each class that are embedded, >= 1; they are drawn at random. None
            embeds all images. A number needs a data set with `labels`, as those of this library.

    Raises:
        ValueError: if the loss has no proxies to set, or none for a label of the training set; if proxies have another
            dimension than embeddings; if the training images are not known, or an embedding is not finite.
        TypeError: if `images_per_class` is not an integer.

    Example:
        >>> import pytorch_lightning as pl
        >>> from pytorch_metric_learning.losses import ArcFaceLoss
        >>> from lightning_retrieval import Embedder, RetrievalModule, Updates
        >>> from lightning_retrieval.callbacks import ProxiesAtClassMeans
        >>> loss = ArcFaceLoss(num_classes=100, embedding_size=64)
        >>> module = RetrievalModule(Embedder("glyph_net", 64), loss, updates=Updates(loss_lr_factor=10))
        >>> trainer = pl.Trainer(callbacks=[ProxiesAtClassMeans()], logger=False)

    Cost:
        One pass over the training set without gradients, and main memory for two sums of each class in float64.

    Relations:
        `Updates(loss_lr_factor=...)` gives the proxies a learning rate of their own.
    """

    def __init__(self, images_per_class: PositiveInt | None = None) -> None:
        self.images_per_class = checked(self, images_per_class=images_per_class)

    @owned
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            _losses(pl_module)

    @owned
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In this hook, the module has checked the run. A resumed run has made steps.
        if trainer.global_step == 0:
            self._begin(trainer, pl_module)

    def _begin(self, trainer: pl.Trainer, pl_module: Any) -> None:
        losses, dataset = _losses(pl_module), training_images(trainer)
        indices = self._drawn_indices(dataset, losses, pl_module.seed)
        batches = indices.tensor_split(math.ceil(len(indices) / BATCH))
        own = batches[rank() :: world_size()]
        # Layers may be collective operations, so each process embeds equally many batches; it drops what it repeats.
        padded = [*own, *batches[:1]][: math.ceil(len(batches) / world_size())]
        loader = batches_of(dataset, padded, trainer.train_dataloader)
        embed = functools.partial(_embedded_as_in_training, pl_module)
        with (
            RandomState().replayed(),  # whatever draws random numbers: on exit, all generators are as before
            step_random_state(pl_module.seed, 0, 0),
            uncompiled(pl_module),
            _as_in_first_step(pl_module),
            torch.no_grad(),
        ):
            pairs = embedded(trainer, pl_module, loader, embed, "Embedding the classes of proxies")
            means, labels = _class_means(_first(pairs, len(own)), pl_module.device)
            means = means.to(torch.promote_types(pl_module.dtype, torch.float32)).to(pl_module.device)
            for loss in losses:
                begin_at(loss, means, labels.to(pl_module.device))

    def _drawn_indices(self, dataset: Any, losses: Iterable[nn.Module], seed: int) -> Int[Tensor, " image"]:
        """The indices of the images that are embedded, in a random order that all processes share."""
        candidates = torch.tensor(candidates_of(dataset))
        order = candidates[torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))]
        labels = labels_of(dataset)
        if labels is None:
            if self.images_per_class is None:
                return order
            rule = "needs a data set with `labels`, one integer or more for each image"
            got, cure = type(dataset).__name__, "leave it out, and embed all images"
            raise InvalidValue(rule, argument="images_per_class", got=got, cure=cure)
        labels = labels[order]
        for loss in losses:
            check_classes("labels", labels, loss)
        if self.images_per_class is None:
            return order
        by_class, positions = labels.sort(stable=True)
        place = torch.arange(len(order)) - torch.searchsorted(by_class, by_class)
        return order[positions[place < self.images_per_class].sort().values]


def _losses(pl_module: Any) -> list[nn.Module]:
    """The parts of a module's loss whose proxies can be set; raises if there are none."""
    if not isinstance(pl_module, RetrievalModule):
        raise InvalidValue("needs a RetrievalModule", got=type(pl_module).__name__)
    losses = losses_that_begin(pl_module.loss)
    if not losses:
        raise InvalidValue(
            "must be a loss of pytorch-metric-learning with proxies, such as ArcFaceLoss, or have a method "
            "`begin_at(means, labels)` that sets its proxies",
            argument="loss",
            got=type(original_loss(pl_module.loss)).__name__,
            cure="define the method, or leave the callback out",
        )
    return losses


@contextmanager
def _as_in_first_step(module: nn.Module) -> Iterator[None]:
    """Context of evaluation in which BatchNorm layers normalise as in training. On exit, they are as before."""
    norms: list[nn.Module] = []
    before: list[tuple[Tensor, Tensor]] = []
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.training:
            norms.append(part)
            before += [(buffer, buffer.clone()) for buffer in part.buffers()]
    try:
        with evaluation_mode(module):
            for norm in norms:
                norm.training = True
            yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _embedded_as_in_training(pl_module: Any, images: Tensor) -> Tensor:
    """The embeddings of images, without `eval_scales` and `whitening`."""
    embeddings: Tensor = pl_module(normalized_inputs(pl_module, "candidates", images))
    return embeddings


def _first(pairs: Iterable[tuple[Tensor, Tensor]], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The normalised embeddings of the first batches and their labels, on the host; no rows of the other batches."""
    for number, (rows, labels) in enumerate(pairs):
        kept = len(rows) * (number < count)
        yield normalize(to_host(rows).double())[:kept], finest(to_host(labels))[:kept]


def _class_means(
    pairs: Iterator[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[Float[Tensor, "classes dim"], Int[Tensor, " classes"]]:
    """The normalised mean of each class of all processes, and the label of each class, in ascending order.

    Args:
        pairs: normalised embeddings of this process and their labels, batch by batch.
        device: the device of the collective operations.
    """
    totals: list[tuple[Tensor, Tensor]] = []
    while batches := list(itertools.islice(pairs, MERGED)):
        rows, labels = map(torch.cat, zip(*totals, *batches))
        totals = [_summed(rows, labels)]
    ((sums, classes),) = totals
    if world_size() > 1:
        of_process = classes.to(device)
        classes = gather_rows(of_process).unique()
        of_all = torch.zeros(len(classes), sums.shape[1], dtype=sums.dtype, device=device)
        of_all[torch.searchsorted(classes, of_process)] = sums.to(device)
        sums = sum_over_ranks(of_all)
    if not bool(sums.isfinite().all()):
        raise InvalidValue("embeddings must be finite", got="NaN or inf before the first step")
    return normalize(sums), classes


def _summed(
    rows: Float[Tensor, "row dim"], labels: Int[Tensor, " row"]
) -> tuple[Float[Tensor, "classes dim"], Int[Tensor, " classes"]]:
    """The sum of the rows of each class, and the label of each class."""
    classes, number = labels.unique(return_inverse=True)
    return rows.new_zeros(len(classes), rows.shape[1]).index_add(0, number, rows), classes
