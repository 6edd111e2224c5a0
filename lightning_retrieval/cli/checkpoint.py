"""Load the module of a checkpoint for embedding, without the pretrained weights that its training began with."""

from pathlib import Path

import torch

from lightning_retrieval.checks import first_line
from lightning_retrieval.training.checkpoint_files import find_damage
from lightning_retrieval.training.checkpointed_module import restored_module
from lightning_retrieval.training.module import RetrievalModule


def load_checkpoint(owner: str, checkpoint: Path) -> RetrievalModule:
    """Load a module on the CPU.

    Args:
        owner: prefix of error messages.
        checkpoint: the file. Its classes are rebuilt from plain values; nothing is unpickled that could run code.

    Returns:
        The module, whose `preparation` is what its evaluation did to an image, None if the checkpoint does not say it.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, or is not the checkpoint of a `RetrievalModule` that can be rebuilt.
    """
    if not checkpoint.is_file():
        reason = "is a folder" if checkpoint.is_dir() else "does not exist"
        raise FileNotFoundError(
            f"{owner}: `checkpoint` must be a file that training wrote, got {checkpoint}, which {reason}."
        )
    damage = find_damage(checkpoint)
    if damage is not None:
        raise ValueError(
            f"{owner}: `checkpoint` must be the checkpoint of a RetrievalModule that can be rebuilt from it, got "
            f"{checkpoint}, which is damaged: {damage}."
        )
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        module: RetrievalModule = restored_module(RetrievalModule, saved)
    except Exception as error:  # unpickling, class paths and constructors raise errors of many kinds
        raise ValueError(
            f"{owner}: `checkpoint` must be the checkpoint of a RetrievalModule that can be rebuilt from it, got "
            f"{checkpoint} ({first_line(error)})."
        ) from None
    return module
