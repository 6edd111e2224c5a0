"""Checkpoints, folders of images and calls of the commands, for the tests of all of them."""

import contextlib
import re

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.cli.main import main
from lightning_retrieval.search.embedding_folder import EmbeddingFolder

STRANGE_NAME = "<script>alert('&\"')<\\script>.png"  # a name that a page must not run
TEXTS = {"backbone": "ngram_net", "embedding_dim": 16, "backbone_args": {"buckets": 500, "dim": 8}}
SMALL = {"backbone": "glyph_net", "embedding_dim": 16, "backbone_args": {"width": 8}}


def save_checkpoint(path, module):
    """Write a checkpoint of a module without a training; its path."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path, weights_only=True)
    return path


def run(capsys, *args):
    """The exit code of the program, standard output and standard error."""
    code = 0
    try:
        main([*map(str, args)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def command(capsys, *args):
    """The same of a command that loads a model."""
    return run(capsys, *args, "--device=cpu")


def error_of(capsys, *args):
    """The one line of standard error of a command that fails."""
    code, out, err = command(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def indexing(folder, output, *more):
    """Arguments that index the images of a folder with its checkpoint."""
    return [
        "index",
        f"--checkpoint={folder / 'model.ckpt'}",
        f"--images={folder / 'images'}",
        f"--output={output}",
        *more,
    ]


def paths_of(folder):
    """Paths of the images, relative to the folder, in the order of the glyphs."""
    found = {path.name: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return [found.pop(STRANGE_NAME), *(found[name] for name in sorted(found) if re.match(r"\d\d\.", name))]


def embeddings_in(path):
    """The paths of images, or the texts, and their embeddings in a folder that `embed` wrote."""
    folder = EmbeddingFolder.load(path)
    shards = [folder.read(shard) for shard in range(len(folder))]
    paths = [path for rows in shards for path in rows.paths]
    return paths, torch.from_numpy(np.concatenate([rows.embeddings for rows in shards]))


@contextlib.contextmanager
def opened(output, store=()):
    """The index at `--output`, with the arguments that name a file of Milvus."""
    if not store:
        yield RetrievalIndex.load(output)
        return
    made = MilvusStore(store[1].removeprefix("milvus:"), output)
    try:
        yield made
    finally:
        made.close()
