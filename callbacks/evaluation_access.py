"""Access of other callbacks to the evaluation sets that `RetrievalEvaluation` collects."""

from collections.abc import Iterator

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_warn

from lightning_retrieval.callbacks.evaluation import RetrievalEvaluation
from lightning_retrieval.callbacks.evaluation_set import EvaluationSet
from lightning_retrieval.metrics import EmbeddingMetric, RandomGalleryMetrics, RetrievalMetrics


def find_evaluation(owner: str, trainer: pl.Trainer) -> RetrievalEvaluation:
    """Return the Trainer's `RetrievalEvaluation`, or raise a `ValueError` if there is none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RetrievalEvaluation):
            return callback
    raise ValueError(
        f"{owner}: the Trainer must have the callback RetrievalEvaluation, which collects what {owner} shows, and it "
        "has none; pass both."
    )


def is_ranked_by_label(metrics: EmbeddingMetric) -> bool:
    """Return whether each query has one list, the whole gallery, in which images of the same label are relevant."""
    return isinstance(metrics, RetrievalMetrics) and not isinstance(metrics, RandomGalleryMetrics)


def sets_ranked_by_label(owner: str, trainer: pl.Trainer, warned: set[str]) -> Iterator[EvaluationSet]:
    """Yield the evaluation sets that are ranked by label, and warn of each other set once.

    Args:
        owner: name of the callback, for the messages.
        trainer: with a `RetrievalEvaluation`.
        warned: prefixes of the sets that a warning was given of; updated.
    """
    for evaluation_set in find_evaluation(owner, trainer).sets:
        prefix, metrics = evaluation_set.prefix, evaluation_set.metrics
        if is_ranked_by_label(metrics):
            yield evaluation_set
        elif prefix not in warned:
            warned.add(prefix)
            rank_zero_warn(
                f"{owner}: only evaluation sets that are evaluated by RetrievalMetrics are supported; {prefix}, "
                f"evaluated by {type(metrics).__name__}, is skipped."
            )
