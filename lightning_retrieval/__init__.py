"""Train image retrieval directly for Average Precision, with PyTorch Lightning.

`RetrievalModule` is imported when it is first asked for: losses, metrics, models and chunked backprop need no
Lightning.
"""

from typing import TYPE_CHECKING, Any

from lightning_retrieval.backprop import chunked_backward, largest_chunk_size
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
from lightning_retrieval.memory import CrossBatchMemory
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.models import Embedder
from lightning_retrieval.postprocessing import (
    DatabaseAugmentation,
    PCAWhitening,
    QueryExpansion,
    database_augmentation,
    multi_scale,
    query_expansion,
)
from lightning_retrieval.search.index import RetrievalIndex

if TYPE_CHECKING:
    from lightning_retrieval.module import RetrievalModule

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
    "database_augmentation",
    "largest_chunk_size",
    "multi_scale",
    "query_expansion",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "RetrievalModule":
        from lightning_retrieval.module import RetrievalModule

        return RetrievalModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
