"""Copies of photographs with fewer pixels: training reads them faster, and they need less disk.

Only the sizes of images change: copies have the paths, the format and the colours of their images, and are upright.
"""

import io
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.files import is_temporary, new_file, writing
from lightning_retrieval.first_checks import folder_of_images
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.paths import check_path
from lightning_retrieval.preparation.decoding import image_files
from lightning_retrieval.preparation.pixels import MOST_PIXELS
from lightning_retrieval.preparation.prepare import open_image, reduce_scale, upright, upright_size
from lightning_retrieval.progress import Progress

RECORD = ".shrunk"  # name of the file in the folder of the copies that holds their size
QUALITY = 95  # of JPEG and WebP files
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "TGA", "JPEG2000", "AVIF")  # in which copies are written
OTHER_FORMATS = {"MPO": "JPEG"}  # format of the copy of an image of several pictures
PALETTES = {"P": "RGB", "PA": "RGBA", "1": "L"}  # the modes in which pixels can be averaged
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
        output: the folder of the copies, which is new or was begun by this function.
        size: the shorter side of the copies, in pixels.
        workers: number of threads; if None, one for each core.

    Returns:
        The number of images of each of `OUTCOMES`, and the reason why an image has no copy, by its path.

    Raises:
        FileNotFoundError: if `images` is not a folder.
        ValueError: if there is no image, `output` holds anything else or copies of another size, or one of the two
            folders is in the other.
        OSError: if a copy cannot be written.
    """
    check_integer("size", size, 1, MOST_PIXELS)
    if workers is not None:
        check_integer("workers", workers, 1)
    images, output = folder_of_images(images), check_path("output", output)
    if _is_inside(images, output) or _is_inside(output, images):
        rule = "must be a folder that is neither in the folder of the images nor around it"
        raise InvalidValue(rule, argument="output", got=output)
    paths = image_files(images).paths
    if not paths:
        raise InvalidValue("must be a folder of images", argument="images", got=f"{images}, which holds no image")
    _begin(output, size)
    counts, skipped = Counter[str](), {}
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(workers or os.cpu_count()) as pool,
        Progress("Shrinking", total=len(paths), units="images") as progress,
    ):
        warnings.simplefilter("ignore")  # Pillow warns about the metadata of some files
        try:
            for path, result in _in_blocks(pool, partial(_shrink_image, images, output, size), paths):
                if result in OUTCOMES:
                    counts[result] += 1
                else:
                    skipped[path] = result
                progress.update(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return counts, skipped


def _in_blocks(pool: ThreadPoolExecutor, work: Any, paths: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each path and the result of the work on it, in order."""
    for start in range(0, len(paths), BLOCK):
        block = paths[start : start + BLOCK]
        yield from zip(block, pool.map(work, block))


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, after all symbolic links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _begin(output: Path, size: int) -> None:
    """Record the size of the copies in their folder; raise unless the folder is new, empty or of this size."""
    record = output / RECORD
    if not record.is_file():
        # A kill while the record is written leaves a temporary file.
        if output.exists() and not (output.is_dir() and all(map(is_temporary, output.iterdir()))):
            rule = "must be a new folder, or one that this command began"
            raise InvalidValue(rule, argument="output", got=f"{output}, which holds something else")
        output.mkdir(parents=True, exist_ok=True)
        with new_file(record) as file:
            file.write(str(size).encode())
    recorded = record.read_text(encoding="utf-8", errors="replace").strip()
    if recorded != str(size):
        rule = f"must be that of {output}, {recorded[:20]}"
        raise InvalidValue(rule, argument="size", got=size, cure="give another folder for another size")


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
            content = _encoded(image, size)
    except Exception as error:  # the decoders do not document the types of their errors
        return first_line(error)
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target), new_file(target) as file:
        if content is not None:
            file.write(content)
            return RESIZED
        with source.open("rb") as stream:
            shutil.copyfileobj(stream, file)
    return COPIED


def _encoded(image: Any, size: int) -> bytes | None:
    """The file of the smaller image; None if it is small already, or cannot be written in its format."""
    kind = OTHER_FORMATS.get(image.format, image.format)
    height, width = upright_size(image)
    scale = size / min(height, width)
    if scale >= 1 or kind not in FORMATS or kind not in Image.SAVE:
        image.load()  # raises for a damaged file
        return None
    new_size = max(size, round(width * scale)), max(size, round(height * scale))
    reduce_scale(image, (2 * new_size[1], 2 * new_size[0]), (height, width))
    settings: dict[str, Any] = {"icc_profile": image.info.get("icc_profile")}
    if kind in ("JPEG", "WEBP"):
        settings["quality"] = QUALITY
    whole = upright(image)
    mode = PALETTES.get(whole.mode, whole.mode)
    if "transparency" in whole.info:
        mode = "RGBA"
    resized = whole.convert(mode).resize(new_size, Image.Resampling.LANCZOS)
    resized.info = {}  # nothing else of the image's metadata is written
    stream = io.BytesIO()
    try:
        resized.save(stream, kind, **settings)
    except (OSError, ValueError):  # the format does not have this mode
        return None
    return stream.getvalue()
