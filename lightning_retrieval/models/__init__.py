"""Models: an embedder over any backbone, poolings of feature maps, a small network for glyphs."""

from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.models.glyph_net import GlyphNet
from lightning_retrieval.models.pooling import GeM, GlobalAvgPool, GlobalMaxPool, gem

__all__ = ["Embedder", "GeM", "GlobalAvgPool", "GlobalMaxPool", "GlyphNet", "gem"]
