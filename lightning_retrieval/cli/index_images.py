"""Embed all images in a folder and save an index of them.

The index records which checkpoint it was made with and how images were prepared, so that queries are embedded in the
same way.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_retrieval.cli.embed_images import images_in_folder
from lightning_retrieval.cli.embedding import EmbeddedImages, ImageEmbedder, UnreadableImage
from lightning_retrieval.cli.stores import FaissFolder, MilvusCollection, Replacement, new_index
from lightning_retrieval.datamodules import ImageIndex
from lightning_retrieval.search.rows import EmbeddingStore

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
    overwrite: bool = False,
    update: bool = False,
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
        overwrite: replace an earlier index, whatever it holds.
        update: change an earlier index of the same model and images: embed and add the images that it lacks, remove the
            rows whose images are gone, and keep the others, with their ids. An image that has changed under its path
            keeps its embedding. If there is no earlier index, make one.
        batch_size: number of images embedded at a time; 1 if images keep their sizes.
        num_workers: number of processes that read images.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.

    Returns:
        The index, and the images that could not be read.

    Raises:
        FileNotFoundError: if the checkpoint or the folder does not exist.
        ValueError: if no image can be read, an argument is invalid, or, without `overwrite`, an earlier index holds
            rows that the new one would not hold: of other images or of another model. With `update`, if it is of
            another model, or rows cannot be removed from an index of its kind.
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
    replaced = Replacement(OWNER, new, about, overwrite=overwrite, update=update)
    if replaced.is_update:
        return _update(replaced, embedder, images, paths)
    replaced.check_kept(torch.arange(len(paths)), paths)
    embedded = _embed(embedder, images, listed.index, new)
    if not embedded.positions:
        raise _unreadable(images, embedded)
    indexed = [paths[position] for position in embedded.positions]
    positions = torch.tensor(embedded.positions)
    replaced.check_kept(positions, indexed)  # without the images that cannot be read
    index = new.write(embedded.embeddings.shape[1], about, embedded.embeddings, positions, indexed)
    return index, embedded.unreadable


def _update(
    replaced: Replacement, embedder: ImageEmbedder, images: Path, paths: Sequence[str]
) -> tuple[EmbeddingStore, list[UnreadableImage]]:
    """Bring the earlier index up to date; only the images that it lacks are embedded."""
    with replaced.updated(torch.arange(len(paths)), paths) as (index, is_new):
        added = [path for path, wanted in zip(paths, is_new) if wanted]
        embedded = EmbeddedImages(0)
        if added:
            embedded = _embed(embedder, images, ImageIndex(added, [0] * len(added)))
        if embedded.positions:
            index.add(embedded.embeddings, paths=[added[position] for position in embedded.positions])
        if len(index) == 0:
            raise _unreadable(images, embedded)
    return index, embedded.unreadable


def _embed(
    embedder: ImageEmbedder, images: Path, index: ImageIndex, new: FaissFolder | MilvusCollection | None = None
) -> EmbeddedImages:
    """The embeddings of images. Settings of a new index that do not fit them raise after the first batch."""
    embedded = EmbeddedImages(len(index))
    for batch in embedder.embed(images, index):
        if new is not None and not embedded.positions and batch.embeddings is not None:
            new.check_dim(batch.embeddings.shape[1])
            new.check_paths(index.paths)
        embedded.add(batch)
    return embedded


def _unreadable(images: Path, embedded: EmbeddedImages) -> ValueError:
    count = len(embedded.unreadable)
    return ValueError(
        f"{OWNER}: none of the {count} images in {images} can be read, the first: {embedded.unreadable[0]}."
    )
