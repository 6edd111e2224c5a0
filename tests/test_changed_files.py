"""Whatever value a file has in the place of another one, an error about it is one sentence of the library.

Each test takes a file that the library wrote, and changes one place of it after the other: the entry is missing, has
another name, or has a value of another kind. The library may accept the changed file. If it raises, then by a statement
of its own that says what is wrong; an error of an inner layer, such as a KeyError, says nothing to the user.
"""

import copy
import json
import random
import traceback
from pathlib import Path

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_retrieval
from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest
from lightning_retrieval.search.store.rows import FolderRows
from lightning_retrieval.search.store.storage import FORMAT
from tests.lightning_retrieval.search.store.vectors import built, vectors
from tests.quiet_trainer import quiet_trainer
from tests.test_kills import write_shards

pytestmark = [pytest.mark.hostile, pytest.mark.refusal, pytest.mark.slow]

PACKAGE = Path(lightning_retrieval.__file__).parents[1]
OF_TORCH = "loaded state dict "  # torch's sentences about an optimizer that has other groups of parameters
MISSING, RENAMED = "missing", "renamed"
VALUES = [MISSING, RENAMED, None, "", "x", -1, 10**9, 1.5, float("nan"), True, [], {}, [1], ["x"], {"x": 1}, [[]]]


def places(content, place=()):
    """The keys and positions that lead to each value in nested dicts and lists."""
    items = []
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, (list, tuple)):
        items = list(enumerate(content))[:3]
    for key, value in items:
        yield (*place, key)
        yield from places(value, (*place, key))


def changed(content, place, value):
    """A copy with another value at a place."""
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        if isinstance(inner[key], tuple):
            inner[key] = list(inner[key])
        inner = inner[key]
    if value in (MISSING, RENAMED):
        old = inner.pop(place[-1])
    if value == RENAMED and isinstance(inner, dict):
        inner["renamed"] = old
    elif value not in (MISSING, RENAMED):
        inner[place[-1]] = value
    return content


def is_of_library(error):
    """Whether a statement of the library has raised an error, with a type that a user expects."""
    if str(error).startswith(OF_TORCH):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    raises = "raise" in last.line or "Error(" in last.line
    is_expected = isinstance(error, (ValueError, TypeError, OSError))
    return is_expected and raises and bool(str(error)) and PACKAGE in Path(last.filename).parents


def check(content, use, changes):
    """Use changed contents, drawn with a seed; the errors that are not of the library."""
    others, accepted = [], 0
    possible = [(place, value) for place in places(content) for value in VALUES]
    for place, value in random.Random(0).sample(possible, min(changes, len(possible))):
        error = error_of(use, changed(content, place, value))
        accepted += error is None
        if not (error is None or is_of_library(error)):
            others.append((place, value, repr(error)[:200]))
    assert not others
    assert accepted < changes  # some are refused


def error_of(function, *args, **settings):
    """The error that a call raises; None if it raises none."""
    try:
        function(*args, **settings)
    except Exception as error:
        return error
    return None


def fitted(folder, steps, checkpoint=None):
    saving = ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)
    batches = DataLoader([(torch.rand(8, 1, 32, 32), torch.arange(8) // 2) for _ in range(2)], batch_size=None)
    module = RetrievalModule(Embedder("glyph_net", 4, image_size=32), SmoothAPLoss())
    run = quiet_trainer(callbacks=[saving], enable_checkpointing=True, max_steps=steps)
    run.fit(module, batches, ckpt_path=checkpoint, weights_only=True)


def states_of(content):
    """The parts of a checkpoint that say how a run goes on, and few of its many weights."""
    optimizer = content["optimizer_states"][0]
    few = {name: optimizer["state"][name] for name in list(optimizer["state"])[:1]}
    weights = dict(list(content["state_dict"].items())[:1])
    parts = {name: content[name] for name in ("loops", "callbacks", "lr_schedulers", "hyper_parameters", "epoch")}
    return {**parts, "state_dict": weights, "optimizer_states": [{**optimizer, "state": few}]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["resumed", "loaded"])
def test_a_checkpoint(way, tmp_path):
    fitted(tmp_path, 2)
    whole = torch.load(tmp_path / "last.ckpt", weights_only=True)

    def use(part):
        content = {**{name: whole[name] for name in ("pytorch-lightning_version", "global_step")}, **part}
        if isinstance(part.get("state_dict"), dict):
            content["state_dict"] = {**whole["state_dict"], **part["state_dict"]}
        torch.save(content, tmp_path / "changed.ckpt")
        if way == "loaded":
            RetrievalModule.load_from_checkpoint(tmp_path / "changed.ckpt")
        else:
            fitted(tmp_path / "run", 3, tmp_path / "changed.ckpt")

    check(states_of(whole), use, 100)


def test_the_data_beside_embeddings(tmp_path):
    write_shards(tmp_path / "e", "npy", 1.0)
    file = tmp_path / "e" / "part-00000.json"

    def use(content):
        file.write_text(json.dumps(content))
        FolderRows(EmbeddingFolder.load(tmp_path / "e"))

    check(json.loads(file.read_text()), use, 400)


def test_the_manifest_of_embeddings(tmp_path):
    write_shards(tmp_path / "e", "npy", 1.0)
    values = EmbeddingFolder.load(tmp_path / "e").manifest
    assert isinstance(values, EmbeddingManifest)

    def use(content):
        (tmp_path / "e" / "_manifest.json").write_bytes(embedding_format().encode(content))
        FolderRows(EmbeddingFolder.load(tmp_path / "e"))

    check(vars(values), use, 400)


def embedding_format():
    from lightning_retrieval.search import embedding_folder

    return embedding_folder.FORMAT


def test_the_manifest_of_an_index(tmp_path):
    built(rows=50).save(tmp_path / "index")
    file = tmp_path / "index" / "manifest.json"
    values = {name: value for name, value in json.loads(file.read_text()).items() if name in ("files", "settings")}

    def use(content):
        file.write_bytes(FORMAT.encode(content))
        index = RetrievalIndex.load(tmp_path / "index")
        index.search_with_metadata(vectors(2), index.request(1))

    check(values, use, 400)


@pytest.mark.parametrize("name", ["ids.npy", "paths.npy", "path-ends.npy", "vectors-0.faiss"])
def test_the_bytes_of_an_index(name, tmp_path):
    """Files without checksums: the manifest of a folder that somebody else made has those of his files."""
    built(rows=50).save(tmp_path / "index")
    (file,) = (tmp_path / "index").glob(f"*/{name}")
    before, draws = file.read_bytes(), random.Random(0)
    others = []
    for _ in range(100):
        content = bytearray(before)
        for _ in range(draws.choice([1, 2, 8])):
            content[draws.randrange(min(len(content), 200))] = draws.randrange(256)
        file.write_bytes(content)
        error = error_of(RetrievalIndex.load, tmp_path / "index", verify=False)
        if not (error is None or is_of_library(error)):
            others.append(repr(error)[:200])
    assert not others
