"""Checks of files of weights and folders of images that a user gives."""

import os
from pathlib import Path

from lightning_retrieval.invalid import MissingFile
from lightning_retrieval.paths import check_path, cure_of_missing

FILE_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".pth.tar")


def is_local_file(weights: str | None) -> bool:
    """Whether `weights` is the path of an existing file, or a path with the suffix of a file of weights."""
    if not isinstance(weights, str):
        return False
    return weights.endswith(FILE_SUFFIXES) or os.path.isfile(os.path.expanduser(weights))


def check_weights_exist(weights: Path) -> None:
    """Raise unless there is a file of weights."""
    if not weights.is_file():
        got, cure = f"{weights}, which is not a file", cure_of_missing(weights)
        raise MissingFile("must be a file of weights", argument="weights", got=got, cure=cure)


def folder_of_images(images: Path) -> Path:
    """The path of a folder of images; raises unless there is a folder."""
    folder = check_path("images", images, exists=True)
    if not folder.is_dir():
        raise MissingFile("must be a folder of images", argument="images", got=f"{folder}, which is a file")
    return folder
