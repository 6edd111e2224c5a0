"""What the commands that embed images share: the options of embedding, and the report of unreadable images."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_retrieval.cli.transform_names import TRANSFORMS

if TYPE_CHECKING:
    from lightning_retrieval.cli.embedding import UnreadableImage


def add_embedding_options(parser: argparse.ArgumentParser) -> None:
    """Add `--batch_size`, `--num_workers`, `--device` and `--import_module` to a parser."""
    parser.add_argument("--batch_size", type=int, default=32, help="number of images embedded at a time, default 32")
    parser.add_argument("--num_workers", type=int, default=0, help="number of processes that read images, default 0")
    parser.add_argument("--device", help="device that the model runs on, default cuda if there is one, else cpu")
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


def report_unreadable(command: str, images: Sequence["UnreadableImage"]) -> int:
    """Print the images that could not be read to standard error; the exit code is 1 if there are any, else 0."""
    for image in images:
        print(f"{command}: {image}; skipped.", file=sys.stderr)
    if images:
        return 1
    return 0
