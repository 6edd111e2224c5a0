"""A frozen embedder with a new head on its embeddings, as `lightning-retrieval adapt` trains it."""

from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_bool, check_instance, check_integer
from lightning_retrieval.models.embedder import MOST_DIM
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
        TypeError: if `embedder` is not a module, or a dimension is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import AdaptedEmbedder
        >>> AdaptedEmbedder(torch.nn.Linear(8, 6), from_dim=6, embedding_dim=4)(torch.randn(2, 8)).shape
        torch.Size([2, 4])

    Relations:
        `lightning-retrieval adapt` trains the head on embeddings in files, without the images.
    """

    def __init__(
        self, embedder: nn.Module, from_dim: int, embedding_dim: int, *, hidden_dim: int | None = None
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_instance(owner, "embedder", embedder, nn.Module)
        self.from_dim = check_integer(owner, "from_dim", from_dim, 1, MOST_DIM)
        self.embedding_dim = check_integer(owner, "embedding_dim", embedding_dim, 1, MOST_DIM)
        if hidden_dim is not None:
            check_integer(owner, "hidden_dim", hidden_dim, 1, MOST_DIM)
        self.hidden_dim = hidden_dim
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
        super().train(check_bool(type(self).__name__, "mode", mode))
        self.embedder.eval()
        return self

    def merge_lora(self) -> "AdaptedEmbedder":
        """Merge the adapters of the frozen embedder, if there are any; returns itself. See `Embedder.merge_lora`."""
        merge = getattr(self.embedder, "merge_lora", None)
        if merge is not None:
            merge()
        return self

    def extra_repr(self) -> str:
        return f"from_dim={self.from_dim}, embedding_dim={self.embedding_dim}, hidden_dim={self.hidden_dim}"
