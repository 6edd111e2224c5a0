"""Build an index from a folder of embeddings that `embed` wrote."""

from pathlib import Path

from lightning_retrieval.cli.embedding import UnreadableImage
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.folder_rows import FolderRows
from lightning_retrieval.search.index import RetrievalIndex
from lightning_retrieval.search.storage import check_folder

OWNER = "index_embeddings"


def index_embeddings(
    embeddings: Path, output: Path, *, factory: str = "Flat", parameters: str = "", shards: int = 1
) -> tuple[RetrievalIndex, list[UnreadableImage]]:
    """Index the rows of a folder of embeddings, with their ids and paths, and save the index.

    Args:
        embeddings: folder that `embed_images` or `EmbeddingWriter` wrote.
        output: folder of the index.
        factory: faiss' factory string.
        parameters: of the search, as in `RetrievalIndex`.
        shards: number of parts of the index.

    Returns:
        The index, and the images that could not be read when they were embedded.

    Raises:
        FileNotFoundError: if the folder holds no embeddings.
        ValueError: if some of its files are missing or damaged, or an argument is invalid.

    Cost:
        Memory for the index, the rows that train it, a block of 65,536 rows and one file of embeddings. Each file is
        read up to six times, also to check all of them first, and to train the index on rows from all files.
    """
    check_folder(OWNER, output)
    folder = EmbeddingFolder.load(OWNER, embeddings)
    manifest = folder.manifest
    index = RetrievalIndex(manifest.dim, factory, parameters=parameters, shards=shards, about=manifest.about)
    rows = FolderRows(folder)
    if len(rows) == 0:
        raise ValueError(
            f"{OWNER}: `embeddings` must hold at least one row, got {embeddings}, none of whose {manifest.images} "
            "images could be read."
        )
    index.add(rows, rows.ids, rows.paths)
    index.save(output)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return index, unreadable
