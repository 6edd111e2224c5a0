"""Frozen embedders of earlier runs: as they are, for the candidates of an index, or with a new head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.arguments import checked, settings_repr
from lightning_retrieval.checkpoints import check_checkpoint, read_checkpoint
from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.compiled import plain_state, without_wrappers
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.models.embedder import Dim
from lightning_retrieval.models.pretrained import is_rebuilding, without_pretrained_weights
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data import IN_PYTHON, describe, rebuild
from lightning_retrieval.preparation.of_model import wanted_settings
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.ranking.rows import normalize


class Head(nn.Module):
    """The linear map W x, or with a hidden layer W x + V gelu(U x + b); its result is L2-normalised.

    Args:
        from_dim: dimension of x.
        dim: dimension of the result.
        hidden_dim: number of hidden units; None for the linear map alone.
    """

    def __init__(self, from_dim: int, dim: int, hidden_dim: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(from_dim, dim, bias=False)
        self.hidden: nn.Module | None = None
        if hidden_dim is not None:
            last = nn.Linear(hidden_dim, dim, bias=False)
            nn.init.zeros_(last.weight)  # training starts with the linear map
            self.hidden = nn.Sequential(nn.Linear(from_dim, hidden_dim), nn.GELU(), last)

    def forward(self, embeddings: Float[Tensor, "batch from_dim"]) -> Float[Tensor, "batch dim"]:
        """The new embeddings."""
        mapped: Tensor = self.linear(embeddings)
        if self.hidden is not None:
            mapped = mapped + self.hidden(embeddings)
        return normalize(mapped)


class AdaptedEmbedder(nn.Module):
    """Maps images to embeddings with a frozen embedder and a head on the embeddings of that embedder.

    Args:
        embedder: maps images to embeddings. It stays in evaluation mode, and its parameters are not trained.
        from_dim: dimension of the embeddings of `embedder`.
        embedding_dim: dimension of the new embeddings.
        hidden_dim: number of hidden units of the head; None for a linear head.

    Raises:
        ValueError: if a dimension is not from 1 to 2^20.
        TypeError: if a dimension is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import AdaptedEmbedder
        >>> AdaptedEmbedder(torch.nn.Linear(8, 6), from_dim=6, embedding_dim=4)(torch.randn(2, 8)).shape
        torch.Size([2, 4])

    Relations:
        `lightning-retrieval adapt` trains the head on embeddings in files, without the images.
    """

    def __init__(
        self, embedder: nn.Module, from_dim: Dim, embedding_dim: Dim, *, hidden_dim: Dim | None = None
    ) -> None:
        super().__init__()
        embedder = without_wrappers(embedder)
        self.from_dim = checked(self, from_dim=from_dim)
        self.embedding_dim = checked(self, embedding_dim=embedding_dim)
        self.hidden_dim = checked(self, hidden_dim=hidden_dim)
        self.embedder = embedder.requires_grad_(False).eval()
        self.head = Head(from_dim, embedding_dim, hidden_dim)

    @property
    def preparation(self) -> Preparation | None:
        """The preparation of images that the frozen embedder wants; None if it does not have one."""
        return getattr(self.embedder, "preparation", None)

    def forward(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Embed a batch.

        Args:
            images: images as the frozen embedder expects them.
        """
        embeddings: Tensor = self.head(self.embedder(images))
        return embeddings

    def train(self, mode: bool = True) -> "AdaptedEmbedder":
        """Set the training mode of the head; the frozen embedder stays in evaluation mode."""
        super().train(mode)
        self.embedder.eval()
        return self

    def merge_lora(self) -> "AdaptedEmbedder":
        """Merge the adapters of the frozen embedder, if there are any; returns itself. See `Embedder.merge_lora`."""
        merge = getattr(self.embedder, "merge_lora", None)
        if merge is not None:
            merge()
        return self

    def extra_repr(self) -> str:
        return settings_repr(self)


class FrozenEmbedder(nn.Module):
    """The embedder of a trained module, which embeds candidates while the network of queries is trained.

    It stays in evaluation mode and is not trained, so an index of its embeddings stays valid. A checkpoint holds its
    description and its weights, and needs `checkpoint` no longer.

    Args:
        embedder: maps images to embeddings; None to read it from `checkpoint`.
        checkpoint: checkpoint of a `RetrievalModule`, whose `embedder` is used.
        preparation: the preparation of images for `embedder`, or its settings; with `checkpoint`, the preparation in
            which the module was evaluated is used. If None, the preparation that the embedder wants.

    Raises:
        FileNotFoundError: if the checkpoint does not exist.
        ValueError: if not exactly one of `embedder` and `checkpoint` is given; if the checkpoint is damaged or cannot
            be rebuilt, or its embeddings depend on more than the embedder, such as a whitening.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import FrozenEmbedder
        >>> frozen = FrozenEmbedder(torch.nn.Linear(8, 6)).train()
        >>> frozen.embedder.training, any(value.requires_grad for value in frozen.parameters())
        (False, False)

    Relations:
        `RetrievalModule(FrozenEmbedder(checkpoint="old.ckpt"), loss, sides=TwoNetworks(...))` trains a network that
        searches the index of old.ckpt. `AdaptedEmbedder` trains a head on a frozen embedder.
    """

    def __init__(
        self,
        embedder: nn.Module | None = None,
        *,
        checkpoint: str | None = None,
        preparation: dict[str, Any] | Preparation | None = None,
    ) -> None:
        super().__init__()
        if (embedder is None) == (checkpoint is None):
            rule = "one of `embedder` and `checkpoint` must be given"
            raise InvalidValue(rule, "FrozenEmbedder", got="neither" if embedder is None else "both")
        if checkpoint is not None:
            if is_rebuilding():
                rule = "must not be set in a file, since a file may not choose what is read"
                raise InvalidValue(rule, "FrozenEmbedder", "checkpoint", got=short_repr(checkpoint), cure=IN_PYTHON)
            with owned_by("FrozenEmbedder"):
                embedder, recorded = embedder_of_checkpoint(check_path("checkpoint", checkpoint, exists=True))
            if preparation is None:
                preparation = recorded
        embedder = without_wrappers(embedder)
        self.preparation: Preparation | None = getattr(embedder, "preparation", None)
        if isinstance(embedder, FrozenEmbedder):  # a frozen embedder of a frozen embedder is the inner one
            embedder = embedder.embedder
        self.embedder: nn.Module = embedder.requires_grad_(False).eval()
        if preparation is not None:
            with owned_by("FrozenEmbedder"):
                self.preparation = Preparation(**wanted_settings(preparation))

    def forward(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Embed a batch.

        Args:
            images: images as the embedder expects them.
        """
        embeddings: Tensor = self.embedder(images)
        return embeddings

    def train(self, mode: bool = True) -> "FrozenEmbedder":
        """Set `training` of this module; the embedder stays in evaluation mode."""
        super().train(mode)
        self.embedder.eval()
        return self

    def init_args(self) -> dict[str, Any] | None:
        """The constructor's arguments as plain values, without a path; None if the embedder cannot be described."""
        described = describe(self.embedder)
        if described["init_args"] is None:
            return None
        preparation = None
        if self.preparation is not None:
            preparation = self.preparation.as_dict()
        return {"embedder": described, "preparation": preparation}


def embedder_of_checkpoint(checkpoint: Path) -> tuple[nn.Module, dict[str, Any] | None]:
    """Rebuild the embedder of a checkpoint with its weights.

    Args:
        checkpoint: checkpoint of a `RetrievalModule`.

    Returns:
        The embedder, and the settings of the preparation of its evaluation, None if they are not recorded.

    Raises:
        ValueError: if the file is damaged or cannot be rebuilt, or the embeddings of the module depend on more than its
            embedder.
    """
    check_checkpoint(checkpoint)
    rule = "must be one of a RetrievalModule whose `embedder` can be rebuilt"
    try:
        saved = read_checkpoint(checkpoint)
        settings = saved["hyper_parameters"]
        weights = plain_state(saved["state_dict"])
        state = {name: value for name, value in weights.items() if name.startswith("embedder.")}
        with without_pretrained_weights():
            embedder = rebuild("embedder", settings["embedder"], nn.Module)
        embedder.load_state_dict({name.removeprefix("embedder."): value for name, value in state.items()})
    except Exception as error:  # unpickling, class paths and constructors raise errors of many types
        raise InvalidValue(rule, argument="checkpoint", got=f"{checkpoint} ({first_line(error)})") from None
    further = _further_parts(settings)
    if further is not None:
        got = f"{checkpoint}, which has {further}"
        cure = "train without it, or index the images again"
        raise InvalidValue(
            "must be one whose embeddings are those of its `embedder`", argument="checkpoint", got=got, cure=cure
        )
    recorded = saved.get("preparation") or {}
    if "preparation" not in recorded and recorded:
        got = f"{checkpoint}, which was evaluated with {short_repr(recorded)}"
        cure = "give the `embedder` of the loaded module"
        raise InvalidValue(
            "must be one that was evaluated with a Preparation", argument="checkpoint", got=got, cure=cure
        )
    return embedder, recorded.get("preparation")


def _further_parts(settings: Mapping[str, Any]) -> str | None:
    """What changes embeddings besides the embedder, according to the hyperparameters of a module."""
    if settings.get("whitening") is not None:
        return "a whitening"
    if list(settings.get("eval_scales", (1,))) != [1]:
        return f"the scales {short_repr(settings['eval_scales'])}"
    path = str(settings.get("_class_path", "lightning_retrieval.RetrievalModule"))
    if not path.startswith("lightning_retrieval."):
        return f"the class {path}"
    return None
