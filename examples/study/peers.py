"""Losses that only the study has: log rank with other weights, InfoNCE, mined triplets, and proxies.

The losses of pytorch-metric-learning with proxies have a proxy, or several, for each class of the training set. The
proxies have a learning rate of their own, no weight decay, and no part in the clipping of gradients.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from lightning_retrieval.losses import LogRankLoss
from lightning_retrieval.losses.log_rank import softplus_step
from lightning_retrieval.losses.score_block import Positives, ScoreBlock, at, count_above
from lightning_retrieval.losses.third_party import begin_at

PROXY_LOSSES = (
    "ArcFaceLoss",
    "SubCenterArcFaceLoss",
    "CosFaceLoss",
    "NormalizedSoftmaxLoss",
    "ProxyAnchorLoss",
    "SoftTripleLoss",
)
MEANS_BATCH = 512  # images that are embedded at a time


class WeightedLogRankLoss(LogRankLoss):
    """Log rank whose k-th best positive has the weight k^-p, normalised for each query. With p 0 it is log rank.

    Args:
        p: as above.
        c: the negative weight of log rank.
        tau: as in log rank.
        lambda_: as in log rank.
    """

    def __init__(self, *, p: float = 0.0, c: float = 1.0, tau: float, lambda_: float) -> None:
        super().__init__(tau, lambda_=lambda_, negative_weight=c)
        self.p = p

    def query_losses(self, block: ScoreBlock) -> Tensor:
        positives = block.positives
        query = positives.query
        s_i = at(block.scores, query, positives.index)
        s_negative = (block.scores / self.tau).masked_fill(~block.candidate | block.relevant, -torch.inf)
        rn_i = count_above(s_negative, query, s_i / self.tau, softplus_step) / math.log(2)
        l_i = (self.negative_weight * rn_i).log1p() + self.lambda_ * (1 - s_i)
        weights = place_of_each(positives, s_i.detach()) ** -self.p
        zeros = torch.zeros_like(s_negative[:, 0])
        return zeros.index_add(0, query, weights * l_i) / zeros.index_add(0, query, weights)


def place_of_each(positives: Positives, scores: Tensor) -> Tensor:
    """Return the place of each positive among those of its query, from 1 for the one with the highest score."""
    order = positives.in_columns(scores).argsort(1, descending=True)
    places = order.argsort(1) + 1
    return places[positives.query, positives.column].to(scores.dtype)


class InfoNCELoss(nn.Module):
    """NTXentLoss of pytorch-metric-learning in about a tenth of its time: it copies the negatives of each pair.

    Args:
        temperature: of the similarities.
    """

    def __init__(self, *, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        logits = embeddings @ embeddings.T / self.temperature
        same = labels[:, None] == labels
        negatives = logits.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
        losses = softplus(negatives - logits)
        return losses[same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)].mean()


class MinedTripletLoss(nn.Module):
    """The triplet loss of pytorch-metric-learning on mined triplets.

    Args:
        mining: whether negatives are those between a positive and the margin, or drawn by their distance.
        margin: of the loss, and of semi-hard triplets.
    """

    def __init__(self, *, mining: Literal["semi-hard", "distance-weighted"], margin: float) -> None:
        from pytorch_metric_learning import losses, miners

        super().__init__()
        self.loss = losses.TripletMarginLoss(margin=margin)
        self.miner: nn.Module = miners.DistanceWeightedMiner()
        if mining == "semi-hard":
            self.miner = miners.TripletMarginMiner(margin=margin, type_of_triplets="semihard")

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


class ProxyLoss(nn.Module):
    """A loss of pytorch-metric-learning with proxies of the classes of the training set.

    Args:
        name: of the loss.
        classes: the labels of the training set, each once, in ascending order.
        arguments: of the loss, except the number of classes.
    """

    def __init__(self, name: str, classes: Tensor, arguments: Mapping[str, Any]) -> None:
        from pytorch_metric_learning import losses

        super().__init__()
        self.loss = getattr(losses, name)(num_classes=len(classes), **arguments)
        self.register_buffer("classes", classes)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.loss(embeddings, self.positions(labels))

    def positions(self, labels: Tensor) -> Tensor:
        """Return the positions of labels among the classes."""
        classes: Any = self.classes
        positions: Tensor = torch.searchsorted(classes, labels)
        return positions

    @torch.no_grad()
    def begin_at(self, means: Tensor) -> None:
        """Set the proxies of each class to its mean, up to a small random difference if a class has several."""
        begin_at(self.loss, means, torch.arange(len(means), device=means.device))


def proxy_losses(module: nn.Module) -> list[ProxyLoss]:
    """Return the losses with proxies in a module."""
    return [part for part in module.modules() if isinstance(part, ProxyLoss)]


def adam_with_proxies(
    groups: Iterable[Mapping[str, Any]], *, proxies: Sequence[nn.Parameter], factor: float, lr: float, **settings: Any
) -> torch.optim.AdamW:
    """Create the optimizer of a network and proxies.

    Args:
        groups: the parameters.
        proxies: those without weight decay and with the learning rate `factor * lr`.
        factor: of their learning rate.
        lr: learning rate of the other parameters.
        settings: other arguments of AdamW.
    """
    numbers = set(map(id, proxies))
    of_network: list[nn.Parameter] = []
    of_proxies: list[nn.Parameter] = []
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in numbers:
                of_proxies.append(parameter)
            else:
                of_network.append(parameter)
    parts: list[dict[str, Any]] = [
        {"params": of_network},
        {"params": of_proxies, "lr": factor * lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(parts, lr=lr, fused=True, **settings)


class ProxyTraining(pl.Callback):
    """Sets proxies to the means of their classes before the first step, and clips the gradients of the network alone.

    Args:
        begin: whether proxies begin at the means of the embeddings before training, or as the loss made them.
        clip: largest norm of the gradients.
    """

    def __init__(self, begin: Literal["class means", "random"], clip: float) -> None:
        self.begin = begin
        self.clip = clip

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.begin == "class means":
            loader: Any = trainer.train_dataloader
            for loss in proxy_losses(pl_module):
                loss.begin_at(class_means(pl_module, loader.dataset, loss))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        module: Any = pl_module
        torch.nn.utils.clip_grad_norm_(module.embedder.parameters(), self.clip)


@torch.no_grad()
def class_means(module: Any, dataset: Any, loss: ProxyLoss) -> Tensor:
    """Return the mean embedding of each training class. BatchNorm layers normalise as in the first steps."""
    before = {name: value.clone() for name, value in module.embedder.named_buffers()}
    embeddings, positions = [], []
    for rows in torch.randperm(len(dataset.labels)).split(MEANS_BATCH):
        images = torch.stack([dataset[index]["images"] for index in rows.tolist()])
        embeddings.append(module.embed(images.to(module.device)))
        positions.append(loss.positions(dataset.labels[rows].to(module.device)))
    for name, value in module.embedder.named_buffers():
        value.copy_(before[name])
    classes = len(dataset.labels.unique())
    sums = embeddings[0].new_zeros(classes, embeddings[0].shape[1])
    return normalize(sums.index_add(0, torch.cat(positions), torch.cat(embeddings)))
