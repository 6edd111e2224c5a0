"""`index` stores metadata and a threshold with an index, in a folder and in Milvus, and `search` uses them."""

import csv
import json
import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.search.commands.demo import PageAnswers, captioned
from lightning_retrieval.search.commands.index import choose_threshold, index_embeddings, read_metadata
from lightning_retrieval.search.commands.search_images import ImageSearcher, search_images
from lightning_retrieval.search.commands.stores import opened_index
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of, indexing, paths_of, run


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
    code, out, err = command(capsys, *indexing(glyphs[0], output, "--metadata", table, *choosing, *store))
    assert (code, err) == (0, "")
    assert "\nthreshold " in out
    assert out.endswith(" with 40 images\n")
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

    code, out, _ = command(capsys, *searching, "--where", "price < 0")
    assert (code, out) == (0, f"{images / paths[21]}\nNothing was found.\n")
    assert error_of(capsys, *searching, "--where", "price < '3'").startswith("search: `--where` must be a condition")
    error = error_of(capsys, *searching, "--group_by", "colour")
    assert error.startswith("search: `--group_by` must be a column of the index, price (number), code (text), product")


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
    error = error_of(capsys, *args)
    assert error.startswith("index: `--metadata` must have a row for each image of the index, got ")
    assert error.endswith("add them, or give `--missing` keep, with which they have no metadata.\n")
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


SHOWN = {"price": [0.0, 19.5, None], "title": ["Red shoe", "", "x" * 101], "id": ["007", "b", "c"]}


@pytest.fixture
def products(indexed, tmp_path):
    """An index of three glyphs with metadata, some of which are missing; one column is named as a field of a hit."""
    earlier = RetrievalIndex.load(indexed / "index")
    index = RetrievalIndex(earlier.dim, about=earlier.about)
    paths = [f"1/deeper/{name}" for name in ("10.bmp", "11.PNG", "12.bmp")]
    index.add(torch.eye(3, earlier.dim), paths=paths, columns=SHOWN)
    index.save(tmp_path / "products")
    return tmp_path / "products"


def test_search_and_demo_show_metadata(indexed, products, tmp_path, capsys):
    query, page = indexed / "images" / "1" / "deeper" / "10.bmp", tmp_path / "page.html"
    searching = ["search", f"--index={products}", query]
    index = RetrievalIndex.load(products)
    texts = {"price": ["0", "19.5", "-"], "title": ["Red shoe", "-", "x" * 100 + "..."], "id": ["007", "b", "c"]}
    for show, names in ((None, list(SHOWN)), (["title", "price"], ["title", "price"]), ([], [])):
        options = [] if show is None else [f"--show={', '.join(show)}"]
        (result,), _ = search_images(index, [str(query)], show=show, device="cpu")
        values = [{name: SHOWN[name][hit.id] for name in names} for hit in result.hits]
        assert [hit.metadata for hit in result.hits] == values

        assert command(capsys, *searching, *options, "--html", page)[::2] == (0, "")
        code, out, _ = command(capsys, *searching, *options, "--json")
        (found,) = json.loads(out)["queries"]
        assert (code, [hit["metadata"] for hit in found["results"]]) == (0, values)
        _, heads, *lines = command(capsys, *searching, *options)[1].splitlines()
        assert heads.split() == ["rank", "similarity", "distance", "path", *names]
        begins = [heads.index(f"  {name}") + 2 for name in names]
        captions = captioned(result.hits, indexed / "images")
        source = page.read_text(encoding="utf-8")
        for hit, line, (_, caption) in zip(result.hits, lines, captions, strict=True):
            expected = [texts[name][hit.id] for name in names]
            assert line.split()[3] == hit.path
            ends = [*(begin - 2 for begin in begins[1:]), None]
            assert [line[begin:end].rstrip() for begin, end in zip(begins, ends)] == expected
            assert caption.split("\n")[1:] == [f"{name}: {text}" for name, text in zip(names, expected)]
            details = "".join(f"<span>{name} <bdi>{text}</bdi></span>" for name, text in zip(names, expected))
            assert f'{hit.path}</span><span class="details">{details}</span></button>' in source


@pytest.mark.refusal
def test_columns_to_show_must_be_those_of_the_index(indexed, products, capsys):
    query = indexed / "images" / "1" / "deeper" / "10.bmp"
    rule = "must be columns of the index, price (number), title (text), id (text), got 'colour'.\n"
    for args in (["search", query], ["demo", "--images", indexed / "images"]):
        assert error_of(capsys, *args, f"--index={products}", "--show=price,colour") == f"{args[0]}: `--show` {rule}"
    rule = "search_images: `show` must be a sequence of strings, got one str"
    with pytest.raises(TypeError, match=f"^{rule}"):
        search_images(RetrievalIndex.load(products), [str(query)], show="price", device="cpu")


@pytest.mark.refusal
@pytest.mark.parametrize(("of_table", "of_file"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_in_another_unicode_form_is_told_from_a_missing_row(tmp_path, of_table, of_file):
    """Programs of macOS write such names, which look the same."""
    files = [unicodedata.normalize(of_file, name) for name in ("größe.png", "a.png")]
    table = tmp_path / "t.csv"
    table.write_text(f"image,price\n{unicodedata.normalize(of_table, files[0])},1\na.png,2\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"1 of 2 images are missing.*; write .* in the same Unicode form as the names"
    ):
        read_metadata(table, files)
    with pytest.raises(ValueError, match=r"1 of 3 images are missing, such as 'new\.png'; add them, or give"):
        read_metadata(table, [unicodedata.normalize(of_table, files[0]), "a.png", "new.png"])


@pytest.mark.refusal
def test_metadata_that_no_image_has_or_that_milvus_cannot_store_is_an_error(glyphs, tmp_path, capsys):
    table = tmp_path / "some.csv"
    table.write_text("image,price\nothers.png,1\n")
    args = indexing(glyphs[0], tmp_path / "index", "--metadata", table, "--missing=keep")
    assert "in which 40 of 40 images are missing" in error_of(capsys, *args)
    args.remove("--metadata")
    args.remove(table)
    assert error_of(capsys, *args) == "index: `--missing` must be given with `--metadata`, got 'keep'.\n"
    pytest.importorskip("milvus_lite")
    table.write_text(f"image,price\n{paths_of(glyphs[0] / 'images')[1]},1\n")
    args = indexing(glyphs[0], "name", "--metadata", table, "--missing=keep", "--store", f"milvus:{tmp_path / 'a.db'}")
    error = error_of(capsys, *args)
    assert error.startswith(
        "index: `--metadata` must have all numbers for an index in Milvus, got price, of which some"
    )


def test_metadata_and_threshold_survive_an_update(glyphs, table, validation, place, tmp_path, capsys):
    output, store = place
    folder = shutil.copytree(glyphs[0], tmp_path / "g")
    gone, late = paths_of(folder / "images")[:2]
    (folder / "images" / late).rename(tmp_path / "late")
    args = indexing(folder, output, *store)
    choosing = ["--validation", validation, "--false_match_rate"]
    assert command(capsys, *args, "--metadata", table, *choosing, 0.1)[0] == 0
    for more in ([], ["--update"]):
        error = error_of(capsys, *args, *more)
        assert f"`--metadata` must have the columns of {output}, price (number), code (text)" in error

    (tmp_path / "late").rename(folder / "images" / late)
    (folder / "images" / gone).unlink()
    for settings, rate in (([], 0.1), ([*choosing, 0.5], 0.5)):
        assert command(capsys, *args, "--metadata", table, "--update", *settings)[::2] == (0, "")
        with opened_index(Path(output), "".join(store[1:]) or None) as index:
            price = dict(zip(index.paths(index.ids), index.columns(index.ids)["price"]))
            assert price == {path: row / 4 for row, path in enumerate(paths_of(glyphs[0] / "images")) if row > 0}
            assert index.about["threshold"]["false_match_rate"] == pytest.approx(rate, abs=0.03)
    sentence = "the replaced index had a threshold, the new one has none"
    for had in (True, False):
        code, out, _ = command(capsys, *args, "--overwrite")
        assert (code, sentence in out) == (0, had)


def test_an_index_of_embeddings_has_metadata(glyphs, embeddings, table, tmp_path):
    on_disk = {"factory": "IVF2,Flat", "parameters": "nprobe=2", "rows_in_memory": 65_536}
    index_embeddings(embeddings, tmp_path / "i", metadata=table, **on_disk)
    index = RetrievalIndex.load(tmp_path / "i", mapped=True)
    assert index.column_kinds == {"price": "number", "code": "text", "product": "text"}
    paths = paths_of(glyphs[0] / "images")
    assert index.columns(index.ids)["code"] == [f"{paths.index(path):03d}" for path in index.paths(index.ids)]


@pytest.mark.filterwarnings("ignore:the column 'a' of `metadata` holds text:UserWarning")
@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["1", "-20"], [1.0, -20.0]),
        (["1.50", "-2e-3"], [1.5, -0.002]),
        (["9007199254740993", "1"], None),
        (["01", "2"], None),
        (["1e999", "2"], None),
        (["nan", "1"], None),
        (["", "1"], None),
        (["1_000", "2"], None),
        (["\u0661", "2"], None),
    ],
)
def test_a_column_of_a_table_is_numbers_or_text(texts, values, tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("image,a\n" + "".join(f"{row}.jpg,{text}\n" for row, text in enumerate(texts)))
    found = read_metadata(table, ["1.jpg", "0.jpg"])
    assert found == {"a": (values or texts)[::-1]}


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
    code, _, err = run(capsys, "index", *args, "--columns=image=", "--overwrite")
    assert (code, err) == (2, "index: `--columns` must be pairs such as image=path,label=class, got image=.\n")


@pytest.mark.refusal
@pytest.mark.parametrize(("other", "line"), [("n/a", 3), ("", 5), ("007", 2), ("1,5", 4), ("1e999", 2)])
def test_a_column_of_numbers_with_one_text_is_warned_of(other, line, tmp_path):
    texts = ["1.5", "2", "3", "4"]
    texts[line - 2] = other
    rows = [("image", "price", "name"), *((f"{row}.jpg", text, "ab3d"[row]) for row, text in enumerate(texts))]
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    where = f"1 of its 4 values .* {re.escape(repr(other))} at line {line} of {re.escape(str(tmp_path / 't.csv'))}"
    with pytest.warns(UserWarning, match=f"^the column 'price' of `metadata` holds text, .* {where}") as caught:
        found = read_metadata(tmp_path / "t.csv", ["0.jpg", "1.jpg", "2.jpg", "3.jpg"])
    assert len(caught) == 1
    assert found["price"] == texts


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "`--metadata` must be a CSV or Parquet table, got"),
        ("image,a\nx.png,1\nx.png,2\n", "`image` must be different in each row"),
        ("image,a\nx.png,1\n", "`--metadata` must have a row for each image of the index"),
        ("image,a,a\nx.png,1,2\n", "must name each column once, got a twice"),
    ],
)
def test_tables_that_are_not_metadata_raise(text, sentence, glyphs, tmp_path, capsys):
    if text is not None:
        (tmp_path / "t.csv").write_text(text)
    error = error_of(capsys, *indexing(glyphs[0], tmp_path / "i", "--metadata", tmp_path / "t.csv"))
    assert sentence in error
    assert not (tmp_path / "i").exists()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("image\nx.png\n", "`metadata` must have columns besides image, got none"),
        ("image,a b\nx.png,1\n", "`columns` must have names of letters, digits and _"),
    ],
)
def test_names_of_columns_that_are_missing_or_invalid_raise(text, sentence, tmp_path):
    table = tmp_path / "t.csv"
    table.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_metadata(table, ["x.png"])


def labelled_folder(path):
    """Embeddings of 70 images of 9 labels in files of 20 images, some of which could not be read."""
    generator = np.random.default_rng(0)
    names = [f"label {number}" for number in generator.integers(0, 9, 70)]
    centres = {name: generator.normal(size=6) for name in sorted(set(names))}
    rows = np.stack([centres[name] + 0.7 * generator.normal(size=6) for name in names]).astype(np.float32)
    what = {"images_sha256": "list", "model_sha256": "model", "preparation": {}, "file_format": "npy"}
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
        chosen = choose_threshold(tmp_path / "e", rate, {})["threshold"]
        assert chosen["images"] == 64
        assert (chosen["false_match_rate"], chosen["miss_rate"]) == rates_by_loop(names, rows, chosen["value"])
        assert chosen["false_match_rate"] <= rate < rates_by_loop(names, rows, chosen["value"] - 0.1)[0]


def test_search_and_demo_say_that_nothing_is_similar(indexed, glyphs, tmp_path, capsys):
    image = glyphs[0] / "images" / paths_of(glyphs[0] / "images")[7]
    page = tmp_path / "page.html"
    options = ["--index", indexed / "index", "-k=3", "--html", page]
    code, out, err = command(capsys, "search", *options, image, "--threshold=1.5")
    index = RetrievalIndex.load(indexed / "index")
    nearest = index.search(glyphs[1][7:8], 1)[0].item()
    sentence = f"Nothing similar: the nearest image has similarity {nearest:.4f}, below 1.5000."
    assert (code, out, err) == (0, f"{image}\n{sentence}\n", "")
    assert f"<p>{sentence}</p>" in page.read_text()

    pytest.importorskip("gradio")
    index.about["threshold"] = {"value": 1.5}
    answers = PageAnswers(ImageSearcher(index, device="cpu"), glyphs[0] / "images", 3)
    _, text, _, paths, _ = answers.of_upload(str(image))
    assert text.endswith(sentence)
    assert paths == []


@pytest.mark.refusal
def test_thresholds_that_cannot_be_chosen_raise(glyphs, embeddings, other_model, validation, tmp_path, capsys):
    args = ["index", "--embeddings", embeddings, "--output", tmp_path / "i"]
    rules = {
        ("--false_match_rate=0.1",): "`--validation` must be given with `--false_match_rate`, and neither alone",
        ("--validation", embeddings): "`--validation` must be given with `--false_match_rate`, and neither alone",
        ("--validation", validation, "--false_match_rate=2"): "`--false_match_rate` must be from 0 to 1, got 2.0",
        ("--validation", embeddings, "--false_match_rate=0"): "`--validation` must have a label for each image",
    }
    for options, rule in rules.items():
        code, _, err = run(capsys, *args, *options)
        assert (code, rule in err) == (2, True), err
    args = ["index", "--checkpoint", other_model, "--images", glyphs[0] / "images", "--output", tmp_path / "i"]
    error = error_of(capsys, *args, "--validation", validation, "--false_match_rate=0.1")
    assert "`--validation` must be of the model of the index" in error
    assert "they are of another model" in error
    assert not (tmp_path / "i").exists()
    what = {"images_sha256": "list", "model_sha256": "model", "preparation": {}, "file_format": "npy"}
    manifest = EmbeddingManifest(images=2, dim=2, shard_size=2, **what)
    folder = EmbeddingFolder.create(tmp_path / "e", manifest)
    folder.write(0, ShardRows(np.arange(2), np.eye(2, dtype=np.float32), ["a.jpg", "b.jpg"], ["a", "b"]))
    with pytest.raises(ValueError, match=r"`validation` must have several images of a label"):
        choose_threshold(tmp_path / "e", 0.5, {})


@pytest.mark.refusal
@pytest.mark.parametrize("recorded", [{"value": "high"}, {}, [1], "x", 0.5, {"value": float("nan")}])
def test_an_index_whose_threshold_is_not_a_number_raises(indexed, recorded):
    index = RetrievalIndex.load(indexed / "index")
    index.about["threshold"] = recorded
    with pytest.raises(ValueError, match=r"search_images: `threshold` must be given, because the index must record"):
        ImageSearcher(index, device="cpu")
