"""The transform that prepares images, and sentences for embeddings that are not finite and for exhausted memory."""

import pytest
import torch
from PIL import Image

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.embedding import ImageEmbedder
from lightning_retrieval.datamodules import ImageIndex
from tests.datamodules.trees import write_image
from tests.lightning_retrieval.cli.glyph_commands import error_of, save_checkpoint

USER_CODE = """
from torchvision.transforms import v2
from lightning_retrieval.preparation.training_transforms import TrainingTransform
from lightning_retrieval.models import Preparation

other = Preparation(32, 32, channels=1, mean=(0.3,), std=(0.2,))
resize = TrainingTransform([v2.Resize((32, 32)), v2.Grayscale()], other, takes_pixels=False)
"""


def test_an_object_of_the_user_that_gives_uint8_is_called_as_a_function(tmp_path, monkeypatch):
    (tmp_path / "user_code_of_embedding.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    model = save_checkpoint(
        tmp_path / "m.ckpt", RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss())
    )
    write_image(tmp_path / "a.png", size=(50, 40))
    name = "user_code_of_embedding.resize"
    embedder = ImageEmbedder.load("X", model, transform=name, batch_size=1, num_workers=0, device="cpu")
    (batch,) = embedder.embed(tmp_path, ImageIndex(["a.png"], [0]))
    with torch.no_grad(), Image.open(tmp_path / "a.png") as image:
        wanted = embedder.module.embed(embedder.transform(image.convert("RGB"))[None])
    assert torch.equal(batch.embeddings, wanted)
    assert embedder.dim() == 24


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
