"""Valid calls of the models."""

import torch
from PIL import Image
from torch import nn

from lightning_retrieval import multi_scale
from lightning_retrieval.models import (
    AdaptedEmbedder,
    Embedder,
    FrozenEmbedder,
    GeM,
    GlobalAvgPool,
    GlobalMaxPool,
    GlyphNet,
    NgramTokenizer,
    PCAWhitening,
    Preparation,
    SupervisedWhitening,
    TextEmbedder,
    gem,
)
from tests.awkward_values.calls import Call


def images():
    return torch.linspace(0, 1, 2 * 32 * 32).reshape(2, 1, 32, 32)


def features():
    return torch.linspace(0.1, 1, 2 * 3 * 4).reshape(2, 3, 2, 2)


def rows():
    return torch.tensor([[1.0, 0.1], [0.8, 0.6], [0.1, 1.0], [0.6, 0.8]])


def embedder_settings():
    return {
        "backbone": "glyph_net",
        "embedding_dim": 4,
        "pooling": "gem",
        "weights": None,
        "feature_dim": None,
        "image_size": None,
        "preparation": {"image_size": 32},
        "backbone_args": {"width": 4},
        "lora": None,
        "channels_last": None,
    }


def text_settings():
    return {
        "backbone": "ngram_net",
        "embedding_dim": 4,
        "weights": None,
        "max_length": 8,
        "backbone_args": {"buckets": 9, "dim": 3},
    }


def of_features(pool):
    return Call(type(pool).__name__, pool, lambda: {"features": features()}, signature=pool.forward, maps=True)


def small_scale(images):
    """Embeddings of images, for `multi_scale`."""
    return images.mean((2, 3)) + torch.arange(2.0)


def whitening_calls(kind, settings):
    """Valid calls of the constructor of a whitening, of `fit` and of the fitted whitening."""
    name, labels = kind.__name__, torch.tensor([7, 7, 3, 3])
    return [
        Call(name, kind, lambda: settings, use=lambda whitening: whitening.fit(rows(), labels)(rows())),
        Call(
            name,
            lambda embeddings, labels: kind().fit(embeddings, labels)(rows()),
            lambda: {"embeddings": rows(), "labels": labels},
            signature=kind.fit,
        ),
        Call(name, kind().fit(rows(), labels), lambda: {"embeddings": rows()}, signature=kind.forward, maps=True),
    ]


def preparation_settings():
    return {
        "image_size": 8,
        "resize": 9,
        "interpolation": "bicubic",
        "mean": (0.5,),
        "std": (0.5,),
        "channels": 1,
        "background": "black",
        "reduced_scale": True,
    }


def fitted_settings():
    return {**preparation_settings(), "resize": "fit", "fill": "white"}


def preparation_calls():
    """Valid calls of the constructor and the methods of `Preparation`."""
    grey = Preparation(**preparation_settings())
    pixels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    image = Image.new("RGB", (12, 9))
    return [
        Call("Preparation", Preparation, preparation_settings, use=lambda preparation: preparation(image)),
        Call("Preparation", Preparation, fitted_settings, use=lambda preparation: preparation(image)),
        Call("Preparation", Preparation.named, lambda: {"name": "plain"}),
        Call("Preparation", grey.with_size, lambda: {"image_size": 8}),
        Call("Preparation", grey, lambda: {"image": image}, signature=Preparation.__call__),
        Call("Preparation", grey.normalize, lambda: {"images": pixels}),
        Call("Preparation", grey.undo, lambda: {"images": grey.normalize(pixels)}, maps=True),
    ]


CALLS = {
    "Embedder": [
        Call("Embedder", Embedder, embedder_settings, use=lambda embedder: embedder(images())),
        Call(
            "Embedder",
            Embedder(nn.Conv2d(1, 3, 3), embedding_dim=4),
            lambda: {"images": images()},
            signature=Embedder.forward,
            maps=True,
        ),
    ],
    "Preparation": preparation_calls(),
    "FrozenEmbedder": [
        Call(
            "FrozenEmbedder",
            FrozenEmbedder,
            lambda: {"embedder": nn.Flatten(), "checkpoint": None, "preparation": {"image_size": 32}},
            use=lambda network: network(images()),
        ),
    ],
    "TextEmbedder": [
        Call("TextEmbedder", TextEmbedder, text_settings, use=lambda network: network(network.tokenizer(["red", ""]))),
        Call(
            "TextEmbedder",
            TextEmbedder(**text_settings()),
            lambda: {"tokens": torch.tensor([[3, 0], [1, -1]])},
            signature=TextEmbedder.forward,
            maps=True,
        ),
    ],
    "NgramTokenizer": [
        Call(
            "NgramTokenizer",
            NgramTokenizer,
            lambda: {"buckets": 9, "min_n": 2, "max_n": 4, "max_length": 5},
            use=lambda tokenizer: tokenizer(["red", ""]),
        ),
        Call("NgramTokenizer", NgramTokenizer(), lambda: {"texts": ["red", ""]}, signature=NgramTokenizer.__call__),
    ],
    "AdaptedEmbedder": [
        Call(
            "AdaptedEmbedder",
            AdaptedEmbedder,
            lambda: {"embedder": nn.Flatten(), "from_dim": 2 * 32 * 32, "embedding_dim": 3, "hidden_dim": 2},
            use=lambda network: network(torch.rand(2, 2, 32, 32)),
            without={"from_dim": "must be the dimension of the embedder's embeddings"},
        ),
    ],
    "GlyphNet": [
        Call("GlyphNet", GlyphNet, lambda: {"width": 2}, use=lambda network: network(images())),
        Call("GlyphNet", GlyphNet(width=2), lambda: {"images": images()}, signature=GlyphNet.forward, maps=True),
    ],
    "GeM": [
        Call("GeM", GeM, use=lambda pool: pool(features())),
        of_features(GeM()),
    ],
    "GlobalAvgPool": [of_features(GlobalAvgPool())],
    "GlobalMaxPool": [of_features(GlobalMaxPool())],
    "gem": [
        Call("gem", gem, lambda: {"features": features(), "p": 3.0}, maps=True),
        Call("gem", gem, lambda: {"features": features(), "p": torch.tensor([3.0])}, maps=True),
    ],
    "PCAWhitening": whitening_calls(PCAWhitening, {"dim": 2, "power": 0.5}),
    "SupervisedWhitening": whitening_calls(SupervisedWhitening, {"dim": 2, "pairs_per_image": 2}),
    "multi_scale": [
        Call(
            "multi_scale",
            multi_scale,
            lambda: {"embed": small_scale, "images": images(), "scales": (1.0, 0.5), "p": 1.0, "eps": 0.0},
            maps=True,
        )
    ],
}
