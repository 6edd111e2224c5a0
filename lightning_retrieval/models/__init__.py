"""Models: embedders of images and of texts, image preparation, pooling, whitening, and a network for glyphs."""

from lightning_retrieval.models.adapted import AdaptedEmbedder, FrozenEmbedder
from lightning_retrieval.models.backbones import GlyphNet
from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.models.features import GeM, GlobalAvgPool, GlobalMaxPool, gem
from lightning_retrieval.models.supervised_whitening import SupervisedWhitening
from lightning_retrieval.models.text_embedder import TextEmbedder
from lightning_retrieval.models.tokenizers import NgramTokenizer
from lightning_retrieval.models.whitening import PCAWhitening
from lightning_retrieval.preparation.preparation import Preparation

__all__ = [
    "AdaptedEmbedder",
    "Embedder",
    "FrozenEmbedder",
    "GeM",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GlyphNet",
    "NgramTokenizer",
    "PCAWhitening",
    "Preparation",
    "SupervisedWhitening",
    "TextEmbedder",
    "gem",
]
