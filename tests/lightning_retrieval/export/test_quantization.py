"""An eight-bit copy of the ONNX file of a transformer: which quantisation it gets, its size, and what it gives.

A convolutional network is quantised by the command `export --int8`, whose tests compare its embeddings.
"""

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
VIT = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 96, "num_heads": 2}


def test_a_transformer_gets_dynamic_quantisation(tmp_path):
    pytest.importorskip("timm")
    embedder = Embedder("timm/vit_tiny_patch16_224", 16, image_size=32, backbone_args=VIT)
    torch.manual_seed(0)
    program = EmbeddingProgram(RetrievalModule(embedder, SmoothAPLoss()), embedder.preparation, "uint8").eval()
    write_onnx(export_program(program), tmp_path / "model.onnx", {})
    assert quantize_onnx(tmp_path / "model.onnx", tmp_path / "int8.onnx", []) == "dynamic"
    operations = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
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
