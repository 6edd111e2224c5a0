"""Rules that arguments of the commands must meet together, and files that they must name; no torch is imported.

A command checks its options by `check_options` before it imports the libraries that it works with, which takes seconds.
The functions of the commands check the arguments of other callers by the same rules.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from lightning_retrieval.first_checks import (
    check_images_exist,
    check_model_exists,
    check_weights_exist,
    is_local_file,
)
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.search.formats import EMBEDDINGS, INDEX
from lightning_retrieval.search.html_page import check_page_target
from lightning_retrieval.search.report.targets import check_output


def check_table_exists(name: str, table: Path) -> None:
    """Raise unless there is a table; `name` is the name of the argument."""
    if not table.is_file():
        raise MissingFile("must be a CSV or Parquet table", argument=name, got=f"{table}, which is not a file")


def check_table_given(table: Path | None, *, argument: str, **formats: Any) -> None:
    """Raise if arguments that say how a table is read are given without one.

    Args:
        table: the argument that may be a table.
        argument: its name.
        formats: `columns`, `delimiter` or `root`, as far as the function has them.
    """
    if table is not None and table.is_file():
        return
    for name, value in formats.items():
        if value not in (None, ","):
            got = f"{value} without `{argument}`"
            if table is not None:
                got = f"{value} for the folder {table}"
            raise InvalidValue("must be given for a table only", argument=name, got=got)


def check_folder_of_index(images: Path) -> None:
    """Raise unless there is a folder with the images of an index."""
    if not images.is_dir():
        rule = "must be the folder of the index's images"
        raise InvalidValue(rule, argument="images", got=f"{images}, which is not a folder")


def check_threshold(validation: Path | None, false_match_rate: float | None) -> None:
    """Raise if only one of the two is given."""
    if (validation is None) != (false_match_rate is None):
        rule = "must be given with `false_match_rate`, and neither alone"
        raise InvalidValue(rule, argument="validation", cure="give both")


def check_missing(missing: str, metadata: Path | None) -> None:
    """Raise if the choice for images without a row is given without a table."""
    if metadata is None and missing != "error":
        raise InvalidValue("must be given with `metadata`", argument="missing", got=repr(missing))


def check_int8(int8: bool, images: Path | None, root: Path | None) -> None:
    """Raise unless images are given for int8, and for nothing else."""
    if int8 and images is None:
        raise InvalidValue("must be given with `int8`, to calibrate it and to measure what it costs", argument="images")
    if not int8 and (images is not None or root is not None):
        raise InvalidValue("`images` and `root` must not be given without `int8`, which alone uses images")


def check_one_process(devices: int, *, store: str | None, update: bool) -> None:
    """Raise if only one process can build such an index."""
    reason = None
    if store is not None:
        reason = "with a store in Milvus, which distributes rows by itself"
    elif update:
        reason = "with `update`, which reads the index into memory"
    if devices > 1 and reason is not None:
        raise InvalidValue(f"must be 1 {reason}", argument="devices", got=devices)


def loss_arguments(text: str) -> dict[str, Any]:
    """The arguments of a loss in a JSON object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidValue("must be a JSON object, such as '{\"tau\": 0.1}'", argument="loss_args", got=repr(text))
    return parsed


def check_new_file(output: Path) -> None:
    """Raise unless a file can be written there."""
    if not output.parent.is_dir() or output.is_dir():
        raise InvalidValue("must be a file in an existing folder", argument="output", got=output)


def check_options(command: str, options: argparse.Namespace) -> None:
    """Raise if the options of a command contradict one another, or name a file that does not exist.

    Args:
        command: the command.
        options: its options, as parsed.
    """
    CHECKS[command](options)
    model = options.checkpoint
    if isinstance(model, Path):
        check_model_exists(model)
    elif model is not None and is_local_file(model.weights):
        check_weights_exist(Path(model.weights).expanduser())


def _check_adapt(options: argparse.Namespace) -> None:
    loss_arguments(options.loss_args)
    check_new_file(options.output)
    EMBEDDINGS.check_exists(options.embeddings)
    _check_table("labels", options.labels, options)


def _check_embed(options: argparse.Namespace) -> None:
    if options.side == "candidates":  # whether queries are images or texts, their model says
        _check_images(options)


def _check_export(options: argparse.Namespace) -> None:
    check_int8(options.int8, options.images, options.root)
    _check_images(options)


def _check_index(options: argparse.Namespace) -> None:
    check_threshold(options.validation, options.false_match_rate)
    check_missing(options.missing, options.metadata)
    check_one_process(options.devices, store=options.store, update=options.update)
    if options.images is not None:
        check_images_exist(options.images)
    for folder in (options.embeddings, options.validation):
        if folder is not None:
            EMBEDDINGS.check_exists(folder)
    _check_table("metadata", options.metadata, options)


def _check_report(options: argparse.Namespace) -> None:
    check_output(options.output)
    _check_images(options)


def _check_search(options: argparse.Namespace) -> None:
    if options.html is not None:
        check_page_target("html", options.html, "search")
    _check_searched(options)


def _check_searched(options: argparse.Namespace) -> None:
    if options.images is not None:
        check_folder_of_index(options.images)
    if options.store is None:
        INDEX.check_exists(options.index)


def _check_images(options: argparse.Namespace) -> None:
    """Check `--images`, a folder or a table, and how a table is read."""
    images = options.images
    if images is not None and not images.is_file():
        check_images_exist(images)
    check_table_given(
        images, argument="images", root=options.root, columns=options.columns, delimiter=options.delimiter
    )


def _check_table(name: str, table: Path | None, options: argparse.Namespace) -> None:
    """Check an option that is a table, and how it is read."""
    if table is not None:
        check_table_exists(name, table)
    check_table_given(table, argument=name, columns=options.columns, delimiter=options.delimiter)


CHECKS = {
    "adapt": _check_adapt,
    "embed": _check_embed,
    "export": _check_export,
    "index": _check_index,
    "report": _check_report,
    "search": _check_search,
    "demo": _check_searched,
}
