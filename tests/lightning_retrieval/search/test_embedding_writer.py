"""The files of a prediction hold what `predict_step` returned, with ids, paths and labels, for any batches."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_retrieval import RetrievalModule, SmoothAPLoss, read_embeddings
from lightning_retrieval.callbacks import EmbeddingWriter
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.files import file_digest
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.datamodules.trees_more import SMALL, write_folders

IMAGES = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
LABELLED = TensorDataset(IMAGES, torch.tensor([3, 3, 5, 5, -1, 7, 7, 8, 8, 8]), torch.arange(10))
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def new_module(inputs=6, seed=0):
    torch.manual_seed(seed)
    return RetrievalModule(nn.Sequential(nn.Flatten(), nn.Linear(inputs, 4)), SmoothAPLoss())


def predict(output, data=None, module=None, trainer_settings=(), **settings):
    settings = {"shard_size": 4, **settings}
    trainer = pl.Trainer(callbacks=EmbeddingWriter(output, **settings), **{**QUIET, **dict(trainer_settings)})
    data = data or DataLoader(LABELLED, batch_size=3)
    assert trainer.predict(module or new_module(), data, return_predictions=False) is None
    return trainer


def shards_of(path):
    folder = EmbeddingFolder.load(path)
    return [folder.read(shard) for shard in range(len(folder))]


def ids_of(path):
    return [shard.ids.tolist() for shard in shards_of(path)]


@pytest.mark.parametrize("batch_size", [3, 10])
def test_files_hold_what_predict_step_returns(tmp_path, batch_size):
    predict(tmp_path / "e", DataLoader(LABELLED, batch_size=batch_size))
    with torch.no_grad():
        expected = new_module().embed(IMAGES)
    shards = shards_of(tmp_path / "e")
    assert [shard.ids.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    found = torch.cat([torch.from_numpy(shard.embeddings) for shard in shards])
    torch.testing.assert_close(found, expected)
    assert [label for shard in shards for label in shard.labels] == ["3", "3", "5", "5", None, "7", "7", "8", "8", "8"]


def test_ids_need_not_be_positions(tmp_path):
    predict(tmp_path / "e", DataLoader(Subset(LABELLED, [9, 2, 5, 7, 8]), batch_size=3))
    assert ids_of(tmp_path / "e") == [[9, 2, 5, 7], [8]]
    with torch.no_grad():
        expected = new_module().embed(IMAGES[8:9])
    torch.testing.assert_close(torch.from_numpy(shards_of(tmp_path / "e")[1].embeddings), expected)


def test_images_alone_and_a_limit_of_batches(tmp_path):
    predict(tmp_path / "e", DataLoader(IMAGES, batch_size=3))
    stored = read_embeddings(tmp_path / "e")
    assert (stored.ids.tolist(), stored.paths, stored.labels) == (list(range(10)), [""] * 10, [None] * 10)
    settings = {"trainer_settings": {"limit_predict_batches": 2}, "shard_size": 6}
    predict(tmp_path / "f", DataLoader(IMAGES, batch_size=3), **settings)
    assert ids_of(tmp_path / "f") == [[0, 1, 2, 3, 4, 5]]


def test_the_last_images_are_written_with_drop_last_too(tmp_path):
    """Which Lightning ignores in a prediction."""
    predict(tmp_path / "e", DataLoader(IMAGES, batch_size=4, drop_last=True))
    assert ids_of(tmp_path / "e") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_each_prediction_set_has_a_folder(tmp_path):
    loaders = {"day": DataLoader(IMAGES[:5], batch_size=3), "night": DataLoader(IMAGES, batch_size=3)}
    predict(tmp_path / "e", loaders)
    assert ids_of(tmp_path / "e" / "day") == [[0, 1, 2, 3], [4]]
    assert ids_of(tmp_path / "e" / "night") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.filterwarnings("ignore:ImageSet. skipped:UserWarning")
def test_images_that_are_skipped_have_no_row(tmp_path):
    paths = write_folders(tmp_path / "images", ["a", "b", "c", "d"], images=3)
    for path in paths:
        if path.endswith(("/1.jpg", "b/2.jpg")):
            (tmp_path / "images" / path).write_bytes(b"no image")
    settings = {"train_transform": SMALL, "eval_transform": SMALL, "on_error": "skip", "eval_batch_size": 1}
    data = ImageFolder(tmp_path / "images", test_fraction=0.5, **settings)
    module = new_module(3 * 16 * 16)
    predict(tmp_path / "e", data, module, shard_size=2)
    index = data.splits["test"]
    readable = [position for position, path in enumerate(index.paths) if not path.endswith(("/1.jpg", "b/2.jpg"))]
    shards = shards_of(tmp_path / "e")
    assert [id_ for shard in shards for id_ in shard.ids.tolist()] == readable
    assert [path for shard in shards for path in shard.paths] == [index.paths[position] for position in readable]
    names = [index.names[index.labels[position]] for position in readable]
    assert [label for shard in shards for label in shard.labels] == names
    unreadable = [path for shard in shards for path, _ in shard.unreadable]
    assert unreadable == [path for position, path in enumerate(index.paths) if position not in readable]
    with torch.no_grad():
        expected = module.embed(torch.stack([data.test_set[position]["images"] for position in readable]))
    np.testing.assert_allclose(np.concatenate([shard.embeddings for shard in shards]), expected, atol=1e-6)


def test_a_prediction_that_was_interrupted_keeps_complete_files(tmp_path):
    module = new_module()
    real = module.predict_step

    def interrupted(batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("stop")
        return real(batch, batch_idx)

    module.predict_step = interrupted
    with pytest.raises(RuntimeError, match=r"^stop$"):
        predict(tmp_path / "e", module=module)
    assert sorted(path.name for path in (tmp_path / "e").glob("*.parquet")) == ["part-00000.parquet"]
    before = (tmp_path / "e" / "part-00000.parquet").stat().st_mtime_ns
    predict(tmp_path / "e")
    assert len(ids_of(tmp_path / "e")) == 3
    assert (tmp_path / "e" / "part-00000.parquet").stat().st_mtime_ns == before


def test_the_manifest_names_the_checkpoint(tmp_path):
    trainer = predict(tmp_path / "e")
    trainer.save_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    callback = EmbeddingWriter(tmp_path / "f")
    settings = {"ckpt_path": str(tmp_path / "model.ckpt"), "return_predictions": False, "weights_only": True}
    pl.Trainer(callbacks=callback, **QUIET).predict(new_module(seed=1), DataLoader(LABELLED), **settings)
    manifest = EmbeddingFolder.load(tmp_path / "f").manifest
    assert manifest.model_sha256 == file_digest(tmp_path / "model.ckpt")
    assert manifest.about["checkpoint"] == str(tmp_path / "model.ckpt")


def predict_in_processes(rank, world_size, folder):
    """Predict in all processes; what each one has seen, and the error for a loader that is not in order."""
    module, seen = new_module(), []
    real = module.predict_step

    def recorded(batch, batch_idx):
        seen.extend(batch[2].tolist())
        return real(batch, batch_idx)

    module.predict_step = recorded
    settings = {"devices": world_size, "strategy": "ddp"}
    predict(folder / "e", module=module, trainer_settings=settings)
    with pytest.raises(ValueError, match=r"^EmbeddingWriter: ") as error:
        predict(folder / "f", DataLoader(LABELLED, sampler=[1, 0]), trainer_settings=settings)
    predict(folder / "e", module=module, trainer_settings=settings)  # nothing is missing
    return seen, str(error.value)


def test_each_process_writes_whole_files_that_are_missing(tmp_path, run_processes):
    predict(tmp_path / "one")
    predict(tmp_path / "e")
    (tmp_path / "e" / "part-00001.parquet").unlink()
    (tmp_path / "e" / "part-00002.parquet").unlink()
    results = run_processes(predict_in_processes, 2, tmp_path, backend=None)
    assert [seen for seen, _ in results] == [[4, 5, 6, 7], [8, 9]]
    assert results[0][1] == results[1][1]
    for number in range(3):
        name = f"part-0000{number}.parquet"
        assert (tmp_path / "e" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_embeddings_in_half_precision_take_half_of_the_space(tmp_path):
    predict(tmp_path / "e", dtype="float16")
    with torch.no_grad():
        expected = new_module().embed(IMAGES).half().numpy()
    found = read_embeddings(tmp_path / "e").embeddings
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected)


def test_a_trainer_predicts_again(tmp_path):
    writer = EmbeddingWriter(tmp_path / "e", shard_size=4)
    trainer = pl.Trainer(callbacks=writer, **QUIET)
    for written in (3, 0):
        trainer.predict(new_module(), DataLoader(LABELLED, batch_size=3), return_predictions=False)
        assert writer.written == written
