"""iNaturalist 2018 in the retrieval split of Smooth-AP, with the taxonomy as label levels."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.datamodules.files.find import find_file
from lightning_retrieval.datamodules.files.lists import check_unique, read_lines
from lightning_retrieval.datamodules.images.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.images.image_module import ImageDataModule

LEVELS = ("species", "genus", "family", "order", "class", "phylum", "kingdom")
LISTS = {"train": "Inaturalist_train_set1.txt", "test": "Inaturalist_test_set1.txt"}
TAXONOMIES = ("categories.json", "val2018.json", "train2018.json")  # each names all categories; the smallest first


class INaturalist(ImageDataModule):
    """Species: 325,846 training images of 5,690, 136,093 test images of 2,452 others, each ranked against the rest.

    `root` holds `train_val2018/` and Smooth-AP's split lists, in `Inat_dataset_splits/` or by themselves; for `levels`
    also `train2018.json`, `val2018.json` or `categories.json` of the official release. A class is an official category,
    its category the supercategory (birds, plants, ...).

    Args:
        root: the folder that holds `train_val2018/`.
        levels: of the taxonomy, finest first, out of species, genus, family, order, class, phylum and kingdom, of which
            species must be one; labels are then (images, levels), for hierarchical losses. None for species alone.
        settings: those of `ImageDataModule`, such as `transform` and `cache_dir`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if a list, or the taxonomy for `levels`, is not there.
        ValueError: if `levels` are others or in another order, a line is no path of an image in the folder of its
            category or comes twice, or the taxonomy lacks one of the categories.

    Example:
        >>> from pathlib import Path
        >>> lists = Path("inat", "Inat_dataset_splits")
        >>> lists.mkdir(parents=True)
        >>> birds = [f"train_val2018/Aves/{number}/{i}.jpg\\n" for number in (9, 100) for i in range(2)]
        >>> _ = (lists / "Inaturalist_train_set1.txt").write_text("".join(birds))
        >>> _ = (lists / "Inaturalist_test_set1.txt").write_text("train_val2018/Plantae/7/0.jpg\\n")
        >>> data = INaturalist("inat")
        >>> data.splits["train"].labels, list(data.splits["train"].names)
        (array([0, 0, 1, 1]), ['9', '100'])

    Relations:
        Two genera of one name, of a plant and of a bird, are two: a taxon is told by all that stands above it.

    Source:
        Van Horn et al., CVPR 2018. The split: Brown et al., "Smooth-AP", ECCV 2020. Levels: Ramzi et al., "HAPPIER",
        ECCV 2022.
    """

    published_counts = MappingProxyType({"train": [(325_846, 5_690)], "test": [(136_093, 2_452)]})

    def __init__(self, root: str | Path, levels: Sequence[str] | None = None, **settings: Any) -> None:
        super().__init__(root, **settings)
        self.levels = None if levels is None else tuple(levels)
        if self.levels is not None and (
            "species" not in self.levels or list(self.levels) != [name for name in LEVELS if name in self.levels]
        ):
            raise ValueError(
                f"INaturalist: `levels` must be species and any of {', '.join(LEVELS[1:])}, in this order, got "
                f"{list(self.levels)}."
            )

    def sources(self) -> list[Path]:
        """The lists and, where it is needed, the taxonomy."""
        found = [self._list(split) for split in LISTS]
        return found if self.levels is None else [*found, *self._taxonomies()]

    def read(self) -> Mapping[str, ImageIndex]:
        """Every line of the lists."""
        taxonomy = None if self.levels is None else self._taxonomy()
        lists = {split: _read_list(self._list(split)) for split in LISTS}
        groups = {name for _, _, of_split in lists.values() for name in of_split}
        number = {name: i for i, name in enumerate(sorted(groups))}
        splits = {}
        for split, (paths, classes, of_split) in lists.items():
            labels, names = class_numbers(np.array(classes))
            levels = None if taxonomy is None else self._of_images(taxonomy, labels, names)
            categories = [number[group] for group in of_split]
            splits[split] = ImageIndex(paths, labels, categories=categories, levels=levels, names=names)
        return splits

    def _list(self, split: str) -> Path:
        return find_file("INaturalist", self.root, f"Inat_dataset_splits/{LISTS[split]}", LISTS[split])

    def _taxonomies(self) -> list[Path]:
        found = [self.root / name for name in TAXONOMIES if (self.root / name).is_file()]
        return found or [find_file("INaturalist", self.root, *reversed(TAXONOMIES))]

    def _taxonomy(self) -> dict[str, Mapping[str, Any]]:
        """What the first of the files with all ranks says of each category, by id."""
        ranks, missing = LEVELS[1:], ""
        for path in self._taxonomies():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                categories = content["categories"] if isinstance(content, dict) else content
                found = {str(category["id"]): category for category in categories}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"INaturalist: {path} must be JSON with a list of categories, each with an id, got {error!r}."
                ) from None
            lacking = [rank for rank in ranks if any(rank not in category for category in found.values())]
            if found and not lacking:
                return found
            missing = f"{', '.join(lacking) or 'all categories'} missing in {path}"
        raise ValueError(f"INaturalist: `levels` need categories with {', '.join(ranks)}, with {missing}.")

    def _of_images(
        self, taxonomy: Mapping[str, Mapping[str, Any]], labels: NDArray[np.int64], names: Sequence[str]
    ) -> NDArray[np.int64]:
        """(images, levels): the number of each image's taxon."""
        unknown = [name for name in names if name not in taxonomy]
        if unknown:
            raise ValueError(
                f"INaturalist: `levels` need the taxonomy of each category, got none for {len(unknown)} of "
                f"{len(names)}, such as {unknown[0]}."
            )
        columns = []
        for level in self.levels or ():
            above = LEVELS[LEVELS.index(level) :]
            if level == "species":
                columns.append(labels)
                continue
            taxa = ["/".join(str(taxonomy[name][rank]) for rank in reversed(above)) for name in names]
            columns.append(class_numbers(taxa)[0][labels])
        return np.stack(columns, 1)


def _read_list(path: Path) -> tuple[list[str], list[int], list[str]]:
    """Paths, category ids and supercategories."""
    paths: list[str] = []
    classes: list[int] = []
    groups: list[str] = []
    for number, line in enumerate(read_lines("INaturalist", path), 1):
        image = line.strip()
        if not image:
            continue
        parts = image.split("/")
        if len(parts) < 3 or ".." in parts or not re.fullmatch("[0-9]{1,18}", parts[-2]):
            raise ValueError(
                f"INaturalist: each line of {path} must be <folder>/<supercategory>/<category id>/<image>, got "
                f"{image[:200]!r} (line {number})."
            )
        paths.append(image)
        classes.append(int(parts[-2]))
        groups.append(parts[-3])
    if not paths:
        raise ValueError(f"INaturalist: {path} must name at least one image, got none.")
    check_unique("INaturalist", path, "image", paths)
    return paths, classes, groups
