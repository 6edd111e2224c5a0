"""Time and memory of the report of a model's errors, without the embedding of the images.

    python benchmarks/error_report.py

The embeddings are class centres with noise, an image is a file of 128 x 128 pixels, and 1 label in 900 is wrong. The
times are those of finding all errors and of writing the page with its pictures and the table. The memory is the largest
resident size of the process, with torch and the embeddings. It takes a minute on two cores.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import Timing, arguments, environment, report

from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.ranking.rows import normalize
from lightning_retrieval.search.commands.embedding import EmbeddedImages, ListedImages
from lightning_retrieval.search.commands.report import LabelledImages, find_in
from lightning_retrieval.search.report.files import write_report

DIM, OF_CLASS, NOISE, IMAGES_PER_WRONG_LABEL, FILES, SIDE, MIB = 512, 12, 1.2, 900, 200, 128, 1 << 20


def labelled_images(folder: Path, count: int) -> tuple[LabelledImages, EmbeddedImages, int]:
    """Images with their embeddings, and the number of wrong labels. All images are links to a few files."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(count) // OF_CLASS
    centres = torch.randn(int(classes.max()) + 1, DIM, generator=generator)
    embeddings = normalize(centres[classes] + NOISE * torch.randn(count, DIM, generator=generator))
    wrong = torch.randperm(count, generator=generator)[: count // IMAGES_PER_WRONG_LABEL]
    labels = classes.clone()
    labels[wrong] = (classes[wrong] + 1 + wrong % 7) % len(centres)
    for number in range(FILES):
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    paths = [f"{position}.jpg" for position in range(count)]
    for position in range(FILES, count):
        (folder / paths[position]).symlink_to(f"{position % FILES}.jpg")
    listed = ListedImages(folder, ImageIndex(paths, labels.numpy()), [None] * count)
    names = [f"class {label}" for label in range(len(centres))]
    return LabelledImages(listed, names, None), EmbeddedImages(torch.arange(count), embeddings, []), len(wrong)


def measure(count: int) -> dict[str, Any]:
    """A line of the table."""
    import resource  # Windows has no such module

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        labelled, embedded, wrong = labelled_images(folder, count)
        start = time.perf_counter()
        found = find_in(labelled, embedded, 0.05)
        middle = time.perf_counter()
        missing = write_report(folder / "report.html", found, labelled.as_reported(), title="benchmark", about="")
        end = time.perf_counter()
        assert not missing
        size = (folder / "report.html").stat().st_size / MIB
    return {
        "images": count,
        "find errors": once(middle - start),
        "write": once(end - middle),
        "page in MiB": size,
        "resident MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "wrong labels": wrong,
        "named as mislabelled": len(found.suspects),
    }


def once(seconds: float) -> Timing:
    """The time of a single run."""
    return Timing(seconds, seconds, seconds, 1)


def main() -> None:
    options = arguments("The report of a model's errors.")
    count = 18_000
    if options.quick:
        count = 2_000
    title = f"report of {count} embeddings, D = {DIM}, {OF_CLASS} images in a class"
    report(title, environment("cpu", "pillow"), [measure(count)], options.json)


if __name__ == "__main__":
    main()
