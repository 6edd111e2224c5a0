"""Reading and preparing JPEGs over Pillow's decoding alone, and ImageFolder beside torchvision's with a plain loader.

    python benchmarks/images.py
    python benchmarks/images.py --epoch

JPEGs of smooth noise are written to a temporary folder, so they are in the system's cache. An item is an image as a
tensor of uint8, as a run of a Trainer reads it: in evaluation with short side 256 and centre crop 224, in training with
a random crop and flip; "reduced scale" is the option of `Preparation`, where it has an effect. Pillow's decoding is
`Image.open(file).convert("RGB")`. The floor of full-scale reading is torchvision's `decode_image` of the file's bytes
and torch's `interpolate` to that short side, without anything else. The loaders make batches of 64 of the same images
in evaluation, ours with labels and ids and torchvision's with labels, and read in the training process. All functions
run in turn with one thread, and the times are CPU times; the ratios are medians of those of each turn. Takes about half
a minute.

`--epoch` times an epoch of the training loader with two workers instead, on 2,000 photographs of 8 megapixels and on
the copies that `lightning-retrieval shrink --size 288` writes, and the shrinking itself, by the wall clock. The
photographs are links to 20 files. Takes some minutes.
"""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import Timing, arguments, cpu_clock, environment, range_of, report, timed_in_turn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder as PlainFolder
from torchvision.io import ImageReadMode, decode_image

from lightning_retrieval.datamodules import ImageFolder, ImageSet, training_transform
from lightning_retrieval.datamodules.item_seeds import SeededIndex
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.pixels import resize_bilinear
from lightning_retrieval.preparation.shrink import shrink_images

SIZES = {(500, 400): 40, (1024, 768): 20, (3000, 2000): 4}  # number of images of this width and height
CLASSES = 4
PHOTOGRAPH, PHOTOGRAPHS, DIFFERENT = (3264, 2448), 2000, 20  # width and height, files, and different images


def write_images(folder: Path, width: int, height: int, count: int) -> None:
    """Write JPEGs of smooth noise, in class folders."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = random.integers(0, 256, (height // 5, width // 5, 3), dtype=np.uint8)
        file = folder / str(number % CLASSES) / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, quality=90)


def decode(files: list[Path]) -> None:
    for file in files:
        with Image.open(file) as image:
            image.convert("RGB")


def decode_and_resize(files: list[Path], short_side: int) -> None:
    for file in files:
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        pixels = decode_image(data, ImageReadMode.RGB)
        scale = short_side / min(pixels.shape[1:])
        size = [round(side * scale) for side in pixels.shape[1:]]
        resize_bilinear(pixels, *size)


def read(images: ImageSet, seeded: bool) -> None:
    for position in range(len(images)):
        images[SeededIndex(position, seed=position) if seeded else position]


def timing_of(turns: list[dict[str, float]], name: str) -> Timing:
    """The times of one function."""
    seconds = [turn[name] for turn in turns]
    return Timing(median(seconds), min(seconds), max(seconds), len(seconds))


def compare_reading(folder: Path, size: tuple[int, int], count: int, runs: int) -> list[dict[str, Any]]:
    """The rows of images of one size."""
    write_images(folder, *size, count)
    index = ImageFolder(folder, val_fraction=0.5).splits["train"]
    files = [folder / path for path in index.paths]
    functions: dict[str, Callable[[], Any]] = {
        "Pillow": partial(decode, files),
        "decoding and resizing alone": partial(decode_and_resize, files, 256),
    }
    preparations = {"": Preparation()}
    reduced = Preparation(reduced_scale=True)
    if reduced.least_size is not None and min(size) >= 2 * min(reduced.least_size):
        preparations[", reduced scale"] = reduced
    for suffix, preparation in preparations.items():
        evaluation = ImageSet(index, folder, preparation).in_uint8()
        training = ImageSet(index, folder, training_transform("plain", preparation)).in_uint8()
        functions[f"evaluation{suffix}"] = partial(read, evaluation, seeded=False)
        functions[f"training{suffix}"] = partial(read, training, seeded=True)
    turns = timed_in_turn(functions, runs, "cpu", clock=cpu_clock("cpu"))
    rows = []
    for what in list(functions)[1:]:
        row = {"what": what, "images": len(index), "size": f"{size[0]} x {size[1]}", "time": timing_of(turns, what)}
        rows.append({**row, **range_of("speed over decoding", [turn["Pillow"] / turn[what] for turn in turns])})
    return rows


def compare_loaders(folder: Path, runs: int) -> dict[str, Any]:
    """The row of the loaders of a folder."""
    preparation = Preparation()
    ours = ImageFolder(folder, val_fraction=0.5)
    images = ours.image_set(ours.splits["train"], ours.eval_transform).in_uint8()
    loaders = {
        "ours": DataLoader(images, 64, collate_fn=images.collate),
        "plain": DataLoader(PlainFolder(str(folder), preparation.to_uint8), 64),
    }
    functions: dict[str, Callable[[], Any]] = {
        name: lambda loader=loader: list(loader)  # type: ignore[misc]
        for name, loader in loaders.items()
    }
    turns = timed_in_turn(functions, runs, "cpu", clock=cpu_clock("cpu"))
    ratios = [turn["ours"] / turn["plain"] for turn in turns]
    row = {"what": "ImageFolder over torchvision's", "images": len(images), "time": timing_of(turns, "ours")}
    return {**row, **range_of("time over plain", ratios)}


def seconds_of_epoch(folder: Path) -> float:
    """The time of an epoch of the training loader."""
    settings = {"classes_per_batch": 2, "samples_per_class": 16, "num_workers": 2, "pin_memory": False}
    data = ImageFolder(folder, **settings)
    begin = perf_counter()
    for _ in data.train_dataloader():
        pass
    return perf_counter() - begin


def compare_epochs(folder: Path, size: tuple[int, int], count: int, different: int) -> list[dict[str, Any]]:
    """The rows of photographs, and of their copies with fewer pixels."""
    photographs, small = folder / "photographs", folder / "small"
    (photographs / "train").mkdir(parents=True)
    write_images(photographs / "train", *size, different)
    for number in range(different, count):
        source = photographs / "train" / str(number % CLASSES) / f"{number % different}.jpg"
        os.link(source, source.with_name(f"{number}.jpg"))
    (photographs / "test/other").mkdir(parents=True)
    os.link(photographs / "train/0/0.jpg", photographs / "test/other/0.jpg")
    rows = [{"what": "epoch, photographs", "seconds": seconds_of_epoch(photographs)}]
    begin = perf_counter()
    shrink_images(photographs, small, 288)
    rows.append({"what": "shrink", "seconds": perf_counter() - begin})
    rows.append({"what": "epoch, their copies", "seconds": seconds_of_epoch(small)})
    for row in rows:
        row |= {"images": count, "size": f"{size[0]} x {size[1]}"}
    return rows


def main() -> None:
    options = arguments(
        "Reading images over Pillow's decoding alone.",
        epoch="time an epoch of large photographs, and of smaller copies",
    )
    torch.set_num_threads(1)
    if options.epoch:
        size, count, different = PHOTOGRAPH, PHOTOGRAPHS, DIFFERENT
        if options.quick:
            size, count, different = (800, 600), 160, 8
        with tempfile.TemporaryDirectory() as name:
            rows = compare_epochs(Path(name), size, count, different)
        title = "An epoch of a training loader with two workers; wall clock"
        report(title, environment("cpu", "torchvision", "pillow"), rows, options.json)
        return
    sizes, runs = SIZES, 9
    if options.quick:
        sizes, runs = {(50, 40): 8}, 1
    rows = []
    loaders: list[dict[str, Any]] = []
    for size, count in sizes.items():
        with tempfile.TemporaryDirectory() as name:
            rows += compare_reading(Path(name), size, count, runs)
            if not loaders:
                loaders.append(compare_loaders(Path(name), runs))
    title = "Reading and preparing JPEGs; CPU time, one thread; median, lowest and highest ratio"
    report(title, environment("cpu", "torchvision", "pillow"), rows + loaders, options.json)


if __name__ == "__main__":
    main()
