"""Eight-bit copies of ONNX files: which quantisation a network gets, its size, and what it gives."""

import pytest
import torch

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.export.onnx_file import OnnxModel, can_write_onnx, write_onnx
from lightning_retrieval.export.program import EmbeddingProgram, export_program
from lightning_retrieval.export.quantization import quantize_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_write_onnx(torch.__version__), reason="torch writes ONNX from 2.8 on"),
]
VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 96, "num_heads": 2}


def quantized(embedder, folder):
    """The kind of quantisation, the operations of the copy, and both models with pixels for them."""
    torch.manual_seed(0)
    module = RetrievalModule(embedder, SmoothAPLoss()).eval()
    program = EmbeddingProgram(module, embedder.preparation, "uint8").eval()
    write_onnx("test", export_program(program), folder / "model.onnx", {})
    calibration = [program.random_images(1, seed=seed) for seed in range(8)]
    kind = quantize_onnx(folder / "model.onnx", folder / "int8.onnx", calibration)
    operations = [node.op_type for node in onnx.load(folder / "int8.onnx").graph.node]
    models = [OnnxModel("test", folder / name) for name in ("model.onnx", "int8.onnx")]
    return kind, operations, models, program.random_images(16, seed=99)


def test_a_transformer_gets_dynamic_quantisation(tmp_path):
    pytest.importorskip("timm")
    embedder = Embedder("timm/vit_tiny_patch16_224", 16, image_size=32, backbone_args=VIT)
    kind, operations, (before, after), images = quantized(embedder, tmp_path)
    assert kind == "dynamic"
    # Four products in each of two blocks, and that of the head; those of attention, of two activations, stay.
    assert operations.count("MatMulInteger") == 9
    assert operations.count("MatMul") == 4
    sizes = [(tmp_path / name).stat().st_size for name in ("int8.onnx", "model.onnx")]
    assert sizes[0] < 0.4 * sizes[1]
    found, expected = after.embed(images), before.embed(images)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99
    assert not torch.equal(found, expected)
    torch.testing.assert_close(after.embed(images[:1]), found[:1], rtol=0, atol=0.02)  # ranges are those of a batch


def test_a_convolutional_network_gets_static_quantisation(tmp_path):
    kind, operations, (before, after), images = quantized(Embedder("glyph_net", 16), tmp_path)
    assert kind == "static"
    assert "MatMulInteger" not in operations
    assert operations.count("QuantizeLinear") > operations.count("Conv") > 3
    cosines = torch.nn.functional.cosine_similarity(after.embed(images), before.embed(images))
    assert cosines.min() > 0.98
