"""`lightning-retrieval index`: build an index of the images in a folder, or of embeddings written by `embed`.

For a folder of images, the embeddings are kept in memory, not in files. The index records its checkpoint and the
preparation of its images, so that queries are embedded in the same way.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_retrieval.cli.embedding import EmbeddedImages, ImageEmbedder, UnreadableImage, images_in_folder
from lightning_retrieval.cli.options import EMBEDDINGS_OPTIONS
from lightning_retrieval.cli.stores import IndexSettings, IndexWriter, close_index, new_index
from lightning_retrieval.preparation.of_checkpoint import shown_choice
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.index import RECALL_AT
from lightning_retrieval.search.milvus_store import EmbeddingStore
from lightning_retrieval.search.rows import FolderRows


def index(options: argparse.Namespace) -> Sequence[UnreadableImage]:
    """Run the command: print what was written, and return the images that could not be read."""
    settings = vars(options)
    if options.embeddings is not None:
        made, unreadable = index_embeddings(**{name: settings[name] for name in EMBEDDINGS_OPTIONS})
    else:
        del options.embeddings
        made, unreadable = index_images(**settings)
        print(f"images prepared with {shown_choice(made.about)}")
    print(f"{options.output}: {_summary(made)}")
    close_index(made)
    return unreadable


def _summary(made: EmbeddingStore) -> str:
    images = f"{len(made)} images"
    if len(made) == 1:
        images = "1 image"
    quality = "exact"
    if made.recall is not None:
        quality = f"recall@{RECALL_AT} {made.recall:.3f} against exact search"
    return f"{images}, {made.dim} dimensions, {made.factory} ({quality})"


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
    overwrite: bool = False,
    update: bool = False,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
) -> tuple[EmbeddingStore, list[UnreadableImage]]:
    """Embed all images below a folder, and save an index of them.

    Args:
        checkpoint: checkpoint of a `RetrievalModule`, or the folder of its runs, whose newest `best.ckpt` is used.
        images: folder of the images. All files at any depth whose suffix Pillow knows are indexed, except hidden files.
        output: folder of the index, or its name in the store.
        transform: one of `Preparation.NAMES`, or the dotted name of a function, which is imported. If the checkpoint
            records the preparation of its evaluation, `transform` must agree with this record, and is only needed if
            the preparation is a function. If `transform` is None, the preparation is that of the checkpoint, else
            that of the model's `Embedder`, else `"plain"` for a model of colour images and `"glyphs"` for a model of
            grey images. `about["preparation"]` of the index is the preparation used; `about["preparation_from"]` is
            `"argument"`, `"checkpoint"`, `"model"` or `"default"`.
        store: `"milvus:URI"`, see `MilvusStore`; if None, the index is a folder of faiss files.
        factory: faiss' factory string, or type of Milvus' index.
        parameters: search parameters, as in `RetrievalIndex` or `MilvusStore`.
        shards: number of shards of the index, for faiss.
        rows_in_memory: build the index on disk, with the codes of this many rows in memory, see
            `RetrievalIndex.build_on_disk`; if None, build it in memory.
        overwrite: replace an existing index, whatever it holds.
        update: update an existing index of the same model and images: embed and add new images, remove the rows of
            deleted images, and keep all other rows with their ids. An image that has changed under the same path keeps
            its old embedding. If there is no index, build one.
        batch_size: number of images embedded at a time; the number is 1 if images keep their sizes.
        num_workers: number of processes that read images.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.

    Returns:
        The index, and the images that could not be read.

    Raises:
        FileNotFoundError: if the checkpoint or the folder does not exist.
        ValueError: if no image can be read or an argument is invalid; without `overwrite`, if rows of an existing index
            would be lost, because they belong to other images or to another model; with `update`, if the index is of
            another model, or rows cannot be removed from this kind of index.
        OSError: if the store cannot be reached; raised before any image is embedded.

    Cost:
        A `"Flat"` index needs 8 bytes of memory per component of each embedding: 4 for the embeddings, 4 for the index.
    """
    owner = "index_images"
    new = new_index(owner, output, store, IndexSettings(factory, parameters, shards, rows_in_memory))
    listed = images_in_folder(owner, images)
    embedder = ImageEmbedder.load(
        owner, checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device=device
    )
    about = {**embedder.about, "images": str(images.absolute())}
    writer = IndexWriter(owner, new, about, overwrite=overwrite, update=update)
    ids, paths = torch.arange(len(listed.index)), listed.index.paths
    dim = embedder.dim()
    new.check_dim(dim)
    new.check_paths(paths)
    writer.check_kept(ids, paths)  # raises before any image is embedded
    return writer.write(dim, ids, paths, lambda positions: embedder.embed_all(listed, positions.tolist()))


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
        embeddings: folder written by `embed_images` or `EmbeddingWriter`.
        output: folder of the index, or its name in the store.
        store: `"milvus:URI"`, see `MilvusStore`; if None, the index is a folder of faiss files.
        factory: faiss' factory string, or type of Milvus' index.
        parameters: search parameters, as in `RetrievalIndex` or `MilvusStore`.
        shards: number of shards of the index, for faiss.
        rows_in_memory: build the index on disk, with the codes of this many rows in memory, see
            `RetrievalIndex.build_on_disk`; if None, build it in memory.
        overwrite: replace an existing index, whatever it holds.
        update: update an existing index of the same model and images: add new rows, with ids after the largest id, and
            remove rows that are not in the folder. If there is no index, build one.

    Returns:
        The index, and the images that could not be read when they were embedded.

    Raises:
        FileNotFoundError: if the folder holds no embeddings.
        ValueError: if files of the folder are missing or damaged, no image could be read, or an argument is invalid;
            without `overwrite`, if rows of an existing index would be lost; with `update`, as for `index_images`.
        OSError: if the store cannot be reached; this is checked first.

    Cost:
        Memory for the index (with `rows_in_memory`, only for its ids and paths and the codes of these rows), the
        training rows, a block of 65,536 rows and one file of embeddings. Each file is read up to six times: all files
        are first checked, and training uses rows from all files.
    """
    owner = "index_embeddings"
    new = new_index(owner, output, store, IndexSettings(factory, parameters, shards, rows_in_memory))
    folder = EmbeddingFolder.load(owner, embeddings)
    manifest = folder.manifest
    new.check_dim(manifest.dim)
    rows = FolderRows(folder)  # reads and checks all files
    new.check_paths(rows.paths)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]

    def embedded(positions: Int[Tensor, " wanted"]) -> EmbeddedImages:
        if len(positions) == len(rows):
            return EmbeddedImages(positions, rows, unreadable)  # `rows` reads the embeddings from files
        return EmbeddedImages(positions, rows[positions], unreadable)

    writer = IndexWriter(owner, new, manifest.about, overwrite=overwrite, update=update)
    return writer.write(manifest.dim, rows.ids, rows.paths, embedded)
