"""Invalid arguments of the index, of its conditions, of Milvus, of folders of embeddings and of exported programs."""

import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.callbacks import EmbeddingWriter
from lightning_retrieval.datamodules import ImageIndex, ImageSet
from lightning_retrieval.datamodules.pairs import PairSet
from lightning_retrieval.invalid import InvalidType, InvalidValue, MissingFile, Unreachable
from lightning_retrieval.models import Preparation
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from lightning_retrieval.search.export.program import EmbeddingProgram, export_program
from tests.datamodules.trees_more import SMALL
from tests.lightning_retrieval.search.test_embedding_writer import IMAGES, LABELLED, new_module, predict
from tests.point_set import Points
from tests.refusals import refusal_test

TWO = torch.eye(2, 4)
NAN = TWO.index_fill(0, torch.tensor([1]), torch.nan)
COLUMNS = {"brand": ["a", "b", "c", "d"], "stock": [1, 2, 3, 4]}
GLYPHS = Preparation.named("glyphs")


@functools.cache
def pickled():
    index = RetrievalIndex(4)
    index.add(torch.eye(4), torch.arange(5, 9), list("abcd"), columns=COLUMNS)
    return pickle.dumps(index)


def index():
    """Four rows with the ids 5 to 8."""
    return pickle.loads(pickled())


def add(*arguments, **settings):
    RetrievalIndex(4).add(*arguments, **settings)


def add_columns(**columns):
    RetrievalIndex(4).add(TWO, columns=columns)


def search(where):
    index().search(TWO, 1, where=where)


def product_quantiser():
    made = RetrievalIndex(4, "PQ2x4")
    made.add(torch.randn(200, 4), columns={"stock": list(range(200))})
    return made


@pytest.fixture
def store(tmp_path):
    pytest.importorskip("milvus_lite")
    made = MilvusStore.create(str(tmp_path / "a.db"), "birds", 4, columns={"brand": "text"})
    made.add(torch.eye(4), columns={"brand": COLUMNS["brand"]})
    yield made
    made.close()


@pytest.fixture
def locked(tmp_path):
    """The path of a store that another process has opened."""
    import fcntl

    pytest.importorskip("milvus_lite")
    MilvusStore.create(str(tmp_path / "a.db"), "birds", 4).close()
    with (tmp_path / "a.db" / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield str(tmp_path / "a.db")


def predict_again(data=LABELLED, **settings):
    predict("e")
    predict("e", DataLoader(data, batch_size=3), **settings)


def predict_beside(name):
    Path(name).touch()
    predict(".")


def returning(output):
    """A module whose predictions are this object."""
    module = new_module()
    module.predict_step = lambda batch, batch_idx: output
    return module


def two_sides():
    sides = PairSet(Points(0, 4), Points(1, 4))
    return DataLoader(sides, batch_size=3, collate_fn=sides.collate)


def strange_names():
    return DataLoader(ImageSet(ImageIndex(["a/caf\udce9.png"], [0], names=["a"]), ".", SMALL))


class DependsOnData(nn.Module):
    def forward(self, images):
        if images.mean() > 0:
            return images.flatten(1)
        return -images.flatten(1)


def export_what_depends_on_data():
    if not can_write_onnx(torch.__version__):
        pytest.skip("old versions of torch say in several sentences what they cannot export")
    export_program(EmbeddingProgram(DependsOnData(), GLYPHS, "float"))


TABLE = {
    "RetrievalIndex": [
        (lambda: RetrievalIndex(0), InvalidValue, "dim"),
        (lambda: RetrievalIndex(4, "Flatt"), InvalidValue, "factory"),
        (lambda: RetrievalIndex(4, "IDMap,Flat"), InvalidValue, "factory"),
        (lambda: RetrievalIndex(4, "HNSW8,PQ2"), InvalidValue, "factory", "Euclidean distances"),
        (lambda: RetrievalIndex(4, parameters="nprobe=3"), InvalidValue, "parameters"),
        (lambda: RetrievalIndex(4, "IVF4,Flat", parameters="nprobe=0"), InvalidValue, "parameters"),
        (lambda: RetrievalIndex(4, "HNSW8", parameters="efSearch=1.5"), InvalidValue, "parameters"),
        (lambda: RetrievalIndex(4, shards=0), InvalidValue, "shards"),
        (lambda: RetrievalIndex(4, about={"model": nn.Identity()}), InvalidType, "about", ""),
        (lambda: RetrievalIndex(4, "PQ2x4").set_parameters("ht=9"), InvalidValue, "parameters"),
        (lambda: RetrievalIndex(4, "IVF100,Flat").add(TWO), InvalidValue, "factory", ""),
        (lambda: add(torch.eye(2, 8)), InvalidValue, "embeddings"),
        (lambda: add(TWO.long()), InvalidType, "embeddings"),
        (lambda: add(NAN, torch.tensor([3, 7])), InvalidValue, "embeddings", "1 of 2 rows: id 7"),
        (lambda: add(NAN.numpy(), None, ["a", "b"]), InvalidValue, "embeddings", "id 1 'b'"),
        (lambda: add(TWO, torch.tensor([1, 1])), InvalidValue, "ids"),
        (lambda: add(TWO, torch.tensor([1, -1])), InvalidValue, "ids"),
        (lambda: add(TWO, torch.tensor([1])), InvalidValue, "ids"),
        (lambda: add(TWO, np.array([1.0, 2.0])), InvalidType, "ids"),
        (lambda: add(TWO, np.array(["1", "2"])), InvalidType, "ids"),
        (lambda: add(TWO, None, ["a"]), InvalidValue, "paths"),
        (lambda: add_columns(**{"a b": [1, 2]}), InvalidValue, "columns"),
        (lambda: add_columns(**{"class": [1, 2]}), InvalidValue, "columns"),
        (lambda: add_columns(a=[1]), InvalidValue, "columns"),
        (lambda: add_columns(a=[1, "x"]), InvalidType, "columns"),
        (lambda: add_columns(a=[[1], [2]]), InvalidType, "columns"),
        (lambda: add_columns(a=[1.0, float("nan")]), InvalidValue, "columns"),
        (lambda: add_columns(a=[1, 2**53 + 1]), InvalidValue, "columns"),
        (lambda: index().add(TWO, columns={"brand": ["a", "b"]}), InvalidValue, "columns"),
        (lambda: index().add(TWO, torch.tensor([1, 5]), columns=COLUMNS), InvalidValue, "ids"),
        (lambda: index().remove(torch.tensor([5, 3])), InvalidValue, "ids"),
        (lambda: index().paths(torch.tensor([4])), InvalidValue, "ids"),
        (lambda: index().embeddings(torch.tensor([4])), InvalidValue, "ids"),
        (lambda: index().search(TWO, 0), InvalidValue, "k"),
        (lambda: index().search(TWO, 1.5), InvalidType, "k"),
        (lambda: index().search(TWO, 5), InvalidValue, "k"),
        (lambda: index().search(torch.eye(2, 8), 1), InvalidValue, "queries"),
        (lambda: index().search(np.zeros(4, int), 1), InvalidType, "queries"),
        (lambda: index().search(NAN, 1), InvalidValue, "queries"),
        (lambda: search("brand = 'a'"), InvalidValue, "where"),
        (lambda: search("brand == 7"), InvalidValue, "where"),
        (lambda: search("stock == 'x'"), InvalidValue, "where"),
        (lambda: search("stock == True"), InvalidValue, "where"),
        (lambda: search("stock < 1e999"), InvalidValue, "where"),
        (lambda: search("stock in []"), InvalidValue, "where"),
        (lambda: search("0 < stock < 7"), InvalidValue, "where"),
        (lambda: search("colour == 'red'"), InvalidValue, "where"),
        (lambda: search("__import__('os').system('touch run')"), InvalidValue, "where"),
        (lambda: product_quantiser().search(torch.ones(1, 4), 1, where="stock > 0"), InvalidValue, ""),
        (lambda: index().search(TWO, 1, group_by="price"), InvalidValue, "group_by"),
        (lambda: index().search_with_metadata(TWO, index().request(2), ["price"]), InvalidValue, "columns"),
        (lambda: index().search_with_metadata(TWO, index().request(2), "brand"), InvalidType, "columns"),
        (lambda: RetrievalIndex.load("gone"), MissingFile, ""),
    ],
    "MilvusStore": [
        (lambda: MilvusStore.create("photos.index", "birds", 4), Unreachable, "uri"),
        (lambda: MilvusStore("gone.db", "birds"), MissingFile, "uri"),
        (lambda locked: MilvusStore(locked, "birds"), Unreachable, "uri"),
        (lambda: MilvusStore("http://root:secret@127.0.0.1:9", "birds"), Unreachable, "uri", "http://...@127.0.0.1:9"),
        (lambda store: MilvusStore(store.uri, "cats"), MissingFile, "name"),
        (lambda: MilvusStore.create("no/a.db", "birds", 4), Unreachable, "uri"),
        (lambda: MilvusStore.create("a.db", "birds", 4, "IVF4,Flat"), InvalidValue, "factory"),
        (lambda: MilvusStore.create("a.db", "birds", 4, columns={"brand": "object"}), InvalidValue, "columns"),
        (lambda store: store.set_parameters("ef=-1"), InvalidValue, "parameters"),
        (lambda store: store.add(TWO), InvalidValue, "columns"),
        (lambda store: store.add(TWO, torch.tensor([3, 9]), columns={"brand": ["a", "b"]}), InvalidValue, "ids"),
        (lambda store: store.add(TWO, None, ["a", "\udcff"], columns={"brand": ["a", "b"]}), InvalidValue, "paths"),
        (lambda store: store.search(TWO, 5), InvalidValue, "k"),
        (lambda store: store.search(TWO, 1, where="price > 0"), InvalidValue, "where"),
        (lambda store: store.remove(torch.tensor([0, 7])), InvalidValue, "ids"),
    ],
    "EmbeddingWriter": [
        (lambda: predict_again(module=new_module(seed=1)), InvalidValue, "output", "another model"),
        (lambda: predict_again(Subset(LABELLED, range(5))), InvalidValue, "output", "another list"),
        (lambda: predict_again(dtype="float16"), InvalidValue, "output", "dtype=float32"),
        (lambda: predict_again(trainer_settings={"precision": "bf16-mixed"}), InvalidValue, "output", "precision"),
        (lambda: predict_beside("notes.txt"), InvalidValue, "output"),
        (lambda: predict("e", module=returning(torch.zeros(3, 4))), InvalidType, "predict_step"),
        (lambda: predict("e", module=returning({"embeddings": torch.zeros(3)})), InvalidValue, "embeddings"),
        (lambda: predict("e", module=returning({"embeddings": torch.zeros(2, 4)})), InvalidValue, "embeddings"),
        (
            lambda: predict("e", module=returning({"embeddings": torch.zeros(3, 6), "labels": torch.zeros(2)})),
            InvalidValue,
            "labels",
        ),
        (
            lambda: predict(
                "e", module=returning({"embeddings": torch.full((3, 6), 1e5)}), dtype="float16", shard_size=3
            ),
            InvalidValue,
            "dtype",
        ),
        (lambda: predict("e", DataLoader(IMAGES, sampler=[4, 2, 7])), InvalidValue, ""),
        (lambda: predict("e", trainer_settings={"limit_predict_batches": 2}), InvalidValue, ""),
        (lambda: predict("e", two_sides()), InvalidValue, ""),
        (lambda: predict("e", strange_names(), new_module(768)), InvalidValue, "paths"),
        (lambda: EmbeddingWriter("e", shard_size=0), InvalidValue, "shard_size"),
        (lambda: EmbeddingWriter("e", dtype="int8"), InvalidValue, "dtype"),
    ],
    "export_program": [
        (export_what_depends_on_data, InvalidValue, ""),
        (
            lambda: export_program(EmbeddingProgram(nn.Identity(), Preparation.named("ap_gem"), "float")),
            InvalidValue,
            "",
        ),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
