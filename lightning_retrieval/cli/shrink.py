"""The command `shrink`: writes a copy of a folder with smaller images, which training reads faster."""

import sys
from pathlib import Path

from lightning_retrieval.command_line import INTERRUPTED, imports_of_command, printable
from lightning_retrieval.paths import ExistingPath


def shrink(images: ExistingPath, output: Path, /, *, size: int = 288, workers: int | None = None) -> int:
    """Write a copy of a folder in which the shorter side of no image is longer than --size pixels, with the same names
    and folders, upright, and with the colour profiles. Small images are copied as they are, and of an animation the
    first frame. After a kill, the same command continues. No file is replaced.

    Args:
        images: folder of images, searched at any depth.
        output: new folder, or one that this command began.
        size: shorter side in pixels; 288 is enough for crops of 256 and less.
        workers: number of threads; by default one for each core.

    Example:
        lightning-retrieval shrink photos small --size 288
    """
    with imports_of_command():
        from lightning_retrieval.preparation.shrink import shrink_images

    try:
        counts, skipped = shrink_images(images, output, size, workers=workers)
    except KeyboardInterrupt:
        print(f"shrink: interrupted; the same command continues in {output}.", file=sys.stderr)
        return INTERRUPTED
    for path, reason in skipped.items():
        print(f"shrink: no copy of the image {printable(path)} ({printable(reason)}).", file=sys.stderr)
    shown = f"{counts['resized']:,} images with fewer pixels, {counts['copied']:,} as they are"
    if counts["kept"]:
        shown += f", {counts['kept']:,} from earlier"
    print(f"{output}: {shown}")
    return int(bool(skipped))
