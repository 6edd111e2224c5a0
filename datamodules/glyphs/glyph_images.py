"""Images of characters, drawn from the fonts that matplotlib ships: a retrieval data set that needs no download.

Class = character, image = that character in one font, category = its Unicode script (the first word of its Unicode
name). The recipe:

1. Take the letters, numbers, symbols and punctuation (Unicode categories L, N, S, P) that at least 6 of the fonts hold,
   leaving out LastResort (boxes) and cmex10, cmsy10, cmmi10 (they draw other symbols at ASCII codes).
2. Draw each in each font that holds it, 32 x 32, at one size on one baseline: a comma is not an apostrophe, o is not O.
3. Characters whose drawings agree pixel for pixel in at least four fifths of the fonts they share (Latin, Greek and
   Cyrillic O) are one class.
4. Within a class each drawing is kept once, whatever font it came from. Blank drawings go, and so do classes left with
   one drawing.
5. Half of the classes, by a hash of the lowest code point, are the test; a tenth of the other half is validation.

Steps 1, 3 and 5 were taken once; their result, `glyph_classes.csv`, ships with the package and says for ever what the
classes and the splits are. `make_class_table()` gives that table afresh. Only steps 2 and 4 run on the user's machine,
once: the images are kept in a cache.
"""

import csv
import hashlib
import io
import os
import secrets
import sys
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import PIL
from jaxtyping import Int64, Shaped, UInt8
from PIL import Image, ImageDraw, ImageFont, features

from lightning_retrieval.datamodules.files.data_report import Count

RECIPE = 1  # raise it when the drawing below changes: it is part of the name of the cache
IMAGE_SIZE = 32  # pixels
FONT_SIZE = 22  # pixels
BASELINE = (IMAGE_SIZE // 2, 23)  # where the middle of a character's advance stands, in pixels from the top left
MIN_FONTS = 6
LEFT_OUT_FONTS = frozenset({"LastResortHE-Regular", "cmex10", "cmmi10", "cmsy10"})
TABLE = Path(__file__).with_name("glyph_classes.csv")
TABLE_FONTS = """
    DejaVuSans DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSans-Oblique DejaVuSansDisplay DejaVuSansMono
    DejaVuSansMono-Bold DejaVuSansMono-BoldOblique DejaVuSansMono-Oblique DejaVuSerif DejaVuSerif-Bold
    DejaVuSerif-BoldItalic DejaVuSerif-Italic DejaVuSerifDisplay STIXGeneral STIXGeneralBol STIXGeneralBolIta
    STIXGeneralItalic STIXNonUni STIXNonUniBol STIXNonUniBolIta STIXNonUniIta STIXSizFiveSymReg STIXSizFourSymBol
    STIXSizFourSymReg STIXSizOneSymBol STIXSizOneSymReg STIXSizThreeSymBol STIXSizThreeSymReg STIXSizTwoSymBol
    STIXSizTwoSymReg cmb10 cmr10 cmss10 cmti10 cmtt10
"""  # those that the table was made with


@dataclass(frozen=True, eq=False)
class GlyphImages:
    """The images and what is known of each. `image` below is their number, about 33,000 in about 3,400 classes.

    Args:
        images: grey values, ink bright (255) on dark (0), ordered by class, then by font name.
        labels: class of each image, an index into `characters`.
        fonts: font of each image, an index into `font_names`. A drawing that several fonts share is kept once, under
            the first.
        splits: `"train"`, `"val"` or `"test"` of each image. A class lies whole in one of them.
        characters: all characters of each class, lowest code point first: the whole table, the same with every version
            of fonts and renderer. A class of which the installed fonts draw fewer than 2 different images has none.
        categories: Unicode script of each class, such as `"LATIN"`.
        font_names: the fonts, sorted.
    """

    images: UInt8[np.ndarray, "image 32 32"]
    labels: Int64[np.ndarray, " image"]
    fonts: Int64[np.ndarray, " image"]
    splits: Shaped[np.ndarray, " image"]
    characters: tuple[str, ...]
    categories: tuple[str, ...]
    font_names: tuple[str, ...]


def load_glyph_images(cache_dir: str | Path | None = None) -> GlyphImages:
    """The glyph images: drawn at the first call (seconds), read from a cache after that.

    The cache is one `.npz` with its SHA-256 beside it. Its name holds a hash of the recipe, of the table of classes, of
    the fonts and of the versions of the renderer, so that caches of other versions stand side by side. One that is
    damaged or half written is drawn again. Any number of processes may call this at once.

    Args:
        cache_dir: folder of the cache, made if it is not there. `None` means `lightning-retrieval` in the user's cache
            folder: `XDG_CACHE_HOME` or `~/.cache` on Linux, `~/Library/Caches` on macOS, `LOCALAPPDATA` on Windows.

    Raises:
        OSError: if there is no cache yet and `cache_dir` cannot be made or written (the kind that the system raised:
            `PermissionError`, `NotADirectoryError`, ...); said before anything is drawn.
        ValueError: if `cache_dir` is an empty string.
        TypeError: if `cache_dir` is not a string, a path or `None`.
        FileNotFoundError: if matplotlib's installation has no fonts, or the user has no home folder.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.glyph_images import load_glyph_images
        >>> glyphs = load_glyph_images()
        >>> glyphs.images.shape[1:], glyphs.images.dtype
        ((32, 32), dtype('uint8'))
        >>> label = glyphs.characters.index("OΟО")  # Latin, Greek and Cyrillic
        >>> glyphs.categories[label], set(glyphs.splits[glyphs.labels == label].tolist())
        ('LATIN', {'train'})

    Cost:
        34 MB of memory for the images, 3.4 MB on disk.
    """
    folder = _cache_folder(cache_dir)
    classes = _read_table()
    fonts = _Fonts()
    path = folder / f"glyphs-{fonts.fingerprint()}.npz"
    arrays = _read_cache(path)
    if arrays is None:
        _replace(path, None)  # a folder that cannot be written is known before the work is done
        arrays = _draw_classes(classes, fonts)
        file = io.BytesIO()
        np.savez_compressed(file, images=arrays[0], labels=arrays[1], fonts=arrays[2])
        _replace(path, file.getvalue())
        _replace(_checksum_path(path), _checksum(file.getvalue()))
    images, labels, font_of = arrays

    missing = len(classes) - len(np.unique(labels))
    if missing:
        warnings.warn(
            f"load_glyph_images: {missing} of {len(classes)} classes have no images, for the installed fonts "
            f"({fonts.versions()}) draw fewer than 2 different images of each.",
            stacklevel=2,
        )
    return GlyphImages(
        images=images,
        labels=labels,
        fonts=font_of,
        splits=np.array([row.split for row in classes])[labels],
        characters=tuple(row.characters for row in classes),
        categories=tuple(row.category for row in classes),
        font_names=fonts.names,
    )


def table_counts() -> dict[str, Count]:
    """Images and classes of each split when the table was made.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.glyph_images import table_counts
        >>> table_counts()["val"]
        (1571, 169)
    """
    classes = _read_table()
    images = {split: [row.images for row in classes if row.split == split] for split in ("train", "val", "test")}
    return {split: (sum(of_split), len(of_split)) for split, of_split in images.items()}


def table_differences(font_names: Sequence[str]) -> tuple[list[str], str]:
    """Which fonts of the table's are not among these, and a sentence about the versions, those here and the table's."""
    made_with = TABLE.read_text(encoding="ascii").partition("\n")[0].removeprefix("# ")
    missing = [f"{name}.ttf" for name in TABLE_FONTS.split() if name not in font_names]
    return missing, f"drawn with {_Fonts().versions()}, the table's images with {made_with}"


def make_class_table() -> str:
    """The table of classes and splits made afresh from the installed fonts, as the text of `glyph_classes.csv`.

    One line a class, in the order of the labels: its code points, category, split, and how many images it had when the
    table was made. The first line names the versions it was made with.

    Raises:
        FileNotFoundError: if matplotlib's installation has no fonts.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.glyph_images import make_class_table
        >>> print(make_class_table().splitlines()[1])
        code_points,category,split,images

    Cost:
        Some seconds, and 100 MB: it holds every drawing.
    """
    fonts = _Fonts()
    holders = Counter(point for charmap in fonts.charmaps for point in charmap)
    points = sorted(p for p, n in holders.items() if n >= MIN_FONTS and unicodedata.category(chr(p))[0] in "LNSP")
    drawings = {
        point: {
            font: drawing.tobytes()
            for font, charmap in enumerate(fonts.charmaps)
            if point in charmap and (drawing := fonts.draw(point, font)).any()
        }
        for point in points
    }
    text = io.StringIO()
    text.write(f"# {fonts.versions()}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["code_points", "category", "split", "images"])
    for members in _merge(drawings):
        images = len({drawing for point in members for drawing in drawings[point].values()})
        if images >= 2:
            # Code points rather than characters: many of them do not survive an editor, or look alike.
            code_points = " ".join(f"U+{point:04X}" for point in members)
            category = unicodedata.name(chr(members[0])).split()[0]
            writer.writerow([code_points, category, split_of(members[0]), images])
    return text.getvalue()


def split_of(code_point: int) -> str:
    """The split of the class whose lowest code point is `code_point`: a function of nothing else, for ever.

    Args:
        code_point: a Unicode code point, >= 0.

    Example:
        >>> from lightning_retrieval.datamodules.glyphs.glyph_images import split_of
        >>> [split_of(ord(character)) for character in "AOa"]
        ['test', 'train', 'val']
    """
    digest = hashlib.sha256(str(code_point).encode("ascii")).digest()
    # Two independent numbers in [0, 2**64): one says whether the class is test, the other whether it is validation.
    half, tenth = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
    if 2 * half < 2**64:
        return "test"
    return "val" if 10 * tenth < 2**64 else "train"


def _merge(drawings: dict[int, dict[int, bytes]]) -> list[list[int]]:
    """Groups of code points that are one class, from the drawings {code point: {font: pixels}} that are not blank."""
    same_drawing: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for point, by_font in drawings.items():
        for font, drawing in by_font.items():
            same_drawing[font, drawing].append(point)
    agreeing = Counter(pair for points in same_drawing.values() for pair in combinations(points, 2))

    group = {point: [point] for point in drawings}
    for (first, second), agree in agreeing.items():
        shared = len(drawings[first].keys() & drawings[second].keys())
        if 5 * agree >= 4 * shared and group[first] is not group[second]:
            joined = sorted(group[first] + group[second])
            group.update(dict.fromkeys(joined, joined))
    return [members for point, members in group.items() if point == members[0]]


class _Fonts:
    """The fonts of the recipe, by name: what they hold, how they draw. Opened only when something is drawn."""

    def __init__(self) -> None:
        try:
            import matplotlib
        except ImportError:
            raise ImportError("The glyph images are drawn from matplotlib's fonts: pip install matplotlib.") from None
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        files = {path.stem: path for path in folder.glob("*.ttf") if path.stem not in LEFT_OUT_FONTS}
        if not files:
            raise FileNotFoundError(
                f"load_glyph_images: matplotlib {matplotlib.__version__} must have its fonts in {str(folder)!r}, got "
                "no .ttf file there; install matplotlib from PyPI: pip install --force-reinstall matplotlib."
            )
        self.names = tuple(sorted(files))
        self.files = [files[name] for name in self.names]
        self.matplotlib_version = matplotlib.__version__
        self._charmaps: list[set[int]] = []
        self._faces: list[ImageFont.FreeTypeFont] = []

    @property
    def charmaps(self) -> list[set[int]]:
        """The code points that each font holds."""
        if not self._charmaps:
            from matplotlib.ft2font import FT2Font

            self._charmaps = [set(FT2Font(str(file)).get_charmap()) for file in self.files]
        return self._charmaps

    def draw(self, code_point: int, font: int) -> UInt8[np.ndarray, "32 32"]:
        if not self._faces:
            # BASIC: the other engine is there only where libraqm is, and shapes some characters differently.
            basic = ImageFont.Layout.BASIC
            self._faces = [ImageFont.truetype(str(file), FONT_SIZE, layout_engine=basic) for file in self.files]
        image = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE))
        ImageDraw.Draw(image).text(BASELINE, chr(code_point), fill=255, font=self._faces[font], anchor="ms")
        return np.asarray(image)

    def versions(self) -> str:
        freetype = features.version("freetype2")
        return f"matplotlib {self.matplotlib_version}, Pillow {PIL.__version__}, FreeType {freetype}"

    def fingerprint(self) -> str:
        """Hash of all that the images depend on."""
        # The versions of NumPy and zlib are not among them: they change the file, whose checksum stands beside it, not
        # the images in it.
        parts = [str((RECIPE, IMAGE_SIZE, FONT_SIZE, BASELINE, self.versions(), self.names)).encode()]
        parts += [TABLE.read_bytes(), *(file.read_bytes() for file in self.files)]
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


@dataclass(frozen=True)
class _Class:
    """One line of the table."""

    characters: str
    category: str
    split: str
    images: int  # when the table was made


def _read_table() -> list[_Class]:
    lines = TABLE.read_text(encoding="ascii").splitlines()
    return [
        _Class(
            characters="".join(chr(int(point.removeprefix("U+"), 16)) for point in row["code_points"].split()),
            category=row["category"],
            split=row["split"],
            images=int(row["images"]),
        )
        for row in csv.DictReader(lines[1:])
    ]


_Arrays = tuple[UInt8[np.ndarray, "image 32 32"], Int64[np.ndarray, " image"], Int64[np.ndarray, " image"]]


def _draw_classes(classes: list[_Class], fonts: _Fonts) -> _Arrays:
    """Images, labels and fonts of all classes: no blank image, no image twice in a class, no class of one image."""
    images: list[bytes] = []
    labels: list[int] = []
    font_of: list[int] = []
    for label, row in enumerate(classes):
        drawn: dict[bytes, int] = {}  # to the first font that drew it
        for font, charmap in enumerate(fonts.charmaps):
            for point in map(ord, row.characters):
                if point in charmap and (drawing := fonts.draw(point, font)).any():
                    drawn.setdefault(drawing.tobytes(), font)
        if len(drawn) >= 2:
            images += drawn
            labels += [label] * len(drawn)
            font_of += drawn.values()
    pixels = np.frombuffer(bytearray().join(images), dtype=np.uint8)  # of a bytearray: PyTorch wants it writable
    return pixels.reshape(-1, IMAGE_SIZE, IMAGE_SIZE), np.array(labels, np.int64), np.array(font_of, np.int64)


def _cache_folder(cache_dir: str | Path | None) -> Path:
    if isinstance(cache_dir, str | Path):
        if not str(cache_dir):
            raise ValueError("load_glyph_images: `cache_dir` must name a folder, got ''.")
        return _expand(Path(cache_dir))
    if cache_dir is not None:
        raise TypeError(
            f"load_glyph_images: `cache_dir` must be a string, a path or None, got {type(cache_dir).__name__}."
        )
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        caches = "~/Library/Caches"
    else:
        caches = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(caches):  # the XDG specification: not set, empty and relative are all to be ignored
            caches = "~/.cache"
    return _expand(Path(caches)) / "lightning-retrieval"


def _expand(folder: Path) -> Path:
    try:
        return folder.expanduser()
    except RuntimeError:  # in a container whose user has no home; os.path.expanduser would go on with a folder named ~
        raise FileNotFoundError(
            f"load_glyph_images: `cache_dir` must be a folder that can be found, got {str(folder)!r} where the user "
            "has no home folder; pass another folder."
        ) from None


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode("ascii") + b"\n"


def _read_cache(path: Path) -> _Arrays | None:
    """What `path` holds, or `None` if it is not there or not whole."""
    try:
        payload, checksum = path.read_bytes(), _checksum_path(path).read_bytes()
    except OSError:
        return None
    if checksum != _checksum(payload):
        return None
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:  # the very bytes that were checked
        return arrays["images"], arrays["labels"], arrays["fonts"]


def _replace(path: Path, payload: bytes | None) -> None:
    """Writes `path` whole or not at all. Without a payload it only finds out whether that could be done."""
    # A name of its own: another process may be at the same work. Not tempfile's: that file only its owner may read.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            file.write(payload or b"")
        if payload is not None:
            os.replace(temporary, path)
    except OSError as error:
        raise type(error)(
            f"load_glyph_images: `cache_dir` must be a folder that can be made and written, got {str(path.parent)!r} "
            f"({error.strerror}); pass another folder."
        ) from None
    finally:
        with suppress(OSError):  # gone if it took the place of `path`
            temporary.unlink()
