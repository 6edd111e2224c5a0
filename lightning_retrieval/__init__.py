"""Train image retrieval directly for Average Precision, with PyTorch Lightning.

`RetrievalModule` is imported when it is first asked for: losses, metrics, models and chunked backprop need no
Lightning.
"""

from typing import TYPE_CHECKING, Any

from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxMAPLoss,
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
from lightning_retrieval.training.chunked import chunked_backward, largest_chunk_size
from lightning_retrieval.training.memory import CrossBatchMemory

if TYPE_CHECKING:
    from lightning_retrieval.training.module import RetrievalModule

__all__ = [
    "BlackboxAPLoss",
    "BlackboxMAPLoss",
    "BlackboxRecallLoss",
    "CalibrationLoss",
    "CrossBatchMemory",
    "DatabaseAugmentation",
    "Embedder",
    "FastAPLoss",
    "HAPLoss",
    "PCAWhitening",
    "QuantizedAPLoss",
    "QueryExpansion",
    "ROADMAPLoss",
    "RecallAtKLoss",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
