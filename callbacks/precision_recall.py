"""A figure of the mean precision at each recall."""

from typing import Any

import pytorch_lightning as pl
import torch

from lightning_retrieval.callbacks.figures import Drawing, EvaluationFigure, new_figure
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import mean_precision


class PrecisionRecallCurve(EvaluationFigure):
    """Plots the mean precision of the queries' ranked lists at 101 levels of recall.

    The precision of a query at recall r is interpolated as in TREC and PASCAL VOC: it is the highest precision at any
    recall of at least r. The curve is the mean over the queries that have a positive, at r = 0, 0.01, ..., 1. The area
    under it is slightly larger than mAP, which does not interpolate. The PNG files are in `retrieval/` of the run's log
    folder. Every logger that accepts images (TensorBoard, Weights & Biases) gets them too.

    Args:
        every_n_epochs: number of epochs between two figures of the validation sets, >= 1. Test sets are always drawn.

    Raises:
        ValueError: if the number is below 1, or if the Trainer has no `RetrievalEvaluation`.
        TypeError: if the number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import PrecisionRecallCurve, RetrievalEvaluation
        >>> callbacks = [RetrievalEvaluation(), PrecisionRecallCurve(every_n_epochs=5)]

    Cost:
        The ranks of all positives are computed once more, distributed over the processes.

    Relations:
        Evaluation sets with another metric than `RetrievalMetrics` are skipped, with a warning.
    """

    file_prefix = "precision-recall-"

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: RetrievalMetrics, dataset: Any, prefix: str
    ) -> Drawing:
        precision = mean_precision(metrics)
        mean_ap = float(metrics.compute()["mAP"])
        figure = new_figure(4.8, 4.0)
        axes = figure.subplots()
        axes.plot(torch.linspace(0, 1, len(precision)), precision.cpu(), color="tab:green")
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision, interpolated")
        axes.set_title(f"{prefix}mAP = {mean_ap:.3f}", fontsize="medium")
        axes.grid(alpha=0.3)
        return figure
