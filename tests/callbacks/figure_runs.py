"""Small runs on labelled points for the tests of figures."""

import functools

import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from tests.quiet_trainer import quiet_trainer


def labelled_points(seed: int, size: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 6
    rows = torch.randn(6, 5, generator=generator)[labels] + 0.7 * torch.randn(size, 5, generator=generator)
    return TensorDataset(rows, labels)


def make_loader(seed: int) -> DataLoader:
    return DataLoader(labelled_points(seed), batch_size=8)


def make_module() -> RetrievalModule:
    torch.manual_seed(3)
    return RetrievalModule(nn.Linear(5, 4), SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.SGD, lr=0.1))


def make_trainer(folder, *callbacks, **kwargs) -> pl.Trainer:
    return quiet_trainer(
        callbacks=[RetrievalEvaluation((1,)), *callbacks],
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"logger": False, "max_epochs": 1, **kwargs},
    )


def metrics_of(model: RetrievalModule, seed: int) -> RetrievalMetrics:
    metrics = RetrievalMetrics((1,))
    with torch.no_grad():
        metrics.update(model(labelled_points(seed)[:][0]), labelled_points(seed)[:][1])
    return metrics


def colours_of(path) -> set[tuple[int, int, int]]:
    with Image.open(path) as picture:
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        return {colour for _, colour in picture.getcolors(1 << 20)}


def record_figures(monkeypatch, module) -> list:
    """The list of the figures that a callback creates."""
    figures, new_figure = [], module.new_figure

    def recorded(*size):
        figures.append(new_figure(*size))
        return figures[-1]

    monkeypatch.setattr(module, "new_figure", recorded)
    return figures
