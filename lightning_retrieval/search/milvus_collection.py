"""The collection of Milvus that holds an index: its fields, its metadata, and its name.

An index `birds` is a collection `birds_5f0c21d4` with the alias `birds`. A new index is written to another collection,
which then gets the alias in one atomic step, so a reader finds either the old index or the new one, complete. The
metadata are a property of the collection.
"""

import json
import re
import secrets
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from lightning_retrieval.checks import check_integer, check_string
from lightning_retrieval.search.milvus_connection import OWNER, MilvusConnection, is_file
from lightning_retrieval.search.milvus_factory import index_kind, search_parameters

PROPERTY = "lightning_retrieval"  # of a collection: its metadata as JSON
RECALL = "lightning_retrieval_recall"
ROWS = "lightning_retrieval_rows"  # number of rows of an index that is not being changed, in Milvus Lite
VERSION = 1
ID, EMBEDDING, PATH = "id", "embedding", "path"
METRIC = "COSINE"
LEAST_DIM, LARGEST_DIM = 2, 32_768  # of Milvus
LONGEST_PATH = 65_535  # bytes, of Milvus
LONGEST_NAME = 200  # characters; Milvus' limit is 255
Number = TypeVar("Number", int, float)
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
    """The length of an embedding; raise unless Milvus can hold such embeddings."""
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
    """Raise unless an index of this name may be written: there is none, or there is an index.

    Raises:
        ValueError: if the name is invalid, or that of anything else.
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
    values = _values(properties[PROPERTY])
    if values.get("version") != VERSION:
        raise ValueError(
            f"{OWNER}: {name!r} in {connection.shown} has format version {values.get('version')!r}, but this release "
            f"reads version {VERSION}; {REBUILD}."
        )
    damage = ValueError(f"{OWNER}: {name!r} in {connection.shown} is damaged, its metadata are invalid; {REBUILD}.")
    metadata = _metadata(values)
    if metadata is None:
        raise damage
    _check_fields(connection, collection, described["fields"], metadata.dim)
    try:
        recall = _number(properties, RECALL, float)
        rows = _number(properties, ROWS, int)
    except ValueError:
        raise damage from None
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


def _values(text: str) -> dict[str, Any]:
    """The metadata in a property; without values if the text is damaged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return values


def _metadata(values: dict[str, Any]) -> Metadata | None:
    """The metadata with these values; None if they are not those of an index."""
    try:
        metadata = Metadata(**values)
        index_kind(metadata.factory)
        search_parameters(metadata.parameters)
    except (TypeError, ValueError):
        return None
    is_valid = isinstance(metadata.name, str) and type(metadata.dim) is int and isinstance(metadata.about, dict)
    if not is_valid:
        return None
    return metadata


def _number(properties: dict[str, str], name: str, kind: type[Number]) -> Number | None:
    """A number in a property, which is empty while it is not known; raise ValueError if it is something else."""
    text = properties.get(name)
    if not text:
        return None
    return kind(text)


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
