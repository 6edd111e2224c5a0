"""`index`, `search` and `demo` with an index in Milvus give the results of an index in a folder."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.search.commands import demo
from lightning_retrieval.search.commands.embedding import ImageEmbedder
from lightning_retrieval.search.commands.index import index_embeddings, index_images
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of, indexing, paths_of, run

pytest.importorskip("pymilvus")
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


def test_search_prints_the_same_results(indexed, store, tmp_path, capsys):
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
    for args, message in (
        (["--index=glyphs", f"--store=milvus:{tmp_path / 'gone.db'}"], "`--store` must be a file of Milvus Lite, got"),
        (["--index=cats", store], "`--index` must be that of an index in"),
    ):
        assert message in error_of(capsys, "search", queries[0], *args)
    assert not list(tmp_path.iterdir())


def test_demo_serves_it(indexed, store, capsys, monkeypatch):
    calls = []

    def serve(searcher, images, **settings):
        hits = searcher.search([str(indexed / "images" / "1" / "deeper" / "12.bmp")], searcher.index.request(3))[0][
            0
        ].hits
        calls.append((images, settings["k"], hits[0].path))
        return SimpleNamespace(local_url="http://127.0.0.1:7860/", close=lambda verbose: None)

    monkeypatch.setattr(demo, "serve_demo", serve)
    monkeypatch.setattr(demo, "delete_files_from_time_to_time", lambda folder: None)
    assert command(capsys, "demo", "--index=glyphs", store)[0] == 0
    assert calls == [(indexed / "images", 20, "1/deeper/12.bmp")]


@pytest.mark.refusal
def test_a_wrong_store_raises_before_any_image_is_embedded(indexed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ImageEmbedder, "load", None)  # calling it fails in another way
    store = f"--store=milvus:{tmp_path / 'a.db'}"
    for args, message in (
        (["--store=photos.db"], "index: `--store` must be milvus: and a file or an address, such as milvus:photos.db"),
        (["--store=milvus:"], "index: `--store` must be milvus: and a file or an address"),
        (["--store=milvus:http://127.0.0.1:9"], "`--store` must be the address of Milvus, got http://127.0.0.1:9"),
        ([store, "--shards=2"], "index: `--shards` must be 1 with a store in Milvus"),
        ([store, "--factory=IVF4,Flat"], "`--factory` must be a type of index that"),
        ([store, "--parameters=ef"], "`--parameters` must be assignments of positive"),
        ([store, f"--output={tmp_path}"], "`--output` must consist of letters, digits"),
    ):
        assert message in error_of(capsys, *indexing(indexed, "glyphs", *args))
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    printed = error_of(capsys, *indexing(indexed, "glyphs", store))
    assert "needs pymilvus and milvus-lite; install them with pip install 'lightning-retrieval[milvus]'." in printed


def test_a_failure_leaves_the_earlier_index_as_it_is(embeddings, tmp_path, monkeypatch):
    uri = str(tmp_path / "photos.db")
    index_embeddings(embeddings, Path("glyphs"), store=f"milvus:{uri}")[0].close()
    add = MilvusStore.add

    def add_and_fail(self, *args, **columns):
        add(self, *args, **columns)
        raise OSError("the disk is full")

    monkeypatch.setattr(MilvusStore, "add", add_and_fail)
    with pytest.raises(OSError, match=r"^the disk is full$"):
        index_embeddings(embeddings, Path("glyphs"), store=f"milvus:{uri}")
    left = MilvusStore(uri, "glyphs")
    assert len(left) == 40
    assert left._connection.call("list_collections") == [left.collection]
    left.close()


@pytest.mark.refusal
def test_paths_that_milvus_cannot_hold_raise_before_any_image_is_embedded(indexed, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageEmbedder, "embed_all", None)  # calling it fails in another way
    (tmp_path / "images").mkdir()
    source = indexed / "images" / paths_of(indexed / "images")[3]
    for name in ("a.png", "b.png", "\udcff.png"):
        (tmp_path / "images" / name).write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match=r"^index_images: `paths` must be valid Unicode, got '.udcff\.png'; rename "):
        index_images(indexed / "model.ckpt", tmp_path / "images", Path("glyphs"), store=f"milvus:{tmp_path / 'a.db'}")


def test_rows_that_were_added_by_hand_are_only_lost_where_that_is_asked_for(indexed, embeddings, tmp_path, capsys):
    uri = str(tmp_path / "photos.db")
    args = ["index", "--embeddings", embeddings, "--output=glyphs", f"--store=milvus:{uri}"]
    assert run(capsys, *args)[0] == 0
    changed = MilvusStore(uri, "glyphs")
    changed.remove(torch.tensor([3]))
    changed.add(torch.eye(2, 24), paths=["mine/a.png", "mine/b.png"])
    changed.close()
    code, _, err = run(capsys, *args)
    assert (code, "but 2 of the 41 rows of glyphs are not, because their images are not among" in err) == (2, True)
    code, _, err = run(capsys, *args, "--update", "--factory=HNSW")
    assert (code, "`--factory` must be that of the index with `--update`, 'Flat'" in err) == (2, True)
    for more in (["--update"], [], ["--overwrite"]):
        assert run(capsys, *args, *more)[0] == 0
        made, expected = MilvusStore(uri, "glyphs"), RetrievalIndex.load(indexed / "index")
        assert sorted(made.paths(made.ids)) == sorted(expected.paths(expected.ids))
        assert made.about == expected.about
        made.close()
