"""Lightning callbacks for evaluation, monitoring, figures, embeddings and reports, two loggers and a strategy."""

from typing import TYPE_CHECKING

from lightning_retrieval.lazy_names import lazy_names

if TYPE_CHECKING:  # the public names; type checkers export names imported `as` themselves
    from lightning_retrieval.callbacks.ap_monitor import APMonitor as APMonitor
    from lightning_retrieval.callbacks.csv_logger import ResumableCSVLogger as ResumableCSVLogger
    from lightning_retrieval.callbacks.curves import PrecisionRecallCurve as PrecisionRecallCurve
    from lightning_retrieval.callbacks.curves import ScoreHistogram as ScoreHistogram
    from lightning_retrieval.callbacks.curves import TrainingCurve as TrainingCurve
    from lightning_retrieval.callbacks.detections import DetectionPicture as DetectionPicture
    from lightning_retrieval.callbacks.evaluation import RetrievalEvaluation as RetrievalEvaluation
    from lightning_retrieval.callbacks.fsdp2_strategy import FSDP2Strategy as FSDP2Strategy
    from lightning_retrieval.callbacks.gallery import RetrievalGallery as RetrievalGallery
    from lightning_retrieval.callbacks.interrupt import CheckpointOnInterrupt as CheckpointOnInterrupt
    from lightning_retrieval.callbacks.memory_monitor import MemoryMonitor as MemoryMonitor
    from lightning_retrieval.callbacks.proxies import ProxiesAtClassMeans as ProxiesAtClassMeans
    from lightning_retrieval.callbacks.published import PublishedResults as PublishedResults
    from lightning_retrieval.callbacks.wandb_logger import RetrievalWandbLogger as RetrievalWandbLogger
    from lightning_retrieval.callbacks.whitening import LearnWhitening as LearnWhitening
    from lightning_retrieval.search.embedding_writer import EmbeddingWriter as EmbeddingWriter
    from lightning_retrieval.search.report.callback import RetrievalReport as RetrievalReport

__getattr__, __dir__ = lazy_names(__name__)
