"""A process that is killed at any moment leaves what was there before, or what is new, and never a mix of both."""

import os
import tempfile
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss, checkpoints, files
from lightning_retrieval.checkpoints import find_damage, is_checkpoint, torch_writes_shards, write_sharded_checkpoint
from tests.kills import killed_everywhere

needs_shards = pytest.mark.skipif(not torch_writes_shards(), reason="needs torch >= 2.9")
OTHER_FILE_SYSTEM = Path("/dev/shm")


def new_module(value):
    module = RetrievalModule(Embedder("glyph_net", 4), SmoothAPLoss())
    nn.init.constant_(module.embedder.head.linear.weight, value)
    return module


def value_of(path):
    """The value that `new_module` gave the weights of the checkpoint at a path, after it was verified."""
    return RetrievalModule.load_from_checkpoint(path).embedder.head.linear.weight[0, 0].item()


def settled(plugins=()):
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, plugins=list(plugins)
    )


def save_file(path, value, plugins=(), connect=False):
    """Save a checkpoint by a Trainer whose folder for temporary files is on another file system."""
    if OTHER_FILE_SYSTEM.is_dir():
        os.environ["TMPDIR"] = str(OTHER_FILE_SYSTEM)
        tempfile.tempdir = None
    trainer, module = settled(plugins), new_module(value)
    if connect:
        module.trainer = trainer
        trainer.strategy.connect(module)
    else:
        trainer.validate(
            module, DataLoader([(torch.rand(8, 1, 32, 32), torch.arange(8) // 2)], batch_size=None), verbose=False
        )
    trainer.save_checkpoint(path)
    trainer.strategy.teardown()


def save_file_asynchronously(path, value):
    save_file(path, value, [AsyncCheckpointIO()])


def save_file_before_fit(path, value):
    save_file(path, value, connect=True)


def save_shards(path, value):
    module = new_module(value)
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(content)
    path.parent.mkdir(exist_ok=True)
    write_sharded_checkpoint("test", path, {"pytorch-lightning_version": pl.__version__, **content})


def save_in_two_steps(save, path, value):
    """As on a file system that cannot exchange two names."""
    files.exchange_names = checkpoints.exchange_names = lambda first, second: False
    save(path, value)


def shards_in_two_steps(path, value):
    save_in_two_steps(save_shards, path, value)


def file_in_two_steps(path, value):
    save_in_two_steps(save_file, path, value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (save_file, save_file),
        (save_file, save_file_asynchronously),
        (save_file, save_file_before_fit),
        pytest.param(save_shards, save_shards, marks=needs_shards),
        pytest.param(save_file, save_shards, marks=needs_shards),
        pytest.param(save_shards, save_file, marks=needs_shards),
        pytest.param(file_in_two_steps, shards_in_two_steps, marks=needs_shards),
        pytest.param(shards_in_two_steps, file_in_two_steps, marks=needs_shards),
    ],
)
def test_a_checkpoint_that_replaces_another_one(first, then, run_alone, tmp_path):
    """The name always has a checkpoint, the old or the new one, which can be loaded."""
    before, folder = tmp_path / "before", tmp_path / "folder"
    run_alone(call, first, before / "last.ckpt", 1.0)
    found = []
    for kill in killed_everywhere(
        then, folder / "last.ckpt", 2.0, folder=folder, before=before, processes=tmp_path / "processes"
    ):
        assert is_checkpoint(folder / "last.ckpt"), kill
        assert find_damage(folder / "last.ckpt") is None, kill
        found.append(value_of(folder / "last.ckpt"))
    assert found == sorted(found)
    assert found[0] == 1.0
    assert found[-1] == 2.0
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def call(rank, world_size, function, *args):
    function(*args)
