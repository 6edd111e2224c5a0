"""The collection behind an index: collections that are no index, or were changed, are refused."""

import json

import pytest
import torch

from lightning_retrieval import MilvusStore
from lightning_retrieval.search.milvus_connection import PROPERTY, check_name

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")


@pytest.fixture
def store(tmp_path):
    store = MilvusStore.create(str(tmp_path / "photos.db"), "birds", 4)
    store.add(torch.eye(4))
    store.publish()
    yield store
    store.close()


@pytest.fixture
def client(store):
    client = pymilvus.MilvusClient(store.uri)
    yield client
    client.close()


def made_elsewhere(client, name, metadata, **settings):
    """A collection that another program made, with the metadata of an index."""
    client.create_collection(
        name, vector_field_name="embedding", properties={PROPERTY: json.dumps(metadata)}, **settings
    )


METADATA = {"name": "cats", "dim": 4, "factory": "Flat", "parameters": "", "about": {}, "version": 1}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dimension": 8},
            r"'cats_1' in .*photos\.db must have 4 dimensions and the metric COSINE, .* got 8 and COSINE",
        ),
        (
            {"dimension": 4, "metric_type": "L2"},
            r".* the metric COSINE, as the index in it, got 4 and L2; build the index",
        ),
        (
            {"dimension": 4, "metric_type": "IP"},
            r".* the metric COSINE, as the index in it, got 4 and IP; build the index",
        ),
    ],
)
def test_another_dimension_or_metric(store, client, settings, message):
    made_elsewhere(client, "cats_1", METADATA, **settings)
    with pytest.raises(ValueError, match=rf"^MilvusStore: the collection {message}"):
        MilvusStore(store.uri, "cats_1")


@pytest.mark.refusal
def test_another_version(store, client):
    made_elsewhere(client, "cats_1", {**METADATA, "version": 2}, dimension=4)
    with pytest.raises(ValueError, match=r"'cats_1' in .* has format version 2, but this release reads version 1; bui"):
        MilvusStore(store.uri, "cats_1")
    for number, damaged in enumerate(("{", "[1]")):
        client.create_collection(f"dogs_{number}", dimension=4, properties={PROPERTY: damaged})
        with pytest.raises(ValueError, match=rf"'dogs_{number}' in .* has format version None, but this release"):
            MilvusStore(store.uri, f"dogs_{number}")


@pytest.mark.refusal
def test_a_collection_of_something_else_is_neither_read_nor_replaced(store, client):
    client.create_collection("cats", dimension=4)
    client.create_alias("cats", "kittens")
    with pytest.raises(ValueError, match=r"`name` must be that of an index, got 'cats', a collection in .* that some"):
        MilvusStore(store.uri, "cats")
    for name in ("cats", "kittens"):
        with pytest.raises(ValueError, match=rf"`name` must be new or that of an index, got '{name}', which is somet"):
            MilvusStore.create(store.uri, name, 4)
    assert "cats" in client.list_collections()


@pytest.mark.refusal
def test_a_name_that_something_else_has_taken_meanwhile(store, client):
    new = MilvusStore.create(store.uri, "cats", 4)
    client.create_collection("cats", dimension=4)
    with pytest.raises(ValueError, match=r"`name` must be new or that of an index, got 'cats'"):
        new.publish()
    new.drop()
    assert sorted(client.list_collections()) == sorted(["cats", store.collection])


@pytest.mark.refusal
@pytest.mark.parametrize("name", ["", "a b", "a/b", "1a", "é", "a" * 201])
def test_invalid_names(name):
    with pytest.raises(ValueError, match=r"^MilvusStore: `name` must consist of letters, digits and _, .* got '"):
        check_name(name)


@pytest.mark.refusal
@pytest.mark.parametrize("dim", [0, 1, 32_769])
def test_invalid_dimensions(tmp_path, dim):
    with pytest.raises(ValueError, match=rf"^MilvusStore: `dim` must be an integer (>= 2|from 2 to 32768), got {dim}"):
        MilvusStore.create(str(tmp_path / "a.db"), "birds", dim)
    assert not (tmp_path / "a.db").exists()


@pytest.mark.refusal
@pytest.mark.parametrize(
    "damaged",
    [
        {**METADATA, "dim": "4"},
        {**METADATA, "dim": None},
        {**METADATA, "factory": 7},
        {**METADATA, "parameters": "ef"},
        {**METADATA, "about": []},
        {**METADATA, "more": 1},
        {"version": 1},
    ],
)
def test_metadata_that_no_index_has(store, client, damaged):
    made_elsewhere(client, "cats_1", damaged, dimension=4)
    with pytest.raises(
        ValueError, match=r"^MilvusStore: 'cats_1' in .*photos\.db is damaged, its metadata are invalid"
    ):
        MilvusStore(store.uri, "cats_1")
