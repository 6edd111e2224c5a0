"""An index in Milvus Lite gives the results of exact search, and refuses what Milvus accepts in silence."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.search import milvus_store
from lightning_retrieval.search import milvus_store as milvus_rows
from lightning_retrieval.search.rows import EmbeddingStore
from tests.lightning_retrieval.search.vectors import DIM, ROWS, built, exact, search_while_edited, vectors
from tests.processes import start_processes

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")


@pytest.fixture
def opened():
    """Collects stores that are closed after the test."""
    stores = []

    def keep(store):
        stores.append(store)
        return store

    yield keep
    for store in stores:
        store.close()


@pytest.fixture
def filled(tmp_path, opened):
    """A store with the rows of `built()`, not published."""
    store = opened(MilvusStore.create(str(tmp_path / "photos.db"), "birds", DIM, about={"checkpoint": "é.ckpt"}))
    store.add(vectors(), 1000 - torch.arange(ROWS), [f"é/{i}.jpg" for i in range(ROWS)])
    return store


def test_the_results_are_those_of_faiss_and_of_numpy(filled, monkeypatch):
    monkeypatch.setattr(milvus_store, "BATCH_QUERIES", 30)
    queries = vectors(70, seed=1)
    similarities, ids = filled.search(queries, 20)
    index = built()
    expected, expected_ids = index.search(queries, 20)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(similarities, expected, rtol=0, atol=1e-6)
    scores, positions = exact(vectors(), queries, 20)
    assert np.array_equal(ids.numpy(), 1000 - positions)
    np.testing.assert_allclose(similarities.numpy(), scores, atol=1e-6)
    assert filled.paths(ids[3]) == index.paths(ids[3])
    assert len(filled) == ROWS
    assert filled.recall is None  # exact


def test_a_search_sees_one_state_while_another_thread_edits(tmp_path, opened):
    store = opened(MilvusStore.create(str(tmp_path / "photos.db"), "birds", DIM))
    store.add(vectors(), torch.arange(ROWS), [f"{row}.jpg" for row in range(ROWS)])
    assert search_while_edited(store, 10) == []


def test_rows_are_added_and_removed_in_several_requests(filled, monkeypatch):
    monkeypatch.setattr(milvus_rows, "BATCH_ROWS", 100)
    monkeypatch.setattr(milvus_rows, "BATCH_IDS", 64)
    index = built()
    more = vectors(250, seed=2)
    for store in (filled, index):
        store.remove(1000 - torch.arange(0, ROWS, 2))
        store.add(more)  # with ids after the largest
        store.add(vectors(1, seed=3), torch.tensor([2**62]), ["far.jpg"])
        store.add(vectors(1, seed=4))
    assert len(filled) == len(index) == ROWS // 2 + 252
    ids = filled.search(more, 5)[1]
    assert torch.equal(ids, index.search(more, 5)[1])
    assert ids[:, 0].tolist() == list(range(1000, 1250))  # 999 was the largest that is left
    assert filled.paths(torch.tensor([2**62, 1000, 2**62 + 1])) == ["far.jpg", "", ""]


def test_an_index_that_is_opened_again_is_the_same(filled, tmp_path, opened):
    expected = filled.search(vectors(5), 3)
    filled.publish()
    filled.close()
    store = opened(MilvusStore(str(tmp_path / "photos.db"), "birds"))
    assert torch.equal(store.search(vectors(5), 3)[1], expected[1])
    assert (store.dim, store.factory, store.parameters, store.about) == (DIM, "Flat", "", {"checkpoint": "é.ckpt"})
    assert repr(store) == (
        f"MilvusStore(uri={str(tmp_path / 'photos.db')!r}, name='birds', dim={DIM}, factory='Flat', parameters='')"
    )


def test_an_approximate_index_measures_its_recall(tmp_path, opened):
    uri = str(tmp_path / "photos.db")
    store = opened(MilvusStore.create(uri, "birds", DIM, "IVF_FLAT,nlist=32", parameters="nprobe=2"))
    rows = vectors(2000)
    store.add(rows)
    assert 0.1 < store.recall < 0.9
    found = store.search(rows[:300], 11)[1]
    _, positions = exact(rows, rows[:300], 11)
    hits = [len(set(row.tolist()) & set(true)) for row, true in zip(found, positions)]
    assert store.recall == pytest.approx((sum(hits) - 300) / 3000, abs=0.05)  # another sample of the rows
    store.set_parameters("nprobe=32")
    assert store.parameters == "nprobe=2,nprobe=32"
    assert np.array_equal(store.search(rows[:300], 11)[1].numpy(), positions)
    store.publish()
    recall = store.recall
    store.close()
    store = opened(MilvusStore(uri, "birds"))
    assert (store.recall, store.parameters) == (recall, "nprobe=2")


def test_an_index_is_replaced_when_the_new_one_is_published(filled, tmp_path, opened):
    uri = str(tmp_path / "photos.db")
    filled.publish()
    left = opened(MilvusStore.create(uri, "birds", DIM))  # by a process that is killed
    new = opened(MilvusStore.create(uri, "birds", 8))
    new.add(vectors(10, 8))
    assert len(opened(MilvusStore(uri, "birds"))) == ROWS
    new.publish()
    assert (len(opened(MilvusStore(uri, "birds"))), new.dim) == (10, 8)
    client = pymilvus.MilvusClient(uri)
    assert client.list_collections() == [new.collection]
    client.close()
    for gone in (filled, left):
        with pytest.raises(OSError, match=r"photos.db reports an error in search \(.*\); another process has replaced"):
            gone.search(vectors(1), 1)
    new.drop()
    with pytest.raises(FileNotFoundError, match=r"`name` must be that of an index in .*, got 'birds', which it does"):
        MilvusStore(uri, "birds")


def test_both_kinds_of_index_are_stores(filled):
    assert isinstance(filled, EmbeddingStore)
    assert isinstance(RetrievalIndex(4), EmbeddingStore)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embeddings": vectors(2).index_fill(0, torch.tensor([1]), torch.nan)}, r"NaN or inf in 1 of 2 rows: id 1002"),
        ({"embeddings": vectors(2) * torch.tensor([[1.0], [0.0]])}, r"`embeddings` must not be zero, got .* row 1\."),
        ({"embeddings": vectors(2, 3)}, rf"`embeddings` must have shape \(rows, {DIM}\), .* got \(2, 3\)"),
        ({"ids": torch.tensor([5, -1])}, r"`ids` must be >= 0, got -1"),
        ({"ids": torch.tensor([5, 5])}, r"`ids` must differ, got 5 for several rows"),
        ({"ids": torch.tensor([5, 900])}, r"`ids` must be new, got 1 that are in the index, such as 900; remove"),
        ({"paths": ["a.jpg"]}, r"`paths` must have one entry for each of 2 rows, got 1"),
        ({"paths": ["a.jpg", "a" * 65_536]}, r"`paths` must have at most 65535 bytes each, got one of 65536"),
        ({"paths": ["a.jpg", "\udcff.jpg"]}, r"`paths` must be valid Unicode, got '.udcff.jpg'; rename the file"),
    ],
)
def test_what_milvus_would_accept_or_fail_at_is_refused(filled, settings, message):
    with pytest.raises(ValueError, match=rf"^MilvusStore: .*{message}"):
        filled.add(**{"embeddings": vectors(2), **settings})
    assert len(filled) == ROWS
    assert torch.equal(filled.search(vectors(5), 1)[1][:, 0], 1000 - torch.arange(5))


@pytest.mark.refusal
def test_wrong_searches_and_ids_are_refused(filled):
    for k, message in (
        (0, "an integer >= 1, got 0"),
        (16_385, "an integer from 1 to 16384, got 16385"),
        (ROWS + 1, "at most the number"),
    ):
        with pytest.raises(ValueError, match=rf"^MilvusStore: `k` must be {message}"):
            filled.search(vectors(2), k)
    for queries, message in ((vectors(2) * torch.inf, "must be finite"), (vectors(2) * 0, "must not be zero")):
        with pytest.raises(ValueError, match=rf"^MilvusStore: `queries` {message}"):
            filled.search(queries, 1)
    for method in (filled.remove, filled.paths):
        with pytest.raises(ValueError, match=r"^MilvusStore: `ids` must be in the index, got 7, which is not\.$"):
            method(torch.tensor([1000, 7]))
    with pytest.raises(ValueError, match=r"`parameters` must be assignments of positive numbers, .* got 'ef=-1'"):
        filled.set_parameters("ef=-1")
    assert len(filled) == ROWS


@pytest.mark.refusal  # by the type checker: the annotation says int
def test_integers_of_numpy_are_integers(tmp_path, opened):
    store = opened(MilvusStore.create(str(tmp_path / "photos.db"), "birds", np.int64(DIM)))
    store.add(vectors(3))
    assert store.search(vectors(1), np.int64(2))[1].shape == (1, 2)
    assert type(store.dim) is int


def test_no_queries_and_no_rows(filled):
    similarities, ids = filled.search(vectors(0), 2)
    assert similarities.shape == ids.shape == (0, 2)
    filled.add(vectors(0))
    assert len(filled) == ROWS


def test_a_failure_between_two_requests_says_how_many_rows_were_added(filled, monkeypatch):
    monkeypatch.setattr(milvus_rows, "BATCH_ROWS", 10)
    call, calls = filled._call, []

    def insert_twice(method, **settings):
        calls.append(method)
        if calls.count("insert") == 3:
            raise OSError("MilvusStore: the server is gone.")
        return call(method, **settings)

    monkeypatch.setattr(filled, "_call", insert_twice)
    with pytest.raises(OSError, match=r"the server is gone\. 20 of 50 rows were added before\.$"):
        filled.add(vectors(50, seed=5))
    monkeypatch.undo()
    assert len(filled) == ROWS + 20


def test_a_copy_of_the_file_holds_the_index(filled, tmp_path, opened):
    filled.publish()
    filled.close()
    shutil.copytree(tmp_path / "photos.db", tmp_path / "copy.db")
    assert len(opened(MilvusStore(str(tmp_path / "copy.db"), "birds"))) == ROWS


def list_of_files(uri):
    """Milvus Lite's list of the files of the only collection, and its backup."""
    (file,) = Path(uri).rglob("manifest.json")
    return file, file.with_name("manifest.json.prev")


def add_and_die(rank, world_size, uri):
    store = MilvusStore(uri, "birds")
    real = store._call

    def call_and_die(method, **settings):
        result = real(method, **settings)
        if method == "insert":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    store._call = call_and_die
    store.add(vectors(3, seed=1))


@pytest.mark.refusal
def test_a_list_of_files_without_the_rows_is_damage(filled, tmp_path, opened):
    uri = str(tmp_path / "photos.db")
    filled.publish()
    filled.close()
    for file in list_of_files(uri):
        content = json.loads(file.read_text())
        for partition in content["partitions"].values():
            partition["data_files"] = []
        file.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=rf"^MilvusStore: 'birds' in .*photos\.db is damaged, .* {ROWS} rows, but holds 0; build the"
    ):
        MilvusStore(uri, "birds")
    new = opened(MilvusStore.create(uri, "birds", DIM))  # in its place
    new.publish()
    assert len(opened(MilvusStore(uri, "birds"))) == 0


def test_the_number_of_rows_is_recorded_with_each_change(filled, tmp_path, opened):
    """An index without a recorded number, such as one that a killed process was changing, opens as well."""
    uri = str(tmp_path / "photos.db")
    filled.publish()
    filled.add(vectors(10, seed=1))
    filled.remove(torch.tensor([1000, 999]))
    filled.close()
    assert len(opened(MilvusStore(uri, "birds"))) == ROWS + 8
    opened(MilvusStore(uri, "birds"))._call("alter_collection_properties", properties={"lightning_retrieval_rows": ""})
    assert len(opened(MilvusStore(uri, "birds"))) == ROWS + 8


@pytest.mark.distributed
def test_an_index_that_a_killed_process_was_changing_opens(filled, tmp_path, opened):
    uri = str(tmp_path / "photos.db")
    filled.publish()
    filled.close()
    (tmp_path / "processes").mkdir()
    (started,) = start_processes(add_and_die, 1, uri, folder=tmp_path / "processes")
    assert started.wait(120) == -signal.SIGKILL, started.output()
    assert len(opened(MilvusStore(uri, "birds"))) in (ROWS, ROWS + 3)
