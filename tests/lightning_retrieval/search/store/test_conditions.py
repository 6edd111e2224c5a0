"""Searches with conditions and groups find what a loop in plain Python finds, in faiss and in Milvus Lite."""

import importlib
import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from lightning_retrieval.search.store import milvus_store
from lightning_retrieval.search.store.conditions import Combined, Compared, milvus_filter, parse_where
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
    price = [chosen.choice([-1.5, 0.0, 0.1, 1 / 3, 2.0, 1e-30, 1e300]) for _ in range(ROWS)]
    return {"brand": brands, "stock": stock, "price": price}


COLUMNS = metadata()
IDS = [3 * row + 5 for row in range(ROWS)][::-1]


def random_condition(chosen, depth=0):
    """A text, and a function of a row that says whether the row meets the condition."""
    kind = chosen.choice(["compare", "in"])
    if depth < 3:
        kind = chosen.choice(["compare", "compare", "in", "not", "and", "or"])
    if kind == "not":
        text, holds = random_condition(chosen, depth + 1)
        return f"not ({text})", lambda row: not holds(row)
    if kind in ("and", "or"):
        parts = [random_condition(chosen, depth + 1) for _ in range(chosen.choice([2, 3]))]
        join = {"and": all, "or": any}[kind]
        return f" {kind} ".join(f"({text})" for text, _ in parts), lambda row: join(holds(row) for _, holds in parts)
    name = chosen.choice(list(KINDS))
    values = [chosen.choice(COLUMNS[name]) for _ in range(3)]
    if kind == "in":
        negated = chosen.choice(["", "not "])
        return f"{name} {negated}in {values!r}", lambda row: (COLUMNS[name][row] in values) != bool(negated)
    symbol, method = chosen.choice([("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")])
    return f"{name} {symbol} {values[0]!r}", lambda row: getattr(COLUMNS[name][row], f"__{method}__")(values[0])


CONDITIONS = [random_condition(random.Random(seed)) for seed in range(120)]


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


def on_disk(columns, folder):
    index = RetrievalIndex(DIM, "IVF4,Flat", parameters="nprobe=4", shards=2)
    index.build_on_disk(folder, vectors(ROWS), torch.tensor(IDS), columns=columns)
    return RetrievalIndex.load(folder, mapped=True)


def saved(columns, folder):
    faiss_index(columns).save(folder)
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
    "IVF": lambda columns, folder: faiss_index(columns, "IVF4,Flat", "nprobe=4"),
    "shards": lambda columns, folder: faiss_index(columns, shards=3),
    "saved": saved,
    "on disk": on_disk,
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


def test_a_search_finds_the_nearest_of_the_rows_that_meet_a_condition(make):
    index = make(COLUMNS)
    queries = vectors(3, seed=1)
    sizes = set()
    for text, holds in CONDITIONS:
        rows = {row for row in range(ROWS) if holds(row)}
        sizes.add(len(rows))
        similarities, ids = index.search(queries, 20, where=text)
        assert ids.tolist() == brute_force(queries, 20, rows), text
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
def test_there_are_k_groups_or_no_more_rows(make, sizes, monkeypatch):
    monkeypatch.setattr(milvus_store, "MOST_RESULTS", 64)  # so that one search cannot find all rows
    groups = SIZES[sizes]
    parity = [row % 2 for row in range(ROWS)]
    index = make({"brand": [f'"{group}' for group in groups], "number": groups, "parity": parity})
    queries = vectors(4, seed=5)
    even = set(range(0, ROWS, 2))
    for k in (1, 3, 12, 50):
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
    for columns in (None, ["price", "brand"], ["stock"], []):
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


@pytest.mark.refusal
def test_columns_that_the_index_does_not_have_are_not_returned(make):
    index = make(COLUMNS)
    known = r"brand \(text\), stock \(number\), price \(number\)"
    for columns, error, rule in (
        (["brand", "colour"], ValueError, f"`columns` must be columns of the index, {known}, got 'colour'"),
        ("brand", TypeError, "`columns` must be a sequence of strings, got one str"),
        ([3], TypeError, "`columns` must hold strings only, got"),
    ):
        with pytest.raises(error, match=f"^{type(index).__name__}: {rule}"):
            index.search_with_metadata(vectors(1), index.request(2), columns)


def test_only_queries_that_lack_groups_are_searched_again(monkeypatch):
    groups = [0] * 300 + list(range(1, 101))
    rows = torch.cat([torch.eye(DIM)[:1].repeat(300, 1), torch.eye(DIM)[1:2].repeat(100, 1)])
    index = RetrievalIndex(DIM)
    index.add(rows + 1e-3 * vectors(400), columns={"product": groups})
    searched = []
    nearest = index._nearest
    monkeypatch.setattr(index, "_nearest", lambda *args: searched.append(len(args[0])) or nearest(*args))
    index.search(torch.eye(DIM)[[1, 1, 0, 1]], 5, group_by="product")
    assert searched == [4, 1]


def test_what_a_condition_is_parsed_to():
    parsed = parse_where(" not price < 2e1 and (brand not in ['b', \"a\"] or stock >= -3)", KINDS)
    listed = Compared("brand", "in", frozenset({"a", "b"}))
    either = Combined("or", (Combined("not", (listed,)), Compared("stock", ">=", -3.0)))
    assert parsed == Combined("and", (Combined("not", (Compared("price", "<", 20.0),)), either))
    expected = '(not (column_price < 20.0)) and ((not (column_brand in ["a", "b"])) or (column_stock >= -3.0))'
    assert milvus_filter(parsed, "column_") == expected


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("", "which cannot be read"),
        ("brand", "which is not made of comparisons of a column with a value"),
        ("brand = 'a'", "which cannot be read"),
        ("brand == 'a", "which cannot be read"),
        ("brand == 'a' or", "which cannot be read"),
        ("brand == 'a'; stock == 1", "which cannot be read"),
        ("brand == 'a'\nstock == 1", "which cannot be read"),
        ("brand == '\x00'", "null byte"),
        ("brand == 7", "where brand must be compared with a text, not with '7'"),
        ("brand == b'a'", "where brand must be compared with a text"),
        ("brand == f'{stock}'", "where brand must be compared with a text"),
        ("brand == price", "where brand must be compared with a text, not with 'price'"),
        ("brand is 'a'", "where brand must precede one of ==, !=, "),
        ("stock == 'x'", "where stock must be compared with a number"),
        ("stock == True", "where stock must be compared with a number"),
        ("stock == 1j", "where stock must be compared with a number"),
        ("stock == 1 + 1", "where stock must be compared with a number"),
        ("stock == 9007199254740993", "where stock must be compared with a number"),
        ("price < 1e999", "where price must be compared with a number"),
        ("stock in []", "where in must precede a list of values of stock"),
        ("stock in 'abc'", "where in must precede a list of values of stock"),
        ("stock in [1, 'a']", "where stock must be compared with a number"),
        ("1 < stock", "which is not made of comparisons"),
        ("0 < stock < 7", "which is not made of comparisons"),
        ("-3 < price", "which is not made of comparisons"),
        ("stock.real == 1", "which is not made of comparisons"),
        ("not True", "which is not made of comparisons"),
        ("colour == 'red'", "but the index has no column colour, only brand (text), stock (number)"),
        ("id >= 0", "but the index has no column id"),
        ("__import__('os').system('id')", "which is not made of comparisons"),
        ("(brand := 'a') == 'a'", "which is not made of comparisons"),
        ("[brand for brand in 'a']", "which is not made of comparisons"),
        ("(lambda: 1)() == 1", "which is not made of comparisons"),
        ("(" * 1000 + "stock == 1" + ")" * 1000, "which "),
        ("not " * 500 + "stock == 1", "which is nested too deeply"),
        ("not " * 100_000 + "stock == 1", "which is nested too deeply"),
        ("stock == " + "-" * 100_000 + "1", "which is nested too deeply"),
        ("brand == '\udce9", "surrogates not allowed"),
    ],
)
def test_what_is_not_a_condition(where, reason):
    index = RetrievalIndex(DIM)
    index.add(vectors(1), columns={name: values[:1] for name, values in COLUMNS.items()})
    with pytest.raises(
        ValueError, match=r"^RetrievalIndex: `where` must be a condition such as .*, got .*\.$"
    ) as error:
        index.search(vectors(1), 1, where=where)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("where", "cure"),
    [
        ("brand = 'a'", "write == for equal"),
        ("brand === 'a'", "write == for equal"),
        ("brand is 'a'", "write == for equal"),
        ("brand <> 'a'", "write != for not equal"),
        ("stock => 3", "write >= and <= for an order"),
        ("brand == 'a' AND stock > 1", "write and in place of & and AND"),
        ("brand == 'a' && stock > 1", "write and in place of & and AND"),
        ("brand == 'a' || stock > 1", "write or in place of | and OR"),
        ("NOT brand == 'a'", "write not in place of ! and NOT"),
        ("!(brand == 'a')", "write not in place of ! and NOT"),
        ("brand IN ['a']", "write in for one of several values"),
        ("brand == a", "write text in quotes, such as 'a'"),
        ("brand == 'a = b AND c' or", None),
        ("stock == nan", None),
        ("stock in 3", None),
    ],
)
def test_a_condition_in_another_language_is_answered_with_the_spelling_of_this_one(where, cure):
    with pytest.raises(ValueError, match=r"^`where` must be a condition such as ") as error:
        parse_where(where, KINDS)
    assert str(error.value).partition("; ")[2] == (f"{cure}." if cure else "")


@pytest.mark.refusal
def test_conditions_and_groups_of_another_index_raise(make):
    index = make({"number": list(range(ROWS))})
    owner = type(index).__name__
    with pytest.raises(ValueError, match=f"^{owner}: `where` must be .* has no column price, only number"):
        index.search(vectors(1), 1, where="price >= 0")
    with pytest.raises(ValueError, match=f"^{owner}: `group_by` must be a column of the index, .*, got 'price'"):
        index.search(vectors(1), 1, group_by="price")
    for argument in ("where", "group_by"):
        with pytest.raises(TypeError, match=f"^{owner}: `{argument}` must be a string"):
            index.search(vectors(1), 1, **{argument: {"brand": "a"}})


@pytest.mark.refusal
@pytest.mark.parametrize("factory", ["PQ4x4", "IVF4,PQ4x4,RFlat"])
def test_an_index_that_faiss_cannot_filter_raises(factory):
    index = faiss_index(COLUMNS, factory)
    with pytest.raises(ValueError, match=r"RetrievalIndex: `where` and `group_by` must be .*got one that it cannot"):
        index.search(vectors(1), 1, where="stock > 0")


def test_the_search_parameters_of_the_index_hold_with_a_condition():
    """A filtered search in one of four lists finds less than one in all lists."""
    index = faiss_index(COLUMNS, "IVF4,Flat")
    queries = vectors(20, seed=3)
    expected = np.array(brute_force(queries, 5, {row for row in range(ROWS) if COLUMNS["price"][row] >= 0}))

    def found():
        return (index.search(queries, 5, where="price >= 0")[1].numpy() == expected).mean()

    assert found() < 0.9
    index.set_parameters("nprobe=4")
    assert found() == 1


@pytest.mark.parametrize("factory", ["HNSW8", "SQ8", "PCA8,IVF4,SQ8", "IVF4,PQ4x4"])
def test_an_approximate_index_finds_only_rows_that_meet_the_condition(factory):
    index = faiss_index(COLUMNS, factory)
    _, ids = index.search(vectors(5, seed=4), 10, where="price >= 0 and stock < 5")
    allowed = {IDS[row] for row in range(ROWS) if COLUMNS["price"][row] >= 0 and COLUMNS["stock"][row] < 5}
    assert (ids >= 0).sum() > 25
    assert set(ids[ids >= 0].tolist()) <= allowed


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


SEARCH = """
import sys, torch
from lightning_retrieval import RetrievalIndex

index = RetrievalIndex(2)
for rows in ([0, 1], [2, 3]):
    columns = {"brand": ["a", "b"], "price": [1, 2]}
    index.add(torch.eye(2), torch.tensor(rows), ["x", "y"], columns=columns)
index.remove(torch.tensor([3]))
index.search(torch.eye(2), 1, where="brand == 'a' or brand in ['b'] and price < 3", group_by="brand")
print("pandas" in sys.modules)
"""


def test_an_index_does_not_import_pandas():
    """Arrow imports it for some conversions, which would take longer than a search."""
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", SEARCH], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


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
    check(index, [1, 2, 4, 5])
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
    with pytest.raises(
        ValueError, match=r"MilvusStore: `columns` must be the columns of the index, brand .*, got none"
    ):
        store.add(vectors(1))
    with pytest.raises(ValueError, match=r"MilvusStore: `columns` must be valid Unicode"):
        store.add(vectors(1), columns={"brand": ["\udce9"], "stock": [1], "price": [1]})
    store.close()


def test_an_index_without_columns_has_the_files_of_before(tmp_path):
    index = RetrievalIndex(DIM)
    index.add(vectors(3))
    index.save(tmp_path / "i")
    names = {"ids.npy", "paths.npy", "path-ends.npy", "vectors-0.faiss"}
    assert {path.name for path in (tmp_path / "i").glob("files-*/*")} == names
    loaded = RetrievalIndex.load(tmp_path / "i")
    assert (loaded.column_kinds, loaded.columns(loaded.ids)) == ({}, {})


def test_tensors_and_arrays_may_be_columns():
    index = RetrievalIndex(DIM)
    index.add(vectors(3), columns={"a": torch.tensor([1, 2, 3]), "b": np.array([0.5, 1, 2]), "c": ("x", "\udce9", "x")})
    assert index.columns(index.ids) == {"a": [1, 2, 3], "b": [0.5, 1, 2], "c": ["x", "\udce9", "x"]}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("columns", "error", "sentence"),
    [
        ({"a b": [1, 2]}, ValueError, "`columns` must have names of letters, digits and _ .* got 'a b'; rename"),
        ({"class": [1, 2]}, ValueError, "no keyword of Python, such as class, got 'class'"),
        ({"é": [1, 2]}, ValueError, "got 'é'"),
        ({7: [1, 2]}, ValueError, "got 7"),
        ({"a": [1]}, ValueError, "`columns` must have one value for each of 2 rows, got 1 for a"),
        ({"a": [1, "x"]}, TypeError, "`columns` must hold only strings or only numbers for a, got int, str"),
        ({"a": [None, None]}, TypeError, "got NoneType"),
        ({"a": [True, False]}, TypeError, "got bool"),
        (
            {"a": [1.0, float("nan")]},
            ValueError,
            "`columns` must hold finite numbers, integers up to 2\\*\\*53, for a, got others",
        ),
        (
            {"a": [1, 2**53 + 1]},
            ValueError,
            "`columns` must hold finite numbers, integers up to 2\\*\\*53, for a, got others",
        ),
        ({"a": "xy"}, TypeError, "`columns` must have a sequence of values for a, got 'xy'"),
        ([1, 2], TypeError, "`columns` must be a dict, got"),
        ({"a": ["\ud800"] * 2}, ValueError, "must hold valid Unicode for a, got '"),
    ],
)
def test_what_is_not_a_column(columns, error, sentence):
    index = RetrievalIndex(DIM)
    with pytest.raises(error, match=f"^RetrievalIndex: .*{sentence}"):
        index.add(vectors(2), columns=columns)
    assert len(index) == 0


@pytest.mark.refusal
def test_rows_with_other_columns_raise():
    index = faiss_index()
    with pytest.raises(ValueError, match=r"`columns` must be the columns of the index, brand \(text\), .*, got none"):
        index.add(vectors(1))
    with pytest.raises(ValueError, match=r"got brand \(text\), stock \(text\), price \(number\)"):
        index.add(vectors(1), columns={**part([0]), "stock": ["3"]})
    assert len(index) == ROWS


@pytest.mark.refusal
def test_damaged_columns_raise_even_with_valid_checksums(tmp_path, monkeypatch):
    faiss_index().save(tmp_path / "i")
    (inner,) = (tmp_path / "i").glob("files-*")
    files = {path.name: path for path in inner.iterdir()}
    monkeypatch.setattr("lightning_retrieval.search.store.storage._check_files", lambda *_: files)
    listed, codes = files["columns.json"], files["column-0.npy"]
    kinds, good = listed.read_bytes(), codes.read_bytes()
    damaged = [
        (json.dumps({"class": "text"}).encode(), good),
        (json.dumps({"brand": "object"}).encode(), good),
        (json.dumps({"brand": []}).encode(), good),
        (json.dumps(["brand"]).encode(), good),
        (b"[" * 100_000, good),
        (b"\xff", good),
        (json.dumps({"brand": "number"}).encode(), good),
        (kinds, good[:-8]),
        (kinds, saved_array(tmp_path, np.zeros(5, np.int64))),
        (kinds, saved_array(tmp_path, np.full(ROWS, 99))),
        (kinds, saved_array(tmp_path, np.full(ROWS, -1))),
        (kinds, saved_array(tmp_path, np.array([{}] * ROWS, dtype=object))),
        (kinds, b""),
    ]
    for text, array in damaged:
        listed.write_bytes(text)
        codes.write_bytes(array)
        with pytest.raises(
            ValueError, match=r"RetrievalIndex: .* is damaged, its manifest and its files .*; build the"
        ):
            RetrievalIndex.load(tmp_path / "i")
    listed.write_bytes(kinds)
    codes.write_bytes(good)
    assert RetrievalIndex.load(tmp_path / "i").column_kinds == KINDS
    del files["column-0-ends.npy"]
    with pytest.raises(ValueError, match=r"its manifest and its files do not fit \('column-0-ends.npy' is missing\)"):
        RetrievalIndex.load(tmp_path / "i")


def saved_array(folder, array):
    np.save(folder / "a.npy", array, allow_pickle=True)
    return (folder / "a.npy").read_bytes()
