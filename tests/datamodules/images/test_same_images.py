"""Processes of a machine share the list of images; all must have the same, also when they continue a run."""

import os
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch.distributed as dist

from lightning_retrieval.datamodules import ImageFolder
from tests.datamodules.images.pictures import TINY
from tests.datamodules.images.shared_run import FLAGS, Recorder, train
from tests.datamodules.trees_more import write_folders

LIST = ["images/ends", "images/labels", "images/name_ends", "images/names", "images/paths"]
ORDER = ["classes/class_labels", "classes/class_sizes", "classes/images", "classes/num_classes"]


@pytest.fixture
def root(tmp_path):
    """Eight classes of three images, four of them for training."""
    write_folders(tmp_path / "photos", [f"class {number}" for number in range(8)])
    return tmp_path / "photos"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_two_processes_with_two_workers_each_share_one_list(root, tmp_path, run_processes, start_method):
    notes = tmp_path / "notes"
    notes.mkdir()
    (alone,) = run_processes(train_alone, 1, str(root), str(notes), backend=None)
    assert alone["mapped"] == []
    for note in notes.iterdir():
        note.unlink()
    results = run_processes(train_in_processes, 2, str(root), str(notes), start_method, backend=None)
    joined = []
    for of_rank_0, of_rank_1 in zip(results[0]["batches"], results[1]["batches"], strict=True):
        joined.append(tuple(first + second for first, second in zip(of_rank_0, of_rank_1, strict=True)))
    assert joined == alone["batches"]
    assert [result["reads"] for result in results] == [1, 0]
    for result in results:
        assert result["draws"] == [0, 1]  # one draw an epoch, whatever the number of workers
        assert result["mapped"] == ORDER + LIST
        of_workers = [path for path in notes.glob(f"{result['process']}-*") if path.is_file()]
        assert len(of_workers) == 2
        for path in of_workers:
            assert set(LIST) <= set(path.read_text().split())
    (folder,) = notes.glob("lightning-retrieval-*")
    assert os.listdir(folder) == ["lock"]


def train_in_processes(rank, world_size, root, notes, start_method):
    result = train(root, notes, shared=True, workers=2, start_method=start_method, strategy="ddp", devices=world_size)
    dist.destroy_process_group()
    return result


def train_alone(rank, world_size, root, notes):
    return train(root, notes, shared=False)


def settings(**others):
    return {"train_transform": TINY, "eval_transform": TINY, "classes_per_batch": 2, "samples_per_class": 2, **others}


def errors_without_a_folder(rank, world_size, root):
    """Only rank 1 cannot read its folder."""
    data = ImageFolder(root if rank == 0 else f"{root}/missing", **settings())
    with pytest.raises(FileNotFoundError) as caught:
        pl.Trainer(**FLAGS, strategy="ddp", devices=world_size).fit(Recorder(), datamodule=data)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.slow
def test_all_processes_raise_if_one_cannot_read_the_list(root, run_processes):
    first, second = run_processes(errors_without_a_folder, 2, str(root), backend=None)
    assert first == second
    assert first.startswith("ImageFolder: `root` must be a folder of class folders, got ")
