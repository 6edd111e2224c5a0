"""Checks of a data set before training, and their report.

The checks count images and classes, look for missing files, and read every image to find unreadable images, duplicates
and the range of sizes.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lightning_retrieval.checks import first_line
from lightning_retrieval.datamodules.image_index import DISTRACTOR, ImageIndex
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.item_seeds import all_different
from lightning_retrieval.preparation.decoding import truncated_images
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.progress import Progress, usable_cores
from lightning_retrieval.ranking.relevance import NO_TAG

Count = tuple[int, int]  # numbers of images and of classes

MAX_SHOWN = 10  # number of missing or unreadable files that the printed report lists
LARGEST_CUT = 0.25  # part of an image, the loss of which to a centre crop is a note
MAX_PAIRS = 5  # number of pairs of equal images that the report lists
IMAGES_PER_TASK = 16  # number of images that a thread reads at a time
HEADER = ("split", "images", "classes")
PUBLISHED_HEADER = ("published: images", "classes")


@dataclass
class DataReport:
    """The result of `check()` of a data module: found and published counts of each split, and problems.

    Args:
        splits: for each split, the counts (images, classes) that were found, and a sequence of published counts: empty
            if no counts were published, several if papers differ. The counts found must equal one of the published
            counts.
        missing_files: paths of images that are listed but do not exist.
        problems: sentences about any other problem.
        unreadable_files: paths of images that cannot be decoded, each with the reason.
        notes: sentences about findings that are not problems.

    Example:
        >>> from lightning_retrieval.datamodules import DataReport
        >>> report = DataReport({"train": ((2, 1), [(3, 1), (4, 1)])}, missing_files=["cats/3.jpg"])
        >>> report.ok
        False
        >>> print(report)
        split  images  classes  published: images  classes
        train       2        1             3 or 4        1
        missing: cats/3.jpg

    Relations:
        `RetrievalDataModule.check` returns a report, and `lightning-retrieval check` prints the report.
    """

    splits: dict[str, tuple[Count, Sequence[Count]]] = field(default_factory=dict)
    missing_files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unreadable_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no file is missing or unreadable, there is no problem, and no count differs from published counts."""
        as_published = all(found in (published or [found]) for found, published in self.splits.values())
        return as_published and not (self.missing_files or self.unreadable_files or self.problems)

    def add(self, prefix: str, other: "DataReport") -> None:
        """Add the report on a part of the data.

        Args:
            prefix: name of the part, with which its splits and sentences begin.
            other: the report on the part.
        """
        for split, counts in other.splits.items():
            self.splits[f"{prefix}/{split}"] = counts
        self.missing_files += other.missing_files
        self.unreadable_files += other.unreadable_files
        self.problems += map(f"{prefix}: {{}}".format, other.problems)
        self.notes += map(f"{prefix}: {{}}".format, other.notes)

    def __str__(self) -> str:
        lines = _table_lines(self.splits)
        lines += _file_lines("missing", self.missing_files)
        lines += _file_lines("unreadable", self.unreadable_files)
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _file_lines(what: str, files: Sequence[str]) -> list[str]:
    """Return a line for each of the first files, and a line with the number of further files."""
    lines = [f"{what}: {file}" for file in files[:MAX_SHOWN]]
    hidden = len(files) - MAX_SHOWN
    if hidden > 0:
        lines.append(f"... and {hidden:,} more are {what}")
    return lines


def _table_lines(splits: dict[str, tuple[Count, Sequence[Count]]]) -> list[str]:
    has_published = any(published for _, published in splits.values())
    rows: list[tuple[str, ...]] = [HEADER]
    if has_published:
        rows = [HEADER + PUBLISHED_HEADER]
    for name, ((images, classes), published) in splits.items():
        row: tuple[str, ...] = (name, f"{images:,}", f"{classes:,}")
        if has_published:
            row += (_alternatives(published, 0), _alternatives(published, 1))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        line = first.ljust(widths[0])
        for cell, width in zip(others, widths[1:]):
            line += "  " + cell.rjust(width)
        lines.append(line.rstrip())
    return lines


def _alternatives(published: Sequence[Count], position: int) -> str:
    """The different published numbers of images (position 0) or classes (1), such as `1,000 or 1,200`."""
    return " or ".join(dict.fromkeys(f"{count[position]:,}" for count in published))


def has_classes(index: ImageIndex) -> bool:
    """Whether images have classes. Images with tags may have none; then each is a class of its own, without a name."""
    is_unnamed = index.tags is not None and index.names is None
    return not (is_unnamed and all_different(index.labels))


def count_images_and_classes(index: ImageIndex) -> tuple[int, int]:
    """The numbers of images and of classes of a split."""
    if not has_classes(index):
        return len(index), 0
    classes = np.unique(index.labels)
    return len(index), int((classes != DISTRACTOR).sum())


def add_tags(report: DataReport, name: str, index: ImageIndex) -> None:
    """Add the number of tags of a split, the images without a tag and the tags with one image to a report, as notes.

    Args:
        report: receives the findings.
        name: name of the split.
        index: images of the split.
    """
    if index.tags is None:
        return
    untagged = int((index.tags == NO_TAG).all(1).sum())
    rows = np.sort(index.tags, axis=1)
    is_first = np.diff(rows, axis=1, prepend=NO_TAG) != 0  # a tag that an image has several times counts once
    tags, counts = np.unique(rows[is_first], return_counts=True)
    note = f"{name} has {len(tags):,} tags"
    if len(tags):
        most = int(counts.argmax())
        note += f", at most {counts[most]:,} images with one tag ({_tag_name(index, tags[most])})"
    report.notes.append(note)
    if untagged:
        report.notes.append(f"{untagged:,} images of {name} have no tag, so they have no positive under SharedTags")
    single = tags[counts == 1]
    if len(single):
        effect = "is not drawn by TagSampler" if name == "train" else "makes no image relevant"
        report.notes.append(
            f"{len(single):,} tags of {name} have one image, such as {_tag_name(index, single[0])}, which {effect}"
        )


def _tag_name(index: ImageIndex, tag: int) -> str:
    if index.tag_names is None:
        return str(tag)
    return repr(index.tag_names[tag])


def look_for_files(report: DataReport, name: str, index: ImageIndex, root: Path) -> None:
    """Add the missing files of a split, and the number of paths that are listed twice, to a report.

    Args:
        report: receives the findings.
        name: name of the split.
        index: images of the split.
        root: the folder that the paths are relative to.
    """
    with Progress(f"Looking for the images of {name}", total=len(index), units="images") as progress:
        for path in index.paths:
            if not (root / path).is_file():
                report.missing_files.append(path)
            progress.update(1)
    duplicates = len(index) - len(set(index.paths))
    if duplicates and index.boxes is None:
        report.problems.append(f"{duplicates} paths are listed twice in {name}")


@dataclass
class ImageFinding:
    """The result of reading one image.

    Args:
        size: width and height of the upright image, cropped to its box.
        digest: a hash of size and pixels; images with the same digest look the same.
        is_missing: whether the file does not exist.
        error: why the image cannot be decoded, or None.
    """

    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    is_missing: bool = False
    error: str | None = None


@dataclass
class _Image:
    """A readable image, with its split and its position in the split."""

    split: str
    position: int
    path: str


def inspect_image(images: ImageSet, position: int) -> ImageFinding:
    """Read one image, and return its size and digest, or the reason why the image cannot be read."""
    file: Path | BinaryIO | None = None
    try:
        file = images.file(position)
        is_missing = isinstance(file, Path) and not file.is_file()
    except (OSError, ValueError):  # the row of a table has no image
        is_missing = True
    if is_missing:
        return ImageFinding(is_missing=True)
    try:
        image = images.read(position)
    except Exception as error:  # the decoders do not document the types of their errors
        return ImageFinding(error=_without_file(first_line(error), file))
    pixels = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
    pixels.update(image.tobytes())
    return ImageFinding(size=image.size, digest=pixels.digest())


def check_contents(report: DataReport, sets: Mapping[str, ImageSet], transform: Any = None) -> None:
    """Read all images, and add the findings to a report.

    Problems are: missing files, files that cannot be decoded, images in both training and evaluation, and images with
    two labels in one split. Notes are: the sizes of the images, how many of them a centre crop cuts, classes with one
    image, and images that occur twice in a class. Two images are the same if their pixels are equal, whatever the
    format of their files.

    Args:
        report: receives the findings.
        sets: the images of each split.
        transform: the transform of evaluation; if it is a `Preparation`, the images that its crop cuts are counted.
    """
    sizes: list[tuple[int, int]] = []
    seen: dict[str, dict[bytes, _Image]] = {}
    for name, images in sets.items():
        first = seen.setdefault(name, {})
        repeated: list[tuple[_Image, _Image]] = []
        for position, found in enumerate(_read_all(name, images)):
            image = _Image(name, position, images.index.paths[position])
            if found.is_missing:
                report.missing_files.append(image.path)
            elif found.error is not None:
                report.unreadable_files.append(f"{image.path} ({found.error})")
            else:
                sizes.append(found.size)
                other = first.setdefault(found.digest, image)
                if other is not image:
                    repeated.append((other, image))
        _add_repeated(report, images.index, repeated)
        _add_single_images(report, name, images.index)
    _add_images_of_both(report, seen)
    _add_sizes(report, sizes)
    if isinstance(transform, Preparation):
        _add_cut_images(report, sizes, transform)


def _read_all(name: str, images: ImageSet) -> Iterator[ImageFinding]:
    """Yield the result of reading each image, in order. Threads decode and hash images in parallel."""
    starts = range(0, len(images), IMAGES_PER_TASK)
    pool = ThreadPoolExecutor(usable_cores())
    # Pillow's setting for truncated files is global: it must not change while another thread reads.
    with (
        truncated_images(images.load_truncated),
        warnings.catch_warnings(),
        Progress(f"Reading the images of {name}", total=len(images), units="images") as progress,
    ):
        warnings.simplefilter("ignore")  # Pillow would warn about the metadata of some files
        try:
            for findings in pool.map(lambda start: _read_some(images, start), starts):
                progress.update(len(findings))
                yield from findings
        finally:
            pool.shutdown(cancel_futures=True)


def _read_some(images: ImageSet, start: int) -> list[ImageFinding]:
    positions = range(start, min(start + IMAGES_PER_TASK, len(images)))
    return [inspect_image(images, position) for position in positions]


def _without_file(message: str, file: Path | BinaryIO | None) -> str:
    """The message without the file name, which precedes the message in the report."""
    if isinstance(file, Path):
        return message.replace(f" {str(file)!r}", "")
    return message.split(" <_io.")[0]


def _add_repeated(report: DataReport, index: ImageIndex, repeated: Sequence[tuple[_Image, _Image]]) -> None:
    """Add the images that occur twice in a split: as problems if their labels differ, else as notes."""
    of_two_labels, of_one_label = [], []
    for pair in repeated:
        one, other = pair
        if not has_classes(index) or index.labels[one.position] == index.labels[other.position]:
            of_one_label.append(pair)
        else:
            of_two_labels.append(pair)
    report.problems += _sentences(of_two_labels, "are the same image with different labels")
    report.notes += _sentences(of_one_label, "are the same image")


def _add_images_of_both(report: DataReport, seen: Mapping[str, Mapping[bytes, _Image]]) -> None:
    """Add the images that are in both training and evaluation."""
    train = seen.get("train", {})
    pairs = []
    for name, images in seen.items():
        if name == "train":
            continue
        for digest in train.keys() & images.keys():
            pairs.append((train[digest], images[digest]))
    pairs.sort(key=lambda pair: (pair[1].split, pair[1].position))
    report.problems += _sentences(pairs, "are the same image, in training and in evaluation")


def _sentences(pairs: Sequence[tuple[_Image, _Image]], what: str) -> list[str]:
    """Return a sentence about each of the first pairs, and a sentence with the number of further pairs."""
    sentences = [f"{one.path} and {other.path} {what}" for one, other in pairs[:MAX_PAIRS]]
    hidden = len(pairs) - MAX_PAIRS
    if hidden > 0:
        sentences.append(f"{hidden:,} more pairs {what}")
    return sentences


def _add_single_images(report: DataReport, name: str, index: ImageIndex) -> None:
    """Add the number of classes with one image."""
    classes, counts = np.unique(index.labels[index.labels != DISTRACTOR], return_counts=True)
    single = classes[counts == 1].tolist()
    if not single or not has_classes(index):
        return
    example = single[0]
    if index.names is not None:
        example = index.names[single[0]]
    effect = "has no positive in evaluation"
    if name == "train":
        effect = "is skipped in training batches of P classes with K images"
    report.notes.append(f"classes of {name} with one image: {len(single):,}, such as {example!r}, which {effect}")


def _add_sizes(report: DataReport, sizes: Sequence[tuple[int, int]]) -> None:
    """Add the range of the sizes."""
    if not sizes:
        return
    different = sorted(set(sizes))
    if len(different) == 1:
        width, height = different[0]
        report.notes.append(f"all images have {width} x {height} pixels")
        return
    shorter, longer = np.sort(np.array(sizes), axis=1).T
    sentences = []
    for side, lengths in (("shorter", shorter), ("longer", longer)):
        range_of_lengths = f"{lengths.min():,} to {lengths.max():,} pixels, median {int(np.median(lengths)):,}"
        sentences.append(f"the {side} side of the images has {range_of_lengths}")
    report.notes.append("; ".join(sentences))


def _add_cut_images(report: DataReport, sizes: Sequence[tuple[int, int]], preparation: Preparation) -> None:
    """Add the number of images that lose much to a centre crop because their shape is another one.

    The margin that a crop cuts from all images, such as 224 of 256 pixels, does not count.
    """
    if not sizes or preparation.crop_size is None or not isinstance(preparation.resized_to, int):
        return
    height, width = preparation.crop_size
    images = np.array(sizes, np.float64)
    relative = images[:, 0] * height / (images[:, 1] * width)  # the shape of the images in that of the crop
    kept = np.minimum(relative, 1 / relative)
    cut = int((kept < 1 - LARGEST_CUT).sum())
    if cut:
        report.notes.append(
            f"a centre crop of {width} x {height} pixels cuts more than a quarter of {cut:,} of {len(sizes):,} images, "
            'because of their shape; resize="fit" pads images instead of cropping them'
        )
