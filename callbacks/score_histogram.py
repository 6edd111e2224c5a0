"""A figure of the similarities of positive and of negative pairs, and how far the two overlap."""

from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.callbacks.figures import Drawing, EvaluationFigure, new_figure
from lightning_retrieval.callbacks.log_values import log_without_sync
from lightning_retrieval.checks import check_integer
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import pair_counts
from lightning_retrieval.ranking.float64 import to_float64

_FINE_BINS = 20_000  # from -1 to 1, in which pairs are counted before the occupied range is known
_COLOURS = {"positive": "tab:green", "negative": "tab:red"}


def occupied_bins(counts: Int[Tensor, "2 fine"], bins: int) -> tuple[Int[Tensor, "2 bins"], Float[Tensor, " edge"]]:
    """Merge fine bins into at most `bins` equal bins that cover the occupied range, and return them with their edges.

    Args:
        counts: positive and negative pairs in equal bins from -1 to 1.
        bins: largest number of merged bins.
    """
    occupied = counts.sum(0).nonzero()[:, 0].tolist()
    if not occupied:
        occupied = [0]
    first = occupied[0]
    length = occupied[-1] + 1 - first
    width = -(-length // bins)  # of a merged bin, in fine bins, rounded up
    number = -(-length // width)
    positions = first + width * torch.arange(number + 1, dtype=torch.float64)
    edges = -1 + positions * (2 / counts.shape[1])
    padded = torch.nn.functional.pad(counts[:, first:], (0, width * number))
    merged = padded[:, : width * number].reshape(2, number, width).sum(2)
    return merged, edges


class ScoreHistogram(EvaluationFigure):
    """Plots the densities of the similarities of positive and of negative pairs, and logs their overlap.

    The pairs are all (query, candidate) of the evaluation set, not a sample of them. A query is not its own candidate.
    `val/score_overlap` is the area under both densities, computed from the bins: 0 if a threshold separates positives
    from negatives, 1 if the densities are equal, and NaN if the set has no positive pair. The PNG files are in
    `retrieval/` of the run's log folder. Every logger that accepts images (TensorBoard, Weights & Biases) gets them
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

    def __init__(self, bins: int = 100, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.bins = check_integer("ScoreHistogram", "bins", bins, least=2)

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: RetrievalMetrics, dataset: Any, prefix: str
    ) -> Drawing:
        counts, edges = occupied_bins(pair_counts(metrics, _FINE_BINS), self.bins)
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
