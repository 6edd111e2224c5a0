"""Metrics of embeddings, for any number of processes."""

from lightning_retrieval.metrics.base import EmbeddingMetric
from lightning_retrieval.metrics.retrieval import RandomGalleryMetrics, RetrievalMetrics
from lightning_retrieval.metrics.revisited import RevisitedMetrics
from lightning_retrieval.metrics.thresholds import nearest_scores

__all__ = ["EmbeddingMetric", "RandomGalleryMetrics", "RetrievalMetrics", "RevisitedMetrics", "nearest_scores"]
