"""`lightning-retrieval embed`: arguments and output. The work, which needs torch, is imported after parsing."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_retrieval.cli.embedding_options import (
    EXPECTED_ERRORS,
    add_embedding_options,
    add_transform_option,
    import_modules,
    report_error,
    report_unreadable,
)

if TYPE_CHECKING:
    from lightning_retrieval.cli.embed_images import EmbeddedFolder

INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended


def embed(args: Sequence[str]) -> int:
    """Embed images into a folder of Parquet or .npy files.

    Args:
        args: `--checkpoint C --images DIR --output DIR` and further settings.

    Returns:
        The exit code: 0 if all images could be read, 1 if some could not, 2 if nothing was embedded, 130 after Ctrl-C.
    """
    settings = vars(_parser().parse_args(args))

    from lightning_retrieval.cli.embed_images import embed_images

    try:
        import_modules("embed", settings.pop("import_module"))
        done = embed_images(**settings)
    except EXPECTED_ERRORS as error:
        return report_error("embed", error, settings)
    except KeyboardInterrupt:
        print(f"embed: interrupted; the same command continues in {settings['output']}.", file=sys.stderr)
        return INTERRUPTED
    if done.rank > 0:
        return 0
    print(f"{settings['output']}: {_summary(done)}")
    return report_unreadable("embed", done.unreadable)


def _summary(done: "EmbeddedFolder") -> str:
    manifest = done.folder.manifest
    rows = manifest.images - len(done.unreadable)
    shards = len(done.folder)
    found = ""
    if done.written < shards:
        found = f", {shards - done.written} of which were there"
    renewed = ""
    if done.renewed > 0:
        renewed = f"; made again, because images in them have changed: {done.renewed}"
    files = f"{shards} {manifest.file_format} files"
    if shards == 1:
        files = f"1 {manifest.file_format} file"
    return f"{rows} embeddings of {manifest.dim} dimensions in {files}{found}{renewed}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-retrieval embed",
        description="Embed images into a folder of Parquet files. After a kill, the same command continues.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="C", help="checkpoint that `fit` wrote")
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        metavar="DIR|TABLE",
        help="folder of images, searched at any depth, or a CSV or Parquet table with the column `image` and, "
        "optionally, `label` and `box`",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="new folder, or one that this command began; files of it whose images have changed are made again",
    )
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="folder that the table's paths are relative to, default the table's"
    )
    _add_file_options(parser)
    _add_device_options(parser)
    add_transform_option(parser)
    add_embedding_options(parser)
    return parser


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format", dest="file_format", choices=("parquet", "npy"), default="parquet", help="default parquet"
    )
    parser.add_argument(
        "--shard_size",
        type=int,
        default=10_000,
        help="images of a file, default 10000; a kill costs at most these in each process",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="of the numbers in the files"
    )


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", type=int, default=1, help="number of GPUs of each machine, or of processes on CPUs, default 1"
    )
    parser.add_argument(
        "--num_nodes", type=int, default=1, help="number of machines, on each of which the command is started"
    )
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed", "16-mixed"),
        default="32-true",
        help="that the network computes in, default 32-true",
    )
