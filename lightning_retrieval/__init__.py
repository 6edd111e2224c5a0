"""Train image retrieval directly for Average Precision, with PyTorch Lightning.

What needs Lightning is imported when it is first used: losses, metrics, models and chunked backward work without it.
"""

from typing import TYPE_CHECKING, Any

from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
    blackbox_rank,
)
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models import Embedder, PCAWhitening
from lightning_retrieval.models.multi_scale import multi_scale
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.search.index import RetrievalIndex
from lightning_retrieval.training.chunk_size import largest_chunk_size
from lightning_retrieval.training.chunked import chunked_backward
from lightning_retrieval.training.memory import CrossBatchMemory

if TYPE_CHECKING:
    from lightning_retrieval.callbacks import RetrievalEvaluation
    from lightning_retrieval.datamodules import PKSampler, RetrievalDataLoader
    from lightning_retrieval.training.module import RetrievalModule

__all__ = [
    "BlackboxAPLoss",
    "BlackboxRecallLoss",
    "CalibrationLoss",
    "CrossBatchMemory",
    "DatabaseAugmentation",
    "Embedder",
    "FastAPLoss",
    "HAPLoss",
    "PCAWhitening",
    "PKSampler",
    "QuantizedAPLoss",
    "QueryExpansion",
    "ROADMAPLoss",
    "RecallAtKLoss",
    "RetrievalDataLoader",
    "RetrievalEvaluation",
    "RetrievalIndex",
    "RetrievalMetrics",
    "RetrievalModule",
    "SmoothAPLoss",
    "SupAPLoss",
    "WeightedSum",
    "blackbox_rank",
    "chunked_backward",
    "largest_chunk_size",
    "multi_scale",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "RetrievalModule":
        from lightning_retrieval.training.module import RetrievalModule

        return RetrievalModule
    if name == "RetrievalEvaluation":
        from lightning_retrieval.callbacks import RetrievalEvaluation

        return RetrievalEvaluation
    if name == "PKSampler":
        from lightning_retrieval.datamodules import PKSampler

        return PKSampler
    if name == "RetrievalDataLoader":
        from lightning_retrieval.datamodules import RetrievalDataLoader

        return RetrievalDataLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
