"""A connection to Milvus: to a file of Milvus Lite, which runs in this process, or to a server or a cluster.

pymilvus is the client of all of them. Each of its errors becomes one sentence.

An index `birds` is a collection `birds_5f0c21d4` with the alias `birds`. A new index is written to another collection,
which then gets the alias in one atomic step, so a reader finds either the old index or the new one, complete. The
metadata of an index are a property of its collection; its kind and the parameters of searches are written as text.
"""

import fcntl
import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_retrieval.checks import check_integer, check_path, check_string, first_line, short_repr
from lightning_retrieval.optional_packages import optional_import

OWNER = "MilvusStore"  # prefix of error messages
MISSING = (
    f"{OWNER}: a store in Milvus needs pymilvus and milvus-lite; install them with pip install "
    "'lightning-retrieval[milvus]'."
)
SUFFIX = ".db"  # by which pymilvus knows a file of Milvus Lite
ADDRESS = re.compile("(https?|tcp|unix):")
CONNECTING = 10.0  # seconds that a server has to answer
CALLING = 60.0  # seconds that a call may take
LONG_CALLING = 3600.0  # seconds that a call may take that writes, loads or indexes a whole collection
LONG = ("flush", "load_collection", "create_index")
LOADS, BETWEEN_LOADS = 5, 0.5  # times that a collection is loaded until it succeeds, and seconds between them
_connections: Counter[Path] = Counter()  # of this process to each file
_changing = threading.Lock()


class MilvusConnection:
    """A client of Milvus.

    Args:
        uri: a path that ends in `.db`, or an address.
        may_create: create the file of Milvus Lite if it does not exist.

    Raises:
        ModuleNotFoundError: if pymilvus or milvus-lite is not installed.
        FileNotFoundError: if the file, or the folder that it is to be created in, does not exist.
        ValueError: if `uri` is neither.
        ConnectionError: if nothing answers, or another process has opened the file.
    """

    def __init__(self, uri: str, *, may_create: bool) -> None:
        self.file: Path | None = None
        if is_file(uri):
            self.file = _lite_file(uri, may_create)
        self.shown = shown_uri(uri)
        self._client = self._connect(uri)

    def call(self, method: str, *args: Any, **settings: Any) -> Any:
        """The result of a method of the client.

        Raises:
            ValueError: if the connection is closed.
            OSError: if Milvus reports an error.
        """
        if self._client is None:
            raise ValueError(
                f"{OWNER}: the connection to {self.shown} must be open for {method}; open the index again."
            )
        seconds = CALLING
        if method in LONG:
            seconds = LONG_CALLING
        return self.checked(method, partial(getattr(self._client, method), *args, timeout=seconds, **settings))

    def checked(self, method: str, call: Callable[[], Any]) -> Any:
        """The result of a call that belongs to a method of the client.

        Raises:
            OSError: if Milvus reports an error.
        """
        from pymilvus.exceptions import ErrorCode, MilvusException

        try:
            return call()
        except MilvusException as error:
            cure = ""
            if error.code == ErrorCode.COLLECTION_NOT_FOUND:
                cure = "; another process has replaced or deleted the index, so open it again"
            raise OSError(f"{OWNER}: {self.shown} reports an error in {method} ({_reason(error)}){cure}.") from None

    def load(self, collection: str) -> None:
        """Load a collection, so that it can be searched.

        A thread of Milvus Lite may just be writing the file of an index that is read; then it is read again.

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
        """End the connection; the last one to a file also ends Milvus Lite, which writes what it holds in memory."""
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
            raise ConnectionError(f"{OWNER}: {self._unreachable(error)}") from None
        return client

    def _unreachable(self, error: Exception) -> str:
        if self.file is None:
            return (
                f"`uri` must be the address of Milvus, got {self.shown}, where nothing answered within "
                f"{CONNECTING:g} s ({_reason(error)}); nothing was written, so start Milvus there or give another "
                "address."
            )
        if _is_locked(self.file):
            return (
                f"`uri` must not be in use, got {self.shown}, which another process has opened; wait until it has "
                "finished, or let a server share the file: milvus-lite server --data-dir FILE."
            )
        return f"`uri` must be a file of Milvus Lite, got {self.shown}, which it cannot open ({_reason(error)})."


def is_file(uri: str) -> bool:
    """Whether this is a file of Milvus Lite, not an address; raise unless it is a string."""
    check_string(OWNER, "uri", uri)
    return not ADDRESS.match(uri)


def shown_uri(uri: str) -> str:
    """The URI without its password."""
    if is_file(uri) or "@" not in uri:
        return uri
    host = uri.rpartition("@")[2]
    return f"{urlsplit(uri).scheme}://...@{host}"


def _lite_file(uri: str, may_create: bool) -> Path:
    """The absolute path of a file of Milvus Lite, which is a folder; raise if there is none and it may not be made."""
    if not uri.endswith(SUFFIX):
        raise ValueError(
            f"{OWNER}: `uri` must be a path that ends in {SUFFIX}, for Milvus Lite, or an address such as "
            f"http://localhost:19530, got {uri!r}."
        )
    file = Path(os.path.abspath(check_path(OWNER, "uri", uri)))
    if file.exists() and not file.is_dir():
        raise ValueError(
            f"{OWNER}: `uri` must be what Milvus Lite writes, which is a folder, got {uri}, which is a file; give "
            "another path."
        )
    if not file.exists() and not may_create:
        raise FileNotFoundError(f"{OWNER}: `uri` must be a file of Milvus Lite, got {uri}, which does not exist.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{OWNER}: `uri` must be in a folder that exists, got {uri}; create {file.parent}.")
    return file


def _release(file: Path) -> None:
    """End Milvus Lite for this file, if no other connection of this process needs it."""
    from milvus_lite.server_manager import server_manager_instance

    with _changing:
        _connections[file] -= 1
        if _connections[file] == 0:
            server_manager_instance.release_server(os.fspath(file))


def _is_locked(file: Path) -> bool:
    """Whether a process holds the lock of Milvus Lite."""
    try:
        with (file / "LOCK").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _import_pymilvus(with_lite: bool) -> Any:
    """Import the client. If nobody has before, what it and Milvus Lite log goes to the handlers of the program only.

    They would print each error with its traceback, and it is raised as well.
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
    """Whether a record says more than that the client has tried a method that Milvus Lite does not have."""
    return record.exc_info is None or not isinstance(record.exc_info[1], NotImplementedError)


def _reason(error: Exception) -> str:
    """The message of an error of pymilvus on one line."""
    return first_line(Exception(getattr(error, "message", "") or str(error)))


EXACT = "FLAT"
LITE_KINDS = ("FLAT", "HNSW", "HNSW_SQ", "IVF_FLAT", "IVF_SQ8", "AUTOINDEX")  # of Milvus Lite, which accepts any name
KINDS = (*LITE_KINDS, "IVF_PQ", "IVF_RABITQ", "HNSW_PQ", "HNSW_PRQ", "SCANN", "DISKANN", "GPU_CAGRA", "GPU_IVF_FLAT")
LARGEST = 999_999_999  # of a parameter; Milvus reads integers of 32 bits
EXAMPLES = "'Flat', 'HNSW,M=32,efConstruction=200' or 'IVF_FLAT,nlist=1024'"


def index_kind(factory: str, *, of_lite: bool = False) -> tuple[str, dict[str, Any]]:
    """The type of an index and the parameters that it is built with.

    Args:
        factory: the type, and assignments of numbers, with commas between them.
        of_lite: accept only types that Milvus Lite has.

    Raises:
        ValueError: if the text is something else, or there is no such type.
        TypeError: if it is not a string.
    """
    check_string(OWNER, "factory", factory)
    kind, _, assignments = factory.partition(",")
    kind = kind.strip().upper()
    values = _assignments(assignments)
    if kind not in KINDS or values is None:
        raise ValueError(
            f"{OWNER}: `factory` must be a type of index that Milvus has, and how it is built, such as {EXAMPLES}, got "
            f"{short_repr(factory)}."
        )
    if of_lite and kind not in LITE_KINDS:
        raise ValueError(
            f"{OWNER}: `factory` must be one that Milvus Lite has, {', '.join(LITE_KINDS)}, got {factory!r}; take "
            "one of these, or a server."
        )
    return kind, values


def search_parameters(parameters: str) -> dict[str, Any]:
    """The parameters of a search, such as `"ef=64"` for HNSW or `"nprobe=16"` for IVF_FLAT.

    Raises:
        ValueError: if the text does not consist of assignments of numbers.
        TypeError: if it is not a string.
    """
    check_string(OWNER, "parameters", parameters)
    values = _assignments(parameters)
    if values is None:
        raise ValueError(
            f"{OWNER}: `parameters` must be assignments of positive numbers, at most {LARGEST}, such as 'ef=64' or "
            f"'nprobe=16', got {short_repr(parameters)}."
        )
    return values


def _assignments(text: str) -> dict[str, Any] | None:
    """The numbers by name; None if the text holds anything else."""
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


# Properties of a collection: its metadata as JSON, its recall, and in Milvus Lite its number of rows, empty while they
# are changed.
PROPERTY, RECALL, ROWS = "lightning_retrieval", "lightning_retrieval_recall", "lightning_retrieval_rows"
VERSION = 1
ID, EMBEDDING, PATH = "id", "embedding", "path"
METRIC = "COSINE"
LEAST_DIM, LARGEST_DIM = 2, 32_768  # of Milvus
LONGEST_PATH = 65_535  # bytes, of Milvus
LONGEST_NAME = 200  # characters; Milvus' limit is 255
REBUILD = "build the index again, or give the name of another"


@dataclass(frozen=True)
class Metadata:
    """What an index records about itself."""

    name: str
    dim: int
    factory: str
    parameters: str
    about: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION


def check_store(uri: str, name: str, factory: str, parameters: str) -> None:
    """Raise unless an index can be written with this name and these settings; the arguments are those of `create`."""
    index_kind(factory, of_lite=is_file(uri))
    search_parameters(parameters)
    with closing(MilvusConnection(uri, may_create=True)) as connection:
        check_replaceable(connection, name)


def check_dim(dim: int) -> int:
    """The dimension of an embedding; raise unless Milvus can hold such embeddings."""
    return check_integer(OWNER, "dim", dim, least=LEAST_DIM, most=LARGEST_DIM)


def check_name(name: str) -> None:
    """Raise unless Milvus accepts this name."""
    check_string(OWNER, "name", name)
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{OWNER}: `name` must consist of letters, digits and _, at most {LONGEST_NAME}, and not begin with a "
            f"digit, got {name!r}."
        )


def check_replaceable(connection: MilvusConnection, name: str) -> None:
    """Raise unless an index may be written under this name: the name is new, or already that of an index.

    Raises:
        ValueError: if the name is invalid, or belongs to something else.
    """
    check_name(name)
    if not connection.call("has_collection", name):
        return
    collection = _collection_of(connection, name)
    described = connection.call("describe_collection", collection)
    if collection == name or PROPERTY not in described.get("properties", {}):
        raise ValueError(
            f"{OWNER}: `name` must be new or that of an index, got {name!r}, which is something else in "
            f"{connection.shown}; give another."
        )


def create_collection(
    connection: MilvusConnection, metadata: Metadata, kind: str, build_parameters: dict[str, Any]
) -> str:
    """Create an empty collection without an alias; its name.

    Raises:
        OSError: if Milvus cannot create it.
    """
    from pymilvus import DataType, MilvusClient

    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(ID, DataType.INT64, is_primary=True)
    schema.add_field(EMBEDDING, DataType.FLOAT_VECTOR, dim=metadata.dim)
    schema.add_field(PATH, DataType.VARCHAR, max_length=LONGEST_PATH)
    index = MilvusClient.prepare_index_params()
    # As a dictionary of this name in the request, which servers read as well as single values, and Milvus Lite alone.
    nested = {"params": build_parameters}
    index.add_index(EMBEDDING, index_type=kind, metric_type=METRIC, params=nested)
    collection = f"{metadata.name}_{secrets.token_hex(4)}"
    connection.call(
        "create_collection",
        collection,
        schema=schema,
        index_params=index,
        properties={PROPERTY: json.dumps(asdict(metadata))},
        consistency_level="Strong",
    )
    return collection


def read_collection(connection: MilvusConnection, name: str) -> tuple[str, Metadata, float | None, int | None]:
    """The name of the collection behind an index, its metadata, its recall and its number of rows.

    The last two are None if they are not recorded.

    Raises:
        FileNotFoundError: if there is none of this name.
        ValueError: if it is not an index, is damaged, or its fields, its metric or its version are others.
    """
    check_name(name)
    if not connection.call("has_collection", name):
        raise FileNotFoundError(
            f"{OWNER}: `name` must be that of an index in {connection.shown}, got {name!r}, which it does not hold."
        )
    collection = _collection_of(connection, name)
    described = connection.call("describe_collection", collection)
    properties = described.get("properties", {})
    if PROPERTY not in properties:
        raise ValueError(
            f"{OWNER}: `name` must be that of an index, got {name!r}, a collection in {connection.shown} that "
            "something else made."
        )
    try:
        values = dict(json.loads(properties[PROPERTY]))
    except (TypeError, ValueError, RecursionError):
        values = {}
    if values.get("version") != VERSION:
        raise ValueError(
            f"{OWNER}: {name!r} in {connection.shown} has format version {values.get('version')!r}, but this release "
            f"reads version {VERSION}; {REBUILD}."
        )
    try:
        metadata = _metadata(values)
        recall, rows = None, None  # empty while they are not known
        if properties.get(RECALL):
            recall = float(properties[RECALL])
        if properties.get(ROWS):
            rows = int(properties[ROWS])
    except (TypeError, ValueError):
        raise ValueError(
            f"{OWNER}: {name!r} in {connection.shown} is damaged, its metadata are invalid; {REBUILD}."
        ) from None
    _check_fields(connection, collection, described["fields"], metadata.dim)
    return collection, metadata, recall, rows


def publish_collection(connection: MilvusConnection, collection: str, name: str) -> None:
    """Let a name stand for this collection, and delete the other collections of the same index."""
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
    """Delete a collection; Milvus asks for its aliases to be deleted before."""
    described = connection.call("describe_collection", collection)
    for alias in described.get("aliases", []):
        connection.call("drop_alias", alias)
    connection.call("drop_collection", collection)


def _metadata(values: dict[str, Any]) -> Metadata:
    """The metadata with these values; raise TypeError or ValueError if they are not those of an index."""
    metadata = Metadata(**values)
    index_kind(metadata.factory)
    search_parameters(metadata.parameters)
    is_valid = isinstance(metadata.name, str) and type(metadata.dim) is int and isinstance(metadata.about, dict)
    if not is_valid:
        raise TypeError
    return metadata


def _collection_of(connection: MilvusConnection, name: str) -> str:
    """The collection that a name stands for: itself, or that of an alias."""
    if name in connection.call("list_collections"):
        return name
    return str(connection.call("describe_alias", name)["collection_name"])


def _check_fields(connection: MilvusConnection, collection: str, fields: list[dict[str, Any]], dim: int) -> None:
    """Raise unless the collection has the dimension and the metric that its metadata say."""
    dims = {entry["name"]: entry.get("params", {}).get("dim") for entry in fields}
    index = connection.call("describe_index", collection, EMBEDDING) or {}
    found = (int(dims.get(EMBEDDING) or 0), index.get("metric_type"))
    if found != (dim, METRIC):
        raise ValueError(
            f"{OWNER}: the collection {collection!r} in {connection.shown} must have {dim} dimensions and the metric "
            f"{METRIC}, as the index in it, got {found[0]} and {found[1]}; {REBUILD}."
        )
