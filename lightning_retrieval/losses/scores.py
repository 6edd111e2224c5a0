"""The scores of queries and references, computed for some queries at a time, and the gradient that flows back to both.

`Scores` are the cosine similarities of embeddings. `GivenScores` are a matrix, with the masks of its lists.
"""

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from lightning_retrieval.checks import check_float, check_tensor, is_integer
from lightning_retrieval.distributed import size_for
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.ranking.lists import Levels, Lists
from lightning_retrieval.ranking.relevance import Relevance
from lightning_retrieval.ranking.rows import Rows, normalize

# Number of rows, and of columns, of the tiles in which a matrix is transposed.
CPU_TILE = 256
ACCELERATOR_TILE = 4096


class Scores:
    """The cosine similarities of queries and references.

    Args:
        embeddings: one row for each query.
        ref_emb: one row for each reference; None if the queries themselves are the references.

    Attributes:
        given: the tensors that gradients are computed for, by the names of the arguments: rows of length 1.
    """

    def __init__(
        self, embeddings: Float[Tensor, "query dim"], ref_emb: Float[Tensor, "gallery dim"] | None = None
    ) -> None:
        queries = normalize(embeddings)
        references = queries
        self.given = {"embeddings": queries}
        if ref_emb is not None:
            references = normalize(ref_emb).to(queries.dtype)
            self.given["ref_emb"] = references
        self._queries, self._references = queries.detach(), references.detach()

    @property
    def gallery(self) -> int:
        """Number of references."""
        return len(self._references)

    def of(self, rows: Int[Tensor, " block"]) -> Float[Tensor, "block gallery"]:
        """The scores of these queries in a new tensor without a graph; the rows must be in ascending order."""
        queries = self._queries
        if len(rows) != len(queries):  # otherwise rows are all queries
            queries = queries[rows]
        return queries @ self._references.T

    def add_gradient(
        self, rows: Int[Tensor, " block"], gradient: Float[Tensor, "block gallery"], gradients: list[Tensor | None]
    ) -> None:
        """Propagate the gradient of these queries' scores to the tensors in `given`.

        Args:
            rows: as for `of`.
            gradient: may be overwritten.
            gradients: those of the tensors, to which it is added; None for a tensor that needs none.
        """
        of_queries, of_references = gradients[0], gradients[-1]
        in_batch = len(self.given) == 1  # then both gradients are the same tensor
        if in_batch and of_queries is not None and len(rows) == len(self._queries):
            # One product with G + G^T instead of two, with G and with G^T.
            of_queries.addmm_(add_transposed(gradient), self._queries)
            return
        if of_queries is not None:
            of_queries.index_add_(0, rows, gradient @ self._references)
        if of_references is not None:
            of_references.addmm_(gradient.T, self._queries[rows])


def add_transposed(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Add the transposed matrix to a square matrix in place, tile by tile, without a second matrix of its size."""
    size = size_for(matrix.device, cpu=CPU_TILE, accelerator=ACCELERATOR_TILE)
    for i in range(0, len(matrix), size):
        for j in range(0, i, size):
            tile, mirrored = matrix[i : i + size, j : j + size], matrix[j : j + size, i : i + size]
            tile += mirrored.T
            mirrored.copy_(tile.T)
        diagonal = matrix[i : i + size, i : i + size]
        diagonal.copy_(diagonal + diagonal.T)
    return matrix


class GivenScores(Scores):
    """The scores of a matrix.

    Args:
        scores: higher is nearer.
    """

    def __init__(self, scores: Float[Tensor, "query gallery"]) -> None:
        self.given = {"scores": scores.to(torch.promote_types(scores.dtype, torch.float32))}

    @property
    def gallery(self) -> int:
        return self.given["scores"].shape[1]

    def of(self, rows: Tensor) -> Tensor:
        return self.given["scores"].detach()[rows]

    def add_gradient(self, rows: Tensor, gradient: Tensor, gradients: list[Tensor | None]) -> None:
        (of_scores,) = gradients
        if of_scores is not None:
            of_scores.index_add_(0, rows, gradient)


class GivenMasks(Relevance):
    """The rule of relevance of a score matrix, which reads the masks at the number of a query.

    Args:
        relevant: which references are relevant to each query, or their levels of relevance, 0 for not relevant.
        candidate: which references are in each query's list; None for all.
    """

    reads = ("number",)
    has_classes = False

    def __init__(self, relevant: Levels, candidate: Bool[Tensor, "query gallery"] | None) -> None:
        self.relevant, self.candidate = relevant, candidate

    def lists(self, queries: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
        """The masks of these queries; the references are always all columns of the matrix."""
        relevant = self.relevant[queries[:, 0]]
        if self.candidate is None:
            return relevant, torch.ones_like(relevant, dtype=torch.bool)
        candidate = self.candidate[queries[:, 0]]
        return relevant * candidate, candidate

    masks = lists  # abstract in the base class, whose `lists` refuses levels of relevance


def lists_of_masks(relevant: Levels, candidate: Bool[Tensor, "query gallery"] | None) -> Lists:
    """The lists of a score matrix; for the arguments, see `GivenMasks`."""
    queries, references = (Rows(torch.arange(size, device=relevant.device)) for size in relevant.shape)
    return Lists(queries, references, GivenMasks(relevant, candidate))


def check_score_matrix(
    scores: Float[Tensor, "query gallery"],
    relevant: Bool[Tensor, "query gallery"] | Integer[Tensor, "query gallery"],
    candidate: Bool[Tensor, "query gallery"] | None = None,
    *,
    graded: bool = False,
) -> None:
    """Raise unless a score matrix and its masks have matching shapes and types.

    Args:
        scores: higher is nearer.
        relevant: as for `GivenMasks`; levels if `graded`.
        candidate: as for `GivenMasks`.
        graded: whether `relevant` holds levels.
    """
    check_float("scores", scores)
    if scores.ndim != 2 or len(scores) == 0:
        raise InvalidValue("must have shape (Q, R) with Q > 0", argument="scores", got=tuple(scores.shape))
    masks = {"relevant": relevant}
    if candidate is not None:
        masks["candidate"] = candidate
    for name, mask in masks.items():
        check_tensor(name, mask)
        if mask.shape != scores.shape:
            rule = f"must have the shape of `scores` {tuple(scores.shape)}"
            raise InvalidValue(rule, argument=name, got=tuple(mask.shape))
        has_levels = graded and name == "relevant"
        if has_levels and not is_integer(mask):
            raise InvalidType("must be integer levels, 0 for not relevant", argument=name, got=mask.dtype)
        if has_levels and bool((mask < 0).any()):
            raise InvalidValue("must be levels >= 0", argument=name, got=int(mask.min()))
        if not has_levels and mask.dtype != torch.bool:
            raise InvalidType("must be bool", argument=name, got=mask.dtype)
