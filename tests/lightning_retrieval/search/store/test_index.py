"""RetrievalIndex: exact ranking by NumPy, recall by scikit-learn, shards, files and back."""

import copy
import pickle
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lightning_retrieval import RetrievalIndex
from tests.lightning_retrieval.search.store.vectors import (
    DIM,
    ROWS,
    built,
    exact,
    memory,
    search_while_edited,
    vectors,
)


@pytest.mark.parametrize("shards", [1, 3])
def test_flat_index_ranks_as_exact_search_does(shards):
    index, queries = built(shards=shards), vectors(20, seed=1)
    similarities, ids = index.search(queries, 9)
    expected, positions = exact(vectors(), queries, 9)
    assert np.allclose(similarities.numpy(), expected, atol=1e-6)
    assert ids.tolist() == (1000 - positions).tolist()
    assert index.paths(ids[3]) == [f"é/{position}.jpg" for position in positions[3]]
    assert (len(index), index.recall, ids.dtype) == (600, None, torch.int64)


def test_all_rows_of_a_larger_index_are_found_and_come_back():
    """More rows than are normalised or given to faiss at once."""
    rows = vectors(70_000, 4)
    index = RetrievalIndex(4, shards=2)
    index.add(rows)
    assert [part.ntotal for part in index.faiss_indexes] == [35_000, 35_000]
    unit = rows / rows.norm(dim=1, keepdim=True)
    torch.testing.assert_close(index.embeddings(), unit, rtol=0, atol=1e-6)
    assert index.search(rows[::1000], 1)[1][:, 0].tolist() == list(range(0, 70_000, 1000))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.dtype(np.float32).newbyteorder()])
def test_queries_may_be_arrays_and_one_vector_is_one_query(dtype):
    index, queries = built(), vectors(20, seed=1).half()
    array = queries.numpy().astype(dtype)
    array.setflags(write=False)  # as arrays over a file are
    similarities, ids = index.search(queries.float(), 3)
    assert torch.equal(index.search(queries, 3)[1], ids)
    assert torch.equal(index.search(queries.T.contiguous().T, 3)[1], ids)
    assert torch.equal(index.search(array, 3)[1], ids)
    assert torch.equal(index.search(array[::-1], 3)[1], ids.flip(0))
    for vector in (queries[7], array[7]):
        found = index.search_with_metadata(vector, index.request(3), [])
        torch.testing.assert_close(found[0], similarities[7:8])
        assert torch.equal(found[1], ids[7:8])
        assert found[2] == [index.paths(ids[7])]
    assert [part.shape for part in index.search(array[:0], 3)] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("dtype", [np.float64, np.dtype(np.float32).newbyteorder()])
def test_rows_and_ids_may_be_arrays_of_a_file(dtype, tmp_path):
    """Of each byte order, read-only and mapped: the index is that of a tensor with the same numbers."""
    rows, ids = vectors().half(), torch.arange(ROWS).flip(0)
    np.save(tmp_path / "rows.npy", rows.numpy().astype(dtype))
    mapped, numbers = np.load(tmp_path / "rows.npy", mmap_mode="r"), ids.numpy().astype(">i4")
    expected, whole, halves = (RetrievalIndex(DIM) for _ in range(3))
    expected.add(rows, ids)
    whole.add(mapped, numbers)
    halves.add(mapped[::2], numbers[::2])
    halves.add(mapped[1::2], numbers[1::2])
    for index in (whole, halves):
        found, wanted = index.search(vectors(9, seed=1), 5), expected.search(vectors(9, seed=1), 5)
        torch.testing.assert_close(found[0], wanted[0])  # float64 is normalised in float64
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(index.embeddings(numbers[:7]), expected.embeddings(ids[:7]))
    whole.remove(numbers[:-3])
    assert whole.ids.tolist() == [0, 1, 2]


def test_rows_are_added_in_several_parts():
    rows, index, given = vectors(), RetrievalIndex(DIM, shards=2), torch.arange(10)
    index.add(rows[:10], given)
    assert given.tolist() == [*range(10)]
    given.fill_(7)  # the index has a copy
    index.add(rows[10:20], ids=torch.arange(400, 390, -1), paths=[f"{i}" for i in range(10, 20)])
    index.add(rows[20:30])
    index.add(rows[:0])
    ids = [*range(10), *range(391, 411)]
    assert index.ids.tolist() == ids
    assert index.search(rows[[3, 12, 25]], 1)[1][:, 0].tolist() == [3, 398, 406]
    assert index.paths(torch.tensor([398, 3, 391, 406])) == ["12", "", "19", ""]
    index.add(rows[30:31], torch.tensor([20]), ["30"])
    assert index.ids.tolist() == sorted([*ids, 20])
    assert index.paths(torch.tensor([20, 391])) == ["30", "19"]


def test_the_largest_ids():
    index = RetrievalIndex(DIM)
    index.add(vectors(1), torch.tensor([2**63 - 3]))
    index.add(vectors(2))
    assert index.ids.tolist() == [2**63 - 3, 2**63 - 2, 2**63 - 1]
    index.add(vectors(1), torch.tensor([0]))
    assert index.ids[:2].tolist() == [0, 2**63 - 3]


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "PCA8,IVF4_HNSW8,PQ4x4", "HNSW8"])
def test_an_index_finds_the_same_rows_with_any_number_of_shards(factory, tmp_path):
    settings = {"ids": 1000 - torch.arange(ROWS), "paths": [f"é/{i}.jpg" for i in range(ROWS)], "factory": factory}
    settings |= {
        "columns": {"row": range(ROWS)},
        "parameters": "nprobe=2" if "IVF" in factory else "efSearch=999" * ("H" in factory),
    }
    one, several = (RetrievalIndex.build(tmp_path / str(n), vectors(), shards=n, **settings) for n in (1, 7))
    loaded = RetrievalIndex.load(tmp_path / "7")
    in_memory = RetrievalIndex(DIM, factory, parameters=settings["parameters"], shards=7)
    in_memory.add(vectors(), settings["ids"], settings["paths"], columns=settings["columns"])
    assert (one.recall, one.mapped) == (several.recall, several.mapped)
    for where in (None, "row < 300"):
        expected = one.search(vectors(20, seed=1), 7, where=where)
        for index in (several, loaded, in_memory):
            similarities, ids = index.search(vectors(20, seed=1), 7, where=where)
            torch.testing.assert_close(similarities, expected[0])
            assert torch.equal(ids, expected[1])
    assert several.paths(expected[1][0]) == one.paths(expected[1][0])
    assert len({part.ntotal for part in several.faiss_indexes}) == 2  # 85 or 86 rows


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))])
def test_pickle_and_copy(copied):
    index = built("IVF4,Flat", shards=2)
    other = copied(index)
    assert torch.equal(other.search(vectors(9, seed=1), 7)[1], index.search(vectors(9, seed=1), 7)[1])
    other.remove(other.ids[:100])
    assert (len(index), sum(part.ntotal for part in index.faiss_indexes)) == (ROWS, ROWS)


@pytest.mark.parametrize(
    ("factory", "atol"),
    [("Flat", 1e-6), ("IVF4,PQ4x4,RFlat", 1e-6), ("HNSW8", 1e-6), ("SQ8", 0.01), ("PCA8,IVF4,SQ8", 0.8)],
)
def test_a_loaded_index_gives_the_same_results_and_its_rows(factory, atol, tmp_path):
    index, queries = built(factory, shards=2), vectors(9, seed=1)
    index.about = {"checkpoint": "x.ckpt", "not valid UTF-8": "\udc80\n"}
    index.save(tmp_path / "a" / "index")
    mapped, read = (RetrievalIndex.load(tmp_path / "a" / "index", mapped=mapped) for mapped in (True, False))
    added = vectors() / vectors().norm(dim=1, keepdim=True)
    ids = torch.tensor([1000, 600, 401, 777, 600])
    for other in (mapped, read):
        assert repr(other) == repr(index)
        assert (other.about, other.recall) == (index.about, index.recall)
        found = other.embeddings(ids)
        torch.testing.assert_close(found, added[1000 - ids], rtol=0, atol=atol)
        assert torch.nn.functional.cosine_similarity(found, added[1000 - ids]).mean() > 0.5  # also those of codes
        assert torch.equal(other.embeddings()[other.ids == 777][0], found[3])
        for mine, its in zip(index.search(queries, 7), other.search(queries, 7)):
            assert torch.equal(mine, its)
        assert other.paths(ids) == index.paths(ids)
        assert other.paths(ids)[2] == "é/599.jpg"
    read.add(vectors(2, seed=1))
    assert read.ids[-2:].tolist() == [1001, 1002]
    with pytest.raises(ValueError, match="mapped"):
        mapped.add(vectors(2))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat"])
def test_a_mapped_index_takes_little_memory(factory, tmp_path):
    index = RetrievalIndex(512, factory)
    index.add(torch.randn(5000, 512))
    index.save(tmp_path / "index")
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.faiss"))

    def load_and_search():
        mapped = RetrievalIndex.load(tmp_path / "index", mapped=True)
        mapped.search(torch.randn(1, 512), 5)
        return mapped

    kept = [load_and_search()]  # allocates what the first search of a process needs, whether the index is mapped or not
    before = memory("RssAnon")
    kept.append(load_and_search())
    added = memory("RssAnon") - before
    assert size > 6e6
    assert added < max(size / 8, 3e6)


def test_changes_that_cannot_be_made_change_nothing():
    """Rows that are not finite, ids that are there, too few rows to train, and kinds of index that cannot remove."""
    index = built(rows=50)
    with_nan = vectors(8).index_fill(0, torch.tensor([2, 5]), torch.nan)
    for change in (
        lambda: index.add(with_nan),
        lambda: index.add(vectors(2), torch.tensor([1, 999])),
        lambda: index.remove(torch.tensor([999, 3])),
    ):
        with pytest.raises(ValueError, match=r"^RetrievalIndex: "):
            change()
        assert index.ids.tolist() == list(range(951, 1001))
        assert index.faiss_indexes[0].ntotal == 50
    for factory in ("HNSW8", "IVF4,PQ4x4,RFlat"):
        index = built(factory, shards=2)
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .*removed"):
            index.remove(torch.tensor([1000]))
        assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == ROWS
    for factory in ("IVF100,Flat", "PQ1x6", "NSG8"):
        index = RetrievalIndex(DIM, factory, shards=2)
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .*50 rows"):
            index.add(vectors(50))
        assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 0
        index.add(vectors(600))
        assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 600


def test_parameters_can_be_changed_after_loading(tmp_path):
    built("IVF16,Flat", shards=2).save(tmp_path)
    index, queries = RetrievalIndex.load(tmp_path, mapped=True), vectors(20, seed=1)
    index.set_parameters("nprobe=16")
    expected = (1000 - exact(vectors(), queries, 9)[1]).tolist()
    assert index.search(queries, 9)[1].tolist() == expected
    with pytest.raises(ValueError, match="`parameters`"):
        index.set_parameters("nprobe=1,ef=3")
    assert index.search(queries, 9)[1].tolist() == expected
    assert index.parameters == "nprobe=16"


def test_an_index_that_compares_codes_by_hamming_distances_is_trained_for_that():
    """With faiss itself as the witness, whose results would be poor without that training."""
    rows, queries = (torch.nn.functional.normalize(x).numpy() for x in (vectors(), vectors(20, seed=1)))
    expected = faiss.index_factory(DIM, "IVF4,PQ2x4", faiss.METRIC_INNER_PRODUCT)
    faiss.ParameterSpace().set_index_parameters(expected, "nprobe=2,ht=7")
    expected.train(rows)
    expected.add(rows)
    index = RetrievalIndex(DIM, "IVF4,PQ2x4", parameters="nprobe=2,ht=7")
    index.add(vectors())
    assert index.search(vectors(20, seed=1), 7)[1].tolist() == expected.search(queries, 7)[1].tolist()


def test_a_search_sees_one_state_while_another_thread_edits():
    index = RetrievalIndex(DIM, "IVF4,Flat", parameters="nprobe=4", shards=3)
    index.add(vectors(), torch.arange(ROWS), [f"{row}.jpg" for row in range(ROWS)], columns={"row": range(ROWS)})
    assert search_while_edited(index, 50) == []


def test_marks_of_what_a_search_does_not_find():
    index, queries = built("IVF16,Flat"), vectors(3, seed=1)
    request = index.request(ROWS)
    similarities, ids, paths, _ = index.search_with_metadata(queries, request)  # one list of sixteen is looked at
    expected, expected_ids = index.search(queries, ROWS)
    assert torch.equal(similarities, expected)
    assert torch.equal(ids, expected_ids)
    assert (ids == -1).any(1).all()
    assert ((ids == -1) == similarities.isneginf()).all()
    for row, found in zip(ids, paths):
        assert found == index.paths(row[row >= 0]) + [""] * int((row < 0).sum())


@pytest.mark.parametrize("factory", ["IVF4,Flat", "PQ1x4", "HNSW8"])
def test_recall_agrees_with_exact_search(factory):
    """Of so few rows that each is a query; a query that does not find itself has ten results all the same."""
    rows = vectors(250)
    index = RetrievalIndex(DIM, factory)
    index.add(rows, ids=1000 - torch.arange(250))
    unit = rows / rows.norm(dim=1, keepdim=True)
    nearest = NearestNeighbors(n_neighbors=11, algorithm="brute").fit(unit).kneighbors(unit, return_distance=False)
    hits = 0
    for position, found in enumerate(index.search(rows, 11)[1].tolist()):
        true = {1000 - other for other in nearest[position] if other != position}
        others = [other for other in found if other != 1000 - position]
        hits += len(true & set(others[:10]))
    assert index.recall == pytest.approx(hits / 2500, abs=2e-3)  # near ties may differ in float32
    assert 0.1 < index.recall <= 1


def test_recall_of_a_sample_of_many_rows_and_of_one_row():
    rows = vectors(9000, 4)
    index = RetrievalIndex(4, "IVF4,Flat", parameters="nprobe=4")
    index.add(rows)
    assert index.recall == pytest.approx(1, abs=1e-3)  # all lists are searched
    index = RetrievalIndex(DIM, "HNSW8")
    index.add(vectors(1))
    assert index.recall is None
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]


@pytest.mark.parametrize(("factory", "shards"), [("Flat", 1), ("PCA16,IVF4,SQ8", 2)])
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
