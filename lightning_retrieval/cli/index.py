"""`lightning-retrieval index`: arguments and output. The work, which needs torch, is imported after parsing."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_retrieval.cli.embedding_options import add_embedding_options, add_transform_option, report_unreadable
from lightning_retrieval.cli.messages import command_line_message

if TYPE_CHECKING:
    from lightning_retrieval.search.index import RetrievalIndex

TRANSFORM_SOURCES = {
    "argument": "",
    "checkpoint": ", as the checkpoint says",
    "default": ", the default, because the checkpoint names none",
}


def index(args: Sequence[str]) -> int:
    """Index the images in a folder.

    Args:
        args: `--checkpoint C --images DIR --output INDEX` and further settings of the index.

    Returns:
        The exit code: 0 if all images could be read, 1 if some could not, 2 if no index was made.
    """
    settings = vars(_parser().parse_args(args))

    from lightning_retrieval.cli.index_images import index_images
    from lightning_retrieval.training.class_paths import import_named_module

    try:
        for module in settings.pop("import_module"):
            import_named_module("index", "--import_module", module)
        made, unreadable = index_images(**settings)
    except (OSError, ValueError) as error:
        print(command_line_message("index", error, settings), file=sys.stderr)
        return 2
    source = TRANSFORM_SOURCES[made.about["transform_from"]]
    print(f"images prepared with the transform {made.about['transform']!r}{source}")
    print(f"{settings['output']}: {_summary(made)}")
    return report_unreadable("index", unreadable)


def _summary(made: "RetrievalIndex") -> str:
    from lightning_retrieval.search.recall import RECALL_AT

    images = f"{len(made)} images"
    if len(made) == 1:
        images = "1 image"
    quality = "exact"
    if made.recall is not None:
        quality = f"recall@{RECALL_AT} {made.recall:.3f} against exact search"
    return f"{images}, {made.dim} dimensions, {made.factory} ({quality})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-retrieval index", description="Embed the images in a folder and write an index of them."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="C", help="checkpoint that `fit` wrote")
    parser.add_argument(
        "--images", type=Path, required=True, metavar="DIR", help="folder of images, searched at any depth"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="INDEX", help="new folder for the index, or an index to replace"
    )
    add_transform_option(parser)
    parser.add_argument("--factory", default="Flat", help="factory string of faiss, default Flat, which is exact")
    parser.add_argument("--parameters", default="", help="search parameters of faiss, such as nprobe=16")
    parser.add_argument("--shards", type=int, default=1, help="number of parts of the index, one file each")
    add_embedding_options(parser)
    return parser
