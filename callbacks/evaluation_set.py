"""One evaluation set: collects what the evaluation steps return, and computes its metrics."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.callbacks.loaders import batch_indices
from lightning_retrieval.checks import is_integer
from lightning_retrieval.metrics import EmbeddingMetric
from lightning_retrieval.ranking.roles import Role, has_role

_REQUIRED = {"embeddings", "labels"}


def check_step_outputs(module_name: str, outputs: Any) -> None:
    """Raise unless an evaluation step has returned embeddings and labels, and integers as roles."""
    if not isinstance(outputs, Mapping) or not set(outputs) >= _REQUIRED:
        received = type(outputs).__name__
        if isinstance(outputs, Mapping):
            received = f"the keys {sorted(outputs)}"
        raise TypeError(
            f"RetrievalEvaluation: {module_name}'s validation and test steps must return a dict with embeddings and "
            f"labels, and optionally ids, got {received}; the steps of RetrievalModule do."
        )
    roles = outputs.get("roles")
    if roles is None or (isinstance(roles, Tensor) and is_integer(roles)):
        return
    received = type(roles).__name__
    if isinstance(roles, Tensor):
        received = str(roles.dtype)
    raise TypeError(
        f"RetrievalEvaluation: the `roles` that {module_name}'s steps return must be a tensor of integers (1 query, 2 "
        f"gallery, 3 both), got {received}."
    )


class EvaluationSet:
    """An evaluation set with its metric, which collects the embeddings batch by batch.

    Args:
        prefix: of the names of the set's metrics, such as `val/` or `test/small/`.
        loader: the data loader of the set.
        metrics: the metric that collects the embeddings.
    """

    def __init__(self, prefix: str, loader: Any, metrics: EmbeddingMetric) -> None:
        self.prefix = prefix
        self.loader = loader
        self.metrics = metrics
        self._batch_indices = batch_indices(loader)

    @property
    def dataset(self) -> Any:
        """The data set of the loader, or None if the loader has none."""
        return getattr(self.loader, "dataset", None)

    def add(self, module_name: str, outputs: Any) -> None:
        """Add what an evaluation step has returned for one batch.

        Args:
            module_name: name of the module's class, for error messages.
            outputs: what the step returned.

        Raises:
            TypeError: if the outputs are not what `RetrievalEvaluation` expects. With several processes the error is
                raised later, on all of them, when the metrics are computed; otherwise the others would wait forever.
        """
        indices = None
        if self._batch_indices is not None:
            indices = next(self._batch_indices)
        try:
            check_step_outputs(module_name, outputs)
        except TypeError as error:
            if not self.metrics.must_defer_errors:
                raise
            self.metrics.defer_error(str(error))
            return
        embeddings = outputs["embeddings"]
        ids = outputs.get("ids")
        if ids is None and indices is not None:
            ids = torch.tensor(indices, device=embeddings.device)
        roles = outputs.get("roles")
        masks = {}
        if roles is not None:
            masks = {"is_query": has_role(roles, Role.QUERY), "is_gallery": has_role(roles, Role.GALLERY)}
        optional = {name: outputs.get(name) for name in ("instances", "cameras")}
        self.metrics.update(embeddings, outputs["labels"], ids, **masks, **optional)

    def compute(self) -> dict[str, Tensor]:
        """Compute the metrics, under their names with the prefix."""
        with warnings.catch_warnings():
            # A process that has read no batch of this set still takes part in the computation.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
            values = self.metrics.compute()
        return {f"{self.prefix}{name}": value for name, value in values.items()}
