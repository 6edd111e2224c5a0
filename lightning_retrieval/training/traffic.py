"""What a training step communicates."""


def step_traffic(
    batch: int,
    dim: int,
    parameters: int,
    world: int,
    *,
    gather: bool = True,
    own_queries: bool = True,
    bytes_: int = 4,
    weights: int = 0,
) -> dict[str, float]:
    """Bytes that each process sends in a training step, with collectives that send nothing twice.

    Args:
        batch: B, rows of the global batch.
        dim: D, dimension of the embeddings.
        parameters: number of elements of the gradient.
        world: W, number of processes.
        gather: whether lists are those of the global batch.
        own_queries: whether each process computes the loss of its own queries, so that gradients of embeddings are
            exchanged.
        bytes_: bytes of one element.
        weights: number of elements that are gathered in a step, if the network is divided over the processes.

    Returns:
        The sum of (W - 1) / W x B (D x bytes + 16) for gathering, where label and id have 8 bytes each,
        (W - 1) / W x B D x bytes for the exchange of gradients, and 2 (W - 1) / W x parameters x bytes for the
        all-reduce. In a divided network (W - 1) / W x weights x bytes for gathering them and (W - 1) / W x parameters x
        bytes for the sum of gradients, of which each process gets its slice, take the place of the all-reduce.

    Example:
        >>> from lightning_retrieval.training.traffic import step_traffic
        >>> step_traffic(batch=384, dim=128, parameters=600_000, world=2)
        {'gather': 101376.0, 'exchange': 98304.0, 'all-reduce': 2400000.0}
    """
    others = (world - 1) / world
    traffic = {
        "gather": others * batch * (dim * bytes_ + 16) * gather,
        "exchange": others * batch * dim * bytes_ * (gather and own_queries),
    }
    if weights > 0:
        return {**traffic, "weights": others * weights * bytes_, "reduce-scatter": others * parameters * bytes_}
    return {**traffic, "all-reduce": 2 * others * parameters * bytes_}
