"""Data modules, samplers and the loader that carries them into training."""

from lightning_retrieval.datamodules.base import RetrievalDataModule
from lightning_retrieval.datamodules.glyphs import GlyphDataset, Glyphs
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, SeededIndex, index_generator, resume_position
from lightning_retrieval.datamodules.samplers import GlobalBatchSampler, PKSampler

__all__ = [
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
