"""RetrievalIndex: exact ranking by NumPy, recall by scikit-learn, shards, files and back, and invalid input."""

import copy
import pickle
import threading
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search.store import index as index_module
from lightning_retrieval.search.store import rows as rows_module
from lightning_retrieval.search.store.index import measure_recall
from tests.lightning_retrieval.search.store.vectors import (
    DIM,
    FACTORIES,
    ROWS,
    built,
    exact,
    memory,
    newly_built,
    search_while_edited,
    vectors,
)


@pytest.mark.parametrize(("shards", "block"), [(1, 1 << 16), (3, 7)])
def test_flat_index_ranks_as_exact_search_does(shards, block, monkeypatch):
    monkeypatch.setattr(rows_module, "BLOCK", block)
    index, queries = built(shards=shards), vectors(20, seed=1)
    assert [part.ntotal for part in index.faiss_indexes] == {1: [600], 3: [200] * 3}[shards]
    similarities, ids = index.search(queries, 9)
    expected, positions = exact(vectors(), queries, 9)
    assert np.allclose(similarities.numpy(), expected, atol=1e-6)
    assert ids.tolist() == (1000 - positions).tolist()
    assert index.paths(ids[3]) == [f"é/{position}.jpg" for position in positions[3]]
    assert (len(index), index.recall, ids.dtype) == (600, None, torch.int64)


def test_half_precision_and_strided_queries():
    index, queries = built(), vectors(20, seed=1)
    assert torch.equal(index.search(queries.half(), 3)[1], index.search(queries.half().float(), 3)[1])
    assert torch.equal(index.search(queries.T.contiguous().T, 3)[1], index.search(queries, 3)[1])
    assert [part.shape for part in index.search(queries[:0], 3)] == [(0, 3), (0, 3)]


DTYPES = [np.float16, np.float32, np.float64, np.dtype(np.float32).newbyteorder()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_may_be_arrays_and_one_vector_is_one_query(dtype):
    index, queries = built(), vectors(20, seed=1).half()
    array = queries.numpy().astype(dtype)
    array.setflags(write=False)  # as arrays over a file are
    similarities, ids = index.search(queries, 3)
    assert torch.equal(index.search(array, 3)[1], ids)
    assert torch.equal(index.search(array[::-1], 3)[1], ids.flip(0))
    for vector in (queries[7], array[7]):
        found = index.search_with_metadata(vector, index.request(3), [])
        torch.testing.assert_close(found[0], similarities[7:8])
        assert torch.equal(found[1], ids[7:8])
        assert found[2] == [index.paths(ids[7])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factory", ["Flat", "IVF4,SQ8"])
def test_rows_and_ids_may_be_arrays_of_a_file(dtype, factory, tmp_path):
    """Of each byte order, read-only and mapped: the index is that of a tensor with the same numbers."""
    rows, ids = vectors().half(), torch.arange(ROWS).flip(0)
    np.save(tmp_path / "rows.npy", rows.numpy().astype(dtype))
    mapped, numbers = np.load(tmp_path / "rows.npy", mmap_mode="r"), ids.numpy().astype(">i4")
    expected, *indexes = (RetrievalIndex(DIM, factory) for _ in range(3))
    expected.add(rows, ids)
    indexes[0].add(mapped, numbers)
    if factory == "Flat":
        indexes[1].add(mapped[::2], numbers[::2])
        indexes[1].add(mapped[1::2], numbers[1::2])
    else:
        indexes[1].build_on_disk(tmp_path / "index", mapped, numbers)
    for index in indexes:
        found, wanted = index.search(vectors(9, seed=1), 5), expected.search(vectors(9, seed=1), 5)
        assert index.recall == expected.recall
        torch.testing.assert_close(found[0], wanted[0])  # float64 is normalised in float64
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(index.embeddings(numbers[:7]), expected.embeddings(ids[:7]))
        assert index.paths(numbers[:2]) == ["", ""]
    indexes[0].remove(numbers[:-3])
    assert indexes[0].ids.tolist() == [0, 1, 2]


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


def test_rows_come_back_after_a_removal_and_from_an_empty_index():
    index = built()
    index.remove(torch.tensor([1000, 998]))
    added = vectors() / vectors().norm(dim=1, keepdim=True)
    torch.testing.assert_close(index.embeddings(torch.tensor([999, 401])), added[[1, 599]], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"^RetrievalIndex: `ids` must be in the index, got 998, which is not"):
        index.embeddings(torch.tensor([999, 998]))
    assert RetrievalIndex(4).embeddings().shape == (0, 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))])
def test_pickle_and_copy(copied):
    index = newly_built("IVF4,Flat", shards=2)
    other = copied(index)
    assert repr(other) == repr(index)
    assert torch.equal(other.search(vectors(9, seed=1), 7)[1], index.search(vectors(9, seed=1), 7)[1])
    other.remove(other.ids[:100])
    assert (len(index), sum(part.ntotal for part in index.faiss_indexes)) == (ROWS, ROWS)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_loaded_index_gives_the_same_results_and_its_rows(factory, tmp_path):
    index, queries = built(factory, shards=2), vectors(9, seed=1)
    index.about = {"checkpoint": "x.ckpt", "not valid UTF-8": "\udc80\n"}
    index.save(tmp_path / "a" / "index")
    mapped, read = (RetrievalIndex.load(tmp_path / "a" / "index", mapped=mapped) for mapped in (True, False))
    added = vectors() / vectors().norm(dim=1, keepdim=True)
    atol = {"Flat": 1e-6, "IVF4,Flat": 1e-6, "HNSW8": 1e-6, "IVF4,PQ4x4,RFlat": 1e-6, "SQ8": 0.01}.get(factory, 0.8)
    ids = torch.tensor([1000, 600, 401, 777, 600])
    for other in (mapped, read):
        assert repr(other) == repr(index)
        assert other.about == index.about
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


def pretend_training(shard):
    """Leave the centroids of product quantisation zero, and take any rows for those of inverted lists."""
    shard.is_trained = True
    if isinstance(shard, faiss.IndexIVF):
        shard.quantizer.add(vectors(8, 32).numpy())
    for name in ("index", "base_index"):
        if hasattr(shard, name):
            pretend_training(faiss.downcast_index(getattr(shard, name)))


@pytest.mark.parametrize(
    ("factory", "row", "besides"),  # as docs/scaling.md has them
    [
        ("Flat", 4 * 32 + 8, 0),
        ("SQfp16", 2 * 32 + 8, 0),
        ("SQ8", 32 + 8, 8 * 32),
        ("PQ2", 2 + 8, 1024 * 32),
        ("IVF8,Flat", 4 * 32 + 8, 4 * 8 * 32),
        ("IVF8,PQ2", 2 + 8, 4 * 8 * 32 + 1024 * 32),
        ("IVF8,PQ2,RFlat", 2 + 8 + 4 * 32 + 8, 4 * 8 * 32 + 1024 * 32),
        ("HNSW16", 4 * 32 + 8 + 8 * 16 + 16, 0),
    ],
)
def test_bytes_of_a_row_are_those_of_the_documentation(factory, row, besides, tmp_path):
    index = RetrievalIndex(32, factory)
    if "PQ" in factory:  # whose training takes seconds, and the size does not depend on it
        pretend_training(index.faiss_indexes[0])
    index.add(vectors(ROWS, 32))
    index.save(tmp_path)
    (file,) = tmp_path.glob("*/vectors-0.faiss")
    assert file.stat().st_size == pytest.approx(ROWS * row + besides, abs=1000 + ROWS * ("HNSW" in factory))
    others = sum(path.stat().st_size for path in file.parent.glob("*.npy"))
    assert others == pytest.approx(ROWS * 16, abs=500)


@pytest.mark.refusal
def test_a_mapped_index_cannot_be_changed(tmp_path):
    built().save(tmp_path / "index")
    index = RetrievalIndex.load(tmp_path / "index", mapped=True)
    for change in (lambda: index.add(vectors(1)), lambda: index.remove(index.ids[:1]), lambda: index.save(tmp_path)):
        with pytest.raises(ValueError, match=r"mapped into memory; load it with mapped=False\.$"):
            change()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(("factory", "rows"), [("Flat", 20_000), ("IVF4,Flat", 5_000), ("HNSW4", 3_000)])
def test_a_mapped_index_takes_little_memory(factory, rows, tmp_path):
    index = RetrievalIndex(512, factory)
    index.add(torch.randn(rows, 512))
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


NAN_ROWS = vectors(8).index_put((torch.tensor([2, 5]),), torch.tensor(float("nan")))
TWO = vectors(2)


@pytest.mark.refusal
def test_invalid_input_raises_and_changes_nothing():
    index = built(rows=50)
    for method, arguments, message in [
        (index.add, (NAN_ROWS, torch.arange(8) + 40), r"NaN or inf in 2 of 8 rows: id 42, id 45\.$"),
        (index.add, (NAN_ROWS, None, list("abcdefgh")), r"2 of 8 rows: id 1003 'c', id 1006 'f'\.$"),
        (index.add, (vectors(2, 8),), r"`embeddings` must have shape \(rows, 16\).*got \(2, 8\)"),
        (index.add, (TWO.long(),), "`embeddings` must be floating point, got torch.int64"),
        (index.add, (TWO, torch.tensor([1, 1])), "`ids` must differ, got 1 for several rows"),
        (index.add, (TWO, torch.tensor([1, -1])), "`ids` must be >= 0, got -1"),
        (index.add, (TWO, torch.tensor([1, 999])), "got 1 that are in the index, such as 999"),
        (index.add, (TWO, torch.tensor([1])), r"`ids` must have shape \(2,\)"),
        (index.add, (TWO, torch.rand(2)), "`ids` must be integers, got torch.float32"),
        (index.add, (TWO, None, ["a"]), "`paths` must have one entry for each of 2 rows, got 1"),
        (index.add, (TWO, None, ["a", 1]), r"`paths` must hold strings only, got 1 \(int\)"),
        (index.search, (NAN_ROWS, 1), r"NaN or inf in 2 of 8 rows: id 2, id 5\.$"),
        (index.search, (TWO, 51), "`k` must be at most the number of rows in the index, 50, got"),
        (index.search, (vectors(2, 8), 1), r"`queries` must have shape \(rows, 16\).*got \(2, 8\)"),
        (index.search, (np.zeros(8), 1), r"`queries` must have .* or \(16,\) for one vector, .* got \(8,\)"),
        (index.search, (np.zeros(16, int), 1), "`queries` must have the dtype float16, .*, got int64"),
        (index.add, (np.zeros((2, 16), int),), "`embeddings` must have the dtype float16, .*, got int64"),
        (index.add, (np.zeros((2, 8)),), r"`embeddings` must have shape \(rows, 16\).*got \(2, 8\)"),
        (index.add, (np.full((2, 16), np.nan),), "NaN or inf in 2 of 2 rows"),
        (index.add, (TWO, np.array([1.0, 2.0])), "`ids` must be integers, got torch.float64"),
        (index.add, (TWO, np.array(["1", "2"])), "`ids` must be integers, got a NumPy array of <U1"),
        (index.add, (TWO, np.array([1, 1], ">i2")), "`ids` must differ, got 1 for several rows"),
        (index.remove, (torch.tensor([999, 3]),), "`ids` must be in the index, got 3, which is not"),
        (index.remove, (torch.tensor([999.0]),), "`ids` must be integers, got torch.float32"),
        (index.paths, (torch.tensor([5000]),), "`ids` must be in the index, got 5000, which is not"),
        (index.paths, (np.array([999.5]),), "`ids` must be integers, got torch.float64"),
    ]:
        with pytest.raises((ValueError, TypeError), match=rf"^RetrievalIndex: .*{message}"):
            method(*arguments)
        assert len(index) == index.faiss_indexes[0].ntotal == 50
        assert index.ids.tolist() == list(range(951, 1001))


@pytest.mark.refusal
def test_invalid_factories_and_parameters_raise():
    invalid = {"Flatt": "could not parse index string", "PQ5": "of 16 numbers, got", "IDMap,Flat": "so omit IDMap"}
    for factory in ("HNSW8,PQ4", "HNSW8_PQ4", "NSG8,PQ4", "ZnLattice2x4_4", "PCA8,HNSW8,PQ4", "HNSW8,PQ4,RFlat"):
        invalid[factory] = f"inner products for, got '{factory}', which gives Euclidean distances"
    for factory, message in invalid.items():
        with pytest.raises(ValueError, match=rf"`factory` must be .*{message}"):
            RetrievalIndex(DIM, factory)
    counts = {"IVF4,Flat": "nprobe", "HNSW8": "efSearch", "IVF4_HNSW4,Flat": "quantizer_efSearch"}
    for factory, name in counts.items():
        for value in ("0", "-1", "1.5", "1e30", ""):
            with pytest.raises(ValueError, match=f"must set {name} to an integer from 1 "):
                RetrievalIndex(DIM, factory, parameters=f"{name}={value}")
    with pytest.raises(ValueError, match=r"`parameters` must be those that faiss has for 'Flat'.*'nprobe=3'"):
        RetrievalIndex(DIM, parameters="nprobe=3")


def test_parameters_can_be_changed_after_loading(tmp_path):
    built("IVF16,Flat", shards=2).save(tmp_path)
    index, queries = RetrievalIndex.load(tmp_path, mapped=True), vectors(20, seed=1)
    index.set_parameters("nprobe=16")
    assert index.search(queries, 9)[1].tolist() == (1000 - exact(vectors(), queries, 9)[1]).tolist()
    with pytest.raises(ValueError, match=r"`parameters` must be those that faiss has for .*'nprobe=1,ef=3'"):
        index.set_parameters("nprobe=1,ef=3")
    assert index.search(queries, 9)[1].tolist() == (1000 - exact(vectors(), queries, 9)[1]).tolist()
    assert index.parameters == "nprobe=16"


def test_codes_are_ordered_for_hamming_distances_only_where_the_parameters_use_them():
    """With faiss itself as the witness, where the order is the default, and "np" leaves it out."""
    rows, queries = (rows_module.normalized_rows(x) for x in (vectors(), vectors(20, seed=1)))
    results = []
    for parameters, trained in (("nprobe=2", "IVF4,PQ2x4np"), ("nprobe=2,ht=7", "IVF4,PQ2x4")):
        plain = faiss.index_factory(DIM, trained, faiss.METRIC_INNER_PRODUCT)
        faiss.ParameterSpace().set_index_parameters(plain, parameters)
        plain.train(rows)
        plain.add(rows)
        index = RetrievalIndex(DIM, "IVF4,PQ2x4", parameters=parameters)
        index.add(vectors())
        centroids = [faiss.vector_to_array(each.pq.centroids) for each in (plain, index.faiss_indexes[0])]
        assert centroids[0].tolist() == centroids[1].tolist()
        expected, found = plain.search(queries, 7), index.search(vectors(20, seed=1), 7)
        assert all((mine.numpy() == its).all() for mine, its in zip(found, expected))
        plain.polysemous_ht = 0
        results.append((plain.search(queries, 7)[0].tolist(), centroids[0].tolist()))
    assert results[0][1] != results[1][1]  # or the test would show nothing
    assert results[0][0] == results[1][0]  # similarities do not depend on the order of the codes


@pytest.mark.refusal
def test_hamming_distances_need_an_index_that_was_built_for_them():
    index = built("IVF4,PQ4x4")
    with pytest.raises(ValueError, match=r"`parameters` must not set ht in an index .* without it, .*'nprobe=2, ht=9'"):
        index.set_parameters("nprobe=2, ht=9")
    assert index.parameters == ""
    ordered = RetrievalIndex(DIM, "IVF4,PQ4x4", parameters="ht=16")
    ordered.set_parameters("nprobe=2,ht=9")
    assert ordered.faiss_indexes[0].polysemous_ht == 9


def test_a_search_sees_one_state_while_another_thread_edits():
    index = RetrievalIndex(DIM, "IVF4,Flat", parameters="nprobe=4", shards=3)
    index.add(vectors(), torch.arange(ROWS), [f"{row}.jpg" for row in range(ROWS)], columns={"row": range(ROWS)})
    assert search_while_edited(index, 100) == []


def test_an_index_can_be_read_while_another_thread_reads_and_waits_to_edit():
    index = built()
    with index._lock.reading():
        thread = threading.Thread(target=index.remove, args=(index.ids[:1],))
        reader = threading.Thread(target=index.search, args=(vectors(1), 1))
        with index._lock.reading():
            pass
        thread.start()
        reader.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert len(index) == ROWS
    thread.join()
    reader.join()
    assert len(index) == ROWS - 1


def test_the_paths_of_what_a_search_finds_and_marks_of_what_it_does_not_find():
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


@pytest.mark.parametrize("factory", FACTORIES[1:])
def test_recall_agrees_with_exact_search(factory, monkeypatch):
    monkeypatch.setattr(index_module, "RECALL_QUERIES", ROWS)  # all rows, so that no sample has to be repeated here
    monkeypatch.setattr(rows_module, "BLOCK", 100)
    monkeypatch.setattr(index_module, "SMALL_BLOCK", 70)
    index, gallery = newly_built(factory), vectors()
    unit = gallery / gallery.norm(dim=1, keepdim=True)
    nearest = NearestNeighbors(n_neighbors=11, algorithm="brute").fit(unit).kneighbors(unit, return_distance=False)
    found = index.search(gallery, 11)[1].tolist()
    hits = 0
    for position in range(ROWS):
        true = {1000 - other for other in nearest[position] if other != position}
        hits += len(true & {other for other in found[position] if other != 1000 - position})
    assert index.recall == pytest.approx(hits / (10 * ROWS), abs=2e-3)  # near ties may differ in float32
    assert 0.1 < index.recall <= 1


def test_recall_counts_ten_results_if_a_query_does_not_find_itself():
    rows = vectors(100)
    positions = exact(rows, rows, 100)[1][:, 1:]  # without the query itself
    found = np.concatenate([positions[:, -1:], positions[:, :10]], 1)  # one that is far, then the ten nearest

    def search(queries, k):
        assert (len(queries), k) == (100, 11)
        return torch.zeros(found.shape), torch.from_numpy(found)

    assert measure_recall(search, rows, np.arange(100)) == pytest.approx(0.9)


def test_one_row_has_no_recall():
    index = RetrievalIndex(DIM, "HNSW8")
    index.add(vectors(1))
    assert index.recall is None
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]


@pytest.mark.parametrize(("factory", "shards"), [("Flat", 1), ("IVF4,Flat", 2), ("PCA16,IVF4,SQ8", 2), ("SQ8", 2)])
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
def test_changes_that_faiss_cannot_make_raise_and_change_nothing():
    for factory in ("HNSW8", "IVF4,PQ4x4,RFlat"):
        index = built(factory, shards=2)
        with pytest.raises(ValueError, match=rf"^RetrievalIndex: rows cannot be removed .* '{factory}'"):
            index.remove(torch.tensor([1000]))
        assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == ROWS
    for factory, message in (
        ("IVF100,Flat", "`factory` 'IVF100,Flat' must be trained, for which 50 rows are not enough"),
        ("PQ1x6", "`factory` 'PQ1x6' must be trained, for which 50 rows are not enough"),
        ("NSG8", "50 rows cannot be added to an index of 'NSG8' that holds 0"),
    ):
        index = RetrievalIndex(DIM, factory, shards=2)
        with pytest.raises(ValueError, match=f"^RetrievalIndex: {message}"):
            index.add(vectors(50))
        assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 0
        index.add(vectors(600))
        assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 600
    with pytest.raises(ValueError, match=r"^RetrievalIndex: 3 rows cannot be added to .* 'NSG8' that holds 600"):
        index.add(vectors(3))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 600


@pytest.mark.refusal
def test_errors_of_faiss_during_a_search_are_sentences():
    index = built("IVF4,Flat", shards=2)
    for part in index.faiss_indexes:
        part.nprobe = 0  # past set_parameters, which rejects it
    with pytest.raises(ValueError, match=r"^RetrievalIndex: faiss cannot search for the 3 nearest rows \(.*nprobe"):
        index.search(vectors(2), 3)


def test_the_largest_ids():
    index = RetrievalIndex(DIM)
    index.add(vectors(1), torch.tensor([2**63 - 3]))
    index.add(vectors(2))
    assert index.ids.tolist() == [2**63 - 3, 2**63 - 2, 2**63 - 1]
    with pytest.raises(ValueError, match=rf"`ids` must be given, .* after the largest id, {2**63 - 1}\.$"):
        index.add(vectors(1))
    index.add(vectors(0))
    index.add(vectors(1), torch.tensor([0]))
    assert index.ids[:2].tolist() == [0, 2**63 - 3]
