"""ImageTable: CSV and Parquet, splits, roles and boxes, rows that are wrong, and training on a table."""

import csv
import itertools
import os
import re
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
from lightning_retrieval.datamodules import ImageTable
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import QUICK, begin_with_byte_order_mark, fit_and_validate, write_images
from tests.quiet_trainer import quiet_trainer

QUERY, GALLERY, BOTH, DISTRACTOR = 1, 2, 3, -1
PLAIN = ("image", "label", "split")
TRAIN, TEST = ("a.jpg", "1", "train"), ("b.jpg", "2", "test")


def write_csv(root, *rows, delimiter=","):
    """Write these rows, the header first, as a table."""
    root.mkdir(exist_ok=True)
    with (root / "images.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows(rows)
    return root


def write_parquet(root, **columns):
    parquet.write_table(pyarrow.table(columns), root / "images.parquet")


def read(root, table="images.csv", **settings):
    return ImageTable(root, table, **settings).splits


def paths_of(splits):
    return {name: list(index.paths) for name, index in splits.items()}


# --- labels and splits


def test_names_of_people_are_no_missing_values(tmp_path):
    rows = [("a.jpg", "Nat", "train"), ("b.jpg", "Null", "train"), ("c.jpg", "NA", "test"), ("d.jpg", "None", "test")]
    splits = read(write_csv(tmp_path, PLAIN, *rows))
    assert [list(splits[name].names) for name in ("train", "test")] == [["Nat", "Null"], ["NA", "None"]]


def test_columns_may_have_any_order_and_integer_labels_are_sorted_as_numbers(tmp_path):
    """The first column is the index of a data frame, which has no name."""
    rows = [
        ("", "label", "image", "note", "split"),
        (0, "20", "a, b.jpg", "comma", "train"),
        (1, "100", "b/ß 日.JPG", "", "train"),
        (2, "3", "c.jpg", "x", "train"),
        (3, "20", "d.jpg", "", "train"),
        (4, "7", "e.jpg", "", "test"),
        (5, "-1", "f.jpg", "", "test"),
    ]
    splits = read(write_csv(tmp_path, *rows))
    assert paths_of(splits) == {"train": ["a, b.jpg", "b/ß 日.JPG", "c.jpg", "d.jpg"], "test": ["e.jpg", "f.jpg"]}
    assert (splits["train"].labels.tolist(), list(splits["train"].names)) == ([1, 2, 0, 1], ["3", "20", "100"])
    assert (splits["test"].labels.tolist(), list(splits["test"].names)) == ([1, 0], ["-1", "7"])
    for index in splits.values():
        assert index.roles is index.boxes is index.categories is index.cameras is index.tags is None


@pytest.mark.parametrize("names", [("007", "10", "7"), ("1.0", "2.0", "a"), ("1", "1.5", "NA"), ("10", "a", 'of 27"')])
def test_labels_are_the_text_of_the_table_if_one_is_not_an_integer(tmp_path, names):
    rows = [(f"{name}.jpg", name, "train") for name in names[::-1]]
    train = read(write_csv(tmp_path, PLAIN, *rows, ("t.jpg", "8", "test")))["train"]
    assert list(train.names) == sorted(names)
    assert train.labels.tolist() == [2, 1, 0]


def test_without_a_column_split_the_classes_are_split_by_the_seed(tmp_path):
    rows = [(f"{number}/{i}.jpg", f"class {number}") for number in range(10) for i in range(2)]
    root = write_csv(tmp_path, ("image", "label"), *rows)
    splits = read(root, test_fraction=0.3, split_seed=4)
    assert len(splits["test"].names) == 3
    assert sorted([*splits["test"].names, *splits["train"].names]) == [f"class {number}" for number in range(10)]
    names = set(splits["test"].names)
    assert list(splits["test"].paths) == [path for path, name in rows if name in names]
    assert set(read(root, test_fraction=0.3, split_seed=5)["test"].names) != names


def test_without_a_column_label_the_files_are_split_and_boxes_of_one_file_stay_together(tmp_path):
    rows = [(f"{i // 2}.jpg", "0 0 5 5" if i % 2 else "5 5 9 9", "red") for i in range(12)]
    splits = read(write_csv(tmp_path, ("image", "box", "tags"), *rows), test_fraction=0.5, split_seed=4)
    assert [len(index) for index in splits.values()] == [6, 6]
    assert not set(splits["train"].paths) & set(splits["test"].paths)
    assert splits["train"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert splits["train"].names is None


# --- roles, cameras, tags and boxes


def test_roles_and_distractors(tmp_path):
    rows = [
        (*PLAIN, "role"),
        *[(f"{i}.jpg", "a", "train", "") for i in range(2)],
        ("q.jpg", "b", "test", "query"),
        ("g.jpg", "b", "test", "gallery"),
        ("d.jpg", "", "test", "distractor"),
        ("e.jpg", "whatever", "test", "distractor"),
        ("f.jpg", "b", "test", ""),
    ]
    splits = read(write_csv(tmp_path, *rows))
    assert splits["train"].roles is None
    assert splits["test"].roles.tolist() == [QUERY, GALLERY, GALLERY, GALLERY, BOTH]
    assert splits["test"].labels.tolist() == [0, 0, DISTRACTOR, DISTRACTOR, 0]
    assert list(splits["test"].names) == ["b"]


def test_distractors_belong_to_the_test_set_if_the_classes_are_split(tmp_path):
    rows = [(f"{i}.jpg", i % 4, "both") for i in range(8)] + [("d.jpg", "", "distractor")]
    splits = read(write_csv(tmp_path, ("image", "label", "role"), *rows))
    assert splits["test"].labels.tolist() == [0, 1, 0, 1, DISTRACTOR]
    assert splits["train"].labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["query", "gallery", ""], [QUERY, GALLERY, BOTH]),
        (["both", "gallery", ""], [BOTH, GALLERY, BOTH]),
        (["gallery", "gallery", "gallery"], None),  # no image would have a list
        (["", "both", ""], None),
    ],
)
def test_training_images_have_roles_if_some_are_queries_and_some_are_gallery(tmp_path, names, wanted):
    training = [(f"{i}.jpg", "a", "train", name) for i, name in enumerate(names)]
    roles = read(write_csv(tmp_path, (*PLAIN, "role"), *training, ("t.jpg", "b", "test", "")))["train"].roles
    assert (None if roles is None else roles.tolist()) == wanted


def test_images_that_are_held_out_of_training_have_no_roles(tmp_path):
    training = [(f"{i}.jpg", str(i // 2), "train", role) for i, role in enumerate(["query", "gallery"] * 4)]
    root = write_csv(tmp_path, (*PLAIN, "role"), *training, ("t.jpg", "b", "test", ""))
    data = ImageTable(root, "images.csv", val_fraction=0.5, **QUICK)
    assert data.train_set.index.roles is not None
    assert data.val_set.index.roles is None


def test_categories_and_cameras_have_one_number_in_all_splits(tmp_path):
    rows = [(*PLAIN, "category", "camera")]
    for i, (category, camera) in enumerate(zip([30, 4, 30, 5, 4], ["c3", "c1", "c3", "c2", "c1"])):
        rows.append((f"{i}.jpg", i, "train" if i < 3 else "test", category, camera))
    splits = read(write_csv(tmp_path, *rows))
    assert splits["train"].categories.tolist() == splits["train"].cameras.tolist() == [2, 0, 2]
    assert splits["test"].categories.tolist() == splits["test"].cameras.tolist() == [1, 0]


def test_tags_are_separated_by_semicolons_and_numbered_for_all_splits_together(tmp_path):
    rows = [
        (*PLAIN, "tags", "role"),
        ("a.jpg", "1", "train", "red; long dress", ""),
        ("b.jpg", "1", "train", "", ""),
        ("c.jpg", "1", "train", ";red ;; red", ""),
        ("d.jpg", "2", "test", "blue,green;long dress;sale", ""),
        ("e.jpg", "", "test", "red", "distractor"),
    ]
    splits = read(write_csv(tmp_path, *rows))
    train, test = splits["train"], splits["test"]
    assert list(train.tag_names) == list(test.tag_names) == ["blue,green", "long dress", "red", "sale"]
    assert train.tags.tolist() == [[2, 1, -1], [-1, -1, -1], [2, -1, -1]]
    assert test.tags.tolist() == [[0, 1, 3], [-1, -1, -1]]  # a distractor is relevant to no query


@pytest.mark.parametrize("tags", ["red|dress", "red, dress"])
def test_tags_with_another_separator_are_warned_of(tmp_path, tags):
    root = write_csv(tmp_path, (*PLAIN, "tags"), (*TRAIN, tags), (*TEST, "red"))
    with pytest.warns(UserWarning, match=f"^`tags` must be separated by ';', got {re.escape(repr(tags))} at line 2"):
        read(root)


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
    data = ImageTable(write_csv(tmp_path, (*PLAIN, *header), *rows), "images.csv")
    assert data.splits["train"].boxes.tolist() == [[-5, 4, 12, 99], [10, 4, 30, 20]]
    whole = Image.open(tmp_path / "0.png").convert("RGB")
    assert np.array_equal(np.asarray(data.train_set.read(0)), np.asarray(whole.crop((0, 4, 12, 40))))
    assert data.train_set.read(1).size == (20, 16)
    assert data.test_set.read(0).size == (48, 40)


def test_different_boxes_of_a_photograph_may_be_in_training_and_in_evaluation(tmp_path):
    rows = [(*PLAIN, "box"), ("a.jpg", "1", "train", "0 0 5 5"), ("a.jpg", "2", "test", "5 0 9 9")]
    assert len(read(write_csv(tmp_path, *rows))["test"]) == 1


# --- Parquet, and tables of other programs


def test_parquet_and_csv_give_the_same_images(tmp_path):
    columns = {
        "split": ["train", "train", "test", "test", "test"],
        "label": pyarrow.array([20, 3, 100, None, 100]),
        "image": ["a.jpg", "ß b.JPG", "c.jpg", "d.jpg", "e.jpg"],
        "box": pyarrow.array([[0, 1, 2, 3], [4, 5, 6, 7], None, [1, 1, 9, 9], None]),
        "role": [None, None, "query", "distractor", "gallery"],
        "note": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
    write_parquet(tmp_path, **columns)
    boxes, roles = ["0 1 2 3", "4 5 6 7", "", "1 1 9 9", ""], ["", "", "query", "distractor", "gallery"]
    texts = {**columns, "label": ["20", "3", "100", "", "100"], "box": boxes, "role": roles}
    write_csv(tmp_path, tuple(texts), *zip(*texts.values(), strict=True))
    of_csv, of_parquet = read(tmp_path), read(tmp_path, "images.parquet")
    assert paths_of(of_csv) == paths_of(of_parquet)
    for split, index in of_csv.items():
        other = of_parquet[split]
        assert list(index.names) == list(other.names)
        assert index.labels.tolist() == other.labels.tolist()
        assert index.boxes.tolist() == other.boxes.tolist()
        assert np.array_equal(index.roles, other.roles)
    assert of_csv["test"].labels.tolist() == [0, DISTRACTOR, 0]


PARQUET_TYPES = {
    "bytes": (pyarrow.binary(), str.encode),
    "dictionary": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), str),
    "decimal": (pyarrow.decimal128(9, 2), Decimal),
    "float": (pyarrow.float32(), float),  # as pandas makes of integers if some are missing
    "large text": (pyarrow.large_string(), str),
}


@pytest.mark.parametrize("kind", PARQUET_TYPES)
def test_the_types_of_a_parquet_file_give_the_texts_of_a_csv_file(tmp_path, kind):
    type_, convert = PARQUET_TYPES[kind]
    values = pyarrow.array([convert(text) for text in ("7", "20", "8", "9")], type_)
    paths = pyarrow.array(["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    if kind == "bytes":
        paths = paths.cast(pyarrow.binary())
    write_parquet(tmp_path, image=paths, label=values, tags=values, split=["train", "train", "test", "test"])
    splits = read(tmp_path, "images.parquet")
    assert paths_of(splits) == {"train": ["a.jpg", "b.jpg"], "test": ["c.jpg", "d.jpg"]}
    assert [list(index.names) for index in splits.values()] == [["7", "20"], ["8", "9"]]
    assert list(splits["train"].tag_names) == ["20", "7", "8", "9"]


def test_the_tags_of_a_parquet_file_may_be_lists(tmp_path):
    columns = {"image": [f"{i}.jpg" for i in range(4)], "split": ["train", "train", "test", "test"]}
    write_parquet(tmp_path, **columns, tags=[["red", "long dress"], [], None, ["red", None]])
    splits = read(tmp_path, "images.parquet")
    assert splits["train"].tags.tolist() == [[1, 0], [-1, -1]]
    assert splits["test"].tags.tolist() == [[-1, -1], [1, -1]]
    write_parquet(tmp_path, **columns, tags=[[3, 20], [20], [3], []])
    assert sorted(read(tmp_path, "images.parquet")["train"].tag_names) == ["20", "3"]


@pytest.mark.parametrize(("kind", "delimiter"), [("csv", ";"), ("csv", "\t"), ("parquet", ",")])
def test_columns_may_have_other_names_and_another_separator(tmp_path, delimiter, kind):
    """A column that has the name of another one here is not read."""
    names = {"image": "path", "label": "class", "split": "part", "box": "region"}
    rows = [
        (*names.values(), "label"),
        ("a, b.jpg", "cat;red", "train", "0 0 5 5", "no"),
        ("c.jpg", "dog", "test", "", "no"),
    ]
    write_csv(tmp_path, *rows, delimiter=delimiter)
    write_parquet(tmp_path, **dict(zip(rows[0], zip(*rows[1:]))))
    as_text = ", ".join(f"{here}={theirs}" for here, theirs in names.items())
    word = {"\t": "tab"}.get(delimiter, delimiter)
    for settings in ({"columns": names, "delimiter": delimiter}, {"columns": as_text, "delimiter": word}):
        splits = read(tmp_path, f"images.{kind}", **settings)
        assert paths_of(splits) == {"train": ["a, b.jpg"], "test": ["c.jpg"]}
        assert [list(index.names) for index in splits.values()] == [["cat;red"], ["dog"]]
        assert splits["train"].boxes.tolist() == [[0, 0, 5, 5]]


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
    assert paths_of(splits) == {"train": ["a.jpg", "b.jpg"], "val": ["c.jpg", "d.jpg", "e.jpg"]}
    assert splits["val"].roles.tolist() == [QUERY, GALLERY, BOTH]
    assert splits["val"].boxes[0].tolist() == [1, 2, 9, 8]
    assert splits["val"].cameras.tolist() == [1, 2, 3]
    only_queries = [row[:4] for row in [header, *rows[:4]]]
    assert read(write_csv(tmp_path, *only_queries), columns="oml")["val"].roles.tolist() == [QUERY, GALLERY]


def test_a_table_may_be_outside_of_the_root_and_begin_with_a_byte_order_mark(tmp_path, monkeypatch):
    table = write_csv(tmp_path / "tables", PLAIN, TRAIN, TEST) / "images.csv"
    begin_with_byte_order_mark(table)
    table.write_bytes(table.read_bytes().replace(b"\r\n", b"\n"))
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    for found in (read("images", table), read("images", "tables/images.csv")):
        assert paths_of(found) == {"train": ["a.jpg"], "test": ["b.jpg"]}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_on_any_system_and_fields_may_be_long(tmp_path, end):
    """Python's own parser takes neither the line ends of old programs of macOS nor 200,000 characters."""
    rows = ["image,label,split,note", f"a.jpg,007,train,{'x' * 200_000}", 'b.jpg,NA,test,"a, b"', ""]
    (tmp_path / "images.csv").write_bytes(end.join(rows).encode())
    found = read(tmp_path, "images.csv")
    assert paths_of(found) == {"train": ["a.jpg"], "test": ["b.jpg"]}
    assert [list(found[split].names) for split in ("train", "test")] == [["007"], ["NA"]]


# --- paths


def test_absolute_paths_in_the_root_are_relative_to_it(tmp_path, monkeypatch):
    """By the names in the path: of the root itself, or of what a link to the root leads to."""
    root = tmp_path / "real"
    write_images(root, ["a.jpg", "b/c.jpg", "d.jpg"])
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(tmp_path)
    rows = [PLAIN, (root / "a.jpg", "1", "train"), (f"{root}//b/./c.jpg", "2", "test"), ("d.jpg", "2", "test")]
    write_csv(root, *rows)
    for given in (root, "real", tmp_path / "link", "link/../real"):
        assert paths_of(read(given)) == {"train": ["a.jpg"], "test": ["b/c.jpg", "d.jpg"]}
        assert len(ImageTable(given, "images.csv", **QUICK).test_set[0]["images"]) == 3


def leaves_the_root(path):
    """Whether a path may lead out of a folder on some system, part by part."""
    has_drive = path[:1].isalpha() and path[1:2] == ":" and path[2:3] in ("/", "\\")
    return path.startswith(("/", "\\")) or has_drive or ".." in path.replace("\\", "/").split("/")


@pytest.mark.hostile
@pytest.mark.refusal
def test_no_path_of_a_table_leads_out_of_the_root(tmp_path):
    """All short paths of these characters, and some that begin with the root's own path."""
    short = ["".join(characters) for length in (1, 2, 3) for characters in itertools.product("ab./\\:", repeat=length)]
    near = [f"{tmp_path}/../a.jpg", f"{tmp_path}2/a.jpg", f"{tmp_path}/x/../../a.jpg", "a/../../b.jpg", "/etc/passwd"]
    for path in [*short, *near]:
        write_text(tmp_path / "images.csv", f"image,label,split\nc/d.jpg,1,train\n{path},2,test\n")
        if leaves_the_root(path) or leaves_the_root(os.path.normpath(path)):
            with pytest.raises(ValueError, match=r"^ImageTable: "):
                read(tmp_path)
        else:
            (found,) = read(tmp_path)["test"].paths
            assert found == os.path.normpath(path)


# --- rows that are wrong


def quoted(column, classes=4, **quotes):
    """A table of forty rows in which stray quotes begin or end the field of a column in these lines."""
    lines = ["image,label,note", *(f"{number}.jpg,{number % classes},a note" for number in range(40))]
    for place, line in quotes.items():
        fields = lines[line - 1].split(",")
        fields[column] = f'{fields[column]}"' if place == "end" else f'"{fields[column]}'
        lines[line - 1] = ",".join(fields)
    return "\n".join(lines)


WRONG_ROWS = {
    "a field too few": ("image,label,split\na.jpg,1,train\n\nc.jpg,3\n", "line 4"),
    "a field too many": ("image,label\na.jpg,1,2\n", "line 2"),
    "no image": ("image,label,split\na.jpg,1,train\n,1,train\n", "line 3"),
    "no label": ("image,label,split\na.jpg,1,train\nb.jpg, ,test\n", "line 3"),
    "a last row of separators, as of Excel": ("image,label,split\na.jpg,1,train\nb.jpg,2,test\n,,\n", "line 4"),
    "a row of spaces": ("image,label\na.jpg,1\n  \nb.jpg,2\n", "line 3"),
    "label of pandas": ("image,label\na.jpg,nan\nb.jpg,1\n", "line 2"),
    "label in two forms": ("image,label\na.jpg,1\nb.jpg,1.0\n", "line 3"),
    "address": ("image,label\nhttps://a.b/c.jpg,1\nb.jpg,2\n", "line 2"),
    "name of a split": ("image,label,split\na.jpg,1,train\nb.jpg,2,a/b\n", "line 3"),
    "role for a split": ("image,label,split\na.jpg,1,train\nb.jpg,2,query\nc.jpg,2,gallery\n", "line 3"),
    "image twice": ("image,label,split\na.jpg,1,train\nb.jpg,2,test\n./b.jpg,2,test\n", "line 4"),
    "unknown role": ("image,label,split,role\na.jpg,1,train,\nb.jpg,2,test,Query\n", "line 3"),
    "distractor in training": ("image,label,split,role\na.jpg,1,train,distractor\nb.jpg,2,test,\n", "line 2"),
    "no camera": ("image,label,split,camera\na.jpg,1,train,1\nb.jpg,2,test,\n", "line 3"),
    "no category": ("image,label,split,category\na.jpg,1,train,1\nb.jpg,2,test,\n", "line 3"),
    "three sides": ("image,label,split,box\na.jpg,1,train,1 2 3\nb.jpg,2,test,\n", "line 2"),
    "box without width": ("image,label,split,box\na.jpg,1,train,1 2 1 9\nb.jpg,2,test,\n", "line 2"),
    "box without height": ("image,label,split,box\na.jpg,1,train,1 2 9 2\nb.jpg,2,test,\n", "line 2"),
    "unknown flag": ("label,path,split,is_query\n0,a.jpg,train,\n1,b.jpg,validation,maybe\n", "line 3"),
    "no flag in evaluation": (
        "label,path,split,is_query,is_gallery\n0,a.jpg,train,,\n1,b.jpg,validation,False,\n",
        "line 3",
    ),
    "other encoding": ("image,label\na.jpg,1\ncaf\udce9.jpg,2\n", "line 3"),
    "null character": ("image,label\n\0,1\n", "line 2"),
    "quote to the end": (quoted(2, start=5), "line 5"),
    "two quotes at the start": (quoted(2, start=5, again=9), "line 5"),
    "quoted label": (quoted(1, start=5, end=9), "line 5"),
    "quoted image": (quoted(0, start=5, end=6), "line 5"),
    "quotes after backslashes": ('image,label\na.jpg,1\nb.jpg,"a \\"red\\" shoe"\n', "line 3"),
    "quotes after backslashes without quotes": ('image,label\na.jpg,1\nb.jpg,a \\"red\\"\n', "line 3"),
    "quotes in another column": (quoted(2, start=5, end=9), "line 5"),
    "quotes in a table whose values occur once": (quoted(2, classes=40, start=5, end=9), "line 5"),
}


@pytest.mark.refusal
@pytest.mark.parametrize("case", WRONG_ROWS)
def test_a_wrong_row_is_named_by_its_line_and_no_quote_hides_rows(tmp_path, case):
    text, line = WRONG_ROWS[case]
    (tmp_path / "images.csv").write_text(text, "utf-8", "surrogateescape")
    columns = "oml" if "is_query" in text else None
    with pytest.raises(ValueError, match=rf"^ImageTable: .*{line}"):
        read(tmp_path, columns=columns)


# --- training


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
    root = write_csv(tmp_path, (*PLAIN, "role", "camera"), *rows)
    logged = fit_and_validate(ImageTable(root, "images.csv", **QUICK))
    assert logged["val/skipped_queries"] == 2
    assert 0 < logged["val/mAP"] <= 1


def test_a_table_with_tags_alone_is_trained_and_evaluated_by_shared_tags(tmp_path):
    """The mAP is that of the sets of words in the table."""
    words = ["red;hat", "red", "blue;hat", "blue", "", "red;blue", "hat", "hat;old", "blue", "red;hat", "red", "old"]
    rows = [(f"{i}.png", text, "train" if i < 12 else "test") for i, text in enumerate(words * 2)]
    write_images(tmp_path, [name for name, _, _ in rows])
    data = ImageTable(write_csv(tmp_path, ("image", "tags", "split"), *rows), "images.csv", sampler="tags", **QUICK)
    network = torch.nn.Sequential(torch.nn.AvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 8))
    module = RetrievalModule(network, SmoothAPLoss(tau=0.1), relevance=SharedTags())
    trainer = quiet_trainer(max_steps=1, num_sanity_val_steps=0, callbacks=[RetrievalEvaluation((1,))])
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data, verbose=False)
    with torch.no_grad():
        embedded = torch.nn.functional.normalize(network(torch.stack([data.test_set[i]["images"] for i in range(12)])))
    scores, tags, precisions = embedded @ embedded.T, [set(text.split(";")) - {""} for text in words], []
    for query, of_query in enumerate(tags):
        in_list = [other for other in range(12) if other != query]
        relevant = [bool(of_query & tags[other]) for other in in_list]
        if any(relevant):
            precisions.append(average_precision_score(relevant, scores[query, in_list]))
    assert len(precisions) == 11
    assert trainer.callback_metrics["val/mAP"] == pytest.approx(np.mean(precisions), abs=1e-5)
