"""A subclass of RetrievalModule: another embedding, another optimizer, batches of another format.

python examples/subclass.py
"""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs


class FlipModule(RetrievalModule):
    """Averages the embeddings of an image and of its mirror image, and trains with SGD."""

    def __init__(self, embedder: torch.nn.Module, loss: torch.nn.Module, momentum: float = 0.9, **kwargs: Any) -> None:
        super().__init__(embedder, loss, **kwargs)
        self.momentum = momentum

    def forward(self, images: Tensor) -> Tensor:
        return (self.embedder(images) + self.embedder(images.flip(-1))) / 2

    def unpack_batch(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return batch["images"] * 2 - 1, batch["labels"], batch["ids"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


if __name__ == "__main__":
    module = FlipModule(Embedder("glyph_net", embedding_dim=128), SmoothAPLoss(tau=0.01), momentum=0.8)
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=10, callbacks=[RetrievalEvaluation()], logger=False)
    trainer.fit(module, datamodule=Glyphs())
