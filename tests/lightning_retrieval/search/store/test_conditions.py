"""Searches with conditions and groups find what a loop in plain Python finds, in faiss and in Milvus Lite."""

import datetime
import decimal
import functools
import importlib
import itertools
import random

import numpy as np
import pyarrow
import pytest
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from tests.lightning_retrieval.search.store.vectors import DIM, exact, vectors

ROWS = 240
KINDS = {"brand": "text", "stock": "number", "price": "number"}
# Texts that would end a string, begin an expression or be read otherwise, in one language or another.
ORDINARY = ["Acme", "Ajax", "", "acme", "a b", "10", "NULL", "true", "Ünï-中😀", "a%b_", "{x}", "$meta", "\u2028"]
ESCAPED = ['a"b', "a'b", "a\\", "\\", '\\"', "a\nb", "a\tb", "\\n", "\\u0041", "x\x01", "\x7f", "a\r\nb", "\x00"]
HOSTILE = ['" or stock >= 0 or brand == "', "' or 1 == 1 or '", '"] or id in [0', "\\' or True or '", "`ls`", "#", "]"]
BRANDS = [*ORDINARY, *ESCAPED, *HOSTILE, "__import__('os').system('ls')", "\b\f\v", "--", "/*"]


def metadata():
    chosen = random.Random(0)
    brands = list(itertools.islice(itertools.cycle(BRANDS), ROWS))
    chosen.shuffle(brands)
    stock = [chosen.choice([-3, 0, 1, 7, 2**53, -(2**53)]) for _ in range(ROWS)]
    price = [chosen.choice([-1.5, 0.0, -0.0, 0.1, 1 / 3, 2.0, 1e-30, 1e300]) for _ in range(ROWS)]
    return {"brand": brands, "stock": stock, "price": price}


COLUMNS = metadata()
IDS = [3 * row + 5 for row in range(ROWS)][::-1]


def random_condition(chosen, depth=0):
    kind = chosen.choice(["compare", "in"])
    if depth < 3:
        kind = chosen.choice(["compare", "compare", "in", "not", "and", "or"])
    if kind == "not":
        return f"not ({random_condition(chosen, depth + 1)})"
    if kind in ("and", "or"):
        parts = [random_condition(chosen, depth + 1) for _ in range(chosen.choice([2, 3]))]
        return f" {kind} ".join(f"({text})" for text in parts)
    name = chosen.choice(list(KINDS))
    values = [chosen.choice(COLUMNS[name]) for _ in range(3)]
    if kind == "in":
        return f"{name} {chosen.choice(['', 'not '])}in {values!r}"
    return f"{name} {chosen.choice(['==', '!=', '<', '<=', '>', '>='])} {values[0]!r}"


CONDITIONS = [random_condition(random.Random(seed)) for seed in range(120)]
CONDITIONS.append(
    " not price < 2e-1 and (brand not in ['Acme', \"Ajax\"] or stock >= -3) or stock == 7 and brand > 'b'"
)


@functools.cache
def rows_that_meet(condition):
    """Python itself is the witness of what a condition means."""
    code = compile(condition.strip(), "condition", "eval")
    return {row for row in range(ROWS) if eval(code, {name: values[row] for name, values in COLUMNS.items()})}


def brute_force(queries, k, rows, groups=None):
    """Ids of the k nearest rows, or of the nearest rows of k groups, in plain Python; -1 fills the rest."""
    found = []
    for order in exact(vectors(ROWS), queries, ROWS)[1].tolist():
        allowed = [row for row in order if row in rows]
        if groups is not None:
            first = {}
            for row in allowed:
                first.setdefault(groups[row], row)
            allowed = list(first.values())
        ids = [IDS[row] for row in allowed[:k]]
        found.append(ids + [-1] * (k - len(ids)))
    return found


def faiss_index(columns=COLUMNS, factory="Flat", parameters="", shards=1):
    index = RetrievalIndex(DIM, factory, parameters=parameters, shards=shards)
    index.add(vectors(ROWS), torch.tensor(IDS), columns=columns)
    return index


def saved(columns, folder):
    faiss_index(columns, "IVF4,Flat", "nprobe=4", shards=2).save(folder)
    return RetrievalIndex.load(folder, mapped=True)


def in_milvus(columns, folder):
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    kinds = {name: KINDS.get(name, "number") for name in columns}
    store = MilvusStore.create(f"{folder}.db", "birds", DIM, columns=kinds)
    store.add(vectors(ROWS), torch.tensor(IDS), columns=columns)
    store.publish()
    store.close()
    return MilvusStore(f"{folder}.db", "birds")


INDEXES = {
    "Flat": lambda columns, folder: faiss_index(columns),
    "saved": saved,
    "Milvus": in_milvus,
}


@pytest.fixture(params=INDEXES)
def make(request, tmp_path):
    """Makes an index of one kind with some columns, and closes it after the test."""
    made = []

    def make_index(columns):
        made.append(INDEXES[request.param](columns, tmp_path / f"index-{len(made)}"))
        return made[-1]

    yield make_index
    for index in made:
        if isinstance(index, MilvusStore):
            index.close()


@pytest.mark.parametrize("factory", ["HNSW16", "PCA8,HNSW16", "HNSW16_SQ8"])
def test_hnsw_finds_what_meets_a_condition(factory, tmp_path):
    """All of few rows, and most of the nearest of many; a search for all rows without a condition is the witness."""
    rows, queries = 2000, vectors(20, seed=1)
    place = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    index = RetrievalIndex(DIM, factory, shards=2)
    index.add(vectors(rows), columns={"place": place})
    index.save(tmp_path)
    mapped, witness = (RetrievalIndex.load(tmp_path, mapped=True) for _ in range(2))
    witness.set_parameters(f"efSearch={rows}")
    similarities, ids = witness.search(queries, rows)
    for number in (0, 1, 10, 100, 1000, 1900):
        k = min(number, 10)
        for one in (index, mapped):
            found_similarities, found = one.search(queries, 10, where=f"place < {number}")
            hits = 0
            for query in range(len(queries)):
                meet = place[ids[query]] < number
                expected = dict(zip(ids[query][meet][:k].tolist(), similarities[query][meet][:k].tolist()))
                assert (found[query] >= 0).sum() == k
                assert found_similarities[query, k:].tolist() == [-torch.inf] * (10 - k)
                for one_id, similarity in zip(found[query].tolist(), found_similarities[query].tolist()):
                    hits += one_id in expected
                    assert similarity == pytest.approx(expected.get(one_id, similarity), abs=1e-5)
            assert hits >= 0.95 * k * len(queries), number


NUMBERS, TEXTS = [3, 1, None, 2], ["b", "a", "", "b"]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("number", pyarrow.array(NUMBERS)),
        ("number", pyarrow.array(NUMBERS, pyarrow.uint8())),
        ("number", pyarrow.array([9.5, *NUMBERS, None])[1:5]),
        ("number", pyarrow.chunked_array([NUMBERS[:1], NUMBERS[1:]])),
        ("number", [np.float64(3), np.int32(1), None, np.float16(2)]),
        ("text", pyarrow.array(["b", "a", None, "b"])),
        ("text", pyarrow.array(["x", *TEXTS], pyarrow.large_string()).dictionary_encode()[1:]),
        ("text", [*map(np.str_, TEXTS)]),
        ("text", np.array(TEXTS)),
    ],
)
def test_columns_may_be_of_arrow_and_numpy(kind, values, tmp_path):
    index = RetrievalIndex(DIM)
    index.add(vectors(4), columns={"x": values})
    index.add(vectors(4), columns={"x": values})
    index.save(tmp_path)
    expected = {"number": NUMBERS, "text": TEXTS}[kind]
    where, meet = {"number": ("x >= 2", {0, 3, 4, 7}), "text": ("x == 'b'", {0, 3, 4, 7})}[kind]
    for one in (index, RetrievalIndex.load(tmp_path), RetrievalIndex.load(tmp_path, mapped=True)):
        assert one.column_kinds == {"x": kind}
        assert one.columns(one.ids) == {"x": 2 * expected}
        assert set(one.search(vectors(1), 4, where=where)[1][0].tolist()) == meet


def test_columns_of_other_types_are_texts_or_numbers_as_a_table_has_them():
    day, cost = datetime.date(2026, 1, 2), decimal.Decimal("1.5")
    index = RetrievalIndex(DIM)
    index.add(vectors(2), columns={"ok": [True, False], "day": pyarrow.array([day, None]), "cost": [cost, cost]})
    assert index.columns(index.ids) == {"ok": ["True", "False"], "day": ["2026-01-02", ""], "cost": [1.5, 1.5]}
    assert index.search(vectors(1), 2, where="ok == 'True' and day < '2026-02'")[1].tolist() == [[0, -1]]


def test_columns_may_be_of_pandas():
    pandas = pytest.importorskip("pandas")
    for values, dtypes in ((NUMBERS, ["Int64", "float32", "object"]), (TEXTS, ["object", "string", "category"])):
        index = RetrievalIndex(DIM)
        index.add(vectors(4), columns={dtype: pandas.Series(values, dtype=dtype) for dtype in dtypes})
        assert index.columns(index.ids) == dict.fromkeys(dtypes, values)


def test_a_search_finds_the_nearest_of_the_rows_that_meet_a_condition(make):
    index = make(COLUMNS)
    queries = vectors(3, seed=1)
    sizes = set()
    for condition in CONDITIONS:
        rows = rows_that_meet(condition)
        sizes.add(len(rows))
        similarities, ids = index.search(queries, 20, where=condition)
        assert ids.tolist() == brute_force(queries, 20, rows), condition
        assert torch.isinf(similarities).tolist() == (ids < 0).tolist()
    assert {0, ROWS} <= sizes
    assert len(sizes) > 40
    assert index.search(queries, 20)[1].tolist() == brute_force(queries, 20, set(range(ROWS)))


def test_each_text_equals_only_itself(make):
    index = make(COLUMNS)
    for text in sorted(set(BRANDS)):
        expected = sorted(IDS[row] for row in range(ROWS) if COLUMNS["brand"][row] == text)
        for where in (f"brand == {text!r}", f"brand in [{text!r}]"):
            _, ids = index.search(vectors(1, seed=2), ROWS, where=where)
            assert sorted(ids[ids >= 0].tolist()) == expected


SIZES = {
    "one group has nearly all rows": [0 if row % 40 else row for row in range(ROWS)],
    "each row is a group": list(range(ROWS)),
    "groups of many sizes": (np.random.default_rng(1).zipf(1.3, ROWS) % 60).tolist(),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_there_are_k_groups_or_no_more_rows(make, sizes):
    groups = SIZES[sizes]
    parity = [row % 2 for row in range(ROWS)]
    index = make({"brand": [f'"{group}' for group in groups], "number": groups, "parity": parity})
    queries = vectors(4, seed=5)
    even = set(range(0, ROWS, 2))
    for k in (1, 12, 50):
        for column in ("brand", "number"):
            similarities, ids = index.search(queries, k, group_by=column)
            assert ids.tolist() == brute_force(queries, k, set(range(ROWS)), groups)
            assert torch.isinf(similarities).tolist() == (ids < 0).tolist()
        _, ids, paths, _ = index.search_with_metadata(queries, index.request(k, "parity == 0", "brand"))
        assert ids.tolist() == brute_force(queries, k, even, groups)
        assert paths == [[""] * k] * len(queries)


def test_a_search_returns_the_metadata_of_the_rows_found(make):
    """All columns or the wanted ones, also with groups by one of them; nothing where fewer than k rows are found."""
    index, queries = make(COLUMNS), vectors(3, seed=7)
    row_of = {row_id: row for row, row_id in enumerate(IDS)}
    for columns in (None, ["price", "brand"], []):
        for k, where, group_by in ((9, None, None), (60, "stock > 0", "brand"), (2, "price > 1e301", None)):
            request = index.request(k, where, group_by)
            similarities, ids, paths, metadata = index.search_with_metadata(queries, request, columns)
            expected, expected_ids = index.search(queries, k, where=where, group_by=group_by)
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(similarities, expected)
            assert paths == [[""] * k] * len(queries)
            for found, values in zip(ids.tolist(), metadata, strict=True):
                names = list(KINDS) if columns is None else columns
                rows = [{name: COLUMNS[name][row_of[row_id]] for name in names} for row_id in found if row_id >= 0]
                assert values == rows + [{}] * found.count(-1)


def test_the_search_parameters_of_the_index_hold_with_a_condition():
    """A filtered search in one of four lists finds less than one in all lists."""
    index = faiss_index(COLUMNS, "IVF4,Flat")
    queries = vectors(20, seed=3)
    expected = np.array(brute_force(queries, 5, rows_that_meet("price >= 0")))

    def found():
        return (index.search(queries, 5, where="price >= 0")[1].numpy() == expected).mean()

    assert found() < 0.9
    index.set_parameters("nprobe=4")
    assert found() == 1


@pytest.mark.parametrize("factory", ["HNSW8", "PCA8,IVF4,SQ8", "IVF4,PQ4x4"])
def test_an_approximate_index_finds_only_rows_that_meet_the_condition(factory):
    index = faiss_index(COLUMNS, factory)
    condition = "price >= 0 and stock < 5"
    _, ids = index.search(vectors(5, seed=4), 10, where=condition)
    assert (ids >= 0).sum() > 25
    assert set(ids[ids >= 0].tolist()) <= {IDS[row] for row in rows_that_meet(condition)}


def test_ids_may_be_far_apart():
    index = RetrievalIndex(DIM)
    index.add(torch.eye(DIM)[:4], torch.tensor([0, 2**40, 2**63 - 1, 17]), columns={"stock": [1, 2, 3, 4]})
    _, ids = index.search(torch.ones(1, DIM), 2, where="stock in [2, 3]")
    assert sorted(ids[0].tolist()) == [2**40, 2**63 - 1]


def test_conditions_hold_after_faiss_has_been_changed_to_take_tensors():
    importlib.import_module("faiss.contrib.torch_utils")  # as pytorch-metric-learning does
    index = RetrievalIndex(DIM)
    index.add(torch.eye(DIM)[:4], columns={"stock": [1, 2, 3, 4]})
    assert index.search(torch.ones(1, DIM), 1, where="stock == 3")[1].tolist() == [[2]]


VALUES = {
    "brand": ["b", "a", "", "b", "中é", "a"],
    "stock": [3, -1, 2**53, 0, 0, 7],
    "price": [0.5, -1, 1e300, 0, 3, 2],
}
ROW_IDS = torch.tensor([50, 10, 30, 40, 20, 60])
PARTS = ([0, 1], [2], [3, 4, 5])


def part(rows):
    return {name: [values[row] for row in rows] for name, values in VALUES.items()}


def check(index, rows=range(6)):
    assert index.column_kinds == KINDS
    assert index.columns(ROW_IDS[list(rows)]) == part(rows)


def test_rows_keep_their_columns(tmp_path):
    index = RetrievalIndex(DIM)
    for rows in PARTS:
        index.add(vectors(6)[rows], ROW_IDS[rows], columns=part(rows))
    index.add(vectors(0))
    check(index)
    index.save(tmp_path / "i")
    check(RetrievalIndex.load(tmp_path / "i"))
    check(RetrievalIndex.load(tmp_path / "i", mapped=True))
    index.remove(ROW_IDS[[0, 3]])
    index.save(tmp_path / "i")
    again = RetrievalIndex.load(tmp_path / "i")
    check(again, [1, 2, 4, 5])
    assert again.search(vectors(1), 4, where="stock < 8")[1][0].tolist().count(-1) == 1


def test_rows_in_milvus_keep_their_columns(tmp_path):
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    store = MilvusStore.create(str(tmp_path / "a.db"), "birds", DIM, columns=KINDS)
    for rows in PARTS:
        store.add(vectors(6)[rows], ROW_IDS[rows], columns=part(rows))
    store.publish()
    store.record_about({"threshold": 0.5})
    store.close()
    store = MilvusStore(str(tmp_path / "a.db"), "birds")
    check(store)
    assert store.about == {"threshold": 0.5}
    store.close()


def test_tensors_and_arrays_may_be_columns():
    index = RetrievalIndex(DIM)
    index.add(vectors(3), columns={"a": torch.tensor([1, 2, 3]), "b": np.array([0.5, 1, 2]), "c": ("x", "\udce9", "x")})
    assert index.columns(index.ids) == {"a": [1, 2, 3], "b": [0.5, 1, 2], "c": ["x", "\udce9", "x"]}
