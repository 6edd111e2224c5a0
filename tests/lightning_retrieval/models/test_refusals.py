"""Invalid calls of the models."""

import json

import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model

from lightning_retrieval import Embedder, PCAWhitening, RetrievalModule, SmoothAPLoss, SupervisedWhitening, multi_scale
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.models import (
    AdaptedEmbedder,
    FrozenEmbedder,
    GeM,
    GlobalAvgPool,
    GlyphNet,
    NgramTokenizer,
    TextEmbedder,
    gem,
)
from tests.lightning_retrieval.models.hugging_face_folders import PROCESSOR, write_folder, write_text_folder
from tests.lightning_retrieval.official_cases import rows
from tests.lightning_retrieval.search.commands.glyph_commands import save_checkpoint
from tests.refusals import refusal_test

LABELS = torch.tensor([7, 7, 3, 3, 3, 1, 1, 1, 1])
FLAT = rows(50, 3) @ rows(3, 6, seed=1)  # varies in three of six directions, and in the others by rounding


@pytest.fixture
def weights(tmp_path):
    """Write a file of weights; its path."""

    def write(content):
        torch.save(content, tmp_path / "w.pth")
        return str(tmp_path / "w.pth")

    return write


@pytest.fixture
def state():
    """The weights of a network of torchvision, in another type."""
    values = get_model("squeezenet1_1").state_dict()
    return lambda dtype=torch.float32: {name: value.to(dtype) for name, value in values.items()}


@pytest.fixture
def images(tmp_path):
    """A folder of a small model of images of Hugging Face, with changed entries of its config."""

    def write(**changed):
        write_folder(tmp_path / "images", "vit", PROCESSOR)
        config = tmp_path / "images" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
        return f"hf/{tmp_path / 'images'}"

    return write


@pytest.fixture
def incomplete_folder(images, tmp_path):
    """The same folder whose file of weights lacks a tensor."""
    safetensors = pytest.importorskip("safetensors.torch")
    name, file = images(), tmp_path / "images" / "model.safetensors"
    lacking = without(safetensors.load_file(file), "encoder.layer.1.output.dense.bias")
    safetensors.save_file(lacking, file, metadata={"format": "pt"})
    return name


@pytest.fixture
def damaged_folder(images, tmp_path):
    """The same folder with a file of weights that is none."""
    name = images()
    (tmp_path / "images" / "model.safetensors").rename(tmp_path / "images" / "pytorch_model.bin")
    return name


@pytest.fixture
def texts(tmp_path):
    write_text_folder(tmp_path / "texts", "bert")
    return f"hf/{tmp_path / 'texts'}"


@pytest.fixture
def frozen(tmp_path):
    """Freeze the embedder of a checkpoint with these settings of its module."""

    def freeze(embedder=None, preparation=None, **settings):
        module = RetrievalModule(embedder or Embedder("glyph_net", 8), SmoothAPLoss(), **settings)
        module.preparation = preparation
        return FrozenEmbedder(checkpoint=str(save_checkpoint(tmp_path / "old.ckpt", module)))

    return freeze


@pytest.fixture
def fitted():
    return PCAWhitening(dim=2).fit(rows(9, 4))


def damaged(tmp_path):
    (tmp_path / "old.ckpt").write_bytes(b"half of a checkpoint")
    return FrozenEmbedder(checkpoint=str(tmp_path / "old.ckpt"))


def squeezenet(file):
    return Embedder("squeezenet1_1", 8, weights=file)


def without(state, name):
    """Weights that lack a tensor."""
    return {other: value for other, value in state.items() if other != name}


def adapters(**lora):
    pytest.importorskip("peft")
    return Embedder("timm/vit_tiny_patch16_224", lora=lora)


TABLE = {
    "Embedder": [
        (lambda: Embedder("resnet5"), InvalidValue, "backbone"),
        (lambda: Embedder("glyph_net", 0), InvalidValue, "embedding_dim"),
        (lambda: Embedder("glyph_net", pooling="mean"), InvalidValue, "pooling"),
        (lambda: Embedder("resnet18", weights="V2"), InvalidValue, "weights"),
        (lambda: Embedder("glyph_net", weights="V1"), InvalidValue, "weights"),
        (lambda: Embedder(nn.Identity(), weights="V1"), InvalidValue, "weights"),
        (lambda: Embedder("vit_b_32", 8, image_size=65), InvalidValue, "image_size"),
        (lambda: Embedder("glyph_net", backbone_args={"depth": 3}), InvalidValue, "backbone_args"),
        (lambda: Embedder(nn.Identity(), backbone_args={"depth": 3}), InvalidValue, "backbone_args"),
        (lambda: Embedder(nn.Conv2d(3, 4, 3)).save_pretrained("m"), InvalidValue, "backbone"),
        # Files of weights.
        (lambda: squeezenet("none.pth"), MissingFile, "weights"),
        (lambda weights: squeezenet(weights([1])), InvalidValue, "weights"),
        (lambda weights: squeezenet(weights({"teacher": {"a": 2}})), InvalidValue, "weights"),
        (lambda weights: squeezenet(weights(get_model("squeezenet1_1"))), InvalidValue, "weights"),
        (lambda weights, state: squeezenet(weights({"a": state(), "b": state()})), InvalidValue, "weights"),
        (lambda weights, state: squeezenet(weights({**state(), "features.9.x": rows(2, 2)})), InvalidValue, "weights"),
        (lambda weights, state: squeezenet(weights(state(torch.int8))), InvalidValue, "weights"),
        (lambda weights, state: Embedder("timm/test_resnet", 8, weights=weights(state())), InvalidValue, "weights"),
        # Files that lack a tensor: of torchvision, timm and transformers.
        (
            lambda weights, state: squeezenet(weights(without(state(), "features.3.squeeze.bias"))),
            InvalidValue,
            "weights",
        ),
        (
            lambda weights: Embedder(
                "timm/test_resnet",
                8,
                weights=weights(without(timm.create_model("test_resnet").state_dict(), "bn1.running_mean")),
            ),
            InvalidValue,
            "weights",
        ),
        (lambda incomplete_folder: Embedder(incomplete_folder, 8, weights="DEFAULT"), InvalidValue, "weights"),
        # timm and transformers.
        (lambda: Embedder("timm/test_resnet", weights="V1"), InvalidValue, "weights"),
        (lambda: Embedder("timm/resnet18", weights="efficientnet-lite0"), InvalidValue, "weights"),
        (lambda: Embedder("timm/resnet18", backbone_args={"features_only": True}), InvalidValue, "backbone_args"),
        (lambda: Embedder("timm/resnet10t", backbone_args={"output_stride": 7}), InvalidValue, "backbone_args"),
        (lambda tmp_path: Embedder(f"hf/{tmp_path}"), InvalidValue, "backbone"),
        (lambda damaged_folder: Embedder(damaged_folder, 8, weights="DEFAULT"), InvalidValue, "backbone"),
        (lambda texts: Embedder(texts), InvalidValue, "backbone"),
        (lambda images: Embedder(images(quantization_config={"load_in_8bit": True})), InvalidValue, "backbone"),
        # Adapters.
        (lambda: adapters(r=0), InvalidValue, "lora['r']"),
        (lambda: Embedder(nn.Conv2d(3, 4, 3), lora=2), InvalidValue, "lora"),
        (lambda: Embedder("resnet18", gradient_checkpointing=True), InvalidValue, "gradient_checkpointing"),
        (lambda: Embedder("timm/resnet18", gradient_checkpointing=True), InvalidValue, "gradient_checkpointing", ""),
    ],
    "TextEmbedder": [
        (lambda: TextEmbedder("resnet18"), InvalidValue, "backbone"),
        (lambda images: TextEmbedder(images()), InvalidValue, "backbone"),
        (lambda: TextEmbedder("ngram_net", weights="DEFAULT"), InvalidValue, "weights"),
        (lambda texts: TextEmbedder(texts, 8, max_length=20), InvalidValue, "max_length"),
    ],
    "NgramTokenizer": [(lambda: NgramTokenizer(min_n=6), InvalidValue, "min_n")],
    "FrozenEmbedder": [
        (lambda: FrozenEmbedder(checkpoint="gone.ckpt"), MissingFile, "checkpoint"),
        (lambda frozen: frozen(eval_scales=[1.0, 0.5]), InvalidValue, "checkpoint"),
        (lambda frozen: frozen(whitening=PCAWhitening()), InvalidValue, "checkpoint"),
        (lambda frozen: frozen(preparation={"function": "mine.prepare"}), InvalidValue, "checkpoint"),
        (damaged, InvalidValue, "", "old.ckpt"),
        (lambda frozen: frozen(embedder=Embedder(nn.Conv2d(1, 3, 3))), InvalidValue, "checkpoint"),
    ],
    "AdaptedEmbedder": [(lambda: AdaptedEmbedder(nn.Flatten(), 0, 4), InvalidValue, "from_dim")],
    "GlyphNet": [(lambda: GlyphNet(width=0), InvalidValue, "width")],
    "GeM": [(lambda: GeM(p=0), InvalidValue, "p")],
    "gem": [
        (lambda: gem(torch.rand(2, 3, 4, 4), eps=0), InvalidValue, "eps"),
        (lambda: gem(torch.rand(2, 3)), InvalidValue, "features"),
    ],
    "GlobalAvgPool": [(lambda: GlobalAvgPool()(torch.rand(2, 3)), InvalidValue, "features")],
    "multi_scale": [
        (lambda: multi_scale(nn.Flatten(), torch.rand(1, 1, 4, 4), scales=[]), InvalidValue, "scales"),
        (lambda: multi_scale(nn.Flatten(), torch.rand(1, 1, 4, 4), scales=[0]), InvalidValue, "scales"),
        (lambda: multi_scale(nn.Flatten(), torch.rand(1, 1, 4, 4), scales=[1], p=0), InvalidValue, "p"),
    ],
    "PCAWhitening": [
        (lambda: PCAWhitening(dim=0), InvalidValue, "dim"),
        (lambda: PCAWhitening(power=-1), InvalidValue, "power"),
        (lambda: PCAWhitening(dim=5).fit(rows(9, 4)), InvalidValue, "dim"),
        (lambda: PCAWhitening().fit(rows(4, 4)), InvalidValue, "embeddings"),
        (lambda: PCAWhitening().fit(torch.full((9, 2), torch.inf)), InvalidValue, "embeddings", ""),
        (lambda: PCAWhitening().fit(FLAT), InvalidValue, "embeddings"),
        (lambda: PCAWhitening()(rows(2, 3)), InvalidValue, "", ""),
        (lambda fitted: PCAWhitening(3).load_state_dict(fitted.state_dict()), InvalidValue, "dim"),
    ],
    "SupervisedWhitening": [
        (lambda: SupervisedWhitening(pairs_per_image=0), InvalidValue, "pairs_per_image"),
        (lambda: SupervisedWhitening(dim=5).fit(rows(9, 4), LABELS), InvalidValue, "dim"),
        (lambda: SupervisedWhitening().fit(rows(9, 4)), InvalidValue, "labels"),
        (lambda: SupervisedWhitening().fit(rows(9, 4), torch.arange(9)), InvalidValue, "labels"),
        (lambda: SupervisedWhitening().fit(rows(9, 4), LABELS[:3]), InvalidValue, "labels"),
        (lambda: SupervisedWhitening().fit(FLAT[:9], LABELS), InvalidValue, "embeddings"),
    ],
}

test_invalid_arguments_raise = refusal_test(TABLE)
