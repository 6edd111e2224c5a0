"""Small runs on labelled points, and the metrics that they should log."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalMetrics, RetrievalModule, SmoothAPLoss
from tests.quiet_trainer import quiet_trainer

KS = (1, 5)


def labelled_points(seed: int, size: int = 23) -> TensorDataset:
    """Vectors near the centre of their class, but not so near that a metric is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) // 4
    centres = torch.randn(9, 6, generator=generator)
    return TensorDataset(centres[labels] + 1.5 * torch.randn(size, 6, generator=generator), labels)


class PointsModule(RetrievalModule):
    """A module with its own data loaders; in evaluation batches have 5 points, so the last one is smaller."""

    def __init__(self, seed=0, lr=0.1, val=(2,), test=(3,)):
        torch.manual_seed(seed)
        embedder = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        super().__init__(embedder, SmoothAPLoss(tau=0.1), optimizer=lambda groups: torch.optim.SGD(groups, lr=lr))
        self.sets = {"val": val, "test": test}

    def train_dataloader(self):
        return DataLoader(labelled_points(1), batch_size=8)

    def val_dataloader(self):
        return self.evaluation_loaders("val")

    def test_dataloader(self):
        return self.evaluation_loaders("test")

    def evaluation_loaders(self, stage):
        loaders = [DataLoader(labelled_points(seed), batch_size=5) for seed in self.sets[stage]]
        if len(loaders) == 1:
            return loaders[0]
        return loaders


def make_trainer(*callbacks, **kwargs) -> pl.Trainer:
    return quiet_trainer(**{"max_epochs": 1, "log_every_n_steps": 1, **kwargs}, callbacks=list(callbacks))


def expected_metrics(module: RetrievalModule, seed: int, prefix: str) -> dict[str, float]:
    """The metrics of all points at once."""
    images, labels = labelled_points(seed).tensors
    metrics = RetrievalMetrics(KS)
    with torch.no_grad():
        metrics.update(module.eval()(images), labels)
    return {f"{prefix}/{name}": value.item() for name, value in metrics.compute().items()}
