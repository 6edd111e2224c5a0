"""A small network, batches for it and a short run, for tests of RetrievalModule."""

import functools
import warnings

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import SmoothAPLoss
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

SGD = functools.partial(torch.optim.SGD, lr=0.5)
ROWS = 10


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)).double()


def batches(steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(ROWS, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (ROWS,), generator=generator),
        )
        for _ in range(steps)
    ]


class PointData(RetrievalDataModule):
    """Three batches of nine points in an epoch."""

    train_set = val_set = test_set = Points(3, 26, dtype=torch.float64)

    def __init__(self):
        super().__init__(classes_per_batch=3, samples_per_class=3, seed=1)


def trainer(**kwargs) -> pl.Trainer:
    return quiet_trainer(**{"max_epochs": 1, **kwargs})


def fit(module, data, validation=None, **kwargs) -> pl.Trainer:
    run = trainer(**kwargs)
    loaders = [DataLoader(x, batch_size=None) if isinstance(x, list) else x for x in (data, validation)]
    run.fit(module, *loaders)
    return run


def train_plainly(network: nn.Module, optimizer, data, loss=None) -> None:
    """The same steps in plain PyTorch."""
    loss = loss or SmoothAPLoss(tau=0.1)
    for images, labels in data:
        optimizer.zero_grad()
        loss(network(images), labels).backward()
        optimizer.step()


def warnings_with(words: str, function, *args, **kwargs) -> list[str]:
    """The warnings of a call in which these words occur."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(warning.message) for warning in caught if words in str(warning.message)]


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    """Parameters equal but for rounding in float64, and none at all compared would be an error."""
    assert len(list(expected.parameters())) > 0
    for (name, value), (_, other) in zip(module.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


class Log(pl.Callback):
    """Keeps the loss, the learning rates and the result of each step."""

    def __init__(self):
        self.losses, self.rates, self.returned = [], [], []

    def on_train_batch_start(self, trainer, *_):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.returned.append(outputs)


class Gives(nn.Module):
    """A loss that answers with something else."""

    def __init__(self, shape=(), value=1.0):
        super().__init__()
        self.shape, self.value = shape, value

    def forward(self, embeddings, labels):
        return (embeddings.sum() * 0 + self.value).expand(self.shape)


class LearnedTau(SmoothAPLoss):
    """A loss that learns."""

    def __init__(self):
        super().__init__()
        del self.tau
        self.tau = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.embedder[0], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embedder[0], optimizer, lr=0.125)
