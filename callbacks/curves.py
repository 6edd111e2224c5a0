"""Callbacks that draw figures of training and of evaluation sets.

Figures are PNG files in the run's log folder, and are also sent to loggers that accept images. This file has the base
class of the callbacks that draw each evaluation set, and the callbacks for three figures: the mean precision at each
level of recall; the densities of the similarities of positive and of negative pairs; and a metric and the training loss
against the optimizer steps.
"""

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from PIL import Image

from lightning_retrieval.arguments import PositiveInt, Several, checked
from lightning_retrieval.backend import TensorBoardLogger, pl
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.csv_logger import run_folder
from lightning_retrieval.callbacks.evaluation import find_evaluation, log_without_sync, sets_ranked_by_label
from lightning_retrieval.callbacks.evaluation_sets import EvaluationSet
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.invalid import InvalidValue, owned, owned_by
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import FINE_BINS, mean_precision, occupied_bins, pair_counts
from lightning_retrieval.preparation.prepare import open_image
from lightning_retrieval.ranking.rows import to_float64

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = Union[Image.Image, "Figure"]


def new_figure(width: float = 6.4, height: float = 3.6) -> "Figure":
    """Create an empty figure, with sizes in inches, without pyplot, which has global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def save_and_log(trainer: pl.Trainer, path: Path, key: str, drawing: Drawing) -> None:
    """Write a drawing as a PNG file, and send it to every logger that accepts images.

    Args:
        trainer: the trainer with the loggers.
        path: path of the file. An existing file is replaced atomically.
        key: name of the image in the loggers, the same for all steps.
        drawing: an image, or a figure of matplotlib.
    """
    image = _as_image(drawing)
    with owned_by("save_and_log"), writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            image.save(file, format="PNG")
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            array = pixels.view(image.height, image.width, 3)
            logger.experiment.add_image(key, array, trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(key=key, images=[str(path)])


def _as_image(drawing: Drawing) -> Image.Image:
    if isinstance(drawing, Image.Image):
        return drawing
    file = io.BytesIO()
    drawing.savefig(file, format="png", dpi=drawing.dpi)
    return open_image(file).convert("RGB")


class EvaluationFigure(Callback, ABC):
    """Base class of the callbacks that draw each evaluation set collected by `RetrievalEvaluation`.

    The PNG files are in `retrieval/` of the run's log folder. Every logger that accepts images (TensorBoard, Weights &
    Biases) gets them too. A subclass defines `draw`, and may set `file_prefix`, the prefix of its file names. If a
    subclass can draw evaluation sets of any metric, not only of `RetrievalMetrics`, it sets
    `ranked_by_label_only = False`.

    Args:
        every_n_epochs: number of epochs between two figures of the validation sets, >= 1. Test sets are always drawn.
    """

    file_prefix = ""
    ranked_by_label_only = True

    def __init__(self, every_n_epochs: PositiveInt = 1) -> None:
        self.every_n_epochs = checked(self, every_n_epochs=every_n_epochs)
        self._warned: set[str] = set()

    @abstractmethod
    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: Any, dataset: Any, prefix: str
    ) -> Drawing | None:
        """Draw one evaluation set. All processes call this; the drawing of rank 0 is written, unless it is None.

        Args:
            trainer: the Trainer that evaluates.
            pl_module: the module that is evaluated.
            metrics: the metric with the set's embeddings.
            dataset: the data set, or None if the set's data loader has none.
            prefix: prefix of the names of the set's metrics, such as `val/` or `test/small/`.
        """

    @owned
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        find_evaluation(trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        is_due = (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if is_due or trainer.state.fn == "validate":
            self._draw_all(trainer, pl_module, "val", f"-epoch={trainer.current_epoch:03d}")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw_all(trainer, pl_module, "test", "")

    @owned
    def _draw_all(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str, epoch: str) -> None:
        folder = run_folder(trainer) / "retrieval"
        for evaluation_set in self._sets(trainer):
            prefix = evaluation_set.prefix
            drawing = self.draw(trainer, pl_module, evaluation_set.metrics, evaluation_set.dataset, prefix)
            if not trainer.is_global_zero or drawing is None:
                continue
            set_name = prefix.removeprefix(f"{stage}/").rstrip("/").replace("/", "-")
            suffix = ""
            if set_name:
                suffix = f"-set={set_name}"
            path = folder / f"{self.file_prefix}{stage}{epoch}{suffix}.png"
            save_and_log(trainer, path, f"retrieval/{self.file_prefix}{stage}{suffix}", drawing)

    def _sets(self, trainer: pl.Trainer) -> Iterable[EvaluationSet]:
        if self.ranked_by_label_only:
            return sets_ranked_by_label(self, trainer, self._warned)
        return find_evaluation(trainer).sets


class PrecisionRecallCurve(EvaluationFigure):
    """Plots the precision at 101 levels of recall, averaged over the queries.

    The precision of a query at recall r is interpolated as in TREC and PASCAL VOC: it is the highest precision at any
    recall of at least r. The curve is the mean over the queries that have a positive, at r = 0, 0.01, ..., 1. The area
    under the curve is slightly larger than mAP, because mAP uses precision without interpolation. The PNG files are in
    `retrieval/` of the run's log folder. Every logger that accepts images (TensorBoard, Weights & Biases) gets them
    too.

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


_COLOURS = {"positive": "tab:green", "negative": "tab:red"}


class ScoreHistogram(EvaluationFigure):
    """Plots the densities of the similarities of positive and of negative pairs, and logs their overlap.

    The pairs are all pairs (query, candidate) of the evaluation set, not a sample. A query is not its own candidate.
    `val/score_overlap` is the area that lies under both densities, computed from the bins: 0 if a threshold separates
    positives from negatives, 1 if the densities are equal, and NaN if the set has no positive pair. The PNG files are
    in `retrieval/` of the run's log folder. Every logger that accepts images (TensorBoard, Weights & Biases) gets them
    too.

    Args:
        bins: largest number of equal intervals between the lowest and the highest similarity, >= 2.
        every_n_epochs: number of epochs between two figures of the validation sets, >= 1. Test sets are always drawn.

    Raises:
        ValueError: if a number is too small, or if the Trainer has no `RetrievalEvaluation`.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, ScoreHistogram
        >>> callbacks = [RetrievalEvaluation(), ScoreHistogram(bins=50, every_n_epochs=5)]

    Cost:
        All scores are computed once more, block by block, distributed over the processes.

    Relations:
        `CalibrationLoss` separates the two densities at fixed similarities. Evaluation sets with another metric than
        `RetrievalMetrics` are skipped, with a warning.
    """

    file_prefix = "scores-"

    def __init__(self, bins: Several = 100, every_n_epochs: PositiveInt = 1) -> None:
        super().__init__(every_n_epochs)
        self.bins = checked(self, bins=bins)

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: RetrievalMetrics, dataset: Any, prefix: str
    ) -> Drawing:
        counts, edges = occupied_bins(pair_counts(metrics, FINE_BINS), self.bins)
        pairs_of_bin = to_float64(counts)
        fractions = pairs_of_bin / pairs_of_bin.sum(1, keepdim=True)  # NaN if there are no pairs
        overlap = fractions.amin(0).sum()
        log_without_sync(pl_module, {f"{prefix}score_overlap": overlap})
        densities = fractions.nan_to_num().cpu() / edges.diff()
        figure = new_figure()
        axes = figure.subplots()
        for kind, pairs, density in zip(_COLOURS, counts.sum(1).tolist(), densities):
            label = f"{pairs:,} {kind} pairs"
            axes.stairs(density, edges, fill=True, alpha=0.4, color=_COLOURS[kind], label=label)
        axes.set_xlim(float(edges[0]), float(edges[-1]))
        axes.set_xlabel("cosine similarity")
        axes.set_ylabel("density")
        axes.set_title(f"{prefix}score_overlap = {overlap:.3f}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure


LEAST_RANGE = 0.1  # of an axis: for values from 0 to 1 this difference, for others this fraction of the largest one
MARGIN = 0.05  # fraction of the range that an axis shows beyond the values


def range_of_axis(values: Iterable[float]) -> tuple[float, float] | None:
    """The ends of an axis on which a difference that does not matter looks small; None if no value is finite.

    Args:
        values: the values that are drawn.
    """
    finite = list(filter(math.isfinite, values))
    if not finite:
        return None
    low, high = min(finite), max(finite)
    is_fraction = low >= 0 and high <= 1
    least = LEAST_RANGE
    if not is_fraction:
        least *= max(abs(low), abs(high))
    centre, half = (low + high) / 2, max(high - low, least) / 2
    if is_fraction:
        centre = min(max(centre, half), 1 - half)  # no range that no value can have
    half *= 1 + 2 * MARGIN
    return centre - half, centre + half


class TrainingCurve(Callback):
    """Plots a logged metric and the training loss against the optimizer steps: `curve.png` in the run's log folder.

    The figure is redrawn after each validation, and sent to every logger that accepts images (TensorBoard, Weights &
    Biases). Its axes show a range of at least 0.1 for values from 0 to 1, and of a tenth of the largest value for
    others, so that small differences look small. The checkpoint contains the points of the curve, so a resumed run
    continues it.

    Args:
        metric: name of the logged metric.

    Raises:
        ValueError: if the metric has not been logged by the end of a validation.

    Example:
        >>> from lightning_retrieval.callbacks import TrainingCurve
        >>> TrainingCurve("val/R@1").metric
        'val/R@1'
    """

    def __init__(self, metric: str = "val/mAP") -> None:
        self.metric = metric
        self.points: list[list[float]] = []  # (step, metric)
        self.losses: list[list[float]] = []  # (step, loss)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None:
            self.losses.append([trainer.global_step, float(loss)])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.metric not in trainer.callback_metrics:
            rule = "must be logged in validation"
            cure = f"logged metrics are {sorted(trainer.callback_metrics)}"
            raise InvalidValue(rule, "TrainingCurve", "metric", got=repr(self.metric), cure=cure)
        self.points.append([trainer.global_step, float(trainer.callback_metrics[self.metric])])
        folder = run_folder(trainer)  # a collective call, so it comes before the check of the rank
        if trainer.is_global_zero:
            save_and_log(trainer, folder / "curve.png", "retrieval/curve", self._draw())

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]
        self.losses = state_dict["losses"]

    def _draw(self) -> Drawing:
        figure = new_figure()
        axes = figure.subplots()
        steps, values = zip(*self.points)
        axes.plot(steps, values, color="tab:green", marker="o", markersize=4, label=self.metric)
        axes.set_ylim(range_of_axis(values))
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(self.metric, color="tab:green")
        axes.grid(alpha=0.3)
        if self.losses:
            loss_axes = axes.twinx()
            loss_steps, losses = zip(*self.losses)
            loss_axes.plot(loss_steps, losses, color="tab:gray", linewidth=0.8, alpha=0.7)
            loss_axes.set_ylim(range_of_axis(losses))
            loss_axes.set_ylabel("train/loss", color="tab:gray")
            # The metric is drawn above the loss.
            axes.set_zorder(loss_axes.get_zorder() + 1)
            axes.patch.set_visible(False)
        return figure
