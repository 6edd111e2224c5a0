"""What the commands need of an index, whatever holds its rows."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from lightning_retrieval.search.rows import Rows


@runtime_checkable
class EmbeddingStore(Protocol):
    """Embeddings with ids and paths: add, search, remove, count.

    `RetrievalIndex` keeps them in memory and in a folder, with faiss; `MilvusStore` in a collection of Milvus. Both
    L2-normalise the embeddings and rank by the cosine similarity.
    """

    dim: int
    factory: str
    about: dict[str, Any]
    recall: float | None

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def ids(self) -> Int[Tensor, " rows"]:
        """The ids of all rows, sorted."""

    def add(
        self,
        embeddings: Rows,
        ids: Int[Tensor, " rows"] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        """Add rows; an approximate index measures its `recall` in the first call."""

    def search(
        self, queries: Float[Tensor, "query dim"], k: int
    ) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
        """The cosine similarities and the ids of the k nearest rows of each query, nearest first."""

    def search_with_paths(
        self, queries: Float[Tensor, "query dim"], k: int
    ) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"], list[list[str]]]:
        """The same with the paths of the rows that each query has found, of one state of the index."""

    def remove(self, ids: Int[Tensor, " rows"]) -> None:
        """Remove rows."""

    def paths(self, ids: Int[Tensor, " rows"]) -> list[str]:
        """The paths of rows, "" for rows without one."""

    def set_parameters(self, parameters: str) -> None:
        """Change the parameters of the search."""
