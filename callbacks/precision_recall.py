"""What precision the ranked lists have at each recall."""

from typing import Any

import pytorch_lightning as pl
import torch

from lightning_retrieval.callbacks.pictures import EvaluationPicture, Picture, new_figure
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import mean_precision


class PrecisionRecallCurve(EvaluationPicture):
    """Writes a PNG with the mean precision of the queries' lists at 101 levels of recall.

    The precision of a query at a recall r is interpolated as TREC and PASCAL VOC do it: the highest at any recall of at
    least r. The curve is the mean over the queries that have a positive, at r = 0, 0.01, ..., 1; the area under it is
    somewhat above mAP, which interpolates nothing. The pictures lie in `retrieval/` of the run's log folder, and go to
    every logger that takes images (TensorBoard, Weights & Biases).

    Args:
        every_n_epochs: validation pictures are written after every so many epochs, >= 1; test pictures always.

    Raises:
        ValueError: if the number is below 1, or there is no `RetrievalEvaluation` among the callbacks.
        TypeError: if the number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import PrecisionRecallCurve, RetrievalEvaluation
        >>> callbacks = [RetrievalEvaluation(), PrecisionRecallCurve(every_n_epochs=5)]

    Cost:
        The ranks of all positives are counted once more, shared out over the processes.

    Relations:
        Sets measured by other metrics than `RetrievalMetrics` are left out, with a warning.
    """

    prefix = "precision-recall-"

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: RetrievalMetrics, dataset: Any, name: str
    ) -> Picture:
        precision, mean_ap = mean_precision(metrics), float(metrics.compute()["mAP"])
        figure = new_figure(4.8, 4.0)
        axes = figure.subplots()
        axes.plot(torch.linspace(0, 1, len(precision)), precision.cpu(), color="tab:green")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision, interpolated")
        axes.set_title(f"{name}mAP = {mean_ap:.3f}", fontsize="medium")
        axes.grid(alpha=0.3)
        return figure
