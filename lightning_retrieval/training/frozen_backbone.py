"""The backbone of an embedder stays as it is in the first epochs, while the new head learns."""

from typing import Any

from torch import nn

from lightning_retrieval.checks import check_integer
from lightning_retrieval.training.full_sharding import sharded_modules


def check_backbone(owner: str, name: str, embedder: nn.Module) -> nn.Module:
    """The backbone of an embedder; raise if it has none.

    Args:
        owner: prefix of error messages.
        name: the argument that needs it.
        embedder: any module.
    """
    backbone = getattr(embedder, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise ValueError(
            f"{owner}: `{name}` needs an embedder with a `backbone`, such as Embedder, got {type(embedder).__name__}."
        )
    return backbone


class FrozenBackbone:
    """Freezes the trainable parameters of a backbone in the first epochs of a run, and trains them afterwards.

    They are in the optimizer from the start: without a gradient they are not stepped. So a resumed run has the same
    optimizer, whether it begins before or after the end of the freezing.

    Args:
        owner: prefix of error messages.
        embedder: with a `backbone`, if `epochs` > 0.
        epochs: number of first epochs, >= 0.
    """

    def __init__(self, owner: str, embedder: nn.Module, epochs: int) -> None:
        self.epochs = check_integer(owner, "freeze_backbone_epochs", epochs, least=0)
        if self.epochs > 0:
            check_backbone(owner, "freeze_backbone_epochs", embedder)
        self.names: list[str] = []  # of the parameters that are frozen at present

    def set_epoch(self, embedder: Any, epoch: int) -> None:
        """Freeze the backbone, or let it train again, as an epoch of this number needs.

        Args:
            embedder: with the backbone.
            epoch: from 0.
        """
        if self.epochs == 0:
            return
        sharded_modules(embedder)
        parameters = dict(embedder.backbone.named_parameters())
        if epoch < self.epochs:
            self.names += [name for name, parameter in parameters.items() if parameter.requires_grad]
        for name in self.names:
            parameters[name].requires_grad = epoch >= self.epochs
        if epoch >= self.epochs:
            self.names = []
