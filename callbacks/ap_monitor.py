"""How far the loss and the batches of a training run are from what is reported in the end: AP over the whole set."""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_retrieval.callbacks.evaluation import log_alike
from lightning_retrieval.callbacks.pictures import evaluated_sets, evaluation_of
from lightning_retrieval.distributed import sum_over_ranks
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    FastAPLoss,
    QuantizedAPLoss,
    RetrievalLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)
from lightning_retrieval.losses.ranked_batch import QueryRange
from lightning_retrieval.losses.third_party import ThirdPartyLoss, original_loss
from lightning_retrieval.metrics.decomposability import decomposability_gap
from lightning_retrieval.ranking.labels import finest

# Losses that are 1 - AP with ranks or histograms made smooth.
_SURROGATES = (SmoothAPLoss, FastAPLoss, QuantizedAPLoss, SupAPLoss, BlackboxAPLoss)


class APMonitor(pl.Callback):
    """Logs AP of the training batches, the loss's error on it, and what AP of batches is above AP of the whole set.

    `train/AP` is the exact AP of the lists that the loss has ranked, and `train/AP_e` the approximation error
    |AP_pred - AP| of Smooth-AP (Brown et al., ECCV 2020, eq. 8 and Fig. 4), where AP_pred is what the loss makes of the
    same lists, 1 - its value; AP and AP_pred are means over the queries. Both are logged whenever the Trainer logs a
    training step (`log_every_n_steps`). Of a `WeightedSum` or ROADMAP, the first term that is such a surrogate of AP
    counts.

    `val/decomposability_gap` and `test/decomposability_gap` are ROADMAP's (Ramzi et al., NeurIPS 2021) on the
    evaluation set. Its images are cut at random, the same way every time, into batches of as many classes, and images
    of each, as the first training batch has; the gap is the mean AP within these batches minus the AP of the whole set.
    It is seldom below 0, since batches are shorter lists than the set.

    Raises:
        ValueError: if there is no `RetrievalEvaluation` among the callbacks.
        TypeError: if the module has no `loss` that is a module, as `RetrievalModule` has.

    Example:
        >>> from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation
        >>> callbacks = [RetrievalEvaluation(), APMonitor()]

    Cost:
        In each training step that is logged, the loss's value once more and one sort of its lists, without gradient. At
        each evaluation, the ranks within the batches.

    Relations:
        A memory that makes the loss's lists longer makes those of `train/AP` longer too. Neither weights of classes nor
        the query in its own list (`class_balanced`, `include_self`) enter AP or AP_e. Of losses that are no surrogate
        of AP in [0, 1] there is no AP_e, with a warning. The gap needs to have seen a training batch.
    """

    def __init__(self) -> None:
        self._classes, self._samples = 0, 0  # of the first training batch, images of each class
        self._left_out: set[str] = set()
        self._hook: RemovableHandle | None = None
        self._sums: Tensor | None = None  # over this process' queries: AP, AP_pred, 1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        evaluation_of(self, trainer)
        loss = getattr(pl_module, "loss", None)
        if not isinstance(loss, nn.Module):
            raise TypeError(
                f"APMonitor: the module must have a `loss` that is a module, as RetrievalModule has, got "
                f"{type(loss).__name__} in {type(pl_module).__name__}."
            )
        if stage == "fit" and _surrogate(loss) is None:
            rank_zero_warn(
                f"APMonitor: train/AP_e is not logged, since {type(original_loss(loss)).__name__} is no surrogate of AP in [0, 1]."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._classes, self._samples = 0, 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._classes == 0 or trainer._logger_connector.should_update_logs:
            loss: Any = pl_module.loss
            self._hook = loss.register_forward_hook(self._see, with_kwargs=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._remove_hook()
        if self._sums is None:
            return
        ap, predicted, queries = sum_over_ranks(self._sums).unbind()
        self._sums = None
        if queries > 0:
            self.log("train/AP", ap / queries, prog_bar=True)  # type: ignore[attr-defined]
            if _surrogate(pl_module.loss) is not None:  # type: ignore[arg-type]
                self.log("train/AP_e", (predicted - ap).abs() / queries)  # type: ignore[attr-defined]

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._remove_hook()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log_gaps(trainer, "val", trainer.val_dataloaders)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_gaps(trainer, "test", trainer.test_dataloaders)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _see(self, loss: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any) -> None:
        """AP of the lists that the loss has just ranked: the first time in a step, those of the batch."""
        if self._sums is not None:
            return
        lists = dict(zip(("embeddings", "labels", "ref_emb", "ref_labels"), arguments)) | keywords
        if isinstance(loss, ThirdPartyLoss):
            lists = {"embeddings": lists["embeddings"], "labels": lists["labels"]}
        if self._classes == 0:
            counts = torch.unique(finest(lists["labels"]), return_counts=True)[1]
            self._classes, self._samples = len(counts), max(2, round(float(counts.double().mean())))
        self._sums = _sums_of_ap(_surrogate(loss), **lists)

    def _log_gaps(self, trainer: pl.Trainer, stage: str, loaders: Any) -> None:
        if self._classes == 0:
            return
        for name, metrics, _ in evaluated_sets(self, trainer, stage, loaders, self._left_out):
            log_alike(self, {f"{name}decomposability_gap": decomposability_gap(metrics, self._classes, self._samples)})


def _surrogate(loss: nn.Module) -> RetrievalLoss | None:
    """The first surrogate of AP among a loss and its terms."""
    if isinstance(loss, WeightedSum):
        return next((found for part in loss.parts.values() if (found := _surrogate(part)) is not None), None)
    return loss if isinstance(loss, _SURROGATES) else None


@torch.no_grad()
def _sums_of_ap(
    surrogate: RetrievalLoss | None,
    embeddings: Tensor,
    labels: Tensor,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    ids: Tensor | None = None,
    ref_ids: Tensor | None = None,
    queries: QueryRange | None = None,
) -> Float[Tensor, "3"]:
    """Over this process' queries that have a positive: the sum of AP, of the surrogate's AP, and their number."""
    if ref_emb is None:
        ids = torch.arange(len(labels), device=labels.device) if ids is None else ids
        ref_emb, ref_labels, ref_ids = embeddings, labels, ids
    own = slice(None) if queries is None else slice(queries.begin, queries.end)
    lists = (embeddings[own], labels[own], ref_emb, ref_labels)
    sums = embeddings.new_zeros(3, dtype=torch.float64)
    if len(lists[0]) == 0:
        return sums
    ids = None if ids is None else ids[own]
    # Its ranks are exact, and without a margin its value is 1 - AP.
    losses = [_for_each_query(BlackboxAPLoss(margin=0.0)), *([] if surrogate is None else [_for_each_query(surrogate)])]
    # `forward`, for a copy has its original's hooks, this monitor's own among them.
    values = [1 - loss.forward(*lists, ids=ids, ref_ids=ref_ids).double() for loss in losses]
    counted = ~values[0].isnan()
    for place, value in enumerate(values):
        sums[place] = value[counted].sum()
    sums[2] = counted.sum()
    return sums


def _for_each_query(loss: RetrievalLoss) -> RetrievalLoss:
    """The same loss with a value for each query, which is not in its own list; NaN where it has no positive."""
    loss = copy.copy(loss)
    loss.reduction, loss.class_balanced, loss.include_self = "none", False, False
    loss._warned_of_no_positive = True  # the loss itself says so
    return loss
