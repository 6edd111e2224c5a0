"""Cosine similarity: embeddings are normalised only here."""

from jaxtyping import Float
from torch import Tensor, finfo, float32, promote_types
from torch.linalg import vector_norm


def normalize(embeddings: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """L2-normalise the rows, in float32 or better.

    A row of zeros stays zero and gets a finite gradient; a row too large or too small for its squares to be
    represented is scaled first, which changes neither the result nor its gradient.

    Args:
        embeddings: one row for each item. Half precision is widened to float32.

    Example:
        >>> import torch
        >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e30, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000],
                [1.0000, 0.0000]])
    """
    x = embeddings.to(promote_types(embeddings.dtype, float32))
    largest = x.detach().abs().amax(dim=1, keepdim=True)
    x = x / largest.masked_fill(largest < finfo(x.dtype).tiny, 1.0)
    norm = vector_norm(x, dim=1, keepdim=True)
    unit: Tensor = x / norm.masked_fill(norm == 0, 1.0)
    return unit
