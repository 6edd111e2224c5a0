"""Embeddings that are not finite are an error that names the image."""

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
