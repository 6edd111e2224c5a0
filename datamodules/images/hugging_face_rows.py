"""Data sets in the format of Hugging Face's `datasets`: finding them, their columns, and the file of one image."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.optional_packages import optional_import

OWNER = "HuggingFaceImages"


def load_splits(path: str, config: str | None, revision: str | None) -> dict[str, Any]:
    """The splits of a data set by name, memory-mapped.

    Args:
        path: a folder that `save_to_disk` has written, a folder or a file of Parquet, or a name on the hub.
        config: name of the configuration of a data set on the hub; None if there is only one.
        revision: commit, tag or branch on the hub; None for the newest.

    Raises:
        FileNotFoundError: if a path does not exist, or the hub does not have or cannot be asked for the name.
        ModuleNotFoundError: if `datasets` is not installed.
        ValueError: if it cannot be read.
    """
    datasets = _import_datasets()
    local = Path(path).expanduser()
    looks_local = local.is_absolute() or path.startswith((".", "~")) or path.endswith(".parquet")
    if looks_local and not local.exists():
        raise FileNotFoundError(f"{OWNER}: `path` must be an existing folder or file, got {path}.")
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            found = datasets.load_from_disk(str(local))
        elif local.is_file():
            found = datasets.load_dataset("parquet", data_files=str(local))
        elif local.is_dir():
            found = datasets.load_dataset(str(local))
        else:
            found = datasets.load_dataset(path, config, revision=revision)
    except OSError as error:  # errors of the hub, too, among them the one for a missing network
        raise FileNotFoundError(
            f"{OWNER}: `path` must be a folder of save_to_disk, a folder or a file of Parquet, or a data set that the "
            f"hub has, got {path} ({first_line(error)}); without a network, download it elsewhere, save it with "
            "save_to_disk, and give the folder."
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{OWNER}: `path` cannot be read, got {path} ({first_line(error)}).") from error
    if isinstance(found, Mapping):
        return dict(found)
    return {"train": found}


def _import_datasets() -> Any:
    with optional_import(
        f"{OWNER}: the package datasets is missing; install it with pip install 'lightning-retrieval[datasets]'."
    ):
        import datasets  # type: ignore[import-untyped]
    return datasets


def with_encoded_images(dataset: Any, image_column: str | None) -> tuple[Any, str]:
    """The data set whose images are given as files instead of pixels, and the name of their column.

    Args:
        dataset: one split.
        image_column: name of the column; None if there is only one column of images.

    Raises:
        ValueError: if there is no such column, or it has no images.
    """
    datasets = _import_datasets()
    features = dataset.features
    if image_column is None:
        found = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        if len(found) != 1:
            raise ValueError(
                f"{OWNER}: `image_column` must name the column of images, as {len(found)} of the columns "
                f"{_listed(features)} have the type Image."
            )
        (image_column,) = found
    check_column("image_column", image_column, features)
    if not _can_be_images(features[image_column]):
        raise ValueError(
            f"{OWNER}: `image_column` must hold images, encoded or as paths, got {image_column!r} of type "
            f"{features[image_column]}."
        )
    return dataset.with_format(None).cast_column(image_column, datasets.Image(decode=False)), image_column


def _can_be_images(feature: Any) -> bool:
    """Whether a column has images, their bytes, their paths, or both, as `datasets` stores images."""
    if isinstance(feature, Mapping):
        return feature.keys() == {"bytes", "path"}
    dtype = getattr(feature, "dtype", "")
    return dtype == "PIL.Image.Image" or dtype.removeprefix("large_") in ("string", "binary")


def check_column(setting: str, name: str, features: Mapping[str, Any]) -> None:
    """Raise unless a column exists."""
    if name not in features:
        raise ValueError(f"{OWNER}: `{setting}` must be one of {_listed(features)}, got {name!r}.")


def _listed(features: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, features))


def values_of(dataset: Any, setting: str, name: str, split: str) -> list[Any]:
    """The values of a column of integers or text, as names of classes if the data set has names for its integers.

    Args:
        dataset: one split.
        setting: the argument that names the column, for error messages.
        name: the column.
        split: name of the split, for error messages.

    Raises:
        ValueError: if a value is missing, or is neither an integer nor text.
    """
    check_column(setting, name, dataset.features)
    # Without the other columns: reading a row would decode its image. `dataset.data` would ignore a selection of rows.
    values = dataset.select_columns([name])[name][:]
    class_names = getattr(dataset.features[name], "names", None)
    for row, value in enumerate(values):
        is_class = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
        if not is_class or (class_names is not None and value == -1):
            raise ValueError(
                f"{OWNER}: `{setting}` must be a column with an integer or text in each row, got "
                f"{short_repr(value)} in row {row} of {split}, column {name!r}."
            )
    if class_names is not None:
        return [class_names[value] for value in values]
    return list(values)


def file_of_row(dataset: Any, image_column: str, row: int, folder: Path) -> Path | BinaryIO:
    """The encoded image of a row: its bytes, or the path of its file, which may be relative to the data set's folder.

    Raises:
        ValueError: if the row has no image.
    """
    image = dataset[row][image_column]
    if image is None or (image["bytes"] is None and not image["path"]):
        raise ValueError("the row has no image")
    if image["bytes"] is not None:
        return io.BytesIO(image["bytes"])
    path = Path(image["path"])
    if path.is_absolute() or path.exists():
        return path
    return folder / path
