"""The interface that a training step expects of every loss, whether of this library or of another."""

import inspect
from typing import Any

from torch import Tensor, nn

from lightning_retrieval.losses.ranked_batch import QueryRange, RankedBatch


class BatchLoss(nn.Module):
    """A loss of a whole batch: what `RetrievalLoss`, `WeightedSum`, `NestedLoss` and `ThirdPartyLoss` have in common.

    A subclass implements `of_batch`, or overrides `forward` with the same signature. `terms` holds the unweighted terms
    of the latest call by name; it is empty for a loss of one term.
    """

    terms: dict[str, Tensor]

    def __new__(cls, *arguments: Any, **settings: Any) -> Any:
        """Raise a TypeError for `temperature=`, the name in other libraries, that gives this library's name for it."""
        if "temperature" in settings:
            raise TypeError(_temperature_hint(cls))
        return super().__new__(cls)

    def __init__(self) -> None:
        super().__init__()
        self.terms = {}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        ref_ids: Tensor | None = None,
        queries: QueryRange | None = None,
    ) -> Any:
        """The value of the loss; arguments as in `RetrievalLoss`."""
        return self.of_batch(RankedBatch(embeddings, labels, ref_emb, ref_labels, ids, ref_ids, queries))

    def of_batch(self, batch: RankedBatch) -> Any:
        """The value of the loss; a tensor, except for losses of other libraries, which may return anything."""
        raise NotImplementedError(f"{type(self).__name__}: a loss must implement `of_batch` or `forward`.")

    @property
    def splits_by_query(self) -> bool:
        """Whether the loss is a sum over queries, so that each process can compute its own range of queries."""
        return True

    @property
    def terms_without_references(self) -> list[str]:
        """Class names of the terms that cannot rank references, and so cannot be used with a memory."""
        return []


def _temperature_hint(cls: type) -> str:
    settings = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    names = [name for name in settings if name.startswith("tau")]
    if not names:
        return f"{cls.__name__}: got `temperature`, but this loss has no temperature; remove the argument."
    listed = " or ".join(f"`{name}`" for name in names)
    return f"{cls.__name__}: got `temperature`, which is called {listed} here, as in the paper; pass {names[0]}=."
