"""Models: an embedder with any backbone, pooling of feature maps, whitening, and a small network for glyphs."""

from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.models.glyph_net import GlyphNet
from lightning_retrieval.models.pooling import GeM, GlobalAvgPool, GlobalMaxPool, gem
from lightning_retrieval.models.supervised_whitening import SupervisedWhitening
from lightning_retrieval.models.whitening import PCAWhitening

__all__ = [
    "Embedder",
    "GeM",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GlyphNet",
    "PCAWhitening",
    "SupervisedWhitening",
    "gem",
]
