"""Layers that a callback of Lightning has unfrozen stay so in a run that is resumed.

`BaseFinetuning` freezes its layers at the start of every run, and unfreezes them at the start of one epoch. A run that
is resumed after that epoch would keep them frozen.
"""

from collections.abc import Collection
from typing import Any

from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

TRAINABLE = "trainable_parameters"  # key of a checkpoint


def has_finetuning(module: Any) -> bool:
    """Whether a LightningModule is in a run with such a callback."""
    if module._trainer is None:
        return False
    return any(isinstance(callback, BaseFinetuning) for callback in module.trainer.callbacks)


def unfreeze(module: Any, trainable: Collection[str]) -> None:
    """Unfreeze the parameters that were trained when a checkpoint was written, if the run has such a callback.

    Args:
        module: a LightningModule.
        trainable: names of these parameters.
    """
    if not has_finetuning(module):
        return
    names = set(trainable)
    for prefix, layer in module.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if name in names and not parameter.requires_grad:
                _make_trainable(layer, parameter)


def _make_trainable(layer: nn.Module, parameter: nn.Parameter) -> None:
    parameter.requires_grad = True
    if isinstance(layer, _BatchNorm):  # freezing it ended its statistics
        layer.track_running_stats = True
