"""iNaturalist 2018 in the retrieval split of Smooth-AP, with the taxonomy as label levels."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_retrieval.checks import check_strings
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, class_numbers
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.table_file import ListFile, ListLines, find_file, find_missing
from lightning_retrieval.invalid import InvalidValue, owned

LEVELS = ("species", "genus", "family", "order", "class", "phylum", "kingdom")
LISTS = {"train": "Inaturalist_train_set1.txt", "test": "Inaturalist_test_set1.txt"}
TAXONOMIES = ("categories.json", "val2018.json", "train2018.json")  # each has all categories; the smallest comes first

_Taxonomy = dict[str, Mapping[str, Any]]  # maps a category id to its entry in the taxonomy


class _Images(NamedTuple):
    """The images of a list; each column has one entry for each image."""

    source: ListFile
    paths: list[str]
    category_ids: list[int]
    supercategories: list[str]


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
        settings: keyword arguments of `ImageDataModule` (`transform`, `train_transform`, `eval_transform`,
            `image_size`, `resize`, `mean`, `std`, `interpolation`, `background`, `reduced_scale`, `fill`, `on_error`,
            `load_truncated`, `val_fraction`, `cache_dir`) and of `RetrievalDataModule` (`classes_per_batch`,
            `samples_per_class`, `eval_batch_size`, `num_workers`, `seed`, `sampler`, `pin_memory`,
            `persistent_workers`).

    Raises:
        FileNotFoundError: if a list, or the taxonomy for `levels`, is missing.
        ValueError: if `levels` are unknown or in another order; if a line occurs twice or is not the path of an image
            in the folder of its category; if the taxonomy lacks a category or has two different entries for a category;
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
    def sources(self) -> list[Path]:
        """The lists and, if `levels` are given, the files of the taxonomy."""
        found = [self._list("train").path, self._list("test").path]
        if self.levels is not None:
            found += self._taxonomy_files()
        return found

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """The images of all lines of the lists."""
        taxonomy = None
        if self.levels is not None:
            taxonomy = self._read_taxonomy()
        train, test = _read_list(self._list("train")), _read_list(self._list("test"))
        shared = _shared_numbers([train, test])
        if shared and taxonomy is not None:
            rule = "need each category id in one supercategory"
            got = f"{min(shared)} in several, {_where_shared([train, test], min(shared))}"
            raise InvalidValue(rule, "INaturalist", "levels", got=got, cure="set levels=None")
        # The splits share supercategories, so a supercategory must have the same number in both splits.
        categories, _ = class_numbers(train.supercategories + test.supercategories)
        return {
            "train": self._make_index(train, categories[: len(train.paths)], taxonomy, shared),
            "test": self._make_index(test, categories[len(train.paths) :], taxonomy, shared),
        }

    def _make_index(
        self, images: _Images, categories: NDArray[np.int64], taxonomy: _Taxonomy | None, shared: set[int]
    ) -> ImageIndex:
        """The index of a list; a category id in several supercategories is a separate class in each of them."""
        keys = _class_keys(images, shared)
        labels, _ = class_numbers(keys)
        names = []
        for category_id, supercategory in sorted(set(keys)):
            names.append(f"{supercategory}/{category_id}".lstrip("/"))
        levels = None
        if taxonomy is not None:
            levels = self._labels_of_levels(taxonomy, labels, names)
        lines = ListLines(images.source)
        return ImageIndex(images.paths, labels, categories=categories, levels=levels, names=names, lines=lines)

    def _list(self, split: str) -> ListFile:
        name = LISTS[split]
        return ListFile(find_file(self.root, f"Inat_dataset_splits/{name}", name))

    def _taxonomy_files(self) -> list[Path]:
        """The files of the taxonomy that exist; at least one must exist."""
        found = []
        for name in TAXONOMIES:
            if (self.root / name).is_file():
                found.append(self.root / name)
        if not found:
            found.append(find_file(self.root, *reversed(TAXONOMIES)))  # raises an error with advice
        return found

    def _read_taxonomy(self) -> _Taxonomy:
        """The categories by id, from the first file whose categories have all ranks."""
        ranks = LEVELS[1:]
        problem = ""
        for path in self._taxonomy_files():
            categories = _read_categories(path)
            missing = _missing_ranks(categories, ranks)
            if categories and not missing:
                return categories
            problem = f"{path} without {', '.join(missing) or 'any category'}"
        raise InvalidValue(f"need categories with {', '.join(ranks)}", "INaturalist", "levels", got=problem)

    def _labels_of_levels(
        self, taxonomy: _Taxonomy, labels: NDArray[np.int64], names: Sequence[str]
    ) -> NDArray[np.int64]:
        """The label of each image at each level, of shape (images, levels)."""
        unknown = find_missing(names, taxonomy)
        if unknown:
            got = f"none for {len(unknown)} of {len(names)}, such as {unknown[0]}"
            raise InvalidValue("need the taxonomy of each category", "INaturalist", "levels", got=got)
        columns = []
        for level in self.levels or ():
            if level == "species":
                columns.append(labels)
                continue
            ranks = LEVELS[LEVELS.index(level) :]
            taxa = [_taxon(taxonomy[name], ranks) for name in names]
            taxon_labels, _ = class_numbers(taxa)
            columns.append(taxon_labels[labels])
        return np.stack(columns, 1)


def _check_levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    in_order = tuple(name for name in LEVELS if name in levels)
    if "species" not in levels or levels != in_order:
        rule = f"must be species and any of {', '.join(LEVELS[1:])}, in this order"
        raise InvalidValue(rule, "INaturalist", "levels", got=list(levels))
    return levels


def _read_list(file: ListFile) -> _Images:
    """The images of a list, whose lines end in `<supercategory>/<category id>/<image>`."""
    images = _Images(file, [], [], [])
    for number, line in enumerate(file.lines(), 1):
        image = line.strip()
        if not image:
            continue
        parts = image.split("/")
        if len(parts) < 3 or not re.fullmatch("[0-9]{1,18}", parts[-2]):
            raise file.error(
                f"each line of {file.path} must be <folder>/<supercategory>/<category id>/<image>, got "
                f"{image[:200]!r} (line {number})"
            )
        images.paths.append(image)
        images.category_ids.append(int(parts[-2]))
        images.supercategories.append(parts[-3])
    if not images.paths:
        raise file.error(f"{file.path} must name at least one image, got none")
    file.check_unique("image", images.paths)
    return images


def _shared_numbers(lists: Sequence[_Images]) -> set[int]:
    """The category ids that occur in several supercategories."""
    supercategory_of: dict[int, str] = {}
    shared: set[int] = set()
    for images in lists:
        for category_id, supercategory in zip(images.category_ids, images.supercategories):
            if supercategory_of.setdefault(category_id, supercategory) != supercategory:
                shared.add(category_id)
    return shared


def _where_shared(lists: Sequence[_Images], number: int) -> str:
    """Name two supercategories with the same category id, and a line of each, for an error message."""
    line_of: dict[str, str] = {}
    for images in lists:
        for position, (category_id, supercategory) in enumerate(zip(images.category_ids, images.supercategories)):
            if category_id == number and supercategory not in line_of:
                line_of[supercategory] = f"{supercategory} ({images.source.where(position)})"
    first, second, *_ = line_of.values()
    return f"{first} and {second}"


def _class_keys(images: _Images, shared: set[int]) -> list[tuple[int, str]]:
    """The class of each image, as its category id and, if several supercategories share the id, its supercategory."""
    keys = []
    for category_id, supercategory in zip(images.category_ids, images.supercategories):
        if category_id not in shared:
            supercategory = ""
        keys.append((category_id, supercategory))
    return keys


def _read_categories(path: Path) -> _Taxonomy:
    """The categories of a file of the taxonomy, by id."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            content = content["categories"]
        ids = [str(category["id"]) for category in content]
    except (ValueError, KeyError, TypeError) as error:
        rule = f"{path} must be JSON with a list of categories, each with an id"
        raise InvalidValue(rule, "INaturalist", got=repr(error)) from None
    categories: _Taxonomy = {}
    for position, (category_id, category) in enumerate(zip(ids, content)):
        if categories.setdefault(category_id, category) != category:
            raise InvalidValue(
                f"each category must have one entry in {path}",
                "INaturalist",
                got=f"the id {category_id} in the entries {ids.index(category_id)} and {position} of its "
                "categories, which differ",
            )
    return categories


def _missing_ranks(categories: _Taxonomy, ranks: Sequence[str]) -> list[str]:
    """The ranks that at least one of the categories lacks."""
    in_all = set(ranks)
    for category in categories.values():
        in_all.intersection_update(category)
    return find_missing(ranks, in_all)


def _taxon(category: Mapping[str, Any], ranks: Sequence[str]) -> str:
    """The names of a category at these ranks, the highest rank first, joined by slashes."""
    return "/".join(str(category[rank]) for rank in reversed(ranks))
