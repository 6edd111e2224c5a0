"""`index` and `search` with an index in Milvus give the results of an index in a folder."""

import json
from pathlib import Path

import pytest
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.search.commands.index import index_embeddings
from tests.lightning_retrieval.search.commands.glyph_commands import command, paths_of, run

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")


@pytest.fixture(scope="module")
def store(embeddings, tmp_path_factory):
    """`--store`, with an index `glyphs` of the same images as the folder `indexed`."""
    file = tmp_path_factory.mktemp("store") / "glyphs.db"
    made, unreadable = index_embeddings(embeddings, Path("glyphs"), store=f"milvus:{file}")
    made.close()
    assert unreadable == []
    return f"--store=milvus:{file}"


def found(printed):
    """{path: (id, similarity)} of each query, as `search --json` prints them, nearest first."""
    results = []
    for query in json.loads(printed)["queries"]:
        results.append({hit["path"]: (hit["id"], hit["similarity"]) for hit in query["results"]})
    return results


def test_search_prints_the_same_results(indexed, store, capsys):
    queries = [indexed / "images" / path for path in paths_of(indexed / "images")[1:8:3]]
    args = ["search", *queries, "-k=40", "--json"]
    code, out, err = command(capsys, *args, "--index=glyphs", store)
    assert (code, err) == (0, "")
    expected = found(command(capsys, *args, "--index", indexed / "index")[1])
    for result, true in zip(found(out), expected, strict=True):
        assert next(iter(result)) == next(iter(true))  # the query itself
        assert result == {path: (row, pytest.approx(value, abs=1e-6)) for path, (row, value) in true.items()}
        similarities = [similarity for _, similarity in result.values()]
        assert similarities == sorted(similarities, reverse=True)


def test_a_full_disk_leaves_the_earlier_index_as_it_is(embeddings, tmp_path, monkeypatch):
    uri = str(tmp_path / "photos.db")
    index_embeddings(embeddings, Path("glyphs"), store=f"milvus:{uri}")[0].close()
    insert = pymilvus.MilvusClient.insert

    def insert_and_fail(*args, **settings):
        insert(*args, **settings)
        raise OSError("the disk is full")

    monkeypatch.setattr(pymilvus.MilvusClient, "insert", insert_and_fail)
    with pytest.raises(OSError, match="the disk is full"):
        index_embeddings(embeddings, Path("glyphs"), store=f"milvus:{uri}")
    left = MilvusStore(uri, "glyphs")
    assert len(left) == 40
    left.close()


def test_rows_that_were_added_by_hand_are_only_lost_where_that_is_asked_for(indexed, embeddings, tmp_path, capsys):
    uri = str(tmp_path / "photos.db")
    args = ["index", "--embeddings", embeddings, "--output=glyphs", f"--store=milvus:{uri}"]
    assert run(capsys, *args)[0] == 0
    changed = MilvusStore(uri, "glyphs")
    changed.remove(torch.tensor([3]))
    changed.add(torch.eye(2, 24), paths=["mine/a.png", "mine/b.png"])
    changed.close()
    for more, named in (([], "2 of the 41 rows"), (["--update", "--factory=HNSW"], "`--factory`")):
        code, _, err = run(capsys, *args, *more)
        assert (code, named in err) == (2, True)
    for more in (["--update"], [], ["--overwrite"]):
        assert run(capsys, *args, *more)[0] == 0
        made, expected = MilvusStore(uri, "glyphs"), RetrievalIndex.load(indexed / "index")
        assert sorted(made.paths(made.ids)) == sorted(expected.paths(expected.ids))
        assert made.about == expected.about
        made.close()
