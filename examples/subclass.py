"""A subclass of RetrievalModule: another embedding, another optimizer, batches of another format, a further loss.

python examples/subclass.py
"""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, WeightedSum
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs


class ClassificationLoss(torch.nn.Module):
    """The cross entropy of a linear classifier. Its parameters belong to the loss, and are trained with the network."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.dim, self.num_classes = dim, num_classes
        self.head = torch.nn.Linear(dim, num_classes)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(embeddings), labels)


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
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)  # of the embedder and of the loss


if __name__ == "__main__":
    data = Glyphs()
    data.prepare_data()
    classifier = ClassificationLoss(dim=128, num_classes=int(data.train_set.labels.max()) + 1)
    loss = WeightedSum({"ap": (1.0, SmoothAPLoss(tau=0.01)), "classes": (0.1, classifier)})
    module = FlipModule(Embedder("glyph_net", embedding_dim=128), loss, momentum=0.8)
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=10, callbacks=[RetrievalEvaluation()], logger=False)
    trainer.fit(module, datamodule=data)
