"""How far apart the similarities of right and wrong images are."""

from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.callbacks.evaluation import log_alike
from lightning_retrieval.callbacks.pictures import EvaluationPicture, Picture, new_figure
from lightning_retrieval.checks import check_integer
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.metrics.curves import pair_counts

_FINE = 20_000  # bins from -1 to 1 in which pairs are counted, before the range that they take up is known
_COLOURS = {"positive": "tab:green", "negative": "tab:red"}


class ScoreHistogram(EvaluationPicture):
    """Writes a PNG with the densities of the similarities of positive and of negative pairs, and logs their overlap.

    The pairs are all (query, candidate) of the evaluation set, counted, not sampled; the query is not its own
    candidate. `val/score_overlap` is the area under both densities, from 0 (a threshold tells positives from negatives)
    to 1 (alike), as the bins show it; NaN where the
    set has no positive pair. The pictures lie in `retrieval/` of the run's log folder, and go to every logger
    that takes images (TensorBoard, Weights & Biases).

    Args:
        bins: equal intervals between the lowest and the highest similarity, at most so many, >= 2.
        every_n_epochs: validation pictures are written after every so many epochs, >= 1; test pictures always.

    Raises:
        ValueError: if a number is too small, or there is no `RetrievalEvaluation` among the callbacks.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, ScoreHistogram
        >>> callbacks = [RetrievalEvaluation(), ScoreHistogram(bins=50, every_n_epochs=5)]

    Cost:
        All scores are computed once more, block by block, and shared out over the processes.

    Relations:
        `CalibrationLoss` pulls the two apart at fixed places. Sets measured by other metrics than `RetrievalMetrics`
        are left out, with a warning.
    """

    prefix = "scores-"

    def __init__(self, bins: int = 100, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.bins = check_integer("ScoreHistogram", "bins", bins, least=2)

    def draw(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: RetrievalMetrics, dataset: Any, name: str
    ) -> Picture:
        counts, edges = _occupied(pair_counts(metrics, _FINE), self.bins)
        shares = counts / counts.sum(1, keepdim=True, dtype=torch.float64)  # NaN where there are no pairs
        overlap = shares.amin(0).sum()
        log_alike(self, {f"{name}score_overlap": overlap})
        figure = new_figure()
        axes = figure.subplots()
        for kind, count, share in zip(_COLOURS, counts.sum(1).tolist(), shares.nan_to_num().cpu()):
            label = f"{count:,} {kind} pairs"
            axes.stairs(share / edges.diff(), edges, fill=True, alpha=0.4, color=_COLOURS[kind], label=label)
        axes.set_xlim(float(edges[0]), float(edges[-1]))
        axes.set_xlabel("cosine similarity")
        axes.set_ylabel("density")
        axes.set_title(f"{name}score_overlap = {overlap:.3f}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure


def _occupied(fine: Int[Tensor, "2 fine"], bins: int) -> tuple[Int[Tensor, "2 bins"], Float[Tensor, " edge"]]:
    """The counts in at most `bins` equal bins of the range that has any, and the bins' edges."""
    taken = fine.sum(0).nonzero()[:, 0].tolist() or [0]
    width = -(-(taken[-1] + 1 - taken[0]) // bins)  # of a bin, in fine ones
    number = -(-(taken[-1] + 1 - taken[0]) // width)
    edges = -1 + (taken[0] + width * torch.arange(number + 1, dtype=torch.float64)) * (2 / fine.shape[1])
    counts = torch.nn.functional.pad(fine[:, taken[0] :], (0, width * number))[:, : width * number]
    return counts.reshape(2, number, width).sum(2), edges
