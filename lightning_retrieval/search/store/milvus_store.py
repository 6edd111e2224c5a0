"""An index in Milvus: in a file of Milvus Lite (which runs in this process), on a server, or on a cluster.

pymilvus is the client in all three cases. An index `birds` is a collection `birds_5f0c21d4` with the alias `birds`. A
new index is written to another collection, to which the alias is then moved in one atomic step. So a reader always
finds a complete index, old or new. What is known about an index is stored in the properties of its collection.
"""

import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_integer, first_line
from lightning_retrieval.invalid import Failed, InvalidValue, MissingFile, Unreachable, owned_by
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.paths import check_path
from lightning_retrieval.progress import Progress
from lightning_retrieval.search.embedding_folder import check_unicode
from lightning_retrieval.search.store import conditions
from lightning_retrieval.search.store.conditions import Request
from lightning_retrieval.search.store.index import measure_recall
from lightning_retrieval.search.store.row_ids import (
    LARGEST_ID,
    check_all_known,
    check_new_ids,
    check_none_known,
    ids_after,
    integer_ids,
)
from lightning_retrieval.search.store.rows import (
    Embeddings,
    Ids,
    Queries,
    Rows,
    check_finite_rows,
    check_paths,
    check_results,
    checked_rows,
    join_parameters,
    normalized_blocks,
    normalized_rows,
    plain_values,
    query_rows,
)

OWNER = "MilvusStore"
MISSING = (
    "a store in Milvus needs pymilvus and milvus-lite; install them with pip install 'lightning-retrieval[milvus]'."
)
CONNECTING = 10.0  # timeout of a connection, in seconds
LOADS, BETWEEN_LOADS = 5, 0.5  # maximum number of attempts to load a collection, and seconds between them
BATCH_ROWS, BATCH_BYTES = 10_000, 1 << 24  # maximum numbers of rows and of bytes in one insertion
BATCH_IDS, BATCH_QUERIES = 4_096, 256  # maximum numbers of ids and of queries in one request
MOST_RESULTS = 16_384  # maximum number of results of one query, a limit of Milvus
LONGEST_TEXT = 65_535  # maximum number of bytes of a path or another text, a limit of Milvus
EXACT, METRIC = "FLAT", "COSINE"
ID, EMBEDDING, PATH = "id", "embedding", "path"
COLUMN = "column_"  # prefix of a column of metadata, so that its name is no word of Milvus
# Names of a collection's properties: the metadata as JSON, the recall and, in Milvus Lite, the number of rows. During a
# change of the rows, the number of rows is an empty text.
PROPERTY, RECALL, ROWS = "lightning_retrieval", "lightning_retrieval_recall", "lightning_retrieval_rows"
VERSION = 1
REBUILD = "build the index again, or give the name of another"
_clients: Counter[str] = Counter()  # number of open clients of this process for each file of Milvus Lite
_connecting = threading.Lock()


@dataclass(frozen=True)
class Metadata:
    """What is known about an index, apart from its rows."""

    name: str
    dim: int
    factory: str
    parameters: str
    about: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, conditions.Kind] = field(default_factory=dict)
    version: int = VERSION

    def as_property(self) -> dict[str, str]:
        """The property of a collection that stores the metadata."""
        return {PROPERTY: json.dumps(asdict(self))}


def index_kind(factory: str) -> tuple[str, dict[str, float]]:
    """The type of an index and its build parameters, such as of `"HNSW,M=32"`.

    Raises:
        ValueError: if what follows the type are no assignments of numbers.
    """
    kind, _, assignments = factory.partition(",")
    return kind.strip().upper(), _assigned_numbers("factory", assignments, factory, "HNSW,M=32,efConstruction=200")


def search_parameters(parameters: str) -> dict[str, float]:
    """The search parameters by name, such as of `"ef=64"`.

    Raises:
        ValueError: if they are no assignments of numbers.
    """
    return _assigned_numbers("parameters", parameters, parameters, "ef=64")


def _assigned_numbers(argument: str, assignments: str, given: str, example: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for assignment in filter(None, assignments.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\w+)=(\d+)(\.\d+)?", assignment)
        if match is None:
            rule = f"must have assignments of numbers, such as {example!r}"
            raise InvalidValue(rule, argument=argument, got=repr(given))
        name, digits, decimals = match.groups()
        numbers[name] = int(digits)
        if decimals:
            numbers[name] = float(digits + decimals)
    return numbers


def insertions(
    embeddings: Rows, ids: NDArray[np.int64], paths: Sequence[str], columns: Mapping[str, conditions.Column]
) -> Iterator[list[dict[str, Any]]]:
    """The rows, with normalised embeddings, in batches; each batch fits into one request."""
    size = max(1, min(BATCH_ROWS, BATCH_BYTES // (4 * embeddings.shape[1])))
    for begin, block in normalized_blocks(embeddings):
        for first in range(0, len(block), size):
            batch = block[first : first + size]
            part = slice(begin + first, begin + first + len(batch))
            rows = []
            for embedding, row_id, path in zip(batch, ids[part].tolist(), paths[part]):
                rows.append({ID: row_id, EMBEDDING: embedding, PATH: path})
            for name, column in columns.items():
                for row, value in zip(rows, conditions.python_values(column[part])):
                    row[COLUMN + name] = value
            yield rows


def id_batches(ids: NDArray[np.int64]) -> Iterator[list[int]]:
    """The ids in batches; each batch fits into one request."""
    for first in range(0, len(ids), BATCH_IDS):
        yield ids[first : first + BATCH_IDS].tolist()


def check_no_missing(columns: Mapping[str, Sequence[Any]], name: str = "columns") -> None:
    """Raise if a value of a column is missing, which Milvus cannot store; `name` is the argument with the columns."""
    for column, values in columns.items():
        if None in values:
            rule = "must have all numbers for an index in Milvus"
            got = f"{column}, of which some are missing"
            raise InvalidValue(rule, argument=name, got=got, cure="add them, or keep the index in a folder")


@contextmanager
def _one_sentence(method: str) -> Iterator[None]:
    """Context in which an error of pymilvus becomes one sentence."""
    from pymilvus import MilvusException

    try:
        yield
    except MilvusException as error:
        raise Failed(f"Milvus reports an error in {method} ({first_line(Exception(error.message))})") from error


class MilvusStore:
    """An index in a file of Milvus Lite, on a Milvus server or on a cluster: add, search and remove rows.

    The constructor opens a published index; `create` makes a new one. `RetrievalIndex` has the same methods, so a
    program can use either class.

    Args:
        uri: a path that ends in `.db`, or an address such as `"http://localhost:19530"`. A path belongs to Milvus
            Lite, which runs in this process; only one process at a time can open the path. If a server needs a token,
            the environment variable `MILVUS_TOKEN` holds the token.
        name: name of the index.

    Raises:
        ModuleNotFoundError: if pymilvus or milvus-lite is not installed.
        FileNotFoundError: if there is no such file, or no such index in the store.
        ConnectionError: if `uri` is neither a path that ends in `.db` nor an address, no server answers at the
            address, or another process has opened the file.
        ValueError: if the collection `name` is not an index; for a file, also if the number of rows is not the number
            recorded when the index was published or last changed.

    Example:
        >>> import torch
        >>> from lightning_retrieval import MilvusStore
        >>> store = MilvusStore.create("photos.db", "birds", dim=4)
        >>> store.add(torch.eye(4), paths=["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
        >>> store.publish()
        >>> similarities, ids = store.search(torch.tensor([[0.0, 3.0, 0.0, 4.0]]), k=2)
        >>> ids, store.paths(ids[0])
        (tensor([[3, 1]]), ['d.jpg', 'b.jpg'])
        >>> store.close()

    Cost:
        `benchmarks/stores.py` compares the speed with faiss.

    Relations:
        `RetrievalIndex` keeps an index in memory and in a folder, without a database. With `--store milvus:URI`, the
        commands `lightning-retrieval index`, `search` and `demo` use Milvus.
    """

    uri: str
    name: str
    collection: str
    dim: int
    factory: str
    parameters: str
    about: dict[str, Any]
    recall: float | None
    _metadata: Metadata
    _is_closed: bool

    @owned_by(OWNER)
    def __init__(self, uri: str, name: str) -> None:
        self._connect(uri, may_create=False)
        with self._closed_after_an_error():
            self._open(name)

    @classmethod
    @owned_by(OWNER)
    def create(
        cls,
        uri: str,
        name: str,
        dim: int,
        factory: str = "Flat",
        *,
        parameters: str = "",
        about: Mapping[str, Any] | None = None,
        columns: Mapping[str, conditions.Kind] | None = None,
    ) -> "MilvusStore":
        """Create an empty index. An existing index of the same name stays until `publish` replaces it.

        Args:
            uri: as for the constructor; a file that does not exist is created.
            name: letters, digits and `_`.
            dim: D, the dimension of an embedding, from 2 to 32,768.
            factory: type of Milvus' index with its build parameters: `"Flat"` is exact;
                `"HNSW,M=32,efConstruction=200"`, `"IVF_FLAT,nlist=1024"` and others are approximate. An unknown type is
                an error of Milvus: of a server here, of Milvus Lite in `add`.
            parameters: search parameters: `"ef=64"` for HNSW, `"nprobe=16"` for IVF_FLAT.
            about: plain values by name that are stored with the index, such as the checkpoint that made the embeddings.
            columns: names of the columns of metadata, each with `"text"` or `"number"`.

        Raises:
            OSError: if Milvus cannot create the index, for example because of its name or type.
            ValueError: if an argument is out of its range, or `name` belongs to a collection that is not an index.
            TypeError: if an argument has the wrong type.
        """
        index_kind(factory)
        search_parameters(parameters)
        kinds = dict(columns or {})
        for column, kind in kinds.items():
            conditions.check_column_name(column)
            check_choice("columns", kind, conditions.COLUMN_KINDS)
        metadata = Metadata(name, dim, factory, parameters, plain_values(about), kinds)
        store = cls.__new__(cls)
        store._connect(uri, may_create=True)
        with store._closed_after_an_error():
            store._check_replaceable(name)
            store._open(store._new_collection(metadata))
        return store

    @classmethod
    @owned_by(OWNER)
    def check_new(cls, uri: str, name: str, factory: str, parameters: str) -> None:
        """Raise, before rows are made, unless `create` can write an index of this name to the store.

        Args:
            uri: as for `create`.
            name: as for `create`.
            factory: as for `create`.
            parameters: as for `create`.

        Raises:
            OSError: if the store cannot be reached, or does not have this type of index.
            ValueError: as in `create`.
        """
        store = cls.create(uri, name, 2, factory, parameters=parameters)
        try:
            store.add(torch.eye(2))
        except Failed as error:  # Milvus Lite looks at the type of an index when it has rows
            if "index_type" in str(error):
                raise
        finally:
            store.drop()

    @owned_by(OWNER)
    def __len__(self) -> int:
        """Number of rows in the index."""
        (row,) = self._of_rows("query", output_fields=["count(*)"])
        return int(row["count(*)"])

    @property
    @owned_by(OWNER)
    def ids(self) -> Int[Tensor, " rows"]:
        """The ids of all rows, sorted.

        Raises:
            OSError: if Milvus reports an error.
        """
        found = [np.zeros(0, np.int64)]
        iterator = self._of_rows("query_iterator", batch_size=BATCH_ROWS, output_fields=[ID])
        with closing(iterator), _one_sentence("query_iterator"):
            while batch := iterator.next():
                found.append(np.array([row[ID] for row in batch], np.int64))
        return torch.from_numpy(np.sort(np.concatenate(found)))

    @owned_by(OWNER)
    def add(
        self,
        embeddings: Embeddings,
        ids: Ids | None = None,
        paths: Sequence[str] | None = None,
        *,
        columns: Mapping[str, conditions.Values] | None = None,
    ) -> None:
        """Add rows, up to 10,000 in one request.

        If the index is approximate, the first call measures `recall`, as `RetrievalIndex.add` does.

        Args:
            embeddings: one floating-point row for each embedding, of any norm, as a tensor on any device or as a NumPy
                array.
            ids: one integer >= 0 for each row, not yet in the index; if None, the integers after the largest id.
            paths: one string for each row, at most 65,535 bytes long, or None.
            columns: metadata as for `RetrievalIndex.add`, in the columns that the index was created with.

        Raises:
            ValueError: if shapes do not match, an embedding is not finite, an id is negative or already in the index, a
                path is not valid Unicode, or the columns are not those of the index.
            TypeError: if embeddings are not floating point, ids are not integers, `paths` is a single string,
                or a column has values of other types.
            OSError: if Milvus reports an error; the message says how many rows were added before.
        """
        given = checked_rows("embeddings", embeddings, self.dim)
        rows = len(given)
        stored = len(self)
        new_ids = self._new_ids(ids, rows, stored)
        if paths is None:
            paths = [""] * rows
        check_paths(paths, rows)
        check_unicode("paths", paths)
        new = conditions.new_columns(columns, rows)
        conditions.check_same_columns(self.column_kinds, conditions.kinds_of(new))
        check_no_missing({name: conditions.python_values(column) for name, column in new.items()})
        check_finite_rows("embeddings", given, new_ids, paths)

        added = 0
        try:
            with self._changed_rows(), Progress("Indexing", total=rows, units="rows") as progress:
                for rows_of_a_request in insertions(given, new_ids, paths, new):
                    self._of_rows("insert", data=rows_of_a_request)
                    added += len(rows_of_a_request)
                    progress.update(len(rows_of_a_request))
        except Failed as error:
            error.rule += f", after {added} of {rows} rows were added"
            raise
        if stored == 0 and rows > 0 and index_kind(self.factory)[0] != EXACT:
            self._measure_recall(given, new_ids)

    @owned_by(OWNER)
    def search(
        self, queries: Queries, k: int, *, where: str | None = None, group_by: str | None = None
    ) -> tuple[Float[Tensor, "query k"], Int[Tensor, "query k"]]:
        """The k nearest rows of each query, nearest first.

        Args:
            queries: floating-point embeddings of any norm, as a tensor on any device or as a NumPy array: rows, or one
                vector of shape (D,).
            k: from 1 to the number of rows, at most 16,384.
            where: condition on the columns, as for `RetrievalIndex.search`.
            group_by: name of a column, as for `RetrievalIndex.search`.

        Returns:
            The cosine similarities and the ids. Both are tensors with a row of k numbers for each query. One vector is
                one query, so its results have shape (1, k). If fewer than k rows meet the condition, there are fewer
                groups, or an approximate index finds fewer, -inf and -1 fill the rest.

        Raises:
            ValueError: if shapes do not match, a query is not finite, `k` is out of range, `where` is not a
                condition on the columns, or `group_by` is not a column.
            TypeError: if queries are not floating point, or `k` is not an integer.
            OSError: if Milvus reports an error.
        """
        similarities, ids, _, _ = self._search(queries, self.request(k, where, group_by), [ID], [])
        return similarities, ids

    @owned_by(OWNER)
    def request(self, k: int, where: str | None = None, group_by: str | None = None) -> Request:
        """Check what a search asks for, as `RetrievalIndex.request` does. Whether there are k rows is checked later.

        Args:
            k: as for `search`.
            where: as for `search`.
            group_by: as for `search`.

        Raises:
            ValueError: if `k` is out of range, `where` is not a condition on the columns, or `group_by` is no column.
            TypeError: if `k` is not an integer.
        """
        k = check_integer("k", k, least=1, most=MOST_RESULTS)
        return conditions.checked_request(k, where, group_by, self.column_kinds)

    @owned_by(OWNER)
    def search_with_metadata(
        self, queries: Queries, request: Request, columns: Sequence[str] | None = None
    ) -> tuple[
        Float[Tensor, "query k"], Int[Tensor, "query k"], list[list[str]], list[list[dict[str, conditions.Value]]]
    ]:
        """Like `search`, with the path and the metadata of each row found, even if a process removes it meanwhile.

        The result is that of `RetrievalIndex.search_with_metadata`.

        Args:
            queries: as for `search`.
            request: what is searched for, such as `store.request(k=10)`.
            columns: names of the columns whose values are returned; if None, all; with `[]`, only paths are added.

        Raises:
            ValueError: as in `search`; also if the index does not have one of the columns.
            TypeError: as in `search`; also if `columns` is not a sequence of strings.
            OSError: if Milvus reports an error.
        """
        names = conditions.checked_columns("columns", columns, self.column_kinds)
        return self._search(queries, request, [ID, PATH], names)

    def _search(
        self, queries: Queries, request: Request, fields: list[str], columns: list[str]
    ) -> tuple[Tensor, Tensor, list[list[str]], list[list[dict[str, conditions.Value]]]]:
        """The similarities, ids, paths and metadata of the nearest rows; paths are "" unless `fields` contains them."""
        rows = query_rows(queries, self.dim)
        k, condition, group_by = request.k, request.condition, request.group_by
        search = partial(self._nearest, fields, columns, group_by)
        if group_by is None:
            results = search(rows, k, condition)
        else:
            results = conditions.search_groups(
                search, rows, k, group_by=group_by, condition=condition, most=MOST_RESULTS
            )
        similarities, ids = conditions.as_tensors(results, k)
        if bool((ids < 0).any()):
            check_results(k, len(self))
        paths, metadata = [], []
        for found in results:
            missing = k - len(found)
            paths.append([row.path for row in found] + [""] * missing)
            metadata.append([dict(row.metadata) for row in found] + [{}] * missing)
        return similarities, ids, paths, metadata

    @owned_by(OWNER)
    def set_parameters(self, parameters: str) -> None:
        """Change the search parameters of this object, but not those recorded in Milvus.

        Args:
            parameters: as for `create`; other parameters keep their values.

        Raises:
            ValueError: if `parameters` does not consist of assignments of numbers.
        """
        search_parameters(parameters)
        self.parameters = join_parameters(self.parameters, parameters)

    @owned_by(OWNER)
    def record_about(self, about: Mapping[str, Any]) -> None:
        """Replace the plain values that are stored with the index, in this object and in Milvus.

        Args:
            about: plain values by name.

        Raises:
            TypeError: if `about` holds anything but plain values.
            OSError: if Milvus reports an error.
        """
        metadata = replace(self._metadata, about=plain_values(about))
        self._record(metadata.as_property())
        self._metadata, self.about = metadata, metadata.about

    @owned_by(OWNER)
    def remove(self, ids: Ids) -> None:
        """Remove rows, with their ids and paths.

        Args:
            ids: ids of the rows; an id may occur more than once.

        Raises:
            ValueError: if an id is not in the index; in this case, no row is removed.
            TypeError: if ids are not integers.
            OSError: if Milvus reports an error.
        """
        removed = np.unique(integer_ids(ids))
        check_all_known(np.setdiff1d(removed, list(self._fields(removed, ID))))
        with self._changed_rows():
            for part in id_batches(removed):
                self._of_rows("delete", ids=part)

    @owned_by(OWNER)
    def paths(self, ids: Ids) -> list[str]:
        """The paths of rows; "" for rows without a path.

        Args:
            ids: ids of the rows, in any order.

        Raises:
            ValueError: if an id is not in the index.
            OSError: if Milvus reports an error.
        """
        return self._values(PATH, integer_ids(ids))

    @property
    def column_kinds(self) -> dict[str, conditions.Kind]:
        """The names of the columns, each with `"text"` or `"number"`."""
        return dict(self._metadata.columns)

    @owned_by(OWNER)
    def columns(self, ids: Ids) -> dict[str, list[Any]]:
        """The metadata of rows: for the name of each column, the values of these rows.

        Args:
            ids: ids of the rows, in any order.

        Raises:
            ValueError: if an id is not in the index.
            OSError: if Milvus reports an error.
        """
        wanted = integer_ids(ids)
        return {name: self._values(COLUMN + name, wanted) for name in self.column_kinds}

    @owned_by(OWNER)
    def publish(self) -> None:
        """Give this index its name, in one atomic step, and delete the earlier index of this name.

        Unpublished collections of the same name, such as those of killed processes, are deleted too. Only one
        process at a time may therefore build an index of this name.

        Raises:
            ValueError: if the name now belongs to a collection that is not an index.
            OSError: if Milvus reports an error.
        """
        self._of_rows("flush")
        if self._file is not None:
            self._record({ROWS: str(len(self))})
            self._counts_rows = True
        self._check_replaceable(self.name)
        method = "create_alias"
        if self._call("has_collection", self.name):
            method = "alter_alias"
        self._call(method, self.collection, self.name)
        for other in self._call("list_collections"):
            is_named_so = re.fullmatch(f"{re.escape(self.name)}_[0-9a-f]{{8}}", other)
            if is_named_so and other != self.collection and PROPERTY in self._properties(other):
                self._drop(other)

    @owned_by(OWNER)
    def drop(self) -> None:
        """Delete the index with all its rows, published or not, and close the connection."""
        self._drop(self.collection)
        self.close()

    def close(self) -> None:
        """Close the connection. When the last connection to a file closes, another process can open the file."""
        if self._is_closed:
            return
        self._is_closed = True
        self._client.close()
        if self._file is None:
            return
        from milvus_lite.server_manager import server_manager_instance

        with _connecting:
            _clients[self._file] -= 1
            if _clients[self._file] == 0:
                server_manager_instance.release_server(self._file)

    def __repr__(self) -> str:
        return (
            f"MilvusStore(uri={_without_password(self.uri)!r}, name={self.name!r}, dim={self.dim}, "
            f"factory={self.factory!r}, parameters={self.parameters!r})"
        )

    def _connect(self, uri: str, *, may_create: bool) -> None:
        """Connect to a file, which may be created, or to a server.

        Raises:
            ModuleNotFoundError: if pymilvus or milvus-lite is not installed.
            FileNotFoundError: if there is no file, and it may not be created.
            ConnectionError: if pymilvus cannot connect.
        """
        self.uri = uri
        self._file: str | None = None
        if not re.match("(https?|tcp|unix):", uri):
            self._file = os.path.abspath(check_path("uri", uri, exists=not may_create))
        with optional_import(MISSING):
            import pymilvus

            if self._file is not None:
                import milvus_lite  # noqa: F401
        for package in ("pymilvus", "milvus_lite"):  # they log each error that they also raise, with its traceback
            logging.getLogger(package).setLevel(logging.CRITICAL)
        token = os.environ.get("MILVUS_TOKEN", "")
        with _connecting:
            try:
                self._client: Any = pymilvus.MilvusClient(self._file or uri, token=token, timeout=CONNECTING)
            except pymilvus.MilvusException as error:
                rule = "must be a path that ends in .db and that no other process uses, or the address of a server"
                got = f"{_without_password(uri)} ({first_line(Exception(error.message))})"
                raise Unreachable(rule, argument="uri", got=got) from None
            if self._file is not None:
                _clients[self._file] += 1
        self._is_closed = False

    @contextmanager
    def _closed_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> None:
        """Read what is known about the index of this name, and load its rows.

        Raises:
            FileNotFoundError: if there is no collection of this name.
            ValueError: if the collection is not an index, or is damaged.
        """
        if not self._call("has_collection", name):
            rule = f"must be that of an index in {_without_password(self.uri)}"
            raise MissingFile(rule, argument="name", got=f"{name!r}, which it does not hold")
        self.collection = self._collection_of(name)
        properties = self._properties(self.collection)
        if PROPERTY not in properties:
            got = f"{name!r}, a collection that something else made"
            raise InvalidValue("must be that of an index", argument="name", got=got)
        try:
            self._metadata = Metadata(**json.loads(properties[PROPERTY]))
            if self._metadata.version != VERSION:
                raise ValueError(f"format version {self._metadata.version}")
            # A property is empty while its value is unknown.
            self.recall = float(properties[RECALL]) if properties.get(RECALL) else None
            rows = int(properties[ROWS]) if properties.get(ROWS) else None
        except (TypeError, ValueError) as error:
            rule = f"the metadata of {name!r} are damaged, or of another release ({first_line(error)})"
            raise InvalidValue(rule, cure=REBUILD) from None
        self._load()
        self._counts_rows = rows is not None  # whether Milvus records the number of rows
        self._check_count(name, rows)
        self.name = self._metadata.name
        self.dim = self._metadata.dim
        self.factory = self._metadata.factory
        self.parameters = self._metadata.parameters
        self.about = self._metadata.about

    def _new_collection(self, metadata: Metadata) -> str:
        """Create an empty collection without an alias, and return its name."""
        from pymilvus import DataType, MilvusClient

        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field(ID, DataType.INT64, is_primary=True)
        schema.add_field(EMBEDDING, DataType.FLOAT_VECTOR, dim=metadata.dim)
        schema.add_field(PATH, DataType.VARCHAR, max_length=LONGEST_TEXT)
        for name, kind in metadata.columns.items():
            if kind == "text":
                schema.add_field(COLUMN + name, DataType.VARCHAR, max_length=LONGEST_TEXT)
            else:
                schema.add_field(COLUMN + name, DataType.DOUBLE)
        kind_of_index, build_parameters = index_kind(metadata.factory)
        index = MilvusClient.prepare_index_params()
        # Servers accept build parameters as single values or in `params`; Milvus Lite accepts them only there.
        nested = {"params": build_parameters}
        index.add_index(EMBEDDING, index_type=kind_of_index, metric_type=METRIC, params=nested)
        collection = f"{metadata.name}_{secrets.token_hex(4)}"
        properties = metadata.as_property()
        self._call("create_collection", collection, schema=schema, properties=properties, consistency_level="Strong")
        self._call("create_index", collection, index, sync=False)  # there are no rows yet to wait for
        return collection

    def _check_replaceable(self, name: str) -> None:
        """Raise unless a name is free, or the name of an index, which a new index may replace.

        Raises:
            ValueError: if the name belongs to a collection that is not an index.
        """
        if not self._call("has_collection", name):
            return
        collection = self._collection_of(name)
        if collection == name or PROPERTY not in self._properties(collection):
            got = f"{name!r}, which is something else in {_without_password(self.uri)}"
            raise InvalidValue("must be new or that of an index", argument="name", got=got, cure="give another")

    def _collection_of(self, name: str) -> str:
        """The collection with this name or alias."""
        if name in self._call("list_collections"):
            return name
        return str(self._call("describe_alias", name)["collection_name"])

    def _properties(self, collection: str) -> dict[str, str]:
        properties: dict[str, str] = self._call("describe_collection", collection).get("properties", {})
        return properties

    def _drop(self, collection: str) -> None:
        """Delete the aliases of a collection, then the collection: Milvus requires this order."""
        for alias in self._call("describe_collection", collection).get("aliases", []):
            self._call("drop_alias", alias)
        self._call("drop_collection", collection)

    def _load(self) -> None:
        """Load the rows, so that they can be searched.

        While a thread of Milvus Lite writes a file of the index, loading may fail; then loading is tried again.
        """
        for attempt in range(1, LOADS + 1):
            try:
                self._of_rows("load_collection")
                return
            except Failed as error:
                if attempt == LOADS or "read error" not in str(error):
                    raise
            time.sleep(BETWEEN_LOADS)

    def _call(self, method: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the client.

        Raises:
            OSError: if Milvus reports an error.
        """
        with _one_sentence(method):
            return getattr(self._client, method)(*args, **settings)

    def _of_rows(self, method: str, **settings: Any) -> Any:
        """Call a method of the client with the collection of this index."""
        return self._call(method, self.collection, **settings)

    def _check_count(self, name: str, rows: int | None) -> None:
        """Raise if the index does not have the recorded number of rows.

        If a collection's list of files is damaged, Milvus Lite silently opens the collection without those files' rows.
        """
        if rows is not None and len(self) != rows:
            raise InvalidValue(
                f"{name!r} is damaged, or another program has changed it: it must hold {rows} rows, but holds "
                f"{len(self)}",
                cure=REBUILD,
            )

    @contextmanager
    def _changed_rows(self) -> Iterator[None]:
        """Record the number of rows after a change. During the change, record no number: the process may be killed."""
        if not self._counts_rows:
            yield
            return
        self._record({ROWS: ""})
        yield
        self._record({ROWS: str(len(self))})

    def _record(self, properties: dict[str, str]) -> None:
        self._of_rows("alter_collection_properties", properties=properties)

    def _nearest(
        self,
        fields: list[str],
        columns: list[str],
        group_by: str | None,
        queries: Tensor,
        k: int,
        condition: conditions.Condition | None,
    ) -> list[list[conditions.Found]]:
        """The nearest rows of each query with these fields and columns, and their groups; fewer than k if fewer exist.

        The request states the metric, because Milvus Lite computes whichever metric a client asks for.
        """
        settings: dict[str, Any] = {
            "limit": k,
            "anns_field": EMBEDDING,
            "search_params": {"metric_type": METRIC, "params": search_parameters(self.parameters)},
        }
        group = None
        of_columns = {name: COLUMN + name for name in columns}
        wanted = {*fields, *of_columns.values()}
        if group_by is not None:
            group = COLUMN + group_by
            wanted.add(group)
        settings["output_fields"] = sorted(wanted)
        if condition is not None:
            settings["filter"] = conditions.milvus_filter(condition, COLUMN)
        results = []
        for begin in range(0, len(queries), BATCH_QUERIES):
            batch = normalized_rows(queries[begin : begin + BATCH_QUERIES])
            for hits in self._of_rows("search", data=list(batch), **settings):
                found = []
                for hit in hits:
                    metadata = {name: hit[field] for name, field in of_columns.items()}
                    found.append(
                        conditions.Found(hit["distance"], hit[ID], hit.get(group), hit.get(PATH, ""), metadata)
                    )
                results.append(found)
        return results

    def _values(self, field: str, ids: NDArray[np.int64]) -> list[Any]:
        """The values of a field for the rows with these ids; raises for an unknown id."""
        values = self._fields(np.unique(ids), field)
        check_all_known(np.setdiff1d(ids, list(values)))
        return [values[row_id] for row_id in ids.tolist()]

    def _new_ids(self, ids: Ids | None, rows: int, stored: int) -> NDArray[np.int64]:
        """The ids of new rows; raises if an id is in use, since Milvus would silently replace the row with this id."""
        if ids is None:
            return ids_after(self._largest_id(stored), rows)
        new = check_new_ids(ids, rows)
        if stored > 0:
            check_none_known(np.fromiter(self._fields(new, ID), np.int64))
        return new

    def _largest_id(self, stored: int) -> int:
        """The largest id, found by bisection, with queries for ids >= a number; -1 for an empty index."""
        least, most = -1, LARGEST_ID
        if stored == 0:
            return least
        while least < most:
            middle = least + (most - least + 1) // 2
            found = self._of_rows("query", filter=f"{ID} >= {middle}", limit=1, output_fields=[ID])
            if found:
                least = found[0][ID]
            else:
                most = middle - 1
        return least

    def _fields(self, ids: NDArray[np.int64], field: str) -> dict[int, Any]:
        """The value of a field by id, for each of these ids that is in the index."""
        values = {}
        for part in id_batches(ids):
            for row in self._of_rows("get", ids=part, output_fields=[ID, field]):
                values[row[ID]] = row[field]
        return values

    def _measure_recall(self, embeddings: Rows, ids: NDArray[np.int64]) -> None:
        """Measure recall after Milvus has indexed the rows; until then, the search of Milvus is exact."""
        self._of_rows("flush")
        self._of_rows("release_collection")
        self._load()
        self.recall = measure_recall(self.search, embeddings, ids)
        self._record({RECALL: str(self.recall)})


def _without_password(uri: str) -> str:
    return re.sub("//.*@", "//...@", uri)
