"""All processes of a run must have the same list of images, also when they continue it."""

import shutil

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_retrieval.datamodules import ImageFolder
from tests.datamodules.trees_more import QUICK, write_folders
from tests.quiet_trainer import quiet_trainer

FLAGS = {"max_epochs": 2, "limit_val_batches": 0}


class Recorder(pl.LightningModule):
    """Records the ids of its batches."""

    tested = False

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch["ids"].tolist())
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def test_step(self, batch, batch_idx):
        self.tested = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def root(tmp_path):
    """Eight classes of three images, four of them for training."""
    write_folders(tmp_path / "photos", [f"class {number}" for number in range(8)])
    return tmp_path / "photos"


@pytest.fixture
def checkpoint(root, tmp_path):
    """The checkpoint of one epoch."""
    trainer = quiet_trainer(**{**FLAGS, "max_epochs": 1})
    trainer.fit(Recorder(), datamodule=ImageFolder(root, **QUICK))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


def continued(root, checkpoint, **others):
    module = Recorder()
    quiet_trainer(**FLAGS).fit(module, datamodule=ImageFolder(root, **QUICK, **others), ckpt_path=checkpoint)
    return module.batches


def first_training_class(root):
    return root / next(iter(ImageFolder(root, **QUICK).splits["train"].names))


def add_an_image(root):
    folder = first_training_class(root)
    shutil.copy(next(folder.iterdir()), folder / "new.png")


def rename_an_image(root):
    file = next(first_training_class(root).iterdir())
    file.rename(file.with_stem("renamed"))


def test_a_run_continues_with_the_same_list_elsewhere(root, checkpoint, tmp_path):
    expected = continued(root, checkpoint)
    assert len(expected) > 0
    root.rename(tmp_path / "moved")
    assert continued(tmp_path / "moved", checkpoint) == expected


@pytest.mark.parametrize(
    ("change", "others"), [(add_an_image, {}), (rename_an_image, {}), (lambda root: None, {"split_seed": 1})]
)
def test_a_run_does_not_continue_with_another_list(root, checkpoint, change, others):
    change(root)
    with pytest.raises(ValueError, match=r"^ImageFolder: .* training images"):
        continued(root, checkpoint, **others)


def test_a_checkpoint_may_be_tested_on_other_images(root, checkpoint, tmp_path):
    add_an_image(root)
    trainer, module = quiet_trainer(**{**FLAGS, "limit_val_batches": 1}), Recorder()
    trainer.test(module, datamodule=ImageFolder(root, **QUICK), ckpt_path=checkpoint, verbose=False)
    assert module.tested
    trainer.save_checkpoint(tmp_path / "of test.ckpt")  # has no training images to compare


def messages_of_rank(rank, world_size, roots, checkpoint):
    """The errors of runs in which rank 1 has the folder of rank 0, another one, or none; all processes get past it."""
    found = []
    for root in (roots[0], roots[rank], f"{roots[0]}/missing" if rank == 1 else roots[0]):
        data = ImageFolder(root, **QUICK)
        trainer = quiet_trainer(**FLAGS, strategy="ddp", devices=world_size)
        try:
            trainer.fit(Recorder(), datamodule=data, ckpt_path=checkpoint)
        except (ValueError, FileNotFoundError) as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_all_processes_raise_if_the_list_changed_differs_or_cannot_be_read(root, checkpoint, tmp_path, run_processes):
    shutil.copytree(root, tmp_path / "copy")
    add_an_image(root)
    first, second = run_processes(
        messages_of_rank, 2, [str(root), str(tmp_path / "copy")], str(checkpoint), backend=None
    )
    assert first == second
    changed, differ, missing = first
    assert "training images" in changed
    assert "rank 1 (12 images)" in differ
    assert "rank 0 (13 images)" in differ
    assert missing.startswith("ImageFolder: `root` ")


def error_of_rank_0(rank, world_size, root):
    """What a Trainer calls in two processes, of which only the first prepares the data, and cannot read them."""
    data = ImageFolder(f"{root}/missing" if rank == 0 else root, **QUICK)
    data.trainer = quiet_trainer(**FLAGS)
    if rank == 0:
        data.prepare_data()
    with pytest.raises(FileNotFoundError) as caught:
        data.setup("fit")
    return str(caught.value)


def test_no_process_waits_for_one_that_cannot_prepare_the_data(root, run_processes):
    first, second = run_processes(error_of_rank_0, 2, str(root), timeout=60)
    assert first == second
    assert first.startswith("ImageFolder: `root` ")
