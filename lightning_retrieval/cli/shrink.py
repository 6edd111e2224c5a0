"""The command `shrink`: writes a copy of a folder with smaller images, which training reads faster."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_retrieval.command_line import (
    INTERRUPTED,
    command_line_message,
    command_parser,
    printable,
)
from lightning_retrieval.first_checks import check_images_exist

DESCRIPTION = (
    "Write a copy of a folder in which the shorter side of no image is longer than --size pixels, with the same names "
    "and folders, upright, and with the colour profiles. Small images are copied as they are, and of an animation the "
    "first frame. After a kill, the same command continues. No file is replaced."
)
POSITIONAL = {"images": "PHOTOS", "output": "SMALL"}  # names in the help of the arguments without an option


def shrink(args: Sequence[str]) -> int:
    """Write the copy, and return the exit code: 0, 1 if images could not be read, 2 for an error, 130 after Ctrl-C."""
    parser = command_parser("shrink", DESCRIPTION, "example:\nlightning-retrieval shrink --size 288 photos small")
    add_options(parser)
    options = parser.parse_args(args)

    try:
        check_images_exist(options.images)
        from lightning_retrieval.preparation.shrink import shrink_images  # imports torch

        counts, skipped = shrink_images(options.images, options.output, options.size, workers=options.workers)
    except (OSError, ValueError) as error:
        print(command_line_message("shrink", error, vars(options), positional=POSITIONAL), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"shrink: interrupted; the same command continues in {options.output}.", file=sys.stderr)
        return INTERRUPTED
    for path, reason in skipped.items():
        print(f"shrink: no copy of the image {printable(path)} ({printable(reason)}).", file=sys.stderr)
    shown = f"{counts['resized']:,} images with fewer pixels, {counts['copied']:,} as they are"
    if counts["kept"]:
        shown += f", {counts['kept']:,} from earlier"
    print(f"{options.output}: {shown}")
    return int(bool(skipped))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.add_argument(
        "images", type=Path, metavar=POSITIONAL["images"], help="folder of images, searched at any depth"
    )
    parser.add_argument(
        "output", type=Path, metavar=POSITIONAL["output"], help="new folder, or one that this command began"
    )
    parser.add_argument(
        "--size",
        type=int,
        default=288,
        help="shorter side in pixels, default 288, enough for crops of 256 and less",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of threads, default one for each core")
