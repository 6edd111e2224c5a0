"""The networks of a `RetrievalModule`, which embed in evaluation without Lightning."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_retrieval.arguments import checked
from lightning_retrieval.invalid import owned_by
from lightning_retrieval.models.multi_scale import SCALE_POOLING, check_scales, multi_scale
from lightning_retrieval.models.sides import Side, TwoSides, side_of_module
from lightning_retrieval.models.whitening import Whitening
from lightning_retrieval.plain_data.rebuild import rebuild


def normalized_inputs(module: Any, side: Side, inputs: Tensor) -> Tensor:
    """Images of uint8, normalised as one side of a module was evaluated; all other inputs do not change.

    Args:
        module: a `RetrievalModule` or a `RetrievalNetwork`. The normalised images have its `dtype`.
        side: the side.
        inputs: images or tokens.
    """
    if inputs.dtype != torch.uint8:
        return inputs
    preparation = side_of_module(module, side).preparation
    if preparation is None:
        return inputs
    return preparation.normalize(inputs).to(module.dtype)


def embed_at_scales(module: Any, embed: Callable[[Tensor], Tensor], inputs: Tensor, whiten: bool = True) -> Tensor:
    """Embed normalised inputs at each of a module's `eval_scales`, then apply its `whitening`.

    A whitening that has learned nothing is not applied, with a warning unless a callback will learn it in this run.

    Args:
        module: a `RetrievalModule` or a `RetrievalNetwork`.
        embed: maps inputs of one side to embeddings.
        inputs: images or tokens.
        whiten: False skips the whitening.
    """
    only_original_size = module.eval_scales == (1,) or inputs.dtype == torch.int64  # tokens have no size
    if only_original_size:
        embeddings = embed(inputs)
    else:
        embeddings = multi_scale(embed, inputs, module.eval_scales, **SCALE_POOLING[module.eval_scales_pooling])
    if not whiten or module.whitening is None:
        return embeddings
    if module.whitening.learned is None:
        module.whitening.warn_of_plain(embeddings)
        return embeddings
    whitened: Tensor = module.whitening(embeddings)
    return whitened


class RetrievalNetwork(nn.Module):
    """The networks of a `RetrievalModule`, which embed as the module does in evaluation. It needs no Lightning.

    `restored_network` reads it from a checkpoint. Names of weights are those of the module.

    Args:
        embedder: as for `RetrievalModule`, like the other arguments.
        sides: a `TwoNetworks` has the network of queries; without one, `embedder` embeds both sides.
        eval_scales: factors of the image size.
        eval_scales_pooling: how the embeddings of the scales are combined.
        whitening: applied to the embeddings once it has been fitted, or None.
    """

    def __init__(
        self,
        embedder: nn.Module,
        *,
        sides: TwoSides | None = None,
        eval_scales: Sequence[float] = (1.0,),
        eval_scales_pooling: Literal["mean", "gem"] = "mean",
        whitening: Whitening | None = None,
    ) -> None:
        super().__init__()
        with owned_by("RetrievalModule"):  # the class whose settings these are
            self.embedder = rebuild("embedder", embedder, nn.Module)
            self.query_embedder: nn.Module | None = None
            if sides is not None:
                self.query_embedder = rebuild("sides", sides, TwoSides).query_embedder
            self.whitening: Whitening | None = None
            if whitening is not None:
                self.whitening = rebuild("whitening", whitening, Whitening)
            self.eval_scales = check_scales("eval_scales", eval_scales)
        self.eval_scales_pooling = checked(self, eval_scales_pooling=eval_scales_pooling)
        self.dtype = torch.get_default_dtype()
        # The preparation of images in evaluation, as plain data, and that of queries; None if not recorded.
        self.preparation: dict[str, Any] | None = None
        self.query_preparation: dict[str, Any] | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Embed each image independently."""
        embeddings: Tensor = self.embedder(images)
        return embeddings

    def forward_queries(self, inputs: Tensor) -> Tensor:
        """Embed each query independently, by `query_embedder` if there is one."""
        if self.query_embedder is None:
            return self(inputs)  # type: ignore[no-any-return]
        embeddings: Tensor = self.query_embedder(inputs)
        return embeddings

    def embed(self, images: Tensor) -> Tensor:
        """Embed images as `RetrievalModule.embed` does."""
        return embed_at_scales(self, self, normalized_inputs(self, "candidates", images))

    def embed_queries(self, inputs: Tensor) -> Tensor:
        """Embed queries as `RetrievalModule.embed_queries` does."""
        return embed_at_scales(self, self.forward_queries, normalized_inputs(self, "queries", inputs))


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within a context; on exit, each submodule returns to its previous mode."""
    was_training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in was_training.items():
            part.training = training
