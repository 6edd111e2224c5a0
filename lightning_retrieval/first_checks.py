"""Checks of the files that a user gives to a command. No torch is imported, so that they are made first."""

import os
from pathlib import Path

from lightning_retrieval.invalid import MissingFile

FILE_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".pth.tar")
RULE_OF_CHECKPOINT = "must be a checkpoint that training wrote, or the folder of its runs"


def check_model_exists(checkpoint: Path) -> None:
    """Raise unless there is a file or a folder."""
    if not (checkpoint.is_file() or checkpoint.is_dir()):
        got = f"{checkpoint}, which does not exist"
        raise MissingFile(RULE_OF_CHECKPOINT, argument="checkpoint", got=got)


def is_local_file(weights: str | None) -> bool:
    """Whether `weights` is the path of an existing file, or a path with the suffix of a file of weights."""
    if not isinstance(weights, str):
        return False
    return weights.endswith(FILE_SUFFIXES) or os.path.isfile(os.path.expanduser(weights))


def check_weights_exist(weights: Path) -> None:
    """Raise unless there is a file of weights."""
    if not weights.is_file():
        raise MissingFile("must be a file of weights", argument="weights", got=f"{weights}, which is not a file")


def check_images_exist(folder: Path) -> None:
    """Raise unless there is a folder of images."""
    if not folder.is_dir():
        raise MissingFile("must be a folder of images", argument="images", got=f"{folder}, which is not a folder")
