"""The same client with a server in another process, and processes that are killed."""

import os
import signal
import socket
import sys
import time

import pytest
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.search import milvus_connection, milvus_store
from tests.lightning_retrieval.search.vectors import DIM, ROWS, built, vectors
from tests.processes import StartedCommand

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")

KILLED_WHILE_WRITING = """
import os, signal, torch
from lightning_retrieval import MilvusStore
first = MilvusStore.create("photos.db", "birds", 4)
first.add(torch.eye(4))
first.publish()
first.add(torch.eye(4))
second = MilvusStore.create("photos.db", "birds", 4)
second.add(torch.eye(4).repeat(5, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def server(tmp_path):
    """The address of Milvus Lite in another process, and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    program = (
        "from milvus_lite.cmdline import main\n"
        f"main(['server', '--data-dir', 'photos.db', '--host', '127.0.0.1', '--port', '{port}'])"
    )
    started = StartedCommand([sys.executable, "-c", program], tmp_path)
    deadline = time.monotonic() + 60
    while True:
        try:
            milvus_connection.MilvusConnection(address, may_create=False).close()
            break
        except ConnectionError:
            assert time.monotonic() < deadline, started.output()
            time.sleep(0.2)
    yield address, started
    started.end()


def test_a_server_gives_the_same_results_until_it_is_killed(server, tmp_path, monkeypatch):
    address, started = server
    store = MilvusStore.create(address, "birds", DIM)
    store.add(vectors(), 1000 - torch.arange(ROWS))
    store.publish()
    queries = vectors(50, seed=1)
    assert torch.equal(store.search(queries, 10)[1], built().search(queries, 10)[1])

    monkeypatch.setattr(milvus_connection, "CALLING", 1.0)
    monkeypatch.setattr(milvus_store, "BATCH_ROWS", 10)
    call = store._call

    def killed_at_the_third_insertion(method, **settings):
        if method == "insert" and settings["data"][0]["id"] == 2020:
            os.kill(started.process.pid, signal.SIGKILL)
            started.process.wait()
        return call(method, **settings)

    monkeypatch.setattr(store, "_call", killed_at_the_third_insertion)
    with pytest.raises(
        OSError, match=rf"^MilvusStore: {address} reports an error in insert .* 20 of 50 rows were added"
    ):
        store.add(vectors(50, seed=2), torch.arange(2000, 2050))
    with pytest.raises(OSError, match=rf"^MilvusStore: {address} reports an error in search "):
        store.search(queries, 10)
    store.close()

    left = MilvusStore(str(tmp_path / "photos.db"), "birds")  # the same index, embedded
    index = RetrievalIndex(DIM)
    index.add(vectors(), 1000 - torch.arange(ROWS))
    index.add(vectors(50, seed=2)[:20], torch.arange(2000, 2020))
    assert len(left) == ROWS + 20
    assert torch.equal(left.search(queries, 10)[1], index.search(queries, 10)[1])
    left.close()


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_published_index(tmp_path):
    started = StartedCommand([sys.executable, "-c", KILLED_WHILE_WRITING], tmp_path)
    assert started.process.wait(timeout=120) == -signal.SIGKILL, started.output()
    left = MilvusStore(str(tmp_path / "photos.db"), "birds")
    assert len(left) == 8
    assert len(left._connection.call("list_collections")) == 2
    left.publish()
    assert left._connection.call("list_collections") == [left.collection]
    left.close()
