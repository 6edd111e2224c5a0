"""The kind of an index of Milvus and the parameters of its searches, as text."""

import pytest

from lightning_retrieval.search.milvus_connection import index_kind, search_parameters

HUGE = "ef=999999999999999999999"


def test_kinds_and_their_parameters():
    assert index_kind("Flat") == ("FLAT", {})
    assert index_kind("hnsw, M=32,efConstruction=200") == ("HNSW", {"M": 32, "efConstruction": 200})
    assert index_kind("SCANN,nlist=8") == ("SCANN", {"nlist": 8})


def test_parameters_of_a_search():
    assert search_parameters("") == {}
    assert search_parameters("ef=64, drop_ratio=0.5,ef=65") == {"ef": 65, "drop_ratio": 0.5}


@pytest.mark.refusal
@pytest.mark.parametrize("factory", ["", "Flatt", "IVF1024,Flat", "HNSW,M", "HNSW,M=0", "HNSW,M=1.2.3", "Flat,"])
def test_unknown_kinds(factory):
    if factory == "Flat,":  # no assignment is none
        assert index_kind(factory) == ("FLAT", {})
        return
    with pytest.raises(ValueError, match=r"^MilvusStore: `factory` must be a type of index that Milvus has, .* got '"):
        index_kind(factory)


@pytest.mark.refusal
def test_a_kind_that_the_file_has_not():
    with pytest.raises(ValueError, match=r"one that Milvus Lite has, FLAT, .*, got 'SCANN'; take one of these, or a"):
        index_kind("SCANN", of_lite=True)


@pytest.mark.refusal
@pytest.mark.parametrize(
    "parameters", ["ef", "ef=", "ef=0", "ef=-3", "ef=many", "ef=1;k=2", "ef=1,,k=2", HUGE, f"ef={'9' * 5000}"]
)
def test_wrong_parameters(parameters):
    with pytest.raises(ValueError, match=r"^MilvusStore: `parameters` must be assignments of positive numbers"):
        search_parameters(parameters)
    with pytest.raises(TypeError, match=r"^MilvusStore: `parameters` must be a string, got None"):
        search_parameters(None)
