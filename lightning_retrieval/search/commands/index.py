"""`lightning-retrieval index`: build an index of the images in a folder, or of embeddings written by `embed`.

For a folder of images, the embeddings are kept in memory, not in files. The index records its model and the
preparation of its images, so that queries are embedded in the same way.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_retrieval.checks import check_choice, check_finite_number
from lightning_retrieval.datamodules.image_table import with_paths
from lightning_retrieval.datamodules.table import Table
from lightning_retrieval.datamodules.table_file import COMMON_FORMAT, read_table
from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.invalid import InvalidValue, owned_by, reported_as
from lightning_retrieval.metrics import RetrievalMetrics, nearest_scores
from lightning_retrieval.paths import check_path, cure_of_names
from lightning_retrieval.search.commands.embedding import (
    EmbeddedImages,
    ImageEmbedder,
    UnreadableImage,
    check_table_given,
    images_in_folder,
    recorded_model,
)
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.commands.stores import (
    THRESHOLD,
    IndexSettings,
    IndexWriter,
    NewRows,
    model_difference,
    new_index,
    opened_index,
)
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, labelled_rows
from lightning_retrieval.search.image_files import name_folder
from lightning_retrieval.search.store.conditions import LARGEST_INTEGER, new_columns
from lightning_retrieval.search.store.embedding_store import EmbeddingStore
from lightning_retrieval.search.store.index import RECALL_AT
from lightning_retrieval.search.store.rows import FolderRows

Missing = Literal["error", "keep"]
MISSING = get_args(Missing)
# The texts of a column of numbers. A text with leading zeros is a code, not a number.
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def has_threshold(output: Path, store: str | None) -> bool:
    """Whether there is an index with a threshold that the command will replace."""
    try:
        with opened_index(output, store, verify=False) as earlier:
            return THRESHOLD in earlier.about
    except (FileNotFoundError, ValueError):  # there is no index, or none that can be read
        return False


def summary(made: EmbeddingStore) -> str:
    """What was written, in one line."""
    images = f"{len(made)} images"
    if len(made) == 1:
        images = "1 image"
    quality = "exact"
    if made.recall is not None:
        quality = f"recall@{RECALL_AT} {made.recall:.3f} against exact search"
    return f"{images}, {made.dim} dimensions, {made.factory} ({quality})"


@owned_by("index_images")
def index_images(
    checkpoint: Path | PretrainedBackbone,
    images: Path,
    output: Path,
    *,
    transform: str | None = None,
    store: str | None = None,
    factory: str = "Flat",
    parameters: str = "",
    shards: int = 1,
    overwrite: bool = False,
    update: bool = False,
    metadata: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    missing: Missing = "error",
    validation: Path | None = None,
    false_match_rate: float | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str | None = None,
) -> tuple[EmbeddingStore, list[UnreadableImage]]:
    """Embed all images below a folder, and save an index of them.

    Args:
        checkpoint: checkpoint of a `RetrievalModule`, or the folder of its runs, whose newest `best.ckpt` is used; or a
            pretrained backbone, whose pooled features are the embeddings.
        images: folder of the images. All files at any depth with the suffix of a format that Pillow decodes are
            indexed, except hidden files. Symbolic links to folders are followed, see `image_files`.
        output: folder of the index, or its name in the store.
        transform: one of `Preparation.NAMES`, or the dotted name of a function, which is imported. If the checkpoint
            records the preparation of its evaluation, `transform` must agree with this record, and is only needed if
            the preparation is a function. If `transform` is None, the preparation is that of the checkpoint, else
            that of the model's `Embedder`, else `"plain"` for a model of colour images and `"glyphs"` for a model of
            grey images. `about["preparation"]` of the index is the preparation used; `about["preparation_from"]` is
            `"argument"`, `"checkpoint"`, `"backbone"`, `"model"` or `"default"`.
        store: `"milvus:URI"`, see `MilvusStore`; if None, the index is a folder of faiss files.
        factory: faiss' factory string, or type of Milvus' index.
        parameters: search parameters, as in `RetrievalIndex` or `MilvusStore`.
        shards: number of shards of the index, for faiss, see `RetrievalIndex.build`.
        overwrite: replace an existing index, whatever it holds.
        update: update an existing index of the same model and images: embed and add new images, remove the rows of
            deleted images, and keep all other rows with their ids. An image that has changed under the same path keeps
            its old embedding and metadata. If there is no index, build one.
        metadata: CSV or Parquet table with the path of each image in the column `image`. All other columns are stored
            in the index, and a search can filter and group by them.
        columns: the names of the columns of `metadata`, if they differ, as for `ImageTable`.
        delimiter: the character that separates the fields of `metadata`, if it is a CSV file.
        missing: what is done with images that have no row in `metadata`: `"error"`, or `"keep"`, with which their texts
            are empty and their numbers missing.
        validation: embeddings of labelled images, on which a threshold is chosen: a folder written by `embed_images`
            with the same model. A search shows nothing below the threshold; `about["threshold"]` of the index records
            it.
        false_match_rate: the fraction of the images of `validation`, from 0 to 1, that may find an image of another
            label with this threshold.
        batch_size: number of images embedded at a time; the number is 1 if images keep their sizes.
        num_workers: number of processes that read images.
        device: device that the model runs on; if None, `"cuda"` if there is one, else `"cpu"`.

    Returns:
        The index, and the images that could not be read.

    Raises:
        FileNotFoundError: if the checkpoint, the folder or the table does not exist.
        ValueError: if no image can be read or an argument is invalid; without `overwrite`, if rows of an existing index
            would be lost, because they belong to other images or to another model; with `update`, if the index is of
            another model or has other columns, or rows cannot be removed from this kind of index.
        OSError: if the store cannot be reached; raised before any image is embedded.

    Cost:
        A `"Flat"` index needs 8 bytes of memory per component of each embedding: 4 for the embeddings, 4 for the index.
    """
    table_format = TableFormat.checked(columns, delimiter)
    new = new_index(output, store, IndexSettings(factory, parameters, shards))
    listed = images_in_folder(images)
    paths = listed.index.paths
    of_table = read_metadata(metadata, paths, missing=missing, root=listed.root, table_format=table_format)
    rows = NewRows(torch.arange(len(paths)), paths, of_table)
    embedder = ImageEmbedder.load(
        checkpoint, transform=transform, batch_size=batch_size, num_workers=num_workers, device=device
    )
    if validation is not None and embedder.module.query_embedder is not None:
        rule = "must not be given for a model with a `query_embedder`, since its embeddings are of candidates"
        raise InvalidValue(rule, argument="validation", got=validation, cure="give `threshold` to the search")
    about = {**embedder.description(), "images": name_folder(listed.root)}
    about |= choose_threshold(validation, false_match_rate, about)
    writer = IndexWriter(new, about, overwrite=overwrite, update=update)
    dim = embedder.dim()
    new.check_dim(dim)
    new.check_rows(rows)
    writer.check_kept(rows)  # raises before any image is embedded
    return writer.write(dim, rows, lambda positions: embedder.embed_all(listed, positions.tolist()))


@owned_by("index_embeddings")
def index_embeddings(
    embeddings: Path,
    output: Path,
    *,
    checkpoint: Path | PretrainedBackbone | None = None,
    store: str | None = None,
    factory: str = "Flat",
    parameters: str = "",
    shards: int = 1,
    overwrite: bool = False,
    update: bool = False,
    metadata: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    missing: Missing = "error",
    validation: Path | None = None,
    false_match_rate: float | None = None,
) -> tuple[EmbeddingStore, list[UnreadableImage]]:
    """Index the rows of a folder of embeddings, with their ids and paths, and save the index.

    Args:
        embeddings: folder written by `embed_images` or `EmbeddingWriter`.
        output: folder of the index, or its name in the store.
        checkpoint: the model that the index records, whose network must be the one that made the embeddings; if None,
            the model that the folder records.
        store: `"milvus:URI"`, see `MilvusStore`; if None, the index is a folder of faiss files.
        factory: faiss' factory string, or type of Milvus' index.
        parameters: search parameters, as in `RetrievalIndex` or `MilvusStore`.
        shards: number of shards of the index, for faiss, see `RetrievalIndex.build`.
        overwrite: replace an existing index, whatever it holds.
        update: update an existing index of the same model and images: add new rows, with ids after the largest id, and
            remove rows that are not in the folder. If there is no index, build one.
        metadata: as for `index_images`, with the paths of the images in the folder of embeddings.
        columns: as for `index_images`.
        delimiter: as for `index_images`.
        missing: as for `index_images`.
        validation: as for `index_images`.
        false_match_rate: as for `index_images`.

    Returns:
        The index, and the images that could not be read when they were embedded.

    Raises:
        FileNotFoundError: if the folder holds no embeddings, or the table does not exist.
        ValueError: if files of the folder are missing or damaged, no image could be read, the embeddings were not made
            with `checkpoint`, or an argument is invalid; without `overwrite`, if rows of an existing index would be
            lost; with `update`, as for `index_images`.
        OSError: if the store cannot be reached; this is checked first.

    Cost:
        Memory for one shard of the index, all ids and paths, the training rows, a block of 65,536 rows and one file of
        embeddings. Each file is read up to five times: all files are first verified, and training uses rows from all
        files.
    """
    table_format = TableFormat.checked(columns, delimiter)
    new = new_index(output, store, IndexSettings(factory, parameters, shards))
    folder = EmbeddingFolder.load(embeddings)
    manifest = folder.manifest
    if manifest.about.get("side") == "queries":
        rule = "must be of candidates"
        got = f"{embeddings}, which holds embeddings of queries"
        raise InvalidValue(rule, argument="embeddings", got=got, cure="embed the candidates, which is the default")
    new.check_dim(manifest.dim)
    rows = FolderRows(folder)  # reads and checks all files
    root = Path(str(manifest.about["images"])) if "images" in manifest.about else None
    of_table = read_metadata(metadata, rows.paths, missing=missing, root=root, table_format=table_format)
    new_rows = NewRows(rows.ids, rows.paths, of_table)
    new.check_rows(new_rows)
    unreadable = [UnreadableImage(*image) for image in rows.unreadable]

    def embedded(positions: Int[Tensor, " wanted"]) -> EmbeddedImages:
        if len(positions) == len(rows):
            return EmbeddedImages(positions, rows, unreadable)  # `rows` reads the embeddings from files
        return EmbeddedImages(positions, rows[positions], unreadable)

    about = dict(manifest.about)
    if checkpoint is not None:
        about |= recorded_model(about, checkpoint, made="embeddings were").about
    about |= choose_threshold(validation, false_match_rate, about)
    writer = IndexWriter(new, about, overwrite=overwrite, update=update)
    return writer.write(manifest.dim, new_rows, embedded)


def choose_threshold(
    validation: Path | None, false_match_rate: float | None, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the threshold of an index with these metadata.

    Returns:
        An entry for `about` with the threshold, its false-match rate and its miss rate; empty without `validation`.

    Raises:
        FileNotFoundError: if the folder holds no embeddings.
        ValueError: if only one of the arguments is given, the rate is not from 0 to 1, the embeddings are of another
            model, an image has no label, all labels are the same, or each label has one image.
    """
    if (validation is None) != (false_match_rate is None):
        rule = "must be given with `false_match_rate`, and neither alone"
        raise InvalidValue(rule, argument="validation", cure="give both")
    if validation is None or false_match_rate is None:
        return {}
    check_finite_number("false_match_rate", false_match_rate, least=0, most=1)
    folder = EmbeddingFolder.load(validation)
    difference = model_difference(folder.manifest.about, about)
    if difference is not None:
        rule = "must be of the model of the index"
        raise InvalidValue(rule, argument="validation", got=f"{validation}, but {difference}", cure="embed again")
    metrics = RetrievalMetrics()
    metrics.update(*map(torch.from_numpy, labelled_rows(folder, "validation")))
    scores = nearest_scores(metrics)
    if len(scores.positives) == 0:
        rule = "must have several images of a label"
        got = f"{validation}, in which each label has one"
        raise InvalidValue(rule, argument="validation", got=got, cure="embed more images")
    value = scores.threshold(false_match_rate)
    false_matches, misses = float(scores.false_match_rates(value)), float(scores.miss_rates(value))
    rates = {"false_match_rate": false_matches, "miss_rate": misses}
    return {THRESHOLD: {"value": value, **rates, "images": len(scores.negatives)}}


def read_image_rows(
    name: str,
    table: Path,
    required: Sequence[str] = ("image",),
    *,
    all_columns: bool = False,
    root: Path | None = None,
    table_format: TableFormat = COMMON_FORMAT,
) -> tuple[Table, dict[str, int]]:
    """Read a table that has a single row for each image.

    Args:
        name: name of the argument that gives the table, for error messages.
        table: CSV or Parquet table.
        required: as for `read_table`.
        all_columns: as for `read_table`.
        root: as for `with_paths`.
        table_format: as for `read_table`.

    Returns:
        The table, and the row of each image by its path.

    Raises:
        FileNotFoundError: if the table does not exist.
        ValueError: if the table cannot be read, or an image is in several rows.
    """
    read = read_table(
        check_path(name, table, exists=True), required, all_columns=all_columns, table_format=table_format
    )
    listed = with_paths(read, root)
    listed.check_unique("image")
    return read, {image: row for row, image in enumerate(listed["path"])}


def read_metadata(
    table: Path | None,
    paths: Sequence[str],
    *,
    missing: Missing = "error",
    root: Path | None = None,
    table_format: TableFormat = COMMON_FORMAT,
) -> dict[str, list[Any]]:
    """The metadata of images: for the name of each column of a table, the values of all images.

    A column holds numbers if each of its texts is a number below 2**53, written without leading zeros. Otherwise it
    holds text, with a warning if half of its texts or more are numbers.

    Args:
        table: CSV or Parquet table with the column `image` and further columns; if None, there is no metadata.
        paths: the paths of the images.
        root: the folder of the images, in which absolute paths lie.
        table_format: the names of the table's columns, and the separator of its fields.
        missing: what is done if an image has no row: `"error"`, or `"keep"` for empty texts and missing numbers.

    Raises:
        FileNotFoundError: if the table does not exist.
        ValueError: if the table cannot be read or has no further column, an image is in several rows or, without
            `"keep"`, in none, no image has a row, a column has an invalid name, or `missing` is given without a table.
    """
    check_choice("missing", missing, MISSING)
    if table is None:
        if missing != "error":
            raise InvalidValue("must be given with `metadata`", argument="missing", got=repr(missing))
        check_table_given(None, "metadata", table_format)
        return {}
    read, row_of = read_image_rows("metadata", table, all_columns=True, root=root, table_format=table_format)
    without_row = [path for path in paths if path not in row_of]
    if without_row and (missing == "error" or len(without_row) == len(paths)):
        got = f"{table}, in which {len(without_row)} of {len(paths)} images are missing, such as {without_row[0]!r}"
        cure = cure_of_names(row_of, paths, root)
        if not cure and len(without_row) < len(paths):
            cure = "add them, or give `missing` keep, with which they have no metadata"
        raise InvalidValue("must have a row for each image of the index", argument="metadata", got=got, cure=cure)
    rows = [row_of.get(path) for path in paths]
    columns = {name: _typed(read, name, rows) for name in read.columns if name != "image"}
    if not columns:
        raise InvalidValue("must have columns besides image", argument="metadata", got=f"none in {table}")
    with reported_as(columns="metadata"):
        new_columns(columns, len(paths))  # raises for an invalid name
    return columns


def _typed(table: Table, name: str, rows: Sequence[int | None]) -> list[Any]:
    """The values of some rows of a column: numbers if all its texts are numbers, else text; for None, a missing one."""
    texts = table[name]
    others = [row for row, text in enumerate(texts) if not _is_number(text)]
    if not others:
        return _of_rows(list(map(float, texts)), rows, None)
    if len(others) <= len(texts) / 2:
        warnings.warn(
            f"the column {name!r} of `metadata` holds text, so a search cannot compare it with a number: "
            f"{len(others)} of its {len(texts)} values are no plain numbers, the first of them {texts[others[0]]!r} at "
            f"{table.where(others[0])}.",
            stacklevel=2,
        )
    return _of_rows(texts, rows, "")


def _of_rows(values: Sequence[Any], rows: Sequence[int | None], missing: Any) -> list[Any]:
    """The values of some rows, and `missing` for None."""
    found = []
    for row in rows:
        value = missing
        if row is not None:
            value = values[row]
        found.append(value)
    return found


def _is_number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None and abs(float(text)) < LARGEST_INTEGER
