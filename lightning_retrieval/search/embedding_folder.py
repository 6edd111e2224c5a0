"""A folder of embeddings in shards, which several runs and several processes can fill.

    DIR/_manifest.json      how the embeddings were made: model, preparation, list of images, size of a shard
    DIR/part-00000.parquet  rows 0 to shard_size - 1, and so on

A complete shard gets its final name in one atomic step, so the existence of the file shows that its images are done. A
run that continues looks for missing files; no other record is needed. Programs that read folders of Parquet files
ignore names that begin with `_` or `.`, so they can read the folder as one table.

A file has the columns `id` (int64), `path` and `label` (strings) and `embedding` (a fixed-size list of D float32 or
float16), and a checksum of each page. `read_embeddings` returns the whole folder as arrays.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int64

from lightning_retrieval.checks import first_line, first_of
from lightning_retrieval.files import (
    DigestStream,
    delete_temporary_files,
    folder_lock,
    is_lock,
    is_system_error,
    is_temporary,
    write_verified,
    writing,
)
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.paths import check_path, cure_of_names
from lightning_retrieval.search.formats import EMBEDDINGS

DTYPES = ("float32", "float16")
FORMAT, MANIFEST, LOCK = EMBEDDINGS, EMBEDDINGS.name, "_lock"
SHARD_SIZE = 10_000  # default number of rows of a shard
LISTS_DIFFER = "of another list of images"
DIFFERENCES = {"images": LISTS_DIFFER, "images_sha256": LISTS_DIFFER, "model_sha256": "of another model"}
UNREADABLE, ORIGIN, IMAGE_FILES = b"unreadable", b"origin", b"image_files"  # keys of the metadata of a file


@dataclass(frozen=True)
class ShardRows:
    """The rows of a shard, or some rows that a process adds to it.

    Args:
        ids: ids of the rows.
        embeddings: embeddings that the model returned, in the dtype of the files.
        paths: path of each row; "" if the row has no path.
        labels: label of each row; None if the label is unknown.
        unreadable: path and reason of each image of the shard that could not be read and therefore has no row.
        origin: text that identifies the shard and the folder of the rows, see `EmbeddingFolder`.
        image_files: digest of the sizes and times of the image files, see `digest_of_files`; "" if unknown.
    """

    ids: Int64[np.ndarray, " rows"]
    embeddings: Float[np.ndarray, "rows dim"]
    paths: list[str]
    labels: list[str | None]
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    origin: str = ""
    image_files: str = ""


def check_unicode(argument: str, texts: Iterable[str]) -> None:
    """Raise, before anything is embedded, if neither Parquet files nor Milvus can hold a path or a label.

    Args:
        argument: what the texts are, for the message.
        texts: paths of images, or labels.

    Raises:
        ValueError: if a text is not valid Unicode, such as the name of a file with an é in Latin-1.
    """
    for text in texts:
        if not text.isascii() and text.encode(errors="ignore").decode() != text:
            cure = "rename the file or folder"
            raise InvalidValue("must be valid Unicode", argument=argument, got=repr(text), cure=cure)


def _write_rows(rows: ShardRows, schema: Any, stream: DigestStream) -> None:
    import pyarrow.parquet

    values = pyarrow.array(rows.embeddings.reshape(-1))
    embeddings = pyarrow.FixedSizeListArray.from_arrays(values, rows.embeddings.shape[1])
    metadata = {UNREADABLE: json.dumps(rows.unreadable), ORIGIN: rows.origin, IMAGE_FILES: rows.image_files}
    columns = [rows.ids, rows.paths, rows.labels, embeddings]
    table = pyarrow.table(columns, schema=schema.with_metadata(metadata))
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer, compression="zstd", use_dictionary=["label"], write_page_checksum=True)
    stream.write(buffer.getvalue())


def _read_rows(file: Path, schema: Any) -> ShardRows:
    """Read a file and verify its checksums.

    Raises:
        ValueError: if it has other columns.
    """
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file, page_checksum_verification=True, memory_map=False)
    if not table.schema.equals(schema):
        raise ValueError("it has other columns than a file of embeddings")
    return ShardRows(
        table.column("id").to_numpy(),
        _matrix(table),
        table.column("path").to_pylist(),
        table.column("label").to_pylist(),
        _pairs(table.schema.metadata),
        table.schema.metadata[ORIGIN].decode(),
        table.schema.metadata[IMAGE_FILES].decode(),
    )


def _matrix(table: Any) -> Float[np.ndarray, "rows dim"]:
    column = table.column("embedding").combine_chunks()
    return np.array(column.flatten()).reshape(-1, column.type.list_size)  # a writable copy


def _pairs(metadata: Mapping[bytes, bytes]) -> list[tuple[str, str]]:
    """Path and reason of each image that could not be read."""
    return [(path, reason) for path, reason in json.loads(metadata[UNREADABLE])]


def _state(file: Path) -> tuple[int, int, int]:
    """What changes if a file is replaced or written again."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class EmbeddingManifest:
    """How the embeddings in a folder were made. Two runs may fill one folder if all fields but `about` are equal.

    Args:
        images: number of images, including unreadable ones.
        images_sha256: digest of the list of images, see `digest_of_list`.
        model_sha256: digest of the checkpoint file or the weights.
        preparation: plain values that describe the preparation of an image for the network.
        dim: D, the dimension of an embedding; 0 if D is unknown before the first embedding.
        shard_size: number of images of a shard; the last shard may be smaller.
        dtype: type of the numbers in the files, `"float32"` or `"float16"`.
        precision: precision of the network, as named by Lightning.
        about: plain values that are stored for an index, such as the path of the checkpoint.
    """

    images: int
    images_sha256: str
    model_sha256: str
    preparation: Mapping[str, Any]
    dim: int
    shard_size: int = SHARD_SIZE
    dtype: str = DTYPES[0]
    precision: str = "32-true"
    about: Mapping[str, Any] = field(default_factory=dict)

    def difference(self, wanted: "EmbeddingManifest") -> str:
        """What these embeddings are that the wanted ones are not; "" if all fields but `about` are equal."""
        for name, value in vars(self).items():
            other = getattr(wanted, name)
            is_unknown = name == "dim" and other == 0
            if value != other and name != "about" and not is_unknown:
                return DIFFERENCES.get(name, f"with {name}={value}, not {other}")
        return ""


def digest_of_list(fields: Iterable[Sequence[Any]]) -> str:
    """SHA-256 of a list of images.

    Args:
        fields: for each image, its path and everything else that defines what is embedded, such as box and label.
    """
    digest = hashlib.sha256()
    for of_image in fields:
        digest.update(json.dumps(of_image).encode() + b"\n")
    return digest.hexdigest()


def digest_of_files(files: Iterable[Path]) -> str:
    """SHA-256 of the sizes and modification times of files. Some of the files may not exist."""
    digest = hashlib.sha256()
    for file in files:
        found = None
        with suppress(OSError):
            status = file.stat()
            found = (status.st_size, status.st_mtime_ns)
        digest.update(f"{found}\n".encode())
    return digest.hexdigest()


class EmbeddingFolder:
    """A folder of embeddings in which shards may be missing. Use `create` or `load` instead of the constructor.

    Args:
        path: path of the folder.
        manifest: how the embeddings are made.
    """

    def __init__(self, path: Path, manifest: EmbeddingManifest) -> None:
        self.path = path
        self.manifest = manifest
        self._verified: dict[int, tuple[int, int, int]] = {}  # for each shard that was read, the state of its file

    @classmethod
    def create(cls, path: Path, manifest: EmbeddingManifest) -> "EmbeddingFolder":
        """Begin a folder, or continue one with the same manifest.

        Raises:
            ValueError: if the folder holds embeddings with another manifest or other files, or the path is a file.
        """
        check_output(path)
        folder = cls(path, manifest)
        if folder.check_begun():
            return folder
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        content = FORMAT.encode(asdict(manifest))
        write_verified(path / MANIFEST, lambda stream: stream.write(content))
        return folder

    @classmethod
    def load(cls, path: Path) -> "EmbeddingFolder":
        """Open a folder of embeddings in which no shard is missing.

        Raises:
            FileNotFoundError: if the folder holds no embeddings.
            ValueError: if its manifest is damaged, or a shard is missing.
        """
        path = check_path("embeddings", path)
        folder = cls(path, EmbeddingManifest(**FORMAT.read(path)))
        names = [folder._file(shard).name for shard in folder.missing()]
        if names:
            raise InvalidValue(
                f"{path} must hold all embeddings, but {len(names)} of its {len(folder)} shards are missing "
                f"({first_of(names)})",
                cure="run the command that writes it again, which continues",
            )
        return folder

    def check_begun(self) -> bool:
        """Whether the folder has a manifest; raises if it differs from the manifest of this object.

        Raises:
            ValueError: if the folder holds embeddings with another manifest.
        """
        if not (self.path / MANIFEST).exists():
            return False
        difference = EmbeddingManifest(**FORMAT.read(self.path)).difference(self.manifest)
        if difference:
            rule = "must be a new folder or one that the same command began"
            got = f"{self.path}, which holds embeddings {difference}"
            raise InvalidValue(rule, argument="output", got=got, cure="give another path")
        return True

    def __len__(self) -> int:
        """Number of shards, including missing ones."""
        return -(-self.manifest.images // self.manifest.shard_size)

    def positions(self, shard: int) -> range:
        """Positions of a shard's images in the list, which are also their ids."""
        begin = shard * self.manifest.shard_size
        return range(begin, min(begin + self.manifest.shard_size, self.manifest.images))

    def missing(self) -> list[int]:
        """Numbers of the missing shards."""
        return [shard for shard in range(len(self)) if not self._file(shard).is_file()]

    @contextmanager
    def lock(self) -> Iterator[Callable[[], None]]:
        """Hold the lock of the folder, so that no other process writes, and remove temporary files of killed runs.

        Yields:
            A function that shares the lock from then on.

        Raises:
            ValueError: if another process is writing.
        """
        with folder_lock(self.path, LOCK) as share:
            delete_temporary_files(self.path)
            yield share

    def write(self, shard: int, rows: ShardRows) -> None:
        """Write a shard. At any time, the shard is either complete or missing.

        Raises:
            OSError: if the shard cannot be written completely.
            ValueError: if a number is too large for the dtype of the files.
        """
        dtype = np.dtype(self.manifest.dtype)
        largest = np.abs(rows.embeddings).max(initial=0)
        if largest > np.finfo(dtype).max:
            rule = "must be a type that the embeddings fit into"
            got = f"{dtype} for numbers up to {largest:.3g}"
            raise InvalidValue(rule, argument="dtype", got=got, cure=f"use {DTYPES[0]}")
        rows = replace(rows, embeddings=np.ascontiguousarray(rows.embeddings, dtype), origin=self._origin(shard))
        write_verified(self._file(shard), partial(_write_rows, rows, self._schema()))

    def read(self, shard: int) -> ShardRows:
        """The rows of a shard.

        Raises:
            ValueError: if the file of the shard is damaged, or was copied from another folder.
        """
        file = self._file(shard)
        with self._named(file):
            state = _state(file)  # from before the file is read, so that a later change is noticed
            rows = _read_rows(file, self._schema())
        if rows.origin != self._origin(shard):
            raise InvalidValue(
                f"{file} must hold shard {shard} of the embeddings that {MANIFEST} beside it describes, but holds "
                "embeddings of another model, of other images, or another shard",
                cure="delete it, and run the command that wrote it again",
            )
        self._verified[shard] = state
        return rows

    def read_again(self, shard: int) -> Float[np.ndarray, "rows dim"]:
        """The embeddings of a shard that `read` has verified. They are not verified again.

        Raises:
            ValueError: if the file is missing or has changed since then.
        """
        file = self._file(shard)
        if not file.is_file() or _state(file) != self._verified[shard]:
            rule = f"{file} must not change while the embeddings are used, but was removed or replaced"
            raise InvalidValue(rule, cure="run the command again")
        with self._named(file):
            import pyarrow.parquet

            return _matrix(pyarrow.parquet.read_table(file, columns=["embedding"], memory_map=False))

    @contextmanager
    def _named(self, file: Path) -> Iterator[None]:
        """If reading the file of a shard fails because of damage, raise an error that names the file.

        Raises:
            ValueError: if the file is damaged.
        """
        try:
            yield
        except Exception as error:  # pyarrow raises errors of many types for damaged files
            if is_system_error(error):
                raise
            cure = "delete it, and run the command that wrote it again, which keeps the others"
            raise InvalidValue(f"{file} is damaged ({first_line(error)})", cure=cure) from None

    def unreadable(self) -> list[tuple[str, str]]:
        """Path and reason of each image that could not be read, from all complete shards.

        Raises:
            ValueError: if a file is damaged.
        """
        found = []
        for shard in range(len(self)):
            if self._file(shard).is_file():
                found += self._metadata(shard)[0]
        return found

    def changed(self, image_files: Callable[[range], str]) -> list[int]:
        """Numbers of the complete shards whose image files have changed since they were embedded.

        Args:
            image_files: maps a range of positions to the digest of their image files, see `digest_of_files`.

        Raises:
            ValueError: if a file is damaged.
        """
        changed = []
        for shard in range(len(self)):
            if not self._file(shard).is_file():
                continue
            recorded = self._metadata(shard)[1]
            if recorded and recorded != image_files(self.positions(shard)):
                changed.append(shard)
        return changed

    def _metadata(self, shard: int) -> tuple[list[tuple[str, str]], str]:
        """The unreadable images of a shard and the digest of its image files, read without the rows."""
        file = self._file(shard)
        with self._named(file):
            import pyarrow.parquet

            metadata = pyarrow.parquet.read_schema(file).metadata
            return _pairs(metadata), metadata[IMAGE_FILES].decode()

    def _origin(self, shard: int) -> str:
        """The origin recorded in a shard's file: a digest of how the embeddings were made, and the shard's number."""
        manifest = self.manifest
        what = [manifest.model_sha256, dict(manifest.preparation), manifest.images_sha256, manifest.shard_size]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{digest} {shard}"

    def _schema(self) -> Any:
        """The schema of a file, without metadata."""
        import pyarrow

        columns = {
            "id": pyarrow.int64(),
            "path": pyarrow.string(),
            "label": pyarrow.string(),
            "embedding": pyarrow.list_(pyarrow.from_numpy_dtype(self.manifest.dtype), self.manifest.dim),
        }
        return pyarrow.schema(columns)

    def _file(self, shard: int) -> Path:
        return self.path / f"part-{shard:05d}.parquet"


def check_output(path: Path) -> None:
    """Raise unless embeddings may be written to a path: a new path, an empty folder, or a folder of embeddings.

    Raises:
        ValueError: if the path is a file, or a folder that holds anything but embeddings.
    """
    occupied = path.exists() or path.is_symlink()
    if not occupied:
        return
    if path.is_dir():
        others = [file for file in path.iterdir() if not is_lock(file, LOCK) and not is_temporary(file)]
        if not others or (path / MANIFEST).is_file():
            return
    rule = "must be a new folder, or one with embeddings to continue"
    raise InvalidValue(rule, argument="output", got=f"{path}, which is something else", cure="give another path")


class StoredEmbeddings(NamedTuple):
    """The rows of a folder of embeddings, in the order of the images.

    Args:
        embeddings: float32 or float16, as in the files.
        ids: the position of each image in the list that was embedded, or the id that the data set gave it.
        paths: the path of each image; "" if it has none.
        labels: the label of each image; None if it is not known.
    """

    embeddings: Float[np.ndarray, "rows dim"]
    ids: Int64[np.ndarray, " rows"]
    paths: list[str]
    labels: list[str | None]


def read_embeddings(folder: str | Path) -> StoredEmbeddings:
    """Read a folder of embeddings as NumPy arrays, with paths and labels.

    Args:
        folder: a folder that `lightning-retrieval embed`, `predict` or `EmbeddingWriter` wrote completely.

    Raises:
        FileNotFoundError: if the folder holds no embeddings.
        ValueError: if a file is missing or damaged.

    Example:
        >>> import pytorch_lightning as pl, torch
        >>> from lightning_retrieval import RetrievalModule, SmoothAPLoss, read_embeddings
        >>> from lightning_retrieval.callbacks import EmbeddingWriter
        >>> quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
        >>> trainer = pl.Trainer(callbacks=EmbeddingWriter("vectors"), **quiet)
        >>> module = RetrievalModule(torch.nn.Linear(8, 4), SmoothAPLoss())
        >>> trainer.predict(module, torch.utils.data.DataLoader(torch.randn(10, 8)), return_predictions=False)
        >>> read_embeddings("vectors").embeddings.shape
        (10, 4)

    Cost:
        Memory for all rows, and for a moment twice that.

    Relations:
        Any program that reads Parquet can read the folder as one table. `lightning-retrieval index --embeddings` reads
        one file at a time.
    """
    path = check_path("folder", folder, owner="read_embeddings")
    with owned_by("read_embeddings"):
        return all_rows(EmbeddingFolder.load(path))


def all_rows(folder: EmbeddingFolder) -> StoredEmbeddings:
    """The rows of all shards.

    Raises:
        ValueError: if a file is missing or damaged.
    """
    embeddings = [np.zeros((0, folder.manifest.dim), folder.manifest.dtype)]
    ids = [np.zeros(0, np.int64)]
    paths: list[str] = []
    labels: list[str | None] = []
    for shard in range(len(folder)):
        rows = folder.read(shard)
        embeddings.append(rows.embeddings)
        ids.append(rows.ids)
        paths += rows.paths
        labels += rows.labels
    return StoredEmbeddings(np.concatenate(embeddings), np.concatenate(ids), paths, labels)


def labelled_rows(
    folder: EmbeddingFolder, name: str, labels: Mapping[str, str] | None = None
) -> tuple[Float32[np.ndarray, "rows dim"], Int64[np.ndarray, " rows"]]:
    """All embeddings of a folder, and a number for the label of each.

    Args:
        folder: the folder.
        name: name of the argument that gives the folder, for error messages.
        labels: the label of each path; if None, the labels in the files.

    Raises:
        ValueError: if a file is missing or damaged, or a row has no label or is not finite.
    """
    stored = all_rows(folder)
    found, given, cure = stored.labels, name, "embed a table with the columns image and label"
    if labels is not None:
        found, given = list(map(labels.get, stored.paths)), "labels"
    unlabelled = [path for path, label in zip(stored.paths, found) if label is None]
    if labels is not None:
        images = Path(str(folder.manifest.about.get("images")))
        cure = cure_of_names(labels, stored.paths, images) or "add their rows to the table"
    if unlabelled or not found:
        got = f"{folder.path}, in which {len(unlabelled)} of {len(found)} have none ({first_of(unlabelled)})"
        raise InvalidValue("must have a label for each image", argument=given, got=got, cure=cure)
    embeddings = stored.embeddings.astype(np.float32, copy=False)
    invalid = [stored.paths[row] for row in np.flatnonzero(~np.isfinite(embeddings).all(axis=1))]
    if invalid:
        rule = "must hold finite numbers"
        got = f"{folder.path}, in which {len(invalid)} of {len(found)} rows have NaN or inf ({first_of(invalid)})"
        raise InvalidValue(rule, argument=name, got=got, cure="embed these images with another model")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(found))}
    return embeddings, np.array([numbers[label] for label in found])
