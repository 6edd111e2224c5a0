"""The test set before training: the weights of the untrained network are kept, and evaluated when training has begun.

So that a run begins with training, its first epoch comes before the evaluation of the network that it began with.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.evaluation_sets import EvaluationSet, batches_on_device, limited_length
from lightning_retrieval.compiled import plain_name, uncompiled
from lightning_retrieval.models import Embedder
from lightning_retrieval.models.retrieval_network import evaluation_mode
from lightning_retrieval.models.whitening import Whitening


class UntrainedNetwork:
    """What training changes in a module, as it is now, and the test loaders with which it is evaluated later.

    Args:
        module: the module at the start of a run.
        loaders: the test loader or loaders.

    Cost:
        Main memory for the trained parameters and all buffers and, in `restored`, as much again.
    """

    def __init__(self, module: pl.LightningModule, loaders: Any) -> None:
        self.loaders = loaders
        self._module: Any = module
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._names = set(map(plain_name, [*trained, *dict(module.named_buffers())]))
        self._values = self._copies()
        self._whitening = _learned_whitening(module)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which the module is the untrained one again."""
        trained, whitening = self._copies(), _learned_whitening(self._module)
        self._set(self._values, self._whitening)
        try:
            yield
        finally:
            self._set(trained, whitening)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are kept, by names that do not depend on how the network is compiled."""
        for name, tensor in itertools.chain(self._module.named_parameters(), self._module.named_buffers()):
            if plain_name(name) in self._names:
                yield plain_name(name), tensor

    def _copies(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors()}

    def _set(self, values: Mapping[str, Tensor], whitening: Any) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(values[name])
        if isinstance(getattr(self._module, "whitening", None), Whitening):
            self._module.whitening.learned = whitening


def _learned_whitening(module: Any) -> Any:
    """What the whitening of a module has learned; None if it has learned nothing, or there is none."""
    return getattr(getattr(module, "whitening", None), "learned", None)


def has_backbone_to_evaluate(module: Any) -> bool:
    """Whether the pooled features of a module's backbone can be evaluated without its new head."""
    has_one_network = getattr(module, "query_embedder", None) is None
    # A learned whitening does not fit the pooled features, which have another dimension or distribution.
    is_embedder = isinstance(getattr(module, "embedder", None), Embedder)
    return is_embedder and has_one_network and _learned_whitening(module) is None


def collect_test_set(
    trainer: pl.Trainer, pl_module: pl.LightningModule, of_network: EvaluationSet, of_backbone: EvaluationSet | None
) -> None:
    """Call `test_step` with each batch of a test set, as the Trainer's test loop does, and collect the outputs.

    Args:
        trainer: the Trainer whose precision, device and `limit_test_batches` are used.
        pl_module: the module to evaluate; its state is not changed.
        of_network: collects the outputs of the network.
        of_backbone: collects the pooled features of the backbone, which run once for both; None to skip them.
    """
    owner, loader = type(pl_module).__name__, of_network.loader
    limit = limited_length(loader, trainer.limit_test_batches)
    batches = batches_on_device(trainer, loader, f"{of_network.prefix} before training", limit)
    step_context = trainer.precision_plugin.test_step_context()
    with evaluation_mode(pl_module), torch.no_grad(), uncompiled(pl_module), step_context:
        for batch_idx, batch in enumerate(batches):
            if of_backbone is None:
                of_network.add(owner, pl_module.test_step(batch, batch_idx))
                continue
            embedder: Any = pl_module.embedder
            with embedder.recorded_features() as features:
                of_network.add(owner, pl_module.test_step(batch, batch_idx))
            with embedder.without_head(features):
                of_backbone.add(owner, pl_module.test_step(batch, batch_idx))
