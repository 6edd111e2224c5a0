"""Train image retrieval directly for Average Precision, with PyTorch Lightning.

Names are imported when they are first used, so that commands without torch start immediately, and losses, metrics,
models and chunked backward work without Lightning.
"""

from typing import TYPE_CHECKING

from lightning_retrieval.lazy_names import lazy_names
from lightning_retrieval.version import __version__ as __version__

PACKAGES = ("callbacks", "datamodules", "losses", "metrics", "models", "ranking", "search", "training")

if TYPE_CHECKING:  # the public names; type checkers export names imported `as` themselves
    from lightning_retrieval.callbacks import FSDP2Strategy as FSDP2Strategy
    from lightning_retrieval.callbacks import RetrievalEvaluation as RetrievalEvaluation
    from lightning_retrieval.datamodules import PKSampler as PKSampler
    from lightning_retrieval.datamodules import RetrievalDataLoader as RetrievalDataLoader
    from lightning_retrieval.losses import BlackboxAPLoss as BlackboxAPLoss
    from lightning_retrieval.losses import BlackboxRecallLoss as BlackboxRecallLoss
    from lightning_retrieval.losses import CalibrationLoss as CalibrationLoss
    from lightning_retrieval.losses import FastAPLoss as FastAPLoss
    from lightning_retrieval.losses import HAPLoss as HAPLoss
    from lightning_retrieval.losses import LogRankLoss as LogRankLoss
    from lightning_retrieval.losses import NestedLoss as NestedLoss
    from lightning_retrieval.losses import QuantizedAPLoss as QuantizedAPLoss
    from lightning_retrieval.losses import RecallAtKLoss as RecallAtKLoss
    from lightning_retrieval.losses import ROADMAPLoss as ROADMAPLoss
    from lightning_retrieval.losses import SmoothAPLoss as SmoothAPLoss
    from lightning_retrieval.losses import SupAPLoss as SupAPLoss
    from lightning_retrieval.losses import WeightedSum as WeightedSum
    from lightning_retrieval.losses import blackbox_rank as blackbox_rank
    from lightning_retrieval.metrics import RetrievalMetrics as RetrievalMetrics
    from lightning_retrieval.models import Embedder as Embedder
    from lightning_retrieval.models import PCAWhitening as PCAWhitening
    from lightning_retrieval.models import SupervisedWhitening as SupervisedWhitening
    from lightning_retrieval.models.multi_scale import multi_scale as multi_scale
    from lightning_retrieval.models.sides import TwoNetworks as TwoNetworks
    from lightning_retrieval.models.sides import TwoSides as TwoSides
    from lightning_retrieval.ranking.expansion import DatabaseAugmentation as DatabaseAugmentation
    from lightning_retrieval.ranking.expansion import QueryExpansion as QueryExpansion
    from lightning_retrieval.ranking.relevance import GalleryOnly as GalleryOnly
    from lightning_retrieval.ranking.relevance import OtherCamera as OtherCamera
    from lightning_retrieval.ranking.relevance import Relevance as Relevance
    from lightning_retrieval.ranking.relevance import SharedTags as SharedTags
    from lightning_retrieval.search.embedding_folder import read_embeddings as read_embeddings
    from lightning_retrieval.search.store.index import RetrievalIndex as RetrievalIndex
    from lightning_retrieval.search.store.milvus_store import MilvusStore as MilvusStore
    from lightning_retrieval.training.chunk_size import largest_chunk_size as largest_chunk_size
    from lightning_retrieval.training.chunked import chunked_backward as chunked_backward
    from lightning_retrieval.training.memory import CrossBatchMemory as CrossBatchMemory
    from lightning_retrieval.training.module import RetrievalModule as RetrievalModule
    from lightning_retrieval.training.optimizers import Updates as Updates

__getattr__, __dir__ = lazy_names(__name__, PACKAGES)
