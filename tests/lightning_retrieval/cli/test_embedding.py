"""Embedding fails with a sentence: embeddings that are not finite, and memory that is exhausted."""

import pytest
import torch

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from tests.lightning_retrieval.cli.glyph_commands import error_of, save_checkpoint


@pytest.mark.refusal
def test_nan_in_an_embedding_is_reported_with_the_image(glyphs, tmp_path, capsys):
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    torch.nn.init.constant_(module.embedder.head.linear.weight, float("nan"))
    model = save_checkpoint(tmp_path / "nan.ckpt", module)
    args = ["--images", glyphs[0] / "images" / "1", "--output", tmp_path / "index", "--checkpoint", model]
    printed = error_of(capsys, "index", *args)
    assert printed.startswith("index: embeddings must be finite, but the model gives NaN or inf for deeper/10.bmp;")


@pytest.mark.refusal
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_batch_that_does_not_fit_into_memory(glyphs, tmp_path, capsys, monkeypatch, error):
    model = save_checkpoint(
        tmp_path / "m.ckpt", RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    )

    def embed(self, images):
        raise error

    monkeypatch.setattr(RetrievalModule, "embed", embed)
    args = ["--images", glyphs[0] / "images" / "1", "--output", tmp_path / "index", "--checkpoint", model]
    assert "`--batch_size` must be small enough for the memory of the device, got" in error_of(capsys, "index", *args)
