"""ImageTable: CSV and Parquet, splits, roles and boxes, errors with line numbers, and training on a table."""

import csv
import warnings
from decimal import Decimal

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from sklearn.metrics import average_precision_score

from lightning_retrieval import RetrievalModule, SharedTags, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules.image_index import DISTRACTOR, ROLES
from lightning_retrieval.datamodules.image_table import ImageTable
from lightning_retrieval.datamodules.table_file import read_table
from lightning_retrieval.datamodules.text_table import TextTable
from lightning_retrieval.models import NgramTokenizer
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, begin_with_byte_order_mark, fit_and_validate, write_images
from tests.quiet_trainer import quiet_trainer

refusal = pytest.mark.refusal


def write_csv(root, *rows):
    """Write these rows, the header first, as a table."""
    root.mkdir(exist_ok=True)
    with (root / "images.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return root


def read(root, table="images.csv", **settings):
    return ImageTable(root, table, **settings).splits


SPLIT_ROWS = [
    ("label", "image", "note", "split"),
    ("20", "a, b.jpg", "comma", "train"),
    ("100", "b/ß 日.JPG", "", "train"),
    ("3", "c.jpg", "x", "train"),
    ("20", "d.jpg", "", "train"),
    ("7", "e.jpg", "", "test"),
    ("-1", "f.jpg", "", "test"),
]


def test_columns_may_have_any_order_and_integer_labels_are_sorted_as_numbers(tmp_path):
    splits = read(write_csv(tmp_path, *SPLIT_ROWS))
    train, test = splits["train"], splits["test"]
    assert list(train.paths) == ["a, b.jpg", "b/ß 日.JPG", "c.jpg", "d.jpg"]
    assert train.labels.tolist() == [1, 2, 0, 1]
    assert list(train.names) == ["3", "20", "100"]
    assert list(test.paths) == ["e.jpg", "f.jpg"]
    assert (test.labels.tolist(), list(test.names)) == ([1, 0], ["-1", "7"])
    for index in splits.values():
        assert index.roles is index.boxes is index.categories is None


def test_labels_are_text_if_one_is_not_an_integer_as_python_writes_it(tmp_path):
    rows = [("image", "label", "split"), *[(f"{i}.jpg", name, "train") for i, name in enumerate(["7", "007", "10"])]]
    splits = read(write_csv(tmp_path, *rows, ("t.jpg", "8", "test")))
    assert list(splits["train"].names) == ["007", "10", "7"]
    assert splits["train"].labels.tolist() == [2, 0, 1]


def test_without_a_column_split_the_classes_are_split_by_the_seed(tmp_path):
    names = [f"class {i}" for i in range(10)]
    rows = [(f"{name}/{i}.jpg", name) for name in names for i in range(2)]
    root = write_csv(tmp_path, ("image", "label"), *rows)
    splits = read(root, test_fraction=0.3, split_seed=4)
    drawn = {names[i] for i in np.random.default_rng(4).permutation(10)[:3]}
    assert list(splits["test"].names) == sorted(drawn)
    assert list(splits["train"].names) == sorted(set(names) - drawn)
    assert list(splits["test"].paths) == [path for path, name in rows if name in drawn]
    assert list(read(root, test_fraction=0.3, split_seed=5)["test"].names) != sorted(drawn)


def test_val_rows_form_the_validation_set_and_others_the_test_sets(tmp_path):
    rows = [(f"{split}{i}.jpg", split, split) for split in ("train", "val", "easy", "hard") for i in range(2)]
    data = ImageTable(write_csv(tmp_path, ("image", "label", "split"), *rows), "images.csv")
    assert list(data.val_set.index.paths) == ["val0.jpg", "val1.jpg"]
    assert {name: list(part.index.paths) for name, part in data.test_set.items()} == {
        "easy": ["easy0.jpg", "easy1.jpg"],
        "hard": ["hard0.jpg", "hard1.jpg"],
    }


def test_roles_and_distractors(tmp_path):
    rows = [
        ("image", "label", "split", "role"),
        *[(f"{i}.jpg", "a", "train", "") for i in range(2)],
        ("q.jpg", "b", "test", "query"),
        ("g.jpg", "b", "test", "gallery"),
        ("d.jpg", "", "test", "distractor"),
        ("e.jpg", "whatever", "test", "distractor"),
        ("f.jpg", "b", "test", ""),
    ]
    splits = read(write_csv(tmp_path, *rows))
    assert splits["train"].roles is None
    wanted = [ROLES[role] for role in ("query", "gallery", "distractor", "distractor", "both")]
    assert splits["test"].roles.tolist() == wanted
    assert splits["test"].labels.tolist() == [0, 0, DISTRACTOR, DISTRACTOR, 0]
    assert list(splits["test"].names) == ["b"]


def test_distractors_belong_to_the_test_set_if_the_classes_are_split(tmp_path):
    rows = [(f"{i}.jpg", i % 4, "both") for i in range(8)] + [("d.jpg", "", "distractor")]
    splits = read(write_csv(tmp_path, ("image", "label", "role"), *rows))
    assert splits["test"].labels.tolist() == [0, 1, 0, 1, DISTRACTOR]
    assert splits["train"].labels.tolist() == [0, 1, 0, 1]


def test_categories_and_cameras_have_one_number_in_all_splits(tmp_path):
    rows = [("image", "label", "category", "camera", "split")]
    for i, (category, camera) in enumerate(zip([30, 4, 30, 5, 4], ["c3", "c1", "c3", "c2", "c1"])):
        rows.append((f"{i}.jpg", i, category, camera, "train" if i < 3 else "test"))
    splits = read(write_csv(tmp_path, *rows))
    assert splits["train"].categories.tolist() == splits["train"].cameras.tolist() == [2, 0, 2]
    assert splits["test"].categories.tolist() == splits["test"].cameras.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"^ImageTable: `camera` must not be empty in any row, at line 3 of"):
        read(write_csv(tmp_path, rows[0], rows[1], ("b.jpg", "9", "5", "", "test")))


def test_the_protocol_of_market_1501(tmp_path):
    """The positives of two of the three queries are under their own cameras, so these queries are skipped."""
    paths = [f"ä {i}.JPG" for i in range(10)]
    write_images(tmp_path, paths)
    write_image(tmp_path / paths[2], "CMYK")
    labels = ["x", "x", "y", "y", "z", "z", "z", "z", "u", "u"]
    split = ["train"] * 4 + ["val"] * 6
    roles = [""] * 4 + ["query", "query", "gallery", "gallery", "query", "gallery"]
    cameras = ["1", "2", "1", "2", "1", "2", "1", "1", "3", "3"]
    rows = zip(paths, labels, split, roles, cameras, strict=True)
    root = write_csv(tmp_path, ("image", "label", "split", "role", "camera"), *rows)
    logged = fit_and_validate(ImageTable(root, "images.csv", **QUICK))
    assert logged["val/skipped_queries"] == 2
    assert 0 < logged["val/mAP"] <= 1


def test_a_table_with_tags_alone_is_trained_and_evaluated_by_shared_tags(tmp_path):
    """The loss of the first step and the mAP are those of the sets of words in the table."""
    words = ["red;hat", "red", "blue;hat", "blue", "", "red;blue", "hat", "hat;old", "blue", "red;hat", "red", "old"]
    tags_of = {f"{number}.png": set(text.split(";")) - {""} for number, text in enumerate(words * 2)}
    rows = [(name, ";".join(tags), "train" if i < 12 else "test") for i, (name, tags) in enumerate(tags_of.items())]
    write_images(tmp_path, tags_of)
    data = ImageTable(write_csv(tmp_path, ("image", "tags", "split"), *rows), "images.csv", sampler="tags", **QUICK)
    network = torch.nn.Sequential(torch.nn.AvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 8))
    loss = SmoothAPLoss(tau=0.1)

    def relevant(names):
        return torch.tensor([[bool(tags_of[one] & tags_of[other]) for other in names] for one in names])

    def scores(items):
        with torch.no_grad():
            rows = torch.nn.functional.normalize(network(torch.stack([item["images"] for item in items])))
        return rows @ rows.T

    drawn = next(iter(data.train_sampler()))
    names = [data.train_set.index.paths[image] for image in drawn]
    assert len(drawn) == len(set(names)) == 4
    others = ~torch.eye(4, dtype=torch.bool)
    expected = loss.from_scores(scores([data.train_set[image] for image in drawn]), relevant(names) & others, others)
    module = RetrievalModule(network, loss, relevance=SharedTags())
    trainer = quiet_trainer(max_steps=1, num_sanity_val_steps=0, callbacks=[RetrievalEvaluation((1,))])
    trainer.fit(module, datamodule=data)
    assert trainer.callback_metrics["train/loss"] == pytest.approx(float(expected), abs=1e-5)

    trainer.validate(module, datamodule=data, verbose=False)
    found, names = scores(list(map(data.test_set.__getitem__, range(12)))), list(data.test_set.index.paths)
    precisions = []
    for query, row in enumerate(relevant(names)):
        in_list = [other for other in range(12) if other != query]
        if row[in_list].any():
            precisions.append(average_precision_score(row[in_list], found[query, in_list]))
    assert len(precisions) == 11
    assert trainer.callback_metrics["val/mAP"] == pytest.approx(np.mean(precisions), abs=1e-5)


@pytest.mark.parametrize("columns", [1, 4])
def test_boxes_are_cropped_to_the_image_and_may_be_empty(tmp_path, columns):
    write_images(tmp_path, ["0.png", "1.png", "2.png"])
    boxes = ["-5 4 12.4 99", "10 4 30 20", ""]
    if columns == 4:
        header = ("bottom", "left", "top", "right")
        cells = [(b.split()[3], *b.split()[:3]) if b else ("",) * 4 for b in boxes]
    else:
        header, cells = ("box",), [(box,) for box in boxes]
    rows = [(f"{i}.png", i, "train" if i < 2 else "test", *cell) for i, cell in enumerate(cells)]
    data = ImageTable(write_csv(tmp_path, ("image", "label", "split", *header), *rows), "images.csv")
    assert data.splits["train"].boxes.tolist() == [[-5, 4, 12, 99], [10, 4, 30, 20]]
    whole = Image.open(tmp_path / "0.png").convert("RGB")
    assert np.array_equal(np.asarray(data.train_set.read(0)), np.asarray(whole.crop((0, 4, 12, 40))))
    assert data.train_set.read(1).size == (20, 16)
    assert data.test_set.read(0).size == (48, 40)


def test_parquet_and_csv_give_the_same_index(tmp_path):
    columns = {
        "split": ["train", "train", "test", "test", "test"],
        "label": pyarrow.array([20, 3, 100, None, 100]),
        "image": ["a.jpg", "ß b.JPG", "c.jpg", "d.jpg", "e.jpg"],
        "box": pyarrow.array([[0, 1, 2, 3], [4, 5, 6, 7], None, [1, 1, 9, 9], None]),
        "role": [None, None, "query", "distractor", "gallery"],
        "note": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "images.parquet")
    boxes, roles = ["0 1 2 3", "4 5 6 7", "", "1 1 9 9", ""], ["", "", "query", "distractor", "gallery"]
    texts = {**columns, "label": ["20", "3", "100", "", "100"], "box": boxes, "role": roles}
    write_csv(tmp_path, tuple(texts), *zip(*texts.values(), strict=True))
    of_csv, of_parquet = read(tmp_path), read(tmp_path, "images.parquet")
    assert list(of_csv) == list(of_parquet) == ["train", "test"]
    for split, index in of_csv.items():
        wanted, found = index.arrays(), of_parquet[split].arrays()
        assert wanted.keys() == found.keys()
        assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    assert of_csv["test"].labels.tolist() == [0, DISTRACTOR, 0]


PARQUET_TYPES = {
    "bytes": (pyarrow.binary(), str.encode),
    "bytes of one length": (pyarrow.binary(1), str.encode),
    "dictionary": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), str),
    "decimal": (pyarrow.decimal128(9, 2), Decimal),
    "float": (pyarrow.float32(), float),
    "large text": (pyarrow.large_string(), str),
    "list": (pyarrow.list_(pyarrow.binary()), lambda text: [text.encode()]),
}


@pytest.mark.parametrize("kind", PARQUET_TYPES)
def test_the_types_of_a_parquet_file_give_the_texts_of_a_csv_file(tmp_path, kind):
    type_, convert = PARQUET_TYPES[kind]
    texts = ["7", "7", "8", "8", "9", "9"]
    names = [f"{row}.jpg" for row in range(6)]
    values = pyarrow.array([convert(text) for text in texts], type_)
    paths = pyarrow.array(names)
    if kind == "bytes":
        paths = paths.cast(pyarrow.binary())
    parquet.write_table(pyarrow.table({"image": paths, "label": values, "tags": values}), tmp_path / "a.parquet")
    found = read_table(tmp_path / "a.parquet").columns
    assert found == {"image": names, "label": texts, "tags": texts}


@refusal
@pytest.mark.parametrize("value", [{"path": "a.jpg", "bytes": b""}, b"caf\xe9"])
def test_parquet_columns_that_hold_no_text_raise(tmp_path, value):
    parquet.write_table(pyarrow.table({"path": [value] * 4, "label": [1, 1, 2, 2]}), tmp_path / "a.parquet")
    sentence = r"^ImageTable: `path` must hold text in UTF-8, .* got the type (struct|binary)"
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, "a.parquet", columns={"image": "path"})


def test_tags_are_separated_by_semicolons_and_numbered_for_all_splits_together(tmp_path):
    rows = [
        ("image", "label", "tags", "split", "role"),
        ("a.jpg", "1", "red; long dress", "train", ""),
        ("b.jpg", "1", "", "train", ""),
        ("c.jpg", "1", ";red ;; red", "train", ""),
        ("d.jpg", "2", "blue,green;long dress;sale", "test", ""),
        ("e.jpg", "", "red", "test", "distractor"),
    ]
    splits = read(write_csv(tmp_path, *rows))
    train, test = splits["train"], splits["test"]
    assert list(train.tag_names) == list(test.tag_names) == ["blue,green", "long dress", "red", "sale"]
    assert train.tags.tolist() == [[2, 1, -1], [-1, -1, -1], [2, -1, -1]]
    assert test.tags.tolist() == [[0, 1, 3], [-1, -1, -1]]  # a distractor is relevant to no query


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("tags", "warned"),
    [
        (("red|dress", "red"), "'red|dress' at line 2 .* (1 such rows)"),
        (("red; blue", "red|dress"), "'red|dress' at line 3 .* (1 such rows)"),
        (("red, dress", "red, hat"), "'red, dress' at line 2 .* (2 such rows)"),
        (("red; blue, dark", "red"), None),
        (("red dress", "clothes/hat"), None),
    ],
)
@pytest.mark.parametrize("kind", ["images", "texts"])
def test_tags_with_another_separator_are_warned_of(tmp_path, kind, tags, warned):
    rows = [(f"{number}.jpg", "x", text, "train") for number, text in enumerate(tags)]
    root = write_csv(tmp_path, ("image", "label", "tags", "split"), *rows, ("9.jpg", "y", "", "test"))
    data = ImageTable(root, "images.csv")
    if kind == "texts":
        write_text(root / "images.csv", (root / "images.csv").read_text().replace("image,", "text,"))
        data = TextTable(root / "images.csv", tokenizer=NgramTokenizer())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.splits  # noqa: B018
    found = [str(warning.message) for warning in caught if "separated by ';'" in str(warning.message)]
    assert len(found) == (warned is not None)
    for text in found:
        assert all(part in text for part in warned.split(" .* "))


def forty_rows(columns=("image", "label", "note")):
    """Lines of a table whose first row is in line 2."""
    values = {"label": "{0}", "note": "note {0}", "price": "{1}", "text": "text {1}", "split": "train"}
    lines = [",".join(columns)]
    for number in range(40):
        row = {"image": f"{number}.jpg", **{name: text.format(number % 4, number) for name, text in values.items()}}
        lines.append(",".join(row[name] for name in columns))
    return lines


def with_quotes(lines, column, **quotes):
    """Write a quote at the start of the field in one line, and at the end of the field in another, if it is given."""
    changed = list(lines)
    for place, line in quotes.items():
        fields = changed[line - 1].split(",")
        fields[column] = f'"{fields[column]}' if place == "start" else f'{fields[column]}"'
        changed[line - 1] = ",".join(fields)
    return "\n".join(changed) + "\n"


STRAY = {
    "one quote": ((2, {"start": 5}), "unexpected end of data in line 41, in the row that begins in line 5"),
    "two at the start": ((2, {"start": 5, "again": 9}), None),
    "label": ((1, {"start": 5, "end": 9}), "`label` must not hold other rows, .* in lines 5 to 9 of"),
    "image": ((0, {"start": 5, "end": 6}), "`image` must not hold other rows, .* in lines 5 to 6 of"),
    "other column": ((2, {"start": 5, "end": 9}), "`note` must not hold other rows, .* in lines 5 to 9 of"),
}


@pytest.mark.refusal
@pytest.mark.parametrize("case", STRAY)
def test_a_stray_quote_hides_no_row(tmp_path, case):
    (column, quotes), sentence = STRAY[case]
    if sentence is None:
        lines = with_quotes(forty_rows(), column, start=5).splitlines()
        text, sentence = with_quotes(lines, column, start=9), "',' expected after .* in line 9, in the row .* in line 5"
    else:
        text = with_quotes(forty_rows(), column, **quotes)
    write_text(tmp_path / "images.csv", text)
    with pytest.raises(ValueError, match=f"^ImageTable: .*{sentence}"):
        read(tmp_path)


UNIQUE = {
    "text, label": (("text", "label"), "a text of the number {0},{0}", 0),
    "image, title": (("image", "title"), "{0}.jpg,a title of {0}", 1),
    "image, label, title": (("image", "label", "title"), "{0}.jpg,{0},a title", 2),
    "words": (("image", "title"), "{1}.JPG,{1}", 1),
}


@pytest.mark.refusal
@pytest.mark.parametrize("case", UNIQUE)
@pytest.mark.parametrize("end", [6, 7, 12])
def test_a_stray_quote_hides_no_row_of_values_that_occur_once(tmp_path, case, end):
    columns, row, column = UNIQUE[case]
    lines = [",".join(columns), *(row.format(number, "abcdefghijklmnopqrst"[number] * 3) for number in range(20))]
    write_text(tmp_path / "t.csv", with_quotes(lines, column, start=5, end=end))
    with pytest.raises(ValueError, match=f"^`{columns[column]}` must not hold other rows, .* in lines 5 to {end}"):
        read_table(tmp_path / "t.csv", columns[:1], all_columns=True)


def test_quotes_that_hide_no_row_are_read(tmp_path):
    rows = [
        ("image", "label", "note"),
        ("a, b.jpg", "two\twords", "one\nline, or\ntwo\nlines"),
        ("c.jpg", 'of 27"', "x"),
    ]
    root = write_csv(tmp_path, *rows, *((f"{number}.jpg", "x", "") for number in range(4)))
    found = read_table(root / "images.csv", all_columns=True).columns
    assert [tuple(column[:2]) for column in found.values()] == list(zip(*rows[1:]))
    write_text(root / "images.csv", 'image,label\na.jpg,of 27" wide\n')  # a quote within a field without quotes
    assert read_table(root / "images.csv").columns["label"] == ['of 27" wide']


@pytest.mark.refusal
@pytest.mark.parametrize("columns", [("text", "label"), ("label", "text"), ("label", "text", "split")])
def test_texts_of_several_lines_are_read_unless_they_hold_rows(tmp_path, columns):
    poem = 'roses are red,\nviolets, blue\n\nand "this", too'
    rows = [{"text": poem, "label": "poem", "split": "train"}, {"text": "a sofa", "label": "sofa", "split": "test"}]
    table = tmp_path / "t.csv"
    with table.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *([row[name] for name in columns] for row in rows)])
    assert read_table(table, ("text", "label")).columns["text"] == [poem, "a sofa"]
    assert {text for part in TextTable(table, tokenizer=len).splits.values() for text in part.texts} == {poem, "a sofa"}
    column = columns.index("text")
    for end in (6, 7, 9):
        write_text(table, with_quotes(forty_rows(columns), column, start=5, end=end))
        sentence = rf"^TextTable: `text` must not hold other rows, .* in lines 5 to {end} of"
        with pytest.raises(ValueError, match=sentence):
            TextTable(table, tokenizer=len).splits  # noqa: B018


def test_without_a_column_label_the_files_are_split_and_boxes_of_one_file_stay_together(tmp_path):
    rows = [(f"{i // 2}.jpg", "0 0 5 5" if i % 2 else "5 5 9 9", "red") for i in range(12)]
    root = write_csv(tmp_path, ("image", "box", "tags"), *rows)
    splits = read(root, test_fraction=0.5, split_seed=4)
    assert [len(index) for index in splits.values()] == [6, 6]
    assert not set(splits["train"].paths) & set(splits["test"].paths)
    assert splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert splits["train"].names is None
    drawn = {f"{i}.jpg" for i in np.random.default_rng(4).permutation(6)[:3]}
    assert set(splits["test"].paths) == drawn
    with pytest.raises(ValueError, match=r"^PKSampler: .* or use TagSampler if the images have tags\."):
        ImageTable(write_csv(tmp_path, ("image", "tags"), *[(f"{i}.jpg", "red") for i in range(4)]), "images.csv",
                   classes_per_batch=1, samples_per_class=2).train_sampler()  # fmt: skip


@refusal
def test_tags_without_labels_are_the_cure_for_classes_in_training_and_evaluation(tmp_path):
    rows = [("image", "label", "tags", "split"), ("a.jpg", "1", "x", "train"), ("b.jpg", "1", "x", "test")]
    with pytest.raises(ValueError, match=r"such as '1' .*; leave out the labels if only the tags count\."):
        read(write_csv(tmp_path, *rows))
    assert list(read(write_csv(tmp_path, *[(row[0], *row[2:]) for row in rows]))) == ["train", "test"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["query", "gallery", ""], [ROLES["query"], ROLES["gallery"], ROLES["both"]]),
        (["both", "gallery", ""], [ROLES["both"], ROLES["gallery"], ROLES["both"]]),
        (["gallery", "gallery", "gallery"], None),  # no image would have a list
        (["query", "query", "query"], None),
        (["", "both", ""], None),
    ],
)
def test_training_images_have_roles_if_some_are_queries_and_some_are_gallery(tmp_path, names, wanted):
    training = [(f"{i}.jpg", "a", "train", name) for i, name in enumerate(names)]
    roles = read(write_csv(tmp_path, ROLE, *training, ("t.jpg", "b", "test", "")))["train"].roles
    assert (None if roles is None else roles.tolist()) == wanted


def test_images_that_are_held_out_of_training_have_no_roles(tmp_path):
    roles = ["query", "gallery"] * 4
    training = [(f"{i}.jpg", str(i // 2), "train", role) for i, role in enumerate(roles)]
    root = write_csv(tmp_path, ROLE, *training, ("t.jpg", "b", "test", ""))
    data = ImageTable(root, "images.csv", val_fraction=0.5, **QUICK)
    assert data.train_set.index.roles is not None
    assert data.val_set.index.roles is None


def test_the_tags_of_a_parquet_file_may_be_lists(tmp_path):
    tags = [["red", "long dress"], [], None, ["red", None]]
    columns = {"image": [f"{i}.jpg" for i in range(4)], "tags": tags, "split": ["train", "train", "test", "test"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "images.parquet")
    splits = read(tmp_path, "images.parquet")
    assert splits["train"].tags.tolist() == [[1, 0], [-1, -1]]
    assert splits["test"].tags.tolist() == [[-1, -1], [1, -1]]
    columns["tags"] = [[3, 20], [20], [3], []]
    parquet.write_table(pyarrow.table(columns), tmp_path / "images.parquet")
    assert sorted(read(tmp_path, "images.parquet")["train"].tag_names) == ["20", "3"]


TRAIN, TEST = ("a.jpg", "1", "train"), ("b.jpg", "2", "test")
PLAIN = ("image", "label", "split")
ROLE, BOX = (*PLAIN, "role"), (*PLAIN, "box")


@refusal
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("path", "label")], "line 1 of .*images.csv must name the columns .* got 'path,l.*lacks image"),
        ([("image", "label", "left", "top")], "which lacks right, bottom"),
        ([("image", "label", "image")], "must name each column once, got image twice"),
        ([PLAIN], "images.csv must have rows, got only the header"),
        ([PLAIN, TRAIN, (), ("c.jpg", "3")], "must have the header's 3 fields, got 2, at line 4 of .*images.csv"),
        ([PLAIN, TRAIN, ("", "1", "train")], "`image` must not be empty in any row, at line 3 of"),
        ([PLAIN, TRAIN, ("c.jpg", " ", "test")], "`label` must not be empty in any row, at line 3 of"),
        ([PLAIN, TRAIN, ("b.jpg", "2", "a/b")], "`split` must be train, .*got 'a/b', at line 3"),
        (
            [PLAIN, ("a.jpg", "1", "Train"), TEST],
            "`split` must be train, val or test in lower case, got 'Train', at line 2",
        ),
        ([PLAIN, TRAIN], "`split` must have rows of train and of val, test or others, got 'train' in"),
        ([PLAIN, TRAIN, TEST, TEST, TEST], r"`image` must .*got 'b.jpg' as in line 3, at line 4 of .*\(2 such"),
        ([ROLE, (*TRAIN, ""), (*TEST, "Query")], "`role` must be one of query, .*got 'Query', at line 3"),
        ([ROLE, (*TRAIN, "distractor"), (*TEST, "")], "query, gallery or both in training, got 'distractor'"),
        ([ROLE, (*TRAIN, ""), (*TEST, "distractor")], "`role` must be query or both .* of 'test', got none in"),
        ([ROLE, (*TRAIN, ""), (*TEST, "query")], "`role` must be gallery or both .* of 'test', got none"),
        ([(*PLAIN, "category"), (*TRAIN, "1"), (*TEST, "")], "`category` must not be empty in any row, at line 3"),
        ([BOX, (*TRAIN, "1 2 3"), (*TEST, "")], "`box` must be .*got '1 2 3', at line 2"),
        ([BOX, (*TRAIN, "1 2 1 9"), (*TEST, "x 1 2 3")], r"right > left .*got '1 2 1 9', at line 2.*\(2 such"),
        (
            [BOX, (*TRAIN, ""), (*TEST, "0 0 5 5"), (*TEST, ""), (*TEST, "")],
            "another box, .* line 4, at line 5",
        ),
        ([PLAIN, TRAIN, ("a//./x/b.jpg", "2", "test"), ("./a/x/b.jpg", "2", "test")], "got 'a/x/b.jpg' as in line 3"),
    ],
)
def test_invalid_rows_raise(tmp_path, rows, message):
    with pytest.raises(ValueError, match=f"(?s)^ImageTable: .*{message}|^ImageIndex: .*{message}"):
        read(write_csv(tmp_path, *rows))


OWN_NAMES = {"image": "path", "label": "class", "split": "part", "box": "region"}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_may_have_other_names_and_another_separator(tmp_path, delimiter, kind):
    """A column that has the name of another one here is not read."""
    rows = [
        ("path", "class", "part", "region", "label"),
        ("a, b.jpg", "cat;red", "train", "0 0 5 5", "no"),
        ("c.jpg", "dog", "test", "", "no"),
    ]
    if kind == "csv":
        with (tmp_path / "t.csv").open("w", newline="") as stream:
            csv.writer(stream, delimiter=delimiter).writerows(rows)
    else:
        parquet.write_table(pyarrow.table(dict(zip(rows[0], zip(*rows[1:])))), tmp_path / "t.parquet")
    splits = read(tmp_path, f"t.{kind}", columns=OWN_NAMES, delimiter=delimiter)
    as_text = ",".join(f"{here}={theirs}" for here, theirs in OWN_NAMES.items())
    again = read(tmp_path, f"t.{kind}", columns=as_text, delimiter={"\t": "tab"}.get(delimiter, delimiter))
    assert [(list(index.paths), list(index.names)) for index in again.values()] == [
        (list(index.paths), list(index.names)) for index in splits.values()
    ]
    assert [(list(index.paths), list(index.names)) for index in splits.values()] == [
        (["a, b.jpg"], ["cat;red"]),
        (["c.jpg"], ["dog"]),
    ]
    assert splits["train"].boxes.tolist() == [[0, 0, 5, 5]]


def test_another_format_is_not_read_from_the_cache(tmp_path):
    write_csv(tmp_path, ("image", "a", "b", "split"), ("1.jpg", "x", "y", "train"), ("2.jpg", "z", "w", "test"))
    names = []
    for column in ("a", "b", "a"):
        splits = read(tmp_path, columns={"label": column}, cache_dir=tmp_path / "cache")
        names.append([list(index.names) for index in splits.values()])
    assert names == [[["x"], ["z"]], [["y"], ["w"]], [["x"], ["z"]]]


def test_the_table_of_open_metric_learning_by_one_word(tmp_path):
    """Its bool columns are empty in training, as in its own example tables; its boxes have their own order."""
    header = ("label", "path", "split", "is_query", "is_gallery", "category", "sequence", "x_1", "x_2", "y_1", "y_2")
    rows = [
        (0, "a.jpg", "train", "", "", "x", "1", "", "", "", ""),
        (0, "b.jpg", "train", "True", "False", "x", "1", "", "", "", ""),
        (1, "c.jpg", "validation", "True", "False", "y", "2", "1", "9", "2", "8"),
        (1, "d.jpg", "validation", "False", "True", "y", "3", "", "", "", ""),
        (1, "e.jpg", "validation", "1.0", "true", "y", "4", "", "", "", ""),
    ]
    splits = read(write_csv(tmp_path, header, *rows), columns="oml")
    assert {name: list(index.paths) for name, index in splits.items()} == {
        "train": ["a.jpg", "b.jpg"],
        "val": ["c.jpg", "d.jpg", "e.jpg"],
    }
    assert splits["val"].roles.tolist() == [ROLES["query"], ROLES["gallery"], ROLES["both"]]
    assert splits["val"].boxes[0].tolist() == [1, 2, 9, 8]
    assert splits["val"].cameras.tolist() == [1, 2, 3]
    only_queries = [row[:4] for row in [header, *rows[:4]]]
    assert read(write_csv(tmp_path, *only_queries), columns="oml")["val"].roles.tolist() == [1, 2]
    for values, sentence in (
        (("maybe", "True"), "True or False, .*'maybe, True'"),
        (("False", ""), "True in evaluation"),
    ):
        wrong = [(0, "a.jpg", "train", "", ""), (1, "b.jpg", "validation", *values)]
        with pytest.raises(ValueError, match=f"^ImageTable: `is_query` .*{sentence}.* at line 3"):
            read(write_csv(tmp_path, header[:5], *wrong), columns="oml")


@refusal
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"columns": "other"}, r"`columns` must be a dict .* or 'oml', got 'other'"),
        ({"columns": "image="}, r"`columns` must be pairs such as image=path,label=class, got image=\.$"),
        ({"columns": "image=a,image=b"}, r"`columns` must be pairs such as .*, got image=a,image=b"),
        ({"columns": {"picture": "path"}}, r"`columns` must have names among text, image, .*, got 'picture'"),
        ({"columns": {"image": 3}}, r"`columns` must be a dict .*, got 3 \(int\)"),
        ({"columns": ["image"]}, r"`columns` must be a dict .* \(list\)"),
        ({"columns": {"image": "a", "label": "a"}}, r"`columns` must have another column for each name"),
        (
            {"columns": {"image": "path"}},
            r"`columns` must name columns .* 'path', named as 'image', .*got 'image,label",
        ),
        ({"delimiter": ""}, "`delimiter` must be one character .*, got ''"),
        ({"delimiter": "a"}, "`delimiter` must be one character .*, got 'a'"),
        ({"delimiter": "\n"}, "`delimiter` must be one character"),
        ({"delimiter": ";"}, r"must name the columns .* got 'image,label,split', .*; give `delimiter` ','"),
    ],
)
def test_invalid_formats_of_a_table_raise(tmp_path, settings, sentence):
    with pytest.raises((ValueError, TypeError), match=f"^ImageTable: .*{sentence}"):
        read(write_csv(tmp_path, PLAIN, TRAIN, TEST), **settings)


@refusal
def test_a_table_with_other_names_says_how_to_give_them(tmp_path):
    cases = (
        (("path", "class"), "with `columns`, such as image=path,label=class"),
        (("path", "label", "is_query"), "give `columns` 'oml'"),
        (("image;label",), "give `delimiter` ';'"),
        (("sep=;",), "delete this line, which only Excel reads"),
        (("image\tlabel",), r"give `delimiter` '\\t'"),
    )
    for header, cure in cases:
        with pytest.raises(ValueError, match=f"^ImageTable: line 1 of .*; .*{cure}"):
            read(write_csv(tmp_path, header, ["x"] * len(header)))


@pytest.mark.parametrize(
    "columns", [{"image": "Image", "label": "Id"}, "image=Image,label=Id", " image = Image,label=Id"]
)
def test_names_of_columns_may_be_pairs_in_a_text(tmp_path, columns):
    """A table of a competition, with further columns."""
    write_csv(tmp_path, ("Image", "Id", "val"), ("a.jpg", "w_f48451c", "True"), ("b.jpg", "new_whale", "False"))
    splits = ImageTable(tmp_path, "images.csv", columns=columns, **QUICK).splits
    assert sorted((index.paths[0], index.names[0]) for index in splits.values()) == [
        ("a.jpg", "w_f48451c"),
        ("b.jpg", "new_whale"),
    ]


@refusal
@pytest.mark.parametrize(
    ("rows", "columns", "sentence"),
    [
        ("7,a.jpg\n7,b.jpg\n", None, r"line 1 is a row, so add a line of names above it, such as image,label\.$"),
        ("7,a.jpg\n7,b.jpg\n", {"image": "a.jpg", "label": "7"}, r"got '7,a\.jpg'; line 1 is a row, so add a line"),
        ("7,a.JFIF\n7,b.JFIF\n", None, r"line 1 is a row, so add a line of names above it, such as image,label\.$"),
        ("0/a.jp2 0\n0/b.jp2 0\n", None, r"write commas in place of the spaces and add a first line such as"),
        ("0/a_01_0.jpg 0\n0/b_05_1.jpg 0\n", None, r"write commas in place of the spaces and add a first line such as"),
        (
            "image_id class_id path\n1 1 a.jpg\n",
            None,
            r"which lacks image, label; write commas in place of the spaces\.$",
        ),
        ("image,label\n/gone/a.jpg,1\n", None, r"inside the root, .*; there is no such file on this machine, so write"),
        ("image,label\n/,1\n", None, r"inside the root, .*; give a root that contains the images\.$"),
        ("image,label\n../b/a.jpg,1\n", None, r"inside the root, .*; write paths without '\.\.', relative to a root"),
        ("image,label\nhttps://a.b/c.jpg,1\n", None, r"`image` must be a path, not an address, got 'https://a\.b/c\.j"),
        (
            "image,label\na.jpg,1\nb.jpg,1\n",
            None,
            r"`test_fraction` must have at least two classes to split, got one class, 1; give",
        ),
        (
            "image,label,split\na.jpg,1,train\nb.jpg,2,query\nc.jpg,2,gallery\n",
            None,
            r"`split` must be a split, but this is a role, got 'query', .*; write test, and the role in the column ",
        ),
        ("image,label\n\0,1\n", None, r"must be a text file, got a null character in line 2\.$"),
        (
            "image,label\na.jpg,1\n",
            "image=path,image=b",
            r"`columns` must be pairs such as image=path,label=class, got",
        ),
    ],
)
def test_tables_of_other_projects_are_answered_by_a_cure(tmp_path, rows, columns, sentence):
    write_text(tmp_path / "images.csv", rows)
    with pytest.raises(ValueError, match=f"^ImageTable: .*{sentence}"):
        read(tmp_path, columns=columns)


@refusal
@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("metadata.jsonl", r"pandas\.read_json\('metadata\.jsonl', lines=True\)\.to_csv\('table\.csv', index=False\)"),
        ("labels.json", "write a row for each image to a CSV file"),
        ("list.xlsx", "save the sheet as CSV in UTF-8"),
        ("00000.tar", "unpack it"),
        ("train.csv.gz", "unpack it"),
        ("img_emb_0.npy", "write its rows to a CSV or Parquet file"),
    ],
)
def test_files_that_are_no_tables_are_answered_by_a_cure(tmp_path, name, cure):
    write_text(tmp_path / name, '{"file_name": "a.jpg", "label": 1}\n')
    with pytest.raises(ValueError, match=rf"^ImageTable: .*{name} must be a CSV or Parquet file; .*{cure}"):
        _ = ImageTable(tmp_path, name, **QUICK).splits


@refusal
def test_a_parquet_file_has_columns_and_no_lines(tmp_path):
    """As img2dataset writes it."""
    parquet.write_table(pyarrow.table({"url": ["https://a.b/c"], "key": ["000000000"]}), tmp_path / "00000.parquet")
    for columns, sentence in (
        (
            None,
            r"00000\.parquet must have the columns image and label .*, got 'url,key', which lacks image, label; name",
        ),
        ("image=path", r"`columns` must name columns of the table, .*, got 'url,key' in \S+00000\.parquet\.$"),
    ):
        with pytest.raises(ValueError, match=sentence) as caught:
            _ = ImageTable(tmp_path, "00000.parquet", columns=columns, **QUICK).splits
        assert "line 1" not in str(caught.value)
        assert "commas" not in str(caught.value)


def test_absolute_paths_in_the_root_are_relative_to_it(tmp_path, monkeypatch):
    """By the names in the path: of the root itself, or of what a link to the root leads to."""
    root = tmp_path / "real"
    write_images(root, ["a.jpg", "b/c.jpg", "d.jpg"])
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    rows = [PLAIN, (root / "a.jpg", "1", "train"), (f"{root}//b/./c.jpg", "2", "test"), ("d.jpg", "2", "test")]
    write_csv(root, *rows)
    for given in (root, "real", tmp_path / "link", "link/../real"):
        splits = read(given)
        assert [*splits["train"].paths, *splits["test"].paths] == ["a.jpg", "b/c.jpg", "d.jpg"]
        assert len(ImageTable(given, "images.csv", **QUICK).test_set[0]["images"]) == 3


@refusal
def test_other_absolute_paths_are_outside_of_the_root(tmp_path):
    root = tmp_path / "root"
    outside = [
        tmp_path / "a.jpg",
        f"{root}/../a.jpg",
        f"{root}2/a.jpg",
        f"{root}/x/../../a.jpg",
        "/etc/passwd",
        root,
        "//x",
    ]
    for path in outside:
        with pytest.raises(ValueError, match=r"^ImageTable: `image` must lie inside the root, got .*, at line 2"):
            read(write_csv(root, PLAIN, (path, "1", "train"), TEST))


def test_a_table_whose_lines_all_end_with_a_separator_is_read(tmp_path):
    """As a table with the index of a data frame, whose column has no name."""
    write_text(tmp_path / "images.csv", ",image,label,split,\n0,a.jpg,1,train,\n1,b.jpg,2,test,\n")
    assert [list(index.paths) for index in read(tmp_path).values()] == [["a.jpg"], ["b.jpg"]]


@refusal
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("image,label\na.jpg,1,\n", r"2 fields, got 3, at line 2 of .* ends with a separator; remove the ','"),
        ("image,label,\na.jpg,1\n", r"3 fields, got 2, at line 2 of .*, while the header ends with a separator"),
        ("image,label\na.jpg,1\nb.jpg,1.0\n", r"`label` must not be one number in two forms, .* got '1\.0', at line 3"),
        ("image,label\na.jpg,10\nb.jpg,10.00\n", r"`label` must not be one number in two forms, .* got '10\.00'"),
        (
            "image,label,camera\na.jpg,1,0\nb.jpg,2,0.0\n",
            r"`camera` must not be one number in two forms, .* got '0\.0'",
        ),
        (
            "image,label\na.jpg,nan\nb.jpg,1\n",
            r"`label` must not be the text of a missing value; .* got 'nan', at line 2",
        ),
        ("image,label\na.jpg,1\nb.jpg,<NA>\n", r"`label` must not be the text of a missing value; .* got '<NA>'"),
        ("image,label,split\na.jpg,1,train\nb.jpg,2,nan\n", r"`split` must not be the text of a missing .* got 'nan'"),
        ("image,label,category\na.jpg,1,x\nb.jpg,2,NaN\n", r"`category` must not be the text of a missing .* 'NaN'"),
        ("image,tags\na.jpg,red\nb.jpg,nan\n", r"`tags` must not be the text of a missing value; leave them empty"),
        (
            "image,label,split\na.jpg,1,train\nb.jpg,2,Test\n",
            r"`split` must be .* in lower case, got 'Test', at line 3",
        ),
    ],
)
def test_what_programs_write_into_tables_gets_its_sentence(tmp_path, text, sentence):
    write_text(tmp_path / "images.csv", text)
    with pytest.raises(ValueError, match=f"^ImageTable: .*{sentence}"):
        read(tmp_path)


def test_numbers_in_one_form_are_labels(tmp_path):
    for first, second in (("1.0", "2.0"), ("007", "7"), ("1.5", "1"), ("10", "1.0")):
        splits = read(write_csv(tmp_path, PLAIN, ("a.jpg", first, "train"), ("b.jpg", second, "test")))
        assert [*splits["train"].names, *splits["test"].names] == [first, second]


def test_a_table_may_be_outside_of_the_root_and_begin_with_a_byte_order_mark(tmp_path, monkeypatch):
    write_csv(tmp_path / "tables", *SPLIT_ROWS)
    table = tmp_path / "tables" / "images.csv"
    begin_with_byte_order_mark(table)
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    for found in (read("images", table), read("images", "tables/images.csv")):
        assert len(found["train"]) == 4


def test_different_boxes_of_a_photograph_may_be_in_training_and_in_evaluation(tmp_path):
    rows = [BOX, ("a.jpg", "1", "train", "0 0 5 5"), ("a.jpg", "2", "test", "5 0 9 9")]
    assert len(read(write_csv(tmp_path, *rows))["test"]) == 1


@refusal
def test_a_damaged_parquet_file_and_a_folder_raise(tmp_path):
    for damaged in (b"", b"PAR1" + bytes(40) + b"PAR1"):
        (tmp_path / "images.parquet").write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"^ImageTable: {tmp_path}/images\.parquet must be a Parquet file"):
            read(tmp_path, "images.parquet")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match=r"`table` must be a CSV or Parquet file, got the folder .*folder\.csv"):
        read(tmp_path, "folder.csv")


def test_floats_that_pandas_made_of_integers_are_read_as_integers(tmp_path):
    labels = pyarrow.array([20.0, 3.0, 7.0, float("nan")])
    columns = {"image": [f"{i}.jpg" for i in range(4)], "label": labels, "split": ["train", "train", "test", "test"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "images.parquet")
    with pytest.raises(ValueError, match="`label` must not be empty in any row, at row 4"):
        read(tmp_path, "images.parquet")
    columns["role"] = ["", "", "both", "distractor"]
    parquet.write_table(pyarrow.table(columns), tmp_path / "images.parquet")
    assert list(read(tmp_path, "images.parquet")["train"].names) == ["3", "20"]
