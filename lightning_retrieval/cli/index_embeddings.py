"""Build an index from a folder of embeddings that `embed` wrote."""

import tempfile
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_retrieval.cli.embedding import UnreadableImage
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
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
        The index and one file of embeddings in memory; a temporary file of 4 N D bytes beside the output, so that an
        index is trained on rows from all files.
    """
    check_folder(OWNER, output)
    folder = EmbeddingFolder.load(OWNER, embeddings)
    manifest = folder.manifest
    index = RetrievalIndex(manifest.dim, factory, parameters=parameters, shards=shards, about=manifest.about)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}-") as file:
        size = manifest.images * manifest.dim
        rows = torch.from_file(file.name, shared=True, size=size).view(-1, manifest.dim)
        ids, paths = _copy_rows(folder, rows)
        if not ids:
            raise ValueError(
                f"{OWNER}: `embeddings` must hold at least one row, got {embeddings}, none of whose "
                f"{manifest.images} images could be read."
            )
        index.add(rows[: len(ids)], torch.tensor(ids), paths)
        index.save(output)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return index, unreadable


def _copy_rows(folder: EmbeddingFolder, rows: Float[Tensor, "rows dim"]) -> tuple[list[int], list[str]]:
    """Copy all embeddings to the first rows of a tensor, file by file; their ids and paths."""
    ids: list[int] = []
    paths: list[str] = []
    for shard in range(len(folder)):
        found = folder.read(shard)
        rows[len(ids) : len(ids) + len(found.ids)] = torch.from_numpy(found.embeddings)
        ids += found.ids.tolist()
        paths += found.paths
    return ids, paths
