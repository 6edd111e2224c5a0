"""Adapter that gives losses of other libraries the interface of this library's losses, and what it knows of these.

Losses with proxies learn a vector, or several, for each class of the training set.
"""

import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from lightning_retrieval.checks import check_finite
from lightning_retrieval.distributed import rank, to_host
from lightning_retrieval.invalid import InvalidType, InvalidValue, owned_by
from lightning_retrieval.losses.batch_loss import BatchLoss, RankedBatch
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.relevance import Relevance, SameLabel

# The losses of pytorch-metric-learning that rank references in any order and use only the pairs in `indices_tuple`.
# Not in the list: NCALoss, which accepts references but always counts the query's own copy among them;
# ThresholdConsistentMarginLoss and LiftedStructureLoss, which mistake indices of references for indices of queries.
ACCEPT_REFERENCES = frozenset(
    {
        "AngularLoss",
        "CircleLoss",
        "ContrastiveLoss",
        "GeneralizedLiftedStructureLoss",
        "IntraPairVarianceLoss",
        "MarginLoss",
        "MultiSimilarityLoss",
        "NTXentLoss",
        "SignalToNoiseRatioContrastiveLoss",
        "SupConLoss",
        "TripletMarginLoss",
        "TupletMarginLoss",
    }
)
USE_OTHER_LOSS = (
    f"use a loss of this library, or one of pytorch-metric-learning's {', '.join(sorted(ACCEPT_REFERENCES))}"
)

# The losses of pytorch-metric-learning that cannot be trained with labels, each with the reason.
CANNOT_TRAIN = {
    "SelfSupervisedLoss": "it takes no labels, but two embeddings of each image",
    "DynamicSoftMarginLoss": "it keeps the graph of the previous batch, so that the second backward pass fails",
    "ManifoldLoss": "it takes no labels",
    "VICRegLoss": "it takes no labels",
}

# The losses of pytorch-metric-learning that learn proxies: the name of the parameter that holds them, and the dimension
# along which they are numbered. Several proxies of a class follow one another.
PROXIES = {
    "LargeMarginSoftmaxLoss": ("W", 1),  # the base class of ArcFaceLoss, CosFaceLoss and others
    "NormalizedSoftmaxLoss": ("W", 1),
    "P2SGradLoss": ("weight", 1),
    "ProxyAnchorLoss": ("proxies", 0),
    "ProxyNCALoss": ("proxies", 0),
    "SoftTripleLoss": ("fc", 1),
    "BaseProxyLoss": ("weight", 0),  # the base class of all of them in version 3
}
SPREAD = 0.1  # length of the random differences between several proxies of a class, which begin at a mean of length 1


class ThirdPartyLoss(BatchLoss):
    """A loss of another library with the call signature of this library's losses.

    The loss is called with embeddings and labels. If there are references, it also gets all pairs of a query and a
    reference, except the pairs of a query and its own copy. `RetrievalModule`, `WeightedSum` and `NestedLoss` wrap such
    losses automatically.

    Args:
        loss: called as `loss(embeddings, labels)` or, with references, as `loss(embeddings, labels, indices_tuple,
            ref_emb, ref_labels)`, the signature of pytorch-metric-learning.

    Raises:
        ValueError: when called, if a loss with weights for each class has none for a label.
        TypeError: when called, if there are references and the loss cannot exclude the
            query's own copy, or if `queries` or `relevance` is given.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ContrastiveLoss
        >>> from lightning_retrieval.losses.third_party import ThirdPartyLoss
        >>> loss = ThirdPartyLoss(ContrastiveLoss())
        >>> embeddings, ids = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> loss(embeddings, torch.tensor([7, 7]), ids=ids).item() == loss.loss(embeddings, torch.tensor([7, 7])).item()
        True

    Relations:
        Labels of several levels are reduced to the finest level.
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def splits_by_query(self, fraction: float = 1.0) -> bool:
        """False: the loss is not known to be a sum over queries."""
        return False

    @property
    def terms_without_references(self) -> list[str]:
        """The name of the loss if it cannot rank references without the query's own copy."""
        if not _accepts_references(self.loss):
            return [type(self.loss).__name__]
        if getattr(self.loss, "swap", False):  # TripletMarginLoss then mistakes references for queries
            return [f"{type(self.loss).__name__}(swap=True)"]
        return []

    def check_relevance(self, relevance: Relevance) -> None:
        """Raise a TypeError: a loss of another library compares labels itself."""
        rule = "a third-party loss gets labels only, so `relevance` must be None"
        raise InvalidType(rule, type(self.loss).__name__, got=relevance, cure="use a loss of this library")

    def compute(self, batch: RankedBatch) -> Any:
        """The value of the loss."""
        if not isinstance(batch.lists.rule, SameLabel):
            self.check_relevance(batch.lists.rule)
        with owned_by(type(self.loss).__name__):
            self._check(batch)
        labels, ref_labels = batch.lists.columns[:, 0], batch.lists.ref_columns[:, 0]
        if batch.ref_emb is None:
            return self.loss(batch.embeddings, labels)
        return self.loss(batch.embeddings, labels, _pairs(batch.lists.finest), batch.ref_emb, ref_labels)

    def _check(self, batch: RankedBatch) -> None:
        """Raise if the loss cannot compute a batch."""
        if batch.queries is not None:
            rule = "a third-party loss is not a sum over queries, so it cannot be computed for a range of them"
            raise InvalidType(rule, cure="omit `queries`")
        check_finite("embeddings", batch.embeddings)
        check_classes("labels", batch.lists.columns[:, 0], self.loss)
        if batch.ref_emb is None:
            return
        check_finite("ref_emb", batch.ref_emb)
        if self.terms_without_references:
            rule = "the loss cannot rank references without the query's own copy"
            raise InvalidType(rule, self.terms_without_references[0], cure=USE_OTHER_LOSS)


def check_references(loss: BatchLoss, needed_by: str) -> None:
    """Raise if a loss cannot rank references.

    Args:
        loss: the loss.
        needed_by: the argument or the batch that gives the loss references.

    Raises:
        TypeError: if a term of the loss cannot rank references.
    """
    if loss.terms_without_references:
        raise InvalidType(
            f"with {needed_by} the loss must rank references and exclude the query's own copy, which "
            f"{', '.join(loss.terms_without_references)} cannot do",
            cure=USE_OTHER_LOSS,
        )


def as_batch_loss(loss: nn.Module) -> BatchLoss:
    """The loss itself if it has the interface of this library, else wrapped in `ThirdPartyLoss`.

    Raises:
        TypeError: if `loss` is one of the losses of pytorch-metric-learning that cannot be trained with labels.
    """
    if isinstance(loss, BatchLoss):
        return loss
    name = type(loss).__name__
    if name in CANNOT_TRAIN and _is_of_pytorch_metric_learning(type(loss)):
        raise InvalidType(f"the loss cannot be trained, because {CANNOT_TRAIN[name]}", name, cure=USE_OTHER_LOSS)
    return ThirdPartyLoss(loss)


def check_classes(name: str, labels: Tensor, loss: nn.Module) -> None:
    """Raise if a loss of pytorch-metric-learning has no weights for the class of a label.

    Args:
        name: the argument with the labels.
        labels: one or more labels.
        loss: any loss.
    """
    classes = _number_of_classes(loss)
    if classes is None:
        return
    smallest, largest = map(int, to_host(torch.stack(labels.aminmax())))
    if smallest < 0 or largest >= classes:
        rule = f"must be from 0 to {classes - 1}, since the loss has num_classes={classes}"
        cure = "number the classes of the training set 0, 1, ... and give the loss their number"
        raise InvalidValue(rule, argument=name, got=f"{smallest} to {largest}", cure=cure)


def has_proxies(loss: nn.Module) -> bool:
    """Whether this is a loss of pytorch-metric-learning that learns proxies: vectors of the embeddings' dimension."""
    return _proxies(loss) is not None


def losses_that_begin(loss: nn.Module) -> list[nn.Module]:
    """The parts of a loss whose proxies `begin_at` can set.

    A part with a method `begin_at` is responsible for the parts in it.
    """
    if hasattr(loss, "begin_at") or has_proxies(loss):
        return [loss]
    found: list[nn.Module] = []
    for part in loss.children():
        found += losses_that_begin(part)
    return found


def begin_at(loss: Any, means: Float[Tensor, "classes dim"], labels: Int[Tensor, " classes"]) -> None:
    """Set the proxies of some classes to their means; if a class has several, up to small random differences.

    Args:
        loss: a result of `losses_that_begin`; its method `begin_at(means, labels)` is called, if it has one.
        means: one row of length 1 for each class.
        labels: the label of each class.

    Raises:
        ValueError: if the loss has no proxies for a label, or proxies of another dimension.
    """
    if hasattr(loss, "begin_at"):
        loss.begin_at(means, labels)
        return
    proxies: Any = _proxies(loss)
    check_classes("labels", labels, loss)
    if proxies.shape[1] != means.shape[1]:
        rule = f"must be the dimension of the embeddings, {means.shape[1]}"
        raise InvalidValue(rule, type(loss).__name__, "embedding_size", got=proxies.shape[1])
    classes = _number_of_classes(loss)
    of_class = proxies.detach().unflatten(0, (classes, -1))  # (class, proxy of a class, dim)
    if len(labels) < len(of_class) and rank() == 0:
        warnings.warn(
            f"{type(loss).__name__}: {len(of_class) - len(labels)} of {classes} classes have no training image, so "
            "their proxies do not begin at class means; give the loss the number of classes of the training set.",
            stacklevel=2,
        )
    count = of_class.shape[1]
    values = means[:, None].expand(-1, count, -1)
    if count > 1:
        differences = normalize(torch.randn(values.shape), dim=-1).to(means)
        values = normalize(values + SPREAD * differences, dim=-1)
    of_class[labels] = values.to(proxies)


def _proxies(loss: nn.Module) -> Tensor | None:
    """The proxies of a loss of pytorch-metric-learning, as rows in the memory of the parameter; None if it has none."""
    for base in type(loss).__mro__:
        if base.__name__ in PROXIES and _is_of_pytorch_metric_learning(base):
            name, dimension = PROXIES[base.__name__]
            if hasattr(loss, name):
                proxies: Tensor = getattr(loss, name).movedim(dimension, 0)
                return proxies
    return None


def original_loss(loss: nn.Module) -> nn.Module:
    """The loss that `as_batch_loss` was given."""
    if isinstance(loss, ThirdPartyLoss):
        return loss.loss
    return loss


def _accepts_references(loss: nn.Module) -> bool:
    """Whether a third-party loss can rank references without the query's own copy."""
    for base in type(loss).__mro__:
        if base.__name__ in ACCEPT_REFERENCES and _is_of_pytorch_metric_learning(base):
            return True
    return False


def _number_of_classes(loss: nn.Module) -> int | None:
    """The number of classes that a loss of pytorch-metric-learning has weights for; None if it takes any labels."""
    proxies = _proxies(loss)
    if proxies is None and not _is_of_pytorch_metric_learning(type(loss)):
        return None
    number: int = getattr(loss, "num_classes", 0)
    if number:  # 0 if pytorch-metric-learning records it, but the loss has not set it
        return number
    for weights in (proxies, getattr(loss, "beta", None)):
        if isinstance(weights, Tensor) and weights.ndim > 0 and len(weights) > 1:
            return len(weights)
    return None


def _is_of_pytorch_metric_learning(cls: type) -> bool:
    return cls.__module__.startswith("pytorch_metric_learning.")


def _pairs(lists: Lists) -> tuple[Tensor, ...]:
    """Indices of (anchors, positives, anchors, negatives), without the pairs of a query and its own copy."""
    relevant, candidate = lists.masks(torch.arange(len(lists.queries), device=lists.device))
    return *torch.where(relevant), *torch.where(candidate & ~relevant)
