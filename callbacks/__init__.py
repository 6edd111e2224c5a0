"""Lightning callbacks for evaluation, monitoring, figures and embeddings, two loggers and a strategy."""

from lightning_retrieval.callbacks.ap_monitor import APMonitor
from lightning_retrieval.callbacks.csv_logger import ResumableCSVLogger
from lightning_retrieval.callbacks.curves import PrecisionRecallCurve, ScoreHistogram, TrainingCurve
from lightning_retrieval.callbacks.detections import DetectionPicture
from lightning_retrieval.callbacks.embedding_writer import EmbeddingWriter
from lightning_retrieval.callbacks.evaluation import RetrievalEvaluation
from lightning_retrieval.callbacks.fsdp2_strategy import FSDP2Strategy
from lightning_retrieval.callbacks.gallery import RetrievalGallery
from lightning_retrieval.callbacks.interrupt import CheckpointOnInterrupt
from lightning_retrieval.callbacks.memory_monitor import MemoryMonitor
from lightning_retrieval.callbacks.wandb_logger import RetrievalWandbLogger
from lightning_retrieval.callbacks.whitening import LearnWhitening

__all__ = [
    "APMonitor",
    "CheckpointOnInterrupt",
    "DetectionPicture",
    "EmbeddingWriter",
    "FSDP2Strategy",
    "LearnWhitening",
    "MemoryMonitor",
    "PrecisionRecallCurve",
    "ResumableCSVLogger",
    "RetrievalEvaluation",
    "RetrievalGallery",
    "RetrievalWandbLogger",
    "ScoreHistogram",
    "TrainingCurve",
]
