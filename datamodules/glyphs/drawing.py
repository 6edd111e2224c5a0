"""Draws images of characters from the fonts that matplotlib ships: a retrieval data set that needs no download.

A class is a character, or several characters that look alike; an image is a character in one font; a category is a
Unicode script (the first word of the Unicode name). `characters.py` defines the classes and their splits. The images
are made as follows:

1. Each character of a class is drawn in each font that contains it, in 32 x 32 pixels, at one size on one baseline.
   So a comma differs from an apostrophe, and o from O.
2. Blank drawings are dropped. Equal drawings within a class are kept once, for the first font that draws them.
   Classes with only one drawing have no images.

The images are drawn once on the user's machine and then cached.
"""

import contextlib
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Shaped, UInt8

from lightning_retrieval.datamodules.glyphs import characters
from lightning_retrieval.datamodules.glyphs.characters import (
    BASELINE,
    FONT_SIZE,
    IMAGE_SIZE,
    GlyphClass,
    GlyphFonts,
    read_class_table,
)
from lightning_retrieval.files import new_file
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.paths import check_path


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder of the cache: `cache_dir` or, if it is None, `lightning-retrieval` in the user's cache folder.

    Raises:
        ValueError: if `cache_dir` is an empty string.
        FileNotFoundError: if the user has no home folder.
    """
    if cache_dir is None:
        cache_dir = f"{_user_cache_folder()}/lightning-retrieval"
    return check_path("cache_dir", cache_dir, owner="load_glyph_images")


def _user_cache_folder() -> str:
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    if sys.platform == "darwin":
        return "~/Library/Caches"
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # according to the XDG specification, an unset, empty or relative path is ignored
        return "~/.cache"
    return folder


@contextlib.contextmanager
def _in_folder(path: Path) -> Iterator[None]:
    """Context in which a file is written: its folder is created, and errors of the system mention the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise type(error)(
            f"load_glyph_images: `cache_dir` must be a folder that can be created and written, got "
            f"{str(path.parent)!r} ({error.strerror}); pass another folder."
        ) from None


DRAWING_VERSION = 1  # increase this number when the drawing changes: the name of the cache file depends on it


# The arrays `images`, `labels` and `fonts` of `GlyphImages`.
_Arrays = tuple[UInt8[np.ndarray, "image 32 32"], Int64[np.ndarray, " image"], Int64[np.ndarray, " image"]]


@dataclass(frozen=True, eq=False)
class GlyphImages:
    """The images and their properties. There are about 33,000 images (`image` in the shapes) of about 3,400 classes.

    Args:
        images: grey values of bright ink (255) on a dark background (0). Images are ordered by class, then by font
            name.
        labels: class of each image, as an index into `characters`.
        fonts: font of each image, as an index into `font_names`. If several fonts give the same drawing, this is the
            first of these fonts.
        splits: `"train"`, `"val"` or `"test"` of each image. All images of a class are in the same split.
        characters: all characters of each class, lowest code point first. This is the full table, which does not depend
            on versions of fonts and renderers. A class has no images if the installed fonts give fewer than 2 different
            drawings.
        categories: Unicode script of each class, such as `"LATIN"`.
        font_names: the fonts, sorted by name.
    """

    images: UInt8[np.ndarray, "image 32 32"]
    labels: Int64[np.ndarray, " image"]
    fonts: Int64[np.ndarray, " image"]
    splits: Shaped[np.ndarray, " image"]
    characters: tuple[str, ...]
    categories: tuple[str, ...]
    font_names: tuple[str, ...]

    def of_fonts(self, names: Sequence[str]) -> "GlyphImages":
        """The images in some of the fonts.

        Args:
            names: names of fonts.

        Raises:
            ValueError: if a font is not installed.
        """
        for name in names:
            if name not in self.font_names:
                cure = f"they are {', '.join(self.font_names)}"
                raise InvalidValue("must be names of matplotlib's fonts", "Glyphs", "fonts", got=repr(name), cure=cure)
        chosen = np.isin(self.fonts, [self.font_names.index(name) for name in names])
        return replace(
            self,
            images=self.images[chosen],
            labels=self.labels[chosen],
            fonts=self.fonts[chosen],
            splits=self.splits[chosen],
        )


def load_glyph_images(cache_dir: str | Path | None = None) -> GlyphImages:
    """Load the glyph images, which are drawn at the first call (some seconds) and then read from a cache.

    The cache is an `.npz` file. Its name contains a hash of the drawing's version, the table of classes, the fonts and
    the versions of the renderer, so that caches of several versions can coexist. If the file is damaged or incomplete,
    the images are drawn again. Several processes may call this function at the same time.

    Args:
        cache_dir: folder of the cache, created if it does not exist. If None, the folder is `lightning-retrieval` in
            the user's cache folder: `XDG_CACHE_HOME` or `~/.cache` on Linux, `~/Library/Caches` on macOS,
            `LOCALAPPDATA` on Windows.

    Raises:
        OSError: if there is no cache yet and `cache_dir` cannot be created or written. The error is raised before
            anything is drawn, and has the type of the system's error, such as `PermissionError` or
            `NotADirectoryError`.
        ValueError: if `cache_dir` is an empty string.
        FileNotFoundError: if matplotlib's installation has no fonts, or the user has no home folder.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
        >>> glyphs = load_glyph_images()
        >>> glyphs.images.shape[1:], glyphs.images.dtype
        ((32, 32), dtype('uint8'))
        >>> label = glyphs.characters.index("OΟО")  # Latin, Greek and Cyrillic
        >>> glyphs.categories[label], set(glyphs.splits[glyphs.labels == label].tolist())
        ('LATIN', {'train'})

    Cost:
        The images need 34 MB of memory, and 3.4 MB on disk.
    """
    folder = cache_folder(cache_dir)
    classes = read_class_table()
    fonts = GlyphFonts()
    images, labels, font_of = _cached_or_drawn(folder / f"glyphs-{_fingerprint(fonts)}.npz", classes, fonts)
    num_missing = len(classes) - len(np.unique(labels))
    if num_missing:
        warnings.warn(
            f"load_glyph_images: {num_missing} of {len(classes)} classes have no images, since the installed fonts "
            f"({fonts.versions()}) draw fewer than 2 different images of each.",
            stacklevel=2,
        )
    splits = [row.split for row in classes]
    names = [row.characters for row in classes]
    categories = [row.category for row in classes]
    return GlyphImages(
        images=images,
        labels=labels,
        fonts=font_of,
        splits=np.array(splits)[labels],
        characters=tuple(names),
        categories=tuple(categories),
        font_names=fonts.names,
    )


def _fingerprint(fonts: GlyphFonts) -> str:
    """A hash of everything that the images depend on.

    Versions of NumPy and zlib are not included: they affect only the bytes of the cache file, not the images.
    """
    settings = str((DRAWING_VERSION, IMAGE_SIZE, FONT_SIZE, BASELINE, fonts.versions(), fonts.names))
    parts = [settings.encode(), characters.TABLE.read_bytes()]
    for file in fonts.files:
        parts.append(file.read_bytes())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def _cached_or_drawn(path: Path, classes: list[GlyphClass], fonts: GlyphFonts) -> _Arrays:
    # If the file is damaged, the images are drawn again. NumPy compares the checksum of each array. The types
    # of its errors are not documented.
    with contextlib.suppress(Exception), path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return arrays["images"], arrays["labels"], arrays["fonts"]
    with _in_folder(path), tempfile.TemporaryFile(dir=path.parent):
        pass  # if the folder cannot be written, this raises an error before the slow drawing
    images, labels, font_of = _draw_classes(classes, fonts)
    with _in_folder(path), new_file(path) as file:
        np.savez_compressed(file, images=images, labels=labels, fonts=font_of)
    return images, labels, font_of


def _draw_classes(classes: list[GlyphClass], fonts: GlyphFonts) -> _Arrays:
    """Images, labels and fonts of all classes that have at least two different images."""
    pixels = bytearray()  # a bytearray, because PyTorch needs a writable array
    labels: list[int] = []
    font_of: list[int] = []
    for label, row in enumerate(classes):
        first_font = _draw_class(row.characters, fonts)
        if len(first_font) >= 2:
            pixels += b"".join(first_font)
            labels += [label] * len(first_font)
            font_of += first_font.values()
    images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, IMAGE_SIZE, IMAGE_SIZE)
    return images, np.array(labels, np.int64), np.array(font_of, np.int64)


def _draw_class(characters: str, fonts: GlyphFonts) -> dict[bytes, int]:
    """The different drawings of a class, each with the first font that draws it, in the order of fonts."""
    first_font: dict[bytes, int] = {}
    for font in range(len(fonts.names)):
        for character in characters:
            drawing = fonts.draw_visible(ord(character), font)
            if drawing is not None:
                first_font.setdefault(drawing, font)
    return first_font
