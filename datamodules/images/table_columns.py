"""Convert the text columns of a table of images to arrays, and check each value."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.files.lists import leaves_root, normalized_path
from lightning_retrieval.datamodules.images.classes import class_numbers
from lightning_retrieval.datamodules.images.image_index import ROLES
from lightning_retrieval.datamodules.images.table_file import TextTable

WHOLE_IMAGE = (0, 0, 2**31 - 1, 2**31 - 1)  # the box of an image without one, because boxes are cropped to the image


def find_rows(values: Sequence[str], condition: Callable[[str], bool]) -> list[int]:
    """Numbers of the rows, from 0, whose value meets a condition."""
    rows = []
    for row, value in enumerate(values):
        if condition(value):
            rows.append(row)
    return rows


def is_empty(text: str) -> bool:
    """Whether a field is empty."""
    return text == ""


def is_integer(text: str) -> bool:
    """Whether a text is an integer as Python writes it: 7, but not 007, which may be another class than 7."""
    return re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) is not None


def is_unknown_role(name: str) -> bool:
    """Whether a name is not one of the roles; an empty field is the role `both`."""
    return name != "" and name not in ROLES


def is_invalid_split(name: str) -> bool:
    """Whether a text cannot be the name of a split."""
    return re.fullmatch(r"[\w-]+", name) is None


def parse_images(table: TextTable) -> list[str]:
    """The path of each image, without `./` and `//`."""
    images = table.columns["image"]
    table.check(find_rows(images, is_empty), "`image` must not be empty in any row")
    table.check(find_rows(images, leaves_root), "`image` must lie inside the root", images)
    return [normalized_path(image) for image in images]


def parse_labels(table: TextTable, distractors: NDArray[np.bool_]) -> NDArray[Any]:
    """The label of each image: integers if all labels are integers, else text. Those of distractors are arbitrary."""
    texts = table.columns["label"]
    unlabelled = [row for row in find_rows(texts, is_empty) if not distractors[row]]
    table.check(unlabelled, "`label` must not be empty in any row")
    labels = np.array(texts)
    known = ~distractors
    if not all(map(is_integer, labels[known].tolist())):
        return labels
    numbers = np.zeros(len(texts), dtype=np.int64)
    numbers[known] = labels[known].astype(np.int64)
    return numbers


def parse_roles(table: TextTable) -> tuple[NDArray[np.uint8] | None, NDArray[np.bool_]]:
    """The role of each image (None without the column `role`), and which images are distractors."""
    if "role" not in table.columns:
        return None, np.zeros(len(table.lines), dtype=bool)
    names = table.columns["role"]
    table.check(find_rows(names, is_unknown_role), f"`role` must be one of {', '.join(ROLES)}", names)
    roles = np.array([ROLES[name or "both"] for name in names], dtype=np.uint8)
    return roles, np.array(names) == "distractor"


def parse_splits(table: TextTable) -> NDArray[Any] | None:
    """The split of each image, or None without the column `split`."""
    if "split" not in table.columns:
        return None
    splits = table.columns["split"]
    rule = "`split` must be train, val, test or another name of letters, digits, '_' and '-'"
    table.check(find_rows(splits, is_invalid_split), rule, splits)
    names = sorted(set(splits))
    if "train" not in names or len(names) == 1:
        raise ValueError(
            f"ImageTable: `split` must have rows of train and of val, test or others, got "
            f"{', '.join(map(repr, names))} in {table.path}."
        )
    return np.array(splits)


def parse_numbers(table: TextTable, column: Literal["category", "camera"]) -> NDArray[np.int64] | None:
    """The number of each image's category or camera, the same in all splits; None without this column."""
    if column not in table.columns:
        return None
    texts = table.columns[column]
    table.check(find_rows(texts, is_empty), f"`{column}` must not be empty in any row")
    values = np.array(texts)
    if all(map(is_integer, texts)):
        values = values.astype(np.int64)
    numbers, _ = class_numbers(values)
    return numbers


def parse_boxes(table: TextTable) -> NDArray[np.int32] | None:
    """The box of each image, shape (rows, 4); None without the column `box` and without the columns of the sides."""
    columns = table.columns
    if "box" in columns:
        texts = columns["box"]
    elif "left" in columns:
        sides = zip(columns["left"], columns["top"], columns["right"], columns["bottom"])
        texts = [" ".join(numbers) for numbers in sides]
    else:
        return None
    boxes: list[tuple[int, ...]] = []
    invalid_rows: list[int] = []
    for row, text in enumerate(texts):
        box = parse_box(text)
        if box is None:
            invalid_rows.append(row)
        else:
            boxes.append(box)
    table.check(invalid_rows, "`box` must be `left top right bottom` with right > left and bottom > top", texts)
    return np.array(boxes, dtype=np.int32)


def parse_box(text: str) -> tuple[int, ...] | None:
    """Four numbers, separated by spaces or commas and rounded; the whole image if empty, None if invalid."""
    if not text.strip():
        return WHOLE_IMAGE
    try:
        left, top, right, bottom = (round(float(number)) for number in text.replace(",", " ").split())
    except (ValueError, OverflowError):
        return None
    fits_32_bits = max(map(abs, (left, top, right, bottom))) < 2**31
    if left < right and top < bottom and fits_32_bits:
        return left, top, right, bottom
    return None


def check_unique_images(table: TextTable, images: Sequence[str], boxes: NDArray[np.int32] | None) -> None:
    """Check that no image is listed twice with the same box, because it would be ranked against itself."""
    keys: Sequence[Any] = images
    if boxes is not None:
        keys = list(zip(images, map(tuple, boxes.tolist())))
    if len(set(keys)) == len(keys):
        return
    first_row: dict[Any, int] = {}
    duplicates: list[int] = []
    for row, key in enumerate(keys):
        if first_row.setdefault(key, row) != row:
            duplicates.append(row)
    image = images[duplicates[0]]
    line = table.lines[first_row[keys[duplicates[0]]]]
    rule = "`image` must be different in each row, or have another box"
    table.check(duplicates, f"{rule}, got {image!r} as in {table.unit} {line}")
