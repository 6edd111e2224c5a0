"""Creates, trains, fills, searches and stores faiss indexes. Each error of faiss becomes an error of one sentence.

A `RetrievalIndex` has one or several faiss indexes, its shards, which are searched one after the other.

Johnson, Douze, Jegou, "Billion-scale similarity search with GPUs" (IEEE Transactions on Big Data, 2021) is the paper of
faiss. Its factory strings are explained at https://github.com/facebookresearch/faiss/wiki/The-index-factory.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.files import POSIX, DigestStream
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.store.rows import Rows, normalized_blocks, normalized_sample

ROWS_PER_CENTROID = 256  # training rows for each centroid; faiss' k-means ignores further rows
FEWEST_CENTROIDS = 256  # product quantisation with 8 bits has 256 centroids
BITS_PER_ID = 512  # a bitmap that selects ids must not be larger than a hash table of them
ROWS_PER_CANDIDATE = 32  # that an exact search compares in the time in which HNSW visits a candidate
INNER = ("index", "base_index", "refine_index", "quantizer", "storage")  # attributes that hold another faiss index
COUNTS = ("nprobe", "efSearch")  # search parameters that count lists or candidates; a prefix may precede the name
HAMMING = r"(?:^|,)\s*ht\s*="  # the search parameter that compares PQ codes by their Hamming distance first


def load_faiss() -> Any:
    """Import `faiss` and make it use as many threads as torch."""
    with optional_import("needs faiss, which cannot be imported; pip install faiss-cpu."):
        import faiss
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def new_faiss_index(dim: int, factory: str, parameters: str) -> Any:
    """An empty faiss index for inner products that stores the ids of its rows.

    Raises:
        ValueError: if faiss does not know the factory string or a parameter, or does not support inner products for
            this kind of index.
    """
    faiss = load_faiss()
    try:
        if "IDMap" in factory:
            raise RuntimeError("ids are always kept, so omit IDMap")
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InvalidValue(
            "must be one of faiss' factory strings, such as 'Flat' or 'IVF1024,PQ16', that fits inner products of "
            f"{dim} numbers",
            argument="factory",
            got=f"{factory!r} ({faiss_reason(error)})",
        ) from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:  # faiss silently ignores the requested metric
        rule = "must be one that faiss has inner products for"
        got = f"{factory!r}, which gives Euclidean distances"
        raise InvalidValue(rule, argument="factory", got=got, cure="use another, such as 'HNSW32' or 'IVF1024,PQ16'")
    if not isinstance(without_transform(index), faiss.IndexIVF):  # only IVF indexes store ids themselves
        index = faiss.IndexIDMap(index)
    set_search_parameters(index, factory, parameters)
    if not re.search(HAMMING, parameters):
        _skip_polysemous_training(index)
    return index


def _skip_polysemous_training(index: Any) -> None:
    """Do not order the centroids of PQ by their Hamming distance, which only searches with the parameter `ht` use.

    The order takes most of the training, whatever the number of rows is. It renames codes, so that similarities do not
    depend on it.
    """
    inner = index
    while not hasattr(inner, "do_polysemous_training"):
        wrapped = getattr(inner, "base_index", None) or getattr(inner, "index", None)
        if wrapped is None:
            return
        inner = load_faiss().downcast_index(wrapped)
    inner.do_polysemous_training = False


def check_trained_for(trained: str, parameters: str) -> None:
    """Raise if search parameters need another training than the index has got with its own parameters.

    Args:
        trained: the parameters that the index has.
        parameters: the parameters to set.

    Raises:
        ValueError: if only the new parameters set `ht`.
    """
    if re.search(HAMMING, parameters) and not re.search(HAMMING, trained):
        rule = "must not set ht in an index that was built without it, because its codes are not ordered for it"
        cure = "build the index again with ht in its parameters"
        raise InvalidValue(rule, argument="parameters", got=repr(parameters), cure=cure)


def without_transform(index: Any) -> Any:
    """The faiss index behind a transform of its rows, such as PCA."""
    faiss = load_faiss()
    if isinstance(index, faiss.IndexPreTransform):
        return faiss.downcast_index(index.index)
    return index


def set_search_parameters(index: Any, factory: str, parameters: str) -> None:
    """Set search parameters of a faiss index, such as `"nprobe=16"`; other parameters keep their values.

    Raises:
        ValueError: if faiss does not know a parameter for this factory string, or a number of lists or candidates is
            not an integer >= 1.
    """
    if not parameters:
        return
    _check_counts(parameters)
    try:
        load_faiss().ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError as error:
        rule = f"must be those that faiss has for {factory!r}, such as 'nprobe=16' for IVF or 'efSearch=64' for HNSW"
        raise InvalidValue(rule, argument="parameters", got=f"{parameters!r} ({faiss_reason(error)})") from None


def _check_counts(parameters: str) -> None:
    """Raise for 0 lists or candidates: with them, a search by faiss fails or finds only one row."""
    for assignment in parameters.split(","):
        name, _, value = assignment.partition("=")
        if name.strip().endswith(COUNTS) and not re.fullmatch("0*[1-9][0-9]{0,8}", value.strip()):
            rule = f"must set {name.strip()} to an integer from 1 to 999999999"
            raise InvalidValue(rule, argument="parameters", got=repr(parameters))


def faiss_reason(error: RuntimeError) -> str:
    """The message of a faiss error without the position in faiss' source code."""
    return str(error).split(": ", 1)[-1].rsplit("failed: ", 1)[-1].strip()


def train_shards(shards: list[Any], factory: str, embeddings: Rows) -> None:
    """Train the first shard and replace all other shards by copies of it, unless they are already trained.

    The training uses the largest sample of the rows that faiss can use.

    Raises:
        ValueError: if there are too few rows.
    """
    if shards[0].is_trained:
        return
    faiss = load_faiss()
    try:
        centroids = max(faiss.extract_index_ivf(shards[0]).nlist, FEWEST_CENTROIDS)
    except RuntimeError:  # the index is not an IVF index
        centroids = FEWEST_CENTROIDS
    try:
        shards[0].train(normalized_sample(embeddings, ROWS_PER_CENTROID * centroids))
    except RuntimeError as error:
        problem, cure = "faiss fails", "use another, such as Flat"
        if "training points" in str(error):
            problem = f"{len(embeddings)} rows are not enough"
            cure = "add more rows in the first call, or use Flat or fewer lists"
        rule = f"{factory!r} must be trained, for which {problem} ({faiss_reason(error)})"
        raise InvalidValue(rule, argument="factory", cure=cure) from None
    for number in range(1, len(shards)):
        shards[number] = faiss.clone_index(shards[0])


def add_to_shards(shards: list[Any], factory: str, embeddings: Rows, ids: NDArray[np.int64]) -> None:
    """Add the rows to trained shards, the same number of rows to each.

    Raises:
        ValueError: if faiss cannot add rows; some of them may already have been added.
    """
    smallest_first = sorted(shards, key=attrgetter("ntotal"))
    for shard, (begin, end) in zip(smallest_first, _parts(len(ids), len(shards))):
        _add_rows(shard, factory, embeddings, ids, begin, end)


def written_shards(
    trained: Any,
    count: int,
    factory: str,
    embeddings: Rows,
    ids: NDArray[np.int64],
    write: Callable[[str, Callable[[DigestStream], None]], Path],
) -> list[Any]:
    """Write the rows to shards, of which one at a time is in memory, and map the files into memory.

    Args:
        trained: a trained index without rows, of which each shard is a copy.
        count: number of shards.
        factory: factory string of the index.
        embeddings: the rows.
        ids: ids of the rows.
        write: writes a file: maps its name, and a function that writes its content to a stream, to its path.

    Raises:
        ValueError: if faiss cannot add rows.
        OSError: if a file cannot be written completely.
    """
    mapped = []
    for number, (begin, end) in enumerate(_parts(len(ids), count)):
        shard = load_faiss().clone_index(trained)
        _add_rows(shard, factory, embeddings, ids, begin, end)
        file = write(shard_name(number), partial(write_shard, shard))
        mapped.append(read_shard(file, mapped=True))
    return mapped


def _parts(rows: int, count: int) -> list[tuple[int, int]]:
    """The begin and end of each of `count` parts of the rows, the larger parts first."""
    ends = [-(-rows * part // count) for part in range(count + 1)]
    return list(pairwise(ends))


def _add_rows(shard: Any, factory: str, embeddings: Rows, ids: NDArray[np.int64], begin: int, end: int) -> None:
    """Add the rows from `begin` to `end` to a shard, and show the progress."""
    _reserve(shard, end - begin)
    try:
        with Progress("Indexing", total=end - begin, units="rows") as progress:
            for first, block in normalized_blocks(embeddings, begin, end):
                shard.add_with_ids(block, ids[first : first + len(block)])
                progress.update(len(block))
    except RuntimeError as error:
        rule = f"{len(ids)} rows cannot be added to an index of {factory!r} ({faiss_reason(error)})"
        raise InvalidValue(rule, cure="use another factory, such as Flat or HNSW32") from None


def _reserve(index: Any, rows: int) -> None:
    """Reserve memory for `rows` more rows in a flat index: enlarging the memory later would briefly double it."""
    faiss = load_faiss()
    inner = index
    if isinstance(index, faiss.IndexIDMap):
        inner = faiss.downcast_index(index.index)
    if isinstance(inner, faiss.IndexFlatCodes):
        size = inner.codes.size()
        inner.codes.resize(size + rows * inner.code_size)
        inner.codes.resize(size)


def search_shards(
    shards: list[Any], queries: Float[Tensor, "query dim"], k: int, *, among: NDArray[np.int64] | None = None
) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
    """Similarities and ids of the k nearest rows in all shards; padded with -inf and -1 if fewer rows are found.

    Args:
        shards: the faiss indexes, all with the same training.
        queries: the embeddings to search for.
        k: number of rows.
        among: ids of the rows that may be found; if None, all rows.

    Raises:
        ValueError: if faiss cannot search with the index's parameters, or cannot filter this kind of index.
    """
    similarities = [np.zeros((0, k), np.float32)]
    ids = [np.zeros((0, k), np.int64)]
    for _, block in normalized_blocks(queries):
        try:
            block_similarities, block_ids = _search_block(shards, block, k, among)
        except RuntimeError as error:
            if among is not None and "params" in str(error):
                rule = "`where` and `group_by` must be given for an index that faiss can filter"
                cure = "use Flat, HNSW, SQ, or IVF with Flat, SQ or PQ, without RFlat"
                raise InvalidValue(rule, got="one that it cannot", cure=cure) from None
            rule = f"faiss cannot search for the {k} nearest rows ({faiss_reason(error)})"
            cure = "ask for fewer, or change the search parameters with set_parameters"
            raise InvalidValue(rule, cure=cure) from None
        similarities.append(block_similarities)
        ids.append(block_ids)
    return torch.from_numpy(np.concatenate(similarities)), torch.from_numpy(np.concatenate(ids))


def _search_block(
    shards: list[Any], block: Float32[np.ndarray, "query dim"], k: int, among: NDArray[np.int64] | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search the shards for one block of queries, one shard after the other."""
    faiss = load_faiss()
    rows = sum(shard.ntotal for shard in shards)
    inner, transformed = _unwrapped(shards[0], block)
    search = partial(_search_shard, block=block, k=k, among=among, rows=rows)
    if isinstance(inner, faiss.IndexIVF):
        # The nearest lists of the queries are the same in all shards, so they are found once.
        assigned = inner.quantizer.search(transformed, min(inner.nprobe, inner.nlist))
        search = partial(_search_lists, rows=transformed, k=k, among=among, assigned=assigned)
    elif isinstance(inner, faiss.IndexHNSW) and among is not None and _are_few(len(among), rows, inner.hnsw.efSearch):
        search = partial(_search_exactly, block=block, k=k, among=among)
    similarities, ids = (np.concatenate(parts, axis=1) for parts in zip(*map(search, shards)))
    similarities[ids < 0] = -np.inf
    if len(shards) == 1:
        return similarities, ids
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarities, order, 1), np.take_along_axis(ids, order, 1)


def _unwrapped(index: Any, rows: NDArray[np.float32]) -> tuple[Any, NDArray[np.float32]]:
    """The faiss index behind ids and transforms of the rows, such as PCA, and these rows after the transforms."""
    faiss = load_faiss()
    while isinstance(index, (faiss.IndexIDMap, faiss.IndexPreTransform)):
        if isinstance(index, faiss.IndexPreTransform):
            for number in range(index.chain.size()):
                rows = faiss.downcast_VectorTransform(index.chain.at(number)).apply(rows)
        index = faiss.downcast_index(index.index)
    return index, rows


def _search_shard(
    shard: Any, block: NDArray[np.float32], k: int, among: NDArray[np.int64] | None, rows: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search a shard of an index that has this many rows; among the rows with some ids, if `among` is not None."""
    # `faiss.contrib.torch_utils` replaces `search` by a method without `params`, and keeps it as `search_numpy`.
    search = getattr(shard, "search_numpy", shard.search)
    found: tuple[NDArray[np.float32], NDArray[np.int64]] = search(block, k, params=_parameters(shard, among, rows))
    return found


def _search_lists(
    shard: Any, rows: NDArray[np.float32], k: int, among: NDArray[np.int64] | None, assigned: tuple[Any, Any]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Search the lists of an IVF shard that `assigned` names for each query, with their similarities."""
    faiss = load_faiss()
    similarities = np.empty((len(rows), k), np.float32)
    ids = np.empty((len(rows), k), np.int64)
    to_lists, lists = assigned
    arrays = (lists, to_lists, similarities, ids)
    parameters = _parameters(shard, among, shard.ntotal)
    ivf = without_transform(shard)
    ivf.search_preassigned_c(len(rows), faiss.swig_ptr(rows), k, *map(faiss.swig_ptr, arrays), False, parameters)
    return similarities, ids


def _are_few(selected: int, rows: int, candidates: int) -> bool:
    """Whether an exact search among some rows takes less time than one by HNSW that finds as good results.

    HNSW visits as many rows with a filter as without one, and drops those that do not meet it, so it needs more
    candidates, in proportion.
    """
    return selected**2 <= ROWS_PER_CANDIDATE * candidates * rows


def _search_exactly(
    shard: Any, block: NDArray[np.float32], k: int, among: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Compare the queries with all rows of an HNSW shard that have some of the ids."""
    faiss = load_faiss()
    stored = faiss.vector_to_array(shard.id_map)
    positions = np.flatnonzero(np.isin(stored, among))
    inner, queries = _unwrapped(shard, block)
    similarities, found = faiss.knn(queries, inner.reconstruct_batch(positions), k, metric=faiss.METRIC_INNER_PRODUCT)
    ids = np.full(found.shape, -1, np.int64)
    ids[found >= 0] = stored[positions[found[found >= 0]]]
    return similarities, ids


def _parameters(index: Any, ids: NDArray[np.int64] | None, rows: int) -> Any:
    """Parameters of faiss for a search among the rows with these ids; None for a search among all rows.

    The other parameters are those of the index, except that HNSW needs the more candidates, the fewer of the `rows` of
    all shards are selected. They are valid for one search: faiss changes the selector of an `IndexIDMap` in place.
    """
    if ids is None:
        return None
    faiss = load_faiss()
    if len(ids) > 0 and ids.max() < BITS_PER_ID * len(ids):  # a bitmap takes a tenth of the time of a hash table
        selected = np.zeros(int(ids.max()) + 1, np.bool_)
        selected[ids] = True
        selector = faiss.IDSelectorBitmap(np.packbits(selected, bitorder="little"))
    else:
        selector = faiss.IDSelectorBatch(ids)
    while isinstance(index, (faiss.IndexIDMap, faiss.IndexPreTransform)):
        index = faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=index.nprobe, max_codes=index.max_codes)
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch * rows // len(ids))
    return faiss.SearchParameters(sel=selector)


def remove_from_shards(shards: list[Any], factory: str, ids: NDArray[np.int64]) -> None:
    """Remove rows from the shards that hold them.

    Raises:
        ValueError: if faiss cannot remove rows from this kind of index.
    """
    try:
        for shard in shards:
            shard.remove_ids(load_faiss().IDSelectorBatch(ids))
    except RuntimeError as error:
        why = f"because faiss reports: {faiss_reason(error)}"
        if "not implemented" in str(error):
            why = "because faiss does not support it"
        rule = f"rows cannot be removed from an index of {factory!r}, {why}"
        raise InvalidValue(rule, cure="build the index again without them, or use Flat or IVF") from None


def rebuild_rows(shards: list[Any], dim: int, ids: NDArray[np.int64]) -> Float[Tensor, "rows dim"]:
    """The stored vectors of the rows with these ids. Each id must be in one of the shards.

    Raises:
        ValueError: if faiss cannot reconstruct vectors from this kind of index.
    """
    rows = np.empty((len(ids), dim), np.float32)
    for shard in shards:
        is_mapped = isinstance(shard, load_faiss().IndexIDMap)
        stored = _stored_ids(shard, is_mapped)
        here = np.isin(ids, stored)
        try:
            if is_mapped:
                order = np.argsort(stored)
                positions = np.searchsorted(stored, ids[here], sorter=order)
                rows[here] = shard.index.reconstruct_batch(order[positions])
            else:
                rows[here] = _rebuild_from_lists(shard, ids[here])
        except RuntimeError as error:
            rule = f"faiss cannot give rows of this index back ({faiss_reason(error)})"
            cure = "keep the embeddings in files, as `lightning-retrieval embed` writes them"
            raise InvalidValue(rule, cure=cure) from None
    return torch.from_numpy(rows)


def _stored_ids(shard: Any, is_mapped: bool) -> NDArray[np.int64]:
    """The ids of a shard in the order of its rows."""
    faiss = load_faiss()
    if is_mapped:
        stored: NDArray[np.int64] = faiss.vector_to_array(shard.id_map)
        return stored
    lists = faiss.extract_index_ivf(shard).invlists
    parts = [np.zeros(0, np.int64)]
    for number in range(lists.nlist):
        size = lists.list_size(number)
        if size > 0:
            parts.append(faiss.rev_swig_ptr(lists.get_ids(number), size).copy())
    return np.concatenate(parts)


def _rebuild_from_lists(shard: Any, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Vectors of an IVF index. Finding rows by id needs a temporary table of all ids."""
    faiss = load_faiss()
    ivf = faiss.extract_index_ivf(shard)
    ivf.set_direct_map_type(faiss.DirectMap.Hashtable)
    try:
        rows: NDArray[np.float32] = shard.reconstruct_batch(ids)
    finally:
        ivf.set_direct_map_type(faiss.DirectMap.NoMap)  # faiss would save the table, and update it at every change
    return rows


def shard_writers(shards: list[Any]) -> dict[str, Callable[[DigestStream], None]]:
    """For each shard, by file name, a function that writes it to a stream."""
    return {shard_name(number): partial(write_shard, shard) for number, shard in enumerate(shards)}


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"vectors-{number}.faiss"


def write_shard(shard: Any, stream: DigestStream) -> None:
    """Write a shard to a stream. faiss' own files are not used: they ignore errors of the last flush."""
    faiss = load_faiss()
    faiss.write_index(shard, faiss.PyCallbackIOWriter(stream.write))


def read_shard(path: Path, mapped: bool) -> Any:
    """Read a shard from a file, or map the file into memory.

    Raises:
        ValueError: if faiss cannot read the file, or the file names another one.
    """
    faiss = load_faiss()
    # With this flag, faiss looks for lists in another file beside the file of the index, which it can only do if it has
    # opened that file by name and without a map. Here, it therefore raises before it opens the other file.
    flags = faiss.IO_FLAG_ONDISK_SAME_DIR
    can_map = POSIX or os.fspath(path).isascii()  # faiss cannot open other paths on Windows
    try:
        with path.open("rb") as file:  # raises an error of the system as such; faiss would report it as one of the file
            if mapped and can_map:
                index = faiss.read_index(os.fspath(path), flags | faiss.IO_FLAG_MMAP_IFC)
            else:
                index = faiss.read_index(faiss.PyCallbackIOReader(file.read), flags)
    except RuntimeError as error:
        raise InvalidValue(f"faiss cannot read {path} ({faiss_reason(error)})", cure="build the index again") from None
    _check_lists(path, index)
    return index


def _check_lists(path: Path, index: Any) -> None:
    """Raise if lists are in another file: for the centroids of lists, faiss ignores the flags of `read_shard`."""
    faiss = load_faiss()
    if isinstance(index, faiss.IndexIVF) and isinstance(
        faiss.downcast_InvertedLists(index.invlists), faiss.OnDiskInvertedLists
    ):
        raise InvalidValue(f"{path} must not name another file", cure="build the index again")
    for name in INNER:
        inner = getattr(index, name, None)
        if isinstance(inner, faiss.Index):
            _check_lists(path, faiss.downcast_index(inner))
