"""Embed images into a folder of shards, and continue where a killed run stopped."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.cli.embedding import ImageEmbedder, UnreadableImage
from lightning_retrieval.cli.image_list import ListedImages, list_images
from lightning_retrieval.search.embedding_folder import (
    SHARD_SIZE,
    EmbeddingFolder,
    EmbeddingManifest,
    check_output,
    digest_of_list,
)
from lightning_retrieval.search.embedding_shards import FILE_FORMATS, ShardRows, load_pyarrow
from lightning_retrieval.search.shard_collector import ShardCollector

OWNER = "embed_images"


@dataclass(frozen=True)
class EmbeddedFolder:
    """What `embed_images` has done.

    Args:
        folder: the embeddings, all shards of which are complete.
        written: number of shards that were written; the others were there before.
        unreadable: the images that could not be read, of all shards.
    """

    folder: EmbeddingFolder
    written: int
    unreadable: list[UnreadableImage]


def embed_images(
    checkpoint: Path,
    images: Path,
    output: Path,
    *,
    root: Path | None = None,
    transform: str | None = None,
    file_format: str = FILE_FORMATS[0],
    shard_size: int = SHARD_SIZE,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
) -> EmbeddedFolder:
    """Embed images into a folder of Parquet or .npy files, of which those that are there are not made again.

    Args:
        checkpoint: of a `RetrievalModule`.
        images: a folder, or a table as `ImageTable` reads it, of which only the column `image` is required.
        output: folder of the embeddings: new, or one that the same call began.
        root: folder that the paths of a table are relative to; if None, the one that the table is in.
        transform: as for `index_images`.
        file_format: `"parquet"` or `"npy"`.
        shard_size: number of images of a file, >= 1; as many are embedded again after a kill, at most.
        batch_size: number of images embedded at a time.
        num_workers: number of processes that read images.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.

    Raises:
        FileNotFoundError: if the checkpoint or the images do not exist.
        ModuleNotFoundError: if pyarrow is missing.
        ValueError: if the folder holds embeddings of another model or list, or an argument is invalid.

    Cost:
        Memory for the embeddings of one shard, and for the list of images.
    """
    check_choice(OWNER, "file_format", file_format, FILE_FORMATS)
    check_integer(OWNER, "shard_size", shard_size, least=1)
    check_output(OWNER, output)
    if file_format == "parquet":
        load_pyarrow(OWNER)  # raises before any image is embedded
    listed = list_images(OWNER, images, root)
    embedder = ImageEmbedder.load(
        OWNER, checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device=device
    )
    manifest = EmbeddingManifest(
        images=len(listed.index),
        images_sha256=digest_of_list(listed.fields()),
        model_sha256=embedder.about["checkpoint_sha256"],
        preparation=embedder.about["preparation"],
        dim=embedder.dim(),
        shard_size=shard_size,
        file_format=file_format,
        about={**embedder.about, "images": str(listed.root.absolute())},
    )
    folder = EmbeddingFolder.create(OWNER, output, manifest)
    with folder.lock():
        written = _embed_missing(folder, embedder, listed)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return EmbeddedFolder(folder, written, unreadable)


def _embed_missing(folder: EmbeddingFolder, embedder: ImageEmbedder, listed: ListedImages) -> int:
    """Embed the images of the shards that are missing; the number of these shards."""
    missing = folder.missing()
    collector = ShardCollector(folder)
    ranges = [folder.positions(shard) for shard in missing]
    for batch in embedder.embed(listed.root, listed.index, ranges=ranges):
        for image in batch.unreadable:
            collector.add_unreadable(image.position, image.path, image.reason)
        if batch.embeddings is not None:
            ids = np.array(batch.positions, dtype=np.int64)
            paths = [listed.index.paths[position] for position in batch.positions]
            labels = [listed.labels[position] for position in batch.positions]
            collector.add(batch.positions, ShardRows(ids, batch.embeddings.numpy(), paths, labels))
    collector.finish()
    return len(missing)
