"""An index in Milvus gives the results of exact search, and an old index stays until a new one is published."""

import inspect
import json
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.timing import free_port
from lightning_retrieval import MilvusStore, RetrievalIndex
from tests.lightning_retrieval.search.store.vectors import DIM, ROWS, built, exact, search_while_edited, vectors
from tests.processes import StartedCommand, start_processes

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")


@pytest.fixture
def opened():
    """Keeps stores that are closed after the test."""
    with ExitStack() as stack:
        yield lambda store: stack.enter_context(closing(store))


@pytest.fixture
def uri(tmp_path):
    return str(tmp_path / "photos.db")


@pytest.fixture
def filled(uri, opened):
    """A store with the rows of `built()`, not published."""
    store = opened(MilvusStore.create(uri, "birds", DIM, about={"checkpoint": "é.ckpt"}))
    store.add(vectors(), 1000 - torch.arange(ROWS), [f"é/{i}.jpg" for i in range(ROWS)])
    return store


def test_the_results_are_those_of_faiss_and_of_numpy(filled):
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
    filled.remove(np.array([1000, 999], ">i8"))
    filled.add(vectors().numpy()[:2].astype(">f4"), np.array([1000, 999]))
    assert torch.equal(filled.search(queries, 20)[1], expected_ids)
    _, ids_of_one = filled.search(queries[3].numpy(), 20)
    assert torch.equal(ids_of_one, ids[3:4])
    similarities, ids = filled.search(vectors(0), 2)
    assert similarities.shape == ids.shape == (0, 2)
    filled.add(vectors(0))
    assert len(filled) == ROWS


def test_its_methods_take_what_those_of_retrieval_index_take():
    for name in ("add", "search", "request", "search_with_metadata", "remove", "paths", "columns", "set_parameters"):
        of_store = str(inspect.signature(getattr(MilvusStore, name)))  # jaxtyping makes a class for each annotation
        assert of_store == str(inspect.signature(getattr(RetrievalIndex, name)))


def test_a_search_sees_one_state_while_another_thread_edits(uri, opened):
    store = opened(MilvusStore.create(uri, "birds", DIM, columns={"row": "number"}))
    store.add(vectors(), torch.arange(ROWS), [f"{row}.jpg" for row in range(ROWS)], columns={"row": range(ROWS)})
    assert search_while_edited(store, 10) == []


def test_more_rows_ids_queries_and_rows_of_a_group_than_one_request_may_hold(uri, opened):
    rows, groups = vectors(17_000, 4), [0] * 16_500 + list(range(1, 501))
    index, store = RetrievalIndex(4), opened(MilvusStore.create(uri, "birds", 4, columns={"group": "number"}))
    for each in (index, store):
        each.add(rows, paths=[f"{row}.jpg" for row in range(17_000)], columns={"group": groups})
    nearest, queries = rows[:1], vectors(300, 4, seed=1)
    assert store.search(queries, 3)[1].tolist() == index.search(queries, 3)[1].tolist()
    found = store.search(nearest, 100, group_by="group")[1]
    assert found.tolist() == index.search(nearest, 100, group_by="group")[1].tolist()
    for each in (index, store):
        each.remove(torch.arange(0, 17_000, 2))
        each.add(rows[:1], columns={"group": [0]})  # with the id after the largest
        each.add(rows[2:3], torch.tensor([2**62]), ["far.jpg"], columns={"group": [0]})
    assert len(store) == len(index) == 8502
    assert torch.equal(store.ids, index.ids)
    assert torch.equal(store.search(rows[:3], 1)[1], torch.tensor([[17_000], [1], [2**62]]))
    assert store.paths(torch.tensor([2**62, 17_000, 1])) == ["far.jpg", "", "1.jpg"]


def test_an_index_that_is_opened_again_is_the_same_and_so_is_a_copy_of_the_file(filled, uri, tmp_path, opened):
    expected = filled.search(vectors(5), 3)
    filled.publish()
    filled.add(vectors(10, seed=1))
    filled.remove(torch.arange(1001, 1011))
    filled.close()
    shutil.copytree(uri, tmp_path / "copy.db")
    assert len(opened(MilvusStore(str(tmp_path / "copy.db"), "birds"))) == ROWS
    store = opened(MilvusStore(uri, "birds"))
    assert torch.equal(store.search(vectors(5), 3)[1], expected[1])
    assert (store.dim, store.factory, store.parameters, store.about) == (DIM, "Flat", "", {"checkpoint": "é.ckpt"})


def test_an_approximate_index_measures_its_recall(uri, opened):
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


def test_an_unknown_type_of_index_is_an_error_at_last_when_rows_are_added(uri, opened):
    store = opened(MilvusStore.create(uri, "birds", DIM, "HNSWW"))
    with pytest.raises(OSError, match="HNSWW"):
        store.add(vectors())


def test_an_index_is_replaced_when_the_new_one_is_published(filled, uri, opened):
    filled.publish()
    left = opened(MilvusStore.create(uri, "birds", DIM))  # by a process that is killed
    new = opened(MilvusStore.create(uri, "birds", 8))
    new.add(vectors(10, 8))
    assert len(opened(MilvusStore(uri, "birds"))) == ROWS
    new.publish()
    assert (len(opened(MilvusStore(uri, "birds"))), new.dim) == (10, 8)
    with closing(pymilvus.MilvusClient(uri)) as client:
        assert client.list_collections() == [new.collection]
    for gone in (filled, left):
        with pytest.raises(OSError, match="MilvusStore"):
            gone.search(vectors(1), 1)
    new.drop()
    with pytest.raises(FileNotFoundError, match="'birds'"):
        MilvusStore(uri, "birds")


def test_a_list_of_files_without_the_rows_is_damage(filled, uri, opened):
    filled.publish()
    filled.close()
    (manifest,) = Path(uri).rglob("manifest.json")  # Milvus Lite's list of the files of the only collection
    for file in (manifest, manifest.with_name("manifest.json.prev")):
        content = json.loads(file.read_text())
        for partition in content["partitions"].values():
            partition["data_files"] = []
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^MilvusStore: .* is damaged"):
        MilvusStore(uri, "birds")
    new = opened(MilvusStore.create(uri, "birds", DIM))  # in its place
    new.publish()
    assert len(opened(MilvusStore(uri, "birds"))) == 0


def test_a_collection_of_something_else_is_neither_read_nor_replaced(uri, opened):
    new = opened(MilvusStore.create(uri, "cats", 4))
    with closing(pymilvus.MilvusClient(uri)) as client:
        client.create_collection("cats", dimension=4)  # meanwhile
        client.create_alias("cats", "kittens")
        before = client.list_collections()
        with pytest.raises(ValueError, match="'cats'"):
            new.publish()
        with pytest.raises(ValueError, match="'cats'"):
            MilvusStore(uri, "cats")
        for name in ("cats", "kittens"):
            with pytest.raises(ValueError, match=f"'{name}'"):
                MilvusStore.create(uri, name, 4)
        assert client.list_collections() == before


@pytest.fixture
def server(tmp_path):
    """The address of Milvus Lite in another process, and the process."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    program = (
        "from milvus_lite.cmdline import main\n"
        f"main(['server', '--data-dir', 'photos.db', '--host', '127.0.0.1', '--port', '{port}'])"
    )
    started = StartedCommand([sys.executable, "-c", program], tmp_path)
    deadline = time.monotonic() + 60
    while True:
        try:
            MilvusStore(address, "birds")
        except FileNotFoundError:  # it answers, and has no index yet
            break
        except ConnectionError:
            assert time.monotonic() < deadline, started.output()
            time.sleep(0.2)
    yield address, started
    started.end()


def test_a_server_gives_the_same_results_and_its_file_too_when_it_was_killed(server, uri, opened):
    address, started = server
    store = MilvusStore.create(address, "birds", DIM)
    store.add(vectors(), 1000 - torch.arange(ROWS))
    store.publish()
    queries = vectors(50, seed=1)
    expected = built().search(queries, 10)[1]
    assert torch.equal(store.search(queries, 10)[1], expected)
    store.close()
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait()
    assert torch.equal(opened(MilvusStore(uri, "birds")).search(queries, 10)[1], expected)


def write_until_killed(rank, world_size, uri):
    first = MilvusStore.create(uri, "birds", 4)
    first.add(torch.eye(4))
    first.publish()
    second = MilvusStore.create(uri, "birds", 4)
    second.add(torch.eye(4).repeat(5, 1))
    print("adding", flush=True)
    while True:
        first.add(torch.eye(4)[:3])


@pytest.mark.distributed
def test_a_process_that_is_killed_leaves_the_published_index(uri, tmp_path, opened):
    """Also if it was changing that index."""
    (tmp_path / "processes").mkdir()
    (started,) = start_processes(write_until_killed, 1, uri, folder=tmp_path / "processes")
    try:
        while "adding" not in started.output():
            assert started.wait(0.05) is None, started.output()
    finally:
        started.end()
    left = opened(MilvusStore(uri, "birds"))
    assert (len(left) - 4) % 3 == 0
    with closing(pymilvus.MilvusClient(uri)) as client:
        assert len(client.list_collections()) == 2
        left.publish()
        assert client.list_collections() == [left.collection]


def test_an_index_whose_file_is_being_written_opens_when_it_is_complete(uri, opened):
    with closing(MilvusStore.create(uri, "birds", DIM, "IVF_FLAT,nlist=32")) as store:
        store.add(vectors(2000))
        store.publish()
    (file,) = Path(uri).rglob("*.idx")
    content = file.read_bytes()
    file.write_bytes(content[:1000])
    completed = threading.Timer(0.1, file.write_bytes, [content])
    completed.start()
    assert len(opened(MilvusStore(uri, "birds"))) == 2000
    completed.join()
