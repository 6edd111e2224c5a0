"""Throughput of reading image files, and time and memory of indexing a list of 3.3 million images.

    python benchmarks/data.py

Reading: JPEGs of 500 x 400 pixels are written to a temporary folder, so they are in the system's cache. They are
decoded, transformed as for training (short side 256, random crop 224, flip) and collected in batches of 64. This is
done by the training process, with the stated number of threads, or by workers with one thread each, which have been
started before.

Indexing: lists like those of VGGFace2 are read, with and without their loose boxes.
The memory is the peak above the memory used before. This takes about four minutes on two cores.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timing import arguments, environment, interleaved, peak_added_memory, report
from torch.utils.data import DataLoader

from lightning_retrieval.datamodules import ImageIndex, ImageSet, training_transform
from lightning_retrieval.datamodules.readers.vgg_face2 import VGGFace2

MIB = 1 << 20
WORKERS = (0, 2)
PEOPLE, PICTURES = {"train": 8_631, "test": 500}, 363  # of each: 3,314,553 in all


def write_images(folder: Path, count: int) -> list[str]:
    """Write JPEGs of smooth noise, about 50 kB each."""
    random = np.random.default_rng(0)
    for i in range(count):
        coarse = random.integers(0, 256, (80, 100, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((500, 400), Image.Resampling.BICUBIC).save(folder / f"{i}.jpg", quality=90)
    return [f"{i}.jpg" for i in range(count)]


def reader(paths: list[str], folder: Path, workers: int) -> Callable[[], int]:
    """Return a function that reads all images once."""
    labels = np.arange(len(paths)) % len(set(paths))  # the same for each copy of an image
    images = ImageSet(ImageIndex(paths, labels), folder, training_transform("plain"))
    loader: DataLoader[Any] = DataLoader(
        images, 64, num_workers=workers, persistent_workers=workers > 0, collate_fn=images.collate
    )
    return lambda: sum(len(batch["ids"]) for batch in loader)


def stems(split: str, pictures: int) -> Iterator[str]:
    begin = 0 if split == "train" else PEOPLE["train"]
    people = range(begin, begin + PEOPLE[split])
    return (f"n{person:06}/{i:04}_01" for person, i in itertools.product(people, range(pictures)))


def write_lists(root: Path, pictures: int) -> None:
    """Write lists and boxes like those of VGGFace2."""
    for folder in ("meta", "bb_landmark"):
        (root / folder).mkdir()
    for split in PEOPLE:
        with (root / "meta" / f"{split}_list.txt").open("w") as lines:
            lines.writelines(f"{stem}.jpg\n" for stem in stems(split, pictures))
        with (root / "bb_landmark" / f"loose_bb_{split}.csv").open("w") as lines:
            lines.write("NAME_ID,X,Y,W,H\n")
            lines.writelines(f'"{stem}",-3,12,{100 + i % 50},140\n' for i, stem in enumerate(stems(split, pictures)))


def indexing(root: Path, boxes: bool) -> Callable[[], int]:
    """Return a function that indexes both splits."""
    return lambda: sum(map(len, VGGFace2(root, boxes=boxes).splits.values()))


def main() -> None:
    options = arguments("Images per second, and indexing 3.3 million of them.")
    quick = options.quick
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_images(folder, 8 if quick else 200) * (2 if quick else 5)
        readers = {f"{workers} workers": reader(paths, folder, workers) for workers in WORKERS}
        timings = interleaved(readers, 1 if quick else 3, "cpu")
        readers.clear()  # stops the workers
        for what, timing in timings.items():
            rows.append(
                {
                    "what": f"reading, {what}",
                    "images": len(paths),
                    "time": timing,
                    "images per second": len(paths) / timing.median,
                }
            )
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_lists(root, 1 if quick else PICTURES)
        for boxes in (False, True):
            what = "indexing, boxes" if boxes else "indexing"
            timing = interleaved({what: indexing(root, boxes)}, 1 if quick else 3, "cpu", warm_up=0)[what]
            images = sum(PEOPLE.values()) * (1 if quick else PICTURES)
            rows.append(
                {
                    "what": what,
                    "images": images,
                    "time": timing,
                    "images per second": images / timing.median,
                    "added MiB": peak_added_memory(indexing, "cpu", root, boxes) / MIB,
                }
            )
    title = "Reading and indexing images; median (lowest to highest)"
    report(title, environment("cpu", "torchvision", "pillow", "numpy"), rows, options.json)


if __name__ == "__main__":
    main()
