"""Reads the user's images and labels from a data set of the Hugging Face package `datasets`.

The data set is on the hub, in a folder that `save_to_disk` has written, or in Parquet files.
"""

import io
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from lightning_retrieval.arguments import Seed, checked
from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.datamodules.base import Unpack
from lightning_retrieval.datamodules.image_index import ImageIndex, check_test_fraction, splits_by_use
from lightning_retrieval.datamodules.image_module import ImageDataModule, ImageSettings
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.image_table import paths_in_root
from lightning_retrieval.datamodules.table import Table, drawn_splits, number_splits
from lightning_retrieval.datamodules.table_file import PARQUET_SUFFIXES, composed
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned, owned_by
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.paths import check_path

OWNER = "HuggingFaceImages"
_DEFAULT_TEST_FRACTION = 0.5


def load_splits(path: str, config: str | None, revision: str | None) -> dict[str, Any]:
    """Load the splits of a data set, memory-mapped, as a dict from the name of a split to the split.

    Args:
        path: a folder that `save_to_disk` has written, a folder or a file of Parquet, or a name on the hub.
        config: name of the configuration of a data set on the hub; None if there is only one.
        revision: commit, tag or branch on the hub; None for the newest commit.

    Raises:
        FileNotFoundError: if a path does not exist, the hub does not have the name, or the hub cannot be reached.
        ModuleNotFoundError: if `datasets` is not installed.
        ValueError: if the data set cannot be read.
    """
    datasets = _import_datasets()
    looks_local = path.startswith((".", "~")) or Path(path).is_absolute() or path.lower().endswith(PARQUET_SUFFIXES)
    local = check_path("path", path, owner=OWNER, exists=looks_local)
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            _check_files(local)
            found = datasets.load_from_disk(str(local))
        elif local.exists():
            files = str(local) if local.is_file() else _parquet_files(local, config)
            found = datasets.load_dataset("parquet", data_files=files)
        else:
            found = datasets.load_dataset(path, config, revision=revision)
    except OSError as error:  # errors of the hub, such as a missing network, are also of this type
        rule = "must be a folder of save_to_disk, a folder or a file of Parquet, or a data set that the hub has"
        cure = "without a network, download it elsewhere, save it with save_to_disk, and give the folder"
        raise MissingFile(rule, OWNER, "path", got=f"{path} ({first_line(error)})", cure=cure) from error
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        raise InvalidValue("cannot be read", OWNER, "path", got=f"{path} ({first_line(error)})") from error
    return dict(found) if isinstance(found, Mapping) else {"train": found}


def _check_files(folder: Path) -> None:
    """Raise if what `save_to_disk` has written names files outside of the folder."""
    splits = ["."]
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
    names = list(splits)
    for split in splits:
        state = json.loads((folder / split / "state.json").read_bytes())
        names += [file["filename"] for file in state["_data_files"]]
    outside = list(filter(leaves_root, names))
    if outside:
        raise ValueError(f"it names the file {outside[0]!r} outside of the folder")


def _parquet_files(folder: Path, config: str | None) -> dict[str, list[str]]:
    """The Parquet files in a folder by split, as its README.md says, or else by the splits in their names."""
    from datasets.data_files import DataFilesDict, get_data_patterns  # type: ignore[import-untyped]

    patterns = _patterns_of_readme(folder, config) or get_data_patterns(str(folder))
    found = DataFilesDict.from_patterns(patterns, base_path=str(folder), allowed_extensions=[".parquet"])
    return {str(split): list(map(str, files)) for split, files in found.items()}


def _patterns_of_readme(folder: Path, config: str | None) -> dict[str, Any] | None:
    """Patterns of the files of a configuration by split, in the README.md of a data set from the hub; None without any.

    Raises:
        ValueError: if there is no such configuration, or a pattern leads out of the folder.
    """
    from datasets.data_files import sanitize_patterns
    from huggingface_hub import DatasetCard

    configs: list[Any] = []
    if (folder / "README.md").is_file():
        card = DatasetCard.load(folder / "README.md", ignore_metadata_errors=True)
        configs = card.data.to_dict().get("configs") or []
    names = [str(one.get("config_name", "default")) for one in configs]
    wanted = config or ("default" if len(names) != 1 else names[0])
    if wanted not in names and (names or config):
        raise ValueError(f"it has the configurations {', '.join(names) or 'of no name'}, of which `config` names one")
    files = configs[names.index(wanted)].get("data_files") if names else None
    if files is None:
        return None
    patterns: dict[str, Any] = sanitize_patterns(files)
    for pattern in (str(one) for of_split in patterns.values() for one in of_split):
        if leaves_root(pattern) or "://" in pattern:
            raise ValueError(f"its README.md names {pattern!r} outside of the folder")
    return patterns


def _import_datasets() -> Any:
    missing = "the package datasets is missing; install it with pip install 'lightning-retrieval[datasets]'."
    with optional_import(missing, OWNER):
        import datasets  # type: ignore[import-untyped]
    return datasets


def with_encoded_images(dataset: Any, image_column: str | None) -> tuple[Any, str]:
    """Return the split with its images still encoded, and the name of the column of images.

    Args:
        dataset: one split.
        image_column: name of the column; None if there is only one column of images.

    Raises:
        ValueError: if there is no such column, or it does not hold images.
    """
    datasets = _import_datasets()
    features = dataset.features
    if image_column is None:
        found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(found) != 1:
            raise InvalidValue(
                f"must name the column of images, as {len(found)} of the columns {_listed(features)} have the type "
                "Image",
                OWNER,
                "image_column",
            )
        (image_column,) = found
    check_column("image_column", image_column, features)
    if not _can_be_images(features[image_column]):
        rule = "must hold images, encoded or as paths"
        raise InvalidValue(rule, OWNER, "image_column", got=f"{image_column!r} of type {features[image_column]}")
    return dataset.with_format(None).cast_column(image_column, datasets.Image(decode=False)), image_column


def _can_be_images(feature: Any) -> bool:
    """Whether the type of a column allows images: type Image, bytes, paths, or a dict of bytes and path."""
    if isinstance(feature, Mapping):
        return feature.keys() == {"bytes", "path"}
    dtype = getattr(feature, "dtype", "")
    return dtype == "PIL.Image.Image" or dtype.removeprefix("large_") in ("string", "binary")


def check_column(setting: str, name: str, features: Mapping[str, Any]) -> None:
    """Raise unless a column exists."""
    if name not in features:
        raise InvalidValue(f"must be one of {_listed(features)}", OWNER, setting, got=repr(name))


def _listed(features: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, features))


def values_of(dataset: Any, setting: str, name: str, split: str) -> list[Any]:
    """Return the values of a column of integers or text; integers are replaced by their class names, if they have any.

    Args:
        dataset: one split.
        setting: the argument that names the column, for error messages.
        name: the column.
        split: name of the split, for error messages.

    Raises:
        ValueError: if a value is missing or an empty text, or is neither an integer nor text.
    """
    check_column(setting, name, dataset.features)
    # The column is selected first, because reading full rows would also read their images. `dataset.data` would ignore
    # a selection of rows.
    values = dataset.select_columns([name])[name][:]
    class_names = getattr(dataset.features[name], "names", None)
    found = []
    for row, value in enumerate(values):
        is_class = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
        is_missing = value not in range(len(class_names)) if class_names is not None else not str(value).strip()
        if not is_class or is_missing:
            rule = "must be a column with an integer or text in each row"
            got = f"{short_repr(value)} in row {row} of {split}, column {name!r}"
            raise InvalidValue(rule, OWNER, setting, got=got, cure="remove these rows, or give them a class")
        found.append(_composed(value if class_names is None else class_names[value]))
    return found


def _composed(name: Any) -> Any:
    """A text in one Unicode form; an integer as it is."""
    return composed(name) if isinstance(name, str) else name


def tags_of(dataset: Any, name: str, split: str) -> list[list[Any]]:
    """Return the tags of each row of a column of lists; integers are replaced by their names, if they have any.

    Args:
        dataset: one split.
        name: the column.
        split: name of the split, for error messages.

    Raises:
        ValueError: if the column does not exist, does not hold lists of integers or of text, or an integer has no name.
    """
    check_column("tag_column", name, dataset.features)
    element: Any = getattr(dataset.features[name], "feature", None)
    dtype = getattr(element, "dtype", "")
    if not (dtype.removeprefix("large_") == "string" or dtype.removeprefix("u").startswith("int")):
        rule = "must hold lists of text or of integers"
        raise InvalidValue(rule, OWNER, "tag_column", got=f"{name!r} of type {dataset.features[name]} in {split}")
    names = getattr(element, "names", None)
    tags_of_rows = []
    for tags in dataset.select_columns([name])[name][:]:
        found = [tag for tag in tags or () if tag is not None]
        if names is not None:
            found = [element.int2str(tag) for tag in found]
        tags_of_rows.append([_composed(tag) for tag in found if str(tag).strip()])  # an empty text is no tag
    return tags_of_rows


class HuggingFaceSet(ImageSet):
    """An `ImageSet` whose images are rows of memory-mapped tables instead of files.

    Args:
        index: labels and other annotations; the path of an image is its split and its row, `<split>/<row>`.
        root: the data set's folder, or its name.
        transform: the argument of `ImageSet`.
        tables: the splits, with encoded images.
        image_column: name of the column of images.
        settings: further settings of `ImageSet`.
    """

    def __init__(
        self,
        index: ImageIndex,
        root: str | Path,
        transform: Any,
        *,
        tables: Mapping[str, Any],
        image_column: str,
        **settings: Any,
    ) -> None:
        super().__init__(index, root, transform, **settings)
        # Other columns may hold images, too, which `datasets` would open.
        self.tables = {name: table.select_columns([image_column]) for name, table in tables.items()}
        self.image_column = image_column

    def file(self, position: int) -> Path | BinaryIO:
        """Return the encoded image: its bytes, or the path of its file, which is in the folder of the data set.

        Raises:
            ValueError: if the row has no image, or its path leads out of the folder.
        """
        split, _, row = self.index.paths[position].rpartition("/")
        image = self.tables[split][int(row)][self.image_column]
        if image is None or (image["bytes"] is None and not image["path"]):
            raise ValueError("the row has no image")
        if image["bytes"] is not None:
            return io.BytesIO(image["bytes"])
        for folder in self._folders():
            (path,) = paths_in_root([image["path"]], folder)
            if not leaves_root(path):
                return folder / path
        raise ValueError(f"its path {image['path']!r} leads out of the folder of the data set")

    def _folders(self) -> list[Path]:
        """The folders in which files of images may lie."""
        if self.root.exists():
            return [self.root.parent if self.root.is_file() else self.root]
        from datasets import config

        return [Path(config.HF_DATASETS_CACHE), Path(config.HF_CACHE_HOME)]  # of data sets on the hub


class HuggingFaceImages(ImageDataModule):
    """Reads images and labels from a data set of Hugging Face's `datasets`, which is memory-mapped from the disk.

    Images are decoded like those of `ImageFolder`, including transparency, EXIF orientation and 16 bits. Training and
    evaluation must have different classes. A data set for classification has the same classes in each split, so it
    needs `test_fraction`.

    Args:
        path: a folder that `save_to_disk` has written, a folder or a file of Parquet, or the name of a data set on the
            hub, such as `"owner/name"`, which is downloaded once.
        config: name of the configuration of a data set on the hub, or in the README.md of a folder; None if there is
            only one.
        revision: commit, tag or branch on the hub; None for the newest commit.
        image_column: the column of images; may be None if only one column has the type Image.
        label_column: the column of classes, integers or text. It may be None if there is a `tag_column`; then each row
            is a class of its own, and rows are split at random.
        category_column: the column of coarser classes, for `sampler="category"`; None for no categories.
        tag_column: the column of tags, lists of text or of integers, for the rule `SharedTags`; None for no tags. Lists
            of 0 and 1 for each of at least three tags are multi-hot.
        split_names: maps a use to the name of a split, such as `{"train": "train", "test": "validation"}`. Without, all
            splits are used under their own names, but for usual ones such as `"validation"`, which becomes `"val"`.
        test_fraction: fraction of the classes of all used splits, between 0 and 1, that form the test set. If None, the
            data set's splits are used as they are. If there is only one split, and `split_names` does not assign it to
            evaluation, None means that half of its classes form the test set.
        split_seed: determines which classes form the test set.
        settings: arguments of `ImageDataModule`, except `root`, and of `RetrievalDataModule`.

    Raises:
        FileNotFoundError: if `path` neither exists nor can be loaded from the hub.
        ModuleNotFoundError: if `datasets` is not installed.
        ValueError: if a column or a split does not exist, a row has no label, or a class is in training and evaluation.

    Example:
        >>> from PIL import Image
        >>> from datasets import Dataset, Features, Image as Images, Value
        >>> pictures = [Image.new("RGB", (60, 50), (30 * i, 0, 0)) for i in range(6)]
        >>> columns = {"image": pictures, "label": ["cat", "cat", "dog", "dog", "owl", "owl"]}
        >>> features = Features({"image": Images(), "label": Value("string")})
        >>> Dataset.from_dict(columns, features=features).save_to_disk("pets")
        >>> data = HuggingFaceImages("pets", test_fraction=0.4, classes_per_batch=2, samples_per_class=2)
        >>> len(data.train_set), len(data.test_set)
        (4, 2)

    Relations:
        `ImageFolder` and `ImageTable` read image files, which need not be converted to a data set first.
    """

    reads_in_check = True

    def __init__(
        self,
        path: str | Path,
        *,
        config: str | None = None,
        revision: str | None = None,
        image_column: str | None = None,
        label_column: str | None = "label",
        category_column: str | None = None,
        tag_column: str | None = None,
        split_names: Mapping[str, str] | None = None,
        test_fraction: float | None = None,
        split_seed: Seed = 0,
        **settings: Unpack[ImageSettings],
    ) -> None:
        check_path("path", path, owner=OWNER)
        super().__init__(path, **settings)
        self.path = path
        self.config = config
        self.revision = revision
        self.image_column = image_column
        self.category_column = category_column
        self.tag_column = tag_column
        self.label_column = label_column
        if label_column is None and tag_column is None:
            raise InvalidValue("must be given if there is no `tag_column`", OWNER, "label_column", got="None for both")
        self.split_names = split_names
        self.test_fraction = test_fraction
        if test_fraction is not None:
            with owned_by(OWNER):
                self.test_fraction = check_test_fraction(test_fraction)
        self.split_seed = checked(self, split_seed=split_seed)

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The splits of the data set by name, with encoded images."""
        return self._tables_and_column[0]

    @cached_property
    def _tables_and_column(self) -> tuple[dict[str, Any], str]:
        """The splits that are used, and the name of the column of images."""
        found = load_splits(str(self.path), self.config, self.revision)
        used = list(found)
        if self.split_names:
            used = list(dict.fromkeys(self.split_names.values()))
        tables = {}
        column = ""
        for name in used:
            if name not in found:
                raise InvalidValue(f"must be from {', '.join(map(repr, found))}", OWNER, "split_names", got=repr(name))
            tables[name], column = with_encoded_images(found[name], self.image_column)
        return tables, column

    @owned
    def read(self) -> Mapping[str, ImageIndex]:
        """Read the labels, and split the classes if there is one split or `test_fraction` was given."""
        tables = {name: self._table(name) for name in self.tables}
        evaluation_only = self.split_names and "train" not in self.split_names
        if self.test_fraction is None and (len(tables) > 1 or evaluation_only):
            splits = {
                use: tables[name] for use, name in (self.split_names or splits_by_use(tables, "split_names")).items()
            }
        else:
            names = next(iter(tables.values())).columns
            joined = {name: [value for table in tables.values() for value in table[name]] for name in names}
            splits = drawn_splits(Table(joined), self.test_fraction or _DEFAULT_TEST_FRACTION, self.split_seed)
        # Each split numbers the categories for itself.
        name_of_class = None if self.label_column is None else str
        return number_splits(splits, common=(), name_of_class=name_of_class)

    def _table(self, name: str) -> Table:
        """The rows of a split; the path of an image is its split and its row."""
        rows = self.tables[name]
        paths = [f"{name}/{row}" for row in range(len(rows))]
        labels: list[Any] = paths
        if self.label_column is not None:
            labels = values_of(rows, "label_column", self.label_column, name)
        categories = tags = None
        if self.category_column is not None:
            categories = values_of(rows, "category_column", self.category_column, name)
        if self.tag_column is not None:
            tags = tags_of(rows, self.tag_column, name)
        return Table({"path": paths, "label": labels}).with_columns(category=categories, tags=tags)

    def image_set(self, index: ImageIndex, transform: Any) -> HuggingFaceSet:
        """Create the dataset of the rows of an index."""
        tables, column = self._tables_and_column
        return HuggingFaceSet(index, self.root, transform, tables=tables, image_column=column, **self.reading)
