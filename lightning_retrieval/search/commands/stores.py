"""Writes and reads the indexes of the commands: a folder of faiss files or, with `--store`, a collection of Milvus.

No row of an existing index is lost unless the user asks for it: `IndexWriter` compares the rows of the existing index
with the new rows before it replaces the index.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import first_line
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.packed_strings import PackedStrings, as_arrow
from lightning_retrieval.paths import check_path
from lightning_retrieval.search.commands.embedding import EmbeddedImages, UnreadableImage, is_same_network
from lightning_retrieval.search.embedding_folder import check_unicode
from lightning_retrieval.search.store.conditions import Kind, kinds_of, new_columns, shown_kinds
from lightning_retrieval.search.store.embedding_store import EmbeddingStore
from lightning_retrieval.search.store.index import RetrievalIndex
from lightning_retrieval.search.store.milvus_store import MilvusStore, check_no_missing
from lightning_retrieval.search.store.rows import Rows, plain_values
from lightning_retrieval.search.store.storage import MANIFEST, check_folder

KIND = "milvus:"
BLOCK = 1 << 16  # number of rows whose paths are read at a time
THRESHOLD = "threshold"  # entry of `about`: the threshold of an index with its rates


@dataclass(frozen=True)
class IndexSettings:
    """How a new index is built.

    Args:
        factory: factory string of faiss, or type of Milvus' index.
        parameters: search parameters.
        shards: number of shards of the index, for faiss.
    """

    factory: str = "Flat"
    parameters: str = ""
    shards: int = 1


@dataclass(frozen=True)
class NewRows:
    """The ids, paths and metadata of the images that an index gets."""

    ids: Int[Tensor, " rows"]
    paths: PackedStrings
    columns: Mapping[str, Sequence[Any]]  # for the name of each column, one value for each row

    def select(self, positions: Int[Tensor, " selected"]) -> "NewRows":
        """The rows of the images at these positions."""
        columns = new_columns(self.columns, len(self.ids))
        columns = {name: column.take(as_arrow(positions.numpy())) for name, column in columns.items()}
        return NewRows(self.ids[positions], self.paths[positions.numpy()], columns)

    def column_kinds(self) -> dict[str, Kind]:
        """The kind of each column."""
        return kinds_of(new_columns(self.columns, len(self.ids)))


class EarlierRows:
    """The rows of an existing index that a command is about to replace or update.

    A row is identified by its path, or by its id if it has no path.

    Args:
        index: the existing index.
        name: name of the index in messages.
        about: `about` of the new index.
    """

    def __init__(self, index: EmbeddingStore, name: str, *, about: Mapping[str, Any]) -> None:
        self.ids = index.ids
        self.column_kinds = index.column_kinds
        self.threshold = index.about.get(THRESHOLD)
        self.difference = _difference(index.about, about)
        """Why none of the rows can be kept in the new index; None if rows can be kept."""
        self._name = name
        paths = itertools.chain.from_iterable(map(index.paths, self.ids.split(BLOCK)))
        self._rows = row_keys(self.ids, paths)

    def check_kept(self, rows: NewRows) -> None:
        """Raise if a row of the existing index is missing in the new index, or the columns differ."""
        lost, cure = len(self.ids), "`overwrite` to replace it"
        why = self.difference
        if why is None:
            lost = _not_in(self._rows, row_keys(rows.ids, rows.paths))
            why = "their images are not among the new ones"
            cure += ", or `update` to add the images that are new and remove the rows of those that are gone"
        if lost > 0:
            raise InvalidValue(
                f"must be new, or an index whose rows are all in the new one, but {lost} of the {len(self.ids)} "
                f"rows of {self._name} are not, because {why}",
                argument="output",
                cure=f"give {cure}, or give another path",
            )
        self._check_columns(rows)

    def _check_columns(self, rows: NewRows) -> None:
        kinds = rows.column_kinds()
        if kinds != self.column_kinds:
            rule = f"must have the columns of {self._name}, {shown_kinds(self.column_kinds)}"
            cure = "give a table with them, or `overwrite` to replace the index"
            raise InvalidValue(rule, argument="metadata", got=shown_kinds(kinds), cure=cure)

    def gone(self, rows: NewRows) -> Int[Tensor, " gone"]:
        """The ids of the existing rows that are missing in the new index, which has these rows.

        Raises:
            ValueError: if the existing index is of another model or other images, or has other columns, or two rows
                have the same path.
        """
        if self.difference is not None and len(self.ids) > 0:
            rule = "must be given for an index of the same model and images"
            got = f"{self._name}: it has {len(self.ids)} rows, and {self.difference}"
            raise InvalidValue(rule, argument="update", got=got, cure="give `overwrite` to replace it, or another path")
        self._check_columns(rows)
        new = row_keys(rows.ids, rows.paths)
        for keys in (new, self._rows):
            if len(np.unique(keys)) < len(keys):
                rule = "must be given for rows with different paths"
                got = "some with the same path in the index or in the new rows"
                raise InvalidValue(rule, argument="update", got=got, cure="give `overwrite` to replace the index")
        return self.ids[torch.from_numpy(~np.isin(self._rows, new))]

    def is_new(self, rows: NewRows) -> NDArray[np.bool_]:
        """For each of these rows, whether it is missing in the existing index."""
        return ~np.isin(row_keys(rows.ids, rows.paths), self._rows)


def row_keys(ids: Int[Tensor, " rows"], paths: Iterable[str]) -> NDArray[np.int64]:
    """A key for each row, to compare two indexes: the hash of the row's path, or of its id if it has no path.

    Keys are valid only in this process.
    """
    keys = np.empty(len(ids), np.int64)
    for row, path in enumerate(paths):
        known_by: Any = path
        if not path:
            known_by = ("id", int(ids[row]))
        keys[row] = hash(known_by)
    return keys


def _not_in(keys: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """The number of keys that are missing in `others`, counting repeated keys."""
    distinct, counts = np.unique(keys, return_counts=True)
    other_distinct, other_counts = np.unique(others, return_counts=True)
    _, at, other_at = np.intersect1d(distinct, other_distinct, assume_unique=True, return_indices=True)
    counts[at] = np.maximum(0, counts[at] - other_counts[other_at])
    return int(counts.sum())


def _difference(earlier: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """How an existing index differs from a new one in model or images; None if neither differs."""
    if "checkpoint_sha256" not in earlier:
        return "something else than this command has made them"
    of_model = model_difference(earlier, about)
    if of_model is not None:
        return of_model
    folders = [os.path.realpath(str(described.get("images"))) for described in (earlier, about)]
    if folders[0] != folders[1]:
        return f"they are of images in {earlier.get('images')}"
    return None


def model_difference(earlier: Mapping[str, Any], about: Mapping[str, Any]) -> str | None:
    """Why embeddings in a file cannot be compared with the embeddings of a model; None if they can be compared."""
    made = json.loads(json.dumps(dict(about)))  # in the form that `about` has in an index read from a file
    if not is_same_network(earlier, made):
        return "they are of another model"
    if earlier.get("preparation") != made.get("preparation"):
        return "they are of images that were prepared otherwise"
    return None


class FaissFolder:
    """A new faiss index in a folder.

    Args:
        folder: folder of the index.
        settings: settings of the index.

    Raises:
        ValueError: if the folder holds other files, or a number is invalid.
    """

    def __init__(self, folder: Path, *, settings: IndexSettings) -> None:
        check_folder(folder)
        RetrievalIndex(1, shards=settings.shards)
        self._folder = folder
        self._settings = settings

    def check_dim(self, dim: int) -> None:
        """Raise if the settings are invalid for embeddings of this dimension."""
        RetrievalIndex(dim, self._settings.factory, parameters=self._settings.parameters)

    def check_rows(self, rows: NewRows) -> None:
        """Accept all rows: a folder can store any path, and that a number is missing."""

    def earlier_rows(self, about: Mapping[str, Any]) -> EarlierRows | None:
        """The rows of the existing index; None if there is none, or a killed process left it incomplete.

        Raises:
            ValueError: if the index cannot be read.
        """
        if not (self._folder / MANIFEST).is_file():
            return None
        with _reported_as_unreadable(self._folder):
            index = RetrievalIndex.load(self._folder, mapped=True, verify=False)
            return EarlierRows(index, str(self._folder), about=about)

    @contextmanager
    def updated(self, about: Mapping[str, Any]) -> Iterator[EmbeddingStore]:
        """Context with the existing index, to change its rows; the index is saved at the end, except after an error.

        Raises:
            ValueError: if a setting differs from the setting of the index, or another process has changed the index
                meanwhile.
        """
        before = (self._folder / MANIFEST).read_bytes()
        index = RetrievalIndex.load(self._folder)
        _check_settings(index, self._settings)
        yield index
        index.about = plain_values(about)
        if (self._folder / MANIFEST).read_bytes() != before:
            rule = f"{self._folder} must not be changed by another process during an update, but was"
            raise InvalidValue(rule, cure="run the command again")
        index.save(self._folder)

    def write(self, dim: int, about: Mapping[str, Any], embeddings: Rows, rows: NewRows) -> EmbeddingStore:
        """Build the index and save it, replacing an existing one."""
        settings = asdict(self._settings)
        return RetrievalIndex.build(
            self._folder, embeddings, rows.ids, rows.paths, columns=rows.columns, about=about, **settings
        )


class MilvusCollection:
    """A new index in Milvus.

    Args:
        name: name of the index.
        uri: URI of the store.
        settings: settings of the index; `shards` is not supported.

    Raises:
        ValueError: if an argument is invalid, or the name belongs to a collection that is not an index.
        OSError: if the store cannot be reached.
    """

    def __init__(self, name: str, uri: str, *, settings: IndexSettings) -> None:
        if settings.shards != 1:
            rule = "must be 1 with a store in Milvus, which distributes rows by itself"
            raise InvalidValue(rule, argument="shards", got=settings.shards)
        with reported_as(uri="store", name="output"):
            MilvusStore.check_new(uri, name, settings.factory, settings.parameters)
        self._address = (uri, name)
        self._settings = settings

    def check_dim(self, dim: int) -> None:
        """Accept all dimensions: Milvus has them from 2 to 32,768."""

    def check_rows(self, rows: NewRows) -> None:
        """Raise if Milvus cannot store these paths, or a number is missing."""
        check_unicode("paths", rows.paths)
        check_no_missing(rows.columns, "metadata")

    def earlier_rows(self, about: Mapping[str, Any]) -> EarlierRows | None:
        """The rows of the index of this name; None if there is none.

        Raises:
            ValueError: if the index cannot be read.
            OSError: if Milvus reports an error.
        """
        name = self._address[1]
        with _reported_as_unreadable(name):
            try:
                store = MilvusStore(*self._address)
            except FileNotFoundError:
                return None
            with closing(store):
                return EarlierRows(store, name, about=about)

    @contextmanager
    def updated(self, about: Mapping[str, Any]) -> Iterator[EmbeddingStore]:
        """Context with the existing index, to change its rows; `about` is stored at the end, except after an error."""
        store = MilvusStore(*self._address)
        try:
            _check_settings(store, self._settings)
            yield store
            store.record_about(about)
        except BaseException:
            store.close()
            raise

    def write(self, dim: int, about: Mapping[str, Any], embeddings: Rows, rows: NewRows) -> EmbeddingStore:
        """Build the index and replace an existing index; if this fails, the existing index is unchanged."""
        settings = {"factory": self._settings.factory, "parameters": self._settings.parameters}
        with reported_as(uri="store", name="output"):
            store = MilvusStore.create(*self._address, dim, about=about, columns=rows.column_kinds(), **settings)
        try:
            store.add(embeddings, rows.ids, rows.paths, columns=rows.columns)
            store.publish()
        except BaseException:
            with suppress(OSError):
                store.drop()
            store.close()
            raise
        return store


def new_index(output: Path, store: str | None, settings: IndexSettings) -> FaissFolder | MilvusCollection:
    """The index that a command will write, checked before any image is embedded.

    Args:
        output: folder of the index, or its name in the store.
        store: `"milvus:URI"`; if None, the index is a folder of faiss files.
        settings: settings of the index.

    Raises:
        ValueError: if an argument is invalid, or `output` exists and is not an index.
        OSError: if the store cannot be reached.
    """
    if store is None:
        return FaissFolder(check_path("output", output), settings=settings)
    return MilvusCollection(str(output), _uri(store), settings=settings)


class IndexWriter:
    """Writes an index. An existing index in the same place is replaced or updated.

    Args:
        new: the index to write.
        about: plain values to save with the index.
        overwrite: replace an existing index, whatever it holds.
        update: update an existing index, if there is one.

    Raises:
        ValueError: if both `overwrite` and `update` are True, or the existing index cannot be read.
    """

    def __init__(
        self, new: FaissFolder | MilvusCollection, about: Mapping[str, Any], *, overwrite: bool, update: bool
    ) -> None:
        self._overwrite = overwrite
        if update and overwrite:
            raise InvalidValue("must not be given with `update`", argument="overwrite", cure="give one of them")
        self._new = new
        self._about = dict(about)
        self._earlier: EarlierRows | None = None
        if update:
            self._earlier = new.earlier_rows(about)
        if self._earlier is not None and self._earlier.threshold is not None:
            self._about.setdefault(THRESHOLD, self._earlier.threshold)

    def check_kept(self, rows: NewRows) -> None:
        """Raise if rows or columns would be lost without `overwrite` or `update`.

        The existing index is read again for this check.

        Raises:
            ValueError: if something would be lost, or the index cannot be read.
        """
        if self._overwrite or self._earlier is not None:
            return
        earlier = self._new.earlier_rows(self._about)
        if earlier is not None:
            earlier.check_kept(rows)

    def write(
        self, dim: int, rows: NewRows, embed: Callable[[Int[Tensor, " wanted"]], EmbeddedImages]
    ) -> tuple[EmbeddingStore, list[UnreadableImage]]:
        """Write the index, or update the existing one.

        Args:
            dim: dimension of an embedding.
            rows: ids, paths and metadata of all images.
            embed: returns the embeddings of the images at the given positions.

        Returns:
            The index, and the images that could not be read.

        Raises:
            ValueError: if an existing index is of another model or other images, or has other columns, no image can be
                read, or rows cannot be removed from this kind of index.
        """
        if self._earlier is not None:
            return self._updated(self._earlier, rows, embed)
        rows, embeddings, unreadable = self._readable(rows, embed)
        self.check_kept(rows)
        return self._new.write(dim, self._about, embeddings, rows), unreadable

    def _readable(
        self, rows: NewRows, embed: Callable[[Int[Tensor, " wanted"]], EmbeddedImages]
    ) -> tuple[NewRows, Rows, list[UnreadableImage]]:
        """The rows of the images that can be read, their embeddings, and the other images."""
        embedded = embed(torch.arange(len(rows.ids)))
        self._check_some(len(embedded.positions), embedded.unreadable)
        if len(embedded.positions) < len(rows.ids):
            rows = rows.select(embedded.positions)
        return rows, embedded.embeddings, embedded.unreadable

    def _updated(
        self, earlier: EarlierRows, rows: NewRows, embed: Callable[[Int[Tensor, " wanted"]], EmbeddedImages]
    ) -> tuple[EmbeddingStore, list[UnreadableImage]]:
        gone = earlier.gone(rows)
        with self._new.updated(self._about) as index:
            if len(gone) > 0:
                index.remove(gone)
            embedded = embed(torch.from_numpy(earlier.is_new(rows)).nonzero()[:, 0])
            if len(embedded.positions) > 0:
                added = rows.select(embedded.positions)
                index.add(embedded.embeddings, paths=added.paths, columns=added.columns)
            self._check_some(len(index), embedded.unreadable)
        return index, embedded.unreadable

    def _check_some(self, rows: int, unreadable: Sequence[UnreadableImage]) -> None:
        """Raise if the index would have no rows."""
        if rows > 0:
            return
        first = ""
        if unreadable:
            first = f", the first: {unreadable[0]}"
        raise InvalidValue(f"none of the {len(unreadable)} images can be read{first}")


@contextmanager
def _reported_as_unreadable(name: str | Path) -> Iterator[None]:
    """If an existing index cannot be read, raise an error that suggests `overwrite`.

    Raises:
        ValueError: if the existing index cannot be read.
    """
    try:
        yield
    except ValueError as error:
        rule = "must be new, or an index that can be read"
        cure = "give `overwrite` to replace it, or give another path"
        raise InvalidValue(rule, argument="output", got=f"{name} ({first_line(error)})", cure=cure) from None


def _check_settings(index: Any, settings: IndexSettings) -> None:
    """Raise if a setting is neither the default nor the setting of the index to update."""
    for name, default in asdict(IndexSettings()).items():
        given, found = getattr(settings, name), getattr(index, name, default)
        if given not in (found, default):
            rule = f"must be that of the index with `update`, {found!r}, or not be given"
            raise InvalidValue(rule, argument=name, got=repr(given), cure="give `overwrite` to build the index anew")


@contextmanager
def opened_index(index: Path, store: str | None, *, verify: bool = True) -> Iterator[EmbeddingStore]:
    """Context with an index that a command wrote, closed on exit. A faiss index is mapped into memory.

    Args:
        index: folder of the index, or its name in the store.
        store: as for `new_index`.
        verify: as for `RetrievalIndex.load`.

    Raises:
        FileNotFoundError: if there is no such index.
        ValueError: if the index is damaged, or the folder or collection is not an index.
        OSError: if the store cannot be reached.
    """
    if store is None:
        yield RetrievalIndex.load(index, mapped=True, verify=verify)
        return
    uri = _uri(store)
    with reported_as(uri="store", name="index"):
        opened = MilvusStore(uri, str(index))
    try:
        yield opened
    finally:
        opened.close()


def close_index(index: EmbeddingStore) -> None:
    """Close the connection of an index in Milvus; a faiss index needs no closing."""
    if isinstance(index, MilvusStore):
        index.close()


def _uri(store: str) -> str:
    if not store.startswith(KIND) or store == KIND:
        rule = "must be milvus: and a file or an address, such as milvus:photos.db or milvus:http://localhost:19530"
        raise InvalidValue(rule, argument="store", got=repr(store))
    return store.removeprefix(KIND)
