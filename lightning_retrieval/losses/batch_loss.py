"""The interface that a training step expects of every loss, whether of this library or of another."""

import inspect
from typing import Any

from torch import Tensor, nn


class BatchLoss(nn.Module):
    """A loss of a whole batch: what `RetrievalLoss`, `WeightedSum` and `ThirdPartyLoss` have in common.

    Its call signature is `loss(embeddings, labels, ref_emb=None, ref_labels=None, *, ids=None, ref_ids=None,
    queries=None)`. `terms` holds the unweighted terms of the latest call by name; it is empty for a loss of one term.
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
