"""All processes of a run must have the same list of images, also when they continue it."""

import shutil

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_retrieval.datamodules import ImageFolder
from tests.datamodules.pictures import TINY
from tests.datamodules.trees_more import write_folders
from tests.quiet_trainer import quiet_trainer

FLAGS = {"max_epochs": 2, "limit_val_batches": 0}


class Recorder(pl.LightningModule):
    """Records the ids of its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch["ids"].tolist())
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def root(tmp_path):
    """Eight classes of three images, four of them for training."""
    write_folders(tmp_path / "photos", [f"class {number}" for number in range(8)])
    return tmp_path / "photos"


def settings(**others):
    return {"train_transform": TINY, "eval_transform": TINY, "classes_per_batch": 2, "samples_per_class": 2, **others}


def checkpoint_of_one_epoch(root, path, **others):
    trainer = quiet_trainer(**{**FLAGS, "max_epochs": 1})
    trainer.fit(Recorder(), datamodule=ImageFolder(root, **settings(**others)))
    trainer.save_checkpoint(path)
    return path


def continued(root, checkpoint, **others):
    module = Recorder()
    data = ImageFolder(root, **settings(**others))
    quiet_trainer(**FLAGS).fit(module, datamodule=data, ckpt_path=checkpoint)
    return module.batches


def add_an_image(root):
    folder = first_training_class(root)
    shutil.copy(next(folder.iterdir()), folder / "new.png")


def rename_an_image(root):
    file = next(first_training_class(root).iterdir())
    file.rename(file.with_stem("renamed"))


def first_training_class(root):
    return root / next(iter(ImageFolder(root, **settings()).splits["train"].names))


def test_a_run_continues_with_the_same_list_elsewhere(root, tmp_path):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    expected = continued(root, checkpoint)
    assert len(expected) > 0
    root.rename(tmp_path / "moved")
    assert continued(tmp_path / "moved", checkpoint) == expected


@pytest.mark.parametrize(
    ("change", "others", "found"),
    [
        (add_an_image, {}, "got 13 instead of 12"),
        (rename_an_image, {}, "got as many, 12, with other"),
        (lambda root: None, {"split_seed": 1}, "got as many, 12, with other"),
    ],
)
def test_a_run_does_not_continue_with_another_list(root, tmp_path, change, others, found):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    change(root)
    with pytest.raises(ValueError, match=f"^ImageFolder: a run must continue with the training images .*, {found}"):
        continued(root, checkpoint, **others)


def test_a_checkpoint_may_be_tested_on_other_images(root, tmp_path):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    add_an_image(root)
    data = ImageFolder(root, **settings())
    trainer = quiet_trainer(**{**FLAGS, "limit_val_batches": 1})
    module = WithTest()
    trainer.test(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
    assert module.tested
    trainer.save_checkpoint(tmp_path / "of test.ckpt")  # has no training images to compare


class WithTest(Recorder):
    tested = False

    def test_step(self, batch, batch_idx):
        self.tested = True


def messages_of_rank(rank, world_size, roots, checkpoint):
    """The errors of runs in which rank 1 has the folder of rank 0, another one, or none; all processes get past it."""
    found = []
    for root in (roots[0], roots[rank], f"{roots[0]}/missing" if rank == 1 else roots[0]):
        data = ImageFolder(root, **settings())
        trainer = quiet_trainer(**FLAGS, strategy="ddp", devices=world_size)
        try:
            trainer.fit(Recorder(), datamodule=data, ckpt_path=checkpoint)
        except (ValueError, FileNotFoundError) as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_all_processes_raise_if_the_list_changed_differs_or_cannot_be_read(root, tmp_path, run_processes):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    shutil.copytree(root, tmp_path / "copy")
    add_an_image(root)
    roots = [str(root), str(tmp_path / "copy")]
    first, second = run_processes(messages_of_rank, 2, roots, str(checkpoint), backend=None)
    assert first == second
    changed, differ, missing = first
    assert "must continue with the training images that it began with, got 13 instead of 12" in changed
    assert differ.startswith("ImageFolder: all processes must have the same images with the same labels, got another")
    assert "'train' on rank 1 (12 images) than on rank 0 (13 images)" in differ
    assert missing.startswith("ImageFolder: `root` must be a folder of class folders, got ")


def error_of_rank_0(rank, world_size, root):
    """What a Trainer calls in two processes, of which only the first prepares the data, and cannot read them."""
    data = ImageFolder(f"{root}/missing" if rank == 0 else root, **settings())
    data.trainer = quiet_trainer(**FLAGS)
    if rank == 0:
        data.prepare_data()
    with pytest.raises(FileNotFoundError) as caught:
        data.setup("fit")
    return str(caught.value)


def test_no_process_waits_for_one_that_cannot_prepare_the_data(root, run_processes):
    first, second = run_processes(error_of_rank_0, 2, str(root), timeout=60)
    assert first == second
    assert first.startswith("ImageFolder: `root` must be a folder of class folders, got ")
