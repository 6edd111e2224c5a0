"""One shard of embeddings: a Parquet file, or a .npy file with a JSON file beside it.

A Parquet file has the columns `id` (int64), `path` and `label` (strings) and `embedding` (a fixed-size list of D
float32 or float16), and a checksum of each page. Beside a .npy file, which has shape (rows, D), a JSON file of the same
name has the rest.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.search.files import DigestStream

FILE_FORMATS = ("parquet", "npy")
DTYPES = ("float32", "float16")
UNREADABLE, ORIGIN, IMAGE_FILES = b"unreadable", b"origin", b"image_files"  # in the metadata of a Parquet file


@dataclass(frozen=True)
class ShardRows:
    """Some rows of embeddings.

    Args:
        ids: of the rows.
        embeddings: as the model gives them, in the type in which they are stored.
        paths: one for each row, "" if it has none.
        labels: one for each row, None where it is not known.
        unreadable: path and reason of each image of the shard that could not be read, and therefore has no row.
        origin: which shard of which folder the rows are of, see `EmbeddingFolder`.
        image_files: digest of the sizes and times of the image files, see `digest_of_files`; "" if it is not known.
    """

    ids: Int64[np.ndarray, " rows"]
    embeddings: Float[np.ndarray, "rows dim"]
    paths: list[str]
    labels: list[str | None]
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    origin: str = ""
    image_files: str = ""


def shard_suffixes(file_format: str) -> tuple[str, ...]:
    """The suffixes of the files of a shard; the last one is written last, so a shard with it is complete."""
    if file_format == "npy":
        return (".json", ".npy")
    return (".parquet",)


def stored_rows(owner: str, rows: ShardRows, dtype: str) -> ShardRows:
    """The rows with their embeddings in the type in which they are stored.

    Raises:
        ValueError: if a number is too large for this type.
    """
    stored = np.dtype(dtype)
    if rows.embeddings.size and np.abs(rows.embeddings).max() > np.finfo(stored).max:
        raise ValueError(
            f"{owner}: `dtype` must be a type that the embeddings fit into, got {dtype} for numbers up to "
            f"{np.abs(rows.embeddings).max():.3g}; use {DTYPES[0]}."
        )
    return replace(rows, embeddings=rows.embeddings.astype(stored, copy=False))


def load_pyarrow(owner: str) -> Any:
    """The module `pyarrow`, with `pyarrow.parquet`.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    with optional_import(
        f"{owner}: pyarrow must be installed for Parquet files: pip install 'lightning-retrieval[parquet]'; or "
        "choose the format npy."
    ):
        import pyarrow.parquet
    return pyarrow


def write_parquet(owner: str, rows: ShardRows, stream: DigestStream) -> None:
    """Write the Parquet file of a shard."""
    pyarrow = load_pyarrow(owner)
    dim = rows.embeddings.shape[1]
    values = pyarrow.array(np.ascontiguousarray(rows.embeddings).reshape(-1))
    columns = {
        "id": pyarrow.array(rows.ids),
        "path": pyarrow.array(rows.paths, pyarrow.string()),
        "label": pyarrow.array(rows.labels, pyarrow.string()),
        "embedding": pyarrow.FixedSizeListArray.from_arrays(values, dim),
    }
    metadata = {UNREADABLE: json.dumps(rows.unreadable), ORIGIN: rows.origin, IMAGE_FILES: rows.image_files}
    table = pyarrow.table(columns).replace_schema_metadata(metadata)
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer, compression="zstd", use_dictionary=["label"], write_page_checksum=True)
    stream.write(buffer.getvalue())


def read_parquet(owner: str, path: Path) -> ShardRows:
    """Read the Parquet file of a shard, and compare its checksums."""
    pyarrow = load_pyarrow(owner)
    table = pyarrow.parquet.read_table(path, page_checksum_verification=True, memory_map=False)
    column = table.column("embedding").combine_chunks()
    dim = column.type.list_size
    return ShardRows(
        table.column("id").to_numpy(),
        np.array(column.flatten()).reshape(-1, dim),  # a copy, which can be written to
        table.column("path").to_pylist(),
        table.column("label").to_pylist(),
        _pairs(json.loads(table.schema.metadata[UNREADABLE])),
        table.schema.metadata[ORIGIN].decode(),
        table.schema.metadata.get(IMAGE_FILES, b"").decode(),
    )


def write_npy(rows: ShardRows, stream: DigestStream) -> None:
    """Write the embeddings of a shard."""
    np.save(stream, np.ascontiguousarray(rows.embeddings))


def write_json(rows: ShardRows, stream: DigestStream) -> None:
    """Write everything but the embeddings of a shard, and the checksum of its embeddings."""
    content = {
        "ids": rows.ids.tolist(),
        "paths": rows.paths,
        "labels": rows.labels,
        "unreadable": rows.unreadable,
        "origin": rows.origin,
        "image_files": rows.image_files,
        "sha256": _digest(rows.embeddings),
    }
    stream.write(json.dumps(content).encode())


def read_npy(path: Path) -> ShardRows:
    """Read the two files of a shard, and compare the checksum.

    Raises:
        ValueError: if the checksum is wrong.
    """
    embeddings = np.load(path)
    content: Mapping[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if _digest(embeddings) != content["sha256"]:
        raise ValueError("the checksum of its embeddings is wrong")
    ids = np.array(content["ids"], dtype=np.int64)
    unreadable = _pairs(content["unreadable"])
    image_files = content.get("image_files", "")  # which earlier releases did not write
    return ShardRows(ids, embeddings, content["paths"], content["labels"], unreadable, content["origin"], image_files)


def read_metadata(owner: str, path: Path) -> tuple[list[tuple[str, str]], str]:
    """Only the images of a shard that could not be read, and the digest of its image files."""
    if path.suffix == ".npy":
        content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return _pairs(content["unreadable"]), content.get("image_files", "")
    pyarrow = load_pyarrow(owner)
    metadata = pyarrow.parquet.read_schema(path).metadata
    return _pairs(json.loads(metadata[UNREADABLE])), metadata.get(IMAGE_FILES, b"").decode()


def _pairs(listed: list[list[str]]) -> list[tuple[str, str]]:
    return [(path, reason) for path, reason in listed]


def _digest(embeddings: Float[np.ndarray, "rows dim"]) -> str:
    return hashlib.sha256(np.ascontiguousarray(embeddings).data).hexdigest()
