"""A program gives the embeddings of its model for pixels and for normalised images, in batches of any size."""

import pytest
import torch
from torch import nn

from lightning_retrieval import Embedder, PCAWhitening, RetrievalModule, SmoothAPLoss
from lightning_retrieval.models import Preparation
from lightning_retrieval.search.export.onnx_file import OnnxModel, can_write_onnx, write_onnx
from lightning_retrieval.search.export.program import EmbeddingProgram, export_program, largest_difference
from lightning_retrieval.search.export.quantization import quantize_onnx

GLYPHS = Preparation.named("glyphs")
COLOUR = Preparation(image_size=(40, 48), resize=(44, 50))


def new_module(**settings):
    torch.manual_seed(0)
    return RetrievalModule(Embedder("glyph_net", embedding_dim=12), SmoothAPLoss(), **settings).eval()


@pytest.mark.parametrize("input_type", ["uint8", "float"])
def test_the_program_is_the_model_with_its_preparation(input_type):
    whitening = PCAWhitening(dim=5).fit(torch.randn(50, 12, generator=torch.Generator().manual_seed(0)))
    module = new_module(whitening=whitening, eval_scales=(1.0, 0.5))
    program = EmbeddingProgram(module, GLYPHS, input_type)
    images = program.random_images(4)
    assert images.is_floating_point() == (input_type == "float")
    pixels = EmbeddingProgram(module, GLYPHS, "uint8").random_images(4)
    with torch.no_grad():
        torch.testing.assert_close(program(images), module.embed(GLYPHS.normalize(pixels)))


def test_pixels_are_normalised_as_the_preparation_does():
    program = EmbeddingProgram(nn.Identity(), COLOUR, "uint8")
    pixels = program.random_images(3)
    assert pixels.shape == (3, 3, 40, 48)
    torch.testing.assert_close(program(pixels), COLOUR.normalize(pixels))


def test_the_largest_difference_is_relative_for_large_embeddings():
    assert largest_difference(torch.tensor([[0.5, 0.25]]), torch.tensor([[0.5, 0.5]])) == 0.25
    assert largest_difference(torch.tensor([[8.0]]), torch.tensor([[10.0]])) == pytest.approx(0.2)


VIT = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 96, "num_heads": 2}


@pytest.mark.slow
@pytest.mark.skipif(not can_write_onnx(torch.__version__), reason="torch writes ONNX from 2.8 on")
def test_a_transformer_gets_dynamic_quantisation(tmp_path):
    """The command `export --int8` quantises a convolutional network, and its tests compare the embeddings."""
    onnx, *_ = map(pytest.importorskip, ("onnx", "onnxruntime", "onnxscript", "timm"))
    embedder = Embedder("timm/vit_tiny_patch16_224", 16, image_size=32, backbone_args=VIT)
    torch.manual_seed(0)
    program = EmbeddingProgram(RetrievalModule(embedder, SmoothAPLoss()), embedder.preparation, "uint8").eval()
    write_onnx(export_program(program), tmp_path / "model.onnx", {})
    assert quantize_onnx(tmp_path / "model.onnx", tmp_path / "int8.onnx", []) == "dynamic"
    graph = onnx.load(tmp_path / "int8.onnx").graph
    operations = [node.op_type for node in graph.node]
    # With weights of eight bits, sums of two products would overflow on processors without VNNI.
    weights = [
        onnx.numpy_helper.to_array(weight) for weight in graph.initializer if weight.data_type == onnx.TensorProto.INT8
    ]
    assert max(abs(weight.astype(int)).max() for weight in weights) == 64
    before, after = (OnnxModel(tmp_path / name) for name in ("model.onnx", "int8.onnx"))
    images = program.random_images(16, seed=99)
    # Four products in a block, and that of the head; those of attention, of two activations, stay.
    assert operations.count("MatMulInteger") == 5
    assert operations.count("MatMul") == 2
    sizes = [(tmp_path / name).stat().st_size for name in ("int8.onnx", "model.onnx")]
    assert sizes[0] < 0.4 * sizes[1]
    found, expected = after.embed(images), before.embed(images)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99
    assert not torch.equal(found, expected)
    torch.testing.assert_close(after.embed(images[:1]), found[:1], rtol=0, atol=0.02)  # ranges are those of a batch
