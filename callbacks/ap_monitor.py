"""Compares the loss and the batches of a training run with the reported metric, the AP over the full set.

`train/AP_e` is the approximation error of the loss: |AP_pred - AP| of Smooth-AP (Brown et al., ECCV 2020, eq. 8). The
decomposability gap of ROADMAP (Ramzi et al., NeurIPS 2021) is the mean AP within batches of a set, minus the mean AP of
the full set. Training optimises the lists within batches, but the reported AP is that of lists over the full set. AP is
higher within a batch, because fewer candidates could rank above the positives of a query.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_retrieval.backend import pl, rank_zero_warn
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.evaluation import find_evaluation, log_without_sync, sets_ranked_by_label
from lightning_retrieval.distributed import Shard, sum_over_ranks
from lightning_retrieval.invalid import InvalidType, owned
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    RetrievalLoss,
    WeightedSum,
)
from lightning_retrieval.losses.batch_loss import BatchLoss, RankedBatch, ranked_batch
from lightning_retrieval.losses.third_party import ThirdPartyLoss
from lightning_retrieval.metrics.definitions import average_precision
from lightning_retrieval.metrics.gathering import Images, unit_rows
from lightning_retrieval.metrics.retrieval import QueryMetric, RetrievalMetrics, query_values
from lightning_retrieval.ranking.labels import finest
from lightning_retrieval.ranking.lists import Lists
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import float64_device, to_float64

_AP = QueryMetric(average_precision, "AP", "mAP")


def decomposability_gap(metrics: RetrievalMetrics, classes: int, samples: int) -> Float[Tensor, ""]:
    """Return the mean AP of the queries within batches of the set, minus the mAP of the set.

    Like `compute`, this is a collective operation of the metric's processes. The result does not depend on the number
    of processes.

    Args:
        metrics: the metric that holds the embeddings of the set. Its rule of relevance, if there is one, has classes.
        classes: number of classes of a batch.
        samples: number of images of each class in a batch.
    """
    rows = metrics.gather()
    shard = rows.embeddings.shard
    batches = cut_into_batches(rows.labels[:, 0].cpu(), classes, samples)
    sums = torch.zeros(len(batches), 2, dtype=torch.float64, device=float64_device(rows.ids.device))
    for first in range(0, len(batches), shard.count):
        batch = _local_batch(rows, batches[first : first + shard.count], shard)
        if len(batch.ids) == 0:  # the remaining batches belong to other processes
            continue
        index = first + shard.index
        ap = query_values(metrics.ranked_lists(batch), [_AP])["AP"]
        sums[index] = torch.stack([ap.nansum(), (~ap.isnan()).sum()])
    shard.add_up(sums)  # for each batch, all other processes have zeros, so the sum is exact
    total, queries = sums.sum(0)
    gap: Tensor = total / queries - metrics.compute()["mAP"]
    return gap


def _local_batch(images: Images, batches: Sequence[Int[Tensor, " batch"]], shard: Shard) -> Images:
    """Send the rows of each batch to the process of the batch, and return the rows of this process's batch.

    The returned rows have only their finest labels. With several processes, this is a collective operation.

    Args:
        images: all images of the set.
        batches: the row numbers of each process's batch. If there are fewer batches than processes, the last processes
            get no rows.
        shard: the shard of this process.
    """
    nothing = batches[0][:0]
    of_process = [batch.sort().values for batch in batches] + [nothing] * (shard.count - len(batches))
    every = torch.cat(of_process).to(images.ids.device)
    embeddings = images.embeddings.select(every).distribute(list(map(len, of_process)))
    local = images.select(of_process[shard.index].to(images.ids.device))
    return replace(local.at_finest_level(), embeddings=unit_rows([embeddings.to(images.ids.device)]))


def cut_into_batches(labels: Int[Tensor, " row"], classes: int, samples: int) -> list[Int[Tensor, " _"]]:
    """Cut a set into batches like those of a PK sampler.

    The images of each class are cut, in random order, into groups of `samples` images; the last group of a class may be
    smaller. Each batch takes the next `classes` groups: first the first groups of all classes, then all second groups,
    and so on. The groups of a batch are from different classes, except in a batch that holds, for example, both first
    and second groups. If the last batch has fewer than `classes` groups, it is dropped, unless it is the only batch.
    The random order is always the same.

    Args:
        labels: labels of the images of the set.
        classes: number of groups in a batch.
        samples: number of images in a group.

    Returns:
        The row numbers of each batch.
    """
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(labels), generator=generator)
    rows = shuffled[labels[shuffled].argsort(stable=True)]  # the images of each class are adjacent
    _, class_of_row, class_sizes = torch.unique_consecutive(labels[rows], return_inverse=True, return_counts=True)
    class_starts = class_sizes.cumsum(0) - class_sizes
    position_in_class = torch.arange(len(rows)) - class_starts[class_of_row]
    random_class_order = torch.randperm(len(class_sizes), generator=generator)
    # Order: all first groups of the classes, then all second groups, and so on.
    group_round = position_in_class // samples
    group_key = (group_round * len(class_sizes) + random_class_order[class_of_row]).sort(stable=True)
    group = torch.unique_consecutive(group_key.values, return_inverse=True)[1]
    batch_sizes = torch.bincount(group // classes)
    batches = list(rows[group_key.indices].split(batch_sizes.tolist()))
    groups = int(group[-1]) + 1
    last_is_smaller = groups % classes != 0
    if last_is_smaller and len(batches) > 1:
        return batches[:-1]
    return batches


def find_surrogate(loss: nn.Module) -> RetrievalLoss | None:
    """Return the loss if it approximates AP, else its first term that approximates AP; None if there is none."""
    if isinstance(loss, WeightedSum):
        for part in loss.parts.values():
            surrogate = find_surrogate(part)
            if surrogate is not None:
                return surrogate
        return None
    if isinstance(loss, RetrievalLoss) and loss.approximates_ap:
        return loss
    return None


@torch.no_grad()
def sums_of_ap(surrogate: RetrievalLoss | None, batch: RankedBatch) -> Float[Tensor, "3"]:
    """Return the sum of AP, the sum of the AP predicted by the surrogate, and the number of queries.

    Only queries of this process that have a positive are included. Without a surrogate, the second sum is 0.

    Args:
        surrogate: a loss that approximates AP, or None.
        batch: the batch that the loss ranks, with the range of queries of this process.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=float64_device(batch.embeddings.device))
    if batch.queries is not None and batch.queries.begin == batch.queries.end:
        return sums
    local = _local_queries(batch)
    exact = BlackboxAPLoss(margin=0.0)  # without a margin, the value of this loss is exactly 1 - AP
    ap = _ap_per_query(exact, local)
    has_positive = ~ap.isnan()
    sums[0] = ap[has_positive].sum()
    if surrogate is not None:
        sums[1] = _ap_per_query(surrogate, local)[has_positive].sum()
    sums[2] = has_positive.sum()
    return sums


def _local_queries(batch: RankedBatch) -> RankedBatch:
    """Return a batch of the queries of this process and of all references."""
    rows, references, ref_emb = batch.lists.queries, batch.lists.references, batch.ref_emb
    if ref_emb is None:
        ids = rows.ids
        if ids is None:
            ids = torch.arange(len(rows), device=rows.labels.device)
        rows = references = replace(rows, ids=ids)
        ref_emb = batch.embeddings
    begin, end = 0, len(rows)
    if batch.queries is not None:
        begin, end = batch.queries.begin, batch.queries.end
    local = torch.arange(begin, end, device=rows.labels.device)
    lists = Lists(rows.select(local), references, batch.lists.rule)
    return replace(batch, embeddings=batch.embeddings[local], ref_emb=ref_emb, lists=lists, queries=None)


def _ap_per_query(loss: RetrievalLoss, batch: RankedBatch) -> Float[Tensor, " query"]:
    """Return 1 minus the loss of each query. A query is not in its own list; without a positive, the result is NaN."""
    loss = copy.copy(loss)
    loss.reduction, loss.class_balanced, loss.include_self = "none", False, False
    loss._warned_of_no_positive = True  # only the original loss issues this warning
    return 1 - to_float64(loss.compute(batch))  # unlike `of_batch`, without the observers of the loss


class APMonitor(Callback):
    """Logs the AP of the training batches, the loss's approximation error, and the gap to the AP of the full set.

    `train/AP` is the exact AP of the lists that the loss ranks. `train/AP_e` is the approximation error |AP_pred - AP|
    of Smooth-AP (Brown et al., ECCV 2020, eq. 8 and Fig. 4), where AP_pred is 1 - the value of the loss on the same
    lists. AP and AP_pred are means over the queries. Both are logged whenever the Trainer logs a training step
    (`log_every_n_steps`). For a `WeightedSum` or ROADMAP, AP_pred is 1 - the value of the first term that approximates
    AP.

    `val/decomposability_gap` and `test/decomposability_gap` are the gap of ROADMAP (Ramzi et al., NeurIPS 2021) on the
    evaluation set. The images of the set are split at random, the same way each time, into batches with as many classes
    and images per class as the first training batch. The gap is the mean AP within these batches minus the AP of the
    full set. The gap is rarely below 0, because the lists within batches are shorter than the lists over the full set.
    Under a rule of relevance without classes, such as `SharedTags`, sets cannot be split so, and no gap is logged, nor
    for data with two sides, where `train/AP` is that of the candidates ranked for each query.

    Raises:
        ValueError: if the Trainer has no `RetrievalEvaluation`.
        TypeError: if the module has no `loss` with the interface of this library. `RetrievalModule` has one.

    Example:
        >>> from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation
        >>> callbacks = [RetrievalEvaluation(), APMonitor()]

    Cost:
        In each logged training step, the loss is computed once more and its lists are sorted once, without gradient. In
        each evaluation, the ranks within the batches are computed.

    Relations:
        If a memory extends the lists of the loss, it also extends the lists of `train/AP`. AP and AP_e are computed as
        if `class_balanced` and `include_self` of the loss were False. For losses that do not approximate AP in [0, 1],
        such as `LogRankLoss` and losses of pairs, AP_e is not logged. Before the first training batch, no gap is
        logged.
    """

    def __init__(self) -> None:
        self._classes, self._samples = 0, 0  # classes and images per class of the first training batch
        self._warned: set[str] = set()
        self._observed: BatchLoss | None = None  # the loss of the current step if AP is computed in this step
        self._sums: Tensor | None = None  # the result of `sums_of_ap` for the current step

    @owned
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        find_evaluation(trainer)
        loss = getattr(pl_module, "loss", None)
        if not isinstance(loss, BatchLoss):
            rule = "the module must have a `loss` of this library, as RetrievalModule has"
            raise InvalidType(rule, got=f"{type(loss).__name__} in {type(pl_module).__name__}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._classes, self._samples = 0, 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_observing()  # of a batch that a hook of the module skipped
        self._sums = None  # of a step that raised
        # Lightning has no public way to ask whether it logs this step.
        if self._classes == 0 or trainer._logger_connector.should_update_logs:
            loss: Any = pl_module.loss
            loss.observers.append(self._compute_ap)
            self._observed = loss

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_observing()
        if self._sums is None:
            return
        ap, predicted, queries = sum_over_ranks(self._sums).unbind()
        self._sums = None
        if queries > 0:
            pl_module.log("train/AP", ap / queries, prog_bar=True)
            if find_surrogate(pl_module.loss) is not None:  # type: ignore[arg-type]
                pl_module.log("train/AP_e", (predicted - ap).abs() / queries)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_observing()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_observing()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log_gaps(trainer, pl_module)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_gaps(trainer, pl_module)

    def _stop_observing(self) -> None:
        if self._observed is not None:
            self._observed.observers.remove(self._compute_ap)
            self._observed = None

    def _compute_ap(self, loss: BatchLoss, batch: RankedBatch) -> None:
        """Compute the AP of the lists that the loss has just ranked, only in the first call of a step.

        In the first call, the loss ranks the lists of the batch.
        """
        if self._sums is not None:
            return
        is_two_sided = batch.ref_emb is not None and batch.ids is None
        if isinstance(loss, ThirdPartyLoss) and not is_two_sided:  # a third-party loss may not rank the references
            batch = ranked_batch(batch.embeddings, batch.labels)
        if self._classes == 0:
            counts = torch.unique(finest(batch.labels), return_counts=True)[1]
            self._classes = len(counts)
            self._samples = max(2, round(float(to_float64(counts).mean())))
        self._sums = sums_of_ap(find_surrogate(loss), batch)

    @owned
    def _log_gaps(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._classes == 0:
            return
        for evaluation_set in sets_ranked_by_label(self, trainer, self._warned):
            metrics: Any = evaluation_set.metrics
            if metrics.reverse:  # a batch of a set with two sides is not a part of the set
                continue
            if metrics.relevance is not None and not metrics.relevance.has_classes:
                self._warn_of_no_classes(f"{evaluation_set.prefix}decomposability_gap", metrics.relevance)
                continue
            gap = decomposability_gap(metrics, self._classes, self._samples)
            log_without_sync(pl_module, {f"{evaluation_set.prefix}decomposability_gap": gap})

    def _warn_of_no_classes(self, name: str, relevance: Relevance) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        rank_zero_warn(
            f"APMonitor: {name} is not logged, because a set can be split into batches of classes only if the rule of "
            f"relevance has classes, and {relevance} has none."
        )
