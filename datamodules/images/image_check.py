"""Reads every image of a data set before training: which cannot be read, which occur twice, and their sizes."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm

from lightning_retrieval.checks import first_line
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.images.image_file import truncated_images
from lightning_retrieval.datamodules.images.image_index import DISTRACTOR, ImageIndex
from lightning_retrieval.datamodules.images.image_set import ImageSet

IMAGES_PER_TASK = 16  # that a thread reads before it takes the next ones
MAX_PAIRS = 5  # in the report


def count_images_and_classes(index: ImageIndex) -> tuple[int, int]:
    """The numbers of images and of classes of a split."""
    classes = np.unique(index.labels)
    return len(index), int((classes != DISTRACTOR).sum())


def look_for_files(report: DataReport, name: str, index: ImageIndex, root: Path) -> None:
    """Add the files that are missing in a split, and the number of those that are listed twice, to a report.

    Args:
        report: to which they are added.
        name: of the split.
        index: its images.
        root: the folder that the paths are relative to.
    """
    for path in Tqdm(index.paths, desc=f"Looking for the images of {name}", delay=2, leave=False):
        if not (root / path).is_file():
            report.missing_files.append(path)
    duplicates = len(index) - len(set(index.paths))
    if duplicates and index.boxes is None:
        report.problems.append(f"{duplicates} paths are listed twice in {name}")


@dataclass
class ImageFacts:
    """What was found out about one image.

    Args:
        size: width and height of the upright image, in its box.
        digest: a hash of its size and its pixels; images with the same digest look the same.
        is_missing: whether there is no file.
        error: why it cannot be decoded, or None.
    """

    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    is_missing: bool = False
    error: str | None = None


@dataclass
class _Image:
    """An image that can be read, with its split and its position there."""

    split: str
    position: int
    path: str


def read_facts(images: ImageSet, position: int) -> ImageFacts:
    """Read one image."""
    file: Path | BinaryIO | None = None
    try:
        file = images.file(position)
        is_missing = isinstance(file, Path) and not file.is_file()
    except (OSError, ValueError):  # a row without an image
        is_missing = True
    if is_missing:
        return ImageFacts(is_missing=True)
    try:
        image = images.read(position)
    except Exception as error:  # the decoders do not document the types of their errors
        return ImageFacts(error=_without_file(first_line(error), file))
    pixels = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
    pixels.update(image.tobytes())
    return ImageFacts(size=image.size, digest=pixels.digest())


def check_contents(report: DataReport, sets: Mapping[str, ImageSet]) -> None:
    """Read all images, and add what is found to a report.

    Problems are files that are missing or cannot be decoded, images that are in training and in evaluation, and images
    with two labels in one split. Notes are the sizes of the images, classes with one image, and images that occur twice
    in a class. Images are the same if their pixels are, whatever the format of the files.

    Args:
        report: receives the findings.
        sets: the images of each split.
    """
    sizes: list[tuple[int, int]] = []
    seen: dict[str, dict[bytes, _Image]] = {}
    for name, images in sets.items():
        first = seen.setdefault(name, {})
        repeated: list[tuple[_Image, _Image]] = []
        for position, facts in enumerate(_read_all(name, images)):
            image = _Image(name, position, images.index.paths[position])
            if facts.is_missing:
                report.missing_files.append(image.path)
            elif facts.error is not None:
                report.unreadable_files.append(f"{image.path} ({facts.error})")
            else:
                sizes.append(facts.size)
                other = first.setdefault(facts.digest, image)
                if other is not image:
                    repeated.append((other, image))
        _add_repeated(report, images.index, repeated)
        _add_single_images(report, name, images.index)
    _add_images_of_both(report, seen)
    _add_sizes(report, sizes)


def _read_all(name: str, images: ImageSet) -> Iterator[ImageFacts]:
    """The facts of each image in order. Decoders and hashes run beside each other in threads."""
    starts = range(0, len(images), IMAGES_PER_TASK)
    pool = ThreadPoolExecutor(_cores())
    # Pillow's setting for truncated files is one of the process: it must not change while another thread reads.
    with truncated_images(images.load_truncated), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about the metadata of single files
        progress = Tqdm(total=len(images), desc=f"Reading the images of {name}", delay=2, leave=False)
        try:
            for facts in pool.map(lambda start: _read_some(images, start), starts):
                progress.update(len(facts))
                yield from facts
        finally:
            pool.shutdown(cancel_futures=True)
            progress.close()


def _read_some(images: ImageSet, start: int) -> list[ImageFacts]:
    positions = range(start, min(start + IMAGES_PER_TASK, len(images)))
    return [read_facts(images, position) for position in positions]


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _without_file(message: str, file: Path | BinaryIO | None) -> str:
    """The message without the name of the file, which stands before it in the report."""
    if isinstance(file, Path):
        return message.replace(f" {str(file)!r}", "")
    return message.split(" <_io.")[0]


def _add_repeated(report: DataReport, index: ImageIndex, repeated: Sequence[tuple[_Image, _Image]]) -> None:
    """Add the images that a split has twice: they are a problem if their labels differ, else worth a note."""
    of_two_labels, of_one_label = [], []
    for pair in repeated:
        one, other = pair
        if index.labels[one.position] == index.labels[other.position]:
            of_one_label.append(pair)
        else:
            of_two_labels.append(pair)
    report.problems += _sentences(of_two_labels, "are the same image with different labels")
    report.notes += _sentences(of_one_label, "are the same image")


def _add_images_of_both(report: DataReport, seen: Mapping[str, Mapping[bytes, _Image]]) -> None:
    """Add the images that are in training and in evaluation."""
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
    """A sentence about each of the first pairs, and one that counts the others."""
    sentences = [f"{one.path} and {other.path} {what}" for one, other in pairs[:MAX_PAIRS]]
    hidden = len(pairs) - MAX_PAIRS
    if hidden > 0:
        sentences.append(f"{hidden:,} more pairs {what}")
    return sentences


def _add_single_images(report: DataReport, name: str, index: ImageIndex) -> None:
    """Add the number of classes with one image."""
    classes, counts = np.unique(index.labels[index.labels != DISTRACTOR], return_counts=True)
    single = classes[counts == 1].tolist()
    if not single:
        return
    example = single[0]
    if index.names is not None:
        example = index.names[single[0]]
    effect = "has no positive in evaluation"
    if name == "train":
        effect = "is left out of training batches of P classes with K images"
    report.notes.append(f"{len(single):,} classes of {name} have one image, such as {example!r}, which {effect}")


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
