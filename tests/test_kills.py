"""A process that is killed at any moment leaves what was there before, or what is new, and never a mix of both."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss, files
from lightning_retrieval.preparation import prepare
from lightning_retrieval.search.commands.export import export_model
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from tests.kills import killed_everywhere
from tests.lightning_retrieval.search.store.vectors import vectors

OTHER_FILE_SYSTEM = Path("/dev/shm")


def new_module(value):
    module = RetrievalModule(Embedder("glyph_net", 4), SmoothAPLoss())
    nn.init.constant_(module.embedder.head.linear.weight, value)
    return module


def value_of(path):
    """The value that `new_module` gave the weights of the checkpoint at a path, after it was verified."""
    return RetrievalModule.load_from_checkpoint(path).embedder.head.linear.weight[0, 0].item()


def save_file(path, value, plugins=()):
    """Save a checkpoint by a Trainer whose folder for temporary files is on another file system."""
    if OTHER_FILE_SYSTEM.is_dir():
        os.environ["TMPDIR"] = str(OTHER_FILE_SYSTEM)
        tempfile.tempdir = None
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, plugins=list(plugins)
    )
    batches = DataLoader([(torch.rand(8, 1, 32, 32), torch.arange(8) // 2)], batch_size=None)
    trainer.validate(new_module(value), batches, verbose=False)
    trainer.save_checkpoint(path)
    trainer.strategy.teardown()


def save_file_asynchronously(path, value):
    save_file(path, value, [AsyncCheckpointIO()])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [save_file, save_file_asynchronously])
def test_a_checkpoint_that_replaces_another_one(save, run_alone, tmp_path):
    """The name always has a checkpoint, the old or the new one, which can be loaded."""
    before, folder = tmp_path / "before", tmp_path / "folder"
    run_alone(call, save_file, before / "last.ckpt", 1.0)
    found = []
    for _ in killed_everywhere(
        save, folder / "last.ckpt", 2.0, folder=folder, before=before, processes=tmp_path / "processes"
    ):
        found.append(value_of(folder / "last.ckpt"))
    assert found == sorted(found)
    assert found[0] == 1.0
    assert found[-1] == 2.0
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def call(rank, world_size, function, *args):
    function(*args)


def save_model(folder, name, size):
    torch.manual_seed(0)
    embedder = Embedder(name, size)
    nn.init.constant_(embedder.head.linear.weight, size)
    embedder.save_pretrained(folder)


def save_model_in_steps(*args):
    """As on a file system that cannot exchange two names, which no test has (promise 4)."""
    files.exchange_names = lambda first, second: False
    save_model(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "users_file"), [(save_model, False), (save_model, True), (save_model_in_steps, False)]
)
def test_a_saved_model_that_replaces_another_one(save, users_file, tmp_path):
    """Where both folders can exchange their names, one of the models is always there; else, both or none."""
    before, folder = tmp_path / "before", tmp_path / "folder"
    save_model(before / "model", "glyph_net", 4)
    if users_file:
        (before / "model" / "notes").mkdir()
        (before / "model" / "notes" / "README.md").write_text("the user's")
    found = []
    for kill in killed_everywhere(
        save, folder / "model", "glyph_net", 8, folder=folder, before=before, processes=tmp_path / "processes"
    ):
        try:
            embedder = Embedder.from_pretrained(folder / "model")
        except FileNotFoundError:
            assert save is save_model_in_steps, kill
            continue
        assert (embedder.head.linear.weight == embedder.embedding_dim).all()
        found.append(embedder.embedding_dim)
        assert (folder / "model" / "notes" / "README.md").exists() == users_file
    assert found == sorted(found)
    assert set(found) == {4, 8}
    assert len(list((folder / "model").iterdir())) == 2 + users_file
    assert list(folder.iterdir()) == [folder / "model"]


def export(folder, checkpoint, settings):
    export_model(checkpoint, folder, **settings)


@pytest.mark.slow
def test_an_export_that_replaces_another_one(run_alone, tmp_path):
    """The folder has all files of one export, also if a kill comes before the new one is complete."""
    pytest.importorskip("onnxruntime")
    before, folder = tmp_path / "before", tmp_path / "folder"
    for value in (1.0, 2.0):
        run_alone(call, save_file, tmp_path / f"{value}.ckpt", value)
    run_alone(call, export, before / "model", tmp_path / "1.0.ckpt", {"input_type": "float"})
    (before / "model" / "model.int8.onnx").write_bytes((before / "model" / "model.onnx").read_bytes())
    old, found = set(os.listdir(before / "model")), []
    for kill in killed_everywhere(
        export,
        folder / "model",
        tmp_path / "2.0.ckpt",
        {},
        folder=folder,
        before=before,
        processes=tmp_path / "processes",
        last=12,
        every=6,
    ):
        found.append(prepare.read_settings(folder / "model")["input"])
        files_of_it = old if found[-1] == "float" else old - {"model.int8.onnx"}
        assert {name for name in os.listdir(folder / "model") if not name.endswith(".tmp")} == files_of_it, kill
    assert found == sorted(found)
    assert set(found) == {"float", "uint8"}


def build_index(folder, rows):
    RetrievalIndex.build(folder, vectors(rows), 1000 - torch.arange(rows), [""] * rows, shards=2)


def change_index(folder, rows):
    """Remove half of the rows, and add others."""
    index = RetrievalIndex.load(folder)
    index.remove(index.ids[:25])
    index.add(vectors(60)[rows - 35 : rows])
    index.save(folder)


@pytest.mark.slow
@pytest.mark.parametrize("write", [build_index, change_index])
def test_an_index_that_replaces_another_one(write, tmp_path):
    before, folder = tmp_path / "before", tmp_path / "folder"
    build_index(before / "index", 50)
    found = []
    for kill in killed_everywhere(
        write, folder / "index", 60, folder=folder, before=before, processes=tmp_path / "processes", last=16
    ):
        index = RetrievalIndex.load(folder / "index")
        found.append(len(index))
        assert index.search(vectors(50)[:1], 1)[1].tolist() == [[1000]], kill
    assert found == sorted(found)
    assert set(found) == {50, 60}


def write_shards(path, value):
    manifest = EmbeddingManifest(
        images=4, images_sha256="list", model_sha256="model", preparation={}, dim=3, shard_size=2
    )
    folder = EmbeddingFolder.create(path, manifest)
    for shard in range(2):
        ids = np.array(folder.positions(shard))
        embeddings = np.full((2, 3), value, dtype=np.float32)
        folder.write(shard, ShardRows(ids, embeddings, [f"{value} {position}.jpg" for position in ids], [None] * 2))


@pytest.mark.slow
def test_embeddings_that_are_written_again(tmp_path):
    """Each shard is the old one, the new one, or missing, which the next run writes."""
    before, folder = tmp_path / "before", tmp_path / "folder"
    write_shards(before / "e", 1.0)
    for kill in killed_everywhere(
        write_shards, folder / "e", 2.0, folder=folder, before=before, processes=tmp_path / "processes"
    ):
        write_shards(folder / "missing", 3.0)  # reads nothing of the other folder
        begun = EmbeddingFolder(folder / "e", EmbeddingFolder.load(folder / "missing").manifest)
        for shard in set(range(2)) - set(begun.missing()):
            rows = begun.read(shard)
            assert {path.split()[0] for path in rows.paths} == {str(rows.embeddings[0, 0].item())}, kill
            assert len(set(rows.embeddings.flatten().tolist())) == 1, kill
    assert begun.missing() == []
    assert rows.embeddings[0, 0] == 2.0
