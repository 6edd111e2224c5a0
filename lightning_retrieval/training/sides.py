"""The two sides of a batch: queries and candidates, such as texts and images, which two networks may embed."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import as_int64, check_tensor
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses.third_party import check_references
from lightning_retrieval.models.retrieval_network import evaluation_mode
from lightning_retrieval.models.sides import SIDES, Side, TwoNetworks
from lightning_retrieval.ranking.labels import Role
from lightning_retrieval.training.chunk_size import ChunkSize
from lightning_retrieval.training.chunked import EmbeddedChunks, back_propagate
from lightning_retrieval.training.full_sharding import ShardedParts
from lightning_retrieval.training.optimizers import trainable_parameters, trained_parameters

Unpacked = tuple[Tensor, Tensor, Tensor | None]  # images, labels, ids


def unpack(batch: Any) -> Unpacked:
    """Split a batch into images, labels and ids; the ids are None if the batch has none.

    Args:
        batch: `(images, labels)`, `(images, labels, ids)` or a dict with these keys, as the DataLoader yields.

    Raises:
        TypeError: if the batch has another form.
    """
    if isinstance(batch, dict):
        if "images" in batch and "labels" in batch:
            return batch["images"], batch["labels"], batch.get("ids")
    elif isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1], None
        if len(batch) == 3:
            return batch[0], batch[1], batch[2]
    raise InvalidType(
        "a batch must be (images, labels), (images, labels, ids) or a dict with the keys images, labels and "
        "optionally ids",
        got=_form_in_words(batch),
        cure="override unpack_batch for another form",
    )


def _form_in_words(batch: Any) -> str:
    """What a batch is, for messages."""
    if isinstance(batch, dict):
        return f"a dict with the keys {sorted(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"{len(batch)} items"
    return type(batch).__name__


def is_two_sided(batch: Any) -> bool:
    """Whether a batch is a dict of sides: `{"queries": batch, "candidates": batch}`, or one of them in evaluation."""
    return isinstance(batch, Mapping) and len(batch) > 0 and batch.keys() <= set(SIDES)


def unpack_sides(module: Any, batch: Any) -> tuple[list[Any], list[Unpacked]]:
    """The batch of each side, and its inputs, labels and ids: of the only side, or of queries and candidates.

    Args:
        module: a `RetrievalModule`.
        batch: a batch as the loader yields it.

    Raises:
        ValueError: if the batch lacks a side.
        TypeError: if the batch has one side, but the module needs two, or the loss cannot rank references.
    """
    if not is_two_sided(batch):
        if module.query_embedder is not None or module.sides.directions == "both":
            raise InvalidType(
                "with TwoNetworks or directions='both', a batch for training must be {'queries': batch, "
                "'candidates': batch}",
                got=_form_in_words(batch),
                cure="give the data module Pairs",
            )
        return [batch], [module.unpack_batch(batch)]
    if len(batch) < len(SIDES):
        rule = "a batch for training must have queries and candidates"
        raise InvalidValue(rule, got=f"only {', '.join(batch)}")
    check_references(module.loss, "a batch of queries and candidates")
    batches = [batch[side] for side in SIDES]
    return batches, [module.unpack_batch(batch_of_side) for batch_of_side in batches]


def rows_of_side(output: dict[str, Tensor], side: Side) -> dict[str, Tensor]:
    """The output of an evaluation step for one side, with its roles, and with ids and instances of its own.

    Args:
        output: the output for the batch of the side. Images with the role 0, which are unreadable, keep it.
        side: the side.
    """
    number = SIDES.index(side)
    labels = output["labels"]
    roles = torch.full(labels.shape[:1], number + 1, device=labels.device)
    output = {name: as_int64(name, values, owner="RetrievalModule") for name, values in output.items()}
    if "roles" in output:
        roles[output["roles"] == Role.JUNK] = int(Role.JUNK)
    embeddings = output["embeddings"]
    # The networks of the two sides may return different types under autocast.
    embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    rows = {**output, "embeddings": embeddings, "roles": roles}
    for name in ("ids", "instances"):
        if name in output:
            rows[name] = 2 * output[name] + number
    return rows


def joined_rows(outputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of the outputs of a step for one or both sides, with the entries that all of them have.

    Raises:
        ValueError: if the embeddings of the sides differ in dimension.
    """
    dims = [output["embeddings"].shape[-1] for output in outputs]
    if len(set(dims)) > 1:
        rule = "the embeddings of queries and candidates must have the same dimension"
        got = f"{dims[0]} and {dims[1]}"
        raise InvalidValue(rule, "RetrievalModule", got=got, cure="give both networks one `embedding_dim`")
    joined = {}
    for name in outputs[0]:
        if all(name in output for output in outputs):
            joined[name] = torch.cat([output[name] for output in outputs])
    return joined


def with_frozen_side(sides: Any, embedder: Any) -> Any:
    """The argument `sides` of a module's constructor, with the side whose network has no parameter to train.

    A checkpoint must name this side, because it does not hold what was frozen.

    Args:
        sides: the argument. Only a `TwoNetworks` without a `frozen_side` is changed, as a copy.
        embedder: the argument of this name: a network, or its description as plain data.
    """
    if not isinstance(sides, TwoNetworks) or sides.frozen_side is not None:
        return sides
    networks: dict[Side, Any] = {"candidates": embedder, "queries": sides.query_embedder}
    for side, network in networks.items():
        if isinstance(network, nn.Module):
            needs_gradient = {parameter.requires_grad for parameter in network.parameters()}
            if needs_gradient == {False}:
                sides = copy.copy(sides)
                sides.frozen_side = side
                return sides
    return sides


class EmbeddedSide(NamedTuple):
    """How one side of a batch is embedded in a training step.

    Args:
        embed: maps the inputs of this side to embeddings.
        inputs: the inputs of this process.
        chunk_size: as for `chunked_backward`.
        keep_graphs: as for `chunked_backward`.
        least_chunks: as for `chunked_backward`.
        frozen: the network of this side if none of its parameters requires a gradient, else None. A frozen network is
            in evaluation mode and embeds each input once, without a graph.
        last_backward: as for `chunked_backward`.
    """

    embed: Callable[[Tensor], Tensor]
    inputs: Tensor
    chunk_size: int
    keep_graphs: int = 1
    least_chunks: int = 1
    frozen: nn.Module | None = None
    last_backward: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def chunks(self) -> int:
        """Number of chunks that are embedded."""
        return max(math.ceil(len(self.inputs) / self.chunk_size), self.least_chunks)

    @property
    def graphs(self) -> int:
        """Largest number of graphs that are kept."""
        if self.frozen is not None:
            return 0
        return min(self.keep_graphs, self.chunks)

    @property
    def passes(self) -> int:
        """Number of forward and backward passes."""
        if self.frozen is not None:
            return self.chunks
        return 3 * self.chunks - self.graphs

    def embedded(self) -> EmbeddedChunks:
        """Embed the inputs."""
        mode: AbstractContextManager[None] = nullcontext()
        if self.frozen is not None:
            mode = evaluation_mode(self.frozen)
        with mode:
            return EmbeddedChunks(
                self.embed,
                self.inputs,
                self.chunk_size,
                keep_graphs=self.keep_graphs,
                least_chunks=self.least_chunks,
                trained=self.frozen is None,
            )


def embedded_sides(
    module: Any,
    inputs: Sequence[Tensor],
    sharded: ShardedParts | None,
    searches: Mapping[Side, Any],
    last_backward: Callable[[], AbstractContextManager[None]],
) -> list[EmbeddedSide]:
    """How the images of a batch, or its queries and candidates, are embedded in a step.

    Args:
        module: a `RetrievalModule`.
        inputs: the inputs of each side in this process.
        sharded: the modules that are sharded over the processes; None if there are none.
        searches: the `ChunkSizeSearch` of each side.
        last_backward: returns a context for the last backward pass of the step, which completes all gradients.
    """
    candidates = _embedded_side(module, "candidates", inputs[-1], module.keep_graphs, sharded, searches)
    if len(inputs) == 1:
        return [candidates._replace(last_backward=last_backward)]
    if module.query_embedder is not None and sharded is not None:
        # The gradients of candidates are complete before those of queries.
        candidates = candidates._replace(last_backward=sharded.summed)
    left = max(module.keep_graphs - candidates.graphs, 0)
    queries = _embedded_side(module, "queries", inputs[0], left, sharded, searches)
    return [queries._replace(last_backward=last_backward), candidates]


def _embedded_side(
    module: Any,
    side: Side,
    inputs: Tensor,
    keep_graphs: int,
    sharded: ShardedParts | None,
    searches: Mapping[Side, Any],
) -> EmbeddedSide:
    """How one side is embedded.

    Args:
        module: as for `embedded_sides`.
        side: the side. The images of a batch of one side are embedded as candidates.
        inputs: the inputs of this process.
        keep_graphs: number of chunks that may keep their graphs. A side without chunks keeps its graph.
        sharded: as for `embedded_sides`.
        searches: as for `embedded_sides`.
    """
    embed: Callable[[Tensor], Tensor] = module
    if side == "queries":
        embed = module.forward_queries
    check_tensor("inputs", inputs, owner=type(module).__name__)
    frozen = None
    if module.query_embedder is not None:
        frozen = _frozen_network(module, side)
    chunk_size = chunk_size_of(module.chunk_size, side)
    if chunk_size is None:
        return EmbeddedSide(embed, inputs, len(inputs), max(keep_graphs, 1), frozen=frozen)
    if isinstance(chunk_size, str):
        if side == "queries":  # the search knows nothing of the graphs of candidates
            keep_graphs = 0
        chunk_size = searches[side].find(module, embed, inputs, max(keep_graphs, 1))
    chunk_size = min(chunk_size, len(inputs))
    least_chunks = 1
    if sharded is not None:
        least_chunks = sharded.least_chunks(math.ceil(len(inputs) / chunk_size), inputs.device)
    return EmbeddedSide(embed, inputs, chunk_size, keep_graphs, least_chunks, frozen)


def chunk_size_of(chunk_size: ChunkSize | Mapping[Side, ChunkSize], side: Side) -> ChunkSize:
    """The chunk size of one side.

    Args:
        chunk_size: the argument `chunk_size` of a module.
        side: the side. A batch of one side has the chunk size of the candidates.
    """
    if isinstance(chunk_size, Mapping):
        return chunk_size[side]
    return chunk_size


def _frozen_network(module: Any, side: Side) -> nn.Module | None:
    """One of two networks, that of a side, if none of its parameters is trained, else None.

    A subclass may embed a side with more than its network. Therefore, a network does not count as frozen while a
    parameter is trained that belongs neither to the other network nor to the loss.
    """
    networks: dict[Side, nn.Module] = {"candidates": module.embedder, "queries": module.query_embedder}
    network = networks.pop(side)
    if trainable_parameters(network):
        return None
    (other,) = networks.values()
    elsewhere = {*other.parameters(), *module.loss.parameters()}
    trained = {parameter for _, parameter in trained_parameters(module)}
    return network if trained <= elsewhere else None


def two_sided_backward(
    queries: EmbeddedSide,
    candidates: EmbeddedSide,
    loss: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor], Any] = torch.Tensor.backward,
) -> Tensor:
    """`chunked_backward` for a loss of two sides: the graphs of only one side exist at a time.

    Both sides are embedded, the queries first. The backward pass then goes through the candidates, and at last through
    the queries. With `keep_graphs=0` for the queries, no graph of a query exists while candidates have graphs.

    Args:
        queries: the side whose embeddings are the first argument of `loss`.
        candidates: the side whose embeddings are the second argument of `loss`.
        loss: maps the embeddings of both sides to a scalar.
        backward: back-propagates the scalar, as for `chunked_backward`.

    Returns:
        The value of the loss, without a graph.

    Example:
        >>> import torch
        >>> from lightning_retrieval.training.sides import EmbeddedSide, two_sided_backward
        >>> text, image = torch.nn.Linear(3, 2), torch.nn.Linear(5, 2)
        >>> texts = EmbeddedSide(text, torch.randn(4, 3), chunk_size=2, keep_graphs=0)
        >>> images = EmbeddedSide(image, torch.randn(6, 5), chunk_size=2)
        >>> value = two_sided_backward(texts, images, lambda q, c: (q @ c.T).var())
        >>> text.weight.grad.shape, image.weight.grad.shape
        (torch.Size([2, 3]), torch.Size([2, 5]))
    """
    of_queries, of_candidates = queries.embedded(), candidates.embedded()
    embeddings = [of_queries.embeddings, of_candidates.embeddings]
    value = back_propagate(loss(*embeddings), embeddings, backward)
    for of_side in embeddings:
        if of_side.requires_grad and of_side.grad is None:  # the loss ignores this side, perhaps only in this process
            of_side.grad = torch.zeros_like(of_side)
    of_candidates.back_propagate(candidates.last_backward)
    of_queries.back_propagate(queries.last_backward)
    return value
