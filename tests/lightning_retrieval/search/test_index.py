"""RetrievalIndex against exact ranking by NumPy, through files and back, and its messages about invalid input."""

import copy
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search import rows as rows_module
from tests.lightning_retrieval.search.vectors import (
    DIM,
    FACTORIES,
    ROWS,
    built,
    exact,
    memory,
    search_while_edited,
    vectors,
)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("block", [7, 1 << 16])
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


def test_approximate_search_marks_what_it_does_not_find():
    similarities, ids = built("IVF16,Flat").search(vectors(3, seed=1), ROWS)  # one list of sixteen is looked at
    assert ((ids == -1) == similarities.isneginf()).all()
    assert (ids == -1).any(1).all()


def test_rows_are_added_in_several_parts():
    rows, index = vectors(), RetrievalIndex(DIM, shards=2)
    index.add(rows[:10])
    index.add(rows[10:20], ids=torch.arange(400, 390, -1), paths=[f"{i}" for i in range(10, 20)])
    index.add(rows[20:30])
    index.add(rows[:0])
    ids = [*range(10), *range(391, 411)]
    assert index.ids.tolist() == ids
    assert index.search(rows[[3, 12, 25]], 1)[1][:, 0].tolist() == [3, 398, 406]
    assert index.paths(torch.tensor([398, 3, 391, 406])) == ["12", "", "19", ""]


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(("shards", "mapped"), [(1, False), (3, True)])
def test_rows_come_back_by_id(factory, shards, mapped, tmp_path):
    index = built(factory, shards=shards, parameters="")
    index.save(tmp_path / "i")
    index = RetrievalIndex.load(tmp_path / "i", mapped=mapped)
    added = vectors() / vectors().norm(dim=1, keepdim=True)
    ids = torch.tensor([1000, 600, 401, 777, 600])
    found = index.embeddings(ids)
    atol = {"Flat": 1e-6, "IVF4,Flat": 1e-6, "HNSW8": 1e-6, "IVF4,PQ4x4,RFlat": 1e-6, "SQ8": 0.01}.get(factory, 0.8)
    torch.testing.assert_close(found, added[1000 - ids], rtol=0, atol=atol)
    cosines = torch.nn.functional.cosine_similarity(found, added[1000 - ids])
    assert cosines.mean() > 0.5  # also those of codes are near what was added
    everything = index.embeddings()
    torch.testing.assert_close(everything, added.flip(0), rtol=0, atol=atol)
    assert torch.equal(everything[index.ids == 777][0], found[3])
    assert index.paths(ids)[2] == "é/599.jpg"
    before = built(factory, shards=shards).search(added[:3], 1)
    assert torch.equal(index.search(added[:3], 1)[1], before[1])  # the search is as it was


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
    index = built("IVF4,Flat", shards=2)
    other = copied(index)
    assert repr(other) == repr(index)
    assert torch.equal(other.search(vectors(9, seed=1), 7)[1], index.search(vectors(9, seed=1), 7)[1])
    other.remove(other.ids[:100])
    assert (len(index), sum(part.ntotal for part in index.faiss_indexes)) == (ROWS, ROWS)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_loaded_index_gives_the_same_results(factory, mapped, tmp_path):
    index = built(factory, shards=2, about={"checkpoint": "x.ckpt", "odd": "\udc80\n"})
    index.save(tmp_path / "a" / "index")
    other = RetrievalIndex.load(tmp_path / "a" / "index", mapped=mapped)
    assert repr(other) == repr(index)
    assert other.about == index.about
    for mine, its in zip(index.search(vectors(9, seed=1), 7), other.search(vectors(9, seed=1), 7)):
        assert torch.equal(mine, its)
    assert other.paths(other.ids) == index.paths(index.ids)
    if not mapped:
        other.add(vectors(2, seed=1))
        assert other.ids[-2:].tolist() == [1001, 1002]


@pytest.mark.slow
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
@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "HNSW4"])
def test_a_mapped_index_takes_little_memory(factory, tmp_path):
    index = RetrievalIndex(512, factory)
    index.add(torch.randn(20_000 if factory != "HNSW4" else 3_000, 512))
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


def test_rows_may_lie_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "BLOCK", 64)
    vectors().numpy().tofile(tmp_path / "rows")
    rows = torch.from_file(str(tmp_path / "rows"), size=ROWS * DIM).view(ROWS, DIM)
    index = RetrievalIndex(DIM, "IVF4,Flat")
    index.add(rows)
    same = RetrievalIndex(DIM, "IVF4,Flat")
    same.add(vectors())
    assert torch.equal(index.search(vectors(5, seed=1), 3)[1], same.search(vectors(5, seed=1), 3)[1])


NAN_ROWS = vectors(8).index_put((torch.tensor([2, 5]),), torch.tensor(float("nan")))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda i: i.add(NAN_ROWS, torch.arange(8) + 40), ValueError, r"NaN or inf in 2 of 8 rows: id 42, id 45\.$"),
        (lambda i: i.add(NAN_ROWS, paths=list("abcdefgh")), ValueError, r"2 of 8 rows: id 1003 'c', id 1006 'f'\.$"),
        (lambda i: i.search(NAN_ROWS, 1), ValueError, r"NaN or inf in 2 of 8 rows: id 2, id 5\.$"),
        (
            lambda i: i.search(vectors(2), 51),
            ValueError,
            "`k` must be at most the number of rows in the index, 50, got",
        ),
        (lambda i: i.search(vectors(2), 0), ValueError, "`k` must be an integer >= 1, got 0"),
        (lambda i: i.search(vectors(2, 8), 1), ValueError, r"`queries` must have shape \(rows, 16\).*got \(2, 8\)"),
        (lambda i: i.add(vectors(2, 8)), ValueError, r"`embeddings` must have shape \(rows, 16\).*got \(2, 8\)"),
        (lambda i: i.add(vectors(2)[0]), ValueError, r"got \(16,\)"),
        (lambda i: i.add(vectors(2).long()), TypeError, "`embeddings` must be floating point, got torch.int64"),
        (lambda i: i.add([1.0]), TypeError, "`embeddings` must be a tensor, got list"),
        (lambda i: i.add(vectors(2), torch.tensor([1, 1])), ValueError, "`ids` must differ, got 1 for several rows"),
        (lambda i: i.add(vectors(2), torch.tensor([1, -1])), ValueError, "`ids` must be >= 0, got -1"),
        (lambda i: i.add(vectors(2), torch.tensor([1, 999])), ValueError, "got 1 that are in the index, such as 999"),
        (lambda i: i.add(vectors(2), torch.tensor([1])), ValueError, r"`ids` must have shape \(2,\)"),
        (lambda i: i.add(vectors(2), torch.rand(2)), TypeError, "`ids` must be integers, got torch.float32"),
        (lambda i: i.add(vectors(2), paths=["a"]), ValueError, "`paths` must have one entry for each of 2 rows, got 1"),
        (lambda i: i.add(vectors(3), paths="abc"), TypeError, r"`paths` must be a sequence of strings, got one str\.$"),
        (lambda i: i.add(vectors(2), paths=["a", 1]), TypeError, r"`paths` must hold strings only, got 1 \(int\)"),
        (lambda i: i.remove(torch.tensor([999, 3])), ValueError, "`ids` must be in the index, got 3, which is not"),
        (lambda i: i.paths(torch.tensor([5000])), ValueError, "`ids` must be in the index, got 5000, which is not"),
    ],
)
def test_invalid_input_raises_and_changes_nothing(call, kind, message):
    index = built(rows=50)
    with pytest.raises(kind, match=rf"^RetrievalIndex: .*{message}"):
        call(index)
    assert len(index) == index.faiss_indexes[0].ntotal == 50
    assert index.ids.tolist() == list(range(951, 1001))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"dim": 0}, ValueError, "`dim` must be an integer >= 1, got 0"),
        ({"shards": 0}, ValueError, "`shards` must be an integer >= 1, got 0"),
        ({"shards": 1.5}, TypeError, "`shards` must be an integer >= 1, got 1.5"),
        ({"factory": "Flatt"}, ValueError, r"got 'Flatt' \(could not parse index string"),
        ({"factory": "PQ5"}, ValueError, r"of 16 numbers, got 'PQ5' \(The dimension of the vector .* multiple of"),
        *(
            ({"factory": factory}, ValueError, f"inner products for, got '{factory}', which gives Euclidean distances")
            for factory in ("HNSW8,PQ4", "HNSW8_PQ4", "NSG8,PQ4", "ZnLattice2x4_4", "PCA8,HNSW8,PQ4", "HNSW8,PQ4,RFlat")
        ),
        ({"factory": "IDMap,Flat"}, ValueError, "so omit IDMap"),
        ({"factory": 3}, TypeError, r"`factory` must be a string, such as 'Flat', got 3 \(int\)"),
        ({"parameters": 3}, TypeError, r"`parameters` must be a string, such as 'nprobe=16', got 3 \(int\)"),
        *(
            (
                {"factory": factory, "parameters": f"{name}={value}"},
                ValueError,
                f"must set {name} to an integer from 1 ",
            )
            for factory, name in (
                ("IVF4,Flat", "nprobe"),
                ("HNSW8", "efSearch"),
                ("IVF4_HNSW4,Flat", "quantizer_efSearch"),
            )
            for value in ("0", "-1", "1.5", "1e30", "")
        ),
        ({"parameters": "nprobe=3"}, ValueError, "`parameters` must be those that faiss has for 'Flat'.*'nprobe=3'"),
    ],
)
def test_invalid_settings_raise(settings, kind, message):
    with pytest.raises(kind, match=message):
        RetrievalIndex(**{"dim": DIM, **settings})


@pytest.mark.parametrize("mapped", [False, True])
def test_parameters_can_be_changed_after_loading(mapped, tmp_path):
    built("IVF16,Flat", shards=2).save(tmp_path)
    index, queries = RetrievalIndex.load(tmp_path, mapped=mapped), vectors(20, seed=1)
    index.set_parameters("nprobe=16")
    assert index.search(queries, 9)[1].tolist() == (1000 - exact(vectors(), queries, 9)[1]).tolist()
    with pytest.raises(
        ValueError, match=r"`parameters` must be those that faiss has for 'IVF16,Flat'.*'nprobe=1,ef=3'"
    ):
        index.set_parameters("nprobe=1,ef=3")
    assert index.search(queries, 9)[1].tolist() == (1000 - exact(vectors(), queries, 9)[1]).tolist()
    assert index.parameters == "nprobe=16"


@pytest.mark.parametrize(("factory", "shards"), [("Flat", 1), ("IVF4,Flat", 3)])
def test_a_search_sees_one_state_while_another_thread_edits(factory, shards):
    index = RetrievalIndex(DIM, factory, parameters="nprobe=4" * (factory != "Flat"), shards=shards)
    index.add(vectors(), torch.arange(ROWS), [f"{row}.jpg" for row in range(ROWS)])
    assert search_while_edited(index, 300) == []


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


def test_the_paths_of_what_a_search_finds():
    index, queries = built("IVF16,Flat"), vectors(3, seed=1)
    similarities, ids, paths = index.search_with_paths(queries, ROWS)  # one list of sixteen is looked at
    expected, expected_ids = index.search(queries, ROWS)
    assert torch.equal(similarities, expected)
    assert torch.equal(ids, expected_ids)
    assert (ids == -1).any(1).all()
    for row, found in zip(ids, paths):
        assert found == index.paths(row[row >= 0]) + [""] * int((row < 0).sum())
