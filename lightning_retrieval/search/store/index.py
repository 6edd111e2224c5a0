"""An index of embeddings: exact, or approximate with any of faiss' factory strings.

Embeddings are L2-normalised, so faiss' inner product is the cosine similarity, by which losses and metrics rank.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.arguments import checked, integers
from lightning_retrieval.checks import check_finite_number, check_integer, first_line, short_repr
from lightning_retrieval.files import is_system_error
from lightning_retrieval.invalid import Invalid, InvalidValue, owned_by
from lightning_retrieval.paths import check_path
from lightning_retrieval.ranking.ranks import ieee_products
from lightning_retrieval.search.store import conditions, faiss_index
from lightning_retrieval.search.store.conditions import Request
from lightning_retrieval.search.store.row_ids import integer_ids
from lightning_retrieval.search.store.row_table import FILE, RowTable, check_new_rows
from lightning_retrieval.search.store.rows import (
    SMALL_BLOCK,
    Embeddings,
    Ids,
    Queries,
    Rows,
    check_not_mapped,
    check_results,
    checked_rows,
    join_parameters,
    normalized_rows,
    plain_values,
    query_rows,
    sample_rows,
)
from lightning_retrieval.search.store.storage import NewVersion, new_version, read_folder

OWNER = "RetrievalIndex"
LARGEST_DIM = 2**31 - 1  # limit of faiss
MOST_SHARDS = 10_000  # each shard is a file
RECALL_AT, RECALL_QUERIES = 10, 256
SETTINGS = ("dim", "factory", "parameters", "shards", "about", "recall")  # attributes that the manifest saves


def measure_recall(
    search: Callable[[Tensor, int], tuple[Tensor, Tensor]], embeddings: Rows, ids: NDArray[np.int64]
) -> float | None:
    """Recall@10 of an index, with a sample of its rows as queries; None if there is only one row.

    Recall@10 is the fraction of the 10 nearest rows by exact search that the index finds too. A row does not count as
    its own neighbour.

    Args:
        search: the search function of the index: maps queries and k to similarities and ids.
        embeddings: all rows of the index.
        ids: ids of these rows.

    Cost:
        An exact search for 256 queries, block by block.
    """
    k = min(RECALL_AT, len(embeddings) - 1)
    if k == 0:
        return None
    sample = sample_rows(len(embeddings), RECALL_QUERIES)
    queries = torch.from_numpy(normalized_rows(embeddings[sample]))
    query_ids = torch.from_numpy(ids)[sample]
    expected = _exact_neighbours(queries, sample, embeddings, ids, k)
    _, found = search(queries, k + 1)
    hits = 0
    for found_ids, expected_ids, query_id in zip(found.tolist(), expected.tolist(), query_ids.tolist()):
        others = [other for other in found_ids if other != query_id]
        hits += len(set(others[:k]) & set(expected_ids))
    return hits / expected.numel()


def _exact_neighbours(
    queries: Float[Tensor, "query dim"],
    positions: Int[Tensor, " query"],
    embeddings: Rows,
    ids: NDArray[np.int64],
    k: int,
) -> Int[Tensor, "query k"]:
    """Ids of the k nearest rows of each query by exact search, without the query itself, which is at its position."""
    best_scores = torch.full((len(queries), k), -torch.inf)
    best_ids = torch.full((len(queries), k), -1)
    for begin in range(0, len(embeddings), SMALL_BLOCK):
        block = torch.from_numpy(normalized_rows(embeddings[begin : begin + SMALL_BLOCK]))
        with ieee_products():
            scores = queries @ block.T  # shape (query, block)
        is_here = (positions >= begin) & (positions < begin + len(block))
        scores[is_here, positions[is_here] - begin] = -torch.inf
        better = scores.amax(1) > best_scores[:, -1]  # most blocks have no nearer row for most queries
        best_scores[better], order = torch.cat([best_scores[better], scores[better]], 1).topk(k)
        block_ids = torch.from_numpy(ids[begin : begin + len(block)]).expand(len(order), -1)
        best_ids[better] = torch.cat([best_ids[better], block_ids], 1).gather(1, order)
    return best_ids


class EditLock:
    """A readers-writer lock: any number of threads can read at the same time, or one thread can edit.

    If a thread waits to edit, new readers wait for it, so that readers cannot block it forever. The lock is not
    reentrant.
    """

    def __init__(self) -> None:
        self._entrance = threading.Lock()  # held during an edit
        self._nobody_reads = threading.Condition()
        self._readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which no thread edits."""
        with self._entrance, self._nobody_reads:
            self._readers += 1
        try:
            yield
        finally:
            with self._nobody_reads:
                self._readers -= 1
                self._nobody_reads.notify_all()

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Context in which no other thread reads or edits."""
        with self._entrance:
            with self._nobody_reads:
                self._nobody_reads.wait_for(lambda: self._readers == 0)
            yield


class RetrievalIndex:
    """An index of embeddings with ids and optional paths: add, search, remove, save and load rows.

    Args:
        dim: D, the dimension of an embedding, >= 1.
        factory: faiss' factory string: `"Flat"` is exact; `"IVF1024,Flat"`, `"IVF1024,PQ16"`, `"HNSW32"` and others are
            approximate, and faster or smaller. All of them store ids, so omit `IDMap`.
        parameters: search parameters in the syntax of faiss: `"nprobe=16"` for IVF (the default searches a single
            list), `"efSearch=64"` for HNSW; both must be >= 1.
        shards: number of shards that the rows are distributed over, from 1 to 10,000. Each shard is a file and a faiss
            index, and all have the same training, see `build`.
        about: plain values by name that are saved with the index, such as the checkpoint that made the embeddings.

    Raises:
        ValueError: if a number is out of range, if faiss does not know the factory string or a parameter, or if faiss
            does not support inner products for this factory string.
        TypeError: if a number is not an integer, or `about` holds anything but plain values.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from lightning_retrieval import RetrievalIndex
        >>> index = RetrievalIndex(dim=4)
        >>> index.add(torch.eye(4), ids=torch.tensor([5, 6, 7, 8]), paths=["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
        >>> similarities, ids = index.search(torch.tensor([[0.0, 3.0, 0.0, 4.0]]), k=2)
        >>> similarities, ids, index.paths(ids[0])
        (tensor([[0.8000, 0.6000]]), tensor([[8, 6]]), ['d.jpg', 'b.jpg'])
        >>> similarities, ids = index.search(np.array([0.0, 3.0, 0.0, 4.0]), k=2)  # one vector is one query
        >>> ids.shape
        torch.Size([1, 2])
        >>> index.embeddings(ids[0])
        tensor([[0., 0., 0., 1.],
                [0., 1., 0., 0.]])
        >>> index.save("birds.index")
        >>> len(RetrievalIndex.load("birds.index", mapped=True))
        4

    Cost:
        `docs/search.md` lists the bytes of a row for each kind of factory string.

    Threads:
        Threads may search, add and remove at the same time. Each call is atomic: no call sees the index during a
        change by another call. Searches run in parallel. `search_with_metadata` is one call, so that another thread
        cannot remove a row before its path is read.

    Relations:
        The commands `lightning-retrieval index` and `search` do the same for the images in a folder. Metrics need no
        index: `RetrievalMetrics` ranks exactly. `faiss_indexes` gives access to further features of faiss.
    """

    def __init__(
        self,
        dim: Annotated[int, integers(1, LARGEST_DIM)],
        factory: str = "Flat",
        *,
        parameters: str = "",
        shards: Annotated[int, integers(1, MOST_SHARDS)] = 1,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.dim = checked(self, dim=dim)
        self.factory = factory
        self.parameters = parameters
        self.shards = checked(self, shards=shards)
        with owned_by(OWNER):
            self.about = plain_values(about)
            self.faiss_indexes = self._empty_shards()
        self.recall: float | None = None
        """Recall@10 against exact search, see `add`; None for an exact index, and until it is measured."""
        self.mapped = False
        """Whether the files are mapped into memory; such an index cannot be changed."""
        self._table = RowTable.of(np.zeros(0, np.int64))
        self._lock = EditLock()

    def __len__(self) -> int:
        """Number of rows in the index."""
        return len(self._table)

    @property
    def ids(self) -> Int[Tensor, " rows"]:
        """The ids of all rows, sorted."""
        return torch.from_numpy(np.array(self._table.ids))

    def add(
        self,
        embeddings: Embeddings,
        ids: Ids | None = None,
        paths: Sequence[str] | None = None,
        *,
        columns: Mapping[str, conditions.Values] | None = None,
    ) -> None:
        """Add rows.

        If the index needs training, the first call trains it and should get many representative rows. The first call
        also measures `recall` with 256 of these rows as queries: the fraction of the 10 nearest rows by exact search
        that the index finds too. To add more rows than fit into memory, pass a mapped array
        (`numpy.load(file, mmap_mode="r")`) or a tensor over a file (`torch.from_file`). An index that does not fit
        into memory itself is built by `build`.

        Args:
            embeddings: one floating-point row for each embedding, of any norm, as a tensor on any device or as a NumPy
                array.
            ids: one integer >= 0 for each row, not yet in the index; if None, the integers after the largest id.
            paths: one string for each row, or None.
            columns: metadata by which a search can filter and group: for the name of each column, one string for each
                row or one number for each row, as a sequence, a tensor, an array, or a column of Arrow or pandas. None
                is a missing value, which becomes "" in a column of strings. All rows of an index have the same columns.

        Raises:
            ValueError: if shapes do not match, an embedding is not finite, an id is negative or already in the index,
                a column has an invalid name or is not one of the earlier rows' columns, there are too few rows for the
                training, faiss cannot add rows, or the index is memory-mapped.
            TypeError: if embeddings are not floating point, ids are not integers, `paths` is a single string,
                or a column has values of other types.
        """
        with owned_by(OWNER), self._lock.editing():
            check_not_mapped(self.mapped, "add to")
            rows = checked_rows("embeddings", embeddings, self.dim)
            new_ids, added = check_new_rows(self._table, rows, ids=ids, paths=paths, columns=columns)
            is_first = len(self) == 0 and len(new_ids) > 0
            faiss_index.train_shards(self.faiss_indexes, self.factory, rows)
            try:
                faiss_index.add_to_shards(self.faiss_indexes, self.factory, rows, new_ids)
            except ValueError:
                if is_first:
                    self.faiss_indexes = self._empty_shards()
                raise
            self._table = self._table.joined(added)
            if is_first:
                self._measure_recall(rows, new_ids)

    def search(
        self, queries: Queries, k: int, *, where: str | None = None, group_by: str | None = None
    ) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
        """The k nearest rows of each query, nearest first.

        Args:
            queries: floating-point embeddings of any norm, as a tensor on any device or as a NumPy array: rows, or one
                vector of shape (D,).
            k: from 1 to the number of rows.
            where: condition on the columns that the rows must meet, such as `"price <= 20 and brand in ['a', 'b']"`.
            group_by: name of a column. Of the rows with the same value, only the nearest one is found.

        Returns:
            The cosine similarities, approximate if the index stores approximate vectors, and the ids. Both are tensors
                with a row of k numbers for each query. One vector is one query, so its results have shape (1, k). If
                fewer than k rows meet the condition, there are fewer groups, or an approximate index finds fewer,
                -inf and -1 fill the rest.

        Raises:
            ValueError: if shapes do not match, a query is not finite, `k` is out of range, `where` is not a condition
                on the columns, `group_by` is not a column, or faiss cannot filter this kind of index.
            TypeError: if queries are not floating point, or `k` is not an integer.
        """
        with owned_by(OWNER), self._lock.reading():
            return self._search(queries, self._request(k, where, group_by))

    def request(self, k: int, where: str | None = None, group_by: str | None = None) -> Request:
        """Check what a search asks for; for `search_with_metadata`, and to raise errors before queries are embedded.

        Args:
            k: as for `search`.
            where: as for `search`.
            group_by: as for `search`.

        Raises:
            ValueError: if `k` is out of range, `where` is not a condition on the columns, or `group_by` is no column.
            TypeError: if `k` is not an integer.
        """
        with owned_by(OWNER), self._lock.reading():
            return self._request(k, where, group_by)

    def search_with_metadata(
        self, queries: Queries, request: Request, columns: Sequence[str] | None = None
    ) -> tuple[
        Float[Tensor, "query k"], Int[Tensor, "query k"], list[list[str]], list[list[dict[str, conditions.Value]]]
    ]:
        """Like `search`, with the path and the metadata of each row found, before another thread can remove a row.

        Args:
            queries: as for `search`.
            request: what is searched for, such as `index.request(k=10)`.
            columns: names of the columns whose values are returned; if None, all; with `[]`, only paths are added.

        Returns:
            The similarities, the ids, and for each query the paths and the metadata of its rows. A path is "" for a
                row without a path. The metadata are by name of the column a text, or a number, which is None where it
                is missing. Where fewer than k rows are found, paths are "", and there are no metadata.

        Raises:
            ValueError: as in `search`; also if the index does not have one of the columns.
            TypeError: as in `search`; also if `columns` is not a sequence of strings.
        """
        with owned_by(OWNER), self._lock.reading():
            names = conditions.checked_columns("columns", columns, self.column_kinds)
            similarities, ids = self._search(queries, request)
            paths_of_all, metadata_of_all = self._table.found(ids.numpy().ravel(), names)
            paths, metadata = [], []
            for begin in range(0, len(paths_of_all), request.k):
                paths.append(paths_of_all[begin : begin + request.k])
                metadata.append(metadata_of_all[begin : begin + request.k])
            return similarities, ids, paths, metadata

    def _request(self, k: int, where: str | None, group_by: str | None) -> Request:
        k = check_results(k, len(self))
        return conditions.checked_request(k, where, group_by, self.column_kinds)

    def _search(self, queries: Queries, request: Request) -> tuple[Tensor, Tensor]:
        rows = query_rows(queries, self.dim)
        k, condition, group_by = request.k, request.condition, request.group_by
        if group_by is None:
            return self._nearest(rows, k, condition)
        search = functools.partial(self._nearest_with_groups, group_by)
        found = conditions.search_groups(search, rows, k, group_by=group_by, condition=condition, most=len(self))
        return conditions.as_tensors(found, k)

    def _measure_recall(self, embeddings: Rows, ids: NDArray[np.int64]) -> None:
        if self.factory != "Flat" and len(self) > 0:
            self.recall = measure_recall(lambda queries, k: self._search(queries, Request(k)), embeddings, ids)

    def _nearest(self, queries: Tensor, k: int, condition: conditions.Condition | None) -> tuple[Tensor, Tensor]:
        among = None
        if condition is not None:
            among = self._table.ids[conditions.matching_rows(condition, self._table.columns)]
        return faiss_index.search_shards(self.faiss_indexes, queries, k, among=among)

    def _nearest_with_groups(
        self, group_by: str, queries: Tensor, k: int, condition: conditions.Condition | None
    ) -> list[list[conditions.Found]]:
        """The nearest rows of each query with their groups; fewer than k if fewer are found."""
        similarities, ids = self._nearest(queries, k, condition)
        results = []
        for row_similarities, row in zip(similarities.tolist(), ids.numpy()):
            found = row[row >= 0]
            groups = self._table.values(group_by, found)
            results.append(list(map(conditions.Found, row_similarities, found.tolist(), groups)))
        return results

    @classmethod
    @owned_by(OWNER)
    def build(
        cls,
        folder: str | Path,
        embeddings: Embeddings,
        ids: Ids | None = None,
        paths: Sequence[str] | None = None,
        *,
        columns: Mapping[str, conditions.Values] | None = None,
        factory: str = "Flat",
        parameters: str = "",
        shards: int = 1,
        about: Mapping[str, Any] | None = None,
    ) -> "RetrievalIndex":
        """Build and save an index, which may be larger than memory. The index that is returned is memory-mapped.

        Only one shard at a time is in memory. A search finds the same rows with any number of shards.

        Args:
            folder: as for `save`.
            embeddings: as for `add`.
            ids: as for `add`; if None, the integers from 0.
            paths: as for `add`.
            columns: as for `add`.
            factory: as for the constructor.
            parameters: as for the constructor.
            shards: as for the constructor.
            about: as for the constructor.

        Raises:
            ValueError: as for the constructor, `add` and `save`.
            TypeError: as for the constructor and `add`.
            OSError: if a file cannot be written completely; an existing index in the folder is unchanged.

        Cost:
            Memory for the training rows, a shard, and all ids and paths; disk space for the index. A search takes
            somewhat longer with more shards, so use few.
        """
        path = check_path("folder", folder)
        rows = checked_rows("embeddings", embeddings)
        index = cls(rows.shape[1], factory, parameters=parameters, shards=shards, about=about)
        new_ids, added = check_new_rows(index._table, rows, ids=ids, paths=paths, columns=columns)
        with new_version(path) as version:
            trained = index.faiss_indexes[:1]
            faiss_index.train_shards(trained, factory, rows)
            index.faiss_indexes = faiss_index.written_shards(
                trained[0], index.shards, factory, rows, new_ids, version.write
            )
            index.mapped = True
            index._table = added
            index._measure_recall(rows, new_ids)
            version.write(FILE, added.write)
            index._publish(version)
        return index

    def set_parameters(self, parameters: str) -> None:
        """Change the search parameters. Works for memory-mapped indexes too.

        `recall` is not measured again, so its value still belongs to the previous parameters.

        Args:
            parameters: as for the constructor; other parameters keep their values.

        Raises:
            ValueError: if faiss does not know a parameter, `nprobe` or `efSearch` is not an integer >= 1, or only the
                new parameters set `ht`, for which PQ is trained in another way.
        """
        with owned_by(OWNER), self._lock.editing():
            # Creating a new index raises for invalid parameters before any shard is changed.
            new = faiss_index.new_faiss_index(self.dim, self.factory, self.parameters)
            faiss_index.set_search_parameters(new, self.factory, parameters)
            faiss_index.check_trained_for(self.parameters, parameters)
            for index in self.faiss_indexes:
                faiss_index.set_search_parameters(index, self.factory, parameters)
            self.parameters = join_parameters(self.parameters, parameters)

    def remove(self, ids: Ids) -> None:
        """Remove rows, with their ids and paths.

        Args:
            ids: ids of the rows; an id may occur more than once.

        Raises:
            ValueError: if an id is not in the index, the index is memory-mapped, or faiss cannot remove rows from this
                kind of index, such as HNSW.
            TypeError: if ids are not integers.
        """
        with owned_by(OWNER), self._lock.editing():
            removed = np.unique(integer_ids(ids))
            check_not_mapped(self.mapped, "remove from")
            positions = self._table.positions(removed)
            faiss_index.remove_from_shards(self.faiss_indexes, self.factory, removed)
            self._table = self._table.without(positions)

    def paths(self, ids: Ids) -> list[str]:
        """The paths of rows; "" for rows without a path.

        Args:
            ids: ids of the rows, in any order.

        Raises:
            ValueError: if an id is not in the index.
        """
        with owned_by(OWNER), self._lock.reading():
            return self._table.paths(integer_ids(ids))

    @property
    def column_kinds(self) -> dict[str, conditions.Kind]:
        """The names of the columns, each with `"text"` or `"number"`."""
        return conditions.kinds_of(self._table.columns)

    def columns(self, ids: Ids) -> dict[str, list[Any]]:
        """The metadata of rows: for the name of each column, the values of these rows.

        Args:
            ids: ids of the rows, in any order.

        Raises:
            ValueError: if an id is not in the index.
        """
        with owned_by(OWNER), self._lock.reading():
            wanted = integer_ids(ids)
            return {name: self._table.values(name, wanted) for name in self._table.columns}

    def embeddings(self, ids: Ids | None = None) -> Float[Tensor, "rows dim"]:
        """The embeddings of rows, L2-normalised, as the index stores them.

        `Flat` and `HNSW32` store exact embeddings. Codes (`SQ8`, `PQ16`) and projections (`PCA64`) store an
        approximation, whose norm is not exactly 1. `paths` returns the paths of the same rows.

        Args:
            ids: ids of the rows, in any order; if None, all rows in the order of `self.ids`.

        Raises:
            ValueError: if an id is not in the index, or faiss cannot reconstruct vectors from this kind of index.

        Cost:
            4 D bytes for each row of the result and, during the call, a table of all ids: 16 bytes for each row of the
            index, or about 80 with IVF.
        """
        with owned_by(OWNER), self._lock.editing():  # an IVF index gets a table of all ids during the call
            wanted = integer_ids(self.ids if ids is None else ids)
            self._table.positions(wanted)  # raises for an unknown id
            return faiss_index.rebuild_rows(self.faiss_indexes, self.dim, wanted)

    def save(self, folder: str | Path) -> None:
        """Write the index to a folder. An existing index in it stays intact until the new one is complete.

        Args:
            folder: folder for the vectors, the table of the rows, and a manifest with the format version and all
                checksums. It must not exist yet, be empty, or hold an index.

        Raises:
            ValueError: if the folder holds other files, another process writes to it, or the index is memory-mapped.
            OSError: if a file cannot be written completely; an existing index in the folder is unchanged.
        """
        with owned_by(OWNER), self._lock.reading():
            path = check_path("folder", folder)
            check_not_mapped(self.mapped, "save")
            with new_version(path) as version:
                version.write_all({FILE: self._table.write, **faiss_index.shard_writers(self.faiss_indexes)})
                self._publish(version)

    @classmethod
    @owned_by(OWNER)
    def load(cls, folder: str | Path, mapped: bool = False, verify: bool = True) -> "RetrievalIndex":
        """Read a saved index. If another process saves a new index meanwhile, the new index is read.

        Args:
            folder: folder that `save` wrote.
            mapped: map vectors, ids and paths into memory instead of reading them, for an index that is larger than
                memory. Such an index can be searched but not changed.
            verify: compare checksums, which reads all files once; if False, compare only sizes.

        Raises:
            FileNotFoundError: if the folder or one of its files does not exist.
            ValueError: if the index is damaged, or has an unknown format version.
        """
        path = check_path("folder", folder)
        return read_folder(path, verify, functools.partial(cls._read, path, mapped=mapped))

    @classmethod
    def _read(cls, folder: Path, files: Mapping[str, Path], settings: dict[str, Any], mapped: bool) -> "RetrievalIndex":
        """The index in files that `read_folder` has checked.

        Raises:
            ValueError: if the settings in the manifest do not match the files.
        """
        missing = [name for name in SETTINGS if name not in settings]
        try:
            if missing:
                raise KeyError(missing[0])
            recall = settings.pop("recall")
            if recall is not None:
                recall = check_finite_number("recall", recall, least=0, most=1)
            count = check_integer("shards", settings["shards"], least=1, most=MOST_SHARDS)
            shards = [faiss_index.read_shard(files[faiss_index.shard_name(number)], mapped) for number in range(count)]
            table = RowTable.read(files[FILE], mapped)
            _check_rows(shards, table, settings["dim"])  # checked before memory is allocated for this dimension
            index = cls(**settings)
        except Exception as error:  # NumPy and faiss raise errors of many types for damaged files
            claims_too_much = isinstance(error, MemoryError)
            if isinstance(error, ImportError) or (is_system_error(error) and not claims_too_much):
                raise
            reason = first_line(error)
            if isinstance(error, Invalid):
                reason = first_line(error.of(""))
            elif isinstance(error, KeyError):
                reason = f"{error} is missing"
            rule = f"{folder} is damaged, its manifest and its files do not fit ({reason})"
            raise InvalidValue(rule, cure="build the index again") from None
        index._table = table
        index.faiss_indexes = shards
        index.recall = recall
        index.mapped = mapped
        return index

    def __repr__(self) -> str:
        recall = "" if self.recall is None else f", recall={self.recall:.3f}"
        return (
            f"RetrievalIndex(dim={self.dim}, factory={self.factory!r}, parameters={self.parameters!r}, "
            f"shards={self.shards}, rows={len(self)}{recall})"
        )

    def _publish(self, version: NewVersion) -> None:
        version.publish({name: getattr(self, name) for name in SETTINGS})

    def _empty_shards(self) -> list[Any]:
        return [faiss_index.new_faiss_index(self.dim, self.factory, self.parameters) for _ in range(self.shards)]

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy; faiss indexes are stored as bytes."""
        with self._lock.reading():
            serialized = [faiss_index.load_faiss().serialize_index(shard) for shard in self.faiss_indexes]
            state = {**vars(self), "faiss_indexes": serialized}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        shards = [faiss_index.load_faiss().deserialize_index(shard) for shard in state["faiss_indexes"]]
        vars(self).update(state, faiss_indexes=shards, _lock=EditLock())


def _check_rows(shards: Sequence[Any], table: RowTable, dim: Any) -> None:
    """Raise unless the shards have this dimension, and as many rows as the table."""
    dims = {shard.d for shard in shards}
    if dims != {dim} or isinstance(dim, bool):
        raise ValueError(f"`dim` is {short_repr(dim)}, but the embeddings have {sorted(dims)} numbers")
    rows = sum(shard.ntotal for shard in shards)
    if rows != len(table):
        raise ValueError(f"{rows} embeddings and {len(table)} ids")
