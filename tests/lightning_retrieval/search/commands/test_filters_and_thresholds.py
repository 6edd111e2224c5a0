"""`index` stores metadata and a threshold with an index, in a folder and in Milvus, and `search` uses them."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search.commands.index import index_embeddings
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of, indexing, opened, paths_of, run


@pytest.fixture(scope="module")
def table(glyphs, tmp_path_factory):
    """A price and a code of each glyph, and a product of every two glyphs."""
    path = tmp_path_factory.mktemp("table") / "products.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["price", "image", "code", "product"])
        for number, image in enumerate(paths_of(glyphs[0] / "images")):
            writer.writerow([number / 4, f"./{image}", f"{number:03d}", f'"{number // 2}"'])
    return path


@pytest.fixture(scope="module")
def validation(embeddings, glyphs, tmp_path_factory):
    """The embeddings of the forty glyphs, with a label for every four of them."""
    path = tmp_path_factory.mktemp("validation") / "e"
    read = EmbeddingFolder.load(embeddings)
    folder = EmbeddingFolder.create(path, read.manifest)
    paths = paths_of(glyphs[0] / "images")
    for shard in range(len(read)):
        rows = read.read(shard)
        labels = [str(paths.index(image) // 4) for image in rows.paths]
        folder.write(shard, ShardRows(rows.ids, rows.embeddings, rows.paths, labels))
    return path


@pytest.fixture(params=["faiss", "milvus"])
def place(request, tmp_path):
    """The value of `--output`, and the options that follow it."""
    if request.param == "faiss":
        return tmp_path / "index", []
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    return "glyphs", ["--store", f"milvus:{tmp_path / 'a.db'}"]


def scores_of(embeddings, query):
    """The similarity of each glyph to one of them, by float64."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    return (unit @ unit[query]).tolist()


def test_search_filters_groups_and_hides_what_is_not_similar(glyphs, table, validation, place, capsys):
    images = glyphs[0] / "images"
    output, store = place
    choosing = ["--validation", validation, "--false_match_rate=0.1"]
    code, _, err = command(capsys, *indexing(glyphs[0], output, "--metadata", table, *choosing, *store))
    assert (code, err) == (0, "")
    paths = paths_of(images)
    searching = ["search", "--index", output, *store, images / paths[21]]

    where = "price >= 2.5 and not code in ['021', '030'] and price != 5.5"
    wanted = ["--json", "-k=4", "--threshold=-1", "--where", where, "--group_by=product"]
    code, out, _ = command(capsys, *searching, *wanted)
    assert code == 0
    scores, expected = scores_of(glyphs[1], 21), {}
    allowed = set(range(10, 40)) - {21, 22, 30}
    for position in sorted(allowed, key=lambda position: -scores[position]):
        expected.setdefault(position // 2, scores[position])
    hits = json.loads(out)["queries"][0]["results"]
    assert [hit["similarity"] for hit in hits] == pytest.approx(list(expected.values())[:4], abs=1e-5)
    positions = [paths.index(hit["path"]) for hit in hits]
    assert set(positions) <= allowed
    assert len({position // 2 for position in positions}) == 4
    for position, hit in zip(positions, hits):
        assert hit["metadata"] == {"price": position / 4, "code": f"{position:03d}", "product": f'"{position // 2}"'}

    (shown,) = json.loads(command(capsys, *searching, "--json", "-k=40")[1])["queries"]
    (every,) = json.loads(command(capsys, *searching, "--json", "-k=40", "--threshold=-1")[1])["queries"]
    assert len(every["results"]) == 40
    assert shown["results"] == [hit for hit in every["results"] if hit["similarity"] >= shown["threshold"]]
    assert 1 <= len(shown["results"]) < 40
    assert shown["nearest"] == every["results"][0]["similarity"]

    code, out, _ = command(capsys, *searching, "--where", "price < 0", "--json")
    assert (code, json.loads(out)["queries"][0]["results"]) == (0, [])


def test_images_without_a_row_of_metadata_are_kept_if_wanted(glyphs, tmp_path, capsys):
    """Also those that an update adds; their numbers meet no comparison but `!=`, and they are one group."""
    folder = shutil.copytree(glyphs[0], tmp_path / "g")
    paths = paths_of(folder / "images")
    late = paths[30:]
    for path in late:
        (folder / "images" / path).rename(tmp_path / Path(path).name)
    table = tmp_path / "some.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["image", "price", "name"], *([path, row, f"n{row}"] for row, path in enumerate(paths[:20]))]
        )
    args = indexing(folder, tmp_path / "index", "--metadata", table)
    assert "`--missing` keep" in error_of(capsys, *args)
    assert command(capsys, *args, "--missing=keep")[::2] == (0, "")
    for path in late:
        (tmp_path / Path(path).name).rename(folder / "images" / path)
    assert command(capsys, *args, "--missing=keep", "--update")[::2] == (0, "")
    index = RetrievalIndex.load(tmp_path / "index")
    columns = dict(zip(index.paths(index.ids), zip(*index.columns(index.ids).values())))
    assert columns == {path: (row, f"n{row}") if row < 20 else (None, "") for row, path in enumerate(paths)}
    searching = ["search", folder / "images" / paths[0], f"--index={tmp_path / 'index'}", "-k40", "--json"]
    for where, expected in (
        ("price >= 0", set(paths[:20])),
        ("price != 3", set(paths) - {paths[3]}),
        ("not price >= 0", set(paths[20:])),
        ("price in [1, 2]", set(paths[1:3])),
        ("name == ''", set(paths[20:])),
    ):
        (found,) = json.loads(command(capsys, *searching, "--where", where)[1])["queries"]
        assert {hit["path"] for hit in found["results"]} == expected
    (found,) = json.loads(command(capsys, *searching, "--group_by=price")[1])["queries"]
    assert len(found["results"]) == 21
    assert [hit["metadata"]["price"] for hit in found["results"]].count(None) == 1


def test_search_shows_the_columns_that_are_asked_for(indexed, tmp_path, capsys):
    """In their order, in the terminal, as JSON and on the page; a missing value is a dash or null."""
    earlier = RetrievalIndex.load(indexed / "index")
    index = RetrievalIndex(earlier.dim, about=earlier.about)
    shown = {"price": [0.0, 19.5, None], "title": ["Red shoe", "", "x" * 101], "path": ["007", "b", "c"]}
    index.add(torch.eye(3, earlier.dim), paths=[f"1/deeper/{n}" for n in ("10.bmp", "11.PNG", "12.bmp")], columns=shown)
    index.save(tmp_path / "products")
    query, page = indexed / "images" / "1" / "deeper" / "10.bmp", tmp_path / "page.html"
    searching = ["search", f"--index={tmp_path / 'products'}", query]
    for options, names in (([], list(shown)), (["--show=title, price"], ["title", "price"]), (["--show="], [])):
        (found,) = json.loads(command(capsys, *searching, *options, "--json")[1])["queries"]
        values = [{name: shown[name][hit["id"]] for name in names} for hit in found["results"]]
        assert [list(hit["metadata"].items()) for hit in found["results"]] == [list(row.items()) for row in values]
        code, out, _ = command(capsys, *searching, *options, "--html", page)
        assert code == 0
        for text in (out, page.read_text(encoding="utf-8")):
            assert ("19.5" in text, "Red shoe" in text, "007" in text) == tuple(name in names for name in shown)
            assert "x" * 101 not in text


def test_metadata_and_threshold_survive_an_update(glyphs, table, validation, place, tmp_path, capsys):
    output, store = place
    folder = shutil.copytree(glyphs[0], tmp_path / "g")
    gone, late = paths_of(folder / "images")[:2]
    (folder / "images" / late).rename(tmp_path / "late")
    args = indexing(folder, output, *store)
    choosing = ["--validation", validation, "--false_match_rate"]
    assert command(capsys, *args, "--metadata", table, *choosing, 0.1)[0] == 0
    for more in ([], ["--update"]):
        assert "`--metadata`" in error_of(capsys, *args, *more)

    (tmp_path / "late").rename(folder / "images" / late)
    (folder / "images" / gone).unlink()
    for settings, rate in (([], 0.1), ([*choosing, 0.5], 0.5)):
        assert command(capsys, *args, "--metadata", table, "--update", *settings)[::2] == (0, "")
        with opened(output, store) as index:
            price = dict(zip(index.paths(index.ids), index.columns(index.ids)["price"]))
            assert price == {path: row / 4 for row, path in enumerate(paths_of(glyphs[0] / "images")) if row > 0}
            assert index.about["threshold"]["false_match_rate"] == pytest.approx(rate, abs=0.03)
    assert command(capsys, *args, "--overwrite")[0] == 0
    with opened(output, store) as index:
        assert "threshold" not in index.about


def test_an_index_of_embeddings_has_metadata(glyphs, embeddings, table, tmp_path):
    settings = {"factory": "IVF2,Flat", "parameters": "nprobe=2", "shards": 3}
    index_embeddings(embeddings, tmp_path / "i", metadata=table, **settings)
    index = RetrievalIndex.load(tmp_path / "i", mapped=True)
    assert index.column_kinds == {"price": "number", "code": "text", "product": "text"}
    paths = paths_of(glyphs[0] / "images")
    assert index.columns(index.ids)["code"] == [f"{paths.index(path):03d}" for path in index.paths(index.ids)]


def test_a_column_of_a_table_is_numbers_or_text(glyphs, embeddings, tmp_path):
    """A column of numbers with one text is text, of which the user is warned."""
    odd = ["9007199254740993", "01", "1e999", "nan", "", "1_000", "\u0661", "n/a", "1,5"]
    columns = {"whole": ["-20"] * 40, "real": ["1.50", "-2e-3"] * 20}
    columns |= {f"odd{number}": [*["2.5"] * 39, text] for number, text in enumerate(odd)}
    paths = paths_of(glyphs[0] / "images")
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["image", *columns], *zip(paths, *columns.values())])
    with pytest.warns(UserWarning, match=r"'odd[0-8]' .* holds text, .* at line 41") as warned:
        index_embeddings(embeddings, tmp_path / "i", metadata=tmp_path / "t.csv")
    assert len(warned) == len(odd)
    index = RetrievalIndex.load(tmp_path / "i")
    expected = {**columns, "whole": [-20.0] * 40, "real": [1.5, -0.002] * 20}
    found = index.columns(index.ids)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert dict(zip(index.paths(index.ids), found[name])) == dict(zip(paths, values))


def test_metadata_with_other_names_another_separator_and_absolute_paths(glyphs, tmp_path, capsys):
    """By both commands that read a table of images; a column without a name is none."""
    paths = paths_of(glyphs[0] / "images")
    lines = [f"{glyphs[0] / 'images' / path};{row};" for row, path in enumerate(paths)]
    (tmp_path / "t.csv").write_text("\n".join(["path;price;", *lines]))
    options = ["--columns", "image=path", "--delimiter", ";"]
    code, _, err = command(capsys, *indexing(glyphs[0], tmp_path / "i", "--metadata", tmp_path / "t.csv", *options))
    assert (code, err) == (0, "")
    prices = {path: float(row) for row, path in enumerate(paths)}
    index = RetrievalIndex.load(tmp_path / "i")
    assert dict(zip(index.paths(index.ids), index.columns(index.ids)["price"])) == prices
    args = ["--checkpoint", glyphs[0] / "model.ckpt", "--images", tmp_path / "t.csv", "--root", glyphs[0] / "images"]
    assert command(capsys, "embed", *args, "--output", tmp_path / "e", *options)[0] == 0
    (tmp_path / "t.csv").write_text("\n".join(["path\tprice", *(line[:-1].replace(";", "\t") for line in lines)]))
    args = ["--embeddings", tmp_path / "e", "--output", tmp_path / "j", "--metadata", tmp_path / "t.csv"]
    code, _, err = run(capsys, "index", *args, "--columns=oml", "--delimiter=tab")
    assert (code, err) == (0, "")
    index = RetrievalIndex.load(tmp_path / "j")
    assert dict(zip(index.paths(index.ids), index.columns(index.ids)["price"])) == prices


def labelled_folder(path):
    """Embeddings of 70 images of 9 labels in files of 20 images, some of which could not be read."""
    generator = np.random.default_rng(0)
    names = [f"label {number}" for number in generator.integers(0, 9, 70)]
    centres = {name: generator.normal(size=6) for name in sorted(set(names))}
    rows = np.stack([centres[name] + 0.7 * generator.normal(size=6) for name in names]).astype(np.float32)
    what = {"images_sha256": "list", "model_sha256": "model", "preparation": {}}
    folder = EmbeddingFolder.create(path, EmbeddingManifest(images=70, dim=6, shard_size=20, **what))
    kept = []
    for shard in range(4):
        ids = [number for number in folder.positions(shard) if number % 13 > 0]
        kept += ids
        paths, labels = [f"{number}.jpg" for number in ids], [names[number] for number in ids]
        folder.write(shard, ShardRows(np.array(ids), rows[ids], paths, labels))
    return [names[number] for number in kept], rows[kept]


def rates_by_loop(names, rows, threshold):
    """The false-match rate and the miss rate, in plain Python."""
    unit = rows / np.linalg.norm(rows, axis=1)[:, None]
    false = missed = 0
    for query, row in enumerate((unit @ unit.T).tolist()):
        others = [score for name, score in zip(names, row) if name != names[query]]
        own = [score for number, score in enumerate(row) if names[number] == names[query] and number != query]
        false += max(others) >= threshold
        missed += max(own) < threshold
    return false / len(names), missed / len(names)


def test_a_threshold_has_the_rates_of_a_loop(tmp_path):
    names, rows = labelled_folder(tmp_path / "e")
    assert min(names.count(name) for name in names) > 1
    for rate in (0.0, 0.1, 0.5):
        settings = {"validation": tmp_path / "e", "false_match_rate": rate, "overwrite": True}
        index, _ = index_embeddings(tmp_path / "e", tmp_path / "i", **settings)
        chosen = index.about["threshold"]
        assert chosen["images"] == 64
        assert (chosen["false_match_rate"], chosen["miss_rate"]) == rates_by_loop(names, rows, chosen["value"])
        assert chosen["false_match_rate"] <= rate < rates_by_loop(names, rows, chosen["value"] - 0.1)[0]
