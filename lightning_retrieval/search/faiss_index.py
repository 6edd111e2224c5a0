"""faiss indexes: created from a factory string, trained, and given search parameters, with errors of our own.

Johnson, Douze, Jegou, "Billion-scale similarity search with GPUs" (IEEE Transactions on Big Data, 2021) is the paper of
faiss. Its factory strings are explained at https://github.com/facebookresearch/faiss/wiki/The-index-factory.
"""

import re
from typing import Any

import torch

from lightning_retrieval.checks import short_repr
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.search.rows import OWNER, Rows, normalized_sample

ROWS_PER_CENTROID = 256  # more are ignored by the k-means of faiss
FEWEST_CENTROIDS = 256  # those of product quantisation with 8 bits
COUNTS = ("nprobe", "efSearch")  # search parameters that count lists or candidates, also with a prefix


def load_faiss() -> Any:
    """The module `faiss`, set to use as many threads as torch."""
    with optional_import(f"{OWNER}: needs faiss, which cannot be imported; pip install faiss-cpu."):
        import faiss
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def new_faiss_index(dim: int, factory: str, parameters: str) -> Any:
    """An empty faiss index for inner products that keeps the ids of its rows.

    Raises:
        ValueError: if faiss does not know the factory string or a parameter, or has no inner products for it.
        TypeError: if one of them is not a string.
    """
    faiss = load_faiss()
    if not isinstance(factory, str):
        raise TypeError(
            f"{OWNER}: `factory` must be a string, such as 'Flat', got {short_repr(factory)} "
            f"({type(factory).__name__})."
        )
    try:
        if "IDMap" in factory:
            raise RuntimeError("ids are always kept, so omit IDMap")
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"{OWNER}: `factory` must be one of faiss' factory strings, such as 'Flat' or 'IVF1024,PQ16', that fits "
            f"inner products of {dim} numbers, got {factory!r} ({faiss_reason(error)})."
        ) from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:  # faiss silently ignores the metric that was asked for
        raise ValueError(
            f"{OWNER}: `factory` must be one that faiss has inner products for, got {factory!r}, which gives "
            "Euclidean distances; use another, such as 'HNSW32' or 'IVF1024,PQ16'."
        )
    inner = index
    if isinstance(index, faiss.IndexPreTransform):
        inner = faiss.downcast_index(index.index)
    if not isinstance(inner, faiss.IndexIVF):  # only IVF indexes keep ids themselves
        index = faiss.IndexIDMap(index)
    set_search_parameters(index, factory, parameters)
    return index


def set_search_parameters(index: Any, factory: str, parameters: str) -> None:
    """Set search parameters of a faiss index, such as `"nprobe=16"`; the others stay as they are.

    Raises:
        ValueError: if faiss does not know a parameter for this factory string, or a number of lists or candidates is
            not an integer >= 1.
        TypeError: if `parameters` is not a string.
    """
    if not isinstance(parameters, str):
        raise TypeError(
            f"{OWNER}: `parameters` must be a string, such as 'nprobe=16', got {short_repr(parameters)} "
            f"({type(parameters).__name__})."
        )
    if not parameters:
        return
    _check_counts(parameters)
    try:
        load_faiss().ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError as error:
        raise ValueError(
            f"{OWNER}: `parameters` must be those that faiss has for {factory!r}, such as 'nprobe=16' for IVF "
            f"or 'efSearch=64' for HNSW, got {parameters!r} ({faiss_reason(error)})."
        ) from None


def train_faiss_index(index: Any, factory: str, embeddings: Rows) -> None:
    """Train a faiss index on a sample of rows, which is as large as the largest sample that faiss uses.

    Raises:
        ValueError: if there are too few rows.
    """
    faiss = load_faiss()
    try:
        centroids = max(faiss.extract_index_ivf(index).nlist, FEWEST_CENTROIDS)
    except RuntimeError:  # not an IVF index
        centroids = FEWEST_CENTROIDS
    try:
        index.train(normalized_sample(embeddings, ROWS_PER_CENTROID * centroids))
    except RuntimeError as error:
        raise ValueError(
            f"{OWNER}: `factory` {factory!r} must be trained, for which {len(embeddings)} rows are not enough "
            f"({faiss_reason(error)}); add more rows in the first call, or use Flat or fewer lists."
        ) from None


def _check_counts(parameters: str) -> None:
    """Raise for 0 lists or candidates, with which faiss fails during the search or finds a single row."""
    for assignment in parameters.split(","):
        name, _, value = assignment.partition("=")
        if name.strip().endswith(COUNTS) and not re.fullmatch("0*[1-9][0-9]{0,8}", value.strip()):
            raise ValueError(
                f"{OWNER}: `parameters` must set {name.strip()} to an integer from 1 to 999999999, got {parameters!r}."
            )


def faiss_reason(error: RuntimeError) -> str:
    """The message of a faiss error, without the file and line of faiss' source code."""
    return str(error).split(": ", 1)[-1].rsplit("failed: ", 1)[-1].strip()
