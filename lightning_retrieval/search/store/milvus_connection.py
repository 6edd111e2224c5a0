"""A connection to Milvus: to a file of Milvus Lite (which runs in this process), to a server, or to a cluster.

pymilvus is the client in all three cases. Each error of pymilvus becomes an error of one sentence.

An index `birds` is a collection `birds_5f0c21d4` with the alias `birds`. A new index is written to another collection,
to which the alias is then moved in one atomic step. So a reader always finds a complete index, old or new. The metadata
of an index are a property of its collection. The kind of index and the search parameters are given as text.
"""

import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_retrieval.checks import check_choice, check_integer, first_line, short_repr
from lightning_retrieval.invalid import Failed, InvalidValue, MissingFile, Unreachable
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.paths import check_path
from lightning_retrieval.search.store import conditions

MISSING = (
    "a store in Milvus needs pymilvus and milvus-lite; install them with pip install 'lightning-retrieval[milvus]'."
)
SUFFIX = ".db"  # pymilvus recognises a file of Milvus Lite by this suffix
ADDRESS = re.compile("(https?|tcp|unix):")
CONNECTING = 10.0  # timeout of a connection, in seconds
CALLING = 60.0  # timeout of a call, in seconds
LONG_CALLING = 3600.0  # timeout in seconds of a call that writes, loads or indexes a whole collection
LONG = ("flush", "load_collection", "create_index")
LOADS, BETWEEN_LOADS = 5, 0.5  # maximum number of attempts to load a collection, and seconds between them
_connections: Counter[Path] = Counter()  # number of open connections of this process to each file
_changing = threading.Lock()


class MilvusConnection:
    """A client of Milvus.

    Args:
        uri: a path that ends in `.db`, or an address.
        may_create: create the file of Milvus Lite if it does not exist.

    Raises:
        ModuleNotFoundError: if pymilvus or milvus-lite is not installed.
        FileNotFoundError: if the file, or the folder to create it in, does not exist.
        ValueError: if `uri` is neither a path that ends in `.db` nor an address.
        ConnectionError: if no server answers, or another process has opened the file.
    """

    def __init__(self, uri: str, *, may_create: bool) -> None:
        self.file: Path | None = None
        if is_file(uri):
            self.file = _lite_file(uri, may_create)
        self.shown = shown_uri(uri)
        self._client = self._connect(uri)

    def call(self, method: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the client, and return its result.

        Raises:
            ValueError: if the connection is closed.
            OSError: if Milvus reports an error.
        """
        if self._client is None:
            raise InvalidValue(f"the connection to {self.shown} must be open for {method}", cure="open the index again")
        seconds = CALLING
        if method in LONG:
            seconds = LONG_CALLING
        return self.checked(method, partial(getattr(self._client, method), *args, timeout=seconds, **settings))

    def checked(self, method: str, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, which uses a method of the client; an error of pymilvus becomes one sentence.

        Raises:
            OSError: if Milvus reports an error.
        """
        from pymilvus.exceptions import ErrorCode, MilvusException

        try:
            return call()
        except MilvusException as error:
            cure = ""
            if error.code == ErrorCode.COLLECTION_NOT_FOUND:
                cure = "another process has replaced or deleted the index, so open it again"
            raise Failed(f"{self.shown} reports an error in {method} ({_reason(error)})", cure=cure) from None

    def load(self, collection: str) -> None:
        """Load a collection, so that it can be searched.

        While a thread of Milvus Lite writes a file of the index, loading may fail; then loading is tried again.

        Raises:
            ValueError: if the connection is closed.
            OSError: if Milvus reports an error.
        """
        for attempt in range(1, LOADS + 1):
            try:
                self.call("load_collection", collection)
                return
            except OSError as error:
                if attempt == LOADS or "read error" not in str(error):
                    raise
            time.sleep(BETWEEN_LOADS)

    def close(self) -> None:
        """Close the connection. When the last connection to a file closes, Milvus Lite writes its data and stops."""
        if self._client is None:
            return
        self._client.close()
        self._client = None
        if self.file is not None:
            _release(self.file)

    def _connect(self, uri: str) -> Any:
        pymilvus = _import_pymilvus(with_lite=self.file is not None)
        if self.file is not None:
            uri = os.fspath(self.file)
        try:
            with _changing:
                client = pymilvus.MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=CONNECTING)
                if self.file is not None:
                    _connections[self.file] += 1
        except pymilvus.MilvusException as error:
            raise self._unreachable(error) from None
        return client

    def _unreachable(self, error: Exception) -> Unreachable:
        rule, why, cure = "must be a file of Milvus Lite", f"it cannot open ({_reason(error)})", ""
        if self.file is None:
            rule, why = "must be the address of Milvus", f"did not answer within {CONNECTING:g} s ({_reason(error)})"
            cure = "nothing was written, so start Milvus there or give another address"
        return Unreachable(rule, argument="uri", got=f"{self.shown}, which {why}", cure=cure)


def is_file(uri: str) -> bool:
    """Whether a URI is the path of a file of Milvus Lite, not an address; raises unless the URI is a string."""
    return not ADDRESS.match(uri)


def shown_uri(uri: str) -> str:
    """The URI without its password."""
    if is_file(uri) or "@" not in uri:
        return uri
    host = uri.rpartition("@")[2]
    return f"{urlsplit(uri).scheme}://...@{host}"


def _lite_file(uri: str, may_create: bool) -> Path:
    """The absolute path of a file of Milvus Lite, on disk a folder; raises if it must exist but does not."""
    if not uri.endswith(SUFFIX):
        rule = f"must be a path that ends in {SUFFIX}, for Milvus Lite, or an address such as http://localhost:19530"
        raise InvalidValue(rule, argument="uri", got=repr(uri))
    file = Path(os.path.abspath(check_path("uri", uri)))
    if file.exists() and not file.is_dir():
        rule = "must be a folder that Milvus Lite wrote, or a new path"
        raise InvalidValue(rule, argument="uri", got=f"the file {uri}", cure="give another path")
    if not file.exists() and not may_create:
        raise MissingFile("must be a file of Milvus Lite", argument="uri", got=f"{uri}, which does not exist")
    if not file.parent.is_dir():
        raise MissingFile("must be in a folder that exists", argument="uri", got=uri, cure=f"create {file.parent}")
    return file


def _release(file: Path) -> None:
    """Stop Milvus Lite for this file if no other connection of this process uses it."""
    from milvus_lite.server_manager import server_manager_instance

    with _changing:
        _connections[file] -= 1
        if _connections[file] == 0:
            server_manager_instance.release_server(os.fspath(file))


def _import_pymilvus(with_lite: bool) -> Any:
    """Import pymilvus. If this is the first import, remove the log handlers of pymilvus and Milvus Lite.

    These handlers would print each error with its traceback, although the error is also raised. The log handlers of the
    program still get all messages.
    """
    was_loaded = "pymilvus" in sys.modules
    with optional_import(MISSING):
        import pymilvus

        if with_lite:
            import milvus_lite  # noqa: F401

            logging.getLogger("grpc._server").addFilter(_is_no_missing_method)
    if not was_loaded:
        for name in ("pymilvus", "milvus_lite"):
            logger = logging.getLogger(name)
            logger.handlers = [logging.NullHandler()]
            logger.propagate = True
    return pymilvus


def _is_no_missing_method(record: logging.LogRecord) -> bool:
    """Log filter: False if a record only reports that the client tried a method that Milvus Lite does not implement."""
    return record.exc_info is None or not isinstance(record.exc_info[1], NotImplementedError)


def _reason(error: Exception) -> str:
    """The message of an error of pymilvus, as one line."""
    return first_line(Exception(getattr(error, "message", "") or str(error)))


EXACT = "FLAT"
# Types of index that Milvus Lite supports. It silently accepts other names, too.
LITE_KINDS = ("FLAT", "HNSW", "HNSW_SQ", "IVF_FLAT", "IVF_SQ8", "AUTOINDEX")
KINDS = (*LITE_KINDS, "IVF_PQ", "IVF_RABITQ", "HNSW_PQ", "HNSW_PRQ", "SCANN", "DISKANN", "GPU_CAGRA", "GPU_IVF_FLAT")
LARGEST = 999_999_999  # largest parameter; Milvus uses 32-bit integers
EXAMPLES = "'Flat', 'HNSW,M=32,efConstruction=200' or 'IVF_FLAT,nlist=1024'"


def index_kind(factory: str, *, of_lite: bool = False) -> tuple[str, dict[str, Any]]:
    """Parse the type of an index and its build parameters.

    Args:
        factory: type of the index, followed by comma-separated assignments of numbers.
        of_lite: accept only types that Milvus Lite supports.

    Raises:
        ValueError: if `factory` has another form, or its type of index does not exist.
    """
    kind, _, assignments = factory.partition(",")
    kind = kind.strip().upper()
    values = _assignments(assignments)
    if kind not in KINDS or values is None:
        rule = f"must be a type of index that Milvus has, and how it is built, such as {EXAMPLES}"
        raise InvalidValue(rule, argument="factory", got=short_repr(factory))
    if of_lite and kind not in LITE_KINDS:
        rule = f"must be one that Milvus Lite has, {', '.join(LITE_KINDS)}"
        raise InvalidValue(rule, argument="factory", got=repr(factory), cure="take one of these, or a server")
    return kind, values


def search_parameters(parameters: str) -> dict[str, Any]:
    """Parse search parameters, such as `"ef=64"` for HNSW or `"nprobe=16"` for IVF_FLAT.

    Raises:
        ValueError: if `parameters` does not consist of assignments of numbers.
    """
    values = _assignments(parameters)
    if values is None:
        rule = f"must be assignments of positive numbers, at most {LARGEST}, such as 'ef=64' or 'nprobe=16'"
        raise InvalidValue(rule, argument="parameters", got=short_repr(parameters))
    return values


def _assignments(text: str) -> dict[str, Any] | None:
    """The numbers by name; None if the text is not a list of assignments."""
    values: dict[str, Any] = {}
    if not text.strip():
        return values
    for assignment in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]+[.]?[0-9]*|[.][0-9]+)\s*", assignment)
        if match is None:
            return None
        number: int | float = float(match[2])
        if not 0 < number <= LARGEST:
            return None
        if match[2].isdecimal():
            number = int(number)
        values[match[1]] = number
    return values


# Names of a collection's properties: the metadata as JSON, the recall and, in Milvus Lite, the number of rows. During a
# change of the rows, the number of rows is an empty text.
PROPERTY, RECALL, ROWS = "lightning_retrieval", "lightning_retrieval_recall", "lightning_retrieval_rows"
VERSION = 1
ID, EMBEDDING, PATH = "id", "embedding", "path"
METRIC = "COSINE"
LEAST_DIM, LARGEST_DIM = 2, 32_768  # limits of Milvus
LONGEST_PATH = 65_535  # limit of Milvus in bytes, also for other text
COLUMN = "column_"  # prefix of a column of metadata, so that its name is no word of Milvus
LONGEST_NAME = 200  # number of characters; the limit of Milvus is 255
REBUILD = "build the index again, or give the name of another"


@dataclass(frozen=True)
class Metadata:
    """The metadata of an index, stored in its collection."""

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


def check_store(uri: str, name: str, factory: str, parameters: str) -> None:
    """Raise unless `MilvusStore.create` can write an index of this name to the store, with these settings."""
    index_kind(factory, of_lite=is_file(uri))
    search_parameters(parameters)
    with closing(MilvusConnection(uri, may_create=True)) as connection:
        check_replaceable(connection, name)


def check_dim(dim: int) -> int:
    """Return the dimension of an embedding; raise unless Milvus supports it."""
    return check_integer("dim", dim, least=LEAST_DIM, most=LARGEST_DIM)


def check_columns(columns: Mapping[str, conditions.Kind] | None) -> dict[str, conditions.Kind]:
    """Return the kind of each column of metadata; raise unless the names and the kinds are valid."""
    if columns is None:
        return {}
    for name, kind in columns.items():
        conditions.check_column_name(name)
        check_choice("columns", kind, conditions.COLUMN_KINDS)
    return dict(columns)


def check_name(name: str) -> None:
    """Raise unless Milvus accepts this name."""
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > LONGEST_NAME:
        rule = f"must consist of letters, digits and _, at most {LONGEST_NAME}, and not begin with a digit"
        raise InvalidValue(rule, argument="name", got=repr(name))


def check_replaceable(connection: MilvusConnection, name: str) -> None:
    """Raise unless a name is free or the name of an existing index, which a new index may replace.

    Raises:
        ValueError: if the name is invalid, or belongs to a collection that is not an index.
    """
    check_name(name)
    if not connection.call("has_collection", name):
        return
    collection = _collection_of(connection, name)
    described = connection.call("describe_collection", collection)
    if collection == name or PROPERTY not in described.get("properties", {}):
        got = f"{name!r}, which is something else in {connection.shown}"
        raise InvalidValue("must be new or that of an index", argument="name", got=got, cure="give another")


def create_collection(
    connection: MilvusConnection, metadata: Metadata, kind: str, build_parameters: dict[str, Any]
) -> str:
    """Create an empty collection without an alias, and return its name.

    Raises:
        OSError: if Milvus cannot create it.
    """
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(ID, DataType.INT64, is_primary=True)
    schema.add_field(EMBEDDING, DataType.FLOAT_VECTOR, dim=metadata.dim)
    schema.add_field(PATH, DataType.VARCHAR, max_length=LONGEST_PATH)
    types = {"text": (DataType.VARCHAR, {"max_length": LONGEST_PATH}), "number": (DataType.DOUBLE, {})}
    for name, kind_of_column in metadata.columns.items():
        data_type, settings = types[kind_of_column]
        schema.add_field(COLUMN + name, data_type, **settings)
    index = MilvusClient.prepare_index_params()
    # Servers accept build parameters as single values or nested in `params`; Milvus Lite accepts only the nested form.
    nested = {"params": build_parameters}
    index.add_index(EMBEDDING, index_type=kind, metric_type=METRIC, params=nested)
    collection = f"{metadata.name}_{secrets.token_hex(4)}"
    connection.call(
        "create_collection",
        collection,
        schema=schema,
        index_params=index,
        properties=metadata.as_property(),
        consistency_level="Strong",
    )
    return collection


def read_collection(connection: MilvusConnection, name: str) -> tuple[str, Metadata, float | None, int | None]:
    """The name of the collection of an index, its metadata, its recall and its number of rows.

    The recall or the number of rows is None if it is not recorded.

    Raises:
        FileNotFoundError: if there is no collection of this name.
        ValueError: if the collection is not an index, is damaged, or has the wrong fields, metric or version.
    """
    check_name(name)
    if not connection.call("has_collection", name):
        rule = f"must be that of an index in {connection.shown}"
        raise MissingFile(rule, argument="name", got=f"{name!r}, which it does not hold")
    collection = _collection_of(connection, name)
    described = connection.call("describe_collection", collection)
    properties = described.get("properties", {})
    if PROPERTY not in properties:
        got = f"{name!r}, a collection in {connection.shown} that something else made"
        raise InvalidValue("must be that of an index", argument="name", got=got)
    try:
        values = dict(json.loads(properties[PROPERTY]))
    except (TypeError, ValueError, RecursionError):
        values = {}
    if values.get("version") != VERSION:
        raise InvalidValue(
            f"{name!r} in {connection.shown} has format version {values.get('version')!r}, but this release reads "
            f"version {VERSION}",
            cure=REBUILD,
        )
    try:
        metadata = _metadata(values)
        recall, rows = None, None  # a property is empty while its value is unknown
        if properties.get(RECALL):
            recall = float(properties[RECALL])
        if properties.get(ROWS):
            rows = int(properties[ROWS])
    except (TypeError, ValueError):
        rule = f"{name!r} in {connection.shown} is damaged, its metadata are invalid"
        raise InvalidValue(rule, cure=REBUILD) from None
    _check_fields(connection, collection, described["fields"], metadata.dim)
    return collection, metadata, recall, rows


def publish_collection(connection: MilvusConnection, collection: str, name: str) -> None:
    """Make the name an alias of this collection, and delete the other collections of the same index."""
    check_replaceable(connection, name)
    method = "create_alias"
    if connection.call("has_collection", name):
        method = "alter_alias"
    connection.call(method, collection, name)
    for other in connection.call("list_collections"):
        if other != collection and re.fullmatch(f"{name}_[0-9a-f]{{8}}", other):
            properties = connection.call("describe_collection", other).get("properties", {})
            if PROPERTY in properties:
                drop_collection(connection, other)


def drop_collection(connection: MilvusConnection, collection: str) -> None:
    """Delete the aliases of a collection, then the collection: Milvus requires this order."""
    described = connection.call("describe_collection", collection)
    for alias in described.get("aliases", []):
        connection.call("drop_alias", alias)
    connection.call("drop_collection", collection)


def _metadata(values: dict[str, Any]) -> Metadata:
    """Metadata with these values; raises TypeError or ValueError if a value is invalid."""
    metadata = Metadata(**values)
    index_kind(metadata.factory)
    search_parameters(metadata.parameters)
    check_columns(metadata.columns)
    are_dicts = isinstance(metadata.about, dict) and isinstance(metadata.columns, dict)
    is_valid = are_dicts and isinstance(metadata.name, str) and type(metadata.dim) is int
    if not is_valid:
        raise TypeError
    return metadata


def _collection_of(connection: MilvusConnection, name: str) -> str:
    """The collection with this name or alias."""
    if name in connection.call("list_collections"):
        return name
    return str(connection.call("describe_alias", name)["collection_name"])


def _check_fields(connection: MilvusConnection, collection: str, fields: list[dict[str, Any]], dim: int) -> None:
    """Raise unless a collection has the dimension `dim` of its metadata, and the metric of this library."""
    dims = {entry["name"]: entry.get("params", {}).get("dim") for entry in fields}
    index = connection.call("describe_index", collection, EMBEDDING) or {}
    found = (int(dims.get(EMBEDDING) or 0), index.get("metric_type"))
    if found != (dim, METRIC):
        raise InvalidValue(
            f"the collection {collection!r} in {connection.shown} must have {dim} dimensions and the metric "
            f"{METRIC}, as the index needs them",
            got=f"{found[0]} and {found[1]}",
            cure=REBUILD,
        )
