"""iNaturalist 2018 in the retrieval split of Smooth-AP, with the taxonomy as label levels."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lightning_retrieval.checks import check_strings
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table import Table, number_splits, read_list
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, owned
from lightning_retrieval.paths import find_file

LEVELS = ("species", "genus", "family", "order", "class", "phylum", "kingdom")
LISTS = {"train": "Inaturalist_train_set1.txt", "test": "Inaturalist_test_set1.txt"}
TAXONOMIES = ("categories.json", "val2018.json", "train2018.json")  # each has all categories; the smallest comes first


class INaturalist(ImageDataModule):
    """iNaturalist 2018: 325,846 training images of 5,690 species, 136,093 test images of 2,452 other species.

    In the test each image is a query, and all other test images are its gallery. `root` contains `train_val2018/` and
    Smooth-AP's split lists, directly or in `Inat_dataset_splits/`. If `levels` are given, `root` also contains
    `train2018.json`, `val2018.json` or `categories.json` of the official release. A class is an official category, that
    is, a species. With `sampler="category"`, batches are drawn from few supercategories (birds, plants, ...). A
    category id that occurs in several supercategories is a separate class in each of them, as in Smooth-AP's code, with
    names such as `Aves/9`.

    Args:
        root: the folder that contains `train_val2018/`.
        levels: levels of the taxonomy, finest first, out of species, genus, family, order, class, phylum and kingdom;
            species must be one of them. With `levels`, labels have shape (images, levels), for hierarchical losses. If
            None, labels are the species.
        settings: those of `ImageDataModule`, such as `image_size` and `classes_per_batch`.

    Raises:
        FileNotFoundError: if a list, or the taxonomy for `levels`, is missing.
        ValueError: if `levels` are unknown or in another order; if a line occurs twice or is not the path of an image
            in the folder of its category; if the taxonomy lacks a category;
            with `levels`, also if several supercategories share a category id.

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
        Two taxa are equal only if all their higher ranks are equal. So a plant genus and a bird genus with the same
        name are different.

    Source:
        Van Horn et al., CVPR 2018. The split: Brown et al., "Smooth-AP", ECCV 2020. Levels: Ramzi et al., "HAPPIER",
        ECCV 2022.
    """

    published_counts = MappingProxyType({"train": [(325_846, 5_690)], "test": [(136_093, 2_452)]})

    def __init__(
        self, root: str | Path, *, levels: Sequence[str] | None = None, **settings: Unpack[ImageSettings]
    ) -> None:
        super().__init__(root, **settings)
        self.levels: tuple[str, ...] | None = None
        if levels is not None:
            check_strings("levels", levels, owner="INaturalist")
            self.levels = _check_levels(tuple(levels))

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of all lines of the lists."""
        splits = {split: self._table(split) for split in LISTS}
        groups: dict[int, set[str]] = {}
        for table in splits.values():
            for number, group in zip(table["number"], table["category"]):
                groups.setdefault(number, set()).add(group)
        shared = {number for number, of_number in groups.items() if len(of_number) > 1}
        if shared and self.levels is not None:
            got = f"{min(shared)} in {' and '.join(sorted(groups[min(shared)]))}"
            rule = "need each category id in one supercategory"
            raise InvalidValue(rule, "INaturalist", "levels", got=got, cure="set levels=None")
        taxonomy = self._taxonomy() if self.levels is not None else None
        for split, table in splits.items():
            # A category id in several supercategories is a class in each of them.
            labels = [(n, group if n in shared else "") for n, group in zip(table["number"], table["category"])]
            levels = None if taxonomy is None else self._labels_of_levels(taxonomy, table["number"])
            splits[split] = table.with_columns(label=labels, levels=levels)
        return number_splits(splits, name_of_class=_name_of_class)

    def _table(self, split: str) -> Table:
        name = LISTS[split]
        table = read_list(find_file(self.root, f"Inat_dataset_splits/{name}", name), "path")
        table.check("path", leaves_root, "lie inside the root")
        table.check_unique("path")
        numbers, groups = zip(*table.parsed("path", _number_and_group))
        return table.with_columns(number=numbers, category=groups)

    def _taxonomy(self) -> dict[int, dict[str, Any]]:
        """The categories by id, from the first file whose categories have all ranks."""
        ranks = LEVELS[1:]
        found = [self.root / name for name in TAXONOMIES if (self.root / name).is_file()]
        for path in found or [find_file(self.root, *reversed(TAXONOMIES))]:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                entries = content["categories"] if isinstance(content, dict) else content
                if entries and all(rank in entry for entry in entries for rank in ranks):
                    return {int(entry["id"]): entry for entry in entries}
            except (ValueError, KeyError, TypeError) as error:
                rule = f"{path} must be JSON with a list of categories, each with an id"
                raise InvalidValue(rule, "INaturalist", got=repr(error)) from None
        got = f"{path} without one of them"
        raise InvalidValue(f"need categories with {', '.join(ranks)}", "INaturalist", "levels", got=got)

    def _labels_of_levels(self, taxonomy: Mapping[int, Mapping[str, Any]], numbers: Sequence[int]) -> Any:
        """The label of each image at each level, of shape (images, levels)."""
        different = set(numbers)
        unknown = different - taxonomy.keys()
        if unknown:
            got = f"none for {len(unknown)} of {len(different)}, such as {min(unknown)}"
            raise InvalidValue("need the taxonomy of each category", "INaturalist", "levels", got=got)
        columns = [class_numbers(numbers)[0]]
        for level in (self.levels or ())[1:]:
            ranks = LEVELS[LEVELS.index(level) :]
            taxon_of = {number: _taxon(taxonomy[number], ranks) for number in different}
            columns.append(class_numbers([taxon_of[number] for number in numbers])[0])
        return np.stack(columns, 1)


def _check_levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    in_order = tuple(name for name in LEVELS if name in levels)
    if "species" not in levels or levels != in_order:
        rule = f"must be species and any of {', '.join(LEVELS[1:])}, in this order"
        raise InvalidValue(rule, "INaturalist", "levels", got=list(levels))
    return levels


def _number_and_group(path: str) -> tuple[int, str]:
    """The category id and the supercategory in a path `<folder>/<supercategory>/<category id>/<image>`."""
    *_, group, number, _ = path.split("/")
    return int(number), group


def _name_of_class(label: tuple[int, str]) -> str:
    number, group = label
    return f"{group}/{number}".lstrip("/")


def _taxon(category: Mapping[str, Any], ranks: Sequence[str]) -> str:
    """The names of a category at these ranks, the highest rank first, joined by slashes."""
    return "/".join(str(category[rank]) for rank in reversed(ranks))
