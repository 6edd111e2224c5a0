"""A folder of embeddings in shards, which several runs and several processes can fill.

    DIR/_manifest.json      what the embeddings are of: model, preparation, list of images, size of a shard
    DIR/part-00000.parquet  rows 0 to shard_size - 1, and so on

A shard appears in one atomic step when it is complete, so a file that exists is the record that its images are done.
Whoever continues looks for the files that are missing, and nothing else has to be kept. Readers of folders of Parquet
files ignore names that begin with `_` or `.`, so they can read the folder as one table.

A Parquet file has the columns `id` (int64), `path` and `label` (strings) and `embedding` (a fixed-size list of D
float32 or float16), and a checksum of each page. In the format npy, a shard is a .npy file of shape (rows, D), beside
which a JSON file of the same name has the rest.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from jaxtyping import Float, Int64

from lightning_retrieval.checks import first_line, first_of
from lightning_retrieval.files import (
    DigestStream,
    Manifest,
    delete_temporary_files,
    folder_lock,
    is_temporary,
    write_verified,
)
from lightning_retrieval.optional_packages import optional_import

FILE_FORMATS = ("parquet", "npy")
DTYPES = ("float32", "float16")
MANIFEST, LOCK = "_manifest.json", "_lock"
# Earlier versions of the library wrote no checksum.
FORMAT = Manifest(
    "embeddings", MANIFEST, "embed", "restore it from a copy, or give another folder", may_lack_checksum=True
)
SHARD_SIZE = 10_000  # rows
SETTINGS = ("dim", "shard_size", "file_format", "dtype", "precision")
UNREADABLE, ORIGIN, IMAGE_FILES = b"unreadable", b"origin", b"image_files"  # in the metadata of a Parquet file


@dataclass(frozen=True)
class ShardRows:
    """The rows of a shard, or those that a process adds to one.

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


def write_parquet(pyarrow: Any, rows: ShardRows, stream: DigestStream) -> None:
    """Write the Parquet file of a shard."""
    dim = rows.embeddings.shape[1]
    values = pyarrow.array(rows.embeddings.reshape(-1))
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


def read_parquet(pyarrow: Any, path: Path) -> ShardRows:
    """Read the Parquet file of a shard, and compare its checksums."""
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


def _pairs(listed: list[list[str]]) -> list[tuple[str, str]]:
    return [(path, reason) for path, reason in listed]


def _digest(embeddings: Float[np.ndarray, "rows dim"]) -> str:
    return hashlib.sha256(np.ascontiguousarray(embeddings).data).hexdigest()


@dataclass(frozen=True)
class EmbeddingManifest:
    """What the embeddings in a folder are of. Two runs may fill one folder if all of this but `about` is equal.

    Args:
        images: number of images, also those that cannot be read.
        images_sha256: of their list, see `digest_of_list`.
        model_sha256: of the checkpoint file, or of the weights.
        preparation: plain values that say what is done to an image before the network.
        dim: D, the dimension of an embedding; 0 if it is not known before the first one.
        shard_size: number of images of a shard; the last one may be smaller.
        file_format: `"parquet"` or `"npy"`.
        dtype: of the numbers in the files, `"float32"` or `"float16"`.
        precision: in which the network computes, as Lightning names it.
        about: plain values that are kept for an index, such as the path of the checkpoint.
    """

    images: int
    images_sha256: str
    model_sha256: str
    preparation: Mapping[str, Any]
    dim: int
    shard_size: int = SHARD_SIZE
    file_format: str = FILE_FORMATS[0]
    dtype: str = DTYPES[0]
    precision: str = "32-true"
    about: Mapping[str, Any] = field(default_factory=dict)


def digest_of_list(fields: Iterable[Sequence[Any]]) -> str:
    """SHA-256 of a list of images.

    Args:
        fields: of each image, its path and whatever else says what is embedded, such as its box and its label.
    """
    digest = hashlib.sha256()
    for of_image in fields:
        digest.update(json.dumps(of_image).encode() + b"\n")
    return digest.hexdigest()


def digest_of_files(files: Iterable[Path]) -> str:
    """SHA-256 of the sizes and modification times of files, of which some may not exist."""
    digest = hashlib.sha256()
    for file in files:
        found = None
        with suppress(OSError):
            status = file.stat()
            found = (status.st_size, status.st_mtime_ns)
        digest.update(f"{found}\n".encode())
    return digest.hexdigest()


class EmbeddingFolder:
    """The shards in a folder, some of which may be missing; `create` or `load` makes one.

    Args:
        owner: prefix of error messages.
        path: of the folder.
        manifest: what the embeddings are of.
    """

    def __init__(self, owner: str, path: Path, manifest: EmbeddingManifest) -> None:
        self.owner = owner
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(cls, owner: str, path: Path, manifest: EmbeddingManifest) -> "EmbeddingFolder":
        """Begin a folder, or continue one with the same manifest.

        Raises:
            ValueError: if the folder holds embeddings of another model or list, or something else.
        """
        check_output(owner, path)
        folder = cls(owner, path, manifest)
        if folder.check_begun():
            return folder
        path.mkdir(parents=True, exist_ok=True)
        content = FORMAT.encode(asdict(manifest))
        write_verified(owner, path / MANIFEST, lambda stream: stream.write(content))
        return folder

    @classmethod
    def load(cls, owner: str, path: Path) -> "EmbeddingFolder":
        """The embeddings in a folder, all of whose shards are there.

        Raises:
            FileNotFoundError: if the folder holds no embeddings.
            ValueError: if its manifest is damaged, or a shard is missing.
        """
        folder = cls(owner, path, _read_manifest(owner, path))
        missing = folder.missing()
        if missing:
            names = [folder._file(shard).name for shard in missing]
            raise ValueError(
                f"{owner}: {path} must hold all embeddings, but {len(missing)} of its {len(folder)} shards are "
                f"missing ({first_of(names)}); run the command that writes it again, which continues."
            )
        return folder

    def check_begun(self) -> bool:
        """Whether the folder has a manifest; raise if it is not the same as that of this object.

        Raises:
            ValueError: if the folder holds embeddings of another model or list.
        """
        if not (self.path / MANIFEST).exists():
            return False
        _check_same(self.owner, self.path, _read_manifest(self.owner, self.path), self.manifest)
        return True

    def __len__(self) -> int:
        """Number of shards, also of missing ones."""
        return -(-self.manifest.images // self.manifest.shard_size)

    def positions(self, shard: int) -> range:
        """Positions in the list of the images of a shard, which are also their ids."""
        begin = shard * self.manifest.shard_size
        return range(begin, min(begin + self.manifest.shard_size, self.manifest.images))

    def missing(self) -> list[int]:
        """Numbers of the shards that are not complete yet."""
        return [shard for shard in range(len(self)) if not self._file(shard).exists()]

    @contextmanager
    def lock(self) -> Iterator[IO[str]]:
        """Let nobody else write meanwhile, and remove what a killed run has left.

        Raises:
            ValueError: if another process is writing.
        """
        with folder_lock(self.owner, self.path, LOCK) as file:
            delete_temporary_files(self.path)
            yield file

    def write(self, shard: int, rows: ShardRows) -> None:
        """Write a shard, which is complete or absent at any time.

        Raises:
            OSError: if it cannot be written completely.
            ValueError: if a number is too large for the type that it is stored in.
        """
        dtype = np.dtype(self.manifest.dtype)
        largest = np.abs(rows.embeddings).max(initial=0)
        if largest > np.finfo(dtype).max:
            raise ValueError(
                f"{self.owner}: `dtype` must be a type that the embeddings fit into, got {dtype} for numbers up to "
                f"{largest:.3g}; use {DTYPES[0]}."
            )
        embeddings = np.ascontiguousarray(rows.embeddings, dtype)
        rows = replace(rows, embeddings=embeddings, origin=self._origin(shard))
        if self.manifest.file_format == "npy":
            self._file(shard).unlink(missing_ok=True)  # of images that have changed, which is not that of the new JSON
            write_verified(self.owner, self._file(shard, ".json"), partial(write_json, rows))
            write_verified(self.owner, self._file(shard), partial(np.save, arr=embeddings))
        else:
            write_verified(self.owner, self._file(shard), partial(write_parquet, load_pyarrow(self.owner), rows))

    def read(self, shard: int) -> ShardRows:
        """The rows of a shard.

        Raises:
            ValueError: if its file is missing or damaged, or was copied from another folder.
        """
        file = self._file(shard)
        if not file.exists():
            raise ValueError(f"{self.owner}: {file} is missing; run the command that wrote it again, which continues.")
        with self._named(file):
            if self.manifest.file_format == "npy":
                rows = read_npy(file)
            else:
                rows = read_parquet(load_pyarrow(self.owner), file)
        if rows.origin != self._origin(shard) or rows.embeddings.shape[1] != self.manifest.dim:
            raise ValueError(
                f"{self.owner}: {file} must hold shard {shard} of the embeddings that {MANIFEST} beside it describes, "
                "but holds embeddings of another model, of other images, or another shard; delete it, and run the "
                "command that wrote it again."
            )
        return rows

    @contextmanager
    def _named(self, file: Path) -> Iterator[None]:
        """Name the file of a shard in the error if it cannot be read because it is damaged.

        Raises:
            ValueError: if the file is damaged.
        """
        try:
            if file.stat().st_size == 0:
                raise ValueError("it is empty")
            yield
        except ModuleNotFoundError:
            raise
        except Exception as error:  # pyarrow and NumPy raise errors of many kinds for damaged files
            raise ValueError(
                f"{self.owner}: {file} is damaged ({first_line(error)}); delete it, and run the command that wrote "
                "it again, which keeps the others."
            ) from None

    def unreadable(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read, of all shards that are complete.

        Raises:
            ValueError: if a file is damaged.
        """
        found = []
        for shard in range(len(self)):
            if self._file(shard).exists():
                found += self._metadata(shard)[0]
        return found

    def changed(self, image_files: Callable[[range], str]) -> list[int]:
        """Numbers of the complete shards with images whose files have changed since they were embedded.

        Args:
            image_files: the digest of the image files at some positions, see `digest_of_files`.

        Raises:
            ValueError: if a file is damaged.
        """
        changed = []
        for shard in range(len(self)):
            if not self._file(shard).exists():
                continue
            recorded = self._metadata(shard)[1]
            if recorded and recorded != image_files(self.positions(shard)):
                changed.append(shard)
        return changed

    def _metadata(self, shard: int) -> tuple[list[tuple[str, str]], str]:
        """Only the images of a shard that could not be read, and the digest of its image files."""
        file = self._file(shard)
        with self._named(file):
            if self.manifest.file_format == "npy":
                content = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
                return _pairs(content["unreadable"]), content.get("image_files", "")
            metadata = load_pyarrow(self.owner).parquet.read_schema(file).metadata
            return _pairs(json.loads(metadata[UNREADABLE])), metadata.get(IMAGE_FILES, b"").decode()

    def _origin(self, shard: int) -> str:
        """What a shard's file names as its origin: its number, and a digest of what the embeddings are of."""
        manifest = self.manifest
        what = [manifest.model_sha256, dict(manifest.preparation), manifest.images_sha256, manifest.shard_size]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{digest} {shard}"

    def _file(self, shard: int, suffix: str = "") -> Path:
        """The file of a shard; without a suffix the one that is written last, so that a shard with it is complete."""
        return self.path / f"part-{shard:05d}{suffix or '.' + self.manifest.file_format}"


def check_output(owner: str, path: Path) -> None:
    """Raise unless embeddings may be written to this path: it does not exist, is an empty folder, or holds embeddings.

    Raises:
        ValueError: if the path is a file, or a folder that holds anything else.
    """
    occupied = path.exists() or path.is_symlink()
    if not occupied:
        return
    if path.is_dir():
        others = [file for file in path.iterdir() if file.name != LOCK and not is_temporary(file)]
        if not others or (path / MANIFEST).is_file():
            return
    raise ValueError(
        f"{owner}: `output` must be a new folder, or one with embeddings to continue, got {path}, which is something "
        "else; give another path."
    )


def _read_manifest(owner: str, path: Path) -> EmbeddingManifest:
    values = FORMAT.read(owner, path)
    try:
        manifest = EmbeddingManifest(**values)
        _check_kinds(manifest)
    except TypeError:
        raise ValueError(
            f"{owner}: {path / MANIFEST} must be the manifest of embeddings that this release can read, which it is "
            "not; give another folder."
        ) from None
    return manifest


def _check_kinds(manifest: EmbeddingManifest) -> None:
    """Raise TypeError for a manifest that this library does not write."""
    counts = (manifest.images, manifest.dim, manifest.shard_size - 1)
    texts = (manifest.images_sha256, manifest.model_sha256, manifest.precision)
    is_valid = min(counts) >= 0 and manifest.file_format in FILE_FORMATS and manifest.dtype in DTYPES
    for values, kind in ((counts, int), (texts, str), ((manifest.preparation, manifest.about), dict)):
        is_valid = is_valid and all(type(value) is kind for value in values)
    if not is_valid:
        raise TypeError


def _check_same(owner: str, path: Path, found: EmbeddingManifest, wanted: EmbeddingManifest) -> None:
    """Raise if a folder holds embeddings of something else."""
    what = None
    if found.model_sha256 != wanted.model_sha256:
        what = "of another model"
    elif found.preparation != wanted.preparation:
        what = f"of images that were prepared otherwise ({dict(found.preparation)}, not {dict(wanted.preparation)})"
    elif (found.images, found.images_sha256) != (wanted.images, wanted.images_sha256):
        what = f"of another list of images ({found.images} then, {wanted.images} now)"
    else:
        for name in SETTINGS:
            before, now = getattr(found, name), getattr(wanted, name)
            is_unknown = name == "dim" and now == 0
            if before != now and not is_unknown:
                what = f"with {name}={before}, not {now}"
    if what is not None:
        raise ValueError(
            f"{owner}: `output` must be a new folder or one that the same command began, got {path}, which holds "
            f"embeddings {what}; give another path."
        )
