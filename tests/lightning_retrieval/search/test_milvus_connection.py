"""A store that cannot be reached, and kinds of index and parameters as text; nothing is created by what is invalid."""

import fcntl
import re
import subprocess
import sys

import pytest

from lightning_retrieval.search import milvus_connection
from lightning_retrieval.search.milvus_connection import (
    MilvusConnection,
    check_name,
    index_kind,
    is_file,
    search_parameters,
    shown_uri,
)

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")


def test_files_and_addresses():
    assert is_file("photos.db")
    assert not is_file("http://localhost:19530")
    assert shown_uri("photos@home.db") == "photos@home.db"
    assert shown_uri("https://root:secret@host:19530") == "https://...@host:19530"


def test_connections_to_one_file_share_it(tmp_path):
    uri = str(tmp_path / "photos.db")
    first = MilvusConnection(uri, may_create=True)
    second = MilvusConnection(uri, may_create=False)
    first.close()
    first.close()
    with pytest.raises(ValueError, match=r"^MilvusStore: the connection to .* must be open for list_collections; open"):
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


@pytest.mark.refusal
def test_a_file_that_another_process_has_opened(tmp_path):
    uri = str(tmp_path / "photos.db")
    MilvusConnection(uri, may_create=True).close()
    with (tmp_path / "photos.db" / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConnectionError, match=r"^MilvusStore: `uri` must not be in use, got .*photos.db, which "):
            MilvusConnection(uri, may_create=False)
    MilvusConnection(uri, may_create=False).close()


@pytest.mark.refusal
def test_paths_that_are_no_file_of_milvus_lite(tmp_path):
    (tmp_path / "old.db").write_text("SQLite format 3")
    wrong = [
        ("photos.index", ValueError, r"must be a path that ends in \.db, .* got 'photos\.index'\.$"),
        ("ftp://host", ValueError, r"or an address such as http://localhost:19530, got 'ftp://host'"),
        (str(tmp_path / "old.db"), ValueError, r"which is a folder, got .*old\.db, which is a file; give another path"),
        (str(tmp_path / "gone.db"), FileNotFoundError, r"got .*gone\.db, which does not exist"),
        (3, TypeError, r"^MilvusStore: `uri` must be a string, got 3"),
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
    assert message.startswith("MilvusStore: `uri` must be the address of Milvus, got http://...@127.0.0.1:9, where ")
    assert message.endswith("; nothing was written, so start Milvus there or give another address.")
    assert "secret" not in message


def test_errors_are_raised_and_not_printed(tmp_path):
    program = (
        "from lightning_retrieval.search.milvus_connection import MilvusConnection\n"
        f"connection = MilvusConnection({str(tmp_path / 'a.db')!r}, may_create=True)\n"
        "try:\n    connection.call('describe_collection', 'gone')\nexcept OSError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a.db reports an error in describe_collection (" in done.stdout


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
            with pytest.raises(ValueError, match=f"^MilvusStore: `{argument}` must .* got '"):
                function(value)
    with pytest.raises(ValueError, match=r"^MilvusStore: `factory` .* Milvus Lite has, FLAT, .*, got 'SCANN'"):
        index_kind("SCANN", of_lite=True)
