"""A damaged checkpoint is refused by name wherever it is loaded, and an intact one is loaded."""

import functools
import http.server
import io
import pickle
import random
import threading
import zipfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.checkpoints import check_checkpoint
from tests.lightning_retrieval.training.small_training import fit, trainer


def new_module():
    torch.manual_seed(0)
    return RetrievalModule(nn.Linear(6, 32), SmoothAPLoss())


def loader():
    batch = (torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) // 2)
    return DataLoader([batch], batch_size=None)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "intact.ckpt"
    fit(new_module(), loader()).save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def damaged(intact):
    """One bit of a weight is flipped. torch.load reads the file without a word."""
    path = intact.with_name("damaged.ckpt")
    content = bytearray(intact.read_bytes())
    with zipfile.ZipFile(intact) as archive:
        weights = max(archive.infolist(), key=lambda record: record.file_size * ("/data/" in record.filename))
        position = content.index(archive.read(weights))
    content[position + 100] ^= 4
    path.write_bytes(content)
    loaded, expected = (torch.load(file, weights_only=True)["state_dict"] for file in (path, intact))
    assert not all(torch.equal(loaded[name], expected[name]) for name in expected)
    return path


def load(path):
    module = RetrievalModule.load_from_checkpoint(path, embedder=nn.Linear(6, 32), weights_only=True)
    assert isinstance(module, RetrievalModule)


LOADERS = {
    "fit": lambda path: trainer(max_epochs=2).fit(new_module(), loader(), ckpt_path=path, weights_only=True),
    "predict": lambda path: trainer().predict(new_module(), loader(), ckpt_path=str(path)),
    "load_from_checkpoint": load,
    "load_from_checkpoint of a stream": lambda path: load(io.BytesIO(path.read_bytes())),
}


@pytest.mark.parametrize("name", LOADERS)
def test_damaged_checkpoints_are_named(name, damaged, intact):
    LOADERS[name](intact)
    with pytest.raises(ValueError, match="is damaged"):
        LOADERS[name](damaged)


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected))
    return found == expected


def test_a_flipped_bit_anywhere_is_found_or_harmless(intact):
    """Of 200 flips, none that passes changes what is loaded: the others are in padding, dates and the like."""
    content, choose, found = intact.read_bytes(), random.Random(0), 0
    expected = torch.load(intact, weights_only=True)
    for _ in range(200):
        flipped = bytearray(content)
        flipped[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        stream = io.BytesIO(flipped)
        try:
            check_checkpoint(stream)
        except ValueError:
            found += 1
            continue
        assert stream.tell() == 0
        try:
            loaded = torch.load(stream, weights_only=True)
        except Exception:  # torch finds what concerns the archive itself
            continue
        assert same(loaded, expected)
    assert found > 60


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_files_that_were_cut_short_are_damaged(kept, intact, tmp_path):
    path = tmp_path / "cut.ckpt"
    path.write_bytes(intact.read_bytes()[:kept])
    with pytest.raises(ValueError, match="is damaged"):
        load(path)


def test_a_run_from_a_missing_checkpoint_does_not_begin(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        LOADERS["fit"](tmp_path / "missing.ckpt")


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.refusal
def test_a_trainer_unpickles_no_code_of_an_address(tmp_path, monkeypatch):
    """Of a file on another machine, Lightning would unpickle anything: `Trainer.fit(..., ckpt_path="https://...")`."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    torch.save({"state_dict": Writes(tmp_path / "marker")}, tmp_path / "model.ckpt")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/model.ckpt"
            for weights_only in (None, True):
                with pytest.raises(pickle.UnpicklingError):
                    trainer().fit(new_module(), loader(), ckpt_path=address, weights_only=weights_only)
        finally:
            server.shutdown()
            thread.join()
    assert not (tmp_path / "marker").exists()
