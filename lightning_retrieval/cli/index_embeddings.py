"""Build an index from a folder of embeddings that `embed` wrote."""

from pathlib import Path

import torch

from lightning_retrieval.cli.embedding import UnreadableImage
from lightning_retrieval.cli.stores import Replacement, new_index
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.rows import EmbeddingStore, FolderRows

OWNER = "index_embeddings"


def index_embeddings(
    embeddings: Path,
    output: Path,
    *,
    store: str | None = None,
    factory: str = "Flat",
    parameters: str = "",
    shards: int = 1,
    rows_in_memory: int | None = None,
    overwrite: bool = False,
    update: bool = False,
) -> tuple[EmbeddingStore, list[UnreadableImage]]:
    """Index the rows of a folder of embeddings, with their ids and paths, and save the index.

    Args:
        embeddings: folder that `embed_images` or `EmbeddingWriter` wrote.
        output: folder of the index, or its name in the store.
        store: `"milvus:URI"`, see `MilvusStore`; if None, a folder of faiss' files.
        factory: faiss' factory string, or type of Milvus' index.
        parameters: of the search, as in `RetrievalIndex` or `MilvusStore`.
        shards: number of parts of the index, for faiss.
        rows_in_memory: build the index on disk, with the codes of this many rows in memory, see
            `RetrievalIndex.build_on_disk`; if None, build it in memory.
        overwrite: replace an earlier index, whatever it holds.
        update: change an earlier index of the same model and images: add the rows that it lacks, with ids after its
            largest, and remove those that are not in the folder. If there is no earlier index, make one.

    Returns:
        The index, and the images that could not be read when they were embedded.

    Raises:
        FileNotFoundError: if the folder holds no embeddings.
        ValueError: if some of its files are missing or damaged, an argument is invalid, or, without `overwrite`, an
            earlier index holds rows that the new one would not hold. With `update`, as for `index_images`.
        OSError: if the store cannot be reached, which is tried first.

    Cost:
        Memory for the index, with `rows_in_memory` for its ids and paths and the codes of these rows; the rows that
        train it, a block of 65,536 rows and one file of embeddings. Each file is read up to six times, also to check
        all of them first, and to train the index on rows from all files.
    """
    new = new_index(
        OWNER, output, store, factory=factory, parameters=parameters, shards=shards, rows_in_memory=rows_in_memory
    )
    folder = EmbeddingFolder.load(OWNER, embeddings)
    manifest = folder.manifest
    new.check_dim(manifest.dim)
    rows = FolderRows(folder)  # which reads all files
    if len(rows) == 0:
        raise ValueError(
            f"{OWNER}: `embeddings` must hold at least one row, got {embeddings}, none of whose {manifest.images} "
            "images could be read."
        )
    new.check_paths(rows.paths)
    replaced = Replacement(OWNER, new, manifest.about, overwrite=overwrite, update=update)
    if replaced.is_update:
        index = _update(replaced, rows)
    else:
        replaced.check_kept(rows.ids, rows.paths)
        index = new.write(manifest.dim, manifest.about, rows, rows.ids, rows.paths)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return index, unreadable


def _update(replaced: Replacement, rows: FolderRows) -> EmbeddingStore:
    """Bring the earlier index up to date."""
    with replaced.updated(rows.ids, rows.paths) as (index, is_new):
        positions = torch.from_numpy(is_new).nonzero()[:, 0]
        if len(positions) > 0:
            index.add(rows[positions], paths=rows.paths[positions.numpy()])
    return index
