"""The user's images with boxes, in COCO's JSON format, which annotation tools export."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.detection.boxes import BoxDataModule, BoxIndex, DetectionSettings
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.paths import check_path

OWNER = "CocoDetection"
LARGEST_COORDINATE = 1e9  # pixels

# The required keys, and the types of their values.
KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "images": {"id": (int, str), "file_name": (str,)},
    "annotations": {"id": (int, str), "image_id": (int, str), "category_id": (int,), "bbox": (list,)},
    "categories": {"id": (int,), "name": (str,)},
}


class CocoDetection(BoxDataModule):
    """Images with boxes in the JSON format of COCO, one file for each split.

    A file has the lists `images` (`id`, `file_name`), `annotations` (`image_id`, `category_id`, `bbox` as left, top,
    width and height in pixels, optionally `iscrowd`) and `categories` (`id`, `name`). Labels are numbered from 1 in the
    order of the categories' ids. Crowds are treated as difficult objects: they are not trained on, and are ignored in
    evaluation. Images without annotations are kept.

    Args:
        root: the folder that the file names of the images are relative to.
        train: the JSON file of the training split; relative paths are relative to `root`.
        test: the JSON file of the test split.
        val: the JSON file of the split used to choose checkpoints; if None, the test split is used.
        settings: arguments of `DetectionDataModule`: `batch_size`, `eval_batch_size`, `num_workers`, `seed`,
            `pin_memory`.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if a file is not valid JSON (the message has the line) or not in COCO's format (the message has the
            id or the number of the entry), or if the splits have different categories.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from lightning_retrieval.datamodules import CocoDetection
        >>> content = {
        ...     "images": [{"id": 1, "file_name": "a.jpg"}],
        ...     "annotations": [{"id": 1, "image_id": 1, "category_id": 5, "bbox": [4, 2, 10, 20]}],
        ...     "categories": [{"id": 5, "name": "cup"}],
        ... }
        >>> _ = Path("boxes.json").write_text(json.dumps(content))
        >>> data = CocoDetection(".", train="boxes.json", test="boxes.json")
        >>> data.class_names, data.splits["train"].objects(0).boxes.tolist()
        (['cup'], [[4.0, 2.0, 14.0, 22.0]])

    Relations:
        `PascalVOC` reads VOC's own files. `BoxSet` describes the targets.

    Source:
        https://cocodataset.org/#format-data describes the format (Lin et al., ECCV 2014).
    """

    def __init__(
        self,
        root: str | Path,
        *,
        train: str | Path,
        test: str | Path,
        val: str | Path | None = None,
        **settings: Unpack[DetectionSettings],
    ) -> None:
        super().__init__(root, **settings)
        self.files = {"train": check_path("train", train, owner=OWNER), "test": check_path("test", test, owner=OWNER)}
        if val is not None:
            self.files["val"] = check_path("val", val, owner=OWNER)

    def read(self) -> Mapping[str, BoxIndex]:
        """Read the file of each split."""
        splits = {}
        for name, file in self.files.items():
            splits[name] = read_coco(self.root / file)
        for name, index in splits.items():
            if index.class_names != splits["train"].class_names:
                rule = f"must have the categories of the training split, {', '.join(splits['train'].class_names)}"
                raise InvalidValue(rule, OWNER, name, got=", ".join(index.class_names))
        return splits


def read_coco(path: Path) -> BoxIndex:
    """The images of a JSON file in COCO's format.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not JSON, or not in COCO's format.
    """
    content = _load(path)
    _check_unique(path, "category", "id", content["categories"])
    _check_unique(path, "category", "name", content["categories"])
    _check_unique(path, "image", "id", content["images"])
    categories = sorted(content["categories"], key=lambda category: category["id"])
    names = [category["name"] for category in categories]
    label_of = {category["id"]: label for label, category in enumerate(categories, 1)}
    paths: dict[Any, str] = {}
    for image in content["images"]:
        if leaves_root(image["file_name"]):
            rule = f"{path} must have file names inside of `root`"
            raise InvalidValue(rule, OWNER, got=f"{image['file_name']!r} for image {image['id']}")
        paths[image["id"]] = image["file_name"]
    boxes: dict[Any, tuple[list[list[float]], list[int], list[bool]]] = {}
    for image_id in paths:
        boxes[image_id] = ([], [], [])
    for annotation in content["annotations"]:
        box = _checked_box(path, annotation, paths, label_of)
        of_image = boxes[annotation["image_id"]]
        of_image[0].append(box)
        of_image[1].append(label_of[annotation["category_id"]])
        of_image[2].append(bool(annotation.get("iscrowd", 0)))
    if len(paths) == 0:
        raise InvalidValue(f"{path} must have at least one image", OWNER, got="none")
    return BoxIndex(list(paths.values()), list(boxes.values()), class_names=names)


def _load(path: Path) -> dict[str, Any]:
    """Return the content of the file; raise unless it has the three lists and each entry has the required keys."""
    if not path.is_file():
        raise MissingFile(f"{path} must be a JSON file in COCO's format, but there is no such file", OWNER)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        rule = f"{path} must be a JSON file"
        raise InvalidValue(rule, OWNER, got=f"an error in line {error.lineno} ({error.msg})") from None
    except RecursionError:
        raise InvalidValue(f"{path} must be a JSON file in COCO's format", OWNER, got="lists in lists") from None
    except UnicodeDecodeError as error:
        rule = f"{path} must be a JSON file in UTF-8"
        raise InvalidValue(rule, OWNER, got=f"{error.reason} at byte {error.start}") from None
    for name, keys in KEYS.items():
        entries = None
        if isinstance(content, dict):
            entries = content.get(name)
        if not isinstance(entries, list):
            raise InvalidValue(f"{path} must have the list {name!r}, as COCO's format has", OWNER)
        for number, entry in enumerate(entries):
            _check_keys(path, name, number, entry, keys)
    result: dict[str, Any] = content
    return result


def _check_keys(path: Path, name: str, number: int, entry: Any, keys: Mapping[str, tuple[type, ...]]) -> None:
    """Check that an entry of a list has the required keys, with values of the right types."""
    if not isinstance(entry, dict):
        raise InvalidValue(f"{path} must have objects in {name!r}", OWNER, got=f"{entry!r} in entry {number}")
    for key, types in keys.items():
        if not isinstance(entry.get(key), types):
            wanted = " or ".join(type_.__name__ for type_ in types)
            rule = f"{path} must give each entry of {name!r} the key {key!r} of type {wanted}"
            raise InvalidValue(rule, OWNER, got=f"{entry.get(key)!r} in entry {number}")


def _check_unique(path: Path, what: str, key: str, entries: Iterable[Mapping[str, Any]]) -> None:
    """Check that no two entries have the same value of `key`."""
    seen = set()
    for entry in entries:
        if entry[key] in seen:
            raise InvalidValue(f"{path} must have each {what} once", OWNER, got=f"the {key} {entry[key]!r} twice")
        seen.add(entry[key])


def _checked_box(
    path: Path, annotation: dict[str, Any], paths: Mapping[Any, str], label_of: Mapping[Any, int]
) -> list[float]:
    """Left, top, right and bottom of an annotation; raises if the box is invalid, or its image or category unknown."""
    where = f"in annotation {annotation['id']}"
    if annotation["image_id"] not in paths:
        rule = f"{path} must list the image of each annotation"
        raise InvalidValue(rule, OWNER, got=f"image_id {annotation['image_id']!r} {where}")
    if annotation["category_id"] not in label_of:
        rule = f"{path} must list the category of each annotation"
        raise InvalidValue(rule, OWNER, got=f"category_id {annotation['category_id']!r} {where}")
    try:
        left, top, width, height = map(float, annotation["bbox"])
    except (TypeError, ValueError):
        left = top = width = height = 0.0
    is_finite = all(abs(value) < LARGEST_COORDINATE for value in (left, top, width, height))  # False for NaN, too
    if not (is_finite and width > 0 and height > 0):
        raise InvalidValue(
            f"{path} must give each annotation a bbox [left, top, width, height] of finite numbers with a positive "
            "width and height",
            OWNER,
            got=f"{annotation['bbox']} {where}",
        )
    return [left, top, left + width, top + height]
