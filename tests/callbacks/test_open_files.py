"""What is kept of each batch keeps no file open: workers pass tensors through shared memory, which is a file."""

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_retrieval import PCAWhitening, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import EmbeddingWriter, LearnWhitening, RetrievalEvaluation
from tests.quiet_trainer import quiet_trainer

BATCHES = 60
MOST = 45  # files that may be opened by a run, fewer than one for each batch


class Annotated(Dataset):
    """Vectors with all annotations that a batch can have, or with labels only."""

    def __init__(self, labels_only=False):
        self.labels_only = labels_only

    def __len__(self):
        return 2 * BATCHES

    def __getitem__(self, index):
        item = {"images": torch.randn(4, generator=torch.Generator().manual_seed(index))}
        if self.labels_only:
            return item | {"labels": torch.tensor(index // 4)}
        values = {"labels": index // 4, "ids": index, "roles": 3, "cameras": index % 2, "instances": index}
        return item | {name: torch.tensor(value) for name, value in values.items()}


class Data(pl.LightningDataModule):
    """The same set for training and evaluation, read by a worker."""

    train_set = Annotated(labels_only=True)

    def val_dataloader(self):
        return DataLoader(Annotated(), batch_size=2, num_workers=1)

    test_dataloader = predict_dataloader = val_dataloader


RUNS = {
    "network": ("validate", nn.Linear(4, 3), lambda _: [RetrievalEvaluation(ks=(1,))]),
    "identity": ("test", nn.Identity(), lambda _: [RetrievalEvaluation(ks=(1,))]),
    "main memory": ("validate", nn.Identity(), lambda _: [RetrievalEvaluation(ks=(1,), embeddings_on_cpu=True)]),
    "predictions": ("predict", nn.Identity(), lambda _: []),
    "writer": ("predict", nn.Identity(), lambda folder: [EmbeddingWriter(folder / "embeddings")]),
    "whitening": ("validate", nn.Identity(), lambda _: [LearnWhitening()]),
}


def run_with_few_files(_, __, name, folder):
    """A run in a process that may open few files more than it has."""
    import resource

    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    stage, network, callbacks_in = RUNS[name]
    whitening = PCAWhitening(dim=2) if name == "whitening" else None
    module = RetrievalModule(network, SmoothAPLoss(), whitening=whitening)
    trainer = quiet_trainer(callbacks=callbacks_in(folder))
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return len(getattr(trainer, stage)(module, Data()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the open files from the /proc of Linux")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_a_worker_does_not_keep_the_files_of_its_batches_open(name, run_alone, tmp_path):
    assert run_alone(run_with_few_files, name, tmp_path) == (BATCHES if RUNS[name][0] == "predict" else 1)
