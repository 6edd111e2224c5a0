"""What the commands that load a model share: options, and the reports of errors and of unreadable images."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_retrieval.cli.options import TRANSFORMS, command_line_message

if TYPE_CHECKING:
    from lightning_retrieval.cli.embedding import UnreadableImage

EXPECTED_ERRORS = (OSError, ValueError, ImportError)  # whose messages say what the user can change


def add_embedding_options(parser: argparse.ArgumentParser) -> None:
    """Add `--batch_size`, `--num_workers`, `--device` and `--import_module` to a parser."""
    parser.add_argument("--batch_size", type=int, default=32, help="number of images embedded at a time, default 32")
    parser.add_argument("--num_workers", type=int, default=0, help="number of processes that read images, default 0")
    parser.add_argument("--device", help="device that the model runs on, default cuda if there is one, else cpu")
    add_import_option(parser)


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add `--import_module` to a parser."""
    parser.add_argument(
        "--import_module",
        action="append",
        default=[],
        metavar="NAME",
        help="module with classes of the checkpoint that are not of this library, torch, torchvision, timm or "
        "pytorch_metric_learning; it is imported, which runs its code",
    )


def add_transform_option(parser: argparse.ArgumentParser) -> None:
    """Add `--transform` to a parser."""
    parser.add_argument(
        "--transform",
        metavar="NAME",
        help=f"how images are prepared, if the checkpoint does not say it: {', '.join(TRANSFORMS)}; or the function "
        "package.function that the model was evaluated with, which is imported. By default as in the evaluation during "
        "training, else as the model wants",
    )


def add_store_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `--store`, with which the option `name` is the name of an index in Milvus, to a parser."""
    parser.add_argument(
        "--store",
        metavar="milvus:URI",
        help=f"the index is in Milvus, under the name {name}: in a file of Milvus Lite, such as milvus:photos.db, or "
        "on a server or cluster, such as milvus:http://localhost:19530",
    )


def add_index_options(parser: argparse.ArgumentParser, *, images_help: str) -> None:
    """Add the options that name an index, its model and its images, of commands that search it, to a parser."""
    parser.add_argument("--index", type=Path, required=True, metavar="INDEX", help="folder that `index` wrote")
    add_store_option(parser, "--index")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="C", help="checkpoint that the index was made with, if it was moved"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help=images_help)
    parser.add_argument(
        "--transform", metavar="NAME", help="function that prepared the images of the index, if one did; it is imported"
    )


def import_modules(command: str, names: Iterable[str]) -> None:
    """Import the modules that `--import_module` names.

    Raises:
        ValueError: if one cannot be imported.
    """
    from lightning_retrieval.plain_data import import_named_module

    for name in names:
        import_named_module(command, "--import_module", name)


def report_error(command: str, error: Exception, options: Iterable[str]) -> int:
    """Print an error in terms of the command line to standard error; the exit code is 2."""
    print(command_line_message(command, error, options), file=sys.stderr)
    return 2


def report_unreadable(command: str, images: Sequence["UnreadableImage"]) -> int:
    """Print the images that could not be read to standard error; the exit code is 1 if there are any, else 0."""
    for image in images:
        print(f"{command}: {image}; skipped.", file=sys.stderr)
    if images:
        return 1
    return 0
