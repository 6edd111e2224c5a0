"""Processes that would continue from different checkpoints raise, all of them."""

import pytest
import torch

from lightning_retrieval.callbacks.csv_logger import SameCheckpoint

OWNER = "fit"


def message_of(checkpoint, stage="fit"):
    """The error of the processes that continue from their checkpoints."""
    try:
        SameCheckpoint(OWNER, checkpoint).setup(None, None, stage)
    except ValueError as error:
        return str(error)
    return "no error"


def in_each_process(rank, world, folder):
    first, second, copy = (folder / name for name in ("1/a.ckpt", "2/a.ckpt", "3/a.ckpt"))
    return {
        "same": message_of(first),
        "copies": message_of([first, copy][rank]),
        "different": message_of([first, second][rank]),
        "on one process": message_of([first, None][rank]),
        "new run": message_of(None),
        "test": message_of([first, second][rank], "test"),
    }


@pytest.mark.distributed
def test_processes_must_find_the_same(run_processes, tmp_path):
    for name, step in {"1": 5, "2": 6, "3": 5}.items():
        (tmp_path / name).mkdir()
        torch.save({"step": torch.tensor([step])}, tmp_path / name / "a.ckpt")
    for found in run_processes(in_each_process, 2, tmp_path):
        assert found["same"] == found["copies"] == found["new run"] == found["test"] == "no error"
        for name, other in {"different": tmp_path / "2/a.ckpt", "on one process": None}.items():
            assert found[name] == (
                "fit: all processes must continue from the same checkpoint, got "
                f"{[str(tmp_path / '1/a.ckpt'), str(other)]} in rank order, which differ; put the folder of the run on "
                "a file system that all machines share."
            )
