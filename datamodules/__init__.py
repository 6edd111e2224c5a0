"""Data modules, samplers and the loader that carries them into training."""

from lightning_retrieval.datamodules.all_classes_sampler import AllClassesSampler
from lightning_retrieval.datamodules.base import RetrievalDataModule
from lightning_retrieval.datamodules.category_sampler import CategorySampler
from lightning_retrieval.datamodules.glyphs import GlyphDataset, Glyphs
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, SeededIndex, index_generator, resume_position
from lightning_retrieval.datamodules.samplers import GlobalBatchSampler, PKSampler

__all__ = [
    "AllClassesSampler",
    "CategorySampler",
    "GlobalBatchSampler",
    "GlyphDataset",
    "Glyphs",
    "PKSampler",
    "RetrievalDataLoader",
    "RetrievalDataModule",
    "SeededIndex",
    "index_generator",
    "resume_position",
]
