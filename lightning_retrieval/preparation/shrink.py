"""Copies of photographs with fewer pixels: training reads them faster, and they need less disk.

Only the sizes of images change: copies have the paths, the format and the colours of their images, and are upright.
"""

import io
import os
import shutil
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from lightning_retrieval.checks import check_integer, first_line
from lightning_retrieval.files import is_system_error, new_file, writing
from lightning_retrieval.first_checks import check_images_exist
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.preparation.decoding import image_files
from lightning_retrieval.preparation.pixels import MOST_PIXELS
from lightning_retrieval.preparation.prepare import open_image, reduce_scale, upright, upright_size
from lightning_retrieval.progress import Progress

RECORD = ".shrunk"  # name of the file in the folder of the copies that holds their size
QUALITY = 95  # of JPEG and WebP files
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "TGA", "JPEG2000", "AVIF")  # in which copies are written
OTHER_FORMATS = {"MPO": "JPEG"}  # format of the copy of an image of several pictures
PALETTES = {"P": "RGB", "PA": "RGBA", "1": "L"}  # the modes in which pixels can be averaged
OUTCOMES = ("resized", "first_frame", "copied", "kept")
WAITING = 64  # images that the threads are given at a time


@dataclass
class ShrunkFolder:
    """What `shrink_images` did.

    Args:
        counts: number of images by what was done: `"resized"` to fewer pixels; `"first_frame"`, those of several frames
            or pages of which only the first was kept, with fewer pixels; `"copied"`, because they are small or cannot
            be written in their format; and `"kept"`, which an earlier call had written.
        unreadable: the path of each image that could not be read, and the reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unreadable: list[tuple[str, str]] = field(default_factory=list)


def shrink_images(images: Path, output: Path, size: int, *, workers: int | None = None) -> ShrunkFolder:
    """Write a copy of a folder of images in which the shorter side of no image is longer than `size`.

    A call that was stopped is continued by the same call. No file is replaced, and no file of `images` is changed.

    Args:
        images: the folder, which is searched at any depth.
        output: the folder of the copies, which is new or was begun by this function.
        size: the shorter side of the copies, in pixels.
        workers: number of threads; if None, one for each core.

    Raises:
        FileNotFoundError: if `images` is not a folder.
        ValueError: if there is no image, `output` holds anything else or copies of another size, or one of the two
            folders is in the other.
        OSError: if a copy cannot be written.
    """
    check_integer("size", size, 1, MOST_PIXELS)
    if workers is not None:
        check_integer("workers", workers, 1)
    check_images_exist(images)
    _check_apart(images, output)
    paths = image_files(images).paths
    if not paths:
        raise InvalidValue("must be a folder of images", argument="images", got=f"{images}, which holds no image")
    _begin(output, size)
    done = ShrunkFolder()
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(workers or os.cpu_count()) as pool,
        Progress("Shrinking", total=len(paths), units="images") as progress,
    ):
        warnings.simplefilter("ignore")  # Pillow warns about the metadata of some files
        try:
            for path, result in _in_threads(pool, partial(_shrink_image, images, output, size), paths):
                if result in OUTCOMES:
                    done.counts[result] += 1
                else:
                    done.unreadable.append((path, result))
                progress.update(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return done


def _in_threads(pool: ThreadPoolExecutor, work: Any, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each path and the result of the work on it, in order; a few results wait at a time."""
    running: deque[tuple[str, Future[str]]] = deque()
    for path in paths:
        running.append((path, pool.submit(work, path)))
        if len(running) == WAITING:
            first, future = running.popleft()
            yield first, future.result()
    for first, future in running:
        yield first, future.result()


def _check_apart(images: Path, output: Path) -> None:
    """Raise if the copies would be among the images, or the other way round."""
    first, second = Path(os.path.realpath(images)), Path(os.path.realpath(output))
    if first == second or first in second.parents or second in first.parents:
        rule = "must be a folder that is neither in the folder of the images nor around it"
        raise InvalidValue(rule, argument="output", got=output)


def _begin(output: Path, size: int) -> None:
    """Record the size of the copies in their folder; raise unless the folder is new, empty or of this size."""
    record = output / RECORD
    if record.is_file():
        recorded = record.read_text(encoding="utf-8", errors="replace").strip()
        if recorded != str(size):
            rule = f"must be that of {output}, {recorded[:20]}"
            raise InvalidValue(rule, argument="size", got=size, cure="give another folder for another size")
        return
    if os.path.lexists(output) and (not output.is_dir() or any(output.iterdir())):
        rule = "must be a new folder, or one that this command began"
        raise InvalidValue(rule, argument="output", got=f"{output}, which holds something else")
    output.mkdir(parents=True, exist_ok=True)
    with new_file(record) as file:
        file.write(str(size).encode())


def _shrink_image(images: Path, output: Path, size: int, path: str) -> str:
    """Write the copy of one image; return one of `OUTCOMES`, or the reason why it cannot be read."""
    target = output / path
    if os.path.lexists(target):
        return "kept"
    try:
        with open_image(images / path) as image:
            # The further pictures of other formats, such as MPO, are previews of the first.
            has_frames = image.format in FORMATS and getattr(image, "is_animated", False)
            content = _encoded(image, size)
    except Exception as error:  # the decoders do not document the types of their errors
        if is_system_error(error) and not isinstance(error, (FileNotFoundError, PermissionError)):
            raise
        return first_line(error)
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target), new_file(target) as file:
        if content is None:
            with (images / path).open("rb") as stream:
                shutil.copyfileobj(stream, file)
            return "copied"
        file.write(content)
    if has_frames:
        return "first_frame"
    return "resized"


def _encoded(image: Any, size: int) -> bytes | None:
    """The file of the smaller image; None if it is small already, or cannot be written in its format."""
    kind = OTHER_FORMATS.get(image.format, image.format)
    height, width = upright_size(image)
    scale = size / min(height, width)
    if scale >= 1 or kind not in FORMATS or kind not in Image.SAVE:
        image.load()  # raises for a damaged file
        return None
    resized = _resized(image, (max(size, round(width * scale)), max(size, round(height * scale))))
    settings: dict[str, Any] = {"icc_profile": resized.info.get("icc_profile")}
    if kind in ("JPEG", "WEBP"):
        settings["quality"] = QUALITY
    stream = io.BytesIO()
    try:
        resized.save(stream, kind, **settings)
    except (OSError, ValueError):  # the format does not have this mode
        return None
    return stream.getvalue()


def _resized(image: Any, new_size: tuple[int, int]) -> Image.Image:
    """The upright image in another size, width and height, with its colour profile."""
    reduce_scale(image, (2 * new_size[1], 2 * new_size[0]), upright_size(image))
    profile = image.info.get("icc_profile")
    whole = upright(image)
    mode = PALETTES.get(whole.mode, whole.mode)
    if "transparency" in whole.info:
        mode = "RGBA"
    if mode != whole.mode:
        whole = whole.convert(mode)
    resized = whole.resize(new_size, Image.Resampling.LANCZOS)
    resized.info = {"icc_profile": profile} if profile else {}
    return resized
