"""RetrievalIndex: against exact ranking by NumPy, through files and back, and what is said to bad input."""

import copy
import fcntl
import json
import os
import pickle
import re
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search import index as module

ROWS, DIM = 600, 16
FACTORIES = ["Flat", "IVF4,Flat", "IVF4,PQ4x4", "HNSW8", "SQ8", "PCA8,IVF4,SQ8", "IVF4,PQ4x4,RFlat"]


@pytest.fixture(autouse=True)
def one_thread():
    """k-means of a few rows waits for threads more than it computes, above all where others use the cores as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def vectors(rows=ROWS, dim=DIM, seed=0):
    """Not of unit length: the index has to see to that."""
    return 3 * torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def exact(gallery, queries, k):
    """Similarities and places of the k nearest, in float64, by NumPy alone."""
    a, b = (x.double().numpy() for x in (queries, gallery))
    scores = (a / np.linalg.norm(a, axis=1)[:, None]) @ (b / np.linalg.norm(b, axis=1)[:, None]).T
    places = np.argsort(-scores, axis=1)[:, :k]
    return np.take_along_axis(scores, places, 1), places


def built(factory="Flat", rows=ROWS, **settings):
    index = RetrievalIndex(DIM, factory, **settings)
    index.add(vectors(rows), ids=1000 - torch.arange(rows), paths=[f"é/{i}.jpg" for i in range(rows)])
    return index


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("block", [7, 1 << 16])
def test_flat_ranks_as_exact_search_does(shards, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    index, queries = built(shards=shards), vectors(20, seed=1)
    assert [part.ntotal for part in index.faiss_indexes] == {1: [600], 3: [200] * 3}[shards]
    similarities, ids = index.search(queries, 9)
    expected, places = exact(vectors(), queries, 9)
    assert np.allclose(similarities.numpy(), expected, atol=1e-6)
    assert ids.tolist() == (1000 - places).tolist()
    assert index.paths(ids[3]) == [f"é/{place}.jpg" for place in places[3]]
    assert (len(index), index.recall, ids.dtype) == (600, None, torch.int64)


def test_half_precision_and_strided_queries():
    index, queries = built(), vectors(20, seed=1)
    assert torch.equal(index.search(queries.half(), 3)[1], index.search(queries.half().float(), 3)[1])
    assert torch.equal(index.search(queries.T.contiguous().T, 3)[1], index.search(queries, 3)[1])
    assert [part.shape for part in index.search(queries[:0], 3)] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("factory", FACTORIES[1:])
def test_recall_is_that_against_exact_search(factory, monkeypatch):
    monkeypatch.setattr(module, "RECALL_QUERIES", ROWS)  # all of them, so that a witness knows which
    monkeypatch.setattr(module, "BLOCK", 100)
    index, gallery = built(factory), vectors()
    unit = gallery / gallery.norm(dim=1, keepdim=True)
    nearest = NearestNeighbors(n_neighbors=11, algorithm="brute").fit(unit).kneighbors(unit, return_distance=False)
    found = index.search(gallery, 11)[1].tolist()
    hits = 0
    for place in range(ROWS):
        true = {1000 - other for other in nearest[place] if other != place}
        hits += len(true & {other for other in found[place] if other != 1000 - place})
    assert index.recall == pytest.approx(hits / (10 * ROWS), abs=2e-3)  # float32 decides near ties its own way
    assert 0.1 < index.recall <= 1


def test_parameters_of_the_search_raise_recall():
    little, much = built("IVF16,Flat"), built("IVF16,Flat", parameters="nprobe=16")
    assert little.recall < 0.8
    assert much.recall == 1


def test_approximate_search_marks_what_it_does_not_find():
    similarities, ids = built("IVF16,Flat").search(vectors(3, seed=1), ROWS)  # one list of sixteen is looked at
    assert ((ids == -1) == similarities.isneginf()).all()
    assert (ids == -1).any(1).all()


def test_rows_come_in_several_parts():
    rows, index = vectors(), RetrievalIndex(DIM, shards=2)
    index.add(rows[:10])
    index.add(rows[10:20], ids=torch.arange(400, 390, -1), paths=[f"{i}" for i in range(10, 20)])
    index.add(rows[20:30])
    index.add(rows[:0])
    ids = [*range(10), *range(391, 411)]
    assert index.ids.tolist() == ids
    assert index.search(rows[[3, 12, 25]], 1)[1][:, 0].tolist() == [3, 398, 406]
    assert index.paths(torch.tensor([398, 3, 391, 406])) == ["12", "", "19", ""]


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
    index.add(vectors()[left:], ids=gone)  # there is room for them again
    assert index.search(vectors()[left:], 1)[1][:, 0].tolist() == gone.tolist()


@pytest.mark.refusal
@pytest.mark.parametrize("factory", ["HNSW8", "IVF4,PQ4x4,RFlat"])
def test_removal_is_refused_where_faiss_has_none(factory):
    index = built(factory, shards=2)
    with pytest.raises(ValueError, match=rf"rows cannot be removed from an index of '{factory}'.*Flat or IVF\.$"):
        index.remove(torch.tensor([1000]))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == ROWS


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))])
def test_pickles_and_copies(copied):
    index = built("IVF4,Flat", shards=2)
    other = copied(index)
    assert repr(other) == repr(index)
    assert torch.equal(other.search(vectors(9, seed=1), 7)[1], index.search(vectors(9, seed=1), 7)[1])
    other.remove(other.ids[:100])
    assert (len(index), sum(part.ntotal for part in index.faiss_indexes)) == (ROWS, ROWS)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("factory", FACTORIES)
def test_saved_and_loaded_it_answers_the_same(factory, mapped, tmp_path):
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
def test_a_mapped_index_is_not_changed(tmp_path):
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

    def anonymous():
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    before = anonymous()
    mapped = RetrievalIndex.load(tmp_path / "index", mapped=True)
    mapped.search(torch.randn(1, 512), 5)
    added = anonymous() - before
    assert size > 6e6
    assert added < max(size / 8, 3e6)


def test_rows_from_a_file_are_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 64)
    vectors().numpy().tofile(tmp_path / "rows")
    rows = torch.from_file(str(tmp_path / "rows"), size=ROWS * DIM).view(ROWS, DIM)
    index = RetrievalIndex(DIM, "IVF4,Flat")
    index.add(rows)
    same = RetrievalIndex(DIM, "IVF4,Flat")
    same.add(vectors())
    assert torch.equal(index.search(vectors(5, seed=1), 3)[1], same.search(vectors(5, seed=1), 3)[1])


def test_a_save_that_fails_leaves_the_old_index(tmp_path, monkeypatch):
    built(rows=50).save(tmp_path / "index")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    real, written = faiss.write_index, []

    def fails(part, path):
        written.append(path)
        if len(written) == 2:
            raise RuntimeError("no space left")
        real(part, path)

    monkeypatch.setattr(faiss, "write_index", fails)
    with pytest.raises(RuntimeError, match="no space left"):
        built(shards=2).save(tmp_path / "index")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert len(RetrievalIndex.load(tmp_path / "index")) == 50


NAMES = ["files", "lock", "manifest.json"]


def test_a_first_save_whose_process_was_ended_is_written_over(tmp_path):
    (tmp_path / "files-0badf00d").mkdir()
    (tmp_path / "files-0badf00d" / "vectors-0.faiss").write_bytes(b"half")
    (tmp_path / "lock").touch()
    built(rows=50).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 50
    assert len(os.listdir(tmp_path)) == 3
    (tmp_path / "manifest.json").write_text("damaged")
    built(rows=60).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 60


@pytest.mark.refusal
def test_one_save_at_a_time(tmp_path, monkeypatch):
    real, refused = faiss.write_index, []

    def amid(part, path):
        monkeypatch.setattr(faiss, "write_index", real)
        with pytest.raises(ValueError, match=r"^RetrievalIndex: .* is being written to by another process; wait"):
            built(rows=60).save(tmp_path)
        refused.append(path)
        real(part, path)

    monkeypatch.setattr(faiss, "write_index", amid)
    built(rows=50).save(tmp_path)
    assert len(refused) == 1
    assert len(RetrievalIndex.load(tmp_path)) == 50
    built(rows=60).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 60


def test_a_save_does_without_locks_where_the_file_system_has_none(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fails)
    built(rows=50).save(tmp_path)
    assert len(RetrievalIndex.load(tmp_path)) == 50


def test_all_is_on_the_disk_before_the_manifest_is_replaced(tmp_path, monkeypatch):
    flushed, at_replace, sync, replace = [], [], os.fsync, os.replace

    def fsync(descriptor):
        status = os.fstat(descriptor)
        flushed.append((status.st_ino, status.st_size))
        sync(descriptor)

    def replaces(*paths):
        at_replace.extend(flushed)
        replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaces)
    built(rows=50, shards=2).save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) == 6
    assert {(path.stat().st_ino, path.stat().st_size) for path in files} <= set(at_replace)
    folders = {path.stat().st_ino for path in (tmp_path, *tmp_path.glob("files-*"))}
    assert folders <= {inode for inode, _ in at_replace}
    assert len(flushed) == len(at_replace) + 1
    assert flushed[-1][0] == tmp_path.stat().st_ino


def test_a_save_clears_away_what_an_ended_process_left(tmp_path):
    built(rows=50).save(tmp_path / "index")
    (tmp_path / "index" / "files-0badf00d").mkdir()
    mapped = RetrievalIndex.load(tmp_path / "index", mapped=True)
    built(rows=60).save(tmp_path / "index")
    assert len(RetrievalIndex.load(tmp_path / "index")) == 60
    assert sorted(re.sub(r"-\w{8}$", "", name) for name in os.listdir(tmp_path / "index")) == NAMES
    assert mapped.search(vectors(1), 1)[1].tolist() == [[1000]]  # who has the old files open keeps them


FILES = ["vectors-0.faiss", "vectors-1.faiss", "ids.npy", "paths.npy", "path-ends.npy"]


@pytest.mark.refusal
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused(name, tmp_path):
    built(rows=50, shards=2).save(tmp_path)
    (file,) = tmp_path.glob(f"*/{name}")
    whole = file.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"RetrievalIndex: .*{name} is damaged, its checksum .*; build the index"):
            RetrievalIndex.load(tmp_path)
    file.write_bytes(whole[:-1])
    short = rf"{name} is damaged, it has {len(whole) - 1} bytes instead of {len(whole)}; build the index again\.$"
    with pytest.raises(ValueError, match=short):
        RetrievalIndex.load(tmp_path, verify=False)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"is damaged, files-\w+/{name} is missing"):
        RetrievalIndex.load(tmp_path)


@pytest.mark.refusal
def test_a_file_that_faiss_cannot_read_is_refused_without_its_checksum(tmp_path):
    built(rows=50).save(tmp_path)
    (file,) = tmp_path.glob("*/vectors-0.faiss")
    file.write_bytes(b"nope" + file.read_bytes()[4:])
    with pytest.raises(ValueError, match=r"faiss cannot read .*; build the index again\.$"):
        RetrievalIndex.load(tmp_path, verify=False)


@pytest.mark.refusal
def test_damaged_manifests_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"RetrievalIndex: the index must be a folder with manifest\.json in it"
    ):
        RetrievalIndex.load(tmp_path)
    built(rows=50).save(tmp_path)
    manifest = tmp_path / "manifest.json"
    whole = manifest.read_text()
    for text, said in [
        (whole[:-5], "is damaged, it is no JSON"),
        (whole.replace('"dim": 16', '"dim": 17'), "is damaged, its checksum is not the one written in it"),
        (whole.replace("lightning-retrieval index", "another"), "is not that of an index"),
        (json.dumps([1]), "is not that of an index"),
        (whole.replace('"version": 1', '"version": 2'), "has format version 2, but this release knows 1"),
    ]:
        assert text != whole
        manifest.write_text(text)
        with pytest.raises(ValueError, match=said):
            RetrievalIndex.load(tmp_path)


@pytest.mark.refusal
def test_nothing_else_is_written_over(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ValueError, match=r"must be written to a new folder or over an index, got .*something else"):
        built(rows=50).save(tmp_path)
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(tmp_path / "thesis.tex")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.refusal
@pytest.mark.parametrize("manifest", ['{"name": "extension"}', '{"files": {}, "format": "another"}', "[]", "no JSON"])
@pytest.mark.parametrize("beside", ["", "files-of-2024", "files-0badf00d0"])
def test_a_folder_with_a_manifest_of_something_else_is_not_written_over(manifest, beside, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / beside).mkdir(exist_ok=True)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "manifest.json").read_text() == manifest


@pytest.mark.refusal
def test_what_others_put_beside_an_index_stays(tmp_path):
    built(rows=50).save(tmp_path)
    for name in ("files-of-2024", "files-", "files-0badf00d0"):
        (tmp_path / name).mkdir()
    (tmp_path / "files-0badf00d").symlink_to(tmp_path / "files-of-2024", target_is_directory=True)
    before = {name for name in os.listdir(tmp_path) if (tmp_path / name / "ids.npy").exists() is False}
    built(rows=60).save(tmp_path)
    assert before <= set(os.listdir(tmp_path))
    assert len(os.listdir(tmp_path)) == len(before) + 1
    (tmp_path / "manifest.json").write_text("damaged")
    with pytest.raises(ValueError, match="something else"):
        built(rows=50).save(tmp_path)


NAN = vectors(8).index_put((torch.tensor([2, 5]),), torch.tensor(float("nan")))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda i: i.add(NAN, torch.arange(8) + 40), ValueError, r"NaN or inf in 2 of 8 rows: id 42, id 45\.$"),
        (lambda i: i.add(NAN, paths=list("abcdefgh")), ValueError, r"2 of 8 rows: id 1003 'c', id 1006 'f'\.$"),
        (lambda i: i.search(NAN, 1), ValueError, r"NaN or inf in 2 of 8 rows: id 2, id 5\.$"),
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
        (lambda i: i.remove(torch.tensor([999, 3])), ValueError, "`ids` must be in the index, got 3, which is not"),
        (lambda i: i.paths(torch.tensor([5000])), ValueError, "`ids` must be in the index, got 5000, which is not"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(call, kind, said):
    index = built(rows=50)
    with pytest.raises(kind, match=rf"^RetrievalIndex: .*{said}"):
        call(index)
    assert len(index) == index.faiss_indexes[0].ntotal == 50
    assert index.ids.tolist() == list(range(951, 1001))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "kind", "said"),
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
        ({"factory": "IDMap,Flat"}, ValueError, "leave IDMap out"),
        ({"parameters": "nprobe=3"}, ValueError, "`parameters` must be those that faiss has for 'Flat'.*'nprobe=3'"),
    ],
)
def test_bad_settings_are_refused(settings, kind, said):
    with pytest.raises(kind, match=said):
        RetrievalIndex(**{"dim": DIM, **settings})


@pytest.mark.refusal
@pytest.mark.parametrize("factory", ["IVF100,Flat", "PQ4x6", "PCA8,IVF60,SQ8"])
def test_too_few_rows_to_train_are_refused(factory):
    index = RetrievalIndex(DIM, factory, shards=2)
    with pytest.raises(ValueError, match=rf"`factory` '{factory}' must be trained, for which 50 rows are not enough"):
        index.add(vectors(50))
    assert len(index) == 0
    index.add(vectors(600))
    assert len(index) == 600


@pytest.mark.refusal
@pytest.mark.parametrize("shards", [1, 2])
def test_a_first_add_that_faiss_refuses_changes_nothing(shards):
    index = RetrievalIndex(DIM, "NSG8", shards=shards)
    with pytest.raises(ValueError, match=r"^RetrievalIndex: 50 rows cannot .* 'NSG8' that holds 0 \(.*smaller than"):
        index.add(vectors(50))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 0
    index.add(vectors(400))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 400
    with pytest.raises(ValueError, match=r"3 rows cannot be added to an index of 'NSG8' that holds 400"):
        index.add(vectors(3))
    assert len(index) == sum(part.ntotal for part in index.faiss_indexes) == 400


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


def test_recall_counts_ten_also_where_a_query_does_not_find_itself(monkeypatch):
    rows = vectors(100)
    places = exact(rows, rows, 100)[1][:, 1:]  # without the query itself
    found = np.concatenate([places[:, -1:], places[:, :10]], 1)  # one that is far, then the ten nearest

    def search(self, queries, k):
        assert (len(queries), k) == (100, 11)
        return torch.zeros(found.shape), torch.from_numpy(found)

    monkeypatch.setattr(RetrievalIndex, "search", search)
    index = RetrievalIndex(DIM, "SQ8")
    index.add(rows)
    assert index.recall == pytest.approx(0.9)


@pytest.mark.parametrize("mapped", [False, True])
def test_other_parameters_after_loading(mapped, tmp_path):
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


def test_one_row_has_no_recall():
    index = RetrievalIndex(DIM, "HNSW8")
    index.add(vectors(1))
    assert index.recall is None
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]
