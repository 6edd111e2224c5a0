"""Embed all images in a folder and save an index of them.

The index records which checkpoint it was made with and how images were prepared, so that queries are embedded in the
same way.
"""

from pathlib import Path

import torch

from lightning_retrieval.cli.embedding import EmbeddedImages, ImageEmbedder, UnreadableImage
from lightning_retrieval.cli.image_list import images_in_folder
from lightning_retrieval.cli.stores import new_index
from lightning_retrieval.search.embedding_store import EmbeddingStore

OWNER = "index_images"


def index_images(
    checkpoint: Path,
    images: Path,
    output: Path,
    *,
    transform: str | None = None,
    store: str | None = None,
    factory: str = "Flat",
    parameters: str = "",
    shards: int = 1,
    rows_in_memory: int | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
) -> tuple[EmbeddingStore, list[UnreadableImage]]:
    """Embed all images below a folder, and save an index of them.

    Args:
        checkpoint: of a `RetrievalModule`.
        images: the folder; all files with a suffix that Pillow opens are indexed, at any depth, except hidden ones.
        output: folder of the index, or its name in the store.
        transform: one of `Preparation.NAMES`, or the dotted name of a function, which is imported; only needed if the
            checkpoint does not hold what the evaluation in training did to an image, and otherwise it must be that. If
            None, what the checkpoint says, else what the model's `Embedder` wants, else `"plain"` for a model of colour
            images and `"glyphs"` for one of grey images. `about["preparation"]` of the index is what was used, and
            `about["preparation_from"]` is `"argument"`, `"checkpoint"`, `"model"` or `"default"`.
        store: `"milvus:URI"`, see `MilvusStore`; if None, a folder of faiss' files.
        factory: faiss' factory string, or type of Milvus' index.
        parameters: of the search, as in `RetrievalIndex` or `MilvusStore`.
        shards: number of parts of the index, for faiss.
        rows_in_memory: build the index on disk, with the codes of this many rows in memory, see
            `RetrievalIndex.build_on_disk`; if None, build it in memory.
        batch_size: number of images embedded at a time; 1 if images keep their sizes.
        num_workers: number of processes that read images.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.

    Returns:
        The index, and the images that could not be read.

    Raises:
        FileNotFoundError: if the checkpoint or the folder does not exist.
        ValueError: if no image can be read, or an argument is invalid.
        OSError: if the store cannot be reached, which is tried before any image is embedded.

    Cost:
        For a `"Flat"` index, 8 bytes for each number of an embedding: 4 for the embeddings and 4 for the index.
    """
    new = new_index(
        OWNER, output, store, factory=factory, parameters=parameters, shards=shards, rows_in_memory=rows_in_memory
    )
    listed = images_in_folder(OWNER, images)
    paths = listed.index.paths
    embedder = ImageEmbedder.load(
        OWNER, checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device=device
    )
    about = {**embedder.about, "images": str(images.absolute())}

    dim = None
    embedded = EmbeddedImages(len(paths))
    for batch in embedder.embed(images, listed.index):
        if dim is None and batch.embeddings is not None:
            # Settings that do not fit the embeddings raise after the first batch, not after the last.
            dim = batch.embeddings.shape[1]
            new.check_dim(dim)
            new.check_paths(paths)
        embedded.add(batch)
    if dim is None:
        raise ValueError(
            f"{OWNER}: none of the {len(paths)} images in {images} can be read, the first: {embedded.unreadable[0]}."
        )
    indexed = [paths[position] for position in embedded.positions]
    index = new.write(dim, about, embedded.embeddings, torch.tensor(embedded.positions), indexed)
    return index, embedded.unreadable
