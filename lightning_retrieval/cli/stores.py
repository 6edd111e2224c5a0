"""Where the commands write and read an index: a folder of faiss' files, or, with `--store`, a collection of Milvus."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from lightning_retrieval.search.disk_lists import check_lists, check_rows_in_memory
from lightning_retrieval.search.embedding_store import EmbeddingStore
from lightning_retrieval.search.index import RetrievalIndex
from lightning_retrieval.search.milvus_collection import check_dim, check_store
from lightning_retrieval.search.milvus_connection import OWNER
from lightning_retrieval.search.milvus_rows import check_path_bytes
from lightning_retrieval.search.milvus_store import MilvusStore
from lightning_retrieval.search.rows import Rows
from lightning_retrieval.search.storage import check_folder

KIND = "milvus:"


class FaissFolder:
    """A new index of faiss in a folder.

    Args:
        owner: prefix of error messages.
        folder: of the index.
        factory: faiss' factory string.
        parameters: of the search.
        shards: number of parts of the index.
        rows_in_memory: build the index on disk, with this many rows in memory; if None, build it in memory.

    Raises:
        ValueError: if something else is in the folder, or a number is invalid.
    """

    def __init__(
        self, owner: str, folder: Path, *, factory: str, parameters: str, shards: int, rows_in_memory: int | None
    ) -> None:
        check_folder(owner, folder)
        RetrievalIndex(1, shards=shards)
        if rows_in_memory is not None:
            check_rows_in_memory(rows_in_memory)
        self._folder = folder
        self._rows_in_memory = rows_in_memory
        self._settings: dict[str, Any] = {"factory": factory, "parameters": parameters, "shards": shards}

    def check_dim(self, dim: int) -> None:
        """Raise if the settings do not fit embeddings of this length."""
        index = RetrievalIndex(dim, **self._settings)
        if self._rows_in_memory is not None:
            check_lists(index.faiss_indexes[0], index.factory)

    def check_paths(self, paths: Sequence[str]) -> None:
        """All paths can be stored."""

    def write(
        self, dim: int, about: Mapping[str, Any], embeddings: Rows, ids: Int[Tensor, " rows"], paths: Sequence[str]
    ) -> EmbeddingStore:
        """Make the index and save it, in place of an earlier one."""
        index = RetrievalIndex(dim, about=about, **self._settings)
        if self._rows_in_memory is not None:
            index.build_on_disk(self._folder, embeddings, ids, paths, rows_in_memory=self._rows_in_memory)
            return index
        index.add(embeddings, ids, paths)
        index.save(self._folder)
        return index


class MilvusCollection:
    """A new index in Milvus.

    Args:
        owner: prefix of error messages.
        name: of the index.
        uri: of the store.
        factory: type of Milvus' index.
        parameters: of the search.
        shards: must be 1, because Milvus distributes rows by itself.
        rows_in_memory: must be None, because Milvus keeps rows by itself.

    Raises:
        ValueError: if an argument is invalid, or the name is that of something else.
        OSError: if the store cannot be reached.
    """

    def __init__(
        self,
        owner: str,
        name: str,
        uri: str,
        *,
        factory: str,
        parameters: str,
        shards: int,
        rows_in_memory: int | None,
    ) -> None:
        if rows_in_memory is not None:
            raise ValueError(
                f"{owner}: `rows_in_memory` must not be given with a store in Milvus, which keeps rows by itself, got "
                f"{rows_in_memory}."
            )
        if shards != 1:
            raise ValueError(
                f"{owner}: `shards` must be 1 with a store in Milvus, which distributes rows by itself, got {shards}."
            )
        with _named_as("output"):
            check_store(uri, name, factory, parameters)
        self._place = (uri, name)
        self._settings = {"factory": factory, "parameters": parameters}

    def check_dim(self, dim: int) -> None:
        """Raise if Milvus cannot hold embeddings of this length."""
        check_dim(dim)

    def check_paths(self, paths: Sequence[str]) -> None:
        """Raise if Milvus cannot hold these paths."""
        check_path_bytes(paths)

    def write(
        self, dim: int, about: Mapping[str, Any], embeddings: Rows, ids: Int[Tensor, " rows"], paths: Sequence[str]
    ) -> EmbeddingStore:
        """Make the index, in place of an earlier one, which stays as it is if this fails."""
        with _named_as("output"):
            store = MilvusStore.create(*self._place, dim, about=about, **self._settings)
        try:
            store.add(embeddings, ids, paths)
            store.publish()
        except BaseException:
            with suppress(OSError):
                store.drop()
            store.close()
            raise
        return store


def new_index(
    owner: str,
    output: Path,
    store: str | None,
    *,
    factory: str,
    parameters: str,
    shards: int,
    rows_in_memory: int | None,
) -> FaissFolder | MilvusCollection:
    """Where a command writes an index; checked before any image is embedded.

    Args:
        owner: prefix of error messages.
        output: folder of the index, or its name in the store.
        store: `"milvus:URI"`; if None, faiss' files in a folder.
        factory: factory string of faiss, or type of Milvus' index.
        parameters: of the search.
        shards: number of parts of the index, for faiss.
        rows_in_memory: build an index of faiss on disk, with this many rows in memory; if None, build it in memory.

    Raises:
        ValueError: if an argument is invalid, or something else is there.
        OSError: if the store cannot be reached.
    """
    settings: dict[str, Any] = {"factory": factory, "parameters": parameters, "shards": shards}
    if store is None:
        return FaissFolder(owner, output, **settings, rows_in_memory=rows_in_memory)
    return MilvusCollection(owner, str(output), _uri(owner, store), **settings, rows_in_memory=rows_in_memory)


@contextmanager
def opened_index(owner: str, index: Path, store: str | None) -> Iterator[EmbeddingStore]:
    """An index that a command wrote, closed at the end of the block; one in a folder is mapped into memory.

    Args:
        owner: prefix of error messages.
        index: folder of the index, or its name in the store.
        store: as for `new_index`.

    Raises:
        FileNotFoundError: if there is no such index.
        ValueError: if it is damaged or something else.
        OSError: if the store cannot be reached.
    """
    if store is None:
        yield RetrievalIndex.load(index, mapped=True)
        return
    uri = _uri(owner, store)
    with _named_as("index"):
        opened = MilvusStore(uri, str(index))
    try:
        yield opened
    finally:
        opened.close()


def close_index(index: EmbeddingStore) -> None:
    """Close an index that needs it."""
    if isinstance(index, MilvusStore):
        index.close()


@contextmanager
def _named_as(index: str) -> Iterator[None]:
    """Let messages of `MilvusStore` name the arguments of the functions here: `store`, and `index` or `output`."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error).replace("`uri`", "`store`").replace("`name`", f"`{index}`")
        if not message.startswith(OWNER):
            raise
        raise type(error)(message) from None


def _uri(owner: str, store: str) -> str:
    if not store.startswith(KIND) or store == KIND:
        raise ValueError(
            f"{owner}: `store` must be milvus: and a file or an address, such as milvus:photos.db or "
            f"milvus:http://localhost:19530, got {store!r}."
        )
    return store.removeprefix(KIND)
