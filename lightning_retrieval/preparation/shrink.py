"""Copies of photographs with fewer pixels: training reads them faster, and they need less disk.

Only the sizes of images change: copies have the paths, the format and the colours of their images, and are upright.
"""

import io
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.files import new_file, writing
from lightning_retrieval.first_checks import folder_of_images
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.paths import check_path
from lightning_retrieval.preparation.decoding import image_files
from lightning_retrieval.preparation.pixels import MOST_PIXELS
from lightning_retrieval.preparation.prepare import open_image, reduce_scale, upright, upright_size
from lightning_retrieval.progress import Progress, usable_cores

RECORD = ".shrunk-"  # begin of the name of a file in the folder of the copies, which ends with their size
QUALITY = 95  # of JPEG, WebP and AVIF files
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "TGA", "JPEG2000", "AVIF")  # in which copies are written
OTHER_FORMATS = {"MPO": "JPEG"}  # format of the copy of an image of several pictures
# The modes in which pixels can be averaged; Pillow averages the swapped bytes of I;16B.
AVERAGED = {"P": "RGB", "PA": "RGBA", "1": "L", "I;16B": "I"}
# What was done with an image: a copy with fewer pixels; a copy of the file, because the image is small or cannot be
# written in its format; nothing, because there is a copy.
RESIZED, COPIED, KEPT = OUTCOMES = ("resized", "copied", "kept")
BLOCK = 1024  # images that the threads are given at a time


def shrink_images(
    images: Path, output: Path, size: int, *, workers: int | None = None
) -> tuple[Counter[str], dict[str, str]]:
    """Write a copy of a folder of images in which the shorter side of no image is longer than `size`.

    Of an animation or a file of several pages that becomes smaller, the copy has only the first.
    A call that was stopped is continued by the same call. No file is replaced, no file of `images` is changed, and no
    link that leads out of one of the folders is followed.

    Args:
        images: the folder, which is searched at any depth.
        output: the folder of the copies, which is new or was begun by this function with the same `size`.
        size: the shorter side of the copies, in pixels.
        workers: number of threads; if None, one for each core.

    Returns:
        The number of images of each of `OUTCOMES`, and the reason why an image has no copy, by its path.

    Raises:
        FileNotFoundError: if `images` is not a folder.
        ValueError: if there is no image, or `output` holds anything else or is in `images`.
        OSError: if a copy cannot be written.
    """
    check_integer("size", size, 1, MOST_PIXELS)
    images, output = folder_of_images(images), check_path("output", output)
    paths = image_files(images).paths
    if not paths:
        raise InvalidValue("must be a folder of images", argument="images", got=f"{images}, which holds no image")
    _begin(images, output, size)
    counts, skipped = Counter[str](), {}
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(workers or usable_cores()) as pool,
        Progress("Shrinking", total=len(paths), units="images") as progress,
    ):
        warnings.simplefilter("ignore")  # Pillow warns about the metadata of some files
        try:
            for begin in range(0, len(paths), BLOCK):
                block = paths[begin : begin + BLOCK]
                for path, result in zip(block, pool.map(partial(_shrink_image, images, output, size), block)):
                    if result in OUTCOMES:
                        counts[result] += 1
                    else:
                        skipped[path] = result
                    progress.update(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return counts, skipped


def _begin(images: Path, output: Path, size: int) -> None:
    """Make the folder of the copies, and the file whose name has their size; raise if the folder is another one."""
    record = output / f"{RECORD}{size}"
    if _is_inside(output, images) or (not record.exists() and output.exists() and any(output.iterdir())):
        rule = "must be a new folder outside of the images, or one that this command began with the same size"
        raise InvalidValue(rule, argument="output", got=output)
    output.mkdir(parents=True, exist_ok=True)
    record.touch()


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, after all symbolic links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _shrink_image(images: Path, output: Path, size: int, path: str) -> str:
    """Write the copy of one image; return one of `OUTCOMES`, or the reason why there is no copy."""
    source, target = images / path, output / path
    if os.path.lexists(target):
        return KEPT
    for inner, folder in ((source, images), (target, output)):
        if not _is_inside(inner, folder):
            return f"a link leads out of {folder}"
    try:
        with open_image(source) as image:
            smaller = _encoded(image, size)
    except Exception as error:  # the decoders do not document the types of their errors
        return first_line(error)
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target), new_file(target) as file:
        file.write(smaller or source.read_bytes())
    return RESIZED if smaller else COPIED


def _encoded(image: Any, size: int) -> bytes | None:
    """The file of the smaller image; None if it is small already, or cannot be written in its format."""
    kind = OTHER_FORMATS.get(image.format, image.format)
    height, width = upright_size(image)
    scale = size / min(height, width)
    if scale >= 1 or kind not in FORMATS:
        image.load()  # raises for a damaged file
        return None
    new_size = max(size, round(width * scale)), max(size, round(height * scale))
    reduce_scale(image, (2 * new_size[1], 2 * new_size[0]), (height, width))
    whole = upright(image)
    mode = AVERAGED.get(whole.mode, whole.mode)
    if "transparency" in whole.info:
        mode = "RGBA"
    resized = whole.convert(mode).resize(new_size, Image.Resampling.LANCZOS)
    if whole.mode == "I;16B":
        resized = resized.convert("I;16")
    resized.info = {}  # nothing else of the image's metadata is written
    stream = io.BytesIO()
    try:
        resized.save(stream, kind, quality=QUALITY, icc_profile=image.info.get("icc_profile"))
    except (KeyError, OSError, ValueError):  # the format does not have this mode, or this Pillow not the format
        return None
    return stream.getvalue()
