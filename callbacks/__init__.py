"""Lightning callbacks: evaluation, galleries, curves."""

from lightning_retrieval.callbacks.curve import TrainingCurve
from lightning_retrieval.callbacks.evaluation import RetrievalEvaluation
from lightning_retrieval.callbacks.gallery import RetrievalGallery

__all__ = ["RetrievalEvaluation", "RetrievalGallery", "TrainingCurve"]
