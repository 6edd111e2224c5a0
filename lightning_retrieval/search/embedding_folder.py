"""A folder of embeddings in shards, which several runs and several processes can fill.

    DIR/_manifest.json      what the embeddings are of: model, preparation, list of images, size of a shard
    DIR/part-00000.parquet  rows 0 to shard_size - 1, and so on

A shard appears in one atomic step when it is complete, so a file that exists is the record that its images are done.
Whoever continues looks for the files that are missing, and nothing else has to be kept. Readers of folders of Parquet
files ignore names that begin with `_` or `.`, so they can read the folder as one table.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightning_retrieval.checks import first_line
from lightning_retrieval.search.embedding_shards import (
    DTYPES,
    FILE_FORMATS,
    ShardRows,
    read_metadata,
    read_npy,
    read_parquet,
    shard_suffixes,
    stored_rows,
    write_json,
    write_npy,
    write_parquet,
)
from lightning_retrieval.search.files import flush, folder_lock, write_verified

FORMAT, VERSION = "lightning-retrieval embeddings", 1
MANIFEST = "_manifest.json"
LOCK = "_lock"
TEMPORARY = ".tmp"
SHOWN = 5  # missing files that an error message names
SHARD_SIZE = 10_000  # rows
SETTINGS = ("dim", "shard_size", "file_format", "dtype", "precision")


@dataclass(frozen=True)
class EmbeddingManifest:
    """What the embeddings in a folder are of. Two runs may fill one folder if all of this but `about` is equal.

    Args:
        images: number of images, also those that cannot be read.
        images_sha256: of their list, see `digest_of_list`.
        model_sha256: of the checkpoint file, or of the weights.
        preparation: plain values that say what is done to an image before the network.
        dim: D, the length of an embedding; 0 if it is not known before the first one.
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
        text = _manifest_text(asdict(manifest))
        _write_atomically(owner, path / MANIFEST, lambda stream: stream.write(text.encode()))
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
            raise ValueError(
                f"{owner}: {path} must hold all embeddings, but {len(missing)} of its {len(folder)} shards are "
                f"missing ({folder._names(missing)}); run the command that writes it again, which continues."
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
            for left in self.path.glob(f".*{TEMPORARY}"):
                left.unlink()
            yield file

    def write(self, shard: int, rows: ShardRows) -> None:
        """Write a shard, which is complete or absent at any time.

        Raises:
            OSError: if it cannot be written completely.
            ValueError: if a number is too large for the type that it is stored in.
        """
        rows = replace(stored_rows(self.owner, rows, self.manifest.dtype), origin=self._origin(shard))
        if self.manifest.file_format == "npy":
            self._file(shard).unlink(missing_ok=True)  # of images that have changed, which is not that of the new JSON
            _write_atomically(self.owner, self._file(shard, ".json"), partial(write_json, rows))
            _write_atomically(self.owner, self._file(shard), partial(write_npy, rows))
        else:
            _write_atomically(self.owner, self._file(shard), partial(write_parquet, self.owner, rows))

    def read(self, shard: int) -> ShardRows:
        """The rows of a shard.

        Raises:
            ValueError: if its file is missing or damaged, or was copied from another folder.
        """
        file = self._file(shard)
        if not file.exists():
            raise ValueError(f"{self.owner}: {file} is missing; run the command that wrote it again, which continues.")
        rows = self._read(file)
        if rows.origin != self._origin(shard) or rows.embeddings.shape[1] != self.manifest.dim:
            raise ValueError(
                f"{self.owner}: {file} must hold shard {shard} of the embeddings that {MANIFEST} beside it describes, "
                "but holds embeddings of another model, of other images, or another shard; delete it, and run the "
                "command that wrote it again."
            )
        return rows

    def _read(self, file: Path) -> ShardRows:
        with self._named(file):
            if self.manifest.file_format == "npy":
                return read_npy(file)
            return read_parquet(self.owner, file)

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
        file = self._file(shard)
        with self._named(file):
            return read_metadata(self.owner, file)

    def _names(self, shards: Sequence[int]) -> str:
        """The files of some shards, of which an error message shows the first."""
        names = [self._file(shard).name for shard in shards[:SHOWN]]
        if len(shards) > SHOWN:
            names.append("...")
        return ", ".join(names)

    def _origin(self, shard: int) -> str:
        """What a shard's file names as its origin: its number, and a digest of what the embeddings are of."""
        manifest = self.manifest
        what = [manifest.model_sha256, dict(manifest.preparation), manifest.images_sha256, manifest.shard_size]
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{digest} {shard}"

    def _file(self, shard: int, suffix: str = "") -> Path:
        """The file of a shard; without a suffix the one that is written last."""
        suffix = suffix or shard_suffixes(self.manifest.file_format)[-1]
        return self.path / f"part-{shard:05d}{suffix}"


def check_output(owner: str, path: Path) -> None:
    """Raise unless embeddings may be written to this path: it does not exist, is an empty folder, or holds embeddings.

    Raises:
        ValueError: if the path is a file, or a folder that holds anything else.
    """
    occupied = path.exists() or path.is_symlink()
    if not occupied:
        return
    if path.is_dir():
        others = [file for file in path.iterdir() if file.name != LOCK and file.suffix != TEMPORARY]
        if not others or (path / MANIFEST).is_file():
            return
    raise ValueError(
        f"{owner}: `output` must be a new folder, or one with embeddings to continue, got {path}, which is something "
        "else; give another path."
    )


def _read_manifest(owner: str, path: Path) -> EmbeddingManifest:
    file = path / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(
            f"{owner}: the embeddings must be a folder with {MANIFEST} in it, got {path}; `lightning-retrieval embed` "
            "writes one."
        )
    try:
        text = file.read_bytes().decode()
        content = dict(json.loads(text))
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{owner}: {file} is damaged, it is not valid JSON; give another folder.") from None
    found = content.pop("format", None), content.pop("version", None)
    has_digest = content.pop("sha256", None) is not None  # earlier releases wrote none
    try:
        if found != (FORMAT, VERSION):
            raise TypeError
        manifest = EmbeddingManifest(**content)
        _check_kinds(manifest)
    except TypeError:
        raise ValueError(
            f"{owner}: {file} must be the manifest of embeddings that this release can read (version {VERSION}), which "
            "it is not; give another folder."
        ) from None
    if has_digest and text != _manifest_text(content):
        raise ValueError(
            f"{owner}: {file} is damaged, its checksum is not that of its content; restore it from a copy, or give "
            "another folder."
        )
    return manifest


def _manifest_text(content: Mapping[str, Any]) -> str:
    """The content of a manifest's file, with a checksum."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest, **content}, indent=1) + "\n"


def _check_kinds(manifest: EmbeddingManifest) -> None:
    """Raise TypeError for a manifest that this library does not write."""
    counts = (manifest.images, manifest.dim, manifest.shard_size - 1)
    texts = (manifest.images_sha256, manifest.model_sha256, manifest.precision)
    is_valid = min(counts) >= 0 and all(type(count) is int for count in counts)
    if not is_valid or manifest.file_format not in FILE_FORMATS or manifest.dtype not in DTYPES:
        raise TypeError
    for values, kind in (((manifest.preparation, manifest.about), dict), (texts, str)):
        if not all(isinstance(value, kind) for value in values):
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


def _write_atomically(owner: str, file: Path, write: Any) -> None:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{TEMPORARY}")  # of this process alone
    write_verified(owner, temporary, write)
    os.replace(temporary, file)
    flush(file.parent)
