"""The two sides of a batch: queries and candidates, such as texts and images, which two networks may embed."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import as_int64
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.losses.third_party import check_references
from lightning_retrieval.models.retrieval_network import evaluation_mode
from lightning_retrieval.models.sides import SIDES, Side, TwoNetworks
from lightning_retrieval.ranking.labels import Role
from lightning_retrieval.training.chunk_size import ChunkSize
from lightning_retrieval.training.chunked import Embed
from lightning_retrieval.training.optimizers import trainable_parameters

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


def chunking(module: Any, sides: Sequence[tuple[Embed, Tensor]]) -> tuple[list[int], list[int]]:
    """How many rows of each side are embedded at a time, and how many of its chunks keep their graphs.

    Candidates keep their graphs first. A side without chunks always keeps its graph. Of a frozen network, the last
    chunk counts as kept, because it shows that the embeddings require no gradient.

    Args:
        module: a `RetrievalModule`.
        sides: the function that embeds each side, and its inputs in this process.
    """
    sizes: list[int] = []
    graphs: list[int] = []
    left = module.keep_graphs
    for side, (embed, inputs) in reversed(list(zip(SIDES[-len(sides) :], sides, strict=True))):
        size = chunk_size_of(module.chunk_size, side)
        if size == "auto":  # the search for queries knows nothing of the graphs of candidates
            kept = module.keep_graphs if side == "candidates" else 1
            size = module.chunk_size_searches[side].find(module, embed, inputs, kept)
        keeps_last = is_frozen(module, side) or size is None
        size = min(size or len(inputs), len(inputs))
        sizes.insert(0, size)
        graphs.insert(0, max(left, int(keeps_last)))
        if not is_frozen(module, side):
            left = max(left - math.ceil(len(inputs) / size), 0)
    return sizes, graphs


def chunk_size_of(chunk_size: ChunkSize | Mapping[Side, ChunkSize], side: Side) -> ChunkSize:
    """The chunk size of one side.

    Args:
        chunk_size: the argument `chunk_size` of a module.
        side: the side. A batch of one side has the chunk size of the candidates.
    """
    if isinstance(chunk_size, Mapping):
        return chunk_size[side]
    return chunk_size


def is_frozen(module: Any, side: Side) -> bool:
    """Whether a side has a network of its own, none of whose parameters is trained."""
    if module.query_embedder is None:
        return False
    networks: dict[Side, nn.Module] = {"queries": module.query_embedder, "candidates": module.embedder}
    return not trainable_parameters(networks[side])


@contextmanager
def frozen_in_evaluation_mode(module: Any) -> Iterator[None]:
    """Context in which a network of one of two sides that is not trained is in evaluation mode."""
    with ExitStack() as modes:
        if is_frozen(module, "queries"):
            modes.enter_context(evaluation_mode(module.query_embedder))
        if is_frozen(module, "candidates"):
            modes.enter_context(evaluation_mode(module.embedder))
        yield
