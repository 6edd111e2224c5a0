"""The user's images with boxes, in COCO's JSON format, which annotation tools export."""

import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.detection.boxes import BoxDataModule, BoxIndex, DetectionSettings
from lightning_retrieval.invalid import InvalidValue, owned, reported_as
from lightning_retrieval.paths import check_path, find_file

OWNER = "CocoDetection"


class CocoDetection(BoxDataModule):
    """Images with boxes in the JSON format of COCO, one file for each split.

    A file has the lists `images` (`id`, `file_name`), `annotations` (`image_id`, `category_id`, `bbox` as left, top,
    width and height in pixels, optionally `iscrowd`) and `categories` (`id`, `name`). Labels are numbered from 1 in the
    order of the categories' ids. Crowds are treated as difficult objects: they are not trained on, and are ignored in
    evaluation. Objects whose box has no area, of which COCO's training set of 2017 has two, are skipped. Images without
    annotations are kept.

    Args:
        root: the folder that the file names of the images are relative to.
        train: the JSON file of the training split; relative paths are relative to `root`.
        test: the JSON file of the test split.
        val: the JSON file of the split used to choose checkpoints; if None, the test split is used.
        settings: arguments of `DetectionDataModule`: `batch_size`, `eval_batch_size`, `num_workers`, `seed`,
            `pin_memory`.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if a file is not valid JSON or not in COCO's format, or if the splits have different categories.

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

    @owned
    def read(self) -> Mapping[str, BoxIndex]:
        """Read the file of each split."""
        splits = {name: read_coco(find_file(self.root, str(file), argument=name)) for name, file in self.files.items()}
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
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        categories = sorted(content["categories"], key=itemgetter("id"))
        label_of = {category["id"]: label for label, category in enumerate(categories, 1)}
        paths = {image["id"]: image["file_name"] for image in content["images"]}
        if len(paths) < len(content["images"]):
            raise ValueError("two images have one id")
        objects: dict[Any, tuple[list[Any], list[int], list[bool]]] = {image: ([], [], []) for image in paths}
        for annotation in content["annotations"]:
            left, top, width, height = map(float, annotation["bbox"])
            if not width * height:
                continue
            boxes, labels, difficult = objects[annotation["image_id"]]
            boxes.append([left, top, left + width, top + height])
            labels.append(label_of[annotation["category_id"]])
            difficult.append(bool(annotation.get("iscrowd", 0)))
        names = [category["name"] for category in categories]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        rule = f"{path} must be a JSON file in COCO's format"
        raise InvalidValue(rule, OWNER, got=f"one that cannot be read ({error!r})") from None
    with reported_as(OWNER):
        return BoxIndex(list(paths.values()), list(objects.values()), class_names=names)
