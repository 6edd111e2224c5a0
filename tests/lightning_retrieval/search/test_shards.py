"""Rows are removed from all shards, and an addition that faiss rejects changes none."""

import pytest
import torch

from lightning_retrieval import RetrievalIndex
from tests.lightning_retrieval.search.vectors import DIM, ROWS, built, vectors


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "PCA16,IVF4,SQ8", "SQ8"])
@pytest.mark.parametrize("shards", [1, 2])
def test_removed_rows_are_no_longer_found(factory, shards):
    index, left = built(factory, parameters="nprobe=4" if "IVF" in factory else "", shards=shards), ROWS - 5
    gone = 1000 - torch.arange(left, ROWS)  # the smallest ids, so that all others move up
    index.remove(torch.cat([gone, gone]))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == left
    ids = index.search(vectors(), 1)[1][:, 0]
    assert ids[:left].tolist() == (1000 - torch.arange(left)).tolist()
    assert not set(ids[left:].tolist()) & set(gone.tolist())
    assert index.paths(ids[:left]) == [f"é/{i}.jpg" for i in range(left)]
    index.add(vectors()[left:], ids=gone)  # the same ids can be added again
    assert index.search(vectors()[left:], 1)[1][:, 0].tolist() == gone.tolist()


@pytest.mark.refusal
@pytest.mark.parametrize("factory", ["HNSW8", "IVF4,PQ4x4,RFlat"])
def test_removal_raises_where_faiss_does_not_support_it(factory):
    index = built(factory, shards=2)
    with pytest.raises(ValueError, match=rf"rows cannot be removed from an index of '{factory}'.*Flat or IVF\.$"):
        index.remove(torch.tensor([1000]))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == ROWS


@pytest.mark.refusal
@pytest.mark.parametrize("factory", ["IVF100,Flat", "PQ4x6", "PCA8,IVF60,SQ8"])
def test_too_few_rows_for_the_training_raise(factory):
    index = RetrievalIndex(DIM, factory, shards=2)
    with pytest.raises(ValueError, match=rf"`factory` '{factory}' must be trained, for which 50 rows are not enough"):
        index.add(vectors(50))
    assert len(index) == 0
    index.add(vectors(600))
    assert len(index) == 600


@pytest.mark.refusal
@pytest.mark.parametrize("shards", [1, 2])
def test_a_first_add_that_faiss_rejects_changes_nothing(shards):
    index = RetrievalIndex(DIM, "NSG8", shards=shards)
    with pytest.raises(ValueError, match=r"^RetrievalIndex: 50 rows cannot .* 'NSG8' that holds 0 \(.*smaller than"):
        index.add(vectors(50))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 0
    index.add(vectors(400))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 400
    with pytest.raises(ValueError, match=r"3 rows cannot be added to an index of 'NSG8' that holds 400"):
        index.add(vectors(3))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 400


@pytest.mark.refusal
def test_a_file_that_faiss_cannot_read_raises_without_checksums_too(tmp_path):
    built(rows=50).save(tmp_path)
    (file,) = tmp_path.glob("*/vectors-0.faiss")
    file.write_bytes(b"nope" + file.read_bytes()[4:])
    with pytest.raises(ValueError, match=r"faiss cannot read .*; build the index again\.$"):
        RetrievalIndex.load(tmp_path, verify=False)


@pytest.mark.refusal
def test_errors_of_faiss_during_a_search_are_sentences():
    index = built("IVF4,Flat", shards=2)
    for part in index.faiss_indexes:
        part.nprobe = 0  # past set_parameters, which rejects it
    with pytest.raises(ValueError, match=r"^RetrievalIndex: faiss cannot search for the 3 nearest rows \(.*nprobe"):
        index.search(vectors(2), 3)
