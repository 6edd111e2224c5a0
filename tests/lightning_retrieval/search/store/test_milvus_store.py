"""An index in Milvus gives the results of exact search, and does not accept what Milvus accepts in silence."""

import inspect
import json
import os
import re
import shutil
import signal
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.timing import free_port
from lightning_retrieval import MilvusStore, RetrievalIndex, progress
from lightning_retrieval.search.store import milvus_connection, milvus_store
from lightning_retrieval.search.store.milvus_connection import (
    PROPERTY,
    MilvusConnection,
    check_name,
    index_kind,
    search_parameters,
    shown_uri,
)
from lightning_retrieval.search.store.milvus_store import insertions
from tests.lightning_retrieval.search.store.vectors import (
    DIM,
    ROWS,
    built,
    error_of_milvus,
    exact,
    search_while_edited,
    vectors,
)
from tests.processes import StartedCommand, start_processes

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")


@pytest.fixture
def opened():
    """Keeps stores that are closed after the test."""
    with ExitStack() as stack:
        yield lambda store: stack.enter_context(closing(store))


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
    filled.remove(np.array([1000, 999], ">i8"))
    filled.add(vectors().numpy()[:2].astype(">f4"), np.array([1000, 999]))
    assert torch.equal(filled.search(queries, 20)[1], expected_ids)
    _, ids_of_one = filled.search(queries[3].numpy(), 20)
    assert torch.equal(ids_of_one, ids[3:4])
    similarities, ids = filled.search(vectors(0), 2)
    assert similarities.shape == ids.shape == (0, 2)
    filled.add(vectors(0))
    assert len(filled) == ROWS


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "search",
        "request",
        "search_with_metadata",
        "remove",
        "paths",
        "columns",
        "set_parameters",
    ],
)
def test_its_methods_take_what_those_of_retrieval_index_take(name):
    of_store = str(inspect.signature(getattr(MilvusStore, name)))  # jaxtyping makes a class for each annotation
    assert of_store == str(inspect.signature(getattr(RetrievalIndex, name)))


def test_a_search_sees_one_state_while_another_thread_edits(tmp_path, opened):
    store = opened(MilvusStore.create(str(tmp_path / "photos.db"), "birds", DIM, columns={"row": "number"}))
    store.add(vectors(), torch.arange(ROWS), [f"{row}.jpg" for row in range(ROWS)], columns={"row": range(ROWS)})
    assert search_while_edited(store, 10) == []


def test_rows_are_added_and_removed_in_several_requests(filled, monkeypatch, capsys):
    monkeypatch.setattr(milvus_store, "BATCH_ROWS", 100)
    monkeypatch.setattr(milvus_store, "BATCH_IDS", 64)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_LINES", 0)
    index = built()
    more = vectors(250, seed=2)
    for store in (index, filled):
        store.remove(1000 - torch.arange(0, ROWS, 2))
        capsys.readouterr()
        store.add(more)  # with ids after the largest
        printed = capsys.readouterr().err.splitlines()
        store.add(vectors(1, seed=3), torch.tensor([2**62]), ["far.jpg"])
        store.add(vectors(1, seed=4))
    assert [line.split(" (")[0] for line in printed] == [f"Indexing: {rows} of 250 rows" for rows in (100, 200, 250)]
    assert len(filled) == len(index) == ROWS // 2 + 252
    ids = filled.search(more, 5)[1]
    assert torch.equal(ids, index.search(more, 5)[1])
    assert ids[:, 0].tolist() == list(range(1000, 1250))  # 999 was the largest that is left
    assert filled.paths(torch.tensor([2**62, 1000, 2**62 + 1])) == ["far.jpg", "", ""]


def test_an_index_that_is_opened_again_is_the_same_and_so_is_a_copy_of_the_file(filled, tmp_path, opened):
    expected = filled.search(vectors(5), 3)
    filled.publish()
    filled.close()
    shutil.copytree(tmp_path / "photos.db", tmp_path / "copy.db")
    assert len(opened(MilvusStore(str(tmp_path / "copy.db"), "birds"))) == ROWS
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


@pytest.mark.refusal
def test_what_milvus_would_accept_or_fail_at_is_invalid(filled, tmp_path):
    invalid = [
        ({"embeddings": vectors(2).index_fill(0, torch.tensor([1]), torch.nan)}, r"NaN or inf in 1 of 2 rows: id 1002"),
        ({"embeddings": vectors(2) * torch.tensor([[1.0], [0.0]])}, r"`embeddings` must not be zero, got .* row 1\."),
        ({"ids": torch.tensor([5, 900])}, r"`ids` must be new, got 1 that are in the index, such as 900; remove"),
        ({"paths": ["a.jpg", "a" * 65_536]}, r"`paths` must have at most 65535 bytes each, got one of 65536"),
        ({"paths": ["a.jpg", "\udcff.jpg"]}, r"`paths` must be valid Unicode, got '.udcff.jpg'; rename the file"),
    ]
    for settings, message in invalid:
        with pytest.raises(ValueError, match=rf"^MilvusStore: .*{message}"):
            filled.add(**{"embeddings": vectors(2), **settings})
    assert len(filled) == ROWS
    assert torch.equal(filled.search(vectors(5), 1)[1][:, 0], 1000 - torch.arange(5))
    for k, message in ((16_385, "an integer from 1 to 16384"), (ROWS + 1, "at most the number")):
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
    for dim in (1, 32_769):
        with pytest.raises(ValueError, match=rf"^MilvusStore: `dim` must be an integer .*, got {dim}"):
            MilvusStore.create(str(tmp_path / "a.db"), "birds", dim)
    assert not (tmp_path / "a.db").exists()


def test_a_list_of_files_without_the_rows_is_damage(filled, tmp_path, opened):
    uri = str(tmp_path / "photos.db")
    filled.publish()
    filled.close()
    (manifest,) = Path(uri).rglob("manifest.json")  # Milvus Lite's list of the files of the only collection
    for file in (manifest, manifest.with_name("manifest.json.prev")):
        content = json.loads(file.read_text())
        for partition in content["partitions"].values():
            partition["data_files"] = []
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^MilvusStore: 'birds' .* is damaged, .* {ROWS} rows, but holds 0"):
        MilvusStore(uri, "birds")
    new = opened(MilvusStore.create(uri, "birds", DIM))  # in its place
    new.publish()
    assert len(opened(MilvusStore(uri, "birds"))) == 0


def test_the_number_of_rows_is_recorded_with_each_change(filled, tmp_path, opened):
    """An index without a recorded number opens as well."""
    uri = str(tmp_path / "photos.db")
    filled.publish()
    filled.add(vectors(10, seed=1))
    filled.remove(torch.tensor([1000, 999]))
    filled.close()
    assert len(opened(MilvusStore(uri, "birds"))) == ROWS + 8
    opened(MilvusStore(uri, "birds"))._call("alter_collection_properties", properties={"lightning_retrieval_rows": ""})
    assert len(opened(MilvusStore(uri, "birds"))) == ROWS + 8


METADATA = {"name": "cats", "dim": 4, "factory": "Flat", "parameters": "", "about": {}, "version": 1}


@pytest.fixture
def client(tmp_path, opened):
    """Milvus' own client of a store with one index, `birds`."""
    opened(MilvusStore.create(str(tmp_path / "photos.db"), "birds", 4)).publish()
    client = pymilvus.MilvusClient(str(tmp_path / "photos.db"))
    yield client
    client.close()


@pytest.mark.refusal
def test_collections_that_are_damaged_or_made_elsewhere_are_no_indexes(client, tmp_path):
    def open_raises(name, metadata, message):
        client.alter_collection_properties(name, {PROPERTY: json.dumps(metadata)})
        with pytest.raises(ValueError, match=rf"^MilvusStore: .*'{name}' in .*photos\.db {message}"):
            MilvusStore(str(tmp_path / "photos.db"), name)

    client.create_collection("cats", dimension=4, vector_field_name="embedding")
    for changed in ({"dim": "4"}, {"factory": 7}, {"parameters": "ef"}, {"about": []}, {"more": 1}):
        open_raises("cats", {**METADATA, **changed}, "is damaged, its metadata are invalid")
    open_raises("cats", {"version": 1}, "is damaged, its metadata are invalid")
    open_raises("cats", {**METADATA, "version": 2}, "has format version 2, but this release reads version 1; build")
    for metadata in ([1], "{"):
        open_raises("cats", metadata, "has format version None, but this release")
    open_raises("cats", {**METADATA, "dim": 8}, "must have 8 dimensions and the metric COSINE, .* got 4 and COSINE;")
    client.create_collection("dogs", dimension=4, vector_field_name="embedding", metric_type="IP")
    open_raises("dogs", METADATA, "must have 4 dimensions and the metric COSINE, .* got 4 and IP; build")


@pytest.mark.refusal
def test_a_collection_of_something_else_is_neither_read_nor_replaced(client, tmp_path):
    uri, before = str(tmp_path / "photos.db"), client.list_collections()
    new = MilvusStore.create(uri, "cats", 4)
    client.create_collection("cats", dimension=4)  # meanwhile
    client.create_alias("cats", "kittens")
    with pytest.raises(ValueError, match=r"`name` must be new or that of an index, got 'cats'"):
        new.publish()
    new.drop()
    with pytest.raises(ValueError, match=r"`name` must be that of an index, got 'cats', a collection in .* that some"):
        MilvusStore(uri, "cats")
    for name in ("cats", "kittens"):
        with pytest.raises(ValueError, match=rf"`name` must be new or that of an index, got '{name}', which is somet"):
            MilvusStore.create(uri, name, 4)
    assert sorted(client.list_collections()) == sorted(["cats", *before])


def test_requests_hold_all_rows_in_order_and_few_bytes(monkeypatch):
    monkeypatch.setattr("lightning_retrieval.search.store.rows.BLOCK", 100)
    for most, sizes in ((4 * 8 * 30, [30, 30, 30, 10] * 2 + [30, 20]), (1, [1] * 250)):
        monkeypatch.setattr(milvus_store, "BATCH_BYTES", most)
        requests = list(insertions(torch.randn(250, 8), np.arange(250) ** 2, [f"{i}.jpg" for i in range(250)], {}))
        assert list(map(len, requests)) == sizes
        inserted = [(row["id"], row["path"]) for request in requests for row in request]
        assert inserted == [(i**2, f"{i}.jpg") for i in range(250)]


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
    with pytest.raises(OSError, match=rf"^MilvusStore: {address} .* error in insert .* 20 of 50 rows were added"):
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


def write_and_die(rank, world_size, uri):
    first = MilvusStore.create(uri, "birds", 4)
    first.add(torch.eye(4))
    first.publish()
    second = MilvusStore.create(uri, "birds", 4)
    second.add(torch.eye(4).repeat(5, 1))
    real = first._call

    def call_and_die(method, **settings):
        result = real(method, **settings)
        if method == "insert":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    first._call = call_and_die
    first.add(torch.eye(4)[:3])


@pytest.mark.distributed
def test_a_process_that_is_killed_leaves_the_published_index(tmp_path):
    """Also if it was changing that index."""
    (tmp_path / "processes").mkdir()
    uri = str(tmp_path / "photos.db")
    (started,) = start_processes(write_and_die, 1, uri, folder=tmp_path / "processes")
    assert started.wait(120) == -signal.SIGKILL, started.output()
    left = MilvusStore(uri, "birds")
    assert len(left) in (4, 7)
    assert len(left._connection.call("list_collections")) == 2
    left.publish()
    assert left._connection.call("list_collections") == [left.collection]
    left.close()


def test_connections_to_one_file_share_it(tmp_path):
    import fcntl

    uri = str(tmp_path / "photos.db")
    first = MilvusConnection(uri, may_create=True)
    second = MilvusConnection(uri, may_create=False)
    first.close()
    first.close()
    with pytest.raises(ValueError, match=r"^the connection to .* must be open for list_collections; open"):
        first.call("list_collections")
    assert second.call("list_collections") == []
    second.close()
    with (tmp_path / "photos.db" / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Milvus Lite has ended


@pytest.mark.parametrize(
    ("message", "failures", "calls"),
    [
        ("Error: 'ret == (size)' failed: read error in a.idx: 1653 != 4224", 2, 3),
        ("read error in a.idx", 9, 5),
        ("index not found", 9, 1),
    ],
)
def test_a_collection_is_loaded_again_while_its_index_is_written(message, failures, calls, tmp_path, monkeypatch):
    from pymilvus.exceptions import MilvusException

    connection = MilvusConnection(str(tmp_path / "photos.db"), may_create=True)
    seen = []

    def load_collection(collection, timeout):
        seen.append(collection)
        if len(seen) <= failures:
            raise MilvusException(message=message)

    monkeypatch.setattr(connection._client, "load_collection", load_collection)
    monkeypatch.setattr(milvus_connection, "BETWEEN_LOADS", 0.0)
    if failures < milvus_connection.LOADS:
        connection.load("birds")
    else:
        with pytest.raises(OSError, match=rf"reports an error in load_collection \(.*{re.escape(message)}"):
            connection.load("birds")
    assert seen == ["birds"] * calls
    connection.close()


def test_an_index_whose_file_is_being_written_opens_when_it_is_complete(tmp_path, monkeypatch, opened):
    uri = str(tmp_path / "photos.db")
    with closing(MilvusStore.create(uri, "birds", DIM, "IVF_FLAT,nlist=32")) as store:
        store.add(vectors(2000))
        store.publish()
    (file,) = Path(uri).rglob("*.idx")
    content = file.read_bytes()
    file.write_bytes(content[:1000])
    monkeypatch.setattr(milvus_connection, "time", SimpleNamespace(sleep=lambda seconds: file.write_bytes(content)))
    assert len(opened(MilvusStore(uri, "birds"))) == 2000
    assert file.read_bytes() == content


@pytest.mark.refusal
def test_a_file_that_another_process_has_opened(tmp_path):
    import fcntl

    uri = str(tmp_path / "photos.db")
    MilvusConnection(uri, may_create=True).close()
    with (tmp_path / "photos.db" / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConnectionError, match=r"^MilvusStore: `uri` must not be in use, got .*photos.db, which "):
            MilvusStore(uri, "birds")
    MilvusConnection(uri, may_create=False).close()


@pytest.mark.refusal
def test_paths_that_are_no_file_of_milvus_lite(tmp_path):
    (tmp_path / "old.db").write_text("SQLite format 3")
    wrong = [
        ("photos.index", ValueError, r"must be a path that ends in \.db, .* got 'photos\.index'\.$"),
        ("ftp://host", ValueError, r"or an address such as http://localhost:19530, got 'ftp://host'"),
        (str(tmp_path / "old.db"), ValueError, r"a folder that Milvus Lite wrote, .* got the file .*old\.db; give"),
        (str(tmp_path / "gone.db"), FileNotFoundError, r"got .*gone\.db, which does not exist"),
        (3, TypeError, r"^`uri` must be a string, got 3"),
    ]
    for uri, error, message in wrong:
        with pytest.raises(error, match=message):
            MilvusConnection(uri, may_create=False)
    with pytest.raises(FileNotFoundError, match=r"must be in a folder that exists, got .*a\.db; create "):
        MilvusConnection(str(tmp_path / "no" / "a.db"), may_create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old.db"]


@pytest.mark.refusal
def test_an_address_where_nothing_answers():
    with pytest.raises(ConnectionError) as raised:
        MilvusConnection("http://root:secret@127.0.0.1:9", may_create=True)
    message = str(raised.value)
    assert message.startswith("`uri` must be the address of Milvus, got http://...@127.0.0.1:9, which did not answer")
    assert message.endswith("; nothing was written, so start Milvus there or give another address.")
    assert "secret" not in message
    assert shown_uri("photos@home.db") == "photos@home.db"


def test_errors_are_raised_and_not_printed(tmp_path):
    (tmp_path / "processes").mkdir()
    (started,) = start_processes(error_of_milvus, 1, str(tmp_path / "a.db"), folder=tmp_path / "processes")
    assert (started.wait(120), started.output()) == (0, "")
    assert "a.db reports an error in describe_collection (" in started.result()


def test_kinds_and_parameters():
    assert index_kind("Flat") == index_kind("Flat,") == ("FLAT", {})
    assert index_kind("hnsw, M=32,efConstruction=200") == ("HNSW", {"M": 32, "efConstruction": 200})
    assert search_parameters("") == {}
    assert search_parameters("ef=64, drop_ratio=0.5,ef=65") == {"ef": 65, "drop_ratio": 0.5}


@pytest.mark.refusal
def test_invalid_kinds_parameters_and_names():
    numbers = ["ef", "ef=", "ef=0", "ef=-3", "ef=many", "ef=1;k=2", "ef=1,,k=2", f"ef={'9' * 21}", f"ef={'9' * 5000}"]
    for function, argument, values in (
        (index_kind, "factory", ["", "Flatt", "IVF1024,Flat", "HNSW,M", "HNSW,M=0", "HNSW,M=1.2.3"]),
        (search_parameters, "parameters", numbers),
        (check_name, "name", ["", "a b", "a/b", "1a", "é", "a" * 201]),
    ):
        for value in values:
            with pytest.raises(ValueError, match=f"^`{argument}` must .* got '"):
                function(value)
    with pytest.raises(ValueError, match=r"^`factory` .* Milvus Lite has, FLAT, .*, got 'SCANN'"):
        index_kind("SCANN", of_lite=True)
