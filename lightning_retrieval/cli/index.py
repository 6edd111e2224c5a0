"""`lightning-retrieval index`: arguments and output. The work, which needs torch, is imported after parsing."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_retrieval.cli.embedding_options import (
    EXPECTED_ERRORS,
    add_embedding_options,
    add_store_option,
    add_transform_option,
    import_modules,
    report_error,
    report_unreadable,
)

if TYPE_CHECKING:
    from lightning_retrieval.cli.embedding import UnreadableImage
    from lightning_retrieval.search.rows import EmbeddingStore

EMBEDDINGS_SETTINGS = (
    "embeddings",
    "output",
    "store",
    "factory",
    "parameters",
    "shards",
    "rows_in_memory",
    "overwrite",
    "update",
)  # those of `index_embeddings`


def index(args: Sequence[str]) -> int:
    """Index the images in a folder, or embeddings of them that `embed` wrote.

    Args:
        args: `--checkpoint C --images DIR --output INDEX` or `--embeddings DIR --output INDEX`, and further settings.

    Returns:
        The exit code: 0 if all images could be read, 1 if some could not, 2 if no index was made.
    """
    settings = _parse(args)
    try:
        made, unreadable = _index(settings)
    except EXPECTED_ERRORS as error:
        return report_error("index", error, settings)
    from lightning_retrieval.cli.stores import close_index

    if "images" in settings:
        from lightning_retrieval.preparation.of_checkpoint import shown_choice

        print(f"images prepared with {shown_choice(made.about)}")
    print(f"{settings['output']}: {_summary(made)}")
    close_index(made)
    return report_unreadable("index", unreadable)


def _parse(args: Sequence[str]) -> dict[str, Any]:
    """The settings of `index_images`, with the modules to import, or those of `index_embeddings`."""
    parser = _parser()
    settings = vars(parser.parse_args(args))
    if settings["embeddings"] is None:
        missing = [f"--{name}" for name in ("checkpoint", "images") if settings[name] is None]
        if missing:
            parser.error(f"the following arguments are required: {', '.join(missing)}, or --embeddings instead")
        del settings["embeddings"]
        return settings
    for name in list(settings):
        if name in EMBEDDINGS_SETTINGS:
            continue
        if settings[name] != parser.get_default(name):
            parser.error(f"--{name} must not be given with --embeddings, because no image is embedded")
        del settings[name]
    return settings


def _index(settings: dict[str, Any]) -> tuple["EmbeddingStore", list["UnreadableImage"]]:
    if "embeddings" in settings:
        from lightning_retrieval.cli.index_embeddings import index_embeddings

        return index_embeddings(**settings)

    from lightning_retrieval.cli.index_images import index_images

    import_modules("index", settings.pop("import_module"))
    return index_images(**settings)


def _summary(made: "EmbeddingStore") -> str:
    from lightning_retrieval.search.index import RECALL_AT

    images = f"{len(made)} images"
    if len(made) == 1:
        images = "1 image"
    quality = "exact"
    if made.recall is not None:
        quality = f"recall@{RECALL_AT} {made.recall:.3f} against exact search"
    return f"{images}, {made.dim} dimensions, {made.factory} ({quality})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-retrieval index",
        description="Embed the images in a folder and write an index of them, or of embeddings that `embed` wrote.",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="C", help="checkpoint that `fit` wrote")
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of images, searched at any depth")
    parser.add_argument(
        "--embeddings", type=Path, metavar="DIR", help="instead of these two: folder that `embed` wrote"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="INDEX",
        help="new folder for the index, or an index to replace or update",
    )
    _add_replacement_options(parser)
    add_store_option(parser, "--output")
    add_transform_option(parser)
    parser.add_argument(
        "--factory",
        default="Flat",
        help="factory string of faiss, or type of index of Milvus; default Flat, which is exact",
    )
    parser.add_argument("--parameters", default="", help="search parameters of the index, such as nprobe=16")
    parser.add_argument("--shards", type=int, default=1, help="number of parts of the index, one file each")
    parser.add_argument(
        "--rows_in_memory",
        type=int,
        metavar="N",
        help="build an index that is larger than memory on disk, with the codes of at most N rows in memory, at least "
        "65,536; for factories IVF with Flat, SQ or PQ",
    )
    add_embedding_options(parser)
    return parser


def _add_replacement_options(parser: argparse.ArgumentParser) -> None:
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an index that is there; without it, one with rows that the new one would not hold is kept, and "
        "the command stops",
    )
    earlier.add_argument(
        "--update",
        action="store_true",
        help="change an index that is there: embed and add the images that it lacks, and remove the rows whose images "
        "are gone; images that have changed under their names keep their embeddings",
    )
