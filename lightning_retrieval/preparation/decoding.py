"""Lists image files and their suffixes, decodes the files, rotates images upright and crops them to their boxes.

Pillow decodes all formats. torchvision also decodes JPEGs, to tensors, with the same pixels: both use libjpeg-turbo.
"""

import contextlib
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from lightning_retrieval.checks import first_of
from lightning_retrieval.invalid import MissingFile
from lightning_retrieval.preparation.pixels import Pixels, check_colour, to_pixels
from lightning_retrieval.preparation.prepare import (
    ROTATIONS,
    TRANSPOSED,
    WHITE,
    Size,
    image_formats,
    open_image,
    orientation,
    reduce_scale,
    resized_size,
    to_rgb,
)

try:
    from torchvision.io import ImageReadMode, decode_image
except ImportError:  # deprecated in torchvision 0.29
    decode_image = None

# Photographs of 90 to 180 megapixels are read; `open_image` says what helps with larger ones.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

Box = Int[np.ndarray, "4"]  # left, top, right and bottom in pixels

# Suffixes of pictures in formats that Pillow alone does not decode.
UNREAD_PICTURES = frozenset(
    (
        *(".heic", ".heif", ".hif", ".jxl", ".jxr", ".svg", ".svgz", ".eps"),
        *(".ps", ".ai", ".pdf", ".wmf", ".emf", ".xcf", ".kra", ".fits"),
        *(".exr", ".hdr", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw"),
        *(".raf", ".orf", ".rw2", ".pef", ".srw"),
    )
)
MOST_SUFFIXES = 8  # suffixes that are shown
# The dimensions of a tensor (C, H, W) that are flipped to make an image upright, by the value of the EXIF tag.
FLIPPED = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}


def image_suffixes() -> frozenset[str]:
    """The suffixes, in lower case, of the files in the formats of `image_formats`."""
    formats = image_formats()
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in formats)


class FolderEntries(NamedTuple):
    """The entries of a folder that are not hidden, sorted by name.

    Args:
        folders: the folders in it, and the symbolic links to folders.
        files: all others, of which `open_image` opens only regular files, and links to files, which may be missing.
    """

    folders: list[Path]
    files: list[Path]


def list_folder(folder: Path) -> FolderEntries:
    """List a folder.

    Args:
        folder: the folder; if it does not exist, the lists are empty.

    Raises:
        OSError: if the folder, or what a link in it leads to, cannot be opened.
        FileNotFoundError: if a link without a suffix, as that of a folder, leads to nothing.
    """
    entries = FolderEntries([], [])
    if not folder.is_dir():
        return entries
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith("."):
                continue
            kind = entries.folders if entry.is_dir() else entries.files
            kind.append(Path(entry.path))
            _check_link(entry)
    return FolderEntries(*map(sorted, entries))


def _check_link(entry: "os.DirEntry[str]") -> None:
    """Raise for a link without a suffix, as that of a folder, that leads to nothing."""
    if entry.is_symlink() and not Path(entry.name).suffix and not os.path.exists(entry.path):
        raise MissingFile(
            f"the link {entry.path} leads to {os.readlink(entry.path)}, which does not exist, so images would be "
            "lost if it was a folder",
            cure="restore the folder, or remove the link",
        )


class ImageFiles(NamedTuple):
    """The image files in a folder, as sorted relative paths.

    Args:
        paths: the files whose suffix, in lower case, is one of `image_suffixes`.
        others: the files with another suffix.
    """

    paths: list[str]
    others: list[str]


def shown_suffixes(paths: Iterable[str]) -> str:
    """How many files have which suffix, such as `.heic 12, .txt 3`: pictures first, then the most frequent.

    Args:
        paths: paths of files that are not read as images.
    """
    counts = Counter(Path(path).suffix.lower() for path in paths)
    order = sorted(counts, key=lambda suffix: (suffix not in UNREAD_PICTURES, -counts[suffix], suffix))
    shown = first_of([f"{suffix or 'no suffix'} {counts[suffix]:,}" for suffix in order], MOST_SUFFIXES)
    if UNREAD_PICTURES & counts.keys():
        shown += "; convert pictures that Pillow does not decode, to PNG or JPEG"
    return shown


def image_files(top: Path) -> ImageFiles:
    """Find the image files in a folder at any depth, without hidden files and folders.

    Symbolic links to folders are followed, but each folder is listed once: under its own path if it is in the top
    folder, and under the first link to it otherwise. Links to a folder around the top folder are not followed.

    Args:
        top: an existing folder.

    Raises:
        OSError: if a folder cannot be opened.
    """
    suffixes = image_suffixes()
    found = ImageFiles([], [])
    for _, entries in walk_folders([top], unlisted=Path(os.path.realpath(top)).parents):
        for file in entries.files:
            kind = found.paths if file.suffix.lower() in suffixes else found.others
            kind.append(file.relative_to(top).as_posix())
    return ImageFiles(*map(sorted, found))


def walk_folders(begin: Iterable[Path], *, unlisted: Iterable[Path]) -> Iterator[tuple[Path, FolderEntries]]:
    """List folders, and those in them at any depth, each once; links to folders are followed after all others.

    Args:
        begin: the first folders.
        unlisted: real paths of folders that are not listed, if links lead to them.

    Raises:
        OSError: if a folder cannot be opened.
    """
    listed = set(map(str, unlisted))
    folders, links = deque(begin), deque[Path]()
    while folders or links:
        folder = (folders or links).popleft()
        real = os.path.realpath(folder)
        if real in listed:
            continue
        listed.add(real)
        entries = list_folder(folder)
        for inner in entries.folders:
            (links if inner.is_symlink() else folders).append(inner)
        yield folder, entries


def read_image(path: Path | BinaryIO, box: Box | None = None, **settings: Any) -> Image.Image:
    """An image as `decode` returns it.

    Args:
        path: as for `decode`.
        box: as for `decode`.
        settings: arguments of `decode` besides `as_pixels`.
    """
    image: Image.Image = decode(path, box, **settings)
    return image


def decode(
    path: Path | BinaryIO,
    box: Box | None = None,
    *,
    load_truncated: bool = False,
    boxes_before_rotation: bool = False,
    background: Sequence[int] = WHITE,
    least_size: Size | None = None,
    short_side: int | None = None,
    as_pixels: bool = False,
) -> Any:
    """Decode an image to RGB, rotate it according to its EXIF orientation, and crop it to its box.

    Args:
        path: the file, or its content as a binary stream.
        box: left, top, right and bottom in pixels of the image, clipped to the image. None means the whole image.
        load_truncated: whether a truncated file is decoded as far as possible, with the rest grey.
        boxes_before_rotation: whether the box is in pixels of the file, before the rotation, instead of pixels of the
            upright image. For TIFF files there is no difference, because Pillow rotates them itself.
        background: red, green and blue of the colour behind transparent pixels.
        least_size: if given, a JPEG may be decoded at a reduced scale at which the upright image, or its box, still has
            at least this height and width (see `reduce_scale`); the box is then rounded outwards to whole pixels. None
            means the full scale.
        short_side: the short side to which the image will be resized, for which it must not be too thin; None if it
            will not be.
        as_pixels: whether the result is a tensor (3, height, width) of uint8 instead of a PIL image. JPEGs in RGB or
            grey are then decoded by torchvision, which is faster, but only at the full scale.

    Raises:
        ValueError: if the box is outside the image, the image is too thin (see `resized_size`), or the range of the
            pixel values is unknown (see `to_rgb`).
        Exception: any error of Pillow, if the file cannot be decoded.
    """
    with truncated_images(load_truncated), open_image(path) as file:
        divisor = 1
        if least_size is not None and isinstance(file, JpegImageFile):
            divisor = _reduce(file, box, least_size, boxes_before_rotation)
        image: Any = None
        if as_pixels and divisor == 1:
            image = _decoded_jpeg(file)
        if image is None:
            image = to_rgb(file, background)
            if as_pixels:
                image = to_pixels(image)
        turned = orientation(file)  # some of Pillow's readers have rotated the image by themselves
    if box is not None:
        box = _divided(box, divisor)
    if box is not None and boxes_before_rotation:
        image = _cropped(image, box)
    if turned in ROTATIONS:
        image = _rotated(image, turned)
    if box is not None and not boxes_before_rotation:
        image = _cropped(image, box)
    if short_side is not None:
        resized_size(*_size(image), short_side)  # raises for an image that is too thin
    return image


class CurrentTransform:
    """A transform of images, and how images are decoded for it, which is decided once; it may be replaced.

    Args:
        transform: a function from an image to a tensor. The function may have the attributes that `ImageSet` names.
        background: the colour behind transparent pixels, unless the transform defines one.

    Raises:
        ValueError: if the colour is unknown.
    """

    def __init__(self, transform: Callable[[Any], Any], background: Any = "white") -> None:
        self.set(transform, background)

    def set(self, transform: Callable[[Any], Any], background: Any) -> None:
        """Replace the transform.

        Args:
            transform: as for the constructor.
            background: as for the constructor.
        """
        self.current = transform
        # The transform without its normalisation; None if the normalisation cannot be separated.
        self.to_uint8: Callable[[Any], Tensor] | None = getattr(transform, "to_uint8", None)
        self.background = check_colour("transform.background", getattr(transform, "background", background))
        self.read: Callable[..., Image.Image | Pixels] = partial(
            decode,
            background=self.background,
            least_size=getattr(transform, "least_size", None),
            short_side=getattr(transform, "short_side", None),
            as_pixels=getattr(transform, "takes_pixels", False),
        )

    def __call__(self, image: Any) -> Any:
        return self.current(image)

    def __repr__(self) -> str:
        return f"CurrentTransform({self.current!r})"


def _decoded_jpeg(file: Any) -> Pixels | None:
    """The pixels of a JPEG that Pillow has opened; None for another file, and if Pillow must decode it."""
    if decode_image is None or not isinstance(file, JpegImageFile) or file.mode not in ("RGB", "L"):
        return None
    stream: Any = file.fp
    stream.seek(0)
    encoded = torch.frombuffer(bytearray(stream.read()), dtype=torch.uint8)
    try:
        pixels: Pixels = decode_image(encoded, ImageReadMode.RGB)
    except RuntimeError:  # a damaged file, or a torchvision without libjpeg
        return None
    return pixels


@contextlib.contextmanager
def truncated_images(load: bool) -> Iterator[None]:
    """Context in which Pillow decodes truncated images, if `load`. Pillow's setting is global."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = load or before
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _reduce(file: JpegImageFile, box: Box | None, least_size: Size, boxes_before_rotation: bool) -> int:
    """Make Pillow decode a JPEG at a reduced scale if `least_size` allows; return the divisor of the image's size."""
    is_transposed = orientation(file) in TRANSPOSED
    height, width = file.height, file.width
    if is_transposed and not boxes_before_rotation:  # the box refers to the upright image
        height, width = width, height
    if box is not None:
        left, top, right, bottom = _inside(box, width, height)
        height, width = bottom - top, right - left
    if is_transposed and boxes_before_rotation:  # `least_size` refers to the upright image
        height, width = width, height
    return reduce_scale(file, least_size, (height, width))


def _divided(box: Box, divisor: int) -> Box:
    """The box for an image whose size was divided by `divisor`, rounded outwards."""
    begin, end = box[:2] // divisor, -(-box[2:] // divisor)
    return np.concatenate([begin, end])


def _size(image: Any) -> Size:
    """Height and width of a PIL image or of pixels."""
    if isinstance(image, Tensor):
        return image.shape[1], image.shape[2]
    return image.height, image.width


def _cropped(image: Any, box: Box) -> Any:
    """The part of a PIL image or of pixels in a box."""
    height, width = _size(image)
    left, top, right, bottom = _inside(box, width, height)
    if isinstance(image, Tensor):
        return image[:, top:bottom, left:right]
    return image.crop((left, top, right, bottom))


def _rotated(image: Any, turned: int) -> Any:
    """A PIL image or pixels, made upright by the value of the EXIF tag."""
    if not isinstance(image, Tensor):
        return image.transpose(ROTATIONS[turned])
    if turned in TRANSPOSED:
        image = image.transpose(1, 2)
    return image.flip(FLIPPED.get(turned, ()))


def _inside(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """The part of a box inside its image."""
    left, top, right, bottom = box.tolist()
    inside = (max(0, left), max(0, top), min(width, right), min(height, bottom))
    if inside[0] >= inside[2] or inside[1] >= inside[3]:
        raise ValueError(f"its box {[left, top, right, bottom]} is outside of its {width} x {height} pixels")
    return inside
