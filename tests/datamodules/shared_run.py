"""A short training on image files whose list is in shared arrays; each process and worker notes which files it maps."""

import multiprocessing
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_retrieval.datamodules import ImageFolder, PKSampler, shared_arrays
from tests.datamodules.pictures import TINY

FLAGS = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "logger": False,
    "limit_val_batches": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class NotingTransform:
    """Writes the names of the shared arrays that its process maps to a file of the process."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def __call__(self, image):
        (self.folder / f"{os.getppid()}-{os.getpid()}").write_text("\n".join(mapped_arrays()))
        return TINY(image)


class Recorder(pl.LightningModule):
    """Records the ids and the pixels of its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(
            (batch["ids"].tolist(), batch["labels"].tolist(), batch["images"].sum(dim=(1, 2, 3)).tolist())
        )
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def mapped_arrays():
    """Names of the files of shared arrays that this process maps, such as `images/paths` and `classes/images`."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.suffix == ".npy" and path.parents[1].name.startswith("lightning-retrieval-"):
            found.add(f"{path.parent.name.split('-')[0]}/{path.stem}")
    return sorted(found)


def train(root, notes, *, shared, workers=0, start_method="fork", **flags):
    """Train for two epochs; return the batches, how often the list was read, and which epochs were drawn."""
    draws, reads = [], []
    draw, read = PKSampler.draw, ImageFolder.read

    def counted_draw(sampler, generator):
        draws.append(sampler.epoch)
        yield from draw(sampler, generator)

    def counted_read(data):
        reads.append(os.getpid())
        return read(data)

    multiprocessing.set_start_method(start_method, force=True)
    with (
        mock.patch.object(tempfile, "tempdir", str(notes)),
        mock.patch.object(shared_arrays, "SHARED_FROM", 1 if shared else 1 << 40),
        mock.patch.object(PKSampler, "draw", counted_draw),
        mock.patch.object(ImageFolder, "read", counted_read),
    ):
        transform = NotingTransform(notes)
        data = ImageFolder(
            root,
            train_transform=transform,
            eval_transform=transform,
            classes_per_batch=3,
            samples_per_class=2,
            num_workers=workers,
        )
        module = Recorder()
        pl.Trainer(**FLAGS, **flags).fit(module, datamodule=data)
        mapped = mapped_arrays()
        if dist.is_initialized():
            dist.barrier()
    return {"batches": module.batches, "draws": draws, "reads": len(reads), "mapped": mapped, "process": os.getpid()}
