"""All processes of a run must have the same list of images, also when they continue it; workers change no batch."""

import shutil
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from lightning_retrieval.datamodules import ImageFolder, PKSampler
from tests.datamodules.pictures import TINY
from tests.datamodules.trees_more import write_folders

FLAGS = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "logger": False,
    "limit_val_batches": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Recorder(pl.LightningModule):
    """Records the ids, the labels and the pixels of its batches."""

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


@pytest.fixture
def root(tmp_path):
    """Eight classes of three images, four of them for training."""
    write_folders(tmp_path / "photos", [f"class {number}" for number in range(8)])
    return tmp_path / "photos"


def train(root, **flags):
    """Train for two epochs with two workers; the batches, and which epochs were drawn in this process."""
    draws = []
    draw = PKSampler.draw

    def counted_draw(sampler, generator):
        draws.append(sampler.epoch)
        yield from draw(sampler, generator)

    module = Recorder()
    with mock.patch.object(PKSampler, "draw", counted_draw):
        data = ImageFolder(root, **settings(classes_per_batch=3, num_workers=2))
        pl.Trainer(**FLAGS, **flags).fit(module, datamodule=data)
    return module.batches, draws


def train_in_processes(rank, world_size, root):
    result = train(root, strategy="ddp", devices=world_size)
    dist.destroy_process_group()
    return result


@pytest.mark.slow
def test_two_processes_with_two_workers_each_read_the_batches_of_one(root, run_processes):
    alone, draws = train(root)
    results = run_processes(train_in_processes, 2, str(root), backend=None)
    joined = []
    for of_rank_0, of_rank_1 in zip(results[0][0], results[1][0], strict=True):
        joined.append(tuple(first + second for first, second in zip(of_rank_0, of_rank_1, strict=True)))
    assert joined == alone
    assert draws == results[0][1] == results[1][1] == [0, 1]  # one draw an epoch, whatever the number of workers


def settings(**others):
    return {"train_transform": TINY, "eval_transform": TINY, "classes_per_batch": 2, "samples_per_class": 2, **others}


def checkpoint_of_one_epoch(root, path, **others):
    trainer = pl.Trainer(**{**FLAGS, "max_epochs": 1})
    trainer.fit(Recorder(), datamodule=ImageFolder(root, **settings(**others)))
    trainer.save_checkpoint(path)
    return path


def continued(root, checkpoint, **others):
    module = Recorder()
    data = ImageFolder(root, **settings(**others))
    pl.Trainer(**FLAGS).fit(module, datamodule=data, ckpt_path=checkpoint)
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
        (add_an_image, {}, r"got 13 instead of 12"),
        (rename_an_image, {}, r"got as many, 12, with other labels or paths or in another order"),
        (lambda root: None, {"val_fraction": 0.25}, r"got 9 instead of 12"),
        (lambda root: None, {"split_seed": 1}, r"got as many, 12, with other labels or paths or in another order"),
    ],
)
def test_a_run_does_not_continue_with_another_list(root, tmp_path, change, others, found):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    change(root)
    sentence = (
        rf"^ImageFolder: a run must continue with the training images that it began with, {found}; restore the list of "
        r"images and the settings that choose from it, or begin a new run with the weights of the checkpoint\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        continued(root, checkpoint, **others)


def test_a_checkpoint_may_be_tested_on_other_images(root, tmp_path):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    add_an_image(root)
    data = ImageFolder(root, **settings())
    trainer = pl.Trainer(**{**FLAGS, "limit_val_batches": 1})
    module = WithTest()
    trainer.test(module, datamodule=data, ckpt_path=checkpoint, verbose=False)
    assert module.tested
    trainer.save_checkpoint(tmp_path / "of test.ckpt")  # has no training images to compare


class WithTest(Recorder):
    tested = False

    def test_step(self, batch, batch_idx):
        self.tested = True


def messages_of_rank(rank, world_size, roots, checkpoint):
    """The errors of a run in which each process has its own folder; all processes get past it."""
    found = []
    for root in (roots[0], roots[rank]):
        data = ImageFolder(root, **settings())
        trainer = pl.Trainer(**FLAGS, strategy="ddp", devices=world_size)
        try:
            trainer.fit(Recorder(), datamodule=data, ckpt_path=checkpoint)
        except (ValueError, FileNotFoundError) as error:
            found.append(str(error))
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_all_processes_refuse_a_list_that_changed_and_lists_that_differ(root, tmp_path, run_processes):
    checkpoint = checkpoint_of_one_epoch(root, tmp_path / "one.ckpt")
    shutil.copytree(root, tmp_path / "copy")
    add_an_image(root)
    roots = [str(root), str(tmp_path / "copy")]
    first, second = run_processes(messages_of_rank, 2, roots, str(checkpoint), backend=None)
    assert first == second
    assert "must continue with the training images that it began with, got 13 instead of 12" in first[0]
    assert first[1] == (
        "ImageFolder: all processes must have the same images with the same labels, got another list 'train' on rank 1 "
        "(12 images) than on rank 0 (13 images); give all machines the same files."
    )


def errors_without_a_folder(rank, world_size, root):
    """The second rank cannot read its folder."""
    data = ImageFolder(f"{root}/missing" if rank == 1 else root, **settings())
    with pytest.raises(FileNotFoundError) as caught:
        pl.Trainer(**FLAGS, strategy="ddp", devices=world_size).fit(Recorder(), datamodule=data)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.slow
def test_all_processes_raise_if_one_cannot_read_the_list(root, run_processes):
    first, second = run_processes(errors_without_a_folder, 2, str(root), backend=None)
    assert first == second
    assert first.startswith("ImageFolder: `root` must be a folder of class folders, got ")


def error_of_rank_0(rank, world_size, root):
    """What a Trainer calls in two processes, of which only the first prepares the data, and cannot read them."""
    data = ImageFolder(f"{root}/missing" if rank == 0 else root, **settings())
    data.trainer = pl.Trainer(**FLAGS)
    if rank == 0:
        data.prepare_data()
    with pytest.raises(FileNotFoundError) as caught:
        data.setup("fit")
    return str(caught.value)


def test_no_process_waits_for_one_that_cannot_prepare_the_data(root, run_processes):
    first, second = run_processes(error_of_rank_0, 2, str(root), timeout=60)
    assert first == second
    assert first.startswith("ImageFolder: `root` must be a folder of class folders, got ")
    data = ImageFolder(root / "missing", **settings())
    data.trainer = pl.Trainer(**FLAGS)
    with pytest.raises(FileNotFoundError):
        data.prepare_data()
