"""Embed images into a folder of shards with any number of processes, and continue where a killed run stopped."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.cli.embedding import ImageEmbedder, UnreadableImage
from lightning_retrieval.cli.embedding_run import (
    EmbeddingTask,
    ImageWriter,
    ListedSet,
    embedding_trainer,
    quiet_lightning,
    run_embedding,
)
from lightning_retrieval.cli.image_list import list_images
from lightning_retrieval.search.embedding_folder import SHARD_SIZE, EmbeddingFolder, check_output
from lightning_retrieval.search.embedding_shards import DTYPES, FILE_FORMATS, load_pyarrow

OWNER = "embed_images"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class EmbeddedFolder:
    """What `embed_images` has done.

    Args:
        folder: the embeddings, all shards of which are complete.
        written: number of shards that were written; the others were there before.
        unreadable: the images that could not be read, of all shards.
        rank: of this process. All processes return the same.
        renewed: number of the shards that were written although they were there, because images have changed since.
    """

    folder: EmbeddingFolder
    written: int
    unreadable: list[UnreadableImage]
    rank: int = 0
    renewed: int = 0


def embed_images(
    checkpoint: Path,
    images: Path,
    output: Path,
    *,
    root: Path | None = None,
    transform: str | None = None,
    file_format: Literal["parquet", "npy"] = "parquet",
    shard_size: int = SHARD_SIZE,
    dtype: Literal["float32", "float16"] = "float32",
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    precision: str = PRECISIONS[0],
) -> EmbeddedFolder:
    """Embed images into a folder of Parquet or .npy files, of which those that are there are not made again.

    With several devices or nodes, Lightning starts a process for each, which calls this function again. Each process
    embeds whole files, so the files are the same for any number of processes, and so may a run that continues. A file
    that is there is made again if the size or the modification time of one of its images is not that of then.

    Args:
        checkpoint: of a `RetrievalModule`.
        images: a folder, or a table as `ImageTable` reads it, of which only the column `image` is required.
        output: folder of the embeddings: new, or one that the same call began. All nodes must see it.
        root: folder that the paths of a table are relative to; if None, the one that the table is in.
        transform: as for `index_images`.
        file_format: `"parquet"` or `"npy"`.
        shard_size: number of images of a file, >= 1; as many are embedded again by each process after a kill, at most.
        dtype: type of the numbers in the files, `"float32"` or `"float16"`.
        batch_size: number of images embedded at a time.
        num_workers: number of processes that read images, for each device.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.
        devices: number of devices of each node, each of which gets a process.
        num_nodes: number of machines.
        precision: as Lightning names it: `"32-true"`, `"bf16-mixed"` or `"16-mixed"`.

    Raises:
        FileNotFoundError: if the checkpoint or the images do not exist.
        ModuleNotFoundError: if pyarrow is missing.
        ValueError: if the folder holds embeddings of another model or list, or a damaged file, processes have different
            images, or an argument is invalid.
        ConnectionError: if another process has ended early.

    Cost:
        In each process memory for the embeddings of one shard, and for the list of images.
    """
    check_choice(OWNER, "file_format", file_format, FILE_FORMATS)
    check_choice(OWNER, "dtype", dtype, DTYPES)
    check_choice(OWNER, "precision", precision, PRECISIONS)
    for name, number in (("shard_size", shard_size), ("devices", devices), ("num_nodes", num_nodes)):
        check_integer(OWNER, name, number, least=1)
    check_output(OWNER, output)
    if file_format == "parquet":
        load_pyarrow(OWNER)  # raises before any image is embedded
    listed = list_images(OWNER, images, root)
    embedder = ImageEmbedder.load(
        OWNER, checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device="cpu"
    )  # Lightning moves it to the device of this process
    writer = ImageWriter(
        output, ListedSet(listed, embedder), file_format=file_format, shard_size=shard_size, dtype=dtype
    )
    task = EmbeddingTask(embedder, listed.index.paths)
    with quiet_lightning():
        trainer = embedding_trainer(OWNER, writer, device, devices=devices, num_nodes=num_nodes, precision=precision)
        run_embedding(trainer, task, embedder.loader(listed.root, listed.index))
    folder = EmbeddingFolder.load(OWNER, output)
    unreadable = [UnreadableImage(path, reason) for path, reason in folder.unreadable()]
    return EmbeddedFolder(folder, writer.written, unreadable, trainer.global_rank, writer.renewed)
